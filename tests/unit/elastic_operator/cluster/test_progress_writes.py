"""How far an attempt is is written from what is remembered, if the job itself is as remembered; nothing else is."""

from __future__ import annotations

import asyncio
import dataclasses
import time
from typing import Any

import pytest

from elastic_operator import controller
from elastic_operator.api.serialization import Time, format_time
from elastic_operator.api.spec import parse_spec
from elastic_operator.api.status import Checkpoint, Current, LossPoint, Phase, Progress, Recovery, Status
from elastic_operator.cluster.handlers import make_registry
from elastic_operator.controller import PROGRESS_SECONDS_PER_JOB
from elastic_operator.manifests.attempt import DRAIN_REQUESTED
from elastic_operator.reconcile.actions import Decision, Event, RequestDrain
from elastic_operator.reconcile.record import is_progress_only
from elastic_operator.settings import read_settings
from reshard.contract import LeaseKey, TrainerPhase
from reshard.topology import Topology
from tests.unit.elastic_operator.crowd import SPEC, Crowd, node, of_resource

KEY = ("ns", "job-0")


def report(crowd: Crowd, step: int) -> None:
    """Rank 0 of the first job renews its Lease."""
    lease = {
        "metadata": {
            "namespace": "ns",
            "name": "job-0-a1",
            "ownerReferences": of_resource("job-0"),
            "labels": {"elastictraining.dev/job-name": "job-0", "elastictraining.dev/attempt": "1"},
            "annotations": {
                LeaseKey.PHASE: TrainerPhase.TRAINING,
                LeaseKey.STEP: str(step),
                LeaseKey.FIRST_STEP_TIME: format_time(time.time()),
            },
        },
        "spec": {"renewTime": format_time(time.time())},
    }
    crowd.tell("leases", lease, "MODIFIED")


def running(num_jobs: int = 1) -> Crowd:
    """A crowd whose first job has made a step, and is known to have."""
    crowd = Crowd(num_jobs)
    report(crowd, 1)
    crowd.settle(KEY)
    record = crowd.store.live_record(KEY)
    assert record is not None and record.status.phase == Phase.RUNNING
    return crowd


