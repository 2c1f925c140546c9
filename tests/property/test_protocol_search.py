"""Every order of events that two attempts, a zombie, the operator, crashes and partitions allow, within small bounds.

`docs/protocol.md` describes the state machine, the rules, and what these searches cover.
"""

from __future__ import annotations

import dataclasses
import logging
import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from elastic_operator.observed import commit_history
from elastic_operator.reconcile import next_attempt, pending_actions, start_from
from elastic_operator.reconcile.actions import RevokeAttempt
from elastic_operator.reconcile.failures import refused_commits
from elastic_trainer import publisher, retention
from elastic_trainer.publisher import Publisher
from elastic_trainer.session import Session
from elastic_trainer.settings import from_env
from reshard.commits import takeover
from reshard.contract import Env
from tests.property.protocol.model import Scenario, System
from tests.property.protocol.rules import Rules
from tests.property.protocol.search import CounterexampleError, Explored, Step, ViolationError, explore
from tests.property.protocol.storage import CheckpointRoot
from tests.randomness import SOAKING

SAME_NODES = {"n1": 1, "n2": 1, "n3": 1}
SMALLER_NODES = {"n1": 2, "n2": 1, "n3": 1}
"""The second attempt gets fewer accelerators, so the commit is converted first."""

EVERY_FAULT = frozenset({"die", "lose", "cut", "suspect", "lost-answer", "blind", "reader", "drain"})
ZOMBIE = frozenset({"lose", "cut", "blind"})
"""With these, the first attempt goes on beside the second one."""

IN_CONVERSION = EVERY_FAULT - {"cut"}
NUM_SAVES = 2 if SOAKING else 1
"""Of an attempt beside another one: with the second save there are five times as many orders."""

PINNED = frozenset({"lose", "return", "refuse"})
"""The commit cannot be converted, so the job waits until the first node is back."""

REJECTED = Scenario(gpus=SMALLER_NODES, faults=2, kinds=frozenset({"power", "reject"}), num_saves=1)
"""The only commit is called damaged when it is converted, so a person has to say how the job goes on."""

MAX_STATES = 300_000


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder in memory where there is one: the search writes and reads thousands of small files."""
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=memory if os.access(memory, os.W_OK) else None) as name:
        yield Path(name)


@pytest.fixture(autouse=True)
def few_commits_are_kept(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let the operator release a commit as soon as there is a newer one, so that two commits suffice to see it."""
    monkeypatch.setattr(commit_history, "KEPT_VALID", 1)
    logging.disable(logging.ERROR)
    yield
    logging.disable(logging.NOTSET)


def search(folder: Path, patch: pytest.MonkeyPatch, scenario: Scenario, names: set[str] | None = None) -> Explored:
    """Search a scenario; add the names of all transitions to `names`."""
    system = System(CheckpointRoot(folder / "gpt"), scenario)
    rules = Rules(system)

    def check(before: Any, step: Step) -> None:
        rules.check(before, step)
        if names is not None:
            names.add(step.name)

    with system.trainers.installed(patch):
        return explore(system.start, system.successors, check, rules.is_good, MAX_STATES)


@pytest.mark.parametrize(
    ("scenario", "happens"),
    [
        pytest.param(
            Scenario(gpus=SAME_NODES, faults=1, kinds=EVERY_FAULT & ZOMBIE, num_saves=NUM_SAVES),
            ["node of attempt 1, stops reporting", "loses the API server", "cannot read the folder"],
            id="zombie",
        ),
        pytest.param(
            Scenario(gpus=SAME_NODES, faults=1, kinds=EVERY_FAULT - ZOMBIE),
            ["the process of attempt 1 dies", "removes released commits, and dies", "answer is lost", "another job is",
             "exits with code 75", "silent for too long", "ReleaseCommits", "dies in the middle of: RevokeAttempt"],
            id="any-other-fault",
            marks=pytest.mark.soak_only,
        ),
        pytest.param(
            Scenario(gpus=SMALLER_NODES, faults=1, kinds=IN_CONVERSION, num_saves=NUM_SAVES),
            ["the reshard pod of attempt 2 converts", "attempt 2 publishes the commit"],
            id="conversion",
            marks=pytest.mark.soak_only,
        ),
        pytest.param(
            Scenario(gpus=SMALLER_NODES, faults=2, kinds=PINNED, num_saves=1),
            ["finds that it cannot convert", "n1 reports again", "the pod of attempt 3 starts on n1"],
            id="pinned",
            marks=pytest.mark.soak_only,
        ),
        pytest.param(
            REJECTED,
            ["calls the commit damaged", "go on from a1/step-", "begin from nothing", "attempt 3 publishes the commit"],
            id="rejected",
        ),
        pytest.param(
            Scenario(gpus=SAME_NODES, faults=2, kinds=frozenset({"die", "suspect"}), num_saves=1),
            ["attempt 3 publishes the commit"],
            id="two-faults",
            marks=pytest.mark.soak_only,
        ),
    ],
)  # fmt: skip
def test_no_order_of_events_breaks_a_rule_of_the_protocol(
    folder: Path, monkeypatch: pytest.MonkeyPatch, scenario: Scenario, happens: list[str]
) -> None:
    names: set[str] = set()
    explored = search(folder, monkeypatch, scenario, names)
    print(f"{explored.num_states} states, {explored.num_steps} transitions, {explored.num_good} good states")
    assert explored.num_good > 0
    missing = [text for text in happens if not any(text in name for name in names)]
    assert not missing, f"never happens: {missing}"


