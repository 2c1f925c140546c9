"""Rank 0 of an attempt as a value: the real `Session`, stopped before every access that another process could notice.

A process is what it remembers between two calls of the training script (`Memory`), the call that it is in, and the
results that this call has got so far. To go on, the call is repeated from its beginning. It gets the recorded results
again, does one more access for real, and stops before the one after that. So the code that decides is the trainer's
own, and a process can be stopped anywhere, for any time, while the rest of the world goes on.
"""

from __future__ import annotations

import contextlib
import dataclasses
import shutil
import types
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from elastic_trainer import attempts, publisher, retention, session, virtual
from elastic_trainer.errors import FencedError
from elastic_trainer.heartbeat import Heartbeat
from elastic_trainer.session import Session
from elastic_trainer.settings import from_env
from reshard.commits import root_owner
from reshard.commits.root_owner import Owner
from reshard.contract import Env, LeaseKey, Request, VirtualLoader
from reshard.errors import ReshardError
from tests.property.protocol.storage import CheckpointRoot

Annotations = tuple[tuple[str, str], ...]

FORMER = 99
"""Number of the process of a former owner of the root, whose own attempt number is 1."""

KEEP = 1
"""Number of newest commits that rank 0 never removes; the smallest, so that few commits suffice to see a removal."""

TIME = "2027-01-15T08:00:00.000Z"


class Memory(NamedTuple):
    """What a process remembers between two calls."""

    is_started: bool = False
    is_restored: bool = False
    num_saves: int = 0
    step: int = 0
    samples: int = 0
    reported_first: bool = False
    draining: bool = False
    unpublished: tuple[str, ...] = ()
    is_marked: bool = False
    has_new_answer: bool = False
    annotations: Annotations = ()
    request: str = ""
    released: str = ""


class Process(NamedTuple):
    """Rank 0 of one attempt.

    Attributes:
        attempt: its number.
        environment: number of the environment in its Job's manifest.
        memory: what it remembers.
        call: the call that it is in; empty between two calls.
        results: numbers of the results that this call has got.
        exit_code: None while it runs.
    """

    attempt: int
    environment: int
    memory: Memory = Memory()
    call: str = ""
    results: tuple[int, ...] = ()
    exit_code: int | None = None


class Lease(NamedTuple):
    """What a request to the Lease meets.

    Attributes:
        annotations: of the Lease; None if the API server refuses the request.
        is_cut: the request does not arrive.
        is_answer_lost: the request is executed, and its answer does not arrive.
    """

    annotations: Annotations | None
    is_cut: bool = False
    is_answer_lost: bool = False


class Outcome(NamedTuple):
    """What one access has changed. `access` names it."""

    process: Process
    storage: int
    annotations: Annotations | None
    access: str


class _StoppedError(BaseException):
    """The process stops here, before its next access."""


class _DiedError(BaseException):
    """The process dies here, in the middle of a removal."""


class LocalCollective:
    """Rank 0 speaks for all ranks."""

    def __init__(self, *, rank: int, world_size: int) -> None:
        self.rank, self.world_size = rank, 1

    def connect(self) -> None: ...

    def close(self) -> None: ...

    def broadcast(self, value: int) -> int:
        return value

    def gather(self, value: object) -> list[Any]:
        return [value]

    def announce_leaving(self) -> None: ...

    def is_anyone_leaving(self) -> bool:
        return False


class NoTermination:
    """Nobody sends SIGTERM in the search, whose own process must keep its signal handlers."""

    is_requested = False

    def __init__(self, mailbox: object, *, announce: object) -> None: ...

    def install(self) -> None: ...

    def expect_commit(self) -> None: ...

    def close(self) -> None: ...


class _Clock:
    """A clock that only a sleep advances, by more than any deadline."""

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += 1000.0