def later(monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
    now = time.time()
    monkeypatch.setattr(time, "time", lambda: now + seconds)


def look_after(crowd: Crowd, step: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let time for a report of progress pass, and then a step be made and looked at."""
    later(monkeypatch, 11.0)
    report(crowd, step)
    asyncio.run(crowd.controller.reconcile(KEY))


def test_progress_is_written_without_a_look(monkeypatch: pytest.MonkeyPatch) -> None:
    crowd = running()
    look_after(crowd, 5, monkeypatch)
    ((resource, status),) = crowd.writer.written
    assert status.progress is not None and status.progress.step == 5
    assert resource["metadata"] == {"name": "job-0", "namespace": "ns", "uid": "uid-job-0", "resourceVersion": "7"}
    assert resource["status"]["progress"]["step"] == 1, "what the status was: a write that changes nothing is none"
    assert crowd.reader.asked == []


def test_a_job_that_is_not_as_remembered_is_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    crowd = running()
    crowd.writer.stale.add("7")
    look_after(crowd, 5, monkeypatch)
    assert crowd.writer.written == []
    assert crowd.reader.asked == [KEY]


def test_what_was_written_is_remembered_before_the_watch_tells_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    crowd = running()
    look_after(crowd, 5, monkeypatch)
    later(monkeypatch, 11.0)
    report(crowd, 9)
    crowd.tell_job(KEY, version="7", status=Status())  # of before the write
    asyncio.run(crowd.controller.reconcile(KEY))
    assert [resource["metadata"]["resourceVersion"] for resource, _ in crowd.writer.written] == ["7", "8"]
    assert crowd.reader.asked == []


def test_a_list_is_believed_whatever_its_versions() -> None:
    crowd = running()
    crowd.tell_job(KEY, version="3", status=Status(), listed=True)
    record = crowd.store.live_record(KEY)
    assert record is not None
    assert (record.version, record.status) == ("3", Status())


def test_the_first_step_is_written_and_told_without_a_look() -> None:
    crowd = Crowd(1)
    report(crowd, 1)
    asyncio.run(crowd.controller.reconcile(KEY))
    ((_, status),) = crowd.writer.written
    assert status.phase == Phase.RUNNING
    assert crowd.writer.told == ["job-0 Running"]
    assert crowd.reader.asked == []


def test_a_drain_begins_after_a_fresh_look(monkeypatch: pytest.MonkeyPatch) -> None:
    crowd = running()
    crowd.tell("nodes", {**node("n0"), "spec": {"unschedulable": True}}, "MODIFIED")
    later(monkeypatch, 11.0)
    asyncio.run(crowd.controller.reconcile(KEY))
    assert (crowd.writer.written, crowd.writer.told) == ([], [])
    assert crowd.reader.asked == [KEY]


def test_a_request_by_hand_is_answered_after_a_fresh_look() -> None:
    crowd = Crowd(1)  # no training loop answers yet, as far as is remembered
    crowd.tell_job(KEY, annotations={DRAIN_REQUESTED: "now"})
    asyncio.run(crowd.controller.reconcile(KEY))
    assert (crowd.writer.written, crowd.writer.told) == ([], [])
    assert crowd.reader.asked == [KEY]


def test_a_step_behind_the_one_that_was_told_is_worth_a_fresh_look(monkeypatch: pytest.MonkeyPatch) -> None:
    crowd = running()
    look_after(crowd, 5, monkeypatch)
    look_after(crowd, 4, monkeypatch)
    assert len(crowd.writer.written) == 1
    assert crowd.reader.asked == [KEY]


def test_a_refused_edit_that_suspends_a_running_job_drains_it() -> None:
    crowd = running()
    crowd.reader.kept = parse_spec(SPEC)
    crowd.reader.there[KEY] = crowd.tell_job(KEY, spec={**SPEC, "nodes": "three", "suspend": True}, generation=2)
    asyncio.run(crowd.controller.reconcile(KEY))
    ((_, status),) = crowd.writer.written
    assert status.drain is not None
    assert status.drain.cause == "Suspended"
    assert crowd.writer.done == [RequestDrain(lease="job-0-a1")]
    assert set(crowd.writer.told) == {"job-0 InvalidSpec", "job-0 DrainRequested"}


def test_what_kopf_lists_is_believed_and_what_it_watches_if_it_is_not_older() -> None:
    crowd = Crowd(1)
    registry = make_registry(read_settings(["run"]), crowd.store)
    (handler,) = registry._watching.get_all_handlers()
    resource = crowd.tell_job(KEY)
    older = {**resource, "metadata": {**resource["metadata"], "resourceVersion": "3"}}

    def hear(change: str | None, found: object) -> str:
        asyncio.run(handler.fn(event={"type": change, "object": found}, namespace="ns", name="job-0"))
        known = crowd.store.last_record(KEY)
        return known.version if known is not None else ""

    assert hear("MODIFIED", older) == "7"
    assert hear(None, older) == "3"
    another = {**resource, "metadata": {**resource["metadata"], "uid": "another"}}
    assert hear("DELETED", another) == "3"
    assert hear("DELETED", older) == ""


def test_an_edit_is_accepted_after_a_fresh_look(monkeypatch: pytest.MonkeyPatch) -> None:
    crowd = running()
    later(monkeypatch, 11.0)
    report(crowd, 5)
    edited = {**SPEC, "recovery": {"drainSeconds": 77}}
    crowd.tell_job(KEY, spec=edited, generation=2)
    asyncio.run(crowd.controller.reconcile(KEY))
    assert crowd.writer.written == []
    assert crowd.reader.asked == [KEY]


def test_the_more_jobs_the_more_rarely_progress_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    num_jobs = 1000
    crowd = running()
    crowd.reader.num_others = num_jobs
    crowd.controller.queue.start_time -= 3600
    later(monkeypatch, PROGRESS_SECONDS_PER_JOB * num_jobs - 1)
    report(crowd, 5)
    asyncio.run(crowd.controller.reconcile(KEY))
    assert crowd.writer.written == []
    later(monkeypatch, 2)
    report(crowd, 6)
    asyncio.run(crowd.controller.reconcile(KEY))
    assert len(crowd.writer.written) == 1


@pytest.mark.parametrize("num_jobs", [1, 1000])
def test_after_a_start_progress_is_written_in_turns_where_there_are_many_jobs(
    monkeypatch: pytest.MonkeyPatch, num_jobs: int
) -> None:
    monkeypatch.setattr(controller, "_stagger", lambda key: 0.5)
    crowd = running()
    crowd.reader.num_others = num_jobs
    later(monkeypatch, 3600.0)
    report(crowd, 5)
    seconds = asyncio.run(crowd.controller.reconcile(KEY))
    assert (crowd.writer.written == []) == (num_jobs > 1)
    if num_jobs > 1:
        assert seconds is not None and seconds <= PROGRESS_SECONDS_PER_JOB * num_jobs / 2
        crowd.controller.queue.start_time -= PROGRESS_SECONDS_PER_JOB * num_jobs / 2
        asyncio.run(crowd.controller.reconcile(KEY))
        assert len(crowd.writer.written) == 1


def test_after_a_start_what_is_news_does_not_wait_for_its_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(controller, "_stagger", lambda key: 0.5)
    crowd = Crowd(1)
    crowd.reader.num_others = 1000
    report(crowd, 1)
    asyncio.run(crowd.controller.reconcile(KEY))
    ((_, status),) = crowd.writer.written
    assert status.phase == Phase.RUNNING
    assert crowd.writer.told == ["job-0 Running"]


BEFORE = Status(
    phase=Phase.RUNNING,
    attempt=1,
    current=Current(topology=Topology(), num_nodes=1, gpus_per_node=8),
    progress=Progress(phase=TrainerPhase.TRAINING, step=3),
)

LOSS = LossPoint(attempt=1, step=4, loss=0.5)


@pytest.mark.parametrize(
    ("changes", "waits"),
    [
        ({"progress": Progress(phase=TrainerPhase.TRAINING, step=4, loss=0.5)}, True),
        ({"progress": Progress(phase=TrainerPhase.TRAINING, step=4, loss=0.5), "losses": (LOSS,)}, True),
        ({"progress": Progress(phase=TrainerPhase.TRAINING, step=4), "ettr_text": "98", "goodput": {"ettr": 1}}, True),
        ({"progress": Progress(phase=TrainerPhase.DRAINED, step=4)}, False),
        ({"progress": None}, False),
        ({"phase": Phase.DRAINING}, False),
        ({"reason": "ErrImagePull"}, False),
        ({"checkpoint": Checkpoint(step=3)}, False),
        ({"current": dataclasses.replace(BEFORE.current, job_uid="u")}, False),
        ({"current": dataclasses.replace(BEFORE.current, schedule_time=Time(1.0))}, False),
        ({"recoveries": (Recovery(cause="NodeLost", to_attempt=1),)}, False),
    ],
)
def test_only_steps_wait_for_their_turn(changes: dict[str, Any], waits: bool) -> None:
    after = dataclasses.replace(BEFORE, **changes)
    assert is_progress_only(BEFORE, Decision(status=after)) is waits
    assert not is_progress_only(BEFORE, Decision(status=after, events=(Event(reason="Running", message="it runs"),)))


def test_the_number_of_jobs_is_known_before_their_resources_have_come() -> None:
    crowd = running(num_jobs=3)
    for key in crowd.keys[1:]:
        crowd.store.forget(key)
    assert crowd.reader.num_jobs == 3


def test_after_a_start_what_has_to_be_done_does_not_wait_for_its_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(controller, "_stagger", lambda key: 0.5)
    crowd = running()
    crowd.reader.num_others = 1000
    later(monkeypatch, 3600.0)
    report(crowd, 5)
    crowd.tell("nodes", node("n0"), "DELETED")
    asyncio.run(crowd.controller.reconcile(KEY))
    assert crowd.reader.asked == [KEY]


def test_a_job_whose_status_lost_its_attempt_is_told_and_left_alone() -> None:
    crowd = running()
    resource = crowd.tell_job(KEY)
    resource["status"]["attempt"] = "two"
    crowd.store.put_record(resource, listed=True)
    crowd.reader.there[KEY] = resource
    for _ in range(3):
        assert asyncio.run(crowd.controller.reconcile(KEY)) == 30
    assert (crowd.writer.written, crowd.writer.done) == ([], [])
    assert crowd.writer.told == ["job-0 StatusUnreadable"], "once"


def test_a_status_with_a_field_that_does_not_fit_is_mended_by_the_next_write() -> None:
    crowd = running()
    resource = crowd.tell_job(KEY)
    resource["status"]["progress"]["step"] = "²"
    crowd.store.put_record(resource, listed=True)
    crowd.reader.there[KEY] = resource
    asyncio.run(crowd.controller.reconcile(KEY))
    ((_, status),) = crowd.writer.written
    assert status.progress is not None and status.progress.phase == TrainerPhase.TRAINING
    assert crowd.writer.told[0] == "job-0 StatusMended"
    assert status.attempt == 1