TAKE_OVER = Scenario(gpus=SAME_NODES, faults=0, kinds=frozenset({"die", "rival"}), num_saves=1, takes_over=True)


@pytest.mark.parametrize(
    ("faults", "also"),
    [
        pytest.param(0, [], id="former-owner"),
        pytest.param(
            1,
            ["finds another owner", "a third job takes the root over", "attempt 2 publishes the commit"],
            id="third-job",
            marks=pytest.mark.soak_only,
        ),
    ],
)
def test_a_take_over_beside_the_former_owner_keeps_the_rules(
    folder: Path, monkeypatch: pytest.MonkeyPatch, faults: int, also: list[str]
) -> None:
    names: set[str] = set()
    explored = search(folder, monkeypatch, dataclasses.replace(TAKE_OVER, faults=faults), names)
    print(f"{explored.num_states} states, {explored.num_steps} transitions, {explored.num_good} good states")
    happens = ["claims the root", "chooses the commit", "converts", "attempt 99 publishes the commit", *also]
    happens += ["exits with code 77", "the former job is deleted", "attempt 1 publishes the commit"]
    missing = [text for text in happens if not any(text in name for name in names)]
    assert not missing, f"never happens: {missing}"


def _take_the_oldest(patch: pytest.MonkeyPatch) -> None:
    choose = takeover.choose_commit
    patch.setattr(takeover, "choose_commit", lambda root, *, uid, writers: dataclasses.replace(
        choose(root, uid=uid, writers=writers), commit="a1/step-00000001"))  # fmt: skip


def _never_ask_for_the_owner(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Publisher, "claim", lambda self: None)


def _remove_what_others_wrote(patch: pytest.MonkeyPatch) -> None:
    def prune(root: Path, names: Any, *, owner: str, keep: int, protected: Any) -> tuple[str, ...]:
        for _, _, commit in sorted(retention.find_commits(root), reverse=True)[keep:]:
            if commit not in protected:
                retention.remove_commit(commit)
        return ()

    patch.setattr(retention, "remove_released", prune)


