"""Tells what is newer than the pins, and runs the tests with it.

Exit codes: 0 everything passed, 1 a test failed, 2 the newest versions cannot be installed together or built.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from pathlib import Path

from canary.versions import FRAMEWORKS, Change, find_changes, loosen_pins, newest_release, read_pins
from testbed.components import KUBERNETES_VERSION
from testbed.errors import TestbedError
from testbed.paths import cache_dir
from testbed.shell import run

ROOT = Path(__file__).parents[1]


def main() -> int:
    """Return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m canary", description=__doc__)
    parser.add_argument("--uv", type=Path, required=True, help="the package installer")
    parser.add_argument("--list", action="store_true", help="only tell what is newer")
    parser.add_argument("--frameworks-only", action="store_true", help="leave Kubernetes as it is pinned")
    parser.add_argument(
        "tests", nargs="*", default=["tests/engine"], help="arguments of pytest (default: tests/engine)"
    )
    options = parser.parse_args()
    try:
        return _run(options)
    except TestbedError as error:
        print(f"canary: {error}", file=sys.stderr)
        return 2


def _run(options: argparse.Namespace) -> int:
    lock = _resolve(options.uv)
    pinned = read_pins((ROOT / "requirements.lock").read_text(encoding="utf-8").splitlines())
    changes = find_changes(pinned, read_pins(lock.read_text(encoding="utf-8").splitlines()))
    kubernetes = None if options.frameworks_only else _newest_kubernetes()
    if kubernetes not in (None, KUBERNETES_VERSION):
        changes.append(Change("kubernetes", KUBERNETES_VERSION, kubernetes))
    _print_changes(changes)
    if options.list:
        return 0
    python = _install(options.uv, lock)
    failed = [] if _passes(python, options.tests) else ["the engine tier"]
    if kubernetes not in (None, KUBERNETES_VERSION) and not _passes_with_kubernetes(kubernetes):
        failed.append(f"the tests with an API server {kubernetes}")
    _print_changes(changes)
    print(f"canary: {' and '.join(failed)} failed" if failed else "canary: everything passed", flush=True)
    return 1 if failed else 0


def _print_changes(changes: list[Change]) -> None:
    frameworks = [change for change in changes if change.name in FRAMEWORKS or change.name == "kubernetes"]
    print(f"canary: {len(changes)} packages are not as pinned, {len(frameworks)} of them frameworks or Kubernetes")
    for change in changes:
        print(f"  {change}")
    sys.stdout.flush()


def _resolve(uv: Path) -> Path:
    """Write the newest versions that go together into a lock file, and return its path."""
    folder = cache_dir() / "canary"
    folder.mkdir(parents=True, exist_ok=True)
    wanted, lock = folder / "requirements.in", folder / "requirements.lock"
    wanted.write_text("\n".join(loosen_pins(ROOT / "pyproject.toml")) + "\n", encoding="utf-8")
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    options = ("--no-emit-index-url", "--no-annotate", "--no-header", "--upgrade", "--python-version", version)
    run(uv, "pip", "compile", "-q", *options, wanted, "-o", lock)
    return lock


def _install(uv: Path, lock: Path) -> Path:
    """Make a virtual environment of exactly these versions beside the lock file; return its Python."""
    venv = lock.parent / "venv"
    python = venv / "bin/python"
    os.environ["DS_BUILD_OPS"] = "0"
    run(uv, "venv", "-q", "--allow-existing", "--python", sys.executable, venv)
    run(uv, "pip", "sync", "-q", "--python", python, lock)
    run(uv, "pip", "install", "-q", "--python", python, "--no-deps", "-e", ROOT)
    return python


def _newest_kubernetes() -> str | None:
    listed = run("go", "list", "-m", "-versions", "k8s.io/kubernetes", cwd=Path("/"), check=False)
    return newest_release(listed.split())


def _passes(python: Path, tests: list[str], **environment: str) -> bool:
    # Extensions are compiled for one version of torch.
    extensions = {"TORCH_EXTENSIONS_DIR": str(cache_dir() / "canary/torch_extensions")}
    done = subprocess.run(
        [python, "-m", "pytest", *tests], cwd=ROOT, env={**os.environ, **extensions, **environment}, check=False
    )
    return done.returncode == 0


def _passes_with_kubernetes(version: str) -> bool:
    environment = {"ETJ_KUBERNETES_VERSION": version}
    fetched = subprocess.run(
        [sys.executable, "-m", "testbed", "fetch"], cwd=ROOT, env={**os.environ, **environment}, check=False
    )
    if fetched.returncode:
        raise TestbedError(f"Kubernetes {version} cannot be had: see the messages above")
    return _passes(Path(sys.executable), ["tests/cluster", "-m", "own_api_server"], **environment)


if __name__ == "__main__":
    sys.exit(main())
