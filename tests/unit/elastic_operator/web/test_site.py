"""What readers cost, and what a real socket answers: methods, headers, limits, a loop that never waits for a page."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import http.client
import socket
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from http import HTTPStatus
from urllib.parse import urljoin

import pytest

from elastic_operator.observed.observation import Key
from elastic_operator.observed.timeouts import Timeouts
from elastic_operator.reconcile.record import Record
from elastic_operator.web import server, site
from elastic_operator.web.collect import take_snapshot
from elastic_operator.web.pages.document import POLICY
from elastic_operator.web.pages.snapshot import Snapshot
from elastic_operator.web.response import Response
from elastic_operator.web.site import MAX_PAGES, MAX_WAITING, Site
from tests.unit.elastic_operator.crowd import Crowd, labels
from tests.unit.elastic_operator.web.fleet_data import GPT, large_fleet, small_fleet
from tests.unit.elastic_operator.web.test_pages import Page


class Gate(Mapping[Key, "Record | None"]):
    """Records that make whoever reads them wait until the gate is open, as a page that takes long to make."""

    def __init__(self, records: Mapping[Key, Record | None]) -> None:
        self.records = records
        self.is_reached, self.opened = threading.Event(), threading.Event()

    def __getitem__(self, key: Key) -> Record | None:
        return self.records[key]

    def __len__(self) -> int:
        return len(self.records)

    def __iter__(self) -> Iterator[Key]:
        self.is_reached.set()
        assert self.opened.wait(30)
        return iter(self.records)


@contextlib.asynccontextmanager
async def open_site(take: Callable[[], Snapshot] | None = small_fleet) -> AsyncIterator[Site]:
    made = Site(lambda: "This replica stands by. The leader is other-pod.")
    made.take_snapshot = take
    try:
        yield made
    finally:
        made.close()


def test_all_readers_of_two_seconds_share_one_snapshot_and_its_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[float] = []

    def take() -> Snapshot:
        taken.append(1.0)
        return small_fleet()

    # A busy machine may take more than two seconds for the pages.
    monkeypatch.setattr(site, "SNAPSHOT_SECONDS", 600.0)

    async def run() -> None:
        async with open_site(take) as found:
            answers = [await found.respond("/") for _ in range(20)]
            assert all(answer is answers[0] for answer in answers)
            assert (await found.respond("/jobs/demo/gpt")).status == HTTPStatus.OK
            assert len(taken) == 1
            monkeypatch.setattr(site, "SNAPSHOT_SECONDS", 0.0)
            assert await found.respond("/") is not answers[0]
            assert len(taken) == 2

    asyncio.run(run())


def test_the_loop_goes_on_while_a_page_is_made_and_a_crowd_is_sent_away() -> None:
    gate = Gate(small_fleet().records)

    async def run() -> None:
        async with open_site(lambda: dataclasses.replace(small_fleet(), records=gate)) as found:
            slow = [asyncio.create_task(found.respond("/")) for _ in range(MAX_WAITING)]
            assert await asyncio.to_thread(gate.is_reached.wait, 30)
            refused = await found.respond("/jobs/demo/gpt")
            assert refused.status == HTTPStatus.SERVICE_UNAVAILABLE
            assert b"Too many readers at once" in refused.body
            assert not any(task.done() for task in slow)
            gate.opened.set()
            assert {answer.status for answer in await asyncio.gather(*slow)} == {HTTPStatus.OK}

    asyncio.run(run())


def test_the_thread_rests_after_a_page(monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[float] = []
    real = asyncio.sleep

    async def sleep(seconds: float) -> None:
        waits.append(seconds)
        await real(0)

    async def run() -> None:
        async with open_site(lambda: large_fleet(300, 300)) as found:
            await found.respond("/")
            monkeypatch.setattr(asyncio, "sleep", sleep)
            await found.respond("/?page=2")

    asyncio.run(run())
    assert len(waits) == 1
    assert waits[0] > 0


def test_no_more_pages_are_kept_than_the_limit() -> None:
    async def run() -> None:
        async with open_site(lambda: large_fleet(1, 1)) as found:
            for number in range(MAX_PAGES + 10):
                assert (await found.respond(f"/?page={number + 1}")).status == HTTPStatus.OK
            assert len(found._pages) <= MAX_PAGES

    asyncio.run(run())


@pytest.mark.parametrize(
    ("target", "status"),
    [
        ("/", 200), ("/?page=2", 200), ("/jobs/demo/gpt", 200), ("/jobs/demo/gpt?refresh=off", 200),
        ("/jobs/d%65mo/gpt", 200), ("/jobs/demo/none", 404), ("/jobs/demo", 404), ("/jobs/demo/gpt/", 404),
        ("/jobs/../gpt", 404), ("/jobs/demo/%2e%2e", 404), ("//", 404), ("/metrics", 404),
        ("/jobs/<script>/x", 404), ("/%ff%fe", 404),
    ],
)  # fmt: skip
def test_only_pages_that_exist_are_there(target: str, status: int) -> None:
    async def run() -> None:
        async with open_site() as found:
            response = await found.respond(target)
            assert response.status == status
            assert b"<script" not in response.body

    asyncio.run(run())


def test_a_standby_says_who_leads_and_a_defect_stays_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    async def run() -> None:
        async with open_site(None) as found:
            response = await found.respond("/")
            assert response.status == HTTPStatus.SERVICE_UNAVAILABLE
            assert b"The leader is other-pod" in response.body
        async with open_site(lambda: dataclasses.replace(small_fleet(), pods={GPT: (None,)})) as found:
            response = await found.respond("/")
            assert response.status == HTTPStatus.INTERNAL_SERVER_ERROR
            assert b"None" not in response.body

    asyncio.run(run())
    assert "the status page of the fleet cannot be made" in caplog.text


def test_a_snapshot_is_taken_from_what_the_watches_told_without_a_request() -> None:
    crowd = Crowd(20, num_nodes=30)
    before = list(crowd.reader.asked)
    snapshot = take_snapshot(crowd.store, crowd.nodes, Timeouts())
    assert crowd.reader.asked == before
    assert set(snapshot.records) == set(crowd.keys)
    assert len(snapshot.nodes) == 30
    assert snapshot.is_live
    assert [pod.node for pod in snapshot.own_pods(crowd.keys[3])] == ["n3"]
    assert snapshot.used == {"amd.com/gpu": {f"n{number}": 8 for number in range(20)}}
    meta = {"namespace": "ns", "name": "job-3-a1-0", "labels": labels(crowd, 3)}
    crowd.tell("pods", {"metadata": meta}, "DELETED")
    assert len(snapshot.own_pods(crowd.keys[3])) == 1, "it is a copy"
    crowd.informer("nodes").is_live = False
    later = take_snapshot(crowd.store, crowd.nodes, Timeouts())
    assert (later.is_live, later.used, later.own_pods(crowd.keys[3])) == (False, None, ())


@pytest.fixture
def port() -> Iterator[int]:
    """Port of a real server, whose loop turns in a thread."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()

    async def start() -> tuple[asyncio.Server, Site]:
        made = Site(lambda: "")
        made.take_snapshot = small_fleet
        return await server.serve(0, made.respond), made

    async def stop(listening: asyncio.Server, made: Site) -> None:
        made.close()
        listening.close()
        await listening.wait_closed()

    found = asyncio.run_coroutine_threadsafe(start(), loop).result(timeout=10)
    yield int(found[0].sockets[0].getsockname()[1])
    asyncio.run_coroutine_threadsafe(stop(*found), loop).result(timeout=10)
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
    loop.close()