def _begin_from_nothing(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(next_attempt, "start_source", lambda spec: "")
    patch.setattr(start_from, "start_source", lambda spec: "")


@pytest.mark.parametrize(
    ("plant", "problem"),
    [
        (_take_the_oldest, "the newest commit is a1/step-00000002"),
        (_never_ask_for_the_owner, "has not checked the owner"),
        (_remove_what_others_wrote, "a commit of the former owner is gone"),
        (_begin_from_nothing, "an attempt is launched, and the job has lost the commit"),
    ],
)
def test_a_planted_defect_of_a_take_over_is_found(
    folder: Path, monkeypatch: pytest.MonkeyPatch, plant: Callable[[pytest.MonkeyPatch], None], problem: str
) -> None:
    plant(monkeypatch)
    with pytest.raises(CounterexampleError) as caught:
        search(folder, monkeypatch, TAKE_OVER)
    print(caught.value)
    assert problem in caught.value.problem


# -- planted defects: each has to be found -------------------------------------------------------------------------


def _publish_unasked(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Publisher, "_may_publish", lambda self: True)


def _forget_what_a_resume_needs(patch: pytest.MonkeyPatch) -> None:
    """Both guards at once: the operator would not release that commit, and the trainer would not remove it."""
    remove = retention.remove_released
    patch.setattr(commit_history, "find_needed", lambda status: frozenset())
    patch.setattr(
        retention,
        "remove_released",
        lambda root, names, *, owner, keep, protected: remove(root, names, owner=owner, keep=keep, protected=()),
    )


def _launch_beside_the_old_attempt(patch: pytest.MonkeyPatch) -> None:
    stop = pending_actions._stop_attempts
    patch.setattr(
        pending_actions,
        "_stop_attempts",
        lambda context, status: (action for action in stop(context, status) if not isinstance(action, RevokeAttempt)),
    )


def _report_before_publishing(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(publisher, "confirm_commit", lambda folder: None)


def _remove_without_a_release(patch: pytest.MonkeyPatch) -> None:
    def prune(root: Path, names: Any, *, owner: str, keep: int, protected: Any) -> tuple[str, ...]:
        commits = sorted(retention.find_commits(root), reverse=True)
        for _, _, commit in commits[keep:]:
            retention.remove_commit(commit)
        return ()

    patch.setattr(retention, "remove_released", prune)


def _never_publish_later(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Publisher, "confirm_when_answered", lambda self: None)


def _begin_after_a_refusal(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(refused_commits, "find_problem", lambda status: "")


@pytest.mark.parametrize(
    ("plant", "kinds", "problem"),
    [
        (_publish_unasked, {"lose"}, "publishes a commit, and its Lease has not answered"),
        (_forget_what_a_resume_needs, {"die"}, "is gone, and the planned attempt refers to it"),
        (_launch_beside_the_old_attempt, {"lose"}, "may use its Lease"),
        (_report_before_publishing, set(), "is gone, and status.checkpoint refers to it"),
        (_remove_without_a_release, {"die"}, "is gone, and status.checkpoint refers to it"),
        pytest.param(_never_publish_later, {"cut"}, "cannot go on", marks=pytest.mark.soak_only),
        (_begin_after_a_refusal, REJECTED.kinds, "attempt 3 begins from nothing after a commit was acknowledged"),
    ],
)
def test_a_planted_defect_is_found_and_its_steps_are_listed(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    plant: Callable[[pytest.MonkeyPatch], None],
    kinds: set[str],
    problem: str,
) -> None:
    plant(monkeypatch)
    with pytest.raises(CounterexampleError) as caught:
        scenario = Scenario(gpus=SAME_NODES, faults=1, kinds=frozenset(kinds))
        search(folder, monkeypatch, REJECTED if kinds == REJECTED.kinds else scenario)
    print(caught.value)
    assert problem in caught.value.problem
    assert caught.value.steps[0] == "the operator looks and decides"


def test_a_process_is_restored_from_all_that_it_remembers(folder: Path) -> None:
    """A new attribute of these classes may have to be added to `Memory`, or the search forgets it."""
    env = {Env.CHECKPOINT_ROOT: str(folder), Env.JOB_UID: "uid", Env.LEASE: "gpt-a1"}
    session = Session(from_env(env), None)  # type: ignore[arg-type]
    remembered = {"position", "_draining"}
    rest = {"settings", "_collective", "_termination", "_heartbeat", "_publisher", "_saves", "_last_commit_monotonic"}
    assert set(vars(session)) == remembered | rest
    remembered = {"_annotations", "_request", "_released", "_answers"}
    rest = {"_mailbox", "_every_seconds", "_on_fenced", "_pending", "_stopping", "_lock", "_exchanging", "_thread"}
    assert set(vars(session._heartbeat)) == remembered | rest | {"_refused_since"}
    remembered = {"_unpublished", "_answers_before", "_is_marked"}
    assert set(vars(session._publisher)) == remembered | {
        "_settings",
        "_heartbeat",
        "_keep",
        "_root",
        "_folder",
        "_refusals",
    }


# -- the search itself ---------------------------------------------------------------------------------------------


def test_the_search_returns_the_shortest_way_to_a_broken_rule() -> None:
    def successors(state: Any) -> Iterator[Step]:
        yield Step("add one", state + 1)
        yield Step("double", state * 2)

    def check(state: Any, step: Step) -> None:
        if step.after == 7:
            raise ViolationError("seven")

    with pytest.raises(CounterexampleError) as caught:
        explore(1, successors, check, lambda state: True, 100)
    assert caught.value.steps == ("add one", "add one", "double", "add one")
    assert str(caught.value).splitlines()[0] == "seven"


def test_a_state_from_which_only_a_fault_leads_on_is_stuck() -> None:
    after = {"start": ("end", "pit"), "pit": ("start",), "end": ()}

    def successors(state: Any) -> Iterator[Step]:
        yield from (Step(name, name, is_fault=state == "pit" or name == "pit") for name in after[state])

    with pytest.raises(CounterexampleError, match=r"cannot go on.*\n *1\. pit"):
        explore("start", successors, lambda state, step: None, lambda state: state == "end", 10)
    good = explore("start", lambda s: [Step(n, n) for n in after[str(s)]], lambda s, t: None, lambda s: s == "end", 10)
    assert (good.num_states, good.num_steps, good.num_good) == (3, 3, 1)
