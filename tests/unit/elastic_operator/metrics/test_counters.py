"""What the change of a status counts for, and what the gauges of a job show: tables."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from elastic_operator.api.serialization import Time, to_wire
from elastic_operator.api.status import Current, Phase, Progress, Recovery, RestartBudget, Resume, Status
from elastic_operator.api.status_reader import read_status
from elastic_operator.metrics import definitions, exporter
from elastic_operator.metrics.counters import increments, reshard_samples
from elastic_operator.metrics.gauges import job_gauges
from elastic_operator.observed.observation import JobView, Observation, PodView
from elastic_operator.observed.timeouts import Timeouts
from elastic_operator.reconcile.actions import ReshardOutcome
from elastic_operator.reconcile.decide import decide
from reshard.contract import ExitCode, ReshardReport, TrainerPhase
from reshard.topology import Topology
from tests.unit.elastic_operator.reconcile.test_decide_phases import (
    COMMIT,
    JOB,
    NOW,
    WORLD,
    lease,
    lost_node,
    nodes,
    settled,
    spec,
)

TOPOLOGY = Topology()


def current(plan: float = 50, launch: float | None = None) -> Current:
    launched = None if launch is None else Time(launch)
    return Current(topology=TOPOLOGY, num_nodes=2, gpus_per_node=4, plan_time=Time(plan), launch_time=launched)


def recovery(attempt: int, **changes: Any) -> Recovery:
    fields: dict[str, Any] = {"cause": "PodFailed", "from_attempt": attempt, "detect_time": Time(10 * attempt)}
    return Recovery(**{**fields, **changes})


OPEN = recovery(1)
PLANNED = recovery(1, to_attempt=2, lost_steps=7)
DONE = dataclasses.replace(PLANNED, first_step_time=Time(30), seconds={"detect": 2.0, "load": 18.0, "total": 20.0})
SUSPENDED = recovery(1, cause="Suspended", planned=True, first_step_time=Time(99), seconds={"stop": 5.0, "total": 80.0})
LATER = recovery(1, cause="Suspended", planned=True, detect_time=Time(20))
GROWN = recovery(1, planned=True, cause="CapacityReturned")
TEN = tuple(recovery(attempt, first_step_time=Time(1), lost_steps=3) for attempt in range(1, 11))

TABLE: dict[str, tuple[Status, Status, dict[tuple[str, ...], float]]] = {
    "nothing has changed": (Status(attempt=1, recoveries=(DONE,)), Status(attempt=1, recoveries=(DONE,)), {}),
    "only the progress has": (Status(attempt=1), Status(attempt=1, progress=Progress(step=5)), {}),
    "a first attempt, planned and launched at once, has not waited": (
        Status(),
        Status(attempt=1, current=current(launch=50)),
        {
            ("etj_queue_seconds", "start"): 0,
            ("etj_attempts_launched_total",): 1,
            ("etj_attempt_starts_total", "Nothing"): 1,
        },
    ),
    "a first attempt waited since it was queued": (
        Status(phase=Phase.WAITING, queue_time=Time(20)),
        Status(attempt=1, current=current(plan=50)),
        {("etj_queue_seconds", "start"): 30},
    ),
    "a launch of what was planned before": (
        Status(attempt=1, current=current()),
        Status(attempt=1, current=current(launch=60)),
        {("etj_attempts_launched_total",): 1, ("etj_attempt_starts_total", "Nothing"): 1},
    ),
    **{
        f"an attempt starts from a commit: {mode}, {resume}": (
            Status(attempt=1, current=dataclasses.replace(current(), resume=resume)),
            Status(attempt=1, current=dataclasses.replace(current(launch=60), resume=resume)),
            {("etj_attempts_launched_total",): 1, ("etj_attempt_starts_total", mode): 1},
        )
        for mode, resume in (
            ("AsIs", Resume(uri="/a", source="/a", mode="AsIs")),
            ("Load", Resume(uri="/a", source="/a", mode="Load")),
            ("Reshard", Resume(uri="/b", source="/a", mode="Reshard")),
            ("AsIs", Resume(uri="/a", source="/a")),  # an older operator wrote no mode
            ("Reshard", Resume(uri="/b", source="/a")),
        )
    },
    "a recovery begins": (
        Status(attempt=1, current=current(launch=50)),
        Status(attempt=1, recoveries=(OPEN,)),
        {("etj_recoveries_started_total", "PodFailed", "false"): 1},
    ),
    "a recovery begins and the next attempt is planned, all in one pass": (
        Status(attempt=1, current=current(launch=50)),
        Status(attempt=2, current=current(), recoveries=(PLANNED,)),
        {
            ("etj_queue_seconds", "failure"): 0,
            ("etj_recoveries_started_total", "PodFailed", "false"): 1,
            ("etj_lost_steps_total",): 7,
        },
    ),
    "a recovery is planned after a wait": (
        Status(attempt=1, recoveries=(OPEN,), queue_time=Time(10)),
        Status(attempt=2, recoveries=(PLANNED,), current=current(plan=50)),
        {("etj_queue_seconds", "failure"): 40, ("etj_lost_steps_total",): 7},
    ),
    "a further loss that costs a commit loses more steps, and is the same recovery": (
        Status(attempt=2, recoveries=(PLANNED,), current=current()),
        Status(attempt=3, recoveries=(dataclasses.replace(PLANNED, lost_steps=9, to_attempt=3, cause="NodeNotReady"),)),
        {("etj_lost_steps_total",): 2},
    ),
    "a recovery is over": (
        Status(attempt=2, recoveries=(PLANNED,)),
        Status(attempt=2, recoveries=(DONE,)),
        {
            ("etj_recoveries_ended_total", "PodFailed", "resumed"): 1,
            ("etj_recovery_seconds", "false"): 20,
            ("etj_recovery_part_seconds", "detect"): 2,
            ("etj_recovery_part_seconds", "load"): 18,
        },
    ),
    "a suspension is no recovery": (
        Status(attempt=2),
        Status(attempt=2, pauses=(dataclasses.replace(SUSPENDED, first_step_time=None),)),
        {},
    ),
    "nor is its end the end of one": (
        Status(attempt=2, pauses=(dataclasses.replace(SUSPENDED, first_step_time=None),)),
        Status(attempt=2, pauses=(SUSPENDED,)),
        {},
    ),
    "a failure that was suspended is not over when the job goes on": (
        Status(attempt=2, recoveries=(OPEN,), pauses=(dataclasses.replace(SUSPENDED, first_step_time=None),)),
        Status(attempt=2, recoveries=(OPEN,), pauses=(SUSPENDED,)),
        {},
    ),
    "the next attempt is lost too": (
        Status(attempt=2, recoveries=(PLANNED,), current=current(launch=50)),
        Status(attempt=2, recoveries=(PLANNED, recovery(2, cause="NodeNotReady"))),
        {
            ("etj_recoveries_ended_total", "PodFailed", "superseded"): 1,
            ("etj_recoveries_started_total", "NodeNotReady", "false"): 1,
        },
    ),
    "a failure is suspended before anything was planned: two records of one attempt": (
        Status(attempt=1, recoveries=(OPEN,)),
        Status(attempt=1, recoveries=(OPEN,), pauses=(LATER,)),
        {("etj_recoveries_ended_total", "PodFailed", "superseded"): 1},
    ),
    "the job fails": (
        Status(attempt=1, phase=Phase.RUNNING, current=current(launch=50)),
        Status(attempt=1, phase=Phase.FAILED, recoveries=(OPEN,)),
        {
            ("etj_jobs_finished_total", "Failed"): 1,
            ("etj_recoveries_started_total", "PodFailed", "false"): 1,
            ("etj_recoveries_ended_total", "PodFailed", "failed"): 1,
        },
    ),
    "the job is complete though the last attempt had nothing left to do": (
        Status(attempt=2, phase=Phase.STARTING, recoveries=(PLANNED,)),
        Status(attempt=2, phase=Phase.COMPLETE, recoveries=(PLANNED,)),
        {("etj_jobs_finished_total", "Complete"): 1, ("etj_recoveries_ended_total", "PodFailed", "resumed"): 1},
    ),
    "an operator looks at a job that has ended": (
        Status(attempt=2, phase=Phase.FAILED, recoveries=(PLANNED,)),
        Status(attempt=2, phase=Phase.FAILED, recoveries=(PLANNED,), finish_time=Time(5)),
        {},
    ),
    "the oldest record is dropped as another comes": (
        Status(attempt=11, recoveries=TEN),
        Status(attempt=11, recoveries=(*TEN[1:], recovery(11, planned=True, cause="CapacityReturned"))),
        {("etj_recoveries_started_total", "CapacityReturned", "true"): 1},
    ),
    "an attempt after a suspension": (
        Status(attempt=1, recoveries=(dataclasses.replace(SUSPENDED, first_step_time=None),), queue_time=Time(45)),
        Status(attempt=2, current=current(plan=50),
               recoveries=(dataclasses.replace(SUSPENDED, first_step_time=None, to_attempt=2),)),
        {("etj_queue_seconds", "resume"): 5},
    ),
    "an attempt after growth": (
        Status(attempt=1),
        Status(attempt=2, current=current(), recoveries=(dataclasses.replace(GROWN, to_attempt=2),)),
        {("etj_queue_seconds", "change"): 0, ("etj_recoveries_started_total", "CapacityReturned", "true"): 1},
    ),
}  # fmt: skip


@pytest.mark.parametrize(("old", "new", "expected"), TABLE.values(), ids=TABLE)
def test_a_transition_counts_for(old: Status, new: Status, expected: dict[tuple[str, ...], float]) -> None:
    samples = increments(old, new)
    found = {(sample.definition.name, *sample.labels): sample.value for sample in samples}
    assert found == expected
    assert len(samples) == len(found)


@pytest.mark.parametrize("status", [row[1] for row in TABLE.values()], ids=TABLE)
def test_a_status_that_is_read_again_counts_for_nothing(status: Status) -> None:
    stored = read_status(to_wire(status)).status
    assert increments(stored, stored) == ()
    # The times have lost what is below a millisecond.
    assert increments(stored, status) == ()


def test_every_sample_has_the_labels_of_its_family() -> None:
    for old, new, _ in TABLE.values():
        for sample in increments(old, new):
            assert exporter._bound_labels(sample) == sample.labels


def test_the_end_of_a_conversion_counts_by_mode_and_result() -> None:
    outcome = ReshardOutcome(mode="virtual", result="Succeeded", bytes_read=100, bytes_written=3, seconds=0.5)
    found = {(item.definition.name, *item.labels): item.value for item in reshard_samples(outcome)}
    assert found == {
        ("etj_reshards_total", "virtual", "Succeeded"): 1,
        ("etj_reshard_read_bytes_total", "virtual", "Succeeded"): 100,
        ("etj_reshard_written_bytes_total", "virtual", "Succeeded"): 3,
        ("etj_reshard_seconds", "virtual", "Succeeded"): 0.5,
    }


def test_a_reshard_pod_that_says_nothing_has_no_duration() -> None:
    found = {
        (item.definition.name, *item.labels): item.value
        for item in reshard_samples(ReshardOutcome(mode="", result="NoReport"))
    }
    assert found[("etj_reshards_total", "Other", "NoReport")] == 1
    assert not any(name == "etj_reshard_seconds" for name, *_ in found)


def resharding() -> Status:
    return decide(JOB, spec(), settled(), lost_node(), limits=Timeouts(), now=NOW).status


def after_reshard(job: dict[str, Any], report: ReshardReport | None) -> Any:
    pod = PodView(
        name="gpt-a2-reshard-0", uid="r0", attempt=2, role="reshard", node="n1", phase="Succeeded",
        termination_message=report.to_json() if report else "",
    )  # fmt: skip
    view = JobView(name="gpt-a2-reshard", uid="r", attempt=2, role="reshard", **job)
    world = Observation(nodes=nodes("n1", "n2"), pods=(pod,), jobs=(view,))
    return decide(JOB, spec(), resharding(), world, limits=Timeouts(), now=NOW + 5)


DONE_REPORT = ReshardReport(
    ok=True, exit_code=0, message="", bytes_read=10, bytes_written=20, seconds=3.0, verified=True
)
BAD_SOURCE = ReshardReport(
    ok=False, exit_code=ExitCode.SOURCE_INVALID, message="CRC differs", bytes_read=4, seconds=0.5
)
OUTCOMES: dict[str, tuple[dict[str, Any], ReshardReport | None, ReshardOutcome]] = {
    "converted": (
        {"complete": True},
        DONE_REPORT,
        ReshardOutcome(mode="materialize", result="Succeeded", bytes_read=10, bytes_written=20, seconds=3.0),
    ),
    "a damaged source, though the next attempt is planned in the same pass": (
        {"failed": True},
        BAD_SOURCE,
        ReshardOutcome(mode="materialize", result="SourceInvalid", bytes_read=4, seconds=0.5),
    ),
    "killed": ({"failed": True}, None, ReshardOutcome(mode="", result="NoReport")),
}


@pytest.mark.parametrize(("job", "report", "outcome"), OUTCOMES.values(), ids=OUTCOMES)
def test_the_end_of_a_reshard_job_is_told_once(
    job: dict[str, Any], report: ReshardReport | None, outcome: ReshardOutcome
) -> None:
    decision = after_reshard(job, report)
    assert decision.reshards == (outcome,)
    status = read_status(to_wire(decision.status)).status
    pods = PodView(name="gpt-a2-reshard-0", uid="r0", attempt=2, role="reshard", node="n1", phase="Succeeded")
    view = JobView(name="gpt-a2-reshard", uid="r", attempt=2, role="reshard", **job)
    world = Observation(nodes=nodes("n1", "n2"), pods=(pods,), jobs=(view,))
    assert decide(JOB, spec(), status, world, limits=Timeouts(), now=NOW + 6).reshards == ()


def test_every_exit_code_has_a_result_of_its_own() -> None:
    results = set()
    for code in ExitCode:
        if code != ExitCode.OK:
            report = ReshardReport(ok=False, exit_code=code, message="no")
            (outcome,) = after_reshard({"failed": True}, report).reshards
            results.add(outcome.result)
    assert results <= set(definitions.RESHARD_RESULTS)
    assert len(results) == len(ExitCode) - 1


def test_the_queue_begins_when_there_is_no_plan_and_ends_with_one() -> None:
    empty = Observation(nodes={})
    first = decide(JOB, spec(), Status(), empty, limits=Timeouts(), now=NOW).status
    assert (first.phase, first.queue_time) == (Phase.WAITING, NOW)
    later = decide(JOB, spec(), first, empty, limits=Timeouts(), now=NOW + 60).status
    assert later.queue_time == NOW
    suspended = decide(JOB, spec(suspend=True), later, empty, limits=Timeouts(), now=NOW + 70).status
    assert suspended.queue_time is None
    again = decide(JOB, spec(), suspended, empty, limits=Timeouts(), now=NOW + 500).status
    assert again.queue_time == NOW + 500
    planned = decide(
        JOB, spec(), again, Observation(nodes=nodes("n1", "n2", "n3")), limits=Timeouts(), now=NOW + 530
    ).status
    assert planned.queue_time is None
    found = {(item.definition.name, *item.labels): item.value for item in increments(again, planned)}
    assert found[("etj_queue_seconds", "start")] == 30


@pytest.mark.parametrize(
    ("notes", "step_time"),
    [
        ({"STEP": "13"}, NOW),
        ({"STEP": "12", "PHASE": TrainerPhase.SAVING}, NOW - 50),
        ({"STEP": "12"}, NOW - 50),
        ({"PHASE": TrainerPhase.RESTORING}, NOW - 50),
    ],
    ids=["a step", "another phase", "nothing", "a restart that has made no step"],
)
def test_the_time_of_the_last_step_changes_with_a_step_only(notes: dict[str, str], step_time: float) -> None:
    before = Progress(phase=TrainerPhase.TRAINING, step=12, time=Time(NOW - 50), step_time=Time(NOW - 50))
    running = settled(progress=before)
    resumed = dataclasses.replace(running.current, resume=Resume(uri=COMMIT.uri, step=12))  # type: ignore[type-var]
    world = dataclasses.replace(WORLD, leases=lease(1, **notes))
    status = dataclasses.replace(running, current=resumed)
    after = decide(JOB, spec(), status, world, limits=Timeouts(), now=NOW).status
    assert after.progress is not None
    assert after.progress.step_time == step_time


def gauges(
    status: Status, *, now: float = 1000, heartbeat: float | None = None, **changes: Any
) -> dict[str, float | None]:
    found = job_gauges(spec(**changes), status, heartbeat_time=heartbeat, now=now)
    return {family.name.removeprefix("etj_job_"): value for family, value in found.items()}


RUNNING = Status(
    phase=Phase.RUNNING, attempt=2, current=current(launch=60), progress=Progress(step=80, step_time=Time(990)),
    first_step_time=Time(0), restart_budget=RestartBudget(limit=3, used=1),
    recoveries=(recovery(1, signal_time=Time(500), first_step_time=Time(600), lost_steps=10, to_attempt=2),),
)  # fmt: skip


def test_the_gauges_of_a_running_job() -> None:
    found = gauges(RUNNING, heartbeat=998.0)
    assert found == {
        "attempt": 2, "step": 80, "commit_step": 0, "gpus_wanted": 6, "gpus_used": 8,
        # Up for 900 s at 10 s a step, 100 s of which were spent on steps done again.
        "goodput_ratio": pytest.approx(0.8), "lost_steps": 10, "restarts_left": 2,
        "last_step_timestamp_seconds": 990, "heartbeat_timestamp_seconds": 998,
        "queue_start_timestamp_seconds": None, "recovery_start_timestamp_seconds": None,
    }  # fmt: skip


def test_the_ratio_falls_while_nothing_runs_though_no_status_is_written() -> None:
    lost = recovery(2, signal_time=Time(700))
    down = dataclasses.replace(RUNNING, phase=Phase.WAITING, current=None, queue_time=Time(700), recoveries=(lost,))
    found = gauges(down, now=1400)
    assert found["goodput_ratio"] == pytest.approx(0.5)
    assert (found["gpus_used"], found["gpus_wanted"]) == (0, 6)
    assert (found["queue_start_timestamp_seconds"], found["recovery_start_timestamp_seconds"]) == (700, 700)
    assert found["last_step_timestamp_seconds"] == 990


def test_a_job_that_has_ended_wants_nothing_and_its_ratio_stays() -> None:
    ended = dataclasses.replace(RUNNING, phase=Phase.COMPLETE, finish_time=Time(1000))
    found = gauges(ended, now=99999, heartbeat=998.0)
    assert found["goodput_ratio"] == pytest.approx(0.8)
    assert (found["gpus_used"], found["gpus_wanted"], found["restarts_left"]) == (0, 0, None)
    assert found["heartbeat_timestamp_seconds"] is None


def test_a_suspended_job_wants_nothing() -> None:
    assert gauges(Status(phase=Phase.SUSPENDED), suspend=True)["gpus_wanted"] == 0


def test_a_spec_that_makes_no_sense_says_nothing_of_what_is_wanted() -> None:
    found = job_gauges(None, RUNNING, heartbeat_time=None, now=1000)
    assert found[definitions.JOB_GPUS_WANTED] is None
    assert found[definitions.JOB_GPUS_USED] == 8


def test_a_preferred_number_of_nodes_is_what_is_wanted() -> None:
    assert gauges(RUNNING, nodes={"min": 1, "max": 3, "preferred": 2})["gpus_wanted"] == 4


def test_the_gauges_are_all_that_there_are() -> None:
    listed = [family for family in definitions.DEFINITIONS if family.labels == definitions.JOB]
    assert list(job_gauges(None, RUNNING, heartbeat_time=None, now=1000)) == listed