def ask(port: int, method: str, target: str = "/", **headers: str) -> tuple[int, dict[str, str], bytes]:
    with contextlib.closing(http.client.HTTPConnection("127.0.0.1", port, timeout=30)) as connection:
        connection.request(method, target, headers=headers)
        answer = connection.getresponse()
        return answer.status, {name.lower(): value for name, value in answer.getheaders()}, answer.read()


def send(port: int, data: bytes) -> bytes:
    """Send bytes as they are, and return everything that comes back."""
    with socket.create_connection(("127.0.0.1", port), timeout=30) as connection:
        connection.sendall(data)
        found = b""
        with contextlib.suppress(ConnectionResetError):
            while part := connection.recv(65536):
                found += part
        return found


def test_get_and_head_are_answered_with_strict_headers_and_nothing_else_is(port: int) -> None:
    status, headers, body = ask(port, "GET", "/jobs/demo/gpt", Host="anything.example", Cookie="a=b")
    assert status == 200
    assert b"demo/gpt" in body
    assert {name: headers[name] for name in headers if name != "content-length"} == {
        "content-type": "text/html; charset=utf-8", "content-security-policy": POLICY,
        "x-content-type-options": "nosniff", "x-frame-options": "DENY",
        "referrer-policy": "no-referrer", "cross-origin-resource-policy": "same-origin",
        "cross-origin-opener-policy": "same-origin", "cache-control": "no-store", "connection": "close",
    }  # fmt: skip
    head = ask(port, "HEAD", "/jobs/demo/gpt")
    assert (head[0], head[1]["content-length"], head[2]) == (200, str(len(body)), b"")
    for method in ("POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE", "CONNECT", "PRI", "get"):
        status, headers, _ = ask(port, method)
        assert (status, headers["allow"]) == (405, "GET, HEAD")
        assert headers["content-security-policy"] == POLICY
    assert ask(port, "GET", "/favicon.ico")[0] == 404


