"""Refused commits: one is passed over, all or two alike stop the job until `spec.checkpoint.resumeFrom` says a word."""

from __future__ import annotations

import copy
import dataclasses
from typing import Any

import pytest

from elastic_operator.api.conditions import Type, find
from elastic_operator.api.serialization import Time, to_wire
from elastic_operator.api.spec import SpecError, parse_spec
from elastic_operator.api.status import Checkpoint, Commit, Phase, Recovery, ResumeChoice, StartedFrom, Status
from elastic_operator.api.status_reader import read_status
from elastic_operator.observed import commit_history
from elastic_operator.observed.observation import Observation
from elastic_operator.observed.timeouts import Timeouts
from elastic_operator.plugin.pages.job_source import JobSource
from elastic_operator.plugin.pages.wait_reason import explain_wait
from elastic_operator.reconcile.actions import Decision, LaunchAttempt
from elastic_operator.reconcile.decide import decide
from reshard.contract import ExitCode
from tests.unit.elastic_operator.reconcile.test_decide_phases import (
    BIG,
    JOB,
    NOW,
    SMALL,
    SPEC,
    WORLD,
    lease,
    lost_node,
    nodes,
    resharded,
    settled,
    worker_job,
    workers,
)

IDLE = Observation(nodes=nodes("n1", "n2", "n3"))
FOREIGN = "{name}: data.pkl has the global trainer.MyState, which is not allowed"


def commit(step: int, refused: str = "", *, attempt: int = 1, **changes: Any) -> Commit:
    name = f"a{attempt}/step-{step:08d}"
    made = Commit(uri=f"/checkpoint/gpt/{name}", step=step, samples=20 * step, attempt=attempt, topology=BIG)
    reason = refused.format(name=name)
    return dataclasses.replace(made, **{"invalid": bool(refused), "invalid_reason": reason, **changes})


def ended(*history: Commit, **changes: Any) -> Status:
    """A job whose attempt 1 has ended, with these commits, newest first."""
    checkpoint = commit_history.with_newest(Checkpoint(history=history))
    return dataclasses.replace(settled(), current=None, checkpoint=checkpoint, **changes)


def look(
    status: Status, world: Observation = IDLE, *, now: float = NOW, retry: str = "", word: str = "", **changes: Any
) -> Decision:
    checkpoint = {**SPEC["checkpoint"], **changes.pop("checkpoint", {}), "resumeFrom": word}
    spec = parse_spec({**copy.deepcopy(SPEC), **changes, "checkpoint": checkpoint})
    return decide(dataclasses.replace(JOB, retry_request=retry), spec, status, world, limits=Timeouts(), now=now)


def name_of_start(decision: Decision) -> str:
    current = decision.status.current
    return "" if current is None else commit_history.parse_commit_name(current.resume.source) or current.resume.source


def history_of(decision: Decision) -> dict[str, tuple[bool, bool]]:
    """For each commit: whether it is invalid, and whether it was put aside."""
    return {item.uri[len("/checkpoint/gpt/") :]: (item.invalid, item.put_aside)
            for item in decision.status.checkpoint.history}  # fmt: skip


@pytest.mark.parametrize(
    ("history", "start"),
    [
        pytest.param([commit(10, "CRC differs"), commit(5)], "a1/step-00000005", id="one-damaged"),
        pytest.param(
            [commit(15, "a.pt: CRC is 1"), commit(10, "b.pt: CRC is 2"), commit(5)], "a1/step-00000005",
            id="two-damaged-each-in-its-way",
        ),
        pytest.param([commit(10, FOREIGN), commit(5)], "a1/step-00000005", id="one-refused"),
        pytest.param([commit(15, FOREIGN), commit(10, FOREIGN), commit(5)], None, id="two-refused-alike"),
        pytest.param(
            [commit(15, "of step 15, attempt 1"), commit(10, "of step 10, attempt 1"), commit(5)], None,
            id="alike-but-for-their-own-numbers",
        ),
        pytest.param(
            [commit(15, "x" * 600 + " 1"), commit(10, "x" * 600 + " 2"), commit(5)], None, id="alike-as-far-as-kept",
        ),
        pytest.param(
            [commit(20), commit(15, FOREIGN), commit(10, FOREIGN)], "a1/step-00000020", id="older-than-a-valid-one"
        ),
        pytest.param([commit(10, "CRC is 1"), commit(5, "CRC is 2")], None, id="all-refused"),
        pytest.param([commit(10, "CRC differs")], None, id="the-only-one"),
    ],
)  # fmt: skip
def test_one_refused_commit_is_passed_over_and_all_or_two_alike_stop_the_job(
    history: list[Commit], start: str | None
) -> None:
    decision = look(ended(*history))
    if start is not None:
        assert name_of_start(decision) == start
        return
    status = decision.status
    assert (status.phase, status.reason, status.attempt) == (Phase.FAILED, "CommitsRefused", 1)
    assert not [action for action in decision.actions if isinstance(action, LaunchAttempt)]
    assert look(status).status == status, "and stays so"


