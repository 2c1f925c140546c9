"""Makes the files of a release from one commit, in a copy of it, so that nothing else in the checkout gets in."""

from __future__ import annotations

import hashlib
import io
import json
import os
import subprocess
import sys
import tarfile
import tomllib
from collections.abc import Sequence
from pathlib import Path

import yaml

from release.archive import pack_chart
from release.chart_layout import pack_layout
from release.pins import read_versions
from release.sbom import make_sbom

CHART = Path("charts/elastic-training-operator")
IMAGES = ("operator", "reshard", "example")
CHECKSUMS = "SHA256SUMS"


class ReleaseError(Exception):
    """The release cannot be made; the text says what to do."""


def build_release(
    checkout: Path, scratch: Path, target: Path, *, uv: Path, plugin: Sequence[str], commit: str = "HEAD"
) -> list[Path]:
    """Build everything of a commit; return the files, sorted by name.

    Args:
        checkout: a git checkout.
        scratch: an empty folder for the copy of the commit.
        target: an empty folder for the files.
        uv: the package installer, which builds wheel and sdist with pinned versions.
        plugin: options of `python -m krew.build`, which say where compiled modules come from.
        commit: what to release.
    """
    epoch = int(_git(checkout, "log", "-1", "--format=%ct", commit))
    with tarfile.open(fileobj=io.BytesIO(_git(checkout, "archive", "--format=tar", commit))) as archive:
        archive.extractall(scratch, filter="data")
    name, version = read_version(scratch)
    _build_distributions(scratch, target, uv=uv, epoch=epoch)
    pack_layout(pack_chart(scratch / CHART, target, epoch=epoch), target, epoch=epoch)
    _run([sys.executable, "-m", "krew.build", "--out", str(target), *plugin], folder=scratch)
    pins = {image: read_versions(scratch / "images" / image / "requirements.txt") for image in IMAGES}
    bill = make_sbom(name, version, pins, epoch=epoch, files=tuple(sorted(target.iterdir())))
    (target / f"{name}-{version}.cdx.json").write_text(json.dumps(bill, indent=2) + "\n", encoding="utf-8")
    write_checksums(target)
    return sorted(target.iterdir())


def write_checksums(folder: Path) -> None:
    """Write the file that lists the digests of all others in a folder, as `sha256sum --check` reads it."""
    lines = [f"{digest(path)}  {path.name}\n" for path in sorted(folder.iterdir()) if path.name != CHECKSUMS]
    (folder / CHECKSUMS).write_text("".join(lines), encoding="utf-8")


def read_revision(checkout: Path, commit: str) -> str:
    """Return the full name of a commit."""
    return _git(checkout, "rev-parse", f"{commit}^{{commit}}").decode().strip()


def read_version(checkout: Path) -> tuple[str, str]:
    """Return name and version of the distribution.

    Raises:
        ReleaseError: the chart has another version.
    """
    project = tomllib.loads((checkout / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    chart = yaml.safe_load((checkout / CHART / "Chart.yaml").read_text(encoding="utf-8"))
    name, version = str(project["name"]), str(project["version"])
    if (chart["version"], chart["appVersion"]) != (version, version):
        raise ReleaseError(
            f"{CHART}/Chart.yaml: expected version and appVersion {version} as in pyproject.toml, found "
            f"{chart['version']} and {chart['appVersion']}: make them equal"
        )
    return name, version


def find_differences(first: list[Path], second: list[Path]) -> list[str]:
    """Return the names of files that are in one list only, or differ in a byte."""
    left, right = ({path.name: digest(path) for path in files} for files in (first, second))
    return sorted(name for name in left.keys() | right.keys() if left.get(name) != right.get(name))


def digest(path: Path) -> str:
    """Return the SHA-256 of a file in hexadecimal digits."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _build_distributions(source: Path, target: Path, *, uv: Path, epoch: int) -> None:
    pins = source / "release/build-requirements.txt"
    options = ["--quiet", "--sdist", "--wheel", "--require-hashes", "--build-constraints", str(pins)]
    command = [str(uv), "build", *options, "--out-dir"]
    _run([*command, str(target), str(source)], folder=source, SOURCE_DATE_EPOCH=str(epoch))
    (target / ".gitignore").unlink(missing_ok=True)  # uv's own


def _run(command: list[str], *, folder: Path, **environment: str) -> None:
    # Without this umask, modes of files in the sdist depend on that of whoever builds it.
    variables = {**os.environ, **environment}
    done = subprocess.run(command, cwd=folder, env=variables, umask=0o022, capture_output=True, text=True, check=False)
    if done.returncode:
        raise ReleaseError(f"{' '.join(command)} failed with exit code {done.returncode}:\n{done.stderr[-4000:]}")


def _git(checkout: Path, *arguments: str) -> bytes:
    done = subprocess.run(["git", "-C", str(checkout), *arguments], capture_output=True, check=False)
    if done.returncode:
        raise ReleaseError(f"git {' '.join(arguments)} failed: {done.stderr.decode(errors='replace')[-1000:]}")
    return done.stdout
