"""What a candidate for the leadership remembers of a server that was away."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest

from elastic_operator.client.api_errors import RequestError
from elastic_operator.cluster.leader_election import Leader


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