class Trainers:
    """Runs processes one access at a time. Use as a context manager: it replaces functions of the trainer's modules."""

    def __init__(self, root: CheckpointRoot, num_saves: int, *, has_rivals: bool = False) -> None:
        self.root = root
        self._has_rivals = has_rivals
        self.num_saves = num_saves
        self.environments: list[Mapping[str, str]] = []
        self._results: list[Any] = []
        self._numbers: dict[str, int] = {}
        self._commits: dict[str, Any] = {}
        self._outcomes: dict[Any, Outcome] = {}
        self._lease = Lease(None)
        self._given: tuple[int, ...] = ()
        self._got: list[int] = []
        self._access = ""
        self._is_nested = False
        self._is_blind = self._dies = False

    def add_environment(self, environment: Mapping[str, str]) -> int:
        """Return the number of an environment."""
        values = dict(environment) | {"WORLD_SIZE": environment[Env.WORLD_SIZE], "RANK": "0"}
        if values not in self.environments:
            self.environments.append(values)
        return self.environments.index(values)

    def resume_of(self, process: Process) -> str:
        return self.environments[process.environment][Env.RESUME]

    def has_answer(self, process: Process) -> bool:
        """Return whether the Lease has answered in the call that the process is in."""
        results = (self._results[number] for number in process.results)
        return any(is_good and isinstance(value, dict) for is_good, value in results)

    def has_claim(self, process: Process) -> bool:
        """Return whether the process has found itself the owner of the root in the call that it is in."""
        uid = self.environments[process.environment][Env.JOB_UID]
        results = (self._results[number] for number in process.results)
        return any(is_good and isinstance(value, Owner) and value.uid == uid for is_good, value in results)

    def calls(self, process: Process) -> tuple[str, ...]:
        """Return the calls that a process may make next."""
        memory = process.memory
        if process.exit_code is not None:
            return ()
        if process.call:
            return (process.call,)
        if not memory.is_started:
            return ("start",)
        if not memory.is_restored:
            return ("restore",)
        if memory.draining:
            return ("finish",)
        most = self.num_saves + (process.attempt == FORMER)  # one before the search begins
        may_save = memory.num_saves < most or memory.request == Request.DRAIN
        return ("beat", "save") if may_save else ("beat",)

    def advance(
        self, process: Process, call: str, storage: int, lease: Lease, *, is_blind: bool = False, dies: bool = False
    ) -> Outcome:
        """Do the next access of a call.

        Args:
            process: the process.
            call: one of `calls`.
            storage: number of the content of the checkpoint root.
            lease: what a request to its Lease meets.
            is_blind: the process cannot read the markers of other attempts.
            dies: the process dies in the access, if that removes commits.
        """
        key = (process, call, storage, lease, is_blind, dies)
        known = self._outcomes.get(key)
        if known is None:
            self._lease, self._is_blind, self._dies = lease, is_blind, dies
            known = self._outcomes[key] = self._run(process, call, storage)
        return known

    def _run(self, process: Process, call: str, storage: int) -> Outcome:
        self.root.mount(storage)
        self._given, self._got, self._access = process.results, [], ""
        publisher.time = session.time = _Clock()  # type: ignore[attr-defined, assignment]
        running = self._thaw(process)
        after = process._replace(call=call)
        try:
            self._call(call, running, process.memory)
            after = after._replace(memory=self._freeze(running, call, process.memory), call="", results=())
        except _StoppedError:
            after = after._replace(results=tuple(self._got))
        except SystemExit as error:
            after = after._replace(exit_code=int(error.code or 0), call="", results=(), memory=Memory())
        except _DiedError:
            after = after._replace(exit_code=1, call="", results=(), memory=Memory())
        return Outcome(after, self.root.read(), self._lease.annotations, self._access or f"makes its call `{call}`")

    def _call(self, call: str, running: Session, memory: Memory) -> None:
        match call:
            case "start":
                running.start()
            case "restore":
                running.restore(lambda folder: None)
            case "beat":
                running._decide()
                assert running._heartbeat is not None
                running._heartbeat.flush()
            case "save":
                step = memory.step + 1
                running.after_step(step=step, samples=10 * step, loss=1.0)
                running.save(self._write)
            case "finish":
                running.finish()

    def _write(self, folder: Path, tag: str) -> None:
        def write() -> None:
            (folder / tag).mkdir(parents=True)
            (folder / tag / "weights.pt").write_bytes(f"{folder.name}/{tag}".encode())

        self._leaf("writes the files of a save", write, private=True)

    # -- accesses -------------------------------------------------------------------------------------------------

    def _leaf(self, name: str, act: Callable[[], Any], *, private: bool = False) -> Any:
        """Do an access for real, or return its recorded result.

        Args:
            name: for people.
            act: does it.
            private: True if no other process can notice the access, or change its result.
        """
        if self._is_nested:
            return act()
        if len(self._got) < len(self._given):
            number = self._given[len(self._got)]
            self._got.append(number)
        else:
            if not private and self._access:
                raise _StoppedError
            if not private:
                self._access = name
            self._is_nested = True
            try:
                result: tuple[bool, Any] = (True, act())
            except (OSError, FencedError, ReshardError) as error:
                result = (False, error)
            finally:
                self._is_nested = False
            number = self._number(result)
            self._got.append(number)
        is_good, value = self._results[number]
        if not is_good:
            raise value.with_traceback(None)
        return list(value) if isinstance(value, list) else value

    def _number(self, result: Any) -> int:
        number = self._numbers.setdefault(repr(result), len(self._results))
        if number == len(self._results):
            self._results.append(result)
        return number

    def exchange(self, annotations: Mapping[str, str]) -> Mapping[str, str]:
        """Stand for `LeaseMailbox.exchange`."""

        def send() -> dict[str, str]:
            lease = self._lease
            if lease.is_cut:
                raise OSError("no route to host")
            if lease.annotations is None:
                raise FencedError("403 Forbidden")
            merged = {**dict(lease.annotations), **annotations}
            self._lease = lease._replace(annotations=tuple(sorted(merged.items())))
            if lease.is_answer_lost:
                raise OSError("timed out")
            # The heartbeat reads nothing else of the answer; what it does not read would only multiply the states.
            return {key: merged[key] for key in (LeaseKey.RELEASED, LeaseKey.REQUEST) if key in merged}

        return dict(self._leaf("renews its Lease and reports", send))

    # -- between two calls ----------------------------------------------------------------------------------------

    def _thaw(self, process: Process) -> Session:
        memory = process.memory
        result = Session(from_env(self.environments[process.environment]), self, keep=KEEP)
        result.position = dataclasses.replace(result.position, step=memory.step, samples=memory.samples)
        result._reported_first, result._draining = memory.reported_first, memory.draining
        heartbeat, publisher_ = result._heartbeat, result._publisher
        assert heartbeat is not None
        assert publisher_ is not None
        heartbeat.start = lambda: None  # type: ignore[method-assign]  # `beat` stands for the thread
        heartbeat.stop = lambda: self._stop(heartbeat)  # type: ignore[method-assign]
        heartbeat._annotations = dict(memory.annotations)
        heartbeat._request, heartbeat._released = memory.request, memory.released
        heartbeat._answers = int(memory.has_new_answer)
        publisher_._unpublished = [(Path(folder), self._commits[folder]) for folder in memory.unpublished]
        publisher_._is_marked = memory.is_marked
        return result

    @staticmethod
    def _stop(heartbeat: Heartbeat) -> None:
        heartbeat.flush()  # the thread's last beat

    def _freeze(self, running: Session, call: str, before: Memory) -> Memory:
        heartbeat, publisher_ = running._heartbeat, running._publisher
        assert heartbeat is not None
        assert publisher_ is not None
        self._commits.update({str(folder): commit for folder, commit in publisher_._unpublished})
        return Memory(
            is_started=True,
            is_restored=before.is_restored or call == "restore",
            num_saves=before.num_saves + (call == "save"),
            step=running.position.step,
            samples=running.position.samples,
            reported_first=running._reported_first,
            draining=running._draining,
            unpublished=tuple(str(folder) for folder, _ in publisher_._unpublished),
            is_marked=publisher_._is_marked,
            has_new_answer=bool(publisher_._unpublished) and heartbeat.answers > publisher_._answers_before,
            annotations=tuple(sorted(heartbeat._annotations.items())),
            request=heartbeat.request,
            released=heartbeat.released,
        )

    @contextlib.contextmanager
    def installed(self, patch: pytest.MonkeyPatch) -> Iterator[None]:
        """Replace the clock, the collective, and every function that reads or writes the checkpoint root."""
        patch.setattr(session, "Collective", LocalCollective)
        patch.setattr(session, "Termination", NoTermination)
        patch.setattr(session, "_now", lambda: TIME)
        patch.setattr(root_owner, "_now", lambda: TIME)
        for module in (session, publisher):
            patch.setattr(module, "time", types.SimpleNamespace())
        loader = VirtualLoader(manifests=(1,), memory_bytes=0)
        patch.setattr(virtual, "describe_loader", lambda scratch: loader)
        private = ("make_folder", "sync_folders", "sync_folder", "write_commit")
        for name in private:
            self._hook(patch, publisher, name, name, private=True)
        alone = not self._has_rivals
        self._hook(patch, publisher, "claim_root", "checks the owner", private=alone)
        self._hook(patch, publisher.Publisher, "free_number", "chooses a folder", private=alone)
        self._hook(patch, Session, "_describe", "computes checksums", private=True)
        self._hook(patch, session, "check_commit", "checks the commit to resume from")
        self._hook(patch, publisher, "confirm_commit", "publishes the commit")
        self._hook(patch, attempts, "announce", "announces its attempt")
        self._hook(patch, attempts, "find_newest_attempt", "looks for newer attempts", blind=lambda: 0)
        self._hook(patch, retention, "remove_released", "removes released commits")
        remove_tree = shutil.rmtree

        def rmtree(folder: Path) -> None:
            if self._dies:
                raise _DiedError
            remove_tree(folder)

        patch.setattr(retention, "shutil", types.SimpleNamespace(rmtree=rmtree))
        yield

    def _hook(
        self,
        patch: pytest.MonkeyPatch,
        owner: Any,
        name: str,
        text: str,
        *,
        private: bool = False,
        blind: Callable[[], Any] | None = None,
    ) -> None:
        real = getattr(owner, name)

        def access(*arguments: Any, **options: Any) -> Any:
            def act() -> Any:
                return blind() if blind is not None and self._is_blind else real(*arguments, **options)

            return self._leaf(text, act, private=private)

        patch.setattr(owner, name, access)
