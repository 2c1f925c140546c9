"""A job that takes a folder over from another job (`spec.checkpoint.takeOver`): what it starts from."""

from __future__ import annotations

import copy
import dataclasses
from typing import Any

import pytest

from elastic_operator.api.conditions import Type, find
from elastic_operator.api.serialization import to_wire
from elastic_operator.api.spec import SpecError, parse_spec, spec_hash
from elastic_operator.api.status import Phase, Status
from elastic_operator.api.status_reader import read_status
from elastic_operator.observed.observation import Observation
from elastic_operator.observed.timeouts import Timeouts
from elastic_operator.plugin.steer import describe_start
from elastic_operator.reconcile.actions import Create, Decision, LaunchAttempt
from elastic_operator.reconcile.decide import decide
from reshard.contract import Env, ExitCode, ReshardReport
from tests.unit.elastic_operator.reconcile.starts.test_start_from import IDLE, arguments, converted
from tests.unit.elastic_operator.reconcile.test_decide_phases import (
    JOB,
    NOW,
    SPEC,
    lease,
    settled,
    worker_job,
    workers,
)

ROOT = "/checkpoint/gpt"
TARGET = f"{ROOT}/a1/step-start-{JOB.uid[:8]}"
FOUND = ReshardReport(
    ok=True,
    exit_code=0,
    message="done",
    source=f"{ROOT}/a3/step-00000120",
    target=TARGET,
    step=120,
    samples=2400,
    verified=True,
)
UNLOADABLE = "{uri}: the copy cannot be loaded"
NOTHING = ReshardReport(ok=True, exit_code=0, message="the folder holds no commit", source=ROOT)


def wanted(word: str, **changes: Any) -> dict[str, Any]:
    return {**copy.deepcopy(SPEC), "checkpoint": {**SPEC["checkpoint"], "takeOver": word, **changes}}


def look(
    status: Status,
    world: Observation = IDLE,
    *,
    word: str = "Resume",
    request: str = "",
    now: float = NOW,
    **checkpoint: Any,
) -> Decision:
    job = dataclasses.replace(JOB, retry_request=request)
    return decide(job, parse_spec(wanted(word, **checkpoint)), status, world, limits=Timeouts(), now=now)


def reasons(decision: Decision) -> list[str]:
    return [event.reason for event in decision.events]


def resume_of(decision: Decision) -> str:
    """Return what the training Job resumes from."""
    (launch,) = [action for action in decision.actions if isinstance(action, LaunchAttempt)]
    (job,) = [item for item in launch.manifests if item["kind"] == "Job"]
    environment = {item["name"]: item.get("value") for item in job["spec"]["template"]["spec"]["containers"][0]["env"]}
    return str(environment[Env.RESUME])


def test_resume_lets_a_reshard_job_take_the_folder_over_before_the_first_attempt() -> None:
    decision = look(Status())
    words = arguments(decision)
    assert words[:3] == ["run", ROOT, TARGET]
    assert "--require-commit" in words
    assert "--newest" not in words
    (create,) = [action for action in decision.actions if isinstance(action, Create)]
    environment = create.manifest["spec"]["template"]["spec"]["containers"][0]["env"]
    assert {"name": "ETJ_TAKE_OVER", "value": "Resume"} in environment
    assert (decision.status.phase, decision.status.reason) == (Phase.RESHARDING, "StartFrom")
    assert "StartsFromNothing" not in reasons(decision)


def test_the_training_goes_on_from_the_step_of_the_commit_that_was_found() -> None:
    decision = look(look(Status()).status, converted(FOUND))
    status = decision.status
    assert resume_of(decision) == TARGET
    assert status.started_from is not None
    assert (status.started_from.source, status.checkpoint.step, status.checkpoint.uri) == (FOUND.source, 120, TARGET)
    assert "(spec.checkpoint.takeOver)" in find(status.conditions, Type.RESUMED).message  # type: ignore[union-attr]


def test_a_folder_without_a_commit_lets_the_training_begin_from_nothing_and_says_so() -> None:
    decision = look(look(Status()).status, converted(NOTHING))
    assert resume_of(decision) == ""
    assert "StartsFromNothing" in reasons(decision)
    status = read_status(to_wire(decision.status)).status
    assert status.checkpoint.history == ()
    assert look(status, converted(NOTHING)).status.attempt == 1, "the plan is kept"


def test_commits_of_which_none_can_be_read_stop_the_job_with_the_words_that_go_on() -> None:
    text = f"{ROOT}: the newest 2 commits of 2 cannot be read"
    report = ReshardReport(ok=False, exit_code=ExitCode.SOURCE_INVALID, message=text)
    failed = look(look(Status()).status, converted(report)).status
    assert (failed.phase, failed.reason) == (Phase.FAILED, "ReshardFailed")
    assert text in failed.message
    assert "set takeOver: Begin to begin from nothing" in failed.message
    begun = look(failed, request="1", word="Begin")
    assert (begun.status.attempt, resume_of(begun)) == (2, "")


