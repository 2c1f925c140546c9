"""A companion answers one question, in a child process where one can be forked."""

import contextlib
import faulthandler
import fcntl
import os
import pickle
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from reshard.errors import ReshardError, StoreError, VerificationError
from reshard.system.companion import Companion

# Forking this process is safe here: the functions of these tests take no locks.
both = pytest.mark.parametrize("may_fork", [True, False], ids=["child", "here"])


@both
def test_a_companion_prepares_and_then_answers(may_fork):
    companion = Companion(lambda: (os.getpid(), 3), lambda prepared, question: (*prepared, question + 1))
    with companion.started(may_fork=may_fork):
        companion.ask(41)
        pid, prepared, answer = companion.wait()
    assert (prepared, answer) == (3, 42)
    assert (pid != os.getpid()) == may_fork


@both
@pytest.mark.parametrize("where", ["prepare", "answer"])
def test_an_error_of_the_companion_is_raised_with_its_fields(may_fork, where):
    def fail() -> None:
        raise VerificationError("differs", path="/target", problems=["one", "two"], hint="look")

    def answer(_: object, __: object) -> None:
        fail()

    companion = Companion(fail if where == "prepare" else lambda: None, answer)
    with companion.started(may_fork=may_fork), pytest.raises(VerificationError) as error:
        companion.ask(0)
        companion.wait()
    assert (error.value.path, list(error.value.problems), error.value.hint) == ("/target", ["one", "two"], "look")


@both
def test_questions_and_answers_may_be_larger_than_a_pipe(may_fork):
    companion = Companion(lambda: time.sleep(0.05), lambda _, question: question * 2)
    with companion.started(may_fork=may_fork):
        companion.ask(b"x" * (1 << 20))
        assert companion.wait() == b"x" * (2 << 20)


def kill_this_process(number: signal.Signals) -> None:
    faulthandler.disable()  # of pytest, which would print where
    os.kill(os.getpid(), number)


@pytest.mark.parametrize(
    ("number", "kind", "text"),
    [(signal.SIGBUS, StoreError, "became shorter"), (signal.SIGKILL, ReshardError, "memory limit")],
)
def test_a_companion_that_is_killed_is_an_error_that_says_what_to_do(number, kind, text):
    companion = Companion(lambda: kill_this_process(number), lambda *_: None)
    with companion.started(may_fork=True), pytest.raises(kind) as error:
        companion.ask(0)
        companion.wait()
    assert text in f"{error.value} {error.value.hint}"


def begin_an_answer_and_die() -> None:
    for descriptor in range(3, 256):
        with contextlib.suppress(OSError):
            if fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_WRONLY:
                os.write(descriptor, pickle.dumps("x" * 100)[:-50])
    kill_this_process(signal.SIGKILL)


def test_an_answer_that_breaks_off_is_an_error_that_says_what_to_do():
    companion = Companion(begin_an_answer_and_die, lambda *_: None)
    with companion.started(may_fork=True), pytest.raises(ReshardError) as error:
        companion.ask(0)
        companion.wait()
    assert "memory limit" in f"{error.value} {error.value.hint}"


@pytest.mark.parametrize("free", [0, 2])
def test_a_companion_works_here_where_no_more_files_can_be_opened(free):
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    companion = Companion(os.getpid, lambda prepared, _: prepared)
    opened = [os.open(os.devnull, os.O_RDONLY)]
    descriptors = len(list(Path("/proc/self/fd").iterdir()))
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(opened) + 4, before[1]))
        with contextlib.suppress(OSError):
            while True:
                opened.append(os.open(os.devnull, os.O_RDONLY))
        for _ in range(free):
            os.close(opened.pop())
        with companion.started(may_fork=True):
            companion.ask(0)
            assert companion.wait() == os.getpid()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
        for descriptor in opened:
            os.close(descriptor)
    assert len(list(Path("/proc/self/fd").iterdir())) == descriptors - 1


def test_a_companion_that_nobody_asks_ends_with_its_context(tmp_path):
    path = tmp_path / "pid"

    def prepare() -> None:
        path.with_suffix(".new").write_text(str(os.getpid()))
        path.with_suffix(".new").rename(path)
        time.sleep(60)

    with Companion(prepare, lambda *_: None).started(may_fork=True):
        while not path.exists():
            time.sleep(0.01)
        pid = int(path.read_text())
        os.kill(pid, 0)
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


_PARENT = """
import os, sys, time
from reshard.system.companion import Companion
def prepare():
    print(os.getpid(), flush=True)
    time.sleep(60)
with Companion(prepare, lambda *_: None).started(may_fork=True):
    time.sleep(60)
"""


def test_a_companion_ends_with_a_parent_that_is_killed():
    with subprocess.Popen([sys.executable, "-c", _PARENT], stdout=subprocess.PIPE, text=True) as parent:
        pid = int(parent.stdout.readline())
        parent.kill()
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        try:
            with open(f"/proc/{pid}/stat", encoding="ascii") as file:
                if file.read().split(") ")[1][0] == "Z":  # nobody reaps it here
                    return
        except FileNotFoundError:
            return
        time.sleep(0.02)
    pytest.fail("the child process is still there")


def test_a_companion_holds_no_lock_of_its_parent(tmp_path):
    """Else a command that was killed could not be begun again at once: its child ends a moment later."""
    path = tmp_path / "lock"
    path.touch()
    with path.open() as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        with Companion(lambda: time.sleep(60), lambda *_: None).started(may_fork=True):
            held.close()
            deadline = time.monotonic() + 10
            with path.open() as again:
                while True:
                    try:
                        fcntl.flock(again, fcntl.LOCK_EX | fcntl.LOCK_NB)
                        break
                    except BlockingIOError:
                        assert time.monotonic() < deadline, "the child holds the lock"
                        time.sleep(0.01)
