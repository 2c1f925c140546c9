"""DeepSpeed's operators for the CPU: compiled before anybody waits for them, and never waited for in vain.

torch (2.13, torch/utils/file_baton.py) lets one process at a time compile an extension: the one that has made the file
`lock` in the extension's folder, and holds it open. The others wait until it is gone, without an end: a lock that a
killed process has left stops every later one, in whatever checkout or pod.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

from testbed.errors import TestbedError
from testbed.paths import cache_dir

COMPILE_SECONDS = 900  # three of them, on two processors that do other things too: 165 s measured alone
_BETWEEN_LOOKS_SECONDS = 0.5
_GUARD_SECONDS = 2.0
_COMPILE = """
from deepspeed.ops.op_builder.cpu import CPUAdamBuilder, FusedAdamBuilder, ShareMemCommBuilder
for builder in (ShareMemCommBuilder, FusedAdamBuilder, CPUAdamBuilder):
    builder().load(verbose=False)
"""


def folder() -> Path:
    """Return the folder in which torch keeps compiled extensions; pods of the test bed mount it."""
    return Path(os.environ.get("TORCH_EXTENSIONS_DIR") or cache_dir() / "torch_extensions")


def search_path() -> str:
    """Return PATH with this virtual environment first, as in the pods of `podenv.host_python`.

    A pod has no compiler, and another version of ninja compiles everything again.
    """
    return os.pathsep.join((str(Path(sys.executable).parent), os.environ.get("PATH", "")))


def compile_all() -> None:
    """Compile what is not there yet, or was compiled for another checkout.

    Raises:
        TestbedError: there is no compiler, or it failed, or it took longer than `COMPILE_SECONDS`.
    """
    remove_abandoned_locks(folder())
    stamp = folder() / "sources.sha256"
    digest = date_back_known_sources(_find_sources(), stamp)
    environment = {**os.environ, "TORCH_EXTENSIONS_DIR": str(folder()), "DS_ACCELERATOR": "cpu", "PATH": search_path()}
    try:
        command = [sys.executable, "-c", _COMPILE]
        code = subprocess.run(command, check=False, env=environment, timeout=COMPILE_SECONDS).returncode
    except subprocess.TimeoutExpired:
        code = None
    if code != 0:
        remove_abandoned_locks(folder())
        what = f"took longer than {COMPILE_SECONDS} s" if code is None else f"ended with {code}"
        raise TestbedError(f"compiling DeepSpeed's operators for the CPU {what}; every rank will try it by itself")
    stamp.write_text(digest)


def date_back_known_sources(sources: Path, stamp: Path) -> str:
    """Give sources that were compiled already an old date, and return their digest.

    An installation dates them anew, and ninja compiles whatever is newer than its result.

    Args:
        sources: their folder.
        stamp: file with the digest of the sources that were compiled.
    """
    files = sorted(path for path in sources.rglob("*") if path.is_file())
    digest = hashlib.sha256()
    for path in files:
        digest.update(f"{path.relative_to(sources)}\0{path.stat().st_size}\0".encode() + path.read_bytes())
    if stamp.exists() and stamp.read_text() == digest.hexdigest():
        for path in files:
            os.utime(path, (0, 0))
    return digest.hexdigest()


def _find_sources() -> Path:
    spec = importlib.util.find_spec("deepspeed")
    if spec is None or spec.origin is None:
        raise TestbedError("DeepSpeed is not installed: expected the environment of `make setup`")
    return Path(spec.origin).parent / "ops/csrc"


@contextlib.contextmanager
def guard_locks() -> Iterator[None]:
    """Remove abandoned locks every two seconds, for the time of the context.

    Tests kill ranks at any moment. A rank that is killed while it holds a lock leaves the lock behind, and every rank
    that starts later, in any tier, would wait for ever.
    """
    ended = threading.Event()

    def watch() -> None:
        while not ended.wait(_GUARD_SECONDS):
            remove_abandoned_locks(folder())

    thread = threading.Thread(target=watch, name="extension-locks", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def remove_abandoned_locks(extensions: Path) -> list[Path]:
    """Remove the locks that no process of this machine holds open, those in its containers included."""
    suspects = _not_held(extensions.glob("*/lock"))
    if suspects:
        time.sleep(_BETWEEN_LOOKS_SECONDS)  # torch closes its lock before it removes it
    abandoned = [path for path, identity in _not_held(suspects).items() if suspects[path] == identity]
    for path in abandoned:
        path.unlink(missing_ok=True)
    return abandoned


def _not_held(locks: Iterable[Path]) -> dict[Path, tuple[int, int]]:
    """Device and inode of the locks that are there and that nobody holds open; only root sees what others hold."""
    found = {}
    for path in locks:
        with contextlib.suppress(FileNotFoundError):
            if os.geteuid() in (0, path.stat().st_uid):
                found[path] = _identity(path)
    held = _open_files() if found else set()
    return {path: identity for path, identity in found.items() if identity not in held}


def _open_files() -> set[tuple[int, int]]:
    """Of every process that may be looked at: a container's has other paths, but the same inodes."""
    found = set()
    for descriptor in Path("/proc").glob("[0-9]*/fd/*"):
        with contextlib.suppress(OSError):
            found.add(_identity(descriptor))
    return found


def _identity(path: Path) -> tuple[int, int]:
    status = path.stat()
    return status.st_dev, status.st_ino
