"""Child processes that share tasks, such as the units of a conversion.

Python runs one thread at a time, and switching threads costs more than a unit's own Python code: two threads were as
fast as one, while two processes took half of the time. The processes are forked when the plan is known, so they start
in milliseconds and share its memory. Each process receives tasks, does them in turn, and sends each result. It always
has one task more than the one that it does, so that it does not wait for the next one.

A process that reads a mapped file gets SIGBUS when the file becomes shorter. Only a child dies then, and the parent
raises CorruptSourceError.
"""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable, Iterator
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkProcess
from typing import Any, TypeVar

from reshard.errors import ReshardError
from reshard.system.children import bind_to_parent, make_picklable, process_end_error
from reshard.system.exit_signals import EXIT_SIGNALS

_POLL_SECONDS = 0.1  # time before `tasks` is asked again after it had no task for now
_TASKS_AHEAD = 2
_END = object()

Task = TypeVar("Task")
Result = TypeVar("Result")


def map_in_processes(
    tasks: Iterator[Task | None],
    num_processes: int,
    do: Callable[[Task], Result],
    on_result: Callable[[Result], None],
    *,
    active: Callable[[], int] | None = None,
) -> None:
    """Do all tasks in child processes; the next task is taken from `tasks` when a process is free.

    Args:
        tasks: tasks that can be pickled. None means that there is no task for now; busy processes go on.
        num_processes: number of processes.
        do: does one task in a child process and returns a result that can be pickled.
        on_result: is called with each result in this process.
        active: returns the number of processes that may have a task now; None for all of them.

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
        tasks_of = dict.fromkeys(children, 0)
        has_more = True
        while has_more or any(tasks_of.values()):
            usable = list(children)[: None if active is None else max(1, active())]
            connection = min(usable, key=tasks_of.__getitem__)
            is_free = tasks_of[connection] < _TASKS_AHEAD
            task = next(tasks, _END) if has_more and is_free else None
            if task is _END:
                has_more = False
            elif task is not None:
                tasks_of[connection] += 1
                with contextlib.suppress(BrokenPipeError):  # the child has ended: `_receive` raises the reason
                    connection.send(task)
            else:
                busy = [connection for connection, count in tasks_of.items() if count]
                for ready in wait(busy, _POLL_SECONDS if has_more and is_free else None):
                    assert isinstance(ready, Connection)
                    on_result(_receive(ready, children[ready]))
                    tasks_of[ready] -= 1
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