def test_the_sentence_names_the_commits_what_was_said_of_each_and_the_command_that_goes_on() -> None:
    decision = look(ended(commit(15, FOREIGN), commit(10, FOREIGN), commit(5)))
    status = decision.status
    conditions = [find(status.conditions, type_) for type_ in (Type.RESUMED, Type.FAILED)]
    assert {(item.status, item.reason) for item in conditions if item} == {
        ("False", "CommitsRefused"), ("True", "CommitsRefused"),
    }  # fmt: skip
    source = JobSource(name="gpt", namespace="ns", status=status, generation=1)
    shown = [explain_wait(source, NOW).doing, *(item.message for item in conditions if item)]
    shown += [event.message for event in decision.events if event.reason == "CommitsRefused"]
    assert shown == [status.message] * 4
    for text in (
        "two commits were refused alike",
        '-n ns --type merge -p \'{"spec":{"checkpoint":{"resumeFrom":"a1/step-00000005"}}}\'',
        "or to Beginning (from nothing)",
        f"a1/step-00000015: {FOREIGN.format(name='a1/step-00000015')}. a1/step-00000010: ",
        "a1/step-00000005: not refused",
    ):
        assert text in status.message
    assert explain_wait(source, NOW).advice == ""


@pytest.mark.parametrize(
    ("lost", "is_acknowledged"),
    [
        ({}, False),
        ({"checkpoint": Checkpoint(released=("a1/step-00000005",))}, True),
        ({"checkpoint": Checkpoint(withheld=("a1/step-00000005",))}, True),
        ({"recoveries": (Recovery(cause="NodeNotReady", commit_step=5, launch_time=Time(NOW - 9)),)}, True),
    ],
)
def test_a_job_of_which_only_traces_of_commits_are_left_does_not_begin_from_nothing(
    lost: dict[str, Any], is_acknowledged: bool
) -> None:
    status = look(dataclasses.replace(ended(), **lost) if lost else Status()).status
    assert (status.reason == "CommitsRefused") == is_acknowledged
    assert ("holds no commit any more" in status.message) == is_acknowledged


@pytest.mark.parametrize(
    ("word", "start", "after"),
    [
        (
            "Beginning", "",
            {"a1/step-00000015": (True, True), "a1/step-00000010": (True, True), "a1/step-00000005": (True, True)},
        ),
        (
            "a1/step-00000015", "a1/step-00000015",
            {"a1/step-00000015": (False, False), "a1/step-00000010": (True, False), "a1/step-00000005": (False, False)},
        ),
        (
            "a1/step-00000010", "a1/step-00000010",
            {"a1/step-00000015": (True, True), "a1/step-00000010": (False, False), "a1/step-00000005": (False, False)},
        ),
        (
            "a1/step-00000005", "a1/step-00000005",
            {"a1/step-00000015": (True, True), "a1/step-00000010": (True, True), "a1/step-00000005": (False, False)},
        ),
    ],
)  # fmt: skip
def test_the_word_lets_a_stopped_job_go_on_from_there_and_from_nothing_newer(
    word: str, start: str, after: dict[str, tuple[bool, bool]]
) -> None:
    stopped = look(ended(commit(15, FOREIGN), commit(10, FOREIGN), commit(5))).status
    decision = look(stopped, word=word)
    assert [type(action).__name__ for action in decision.actions] == ["LaunchAttempt"]
    assert (name_of_start(decision), decision.status.attempt) == (start, 2)
    assert history_of(decision) == after
    assert decision.status.resume_choice == ResumeChoice(value=word, after_attempt=1, after_step=15, attempt=2)
    assert "ResumeFromUsed" in [event.reason for event in decision.events]
    assert read_status(to_wire(decision.status)).status == decision.status


