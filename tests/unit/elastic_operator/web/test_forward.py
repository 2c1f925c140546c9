"""A replica that stands by shows the leader's page, and believes neither the Lease nor who answers there."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator
from http import HTTPStatus

import pytest

from elastic_operator.web import forward, server
from elastic_operator.web.forward import ForwardError, parse_address
from elastic_operator.web.response import Response
from elastic_operator.web.site import Site
from tests.unit.elastic_operator.web.fleet_data import small_fleet


@contextlib.asynccontextmanager
async def replica(leader: str, *, leads: bool = False) -> AsyncIterator[tuple[Site, str]]:
    """One replica that serves, with its address."""
    site = Site(lambda: "This replica stands by.", lambda: leader)
    site.take_snapshot = small_fleet if leads else None
    listening = await server.serve(0, site.respond)
    try:
        yield site, f"127.0.0.1:{listening.sockets[0].getsockname()[1]}"
    finally:
        listening.close()
        site.close()


@contextlib.asynccontextmanager
async def answer_with(data: bytes) -> AsyncIterator[tuple[str, list[bytes]]]:
    """Address of a server that sends the same bytes to everybody, and what it was asked."""
    asked: list[bytes] = []

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        asked.append(await reader.readuntil(b"\r\n\r\n"))
        writer.write(data)
        with contextlib.suppress(OSError):
            await writer.drain()
        writer.close()

    listening = await asyncio.start_server(handle, "127.0.0.1", 0)
    try:
        yield f"127.0.0.1:{listening.sockets[0].getsockname()[1]}", asked
    finally:
        listening.close()


def test_a_standby_shows_the_page_of_the_leader() -> None:
    async def run() -> None:
        async with replica("", leads=True) as (leader, address), replica(address) as (standby, _):
            for target in ("/", "/jobs/demo/gpt?refresh=off", "/?page=2&nodes=3&refresh=off"):
                page = await standby.respond(target, is_forwarded=False)
                assert page == await leader.respond(target, is_forwarded=False)
                assert page.status == HTTPStatus.OK
            assert (await standby.respond("/jobs/demo/none", is_forwarded=False)).status == HTTPStatus.NOT_FOUND

    asyncio.run(run())


def test_a_request_is_forwarded_once() -> None:
    async def run() -> None:
        async with replica("") as (_, second), replica(second) as (first, _):
            page = await first.respond("/", is_forwarded=False)
            assert page.status == HTTPStatus.SERVICE_UNAVAILABLE
        asked: list[bool] = []

        async def respond(target: str, *, is_forwarded: bool) -> Response:
            asked.append(is_forwarded)
            return Response(HTTPStatus.OK, target.encode())

        listening = await server.serve(0, respond)
        async with replica(f"127.0.0.1:{listening.sockets[0].getsockname()[1]}") as (standby, _):
            await standby.respond("/", is_forwarded=False)
            assert asked == [True]
            page = await standby.respond("/", is_forwarded=True)
            assert (page.status, asked) == (HTTPStatus.SERVICE_UNAVAILABLE, [True])
        listening.close()

    asyncio.run(run())


def test_what_a_reader_writes_does_not_reach_the_leader() -> None:
    async def run() -> None:
        good = b"HTTP/1.1 200 OK\r\nContent-Type: text/html\r\n\r\n<p>"
        async with answer_with(good) as (address, asked), replica(address) as (standby, _):
            for target in ("/?x=\r\nEvil: 1&page=2", "/jobs/demo/gpt?page=%0d%0aEvil:1", "/?refresh=off\n"):
                assert (await standby.respond(target, is_forwarded=False)).body == b"<p>"
            assert [item.partition(b"\r\n")[0] for item in asked] == [
                b"GET /?page=2 HTTP/1.1", b"GET /jobs/demo/gpt? HTTP/1.1", b"GET /? HTTP/1.1"
            ]  # fmt: skip
            assert not any(b"Evil" in item for item in asked)

    asyncio.run(run())


@pytest.mark.parametrize(
    "data",
    [
        b"", b"HTTP/1.1 200 OK\r\n", b"SSH-2.0-OpenSSH_9.2\r\n\r\n", b"HTTP/1.1 302 Found\r\nLocation: /\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n\r\n{}", b"HTTP/1.1 999 ?\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Type: text/html\r\nX: " + b"a" * 40_000 + b"\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Type: text/html\r\n\r\n" + b"a" * (forward.MAX_BODY + 1),
    ],
    ids=lambda data: f"{data[:30]!r}",
)  # fmt: skip
def test_an_answer_that_is_no_page_is_not_shown(data: bytes) -> None:
    async def run() -> None:
        async with answer_with(data) as (address, _), replica(address) as (standby, _):
            page = await standby.respond("/", is_forwarded=False)
            assert page.status == HTTPStatus.SERVICE_UNAVAILABLE
            assert b"This replica stands by." in page.body

    asyncio.run(run())


def test_a_leader_that_does_not_answer_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forward, "_SECONDS", 0.1)

    async def run() -> None:
        with socket.create_server(("127.0.0.1", 0)) as silent:
            async with replica(f"127.0.0.1:{silent.getsockname()[1]}") as (standby, _):
                assert (await standby.respond("/", is_forwarded=False)).status == HTTPStatus.SERVICE_UNAVAILABLE

    asyncio.run(run())


@pytest.mark.parametrize(
    ("text", "address"), [("10.0.0.1:80", ("10.0.0.1", 80)), ("[fd00::1]:65535", ("fd00::1", 65535))]
)
def test_an_address_is_an_ip_address_with_a_port(text: str, address: tuple[str, int]) -> None:
    assert parse_address(text) == address


@pytest.mark.parametrize(
    "text",
    ["", ":80", "10.0.0.1", "10.0.0.1:0", "10.0.0.1:65536", "10.0.0.1:080", "example.org:80", "10.0.0.1:80/x",
     "10.0.0.1:80\r\n", "u@10.0.0.1:80", "10.0.0.256:80", "10.0.0.1:\u0663"],
)  # fmt: skip
def test_what_is_no_address_is_refused(text: str) -> None:
    with pytest.raises(ForwardError):
        parse_address(text)
