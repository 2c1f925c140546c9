"""Passes of the controller tell a real receiver what they have written, and what the last leader may not have told."""

from __future__ import annotations

import asyncio
import dataclasses
import time

import pytest

from elastic_operator.api.serialization import Time
from elastic_operator.api.status import Phase, Recovery, Status
from elastic_operator.settings import NotificationSettings
from elastic_operator.webhook.client import WebhookClient
from elastic_operator.webhook.outbox import Outbox
from tests.unit.elastic_operator.cluster.test_progress_writes import KEY, report
from tests.unit.elastic_operator.crowd import Crowd
from tests.unit.elastic_operator.webhook.receiver import Receiver


def told_by(crowd: Crowd, *, since: float | None = None, num_passes: int = 1) -> list[str]:
    """Run passes of the first job with a receiver; return the texts that arrive."""
    receiver = Receiver()

    async def run() -> None:
        async with receiver.serving() as url:
            client = WebhookClient(url)
            outbox = Outbox(client.post, NotificationSettings(url=url, source="me"), since=since)
            crowd.controller._outbox = outbox
            task = asyncio.create_task(outbox.run())
            for _ in range(num_passes):
                await crowd.controller.reconcile(KEY)
            await outbox.drain(5)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            await client.close()

    asyncio.run(run())
    return receiver.texts


def recovering(crowd: Crowd) -> Status:
    record = crowd.store.live_record(KEY)
    assert record is not None
    now = time.time()
    lost = Recovery(cause="NodeNotReady", lost=("n9",), from_attempt=0, to_attempt=1, signal_time=Time(now - 24))
    return dataclasses.replace(record.status, recoveries=(lost,))


def test_a_pass_that_writes_the_first_step_tells_of_the_recovery_and_the_next_ones_do_not() -> None:
    crowd = Crowd(1)
    crowd.tell_job(KEY, status=recovering(crowd))
    report(crowd, 1)
    (text,) = told_by(crowd, num_passes=3)
    assert text.startswith("*ns/job-0* Recovered: lost node n9 (NodeNotReady), back in 2")
    assert crowd.writer.told == ["job-0 Running"]


def test_a_write_that_is_refused_tells_nothing() -> None:
    crowd = Crowd(1)
    crowd.tell_job(KEY, status=recovering(crowd))
    crowd.writer.stale.add("7")
    report(crowd, 1)
    assert told_by(crowd) == []
    assert crowd.writer.written == []


@pytest.mark.parametrize("since", [None, 60.0])
def test_the_first_pass_after_a_change_of_the_leader_tells_what_the_last_one_had_written(since: float | None) -> None:
    crowd = Crowd(1)
    status = recovering(crowd)
    now = time.time()
    ended = dataclasses.replace(status.recoveries[0], first_step_time=Time(now))
    crowd.tell_job(KEY, status=dataclasses.replace(status, recoveries=(ended,), phase=Phase.RUNNING))
    texts = told_by(crowd, since=None if since is None else now - since, num_passes=2)
    assert [text[:40] for text in texts] == ([] if since is None else ["*ns/job-0* Recovered: lost node n9 (Node"])


def test_a_job_that_is_deleted_is_forgotten() -> None:
    crowd = Crowd(1)
    told_by(crowd, since=0.0)
    outbox = crowd.controller._outbox
    assert outbox is not None and KEY in outbox._repeated
    crowd.controller._forget(KEY)
    assert KEY not in outbox._repeated