def refuse_copy(status: Status, reason: str, now: float, **checkpoint: Any) -> Status:
    """Plan the next attempt, convert for 15 minutes, and let rank 0 refuse the copy."""
    status = look(status, now=now, **checkpoint).status
    assert status.current is not None
    resume = status.current.resume
    report = dataclasses.replace(FOUND, source=f"{resume.source}/a3/step-00000120", target=resume.uri)
    status = look(status, converted(report, attempt=status.attempt), now=now + 900, **checkpoint).status
    pods = workers(status.attempt, phase="Failed", exit_code=76)
    leases = lease(status.attempt, RESUME_ERROR=reason.format(uri=resume.uri))
    world = dataclasses.replace(IDLE, jobs=(worker_job(status.attempt),), pods=pods, leases=leases)
    return look(status, world, now=now + 960, **checkpoint).status


@pytest.mark.parametrize(("word", "start"), [("Resume", ""), ("Never", "old/run")])
def test_two_copies_that_the_training_refuses_alike_stop_the_job_and_a_word_tries_once_more(
    word: str, start: str
) -> None:
    fields, status = {"word": word, "startFrom": start}, Status()
    for attempt in (1, 2):
        status = refuse_copy(status, UNLOADABLE, NOW + 1000 * attempt, **fields)
        assert len(status.checkpoint.history) == attempt
    assert (status.phase, status.reason, status.attempt) == (Phase.FAILED, "CommitsRefused", 2)
    assert "two copies of the checkpoint that the job starts from were refused alike" in status.message
    name = status.checkpoint.history[0].uri.removeprefix(f"{ROOT}/")
    assert f'"resumeFrom":"{name}"' in status.message
    assert f"Beginning (from spec.checkpoint.{'takeOver' if word == 'Resume' else 'startFrom'})" in status.message
    again = look(status, now=NOW + 3000, resumeFrom=name, **fields).status
    assert again.current is not None
    assert again.current.resume.uri == status.checkpoint.history[0].uri, "without another copy"
    begun = refuse_copy(status, UNLOADABLE, NOW + 3000, resumeFrom="Beginning", **fields)
    assert (begun.reason, begun.attempt) == ("CommitsRefused", 3), "one more copy, and no further one"


def test_a_copy_is_no_progress_for_the_pause_after_failures() -> None:
    status = Status()
    for attempt in (1, 2, 3):
        status = refuse_copy(status, f"reason {'x' * attempt}", NOW + 2000 * attempt)
        assert [item.in_a_row for item in status.failure_counts] == [attempt]
    assert (status.phase, status.reason) == (Phase.PENDING, "Backoff")


def test_a_folder_that_has_another_owner_again_ends_the_job() -> None:
    report = ReshardReport(ok=False, exit_code=ExitCode.NOT_OWNER, message="another job has taken it over")
    failed = look(look(Status()).status, converted(report)).status
    assert (failed.phase, failed.reason) == (Phase.FAILED, "CheckpointNotOwned")


@pytest.mark.parametrize(("before", "after"), [("Never", "Resume"), ("Begin", "Resume"), ("Resume", "Begin")])
def test_an_edit_before_the_launch_plans_anew_and_restarts_no_running_attempt(before: str, after: str) -> None:
    planned = look(Status(), word=before).status
    assert planned.current is not None
    waiting = dataclasses.replace(planned, current=dataclasses.replace(planned.current, launch_time=None))
    decision = look(waiting, word=after)
    assert decision.status.attempt == 2
    assert "SpecChanged" in reasons(decision)
    assert spec_hash(parse_spec(wanted(before))) == spec_hash(parse_spec(wanted(after)))


def test_a_job_with_a_commit_of_its_own_goes_on_from_that() -> None:
    decision = look(dataclasses.replace(settled(), current=None))
    assert decision.status.current is not None
    assert not decision.status.current.resume.external


def test_resume_and_a_start_from_elsewhere_exclude_each_other() -> None:
    with pytest.raises(SpecError, match="takeOver Resume goes on from the newest commit in path"):
        parse_spec(wanted("Resume", startFrom="old"))
    assert parse_spec(wanted("Begin", startFrom="old")).checkpoint.start_from == "old"


@pytest.mark.parametrize("value", [True, "true", "resume", ""])
def test_another_word_is_refused(value: Any) -> None:
    with pytest.raises(SpecError, match=r"spec\.checkpoint\.takeOver"):
        parse_spec(wanted(value))


def test_a_retry_says_what_it_goes_on_from() -> None:
    assert describe_start({"spec": wanted("Resume")}, Status()) == (
        "from the newest commit in its path (spec.checkpoint.takeOver)"
    )
