"""`python -m elastic_trainer.launch SCRIPT ARGUMENTS`: start this node's ranks.

The number of ranks is fixed, as in every attempt: there is no rendezvous, no restart and no membership change. The
launcher reads the variables that torchrun and Kubeflow use (PET_NNODES, PET_NPROC_PER_NODE, PET_NODE_RANK,
PET_MASTER_ADDR, PET_MASTER_PORT) and sets RANK, LOCAL_RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT of each rank.
Unlike torchrun it does not import torch unless told to, ends all ranks as soon as one fails, and exits with the code of
the first failure.

With `--preload torch` it imports torch once and forks the ranks, so that a node with eight ranks reads and runs the
import once and not eight times.
"""

from __future__ import annotations

import argparse
import builtins
import contextlib
import gc
import importlib
import os
import random
import signal
import subprocess
import sys
import time
import types
import zipfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Protocol

from reshard.contract import TrainerExit

_OF_EVERY_RANK = (
    TrainerExit.DRAINED,
    TrainerExit.RESUME_INVALID,
    TrainerExit.NOT_OWNER,
    TrainerExit.UNPUBLISHED,
)
_INSIST_AFTER_SECONDS = 0.1
"""Time until a second SIGTERM, which no rank takes for a request to leave; sent at once, the two would be one."""

_KILL_AFTER_SECONDS = 5.0
_POLL_SECONDS = 0.05
_STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)
_PROCESS = Path("/proc/self")
_ACCELERATORS = ("/dev/nvidia", "/dev/kfd", "/dev/dri/", "/dev/dxg")
"""Devices that a driver of NVIDIA or AMD opens for a process; the last one in a Linux below Windows."""


class Rank(Protocol):
    """A process that runs a rank."""

    def poll(self) -> int | None:
        """Return the exit code, negative for a signal; None while the process runs."""

    def send_signal(self, sig: int) -> None:
        """Send a signal to the process."""


class ForkedRank:
    """A rank that was forked: what `supervise` needs of `subprocess.Popen`."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._code: int | None = None

    def poll(self) -> int | None:
        """See `Rank.poll`."""
        if self._code is None:
            # A signal handler may call this while the call that it interrupted has the process's status in hand.
            with contextlib.suppress(ChildProcessError):
                pid, status = os.waitpid(self._pid, os.WNOHANG)
                if pid:
                    self._code = os.waitstatus_to_exitcode(status)
        return self._code

    def send_signal(self, sig: int) -> None:
        """See `Rank.send_signal`."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self._pid, sig)


def rank_environments(env: Mapping[str, str], *, num_local: int) -> list[dict[str, str]]:
    """Return the environment of each local rank."""
    num_nodes = int(env.get("PET_NNODES") or 1)
    node_rank = int(env.get("PET_NODE_RANK") or 0)
    common = {
        "WORLD_SIZE": str(num_nodes * num_local),
        "LOCAL_WORLD_SIZE": str(num_local),
        "MASTER_ADDR": env.get("PET_MASTER_ADDR") or env.get("MASTER_ADDR") or "127.0.0.1",
        "MASTER_PORT": env.get("PET_MASTER_PORT") or env.get("MASTER_PORT") or "29500",
    }
    return [
        {**env, **common, "RANK": str(node_rank * num_local + local), "LOCAL_RANK": str(local)}
        for local in range(num_local)
    ]


def obstacle_to_forks(*, num_started: int, open_files: Iterable[str]) -> str:
    """Return why ranks should not be forked after an import, else "".

    A forked process has one thread only, and cannot use a device that its parent has opened.

    Args:
        num_started: threads that the import has started, also those that are not Python's.
        open_files: paths that the file descriptors of this process refer to.
    """
    if num_started:
        return f"the import started {num_started} thread(s)"
    devices = sorted(path for path in open_files if path.startswith(_ACCELERATORS))
    return f"the import opened {devices[0]}" if devices else ""


def _is_source(script: str) -> bool:
    """Return False for what only Python itself can start: a folder, an archive, or nothing at all."""
    return Path(script).is_file() and not zipfile.is_zipfile(script)


def _preload(modules: Sequence[str], script: str) -> bool:
    """Import modules as the script would, and return True if its ranks can be forked."""
    if not sys.flags.safe_path:
        sys.path[0] = str(Path(script).resolve().parent)
    # numpy is imported already, and its OpenBLAS ends its threads before a fork by itself.
    num_before = _num_threads()
    names = ", ".join(modules)
    try:
        for module in modules:
            importlib.import_module(module)
    except ImportError as error:
        sys.exit(f"elastic_trainer.launch: --preload: {error}: expected modules that {script} can import")
    if _PROCESS.exists():
        obstacle = obstacle_to_forks(num_started=_num_threads() - num_before, open_files=_open_files())
    else:
        obstacle = "this system has no /proc, which would tell whether a fork is safe"
    if obstacle:
        sys.stderr.write(f"elastic_trainer.launch: every rank imports {names} itself: {obstacle}\n")
        return False
    gc.collect()
    gc.freeze()  # a later collection in a rank would write to the pages that the ranks share
    return True


