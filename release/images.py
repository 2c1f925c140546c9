"""The images of a release: by a builder for every platform it can, else by the test bed's layout for this machine's.

What cannot be built is not an error: it is returned with the reason, and `make release` prints it.
"""

from __future__ import annotations

import dataclasses
import os
import platform
import subprocess
import sys
from pathlib import Path

from release.build import ReleaseError, find_differences

PLATFORMS = ("linux/amd64", "linux/arm64")
IMAGES = ("operator", "reshard")
"""Of a release; the example is built by its users, on a base with torch for their GPUs."""

_MACHINES = {"x86_64": "linux/amd64", "aarch64": "linux/arm64"}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LeftOut:
    """What was not built, and why."""

    what: str
    reason: str


def build_images(sources: tuple[Path, Path], target: Path, *, uv: Path, revision: str) -> list[LeftOut]:
    """Write OCI archives of the images; return what was left out.

    Args:
        sources: two copies of the commit. A builder uses the first; a build without one is made from both and compared.
        target: folder of the archives.
        uv: the package installer, for builds without a builder.
        revision: the commit, which the images name.

    Raises:
        ReleaseError: a build failed, or two builds differ.
    """
    asked = _build_script(sources[0], "--platforms", PLATFORMS=",".join(PLATFORMS))
    if asked.returncode:
        return _build_layouts(sources, target, uv=uv, reason=asked.stderr.splitlines()[0].removeprefix("images: "))
    able = asked.stdout.split()
    reasons = dict(line.removeprefix("images: ").split(": ", 1) for line in asked.stderr.splitlines())
    if able:
        done = _build_script(sources[0], *IMAGES, PLATFORMS=",".join(able), ARCHIVES=str(target), REVISION=revision)
        if done.returncode:
            raise ReleaseError(f"images/build.sh failed with exit code {done.returncode}:\n{done.stderr[-4000:]}")
    return [LeftOut(what=f"images for {name}", reason=reasons[name]) for name in PLATFORMS if name not in able]


def _build_layouts(sources: tuple[Path, Path], target: Path, *, uv: Path, reason: str) -> list[LeftOut]:
    """Build without a builder, for the platform of this machine only, twice and from nothing."""
    here = _MACHINES.get(platform.machine()) if sys.platform == "linux" else None
    if here is not None:
        made = [_build_layout(source, here, uv=uv) for source in sources]
        if find_differences([made[0]], [made[1]]):
            raise ReleaseError(f"expected the same bytes twice, found differences in {made[0].name}")
        made[0].rename(target / made[0].name)
    return [
        LeftOut(
            what=f"images for {name}", reason=f"{reason} Without them, only this machine's own platform can be built"
        )
        for name in PLATFORMS
        if name != here
    ]


def _build_layout(source: Path, here: str, *, uv: Path) -> Path:
    archive = source.parent / f"{source.name}.images" / f"elastic-training-images-{here.replace('/', '-')}.oci.tar"
    archive.parent.mkdir()
    # A cache of its own: layers of the other build would be equal by definition.
    cache = source.parent / f"{source.name}.cache"
    variables = {**os.environ, "ETJ_CACHE_DIR": str(cache), "PATH": f"{uv.parent.absolute()}:{os.environ['PATH']}"}
    variables.pop("PYTHONPATH", None)
    command = [sys.executable, "-m", "testbed", "images", "--archive", str(archive)]
    done = subprocess.run(command, cwd=source, env=variables, capture_output=True, text=True, check=False)
    if done.returncode:
        raise ReleaseError(f"python -m testbed images failed with exit code {done.returncode}:\n{done.stderr[-4000:]}")
    return archive


def _build_script(source: Path, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    command = [str(source / "images/build.sh"), *arguments]
    return subprocess.run(command, env={**os.environ, **variables}, capture_output=True, text=True, check=False)
