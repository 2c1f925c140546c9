"""Make a node's files in a process of its own, that a training process starts.

Torch, gloo and CUDA have threads, so a trainer cannot fork workers (`reshard.execute.can_fork`), and its own threads
would wait for each other to run Python. A fresh process forks, and maps what it reads.
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

from reshard import execute
from reshard.crew import ended, is_bound_to, portable
from reshard.errors import ReshardError
from reshard.limits import default_num_threads
from reshard.virtual_load import Loaded, load_files
from reshard.virtual_manifest import Manifest, decode

_log = logging.getLogger(__name__)
_BEGUN = "begun"
_COMMAND = "import sys; from reshard.virtual_process import serve; sys.exit(serve(sys.argv[1:]))"


def load_files_apart(commit: Path, manifest: Manifest, ranks: Collection[int], folder: Path) -> Loaded:
    """`load_files` in another process where that is faster: with this one's threads, and many bytes.

    Args:
        commit: folder of the virtual commit, which the other process reads too.
        manifest: of the commit.
        ranks: see `load_files`.
        folder: see `load_files`.

    Raises:
        ReshardError: as `load_files`; and where the other process was ended from outside.
    """
    if manifest.plan.bytes_to_read < execute.FORK_BYTES or execute.can_fork():
        return load_files(manifest, ranks, folder)
    try:
        found = _ask([str(commit), str(folder), *map(str, sorted(ranks))])
    except OSError as error:
        _log.warning("no process can be started to load %s, so threads of this one do it: %s", commit, error)
        return load_files(manifest, ranks, folder)
    if isinstance(found, BaseException):
        raise found
    assert isinstance(found, Loaded)
    return found


def _ask(words: Sequence[str]) -> object:
    """What another process answers.

    Raises:
        OSError: there is none: it cannot be started, or not import this module.
        ReshardError: it ended without an answer.
    """
    ours, theirs = Pipe(duplex=False)
    with ours:
        with theirs:
            child = _start(theirs, words)
        begun = False
        try:
            begun = ours.recv() == _BEGUN
            return ours.recv()
        except (EOFError, OSError):  # OSError: in the middle of an answer
            code = child.wait()
            if not begun and code > 0:
                raise OSError(f"{sys.executable} ended with exit code {code}") from None
            raise ended(code) from None
        finally:
            child.kill()
            child.wait()


def _start(answers: Connection, words: Sequence[str]) -> subprocess.Popen[bytes]:
    """Start `serve` with this process's modules, out of reach of a terminal's signals; they end this process first."""
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(path for path in sys.path if path and isinstance(path, str)),
        "OPENBLAS_NUM_THREADS": "1",  # numpy's threads would be in the way of forking
    }
    return subprocess.Popen(
        [sys.executable or "", "-P", "-c", _COMMAND, str(os.getpid()), str(answers.fileno()), *words],
        env=environment,
        stdin=subprocess.DEVNULL,
        pass_fds=[answers.fileno()],
        start_new_session=True,
    )


def serve(words: Sequence[str]) -> int:
    """What the other process does: answer with a `Loaded`, or an error that the first one raises."""
    parent, descriptor, commit, folder, *ranks = words
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # whatever the trainer does with it
    with Connection(int(descriptor), readable=False) as answers:
        if not is_bound_to(int(parent)):
            return 1
        answers.send(_BEGUN)
        try:
            manifest = decode(Path(commit), num_threads=default_num_threads())
            answers.send(load_files(manifest, [int(rank) for rank in ranks], Path(folder)))
        except OSError as error:
            answers.send(ReshardError(f"the files of this node cannot be made: {error}"))
        except BaseException as error:  # the parent raises it
            answers.send(portable(error))
    return 0
