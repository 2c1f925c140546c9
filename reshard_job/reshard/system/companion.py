"""A child process that prepares something while this process works, and then answers one question.

It is forked without `multiprocessing`, whose import takes longer than a small conversion's work.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Generic, TypeVar

from reshard.system.children import bind_to_parent, make_picklable, process_end_error
from reshard.system.exit_signals import EXIT_SIGNALS

Prepared = TypeVar("Prepared")
Question = TypeVar("Question")
Answer = TypeVar("Answer")


class Companion(Generic[Prepared, Question, Answer]):
    """Prepares, and answers one question: in a child process where one can be forked, else here when it is asked.

    Args:
        prepare: returns what an answer needs.
        answer: returns the answer to a question, which can be pickled.
    """

    def __init__(self, prepare: Callable[[], Prepared], answer: Callable[[Prepared, Question], Answer]) -> None:
        self._prepare, self._answer = prepare, answer
        self._child: _Child | None = None
        self._question: Question | None = None

    @contextlib.contextmanager
    def started(self, *, may_fork: bool) -> Iterator[None]:
        """Start the child process, which ends with the context, if this process may be forked."""
        child = self._child = _fork(lambda question: self._answer(self._prepare(), question())) if may_fork else None
        try:
            yield
        finally:
            self._child = None
            if child is not None:
                child.end()

    def ask(self, question: Question) -> None:
        """Ask the question; a child process begins to answer it."""
        self._question = question
        if self._child is not None:
            self._child.send(question)

    def wait(self) -> Answer:
        """Return the answer to the question that was asked.

        Raises:
            ReshardError: of the functions, or the child process ended.
        """
        if self._child is None:
            assert self._question is not None
            return self._answer(self._prepare(), self._question)
        answer: Answer = self._child.receive()
        return answer


class _Child:
    """A forked process with a pipe to it and a pipe from it."""

    def __init__(self, number: int, to_child: int, from_child: int) -> None:
        self._number, self._to_child, self._from_child = number, to_child, from_child
        self._has_ended = False

    def send(self, question: Any) -> None:
        with contextlib.suppress(BrokenPipeError), open(self._to_child, "wb", closefd=False) as pipe:
            pickle.dump(question, pipe)  # a broken pipe: the child has ended, and `receive` raises the reason

    def receive(self) -> Any:
        try:
            with open(self._from_child, "rb", closefd=False) as pipe:
                answer = pickle.load(pipe)
        except (EOFError, pickle.UnpicklingError):  # it ended before its answer, or within it
            raise process_end_error(self._reap()) from None
        if isinstance(answer, BaseException):
            raise answer
        return answer

    def end(self) -> None:
        """End the process, and close the pipes."""
        if not self._has_ended:
            os.kill(self._number, signal.SIGKILL)
            self._reap()
        os.close(self._to_child)
        os.close(self._from_child)

    def _reap(self) -> int:
        self._has_ended = True
        return os.waitstatus_to_exitcode(os.waitpid(self._number, 0)[1])


def _fork(serve: Callable[[Callable[[], Any]], Any]) -> _Child | None:
    """Start a process that calls `serve` with a function that waits for the question; None if none can be started."""
    pipes: list[int] = []  # to read a question, to send one, to read an answer, to send one
    parent = os.getpid()
    # The child keeps the signals blocked: the parent handles them and ends its child.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, EXIT_SIGNALS)
    try:
        pipes += os.pipe()
        pipes += os.pipe()
        number = os.fork()
        if number == 0:
            _serve(pipes[0], pipes[3], serve, parent)
    except OSError:  # no more files or processes, or no memory for one
        for descriptor in pipes:
            os.close(descriptor)
        return None
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    read_question, send_question, read_answer, send_answer = pipes
    os.close(read_question)
    os.close(send_answer)
    return _Child(number, send_question, read_answer)


def _serve(read_question: int, send_answer: int, serve: Callable[[Callable[[], Any]], Any], parent: int) -> None:
    """Answer the question in the child process, and end it."""

    def question() -> Any:
        with open(read_question, "rb", closefd=False) as pipe:
            return pickle.load(pipe)

    try:
        _close_all_but(read_question, send_answer)
        if bind_to_parent(parent):
            try:
                answer = serve(question)
            except BaseException as error:  # sent to the parent, which raises it
                answer = make_picklable(error)
            with open(send_answer, "wb", closefd=False) as pipe:
                pickle.dump(answer, pipe)
    finally:
        os._exit(0)


def _close_all_but(*kept: int) -> None:
    """Close inherited files: a lock on one of them would outlive the parent for a moment. Nothing here uses them."""
    for path in list(Path("/proc/self/fd").iterdir()):
        if int(path.name) > 2 and int(path.name) not in kept:
            with contextlib.suppress(OSError):  # of the listing itself
                os.close(int(path.name))