@pytest.mark.parametrize("word", ["Beginning", "a1/step-00000005"])
def test_a_word_that_stays_in_the_spec_is_used_once(word: str) -> None:
    stopped = look(ended(commit(10, FOREIGN), commit(5, FOREIGN))).status
    used = look(stopped, word=word).status
    newer = commit(20, attempt=2)
    trained = dataclasses.replace(used, current=None, checkpoint=commit_history.add(used.checkpoint, newer))
    again = look(trained, word=word)
    assert (name_of_start(again), again.status.attempt) == ("a2/step-00000020", 3)
    refused = look(
        ended(*(commit(at, FOREIGN, attempt=2) for at in (20, 15)), resume_choice=used.resume_choice), word=word
    )
    assert refused.status.reason == "CommitsRefused"
    assert f"To repeat {word}, which attempt 2 has used, empty the field first" in refused.status.message
    emptied = look(refused.status).status
    assert (emptied.phase, emptied.resume_choice) == (Phase.FAILED, None)
    said_again = look(emptied, word="Beginning").status
    assert (said_again.phase, said_again.current.resume.uri) == (Phase.STARTING, "")  # type: ignore[union-attr]


def test_a_job_that_began_again_by_the_word_begins_again_until_it_has_a_commit() -> None:
    used = look(look(ended(commit(10, FOREIGN), commit(5, FOREIGN))).status, word="Beginning").status
    again = look(dataclasses.replace(used, current=None))
    assert again.status.attempt == 3
    assert again.status.current.resume.uri == ""  # type: ignore[union-attr]
    assert again.status.current.resume.reason == (  # type: ignore[union-attr]
        "spec.checkpoint.resumeFrom is Beginning: training starts from nothing"
    )
    own = commit_history.add(used.checkpoint, commit(3, attempt=2))
    damaged = commit_history.invalidate(own, commit(3, attempt=2).uri, "CRC is 1")
    stopped = look(dataclasses.replace(used, current=None, checkpoint=damaged), word="Beginning").status
    assert stopped.reason == "CommitsRefused", "a commit that was made since then counts"


def test_a_refused_commit_that_is_refused_again_is_passed_over_once_and_then_the_job_asks_again() -> None:
    stopped = look(ended(commit(15, FOREIGN), commit(10, FOREIGN), commit(5))).status
    used = look(stopped, word="a1/step-00000010").status
    again = commit_history.invalidate(used.checkpoint, commit(10).uri, FOREIGN.format(name="a1/step-00000010"))
    status = look(dataclasses.replace(used, current=None, checkpoint=again), word="a1/step-00000010").status
    assert status.reason == "CommitsRefused", "the other one was refused alike"


def test_a_word_that_is_said_while_an_attempt_runs_does_not_act_on_what_it_commits() -> None:
    running = look(settled(), WORLD, word="Beginning")
    assert running.status.phase == Phase.RUNNING
    assert [event.reason for event in running.events] == ["ResumeFromIgnored"]
    assert look(running.status, WORLD, word="Beginning").events == ()
    newer = commit_history.add(running.status.checkpoint, commit(20))
    lost = dataclasses.replace(running.status, current=None, checkpoint=newer)
    assert name_of_start(look(lost, word="Beginning")) == "a1/step-00000020"
    at_once = dataclasses.replace(running.status, current=None)
    assert name_of_start(look(at_once, word="Beginning")) == name_of_start(look(at_once))
    refused = ended(commit(10, FOREIGN), commit(5, FOREIGN), resume_choice=running.status.resume_choice)
    stopped = look(refused, word="Beginning").status
    assert "To repeat Beginning, empty the field first" in stopped.message


