"""What a candidate for the leadership remembers of a server that was away."""

from __future__ import annotations

import asyncio
import copy
import time
from typing import Any

import pytest

from elastic_operator.client.api_errors import RequestError
from elastic_operator.cluster.leader_election import NOTIFIED_UNTIL, STATUS_PAGE, Leader


class Client:
    """An API server that refuses the first requests for the Lease, and has no Lease then."""

    def __init__(self, num_failures: int) -> None:
        self.num_failures = num_failures

    async def get(self, kind: Any, name: str, *, namespace: str = "") -> None:
        if self.num_failures:
            self.num_failures -= 1
            raise RequestError("connection refused")

    async def create(self, kind: Any, body: Any, **_: Any) -> dict[str, Any]:
        return {"status": {}}


@pytest.mark.parametrize("num_failures", [0, 2])
def test_a_leader_knows_that_the_server_was_away_before_it_became_one(num_failures: int) -> None:
    client: Any = Client(num_failures)
    leader = Leader(client, "ns", "me", name="operator")
    start = time.time()
    asyncio.run(leader.acquire())
    assert leader.state.is_leading
    assert (leader.failed_at is not None) == bool(num_failures)
    assert leader.failed_at is None or start <= leader.failed_at <= time.time()


class LeaseServer:
    """An API server that has a Lease which nobody holds."""

    def __init__(self, notes: dict[str, str]) -> None:
        self.lease: dict[str, Any] = {"metadata": {"name": "operator", "annotations": notes}, "spec": {}}

    async def get(self, kind: Any, name: str, *, namespace: str = "") -> dict[str, Any]:
        return copy.deepcopy(self.lease)

    async def create(self, kind: Any, body: Any, **_: Any) -> dict[str, Any]:
        return {"status": {}}

    async def replace(self, kind: Any, body: Any) -> None:
        self.lease = copy.deepcopy(body)

    @property
    def notes(self) -> dict[str, str]:
        found: dict[str, str] = self.lease["metadata"]["annotations"]
        return found


def test_the_mark_of_the_last_leader_is_kept_until_the_next_one_has_its_own() -> None:
    server: Any = LeaseServer({NOTIFIED_UNTIL: "2026-01-01T00:00:00.000Z", "x": "y"})
    leader = Leader(server, "ns", "me", name="operator")

    async def run() -> None:
        await leader.acquire()
        assert server.notes[NOTIFIED_UNTIL] == leader.notified_until == "2026-01-01T00:00:00.000Z"
        leader.get_mark = lambda: "2026-02-02T00:00:00.000Z"
        await leader._attempt()
        assert server.notes == {NOTIFIED_UNTIL: "2026-02-02T00:00:00.000Z", "x": "y"}
        assert leader.notified_until == "2026-01-01T00:00:00.000Z"
        leader.get_mark = lambda: ""
        await leader._attempt()
        assert server.notes == {"x": "y"}, "no notifications, no mark"
        leader.get_mark = lambda: "2026-03-03T00:00:00.000Z"
        await leader.release()
        assert server.lease["spec"]["holderIdentity"] == ""
        assert server.notes[NOTIFIED_UNTIL] == "2026-03-03T00:00:00.000Z"

    asyncio.run(run())


def test_the_lease_says_where_the_leaders_page_is_while_it_leads() -> None:
    server: Any = LeaseServer({STATUS_PAGE: "10.0.0.9:8082", "x": "y"})
    leader, standby = (Leader(server, "ns", name, name="operator") for name in ("me", "you"))
    leader.page_address = "10.0.0.1:8082"

    async def run() -> None:
        await leader.acquire()
        assert server.notes == {STATUS_PAGE: "10.0.0.1:8082", "x": "y"}
        assert not await standby._attempt()
        assert standby.leader_page == "10.0.0.1:8082"
        await leader.release()
        assert server.notes == {"x": "y"}
        server.lease["metadata"]["annotations"][STATUS_PAGE] = "1" * 1000
        await standby.acquire()
        assert len(standby.leader_page) == 64
        assert server.notes == {"x": "y"}, "this one serves no page"

    asyncio.run(run())
