"""HTTP server of /healthz and /readyz for the kubelet's probes.

The event loop that runs the controller serves them, so a loop that hangs fails the probes. Leader and standby are both
ready, because a rolling update has to wait for either.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import socket
from collections.abc import Callable, Mapping

from elastic_operator.cluster.leader_election import LEASE_SECONDS, CandidateState

_REQUEST_SECONDS = 5.0


@dataclasses.dataclass(frozen=True, slots=True)
class Answer:
    """Answer to a probe.

    Attributes:
        is_good: True for status 200, False for 503.
        text: explanation in one line.
    """

    is_good: bool
    text: str


def readiness(state: CandidateState | None, *, started: bool) -> Answer:
    """Return whether the leader has started its watches, or a standby could take over.

    Args:
        state: state of the leader election; None without election.
        started: kopf's watches are set up.
    """
    if state is not None and state.trouble:
        return Answer(False, f"the leader's Lease cannot be read or written: {state.trouble}")
    if state is not None and not state.is_leading:
        return Answer(True, f"standby; the leader is {state.holder or 'not known yet'}")
    return Answer(True, "leader") if started else Answer(False, "leader; the watches are being set up")


def liveness(state: CandidateState | None) -> Answer:
    """Return whether this process is alive; a leader whose Lease has expired is not.

    Args:
        state: state of the leader election; None without election.
    """
    if state is not None and state.is_leading and state.age_seconds > LEASE_SECONDS:
        return Answer(False, f"the leader's Lease was last renewed {state.age_seconds:.0f} s ago")
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

    return await asyncio.start_server(handle, sock=listen(port))


def listen(port: int) -> socket.socket:
    """Open one socket for IPv4 and IPv6, or for IPv4 only if IPv6 is not available."""
    if socket.has_dualstack_ipv6():
        # The machine may have IPv6 while the pod has none. A port in use raises again below.
        with contextlib.suppress(OSError):
            return socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True)
    return socket.create_server(("", port))


def respond(request_line: bytes, pages: Mapping[str, Callable[[], Answer]]) -> bytes:
    """Build the HTTP response to the first line of a request."""
    words = request_line.decode("latin-1").split()
    path = words[1].partition("?")[0] if len(words) > 1 else ""
    page = pages.get(path)
    if page is None:
        status, text = "404 Not Found", f"expected one of {', '.join(pages)}"
    else:
        answer = page()
        status, text = "200 OK" if answer.is_good else "503 Service Unavailable", answer.text
    body = f"{text}\n".encode()
    head = f"HTTP/1.1 {status}\r\nContent-Type: text/plain; charset=utf-8\r\nContent-Length: {len(body)}\r\n"
    return f"{head}Connection: close\r\n\r\n".encode() + body
