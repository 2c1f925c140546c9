"""helm: the one on the PATH, else from the cache, else the official download, else built from its Go module.

`python -m testbed.helm ARGUMENTS` runs it.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

from testbed import components
from testbed.errors import TestbedError
from testbed.paths import cache_dir
from testbed.shell import run_with_progress, say

VERSION = "4.3.1"
"""Of the one that is fetched; from the PATH, any of these majors will do."""

MAJORS = ("3", "4")
_URL = f"https://get.helm.sh/helm-v{VERSION}-linux-amd64.tar.gz"
_MODULE = "helm.sh/helm/v4"


def ensure() -> Path:
    """Path of a helm that works.

    Raises:
        TestbedError: there is none, and it can neither be downloaded nor built.
    """
    found = shutil.which("helm")
    if found and _major(found) in MAJORS:
        return Path(found)
    program = cache_dir() / f"helm-{VERSION}" / "helm"
    if not program.exists():
        program.parent.mkdir(parents=True, exist_ok=True)
        _download(program) if components.reachable("https://get.helm.sh/") else _build(program)
    return program


def _major(program: str) -> str:
    done = subprocess.run(
        [program, "version", "--template", "{{.Version}}"], capture_output=True, text=True, check=False
    )
    return done.stdout.strip().removeprefix("v").partition(".")[0]


def _download(program: Path) -> None:
    say(f"downloading helm {VERSION}")
    with tempfile.TemporaryDirectory(dir=program.parent) as folder:
        archive = Path(folder) / "helm.tar.gz"
        components.check(_URL, f"{_URL}.sha256sum", components.fetch(_URL, archive))
        with tarfile.open(archive) as tar:
            content = tar.extractfile("linux-amd64/helm")
            assert content is not None
            (Path(folder) / "helm").write_bytes(content.read())
        components.place(Path(folder) / "helm", program)


def _build(program: Path) -> None:
    """Four minutes on two cores the first time, seconds with Go's own cache."""
    if shutil.which("go") is None:
        raise TestbedError("helm is neither on the PATH nor can it be downloaded, and there is no Go to build it with")
    with tempfile.TemporaryDirectory(dir=program.parent) as folder:
        env = {**os.environ, "GOFLAGS": "-buildvcs=false", "CGO_ENABLED": "0", "GOBIN": folder}
        flags = f"-s -w -X {_MODULE}/internal/version.version=v{VERSION}"
        command = ["go", "install", "-trimpath", "-ldflags", flags, f"{_MODULE}/cmd/helm@v{VERSION}"]
        run_with_progress(f"building helm {VERSION}", command, cwd=Path(folder), env=env, log=Path(folder) / "log")
        components.place(Path(folder) / "helm", program)


def main() -> int:
    """Run helm with the arguments of this process."""
    try:
        program = ensure()
    except TestbedError as error:
        sys.stderr.write(f"testbed: {error}\n")
        return 1
    return subprocess.call([program, *sys.argv[1:]])


if __name__ == "__main__":
    sys.exit(main())
