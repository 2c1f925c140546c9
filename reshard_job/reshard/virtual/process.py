"""Make a node's files in a separate process that a training process starts.

Torch, gloo and CUDA have threads, so a trainer cannot fork workers (`reshard.execution.executor.can_fork`), and its own
threads would wait for each other to run Python. A fresh process can fork workers and map the files that it reads.
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
from reshard.system.children import bind_to_parent, make_picklable, process_end_error
from reshard.virtual.load import Loaded, load_files
from reshard.virtual.manifest import Manifest

_log = logging.getLogger(__name__)
_BEGUN = "begun"
COMMAND = "import sys; from reshard.virtual.process import serve; sys.exit(serve(sys.argv[1:]))"
"""Python code that the process runs."""


def load_files_in_process(manifest: Manifest, ranks: Collection[int], folder: Path) -> Loaded:
    """Run `load_files` in another process if that is faster: this process has threads, and there are many bytes.

    Raises:
        ReshardError: as `load_files` does, and if the other process was ended from outside.
    """
    if manifest.plan.bytes_to_read < executor.FORK_BYTES or executor.can_fork():
        return load_files(manifest, ranks, folder)
    try:
        answer = _ask(manifest, sorted(ranks), folder)
    except OSError as error:
        _log.warning("no process can be started to load a virtual commit, so threads of this one do it: %s", error)
        return load_files(manifest, ranks, folder)
    if isinstance(answer, BaseException):
        raise answer
    assert isinstance(answer, Loaded)
    return answer


def _ask(manifest: Manifest, ranks: Sequence[int], folder: Path) -> object:
    """Start another process, send it the work, and return its answer.

    Raises:
        OSError: the process cannot be started, or cannot import this module.
        ReshardError: the process ended without an answer.
    """
    ours, theirs = Pipe()
    with ours:
        with theirs:
            child = _start(theirs)
        has_begun = False
        try:
            has_begun = ours.recv() == _BEGUN
            ours.send((manifest, ranks, folder))  # faster than decoding it again in the process
            return ours.recv()
        except (EOFError, OSError):  # OSError: in the middle of an answer
            code = child.wait()
            if not has_begun and code > 0:
                raise OSError(f"{sys.executable} ended with exit code {code}") from None
            raise process_end_error(code) from None
        finally:
            child.kill()
            child.wait()


def _start(theirs: Connection) -> subprocess.Popen[bytes]:
    """Start `serve` with this process's modules, in a session that a terminal's signals do not reach."""
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(path for path in sys.path if path and isinstance(path, str)),
        "OPENBLAS_NUM_THREADS": "1",  # a process with numpy's threads cannot fork workers
    }
    return subprocess.Popen(
        [sys.executable or "", "-P", "-c", COMMAND, str(os.getpid()), str(theirs.fileno())],
        env=environment,
        stdin=subprocess.DEVNULL,
        pass_fds=[theirs.fileno()],
        start_new_session=True,
    )


def serve(words: Sequence[str]) -> int:
    """Run in the other process: send a `Loaded`, or an error for the parent to raise, and return the exit code."""
    parent, descriptor = map(int, words)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # the trainer may have ignored it
    with Connection(descriptor) as connection:
        if not bind_to_parent(parent):
            return 1
        connection.send(_BEGUN)
        try:
            connection.send(load_files(*connection.recv()))
        except OSError as error:
            connection.send(ReshardError(f"the files of this node cannot be made: {error}"))
        except BaseException as error:  # the parent raises it
            connection.send(make_picklable(error))
    return 0
