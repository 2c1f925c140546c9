"""helm: the one on the PATH, else from the cache, else the official download, else built from its Go module.

`python -m testbed.helm ARGUMENTS` runs it.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from testbed import components
from testbed.errors import TestbedError
from testbed.paths import cache_dir
from testbed.shell import say

VERSION = components.HELM_VERSION
"""Of the one that is fetched."""

OLDEST = (3, 18)
"""Of the one on the PATH. Older ones take no ownership, and say something else about values."""

_URL = f"https://get.helm.sh/helm-v{VERSION}-linux-amd64.tar.gz"
_MODULE = "helm.sh/helm/v4"
_RUN_SECONDS = 240


class HelmError(TestbedError):
    """helm failed; the text names the command and ends with helm's output."""


def run(
    *arguments: str | Path,
    namespace: str | None = None,
    kubeconfig: Path | None = None,
    values: Mapping[str, Any] | None = None,
) -> str:
    """Run helm and return what it prints.

    Args:
        arguments: command and options, for instance `"uninstall", "name", "--wait"`.
        namespace: of the release.
        kubeconfig: credentials of the cluster; not needed by commands that render.
        values: of the chart, beside those of `--values` among the arguments.

    Raises:
        HelmError: it failed.
        TestbedError: there is no helm.
    """
    command = [str(item) for item in (ensure(), *arguments)]
    command += ["--namespace", namespace] if namespace is not None else []
    command += ["--kubeconfig", str(kubeconfig)] if kubeconfig is not None else []
    command += ["--values", "-"] if values is not None else []
    text = yaml.safe_dump(dict(values)) if values is not None else None
    done = subprocess.run(command, input=text, capture_output=True, text=True, check=False, timeout=_RUN_SECONDS)
    if done.returncode:
        raise HelmError(f"`helm {arguments[0]}` ended with {done.returncode}: {done.stderr.strip()}")
    return done.stdout


def ensure() -> Path:
    """Path of a helm that works.

    Raises:
        TestbedError: there is none, and it can neither be downloaded nor built.
    """
    found = shutil.which("helm")
    if found and version(found) >= OLDEST:
        return Path(found)
    program = cache_dir() / f"helm-{VERSION}" / "helm"
    if not program.exists():
        program.parent.mkdir(parents=True, exist_ok=True)
        _download(program) if components.reachable("https://get.helm.sh/") else _build(program)
    return program


def version(program: str | Path) -> tuple[int, int]:
    """Major and minor version of a helm; (0, 0) if it does not tell."""
    command = [program, "version", "--template", "{{.Version}}"]
    text = subprocess.run(command, capture_output=True, text=True, check=False).stdout
    found = re.match(r"v(\d+)\.(\d+)\.", text.strip())
    return (int(found[1]), int(found[2])) if found else (0, 0)


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
    stamps = {f"{_MODULE}/internal/version.version": f"v{VERSION}"}
    version = components.DEFAULT_KUBERNETES_VERSION
    components.build_go_programs({program: components.HELM_PACKAGE}, stamps, version=version)


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