@pytest.mark.parametrize(
    ("data", "status"),
    [
        (b"GET /\r\n\r\n", b"400"),
        (b"GET http://x/ HTTP/1.1\r\n\r\n", b"400"),
        (b"GET / HTTP/2.0\r\n\r\n", b"400"),
        (b"\xff\xfe\x00\r\n\r\n", b"400"),
        (b"GET / HTTP/1.0\r\n\r\n", b"200"),
        (b"GET /" + b"a" * 20_000 + b" HTTP/1.1\r\n\r\n", b"431"),
        (b"GET / HTTP/1.1\r\nX: " + b"a" * 20_000 + b"\r\n\r\n", b"431"),
    ],
    ids=str,
)  # fmt: skip
def test_a_malformed_or_oversized_request_gets_a_whole_answer(port: int, data: bytes, status: bytes) -> None:
    assert send(port, data).startswith(b"HTTP/1.1 " + status)


def test_connections_that_say_nothing_are_closed_and_bounded(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "MAX_CONNECTIONS", 4)
    monkeypatch.setattr(server, "REQUEST_SECONDS", 600.0)
    with contextlib.ExitStack() as stack:
        silent = [stack.enter_context(socket.create_connection(("127.0.0.1", port), timeout=30)) for _ in range(4)]
        for connection in silent:
            connection.sendall(b"GET / HT")
        assert send(port, b"GET / HTTP/1.1\r\n\r\n") == b"", "one too many"
    monkeypatch.setattr(server, "REQUEST_SECONDS", 0.1)
    assert send(port, b"GET / HT") == b""
    assert ask(port, "GET")[0] == 200


def test_a_reader_who_takes_nothing_is_closed_with_what_waits_for_him(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "RESPONSE_SECONDS", 0.2)
    body = b"x" * (32 << 20)

    async def respond(target: str, *, is_forwarded: bool) -> Response:
        del target, is_forwarded
        return Response(HTTPStatus.OK, body)

    def read_late(port: int) -> int:
        with socket.create_connection(("127.0.0.1", port), timeout=30) as connection:
            connection.sendall(b"GET / HTTP/1.1\r\n\r\n")
            time.sleep(2.0)
            num_bytes = 0
            with contextlib.suppress(ConnectionResetError):
                while part := connection.recv(1 << 20):
                    num_bytes += len(part)
            return num_bytes

    async def main() -> int:
        listening = await server.serve(0, respond)
        try:
            return await asyncio.to_thread(read_late, listening.sockets[0].getsockname()[1])
        finally:
            listening.close()

    assert asyncio.run(main()) < len(body)


def test_the_pages_of_a_served_site_are_those_of_its_links(port: int) -> None:
    """Every link of the fleet's page leads somewhere, and each page back."""
    seen: dict[str, int] = {}
    queue = ["/"]
    while queue:
        target = queue.pop()
        status, _, body = ask(port, "GET", target)
        seen[target] = status
        for link in links_of(body, target):
            if link not in seen and link not in queue:
                queue.append(link)
    assert set(seen.values()) == {200}
    assert {"/jobs/nlp/moe", "/jobs/demo/gpt", "/?refresh=off", "/jobs/demo/gpt?refresh=off"} <= set(seen)


def links_of(body: bytes, target: str) -> list[str]:
    return [urljoin(target, link).removesuffix("?") for link in Page(body).links if not link.startswith("#")]
