"""Child processes that share tasks, such as the units of a conversion.

Python runs one thread at a time, and switching threads costs more than a unit's own Python code: two threads were as
fast as one, while two processes took half of the time. The processes are forked when the plan is known, so they start
in milliseconds and share its memory. Each process receives a task, does it, sends its result, and receives the next.

A process that reads a mapped file gets SIGBUS when the file becomes shorter. Only a child dies then, and the parent
raises CorruptSourceError.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import traceback
from collections.abc import Callable, Iterator
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkProcess
from typing import Any, TypeVar

from reshard.errors import CorruptSourceError, ReshardError
from reshard.system.exit_signals import EXIT_SIGNALS

_PR_SET_PDEATHSIG = 1  # linux/prctl.h
_POLL_SECONDS = 0.1  # time before `tasks` is asked again after it had no task for now
_END = object()

Task = TypeVar("Task")
Result = TypeVar("Result")


def map_in_processes(
    tasks: Iterator[Task | None], num_processes: int, do: Callable[[Task], Result], on_result: Callable[[Result], None]
) -> None:
    """Do all tasks in child processes; the next task is taken from `tasks` when a process is free.

    Args:
        tasks: tasks that can be pickled. None means that there is no task for now; busy processes go on.
        num_processes: number of processes.
        do: does one task in a child process and returns a result that can be pickled.
        on_result: is called with each result in this process.

    Raises:
        ReshardError: a process failed; the first failure is raised and the other processes are stopped.
        CorruptSourceError: a mapped file became shorter, or could not be read.
    """
    children: dict[Connection, ForkProcess] = {}
    try:
        # Children keep the signals blocked: the parent handles them and ends its children.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, EXIT_SIGNALS)
        try:
            _fork(children, num_processes, do)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        idle, busy, has_more = list(children), set[Connection](), True
        while has_more or busy:
            task = next(tasks, _END) if has_more and idle else None
            if task is _END:
                has_more = False
            elif task is not None:
                connection = idle.pop()
                busy.add(connection)
                with contextlib.suppress(BrokenPipeError):  # the child has ended: `_receive` raises the reason
                    connection.send(task)
            else:
                for ready in wait(list(busy), _POLL_SECONDS if has_more and idle else None):
                    assert isinstance(ready, Connection)
                    on_result(_receive(ready, children[ready]))
                    busy.remove(ready)
                    idle.append(ready)
    finally:
        for child in children.values():
            child.kill()
        for connection, child in children.items():
            child.join()
            connection.close()


def _fork(children: dict[Connection, ForkProcess], num_processes: int, do: Callable[[Any], Any]) -> None:
    """Fork `num_processes` children, or one less than the system allows.

    Raises:
        ReshardError: the system allows fewer than two.
    """
    context = get_context("fork")
    for _ in range(num_processes):
        try:
            ours, theirs = context.Pipe()
            with theirs:
                child = context.Process(target=_serve, args=(theirs, do, [*children, ours], os.getpid()), daemon=True)
                child.start()
        except OSError as error:
            if len(children) < 2:
                raise ReshardError(
                    f"no process can be started: {error}",
                    hint="allow more processes (ulimit -u, pids.max), open files (ulimit -n), or memory",
                ) from error
            last, child = children.popitem()  # its process and descriptors are left for a thread and files of ours
            child.kill()
            child.join()
            child.close()
            last.close()
            return
        children[ours] = child


def _receive(connection: Connection, child: ForkProcess) -> Any:
    try:
        answer = connection.recv()
    except (EOFError, OSError):  # OSError: the child ended in the middle of an answer
        child.join()
        raise process_end_error(child.exitcode or 0) from None
    if isinstance(answer, BaseException):
        raise answer
    return answer


def process_end_error(code: int) -> ReshardError:
    """Make the error for a process that ended with this exit code and sent no answer."""
    if code == -signal.SIGBUS:
        return CorruptSourceError(
            "a file of the source became shorter, or could not be read, while it was converted",
            hint="nothing was published; convert it again when nobody writes to it, or use an earlier commit",
        )
    how = f"signal {-code} ({signal.Signals(-code).name})" if code < 0 else f"exit code {code}"
    return ReshardError(
        f"a process of the conversion was ended by {how}",
        hint="often the memory limit was reached: allow more, or fewer --threads" if code == -signal.SIGKILL else "",
    )


def _serve(connection: Connection, do: Callable[[Any], object], others: list[Connection], parent: int) -> None:
    """Do tasks in a child process until the parent stops it."""
    if not bind_to_parent(parent):
        return
    for other in others:
        other.close()
    try:
        while True:
            connection.send(do(connection.recv()))
    except BaseException as error:  # sent to the parent, which raises it
        with contextlib.suppress(OSError):
            connection.send(make_picklable(error))


def bind_to_parent(parent: int) -> bool:
    """Let the kernel kill this process when its parent ends; return False if the parent has already ended."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    return os.getppid() == parent


def make_picklable(error: BaseException) -> BaseException:
    """Return an error that can be pickled: a ReshardError as it is, any other one with its traceback as text."""
    if isinstance(error, ReshardError):
        return error
    return RuntimeError("".join(traceback.format_exception(error)))
