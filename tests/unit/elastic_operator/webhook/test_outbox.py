"""The queue of notifications with a real receiver: retries, limits, bounds, restarts, and what it never does."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import time
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from elastic_operator.api.serialization import Time, parse_time
from elastic_operator.api.status import Phase, Progress, Recovery, Status
from elastic_operator.main import FIRST_LISTS_SECONDS
from elastic_operator.manifests.attempt import JobRef
from elastic_operator.metrics import exporter
from elastic_operator.reconcile.notifications.formats import Format
from elastic_operator.reconcile.notifications.notification import NotificationKind
from elastic_operator.settings import NotificationSettings
from elastic_operator.webhook import outbox as module
from elastic_operator.webhook.client import WebhookClient
from elastic_operator.webhook.outbox import Outbox
from elastic_operator.webhook.rate_limit import TokenBucket
from tests.unit.elastic_operator.webhook.receiver import SECRET, Receiver, close, status

JOB = JobRef(name="gpt", namespace="team", uid="u1")
OPEN = Recovery(cause="NodeNotReady", lost=("x",), from_attempt=1, to_attempt=2, signal_time=Time(1000))
BEFORE = Status(attempt=2, recoveries=(OPEN,))
AFTER = Status(attempt=2, recoveries=(dataclasses.replace(OPEN, first_step_time=Time(1024)),))
LOST = "*team/gpt* Recovered: lost node x (NodeNotReady), back in 24 s, 0 steps lost, 0 B moved [me]"


@pytest.fixture(autouse=True)
def fast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "FIRST_BACKOFF_SECONDS", 0.01)
    monkeypatch.setattr(module, "MAX_BACKOFF_SECONDS", 0.02)
    monkeypatch.setattr(module, "ALL_SECONDS", 0.001)


def count(result: str) -> float:
    return exporter.REGISTRY.get_sample_value("etj_notifications_total", {"result": result}) or 0.0


def run(
    receiver: Receiver, work: Callable[[Outbox], Awaitable[Any]], *, since: float | None = None, **changes: Any
) -> None:
    """Let a queue send to the receiver while `work` runs."""

    async def main() -> None:
        async with receiver.serving() as url:
            client = WebhookClient(url)
            settings = NotificationSettings(url=url, source="me", **changes)
            outbox = Outbox(client.post, settings, since=since)
            task = asyncio.create_task(outbox.run())
            try:
                await work(outbox)
            finally:
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
                await client.close()

    asyncio.run(main())


def failed(number: int) -> Status:
    return Status(phase=Phase.FAILED, reason="Crash", message=f"failure {number}", finish_time=Time(2000 + number))


def waiting(number: int) -> Status:
    return Status(phase=Phase.WAITING, reason=f"Reason{number}", message="none", attempt=1, queue_time=Time(1000))


def test_a_recovery_arrives_once_in_slacks_form() -> None:
    receiver, sent = Receiver(), count("sent")

    async def work(outbox: Outbox) -> None:
        outbox.report(JOB, BEFORE, AFTER)
        outbox.report(JOB, BEFORE, AFTER)
        outbox.report(JOB, AFTER, dataclasses.replace(AFTER, progress=Progress(step=3)))
        await outbox.drain(5)

    run(receiver, work)
    assert receiver.bodies == [{"text": LOST}]
    assert receiver.headers[0]["Content-Type"] == "application/json; charset=utf-8"
    assert receiver.headers[0]["Idempotency-Key"] == "u1-recovered-1"
    assert count("sent") == sent + 1


def test_a_recovery_arrives_as_a_cloudevent() -> None:
    receiver = Receiver()

    async def work(outbox: Outbox) -> None:
        outbox.report(JOB, BEFORE, AFTER)
        await outbox.drain(5)

    run(receiver, work, format=Format.CLOUDEVENTS)
    (event,) = receiver.bodies
    assert (event["specversion"], event["id"], event["subject"]) == ("1.0", "u1-recovered-1", "team/gpt")
    assert receiver.headers[0]["Content-Type"] == "application/cloudevents+json; charset=utf-8"


def test_failures_of_the_receiver_are_retried_until_it_accepts(caplog: pytest.LogCaptureFixture) -> None:
    receiver = Receiver(status(500), close, status(503), status(429), close)

    async def work(outbox: Outbox) -> None:
        outbox.report(JOB, BEFORE, AFTER)
        await receiver.wait_for(1)

    with caplog.at_level(logging.DEBUG):
        run(receiver, work)
    assert (receiver.texts, receiver.num_requests) == ([LOST], 6)
    assert SECRET not in caplog.text
    assert "HTTP status 503" in caplog.text


def test_retry_after_holds_all_requests_back() -> None:
    receiver, times = Receiver(status(429, **{"Retry-After": "1"})), []

    async def work(outbox: Outbox) -> None:
        start = time.monotonic()
        outbox.report(JOB, BEFORE, AFTER)
        while receiver.num_requests < 1:
            await asyncio.sleep(0.005)
        await asyncio.sleep(0.02)
        outbox.report(dataclasses.replace(JOB, name="bert", uid="u2"), BEFORE, AFTER)
        await receiver.wait_for(2)
        times.append(time.monotonic() - start)

    run(receiver, work)
    assert receiver.num_requests == 3
    assert times[0] >= 1.0


def test_a_final_answer_drops_one_notification_and_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    receiver, refused = Receiver(status(404), status(404), status(403)), count("refused")

    async def work(outbox: Outbox) -> None:
        for number in range(4):
            outbox.report(JOB, Status(), failed(number))
        await outbox.drain(5)

    run(receiver, work)
    assert count("refused") == refused + 3
    assert receiver.num_requests == 4 and len(receiver.texts) == 1
    assert caplog.text.count("is dropped") == 1
    assert "HTTP status 404" in caplog.text and SECRET not in caplog.text


def test_a_receiver_that_stays_away_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_TRIES", 3)
    receiver, before = Receiver(*[close] * 3), count("gave_up")

    async def work(outbox: Outbox) -> None:
        outbox.report(JOB, BEFORE, AFTER)
        await outbox.drain(5)

    run(receiver, work)
    assert (receiver.num_requests, receiver.bodies) == (3, [])
    assert count("gave_up") == before + 1


def test_one_job_cannot_use_up_the_channel_but_its_end_is_told() -> None:
    receiver, limited = Receiver(), count("rate_limited")

    async def work(outbox: Outbox) -> None:
        for number in range(module.JOB_BURST + 5):
            outbox.report(JOB, Status(), waiting(number))
        outbox.report(dataclasses.replace(JOB, name="bert", uid="u2"), BEFORE, AFTER)
        outbox.report(JOB, Status(), failed(1))
        await outbox.drain(5)

    run(receiver, work)
    assert count("rate_limited") == limited + 5
    assert len(receiver.bodies) == module.JOB_BURST + 2
    assert receiver.texts[-2] == LOST.replace("gpt", "bert")
    assert receiver.texts[-1].endswith("failure 1 (5 earlier notifications of this job were left out) [me]")


def test_what_was_left_out_is_told_by_the_next_one_that_arrives(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "JOB_BURST", 1)
    receiver = Receiver(status(200), status(404))

    async def work(outbox: Outbox) -> None:
        for number in range(3):  # the first one is sent, two are left out
            outbox.report(JOB, Status(), waiting(number))
        outbox.report(JOB, Status(), failed(1))  # refused
        await outbox.drain(5)
        outbox.report(JOB, Status(), failed(2))
        await outbox.drain(5)

    run(receiver, work)
    assert receiver.texts[-1].endswith("failure 2 (3 earlier notifications of this job were left out) [me]")


def test_the_queue_is_bounded_and_nothing_waits_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_QUEUED", 4)
    full = count("queue_full")

    async def hang(body: bytes, headers: Any) -> Any:
        del body, headers
        await asyncio.sleep(60)

    async def main() -> float:
        outbox = Outbox(hang, NotificationSettings(url="https://x"))
        task = asyncio.create_task(outbox.run())
        await asyncio.sleep(0)
        start = time.monotonic()
        for number in range(50):
            outbox.report(dataclasses.replace(JOB, name=f"job-{number}", uid=f"u{number}"), BEFORE, AFTER)
        seconds = time.monotonic() - start
        await outbox.drain(0.05)
        task.cancel()
        return seconds

    assert asyncio.run(main()) < 1.0
    assert count("queue_full") == full + 46


def test_only_the_chosen_kinds_are_sent() -> None:
    receiver = Receiver()

    async def work(outbox: Outbox) -> None:
        outbox.report(JOB, BEFORE, AFTER)
        outbox.report(JOB, Status(), failed(1))
        await outbox.drain(5)

    run(receiver, work, kinds=(NotificationKind.FAILED,))
    assert len(receiver.bodies) == 1 and "Failed" in receiver.texts[0]


def test_the_next_leader_tells_what_the_mark_leaves_open_with_the_same_id() -> None:
    receiver = Receiver()
    now = time.time()
    recent = dataclasses.replace(OPEN, first_step_time=Time(now - 30), signal_time=Time(now - 54))
    older = dataclasses.replace(OPEN, from_attempt=0, first_step_time=Time(now - 1000))
    stored = Status(attempt=2, recoveries=(older, recent))

    async def work(outbox: Outbox) -> None:
        outbox.report_recorded(JOB, stored)
        outbox.report_recorded(JOB, stored)
        await outbox.drain(5)

    run(receiver, work, since=now - 90)
    assert receiver.texts == [LOST]
    assert receiver.headers[0]["Idempotency-Key"] == "u1-recovered-1"
    for since in (None, now):
        quiet = Receiver()
        run(quiet, work, since=since)
        assert quiet.num_requests == 0


def test_a_mark_of_long_ago_does_not_tell_all_history() -> None:
    receiver = Receiver()

    async def work(outbox: Outbox) -> None:
        outbox.report_recorded(JOB, AFTER)
        await outbox.drain(1)

    run(receiver, work, since=0.0)
    assert receiver.num_requests == 0


def test_the_mark_stays_before_what_is_not_sent_yet() -> None:
    async def never(body: bytes, headers: Any) -> Any:
        raise AssertionError

    async def main() -> tuple[float | None, float | None]:
        outbox = Outbox(never, NotificationSettings(url="https://x"))
        empty = parse_time(outbox.settled_until())
        outbox.report(JOB, BEFORE, AFTER)
        return empty, parse_time(outbox.settled_until())

    empty, pending = asyncio.run(main())
    assert empty is not None and abs(time.time() - module.MARK_MARGIN_SECONDS - empty) < 5
    assert pending == 1024 - module.MARK_MARGIN_SECONDS


def test_a_leader_that_waits_long_for_its_first_lists_keeps_the_mark_until_each_job_was_looked_at() -> None:
    assert module.MARK_HOLD_SECONDS >= 2 * FIRST_LISTS_SECONDS


def test_a_leader_that_is_lost_too_soon_has_not_moved_the_mark() -> None:
    async def never(body: bytes, headers: Any) -> Any:
        raise AssertionError

    async def main() -> None:
        now, since = [500.0], time.time() - 200
        outbox = Outbox(never, NotificationSettings(url="https://x"), since=since, clock=lambda: now[0])
        assert parse_time(outbox.settled_until()) == pytest.approx(since, abs=0.01)
        now[0] += module.MARK_HOLD_SECONDS
        mark = parse_time(outbox.settled_until())
        assert mark is not None and mark > since + 100

    asyncio.run(main())


def test_a_defect_drops_one_notification_and_fails_no_pass(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    receiver = Receiver()
    real = module.format_body
    calls: list[int] = []

    def break_once(*args: Any, **options: Any) -> bytes:
        calls.append(1)
        if len(calls) == 1:
            raise RuntimeError(f"https://receiver/{SECRET}")
        return real(*args, **options)

    monkeypatch.setattr(module, "format_body", break_once)

    async def work(outbox: Outbox) -> None:
        broken: Any = "no status"
        outbox.report(JOB, broken, AFTER)
        outbox.report_recorded(JOB, broken)
        outbox.report(JOB, Status(), failed(1))
        outbox.report(JOB, Status(), failed(2))
        await outbox.drain(5)

    run(receiver, work, since=1.0)
    assert len(receiver.bodies) == 1
    assert "RuntimeError" in caplog.text and SECRET not in caplog.text


def test_a_process_that_may_not_lead_sends_nothing() -> None:
    sent: list[bytes] = []

    class NotLeadingError(BaseException):
        """Stands for the exit of the process."""

    def fence() -> None:
        raise NotLeadingError

    async def post(body: bytes, headers: Any) -> Any:
        sent.append(body)

    async def main() -> None:
        outbox = Outbox(post, NotificationSettings(url="https://x"), fence=fence)
        outbox.report(JOB, BEFORE, AFTER)
        await outbox.run()

    with pytest.raises(NotLeadingError):
        asyncio.run(main())
    assert sent == []


def test_a_forgotten_job_is_no_memory() -> None:
    async def never(body: bytes, headers: Any) -> Any:
        raise AssertionError

    async def main() -> Outbox:
        outbox = Outbox(never, NotificationSettings(url="https://x"), since=0.0)
        outbox.report_recorded(JOB, AFTER)
        outbox.report(JOB, BEFORE, AFTER)
        outbox.forget(("team", "gpt"))
        return outbox

    outbox = asyncio.run(main())
    assert not outbox._repeated and not outbox._job_limits and not outbox._left_out


def test_a_notification_that_is_dropped_after_its_job_is_no_memory() -> None:
    async def work(outbox: Outbox) -> None:
        outbox.report(JOB, BEFORE, AFTER)
        outbox.forget(("team", "gpt"))
        await outbox.drain(5)
        assert not outbox._left_out

    run(Receiver(status(404)), work)


def test_the_url_is_in_no_description_of_the_settings() -> None:
    assert SECRET not in repr(NotificationSettings(url=f"https://x/{SECRET}"))


def test_a_bucket_allows_its_burst_and_then_one_by_one() -> None:
    bucket = TokenBucket(2, 10.0)
    assert [bucket.take(0.0), bucket.take(0.0), bucket.take(0.0)] == [True, True, False]
    assert bucket.wait_seconds(4.0) == pytest.approx(6.0)
    assert not bucket.take(9.9)
    assert bucket.take(10.0)
    assert not bucket.take(10.0)
    assert [bucket.take(1000.0), bucket.take(1000.0), bucket.take(1000.0)] == [True, True, False]
    assert not bucket.take(0.0), "a clock that goes back gives nothing"
