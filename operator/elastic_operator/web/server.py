"""HTTP server of the status page: GET and HEAD, one request for each connection, all sizes and times bounded."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable
from http import HTTPStatus
from typing import Protocol

from elastic_operator.probes import listen
from elastic_operator.web.forward import FORWARDED
from elastic_operator.web.pages.document import POLICY
from elastic_operator.web.response import Response

MAX_CONNECTIONS = 64
"""Connections at the same time; more are closed at once."""

MAX_HEAD = 16_384
"""Bytes of a request line with its headers."""

REQUEST_SECONDS = 5.0
"""Time in which the head of a request has to arrive."""

RESPONSE_SECONDS = 30.0
"""Time in which the page has to be made and read."""

_HEADERS = (
    f"Content-Security-Policy: {POLICY}\r\n"
    "X-Content-Type-Options: nosniff\r\n"
    "X-Frame-Options: DENY\r\n"
    "Referrer-Policy: no-referrer\r\n"
    "Cross-Origin-Resource-Policy: same-origin\r\n"
    "Cross-Origin-Opener-Policy: same-origin\r\n"
    "Cache-Control: no-store\r\n"
    "Connection: close\r\n"
)

_FORWARDED = f"\r\n{FORWARDED}:".lower().encode()

logger = logging.getLogger(__name__)


class Respond(Protocol):
    """Makes the page of a request target; `Site.respond`."""

    def __call__(self, target: str, *, is_forwarded: bool) -> Awaitable[Response]: ...


async def serve(port: int, respond: Respond) -> asyncio.Server:
    """Serve pages on all addresses.

    Args:
        port: the port; 0 for any free one.
        respond: makes the page of a request target.

    Raises:
        OSError: the port is taken.
    """
    num_open = 0

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal num_open
        num_open += 1
        try:
            if num_open <= MAX_CONNECTIONS:
                await _handle(reader, writer, respond)
        except (OSError, TimeoutError):
            logger.debug("a reader of the status page went away or was too slow")
        finally:
            num_open -= 1
            writer.transport.abort()  # `close` would wait forever for a reader who takes nothing

    return await asyncio.start_server(handle, sock=listen(port), limit=MAX_HEAD)


async def _handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, respond: Respond) -> None:
    try:
        async with asyncio.timeout(REQUEST_SECONDS):
            head = await reader.readuntil(b"\r\n\r\n")
    except asyncio.LimitOverrunError:
        head = None
    except asyncio.IncompleteReadError:
        return
    async with asyncio.timeout(RESPONSE_SECONDS):
        writer.write(await _answer(head, respond))
        writer.close()
        await writer.wait_closed()


async def _answer(head: bytes | None, respond: Respond) -> bytes:
    """Return the bytes of a response.

    Args:
        head: request line and headers; None if they are too long.
        respond: makes the page of a request target.
    """
    if head is None:
        return _encode(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE)
    words = head.partition(b"\r\n")[0].decode("latin-1").split(" ")
    if len(words) != 3 or not words[1].startswith("/") or not words[2].startswith("HTTP/1."):
        return _encode(HTTPStatus.BAD_REQUEST)
    if words[0] not in ("GET", "HEAD"):
        return _encode(HTTPStatus.METHOD_NOT_ALLOWED, more="Allow: GET, HEAD\r\n")
    response = await respond(words[1], is_forwarded=_FORWARDED in head.lower())
    more = "Retry-After: 2\r\n" if response.status == HTTPStatus.SERVICE_UNAVAILABLE else ""
    return _encode(response.status, response.body, more=more, is_head=words[0] == "HEAD")


def _encode(status: HTTPStatus, body: bytes | None = None, *, more: str = "", is_head: bool = False) -> bytes:
    kind = "text/plain" if body is None else "text/html"
    content = f"{status.phrase}\n".encode() if body is None else body
    head = (
        f"HTTP/1.1 {status.value} {status.phrase}\r\nContent-Type: {kind}; charset=utf-8\r\n"
        f"Content-Length: {len(content)}\r\n{_HEADERS}{more}\r\n"
    )
    return head.encode() + (b"" if is_head else content)