def test_a_used_word_that_the_status_has_lost_is_not_used_again() -> None:
    used = look(look(ended(commit(10, FOREIGN), commit(5, FOREIGN))).status, word="Beginning").status
    trained = dataclasses.replace(settled(), checkpoint=commit_history.add(used.checkpoint, commit(2000)))
    noted = look(dataclasses.replace(trained, resume_choice=None), WORLD, word="Beginning").status
    again = look(dataclasses.replace(noted, current=None), word="Beginning")
    assert name_of_start(again) == "a1/step-00002000"


def test_a_job_of_which_only_traces_of_commits_are_left_begins_by_the_word_until_it_has_a_commit() -> None:
    traces = Checkpoint(released=("a1/step-00000005",))
    stopped = look(dataclasses.replace(ended(), attempt=3, checkpoint=traces)).status
    begun = look(stopped, word="Beginning").status
    assert (begun.attempt, begun.phase) == (4, Phase.STARTING)
    assert look(dataclasses.replace(begun, current=None), word="Beginning").status.attempt == 5
    newer = dataclasses.replace(traces, released=("a4/step-00000009",))
    lost = look(dataclasses.replace(begun, current=None, checkpoint=newer), word="Beginning").status
    assert lost.reason == "CommitsRefused"


def test_a_word_that_is_said_before_the_launch_makes_a_new_plan() -> None:
    status = look(settled(), lost_node()).status
    assert (status.phase, status.attempt) == (Phase.RESHARDING, 2)
    decision = look(status, dataclasses.replace(lost_node(), pods=(), jobs=(), leases={}), word="a1/step-00000005")
    assert (name_of_start(decision), decision.status.attempt) == ("a1/step-00000005", 3)


@pytest.mark.parametrize("is_stopped", [True, False])
def test_a_word_that_names_no_commit_of_the_history_is_said_and_not_guessed(is_stopped: bool) -> None:
    history = (commit(10, FOREIGN), commit(5, FOREIGN)) if is_stopped else (commit(10), commit(5))
    before = look(ended(*history)).status if is_stopped else ended(*history)
    status = look(before, word="a7/step-00000010").status
    assert (status.phase, status.reason, status.attempt) == (Phase.FAILED, "CommitUnknown", 1)
    assert "names a7/step-00000010, which status.checkpoint.history does not hold" in status.message
    assert "a1/step-00000010: " in status.message
    corrected = look(status, word="a1/step-00000010")
    assert name_of_start(corrected) == "a1/step-00000010"
    emptied = look(status).status
    assert (emptied.reason == "CommitsRefused") is is_stopped
    assert (emptied.phase == Phase.FAILED) is is_stopped


def test_a_retry_without_a_word_stops_again() -> None:
    stopped = look(ended(commit(10, FOREIGN), commit(5, FOREIGN))).status
    again = look(stopped, retry="1", now=NOW + 60).status
    assert (again.phase, again.reason, again.message) == (Phase.FAILED, "CommitsRefused", stopped.message)


STARTED = {"started_from": StartedFrom(source="/checkpoint/old/run", step=1000)}
FROM_OTHERS = {"checkpoint": {"startFrom": "old/run"}}


@pytest.mark.parametrize(
    ("history", "reason"),
    [
        ([commit(1000, "CRC", writer="reshard")], "StartFrom"),
        ([commit(1000, "CRC", attempt=2, writer="reshard"), commit(1000, "I/O", writer="reshard")], "StartFrom"),
        ([commit(1000, "CRC", attempt=at, writer="reshard") for at in (2, 1)], "CommitsRefused"),
        ([commit(1003, "CRC"), commit(1000, "CRC differs", writer="reshard")], "CommitsRefused"),
        ([commit(1003, "CRC", attempt=2, writer="reshard")], "CommitsRefused"),
        ([commit(1003, "CRC"), commit(1000, writer="reshard")], "CommitsRefused"),
        ([commit(1006, "CRC"), commit(1003), commit(1000, writer="reshard")], "Launched"),
    ],
)
def test_copies_of_the_foreign_checkpoint_are_no_commits_of_the_job(history: list[Commit], reason: str) -> None:
    status = look(ended(*history, **STARTED), **FROM_OTHERS).status
    assert status.reason == reason
    if reason == "CommitsRefused":
        assert "or to Beginning (from spec.checkpoint.startFrom)" in status.message
        begun = look(status, word="Beginning", **FROM_OTHERS).status
        assert begun.current is not None
        assert begun.current.resume.external


