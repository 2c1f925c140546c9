"""Rank 0's check of a session's first commit: what of it would `reshard` refuse to convert?

The resharder's own reader reads the files, so that the answer is true for every stack. It runs in a process of its
own, because it must neither delay a step nor take memory that the training needs. Without the check, people would learn
of a refusal after a failure, when the job needs the conversion.
"""

from __future__ import annotations

import json
import logging
import os
import resource
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

from reshard.contract import COMMIT_FILE, LeaseKey
from reshard.errors import NotACheckpointError, ReshardError, UnsafePickleError, UnsupportedError
from reshard.system.children import bind_to_parent
from reshard.system.limits import free_memory_bytes

_log = logging.getLogger(__name__)
_COMMAND = "import sys; from elastic_trainer.saving.refusals import main; sys.exit(main())"
_NICE = 15
_MEMORY_BYTES = 1 << 30
"""Data that the reader may hold; a larger checkpoint is not checked."""

_MEMORY_SHARE = 4
_MESSAGE_CHARACTERS = 480
_NAMES_CHARACTERS = 1024


class RefusalCheck:
    """Reads the first commit that is given to it, and tells the operator and the log what is refused.

    Args:
        tell: called from a thread with an annotation for the Lease.
    """

    def __init__(self, tell: Callable[[dict[LeaseKey, str]], None]) -> None:
        self._tell = tell
        self._has_begun = False

    def begin(self, folder: Path) -> None:
        """Begin to read a commit in the background, if it is the first."""
        if self._has_begun:
            return
        self._has_begun = True
        threading.Thread(target=self._run, args=(folder,), name="refusals", daemon=True).start()

    def _run(self, folder: Path) -> None:
        paths = os.pathsep.join(path for path in sys.path if path and isinstance(path, str))
        try:
            done = subprocess.run(
                [sys.executable or "", "-P", "-c", _COMMAND, str(folder), str(os.getpid())],
                env={**os.environ, "PYTHONPATH": paths, "OPENBLAS_NUM_THREADS": "1"},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                check=False,
            )
        except OSError as error:
            _log.warning("whether reshard converts %s is not known: its reader cannot be started: %s", folder, error)
            return
        if done.returncode:
            _log.info("whether reshard converts %s is not known: its reader ended with %d", folder, done.returncode)
            return
        text = done.stdout.decode()
        found = json.loads(text)
        if found["message"]:
            names = ", ".join(found["toAllow"])
            advice = (
                f"set spec.checkpoint.allowedGlobals: [{names}], or save plain data" if names else "save plain data"
            )
            _log.warning("reshard refuses to convert %s: %s; %s", folder, found["message"], advice)
        self._tell({LeaseKey.REFUSED: text})


def main() -> int:
    """Print what is refused of a commit, as `LeaseKey.REFUSED` holds it."""
    folder, parent = Path(sys.argv[1]), int(sys.argv[2])
    if not bind_to_parent(parent):
        return 1
    os.nice(_NICE)
    free = free_memory_bytes()
    limit = _MEMORY_BYTES if free is None else min(_MEMORY_BYTES, free // _MEMORY_SHARE)
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    try:
        message, to_allow = find_refusals(folder)
    except (MemoryError, OSError, ReshardError) as error:  # the commit is removed meanwhile, or too large to check
        sys.stderr.write(f"elastic_trainer: {folder} is not checked: {error!r:.500}\n")
        return 1
    sys.stdout.write(json.dumps({"message": message, "toAllow": to_allow}, separators=(",", ":")))
    return 0


def find_refusals(folder: Path) -> tuple[str, list[str]]:
    """Return what `reshard` refuses of a checkpoint, by key and class, and the names to allow if that is all.

    Raises:
        ReshardError: the checkpoint cannot be read.
    """
    from reshard.formats.pt.trust import trusting  # only the process of its own needs it

    refused: list[UnsafePickleError] = []
    with trusting((), refused):
        others = _find_reason(folder)
    names = sorted({name for error in refused for name in error.to_allow})
    if refused and all(error.to_allow for error in refused):
        with trusting(names):
            others = _find_reason(folder)  # without them, nothing is read behind the first that cannot be written
    else:
        names = []
    texts = []
    seen: set[str] = set()  # ranks save the same objects, so one place of each is enough
    for error in (*refused, *others):
        is_unsafe = isinstance(error, UnsafePickleError)
        places = [place for place in (is_unsafe and error.problems) or (error.message,) if place not in seen]
        seen.update(places)
        where = f"{error.path.removeprefix(f'{folder}/')}: " if is_unsafe and error.path else ""
        texts += [where + ", ".join(places)] if places else []
    names = [] if others or sum(map(len, names)) > _NAMES_CHARACTERS else names
    return "; ".join(texts)[:_MESSAGE_CHARACTERS], names


def _find_reason(folder: Path) -> list[ReshardError]:
    """Return why `reshard` refuses a checkpoint, besides what `trusting` collects; empty if it does not.

    Raises:
        ReshardError: the checkpoint cannot be read, or is being removed.
    """
    from reshard.api import index_of, plan_of

    marker = folder / COMMIT_FILE
    is_committed = marker.exists()
    try:
        index = index_of(folder)
        plan_of(index, index.topology, num_threads=1)  # it reads the objects that a conversion copies
    except (UnsupportedError, NotACheckpointError) as error:
        if not folder.is_dir() or (is_committed and not marker.exists()):
            raise
        return [error.with_traceback(None)]
    return []
