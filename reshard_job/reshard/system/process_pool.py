"""Processes that share work, such as the units of a conversion.

Python runs one thread at a time, and handing that right over costs more than a unit's own Python code: two threads were
as fast as one where two processes took half of the time. They are forked once the plan is known, so they start in
milliseconds and share its memory; each is told a unit, does it, sends its record back, and is told the next one.

They also bear what a process does not survive: who looks at a mapped file that becomes shorter is ended by SIGBUS. Here
that is a child, and an error with a name.
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
from reshard.system.exit_signals import ENDINGS

_PR_SET_PDEATHSIG = 1  # linux/prctl.h
_POLL_SECONDS = 0.1  # before tasks are asked for again where there was none for now
_END = object()

Task = TypeVar("Task")
Result = TypeVar("Result")


def map_in_processes(
    tasks: Iterator[Task | None], num_processes: int, do: Callable[[Task], Result], took: Callable[[Result], None]
) -> None:
    """Do all tasks in processes; `tasks` is asked for the next one when a process is free.

    Args:
        tasks: what to do; they and the results can be pickled. None: nothing for now, what processes do goes on.
        num_processes: that do it.
        do: does one, in one of the processes.
        took: is given each result, in this process.

    Raises:
        ReshardError: the first failure of any process; the others are stopped.
        CorruptSourceError: a file became shorter, or could not be read, while it was looked at.
    """
    crew: dict[Connection, ForkProcess] = {}
    try:
        before = signal.pthread_sigmask(signal.SIG_BLOCK, ENDINGS)  # in the children for ever: the parent decides
        try:
            _fork(crew, num_processes, do)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        idle, busy, more = list(crew), set[Connection](), True
        while more or busy:
            task = next(tasks, _END) if more and idle else None
            if task is _END:
                more = False
            elif task is not None:
                connection = idle.pop()
                busy.add(connection)
                with contextlib.suppress(BrokenPipeError):  # it has ended: told when its answer is read
                    connection.send(task)
            else:
                for ready in wait(list(busy), _POLL_SECONDS if more and idle else None):
                    assert isinstance(ready, Connection)
                    took(_result(ready, crew[ready]))
                    busy.remove(ready)
                    idle.append(ready)
    finally:
        for child in crew.values():
            child.kill()
        for connection, child in crew.items():
            child.join()
            connection.close()


def _fork(crew: dict[Connection, ForkProcess], num_processes: int, do: Callable[[Any], Any]) -> None:
    """Add processes to a crew: as many as are wanted, or one less than can be had.

    Raises:
        ReshardError: that is none.
    """
    context = get_context("fork")
    for _ in range(num_processes):
        try:
            ours, theirs = context.Pipe()
            with theirs:
                child = context.Process(target=_serve, args=(theirs, do, [*crew, ours], os.getpid()), daemon=True)
                child.start()
        except OSError as error:
            if len(crew) < 2:
                raise ReshardError(
                    f"no process can be started: {error}",
                    hint="allow more processes (ulimit -u, pids.max), open files (ulimit -n), or memory",
                ) from error
            last, child = crew.popitem()  # a thread of the parent and its files need the room
            child.kill()
            child.join()
            child.close()
            last.close()
            return
        crew[ours] = child


def _result(connection: Connection, child: ForkProcess) -> Any:
    try:
        found = connection.recv()
    except (EOFError, OSError):  # OSError: in the middle of an answer
        child.join()
        raise ended(child.exitcode or 0) from None
    if isinstance(found, BaseException):
        raise found
    return found


def ended(code: int) -> ReshardError:
    """What to raise where a process ended with this exit code and told nothing."""
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
    """What a child does: tasks, until it is stopped."""
    if not is_bound_to(parent):
        return
    for other in others:
        other.close()
    try:
        while True:
            connection.send(do(connection.recv()))
    except BaseException as error:  # the parent raises it
        with contextlib.suppress(OSError):
            connection.send(portable(error))


def is_bound_to(parent: int) -> bool:
    """This process ends when its parent does from here on; False where the parent has ended before."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    return os.getppid() == parent


def portable(error: BaseException) -> BaseException:
    """An error that can be sent, with where it came from if it is none of ours."""
    if isinstance(error, ReshardError):
        return error
    return RuntimeError("".join(traceback.format_exception(error)))
