"""What the start of the process makes of the settings of notifications: the queue, its fence and its mark."""

from __future__ import annotations

import asyncio
import logging
import time
from typing import Any

import pytest

from elastic_operator.api.serialization import format_time, parse_time
from elastic_operator.cluster.leader_election import Leader
from elastic_operator.main import _open_outbox
from elastic_operator.settings import URL_VARIABLE, read_settings
from tests.unit.elastic_operator.webhook.receiver import SECRET

URL = f"https://receiver.example/{SECRET}"


def open_with(*options: str, url: str = URL, notified_until: str = "") -> tuple[Leader, Any]:
    leader = Leader(None, "ns", "me", name="x")  # type: ignore[arg-type]
    leader.notified_until = notified_until

    async def run() -> Any:
        webhook, outbox = _open_outbox(read_settings(["run", *options], {URL_VARIABLE: url}), leader)
        if webhook is not None:
            await webhook.close()
        return outbox

    return leader, asyncio.run(run())


def test_without_a_url_there_is_no_queue_and_the_mark_goes(caplog: pytest.LogCaptureFixture) -> None:
    leader, outbox = open_with(url="")
    assert outbox is None
    assert leader.get_mark is not None and leader.get_mark() == ""
    assert caplog.text == ""
    with caplog.at_level(logging.WARNING):
        open_with("--notification-format=slack", url="")
    assert "notifications are off: expected the webhook's URL in $ETJ_NOTIFICATION_URL, found nothing" in caplog.text


@pytest.mark.parametrize("mark", ["", "soon", "x" * 10_000])
def test_a_mark_that_is_absent_or_damaged_repeats_nothing(mark: str) -> None:
    _, outbox = open_with(notified_until=mark)
    assert outbox._since is None


def test_the_queue_begins_at_the_last_leaders_mark_and_gives_the_lease_its_own() -> None:
    since = time.time() - 100
    leader, outbox = open_with(notified_until=format_time(since))
    assert outbox._since == pytest.approx(since, abs=0.01)
    assert outbox._fence == leader.must_lead
    assert leader.get_mark is not None
    mark = parse_time(leader.get_mark())
    assert mark == pytest.approx(since, abs=0.01), "not before every job was looked at"
    leader, _ = open_with()
    assert leader.get_mark is not None
    assert parse_time(leader.get_mark()) == pytest.approx(time.time() - 60, abs=5)
