"""What the kubelet is told about a leader, a standby, and a loop that does not turn."""

from __future__ import annotations

import asyncio
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator

import pytest

from elastic_operator import probes
from elastic_operator.cluster.leader_election import CandidateState
from elastic_operator.probes import Answer

PAGES = {"/healthz": lambda: Answer(True, "alive"), "/readyz": lambda: Answer(False, "starting")}


@pytest.mark.parametrize(
    ("standing", "started", "good", "text"),
    [
        pytest.param(None, True, True, "leader", id="no-election"),
        pytest.param(None, False, False, "watches", id="no-election-not-started"),
        pytest.param(CandidateState(is_leading=True), True, True, "leader", id="leader"),
        pytest.param(CandidateState(is_leading=True), False, False, "watches", id="leader-not-started"),
        pytest.param(
            CandidateState(is_leading=False, holder="you_1"), False, True, "standby; the leader is you_1", id="standby"
        ),
        pytest.param(CandidateState(is_leading=False), False, True, "not known yet", id="standby-before-a-leader"),
        pytest.param(
            CandidateState(is_leading=False, trouble="forbidden"),
            False,
            False,
            "forbidden",
            id="standby-without-rights",
        ),
        pytest.param(
            CandidateState(is_leading=True, trouble="refused"), True, False, "refused", id="leader-without-server"
        ),
    ],
)
def test_readiness_tells_what_is_missing(standing: CandidateState | None, started: bool, good: bool, text: str) -> None:
    answer = probes.readiness(standing, started=started)
    assert answer.is_good is good
    assert text in answer.text


def test_a_leader_whose_lease_is_long_over_is_not_alive_and_a_standby_always_is() -> None:
    assert probes.liveness(CandidateState(is_leading=True, age_seconds=10)).is_good
    assert not probes.liveness(CandidateState(is_leading=True, age_seconds=16)).is_good
    assert probes.liveness(CandidateState(is_leading=False, trouble="refused", age_seconds=1e6)).is_good
    assert probes.liveness(None).is_good


@pytest.mark.parametrize(
    ("line", "status"),
    [
        (b"GET /healthz HTTP/1.1\r\n", b"200 OK"),
        (b"GET /healthz?verbose HTTP/1.1\r\n", b"200 OK"),
        (b"GET /readyz HTTP/1.1\r\n", b"503 Service Unavailable"),
        (b"GET / HTTP/1.1\r\n", b"404 Not Found"),
        (b"\xff\r\n", b"404 Not Found"),
        (b"", b"404 Not Found"),
    ],
)
def test_any_first_line_gets_a_whole_response(line: bytes, status: bytes) -> None:
    head, _, body = probes.respond(line, PAGES).partition(b"\r\n\r\n")
    assert head.split(b"\r\n")[0] == b"HTTP/1.1 " + status
    assert f"Content-Length: {len(body)}".encode() in head


@pytest.fixture
def loop() -> Iterator[asyncio.AbstractEventLoop]:
    """A loop that turns in a thread of its own."""
    found = asyncio.new_event_loop()
    thread = threading.Thread(target=found.run_forever)
    thread.start()
    yield found
    found.call_soon_threadsafe(found.stop)
    thread.join()
    found.close()


async def close(server: asyncio.Server) -> None:
    """Close a server in its own loop: asyncio's objects are not safe for other threads."""
    server.close()
    await server.wait_closed()


def test_a_stuck_loop_answers_nobody(loop: asyncio.AbstractEventLoop) -> None:
    server = asyncio.run_coroutine_threadsafe(probes.serve(0, PAGES), loop).result(timeout=10)
    port = server.sockets[0].getsockname()[1]
    url = f"http://127.0.0.1:{port}/healthz"
    with urllib.request.urlopen(url, timeout=10) as response:
        assert (response.status, response.read()) == (200, b"alive\n")
    with pytest.raises(urllib.error.HTTPError, match="503"):
        urllib.request.urlopen(f"http://127.0.0.1:{port}/readyz", timeout=10)
    released = threading.Event()
    loop.call_soon_threadsafe(released.wait, 60)
    with pytest.raises(OSError, match="timed out"):
        urllib.request.urlopen(url, timeout=0.3)
    released.set()
    with urllib.request.urlopen(url, timeout=10) as response:
        assert response.status == 200
    asyncio.run_coroutine_threadsafe(close(server), loop).result(timeout=10)