def test_rank_0_that_refuses_two_commits_alike_stops_the_job_before_the_third() -> None:
    status, starts = ended(commit(15), commit(10), commit(5)), []
    for attempt in (2, 3):
        status = look(status, now=NOW + 100 * attempt).status
        starts.append(status.current.resume.uri if status.current else "")
        name = commit_history.parse_commit_name(starts[-1])
        failed = workers(attempt, phase="Failed", exit_code=76)
        refusal = lease(attempt, RESUME_ERROR=FOREIGN.format(name=name))
        world = dataclasses.replace(IDLE, pods=failed, jobs=(worker_job(attempt),), leases=refusal)
        decision = look(status, world, now=NOW + 100 * attempt + 1)
        status = decision.status
    assert starts == [commit(15).uri, commit(10).uri]
    assert (status.phase, status.reason) == (Phase.FAILED, "CommitsRefused")
    assert "CommitInvalid" in [event.reason for event in decision.events]


@pytest.mark.parametrize(
    ("code", "nodes_max", "outcome"),
    [
        (ExitCode.UNSUPPORTED, 3, (Phase.WAITING, "ReshardFailed")),
        (ExitCode.UNSUPPORTED, 2, (Phase.FAILED, "CommitsRefused")),
        (ExitCode.SOURCE_INVALID, 3, (Phase.RESHARDING, "NodeNotReady")),
    ],
)
def test_what_is_not_converted_is_loaded_in_its_own_topology_or_waits_for_it_or_asks(
    code: ExitCode, nodes_max: int, outcome: tuple[str, str]
) -> None:
    sizes = {"nodes": {"min": 1, "max": nodes_max}}
    status = look(settled(), lost_node(), **sizes).status
    assert status.current is not None
    assert status.current.topology == SMALL
    job, pod = resharded(ok=False, exit_code=int(code), message="not converted")
    two = nodes("n1", "n2")
    failed = look(status, Observation(nodes=two, jobs=(job,), pods=(pod,)), **sizes).status
    assert (failed.phase, failed.reason) == outcome
    if code is ExitCode.UNSUPPORTED:
        assert not any(item.invalid for item in failed.checkpoint.history)
        whole = look(failed, now=NOW + 60, retry="1", nodes={"min": 1, "max": 3}).status
        assert whole.current is not None
        assert (whole.current.topology, name_of_start(look(failed, now=NOW + 60, retry="1"))) == (
            BIG, "a1/step-00000010",
        )  # fmt: skip


@pytest.mark.parametrize("word", ["beginning", "Nothing", "a1", "a1/step-", "a1/../x", "/checkpoint/gpt/a1/step-5", 5])
def test_a_word_of_another_form_is_refused(word: Any) -> None:
    with pytest.raises(SpecError, match=r"spec\.checkpoint\.resumeFrom is .*expected"):
        parse_spec({**copy.deepcopy(SPEC), "checkpoint": {**SPEC["checkpoint"], "resumeFrom": word}})


@pytest.mark.parametrize(
    ("history", "kept"),
    [
        ([commit(at, "CRC") for at in (30, 25, 20, 15)], [30, 25, 20, 15]),
        ([commit(at, "CRC") for at in (30, 25, 20, 15)] + [commit(10)], [30, 25, 10]),
        (
            [
                *(commit(at, "x", put_aside=True) for at in (60, 50, 40)),
                *(commit(at, "y") for at in (30, 25, 20)),
                commit(10),
            ],
            [60, 50, 30, 25, 10],
        ),
    ],
)  # fmt: skip
def test_refused_commits_stay_while_there_is_no_other_and_those_put_aside_push_none_out(
    history: list[Commit], kept: list[int]
) -> None:
    released = commit_history.release(Checkpoint(history=tuple(history)), needed=())
    assert [item.step for item in released.history] == kept
