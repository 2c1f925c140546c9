"""Make a node's files in a process of its own, that a training process starts.

Torch, gloo and CUDA have threads, so a trainer cannot fork workers (`reshard.execution.executor.can_fork`),
and its own threads would wait for each other to run Python. A fresh process forks, and maps what it reads.
"""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
from collections.abc import Collection, Sequence
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path

from reshard.errors import ReshardError
from reshard.execution import executor
from reshard.system.process_pool import ended, is_bound_to, portable
from reshard.virtual.load import Loaded, load_files
from reshard.virtual.manifest import Manifest

_log = logging.getLogger(__name__)
_BEGUN = "begun"
_COMMAND = "import sys; from reshard.virtual.process import serve; sys.exit(serve(sys.argv[1:]))"


def load_files_apart(manifest: Manifest, ranks: Collection[int], folder: Path) -> Loaded:
    """`load_files` in another process where that is faster: with this one's threads, and many bytes.

    Raises:
        ReshardError: as `load_files`; and where the other process was ended from outside.
    """
    if manifest.plan.bytes_to_read < executor.FORK_BYTES or executor.can_fork():
        return load_files(manifest, ranks, folder)
    try:
        found = _ask(manifest, sorted(ranks), folder)
    except OSError as error:
        _log.warning("no process can be started to load a virtual commit, so threads of this one do it: %s", error)
        return load_files(manifest, ranks, folder)
    if isinstance(found, BaseException):
        raise found
    assert isinstance(found, Loaded)
    return found


def _ask(manifest: Manifest, ranks: Sequence[int], folder: Path) -> object:
    """What another process answers.

    Raises:
        OSError: there is none: it cannot be started, or not import this module.
        ReshardError: it ended without an answer.
    """
    ours, theirs = Pipe()
    with ours:
        with theirs:
            child = _start(theirs)
        begun = False
        try:
            begun = ours.recv() == _BEGUN
            ours.send((manifest, ranks, folder))  # as it is here: to decode it takes longer
            return ours.recv()
        except (EOFError, OSError):  # OSError: in the middle of an answer
            code = child.wait()
            if not begun and code > 0:
                raise OSError(f"{sys.executable} ended with exit code {code}") from None
            raise ended(code) from None
        finally:
            child.kill()
            child.wait()


def _start(theirs: Connection) -> subprocess.Popen[bytes]:
    """Start `serve` with this process's modules, out of reach of a terminal's signals; they end this process first."""
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(path for path in sys.path if path and isinstance(path, str)),
        "OPENBLAS_NUM_THREADS": "1",  # numpy's threads would be in the way of forking
    }
    return subprocess.Popen(
        [sys.executable or "", "-P", "-c", _COMMAND, str(os.getpid()), str(theirs.fileno())],
        env=environment,
        stdin=subprocess.DEVNULL,
        pass_fds=[theirs.fileno()],
        start_new_session=True,
    )


def serve(words: Sequence[str]) -> int:
    """What the other process does: answer with a `Loaded`, or an error that the first one raises."""
    parent, descriptor = map(int, words)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # whatever the trainer does with it
    with Connection(descriptor) as connection:
        if not is_bound_to(parent):
            return 1
        connection.send(_BEGUN)
        try:
            connection.send(load_files(*connection.recv()))
        except OSError as error:
            connection.send(ReshardError(f"the files of this node cannot be made: {error}"))
        except BaseException as error:  # the parent raises it
            connection.send(portable(error))
    return 0