def _num_threads() -> int:
    with contextlib.suppress(OSError):
        return len(list((_PROCESS / "task").iterdir()))
    return 0


def _open_files() -> Iterator[str]:
    for descriptor in (_PROCESS / "fd").iterdir():
        with contextlib.suppress(OSError):
            yield str(descriptor.readlink())


def fork_rank(environment: Mapping[str, str], script: str, arguments: Sequence[str]) -> ForkedRank | None:
    """Fork a rank; return None in the rank itself, which then has the state of a process that runs the script."""
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:  # as it is if the descriptor was closed
            stream.flush()
    # Otherwise a signal between the fork and the next lines would run the launcher's handler in the rank.
    signal.pthread_sigmask(signal.SIG_BLOCK, _STOP_SIGNALS)
    pid = os.fork()
    if pid == 0:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _STOP_SIGNALS)
    if pid:
        return ForkedRank(pid)
    os.environ.clear()
    os.environ.update(environment)
    sys.argv[:] = [script, *arguments]
    random.seed()
    if "numpy" in sys.modules:  # its generator would give the same numbers in all ranks
        sys.modules["numpy"].random.seed()
    return None


def run_script(script: str) -> None:
    """Run a script as the main module of this process, as `python SCRIPT` does, for as long as the process lives.

    `runpy.run_path` would put the launcher's module back at the end of the script, before its threads and exit handlers
    have ended; what these pickle would not be found any more.
    """
    path = str(Path(script).absolute())
    module = types.ModuleType("__main__")
    module.__dict__.update(__file__=path, __builtins__=builtins)
    sys.modules["__main__"] = module
    exec(compile(Path(path).read_bytes(), path, "exec"), module.__dict__)


def supervise(processes: Sequence[Rank]) -> int:
    """Wait for all processes, and end them after the first failure; return the first failure's exit code, else 0."""
    first_failure = 0
    insist_at = deadline = float("inf")
    while True:
        # Every process is polled every time, because only `poll` notices an exit and sets the exit code.
        codes = [process.poll() for process in processes]
        failed = next((code for code in codes if code), 0)
        if failed and not first_failure:
            now = time.monotonic()
            first_failure, deadline = failed, now + _KILL_AFTER_SECONDS
            # With these codes every rank exits by itself.
            if failed not in _OF_EVERY_RANK:
                _signal_all(processes, signal.SIGTERM)
                insist_at = now + _INSIST_AFTER_SECONDS
        if None not in codes:
            break
        if time.monotonic() > insist_at:
            _signal_all(processes, signal.SIGTERM)
            insist_at = float("inf")
        if time.monotonic() > deadline:
            _signal_all(processes, signal.SIGKILL)
        time.sleep(_POLL_SECONDS)
    return first_failure if first_failure >= 0 else 128 - first_failure


def _signal_all(processes: Sequence[Rank], number: signal.Signals) -> None:
    for process in processes:
        if process.poll() is None:
            process.send_signal(number)


def main() -> int:
    """Start this node's ranks, and return the exit code; a forked rank returns from here when its script ends."""
    options = _parser().parse_args()
    processes: list[Rank] = []
    received: list[int] = []

    def stop(number: int, _frame: object) -> None:
        # The session of a rank decides: the first SIGTERM may ask for a commit, a second one ends the rank.
        received.append(number)
        _signal_all(processes, signal.SIGTERM)

    def listen() -> None:
        for number in _STOP_SIGNALS:
            signal.signal(number, stop)

    # Before anything else: the kernel ignores an unhandled SIGTERM for process 1 of a container.
    listen()
    # The kernel would throw the exit codes of the ranks away if the launcher's parent had made it ignore this signal.
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    can_fork = bool(options.preload) and _is_source(options.script) and _preload(options.preload, options.script)
    listen()  # a preloaded module may have set handlers of its own
    if received:
        return 128 + received[0]
    for environment in rank_environments(os.environ, num_local=options.nproc):
        if not can_fork:
            command = [sys.executable, options.script, *options.arguments]
            processes.append(subprocess.Popen(command, env=environment))
            continue
        rank = fork_rank(environment, options.script, options.arguments)
        if rank is None:
            run_script(options.script)
            return 0
        processes.append(rank)
    if received:
        _signal_all(processes, signal.SIGTERM)
    return supervise(processes)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m elastic_trainer.launch", description=__doc__.splitlines()[0])
    default = int(os.environ.get("PET_NPROC_PER_NODE") or 1)
    parser.add_argument("--nproc", type=int, default=default, help="ranks on this node (default: PET_NPROC_PER_NODE)")
    parser.add_argument(
        "--preload",
        action="append",
        metavar="MODULE",
        help="import MODULE once for all ranks, and fork them; may be repeated",
    )
    parser.add_argument("script")
    parser.add_argument("arguments", nargs=argparse.REMAINDER)
    return parser


if __name__ == "__main__":
    sys.exit(main())
