"""Commits that this job no longer needs while another job is about to start from its folder: none is lost sight of."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic_operator.api.claim_path import Start
from elastic_operator.api.conditions import Type, find
from elastic_operator.api.serialization import to_wire
from elastic_operator.api.status import MAX_WITHHELD, Checkpoint, Commit, Status
from elastic_operator.api.status_reader import read_status
from elastic_operator.observed import commit_history
from elastic_operator.observed.pending_starts import MAX_AWAITED, Protection
from elastic_operator.reconcile.actions import Decision, Event, ReleaseCommits
from reshard.contract import COMMIT_NAME, MAX_RELEASED, CommitRef, LeaseKey
from reshard.topology import Topology
from tests.unit.elastic_operator.reconcile.test_commit_release import hashed, look, running, world

TOPOLOGY = Topology(dp=2)
WAITS = Start(job="next", claim="ckpt", folder="gpt")
READS = dataclasses.replace(WAITS, reads_after=0.0)


def commit(step: int, attempt: int = 1) -> Commit:
    uri = f"/checkpoint/gpt/a{attempt}/step-{step:08d}"
    return Commit(uri=uri, step=step, samples=step, attempt=attempt, topology=TOPOLOGY)


def names(*steps: int) -> tuple[str, ...]:
    return tuple(f"a1/step-{step:08d}" for step in steps)


def recorded(checkpoint: Checkpoint) -> set[str]:
    """The names of all commits that the status knows of."""
    history = {commit_history.parse_commit_name(item.uri) for item in checkpoint.history}
    return {*history, *checkpoint.released, *checkpoint.withheld}


def save(checkpoint: Checkpoint, steps: range, needed: tuple[str, ...] = (), **release: Any) -> Checkpoint:
    """Record commits one after another, as a training reports them, and release what may be released after each."""
    for step in steps:
        checkpoint = commit_history.add(checkpoint, commit(step))
        checkpoint = commit_history.release(checkpoint, needed=needed, **release)
    return checkpoint


@pytest.mark.parametrize("number", [4, 30, 200])
def test_every_commit_made_while_another_job_reads_here_is_removed_once_it_has_gone(number: int) -> None:
    needed = (commit(1).uri,)
    checkpoint = save(Checkpoint(), range(1, number + 1), needed, read_by_others=True)
    assert checkpoint.released == ()
    assert commit(1) in checkpoint.history
    assert recorded(checkpoint) == set(names(*range(1, number + 1)))
    removed: set[str] = set()
    for _ in range(number):
        checkpoint = commit_history.release(checkpoint, needed=needed)
        assert len(checkpoint.released) <= MAX_RELEASED
        removed.update(checkpoint.released)
        checkpoint = commit_history.forget_removed(checkpoint, checkpoint.released)
    assert removed == set(names(*range(2, number - 2)))
    assert recorded(checkpoint) == set(names(1, number - 2, number - 1, number))


@pytest.mark.parametrize("number", [20, 100])
def test_a_job_that_never_starts_keeps_a_bounded_number_of_commits(number: int) -> None:
    checkpoint = save(Checkpoint(), range(1, 20), awaited=[""])
    assert checkpoint.released == ()
    assert checkpoint.withheld == names(*range(1, 17))
    for step in range(20, number + 1):
        checkpoint = save(checkpoint, range(step, step + 1), awaited=[""])
        assert checkpoint.released == names(step - 19)
        checkpoint = commit_history.forget_removed(checkpoint, checkpoint.released)
    assert len(checkpoint.withheld) == MAX_AWAITED


def test_a_commit_that_a_waiting_job_names_stays_however_many_follow() -> None:
    checkpoint = save(Checkpoint(), range(1, 41), awaited=["a1/step-00000002"])
    assert names(2)[0] in checkpoint.withheld
    assert names(1)[0] in checkpoint.released
    assert len(checkpoint.withheld) == MAX_AWAITED


def test_a_withheld_commit_is_never_taken_up_again() -> None:
    checkpoint = save(Checkpoint(), range(1, 6), read_by_others=True)
    assert commit_history.add(checkpoint, commit(1)) == checkpoint


def test_a_damaged_newest_commit_does_not_lose_what_is_withheld() -> None:
    checkpoint = save(Checkpoint(), range(1, 6), read_by_others=True)
    for item in checkpoint.history:
        checkpoint = commit_history.invalidate(checkpoint, item.uri, "damaged")
        assert checkpoint.withheld == names(1, 2)


def test_commits_that_cannot_be_removed_do_not_keep_others_from_their_turn() -> None:
    checkpoint, stuck = Checkpoint(), set(names(*range(1, MAX_RELEASED + 1)))
    removed: set[str] = set()
    for step in range(1, 120):
        checkpoint = save(checkpoint, range(step, step + 1))
        gone = set(checkpoint.released) - stuck
        removed |= gone
        checkpoint = commit_history.forget_removed(checkpoint, gone)
        assert stuck & set(names(*range(1, step - 2))) <= recorded(checkpoint)
    assert len(removed) > 50


@given(st.lists(st.sampled_from(["save", "remove", "wait", "read", "go"]), max_size=120))
def test_no_commit_is_lost_and_none_that_a_start_needs_is_handed_out(happenings: list[str]) -> None:
    checkpoint, protection = Checkpoint(), Protection()
    step, removed = 0, set[str]()
    for happening in happenings:
        if happening == "save":
            step += 1
            checkpoint = commit_history.add(checkpoint, commit(step))
        elif happening in ("wait", "read"):
            # A commit that the status lists when the other job is created; it may be on the way to its removal.
            named = min(recorded(checkpoint), default="a1")
            protection = Protection(is_read=happening == "read", folders=frozenset({named}))
        elif happening == "go":
            protection = Protection()
        read, awaited = protection.is_read, protection.folders
        checkpoint = commit_history.release(checkpoint, needed=(), read_by_others=read, awaited=awaited)
        handed = set(checkpoint.released) - commit_history.find_withheld(checkpoint, protection)
        assert not handed & protection.folders
        assert not (read and handed)
        if happening == "remove":
            removed |= handed
            checkpoint = commit_history.forget_removed(checkpoint, handed)
        assert recorded(checkpoint) | removed == set(names(*range(1, step + 1)))
        assert not recorded(checkpoint) & removed


def ref(step: int, attempt: int = 2) -> CommitRef:
    uri = f"/checkpoint/gpt/a{attempt}/step-{step:08d}"
    return CommitRef(uri=uri, step=step, samples=step, attempt=attempt, topology=TOPOLOGY.to_dict(), num_bytes=1)


def decide_with(status: Status, *starts: Start, step: int = 0, released: tuple[str, ...] = ()) -> Decision:
    notes = {LeaseKey.COMMIT: ref(step).to_json()} if step else {}
    notes[LeaseKey.RELEASED] = commit_history.format_released(released)
    decision: Decision = look(status, dataclasses.replace(world(**notes), starts=frozenset(starts)))
    return decision


def warnings(decision: Decision) -> list[Event]:
    return [item for item in decision.events if item.warning]


def test_the_condition_names_the_job_that_keeps_commits_and_what_to_do() -> None:
    status = hashed(running(save(Checkpoint(), range(1, 4))))
    free = decide_with(status)
    assert find(free.status.conditions, Type.COMMITS_RELEASED) is None
    few = decide_with(free.status, WAITS, step=4)
    condition = find(few.status.conditions, Type.COMMITS_RELEASED)
    assert condition is not None
    assert (condition.status, condition.reason) == ("False", "StartPending")
    assert "next" in condition.message
    assert not warnings(few)
    status = few.status
    events: list[Event] = []
    for step in range(5, 40):
        decision = decide_with(status, WAITS, step=step, released=status.checkpoint.released)
        status, events = decision.status, [*events, *warnings(decision)]
    condition = find(status.conditions, Type.COMMITS_RELEASED)
    assert condition is not None
    assert (condition.status, condition.reason) == ("False", "StartOverdue")
    assert [item.reason for item in events] == ["StartOverdue"]
    assert events[0].message == condition.message
    assert "next; no more than 16" in condition.message
    assert "or delete them" in condition.message
    gone = find(decide_with(status).status.conditions, Type.COMMITS_RELEASED)
    assert gone is not None
    assert (gone.status, gone.reason) == ("True", "Released")


def test_a_conversion_that_begins_takes_back_every_release_and_only_then() -> None:
    status = hashed(running(save(Checkpoint(), range(1, 31), awaited=[""])))
    released = status.checkpoint.released
    assert released == names(*range(1, 12))
    assert decide_with(status, WAITS, released=released).actions == ()
    begun = decide_with(status, READS, released=released)
    assert begun.actions == (ReleaseCommits(lease="gpt-a2", names=()),)
    condition = find(begun.status.conditions, Type.COMMITS_RELEASED)
    assert condition is not None
    assert condition.reason == "StartPending", "a conversion has an end of its own"
    over = decide_with(begun.status)
    assert set(over.status.checkpoint.released) == set(names(*range(1, 28)))
    assert over.actions == (ReleaseCommits(lease="gpt-a2", names=over.status.checkpoint.released),)


def test_more_commits_than_the_status_can_hold_are_told_by_name_and_not_released() -> None:
    checkpoint = save(Checkpoint(), range(1, MAX_WITHHELD + 4), read_by_others=True)
    status = hashed(running(checkpoint))
    decision = decide_with(status, READS, step=400)
    assert decision.status.checkpoint.released == ()
    assert len(decision.status.checkpoint.withheld) == MAX_WITHHELD
    (event,) = [item for item in warnings(decision) if item.reason == "CommitsForgotten"]
    assert event.message.endswith(f"remove by hand, below /checkpoint/gpt: {names(1)[0]}")


def test_a_status_with_the_longest_names_of_commits_is_read_again_and_below_64_kib() -> None:
    longest = [f"a999999999/step-{number:0>64}" for number in range(MAX_WITHHELD + MAX_RELEASED)]
    assert all(COMMIT_NAME.fullmatch(name) for name in longest)
    checkpoint = save(Checkpoint(), range(1, 4))
    checkpoint = dataclasses.replace(
        checkpoint, released=tuple(longest[:MAX_RELEASED]), withheld=tuple(longest[MAX_RELEASED:])
    )
    status = decide_with(hashed(running(checkpoint)), READS).status
    assert set(longest) == {*status.checkpoint.released, *status.checkpoint.withheld}
    text = json.dumps(to_wire(status))
    assert len(text.encode()) < 32 * 1024
    assert read_status(json.loads(text)).status.checkpoint == status.checkpoint
