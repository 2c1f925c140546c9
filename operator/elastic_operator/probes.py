"""/healthz and /readyz for the kubelet's probes, served by the event loop that does the work: they die with it.

Standby and leader are both ready: a rolling update has to wait for the one as well as for the other.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import socket
from collections.abc import Callable, Mapping

from elastic_operator.cluster.leader_election import LEASE_SECONDS, Standing

_REQUEST_SECONDS = 5.0


@dataclasses.dataclass(frozen=True, slots=True)
class Answer:
    """What a probe is told.

    Attributes:
        good: 200, else 503.
        text: for people, one line.
    """

    good: bool
    text: str


def readiness(standing: Standing | None, *, started: bool) -> Answer:
    """Whether this process does its part: the leader (None: there is no election) acts, a standby could take over."""
    if standing is not None and standing.trouble:
        return Answer(False, f"the leader's Lease cannot be read or written: {standing.trouble}")
    if standing is not None and not standing.leading:
        return Answer(True, f"standby; the leader is {standing.holder or 'not known yet'}")
    return Answer(True, "leader") if started else Answer(False, "leader; the watches are being set up")


def liveness(standing: Standing | None) -> Answer:
    """Whether a restart would not help. That the question is answered at all is the larger part of the answer."""
    if standing is not None and standing.leading and standing.age_seconds > LEASE_SECONDS:
        return Answer(False, f"the leader's Lease was last renewed {standing.age_seconds:.0f} s ago")
    return Answer(True, "alive")


async def serve(port: int, pages: Mapping[str, Callable[[], Answer]]) -> asyncio.Server:
    """Serve one page for each path on all addresses.

    Raises:
        OSError: the port is taken.
    """

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError, TimeoutError, ValueError, asyncio.IncompleteReadError):
            async with asyncio.timeout(_REQUEST_SECONDS):
                writer.write(respond(await reader.readline(), pages))
                await writer.drain()
        writer.close()

    return await asyncio.start_server(handle, sock=_listen(port))


def _listen(port: int) -> socket.socket:
    """One socket for IPv4 and IPv6, or for IPv4 where there is no other."""
    if socket.has_dualstack_ipv6():
        # The machine may have IPv6 and the pod none; a port that is taken is refused below as well.
        with contextlib.suppress(OSError):
            return socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True)
    return socket.create_server(("", port))


def respond(request_line: bytes, pages: Mapping[str, Callable[[], Answer]]) -> bytes:
    """The HTTP response to the first line of a request."""
    words = request_line.decode("latin-1").split()
    path = words[1].partition("?")[0] if len(words) > 1 else ""
    page = pages.get(path)
    if page is None:
        status, text = "404 Not Found", f"there is {' and '.join(pages)}"
    else:
        answer = page()
        status, text = "200 OK" if answer.good else "503 Service Unavailable", answer.text
    body = f"{text}\n".encode()
    head = f"HTTP/1.1 {status}\r\nContent-Type: text/plain; charset=utf-8\r\nContent-Length: {len(body)}\r\n"
    return f"{head}Connection: close\r\n\r\n".encode() + body
