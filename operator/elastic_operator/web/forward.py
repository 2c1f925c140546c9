"""Fetches a page from the leader, for a replica that stands by: behind a Service, a reader may reach either."""

from __future__ import annotations

import asyncio
import ipaddress
import re
from http import HTTPStatus

from elastic_operator.web.response import Response

MAX_BODY = 4 * 1024 * 1024
"""Bytes of a page; the leader's own are far smaller."""

FORWARDED = "ETJ-Forwarded"
"""Header of a request between replicas, which is not forwarded again."""

_MAX_HEAD = 16_384
_SECONDS = 5.0
_STATUS = re.compile(rb"HTTP/1\.1 (\d{3}) ")
_EXPECTED = (HTTPStatus.OK, HTTPStatus.NOT_FOUND, HTTPStatus.SERVICE_UNAVAILABLE, HTTPStatus.INTERNAL_SERVER_ERROR)


class ForwardError(Exception):
    """The leader's page cannot be had."""


def parse_address(text: str) -> tuple[str, int]:
    """Return host and port of `10.0.0.1:8082` or `[fd00::1]:8082`.

    Raises:
        ForwardError: it is no IP address with a port.
    """
    host, _, port = text.rpartition(":")
    try:
        address = ipaddress.ip_address(host.removeprefix("[").removesuffix("]"))
    except ValueError as error:
        raise ForwardError("expected an IP address and a port") from error
    if not re.fullmatch(r"[1-9][0-9]{0,4}", port) or int(port) > 65_535:
        raise ForwardError("expected an IP address and a port")
    return str(address), int(port)


async def fetch(address: str, target: str) -> Response:
    """Fetch a page from the leader.

    Args:
        address: IP address and port of the leader's status page, as its Lease states it.
        target: path and query, made by this program and not by a reader.

    Raises:
        ForwardError: there is no answer in time, or none that the status page would give.
    """
    host, port = parse_address(address)
    try:
        async with asyncio.timeout(_SECONDS):
            reader, writer = await asyncio.open_connection(host, port, limit=_MAX_HEAD)
            try:
                request = f"GET {target} HTTP/1.1\r\nHost: leader\r\n{FORWARDED}: 1\r\nConnection: close\r\n\r\n"
                writer.write(request.encode())
                head = await reader.readuntil(b"\r\n\r\n")
                body = await _read_all(reader)
            finally:
                writer.close()
    except (OSError, TimeoutError, asyncio.IncompleteReadError, asyncio.LimitOverrunError) as error:
        raise ForwardError(f"{address}: {type(error).__name__}") from error
    match = _STATUS.match(head)
    if match is None or int(match[1]) not in _EXPECTED or b"text/html" not in head:
        raise ForwardError(f"{address}: expected a page, found something else")
    return Response(HTTPStatus(int(match[1])), body)


async def _read_all(reader: asyncio.StreamReader) -> bytes:
    body = bytearray()
    while part := await reader.read(65_536):
        body += part
        if len(body) > MAX_BODY:
            raise ForwardError(f"expected a page of at most {MAX_BODY} bytes")
    return bytes(body)
