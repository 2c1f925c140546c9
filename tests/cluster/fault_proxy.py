"""A proxy in front of a real API server that injects one fault at one chosen request of an operator.

Every operator process gets a view: a path prefix of the proxy under which it finds the API server. A view shows one
namespace and the nodes of one lane, so that several operators work side by side without seeing each other's jobs. The
proxy passes credentials on, and forwards everything else unchanged to the API server.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import enum
import json
import re
import ssl
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from typing import Any

import aiohttp
from aiohttp import web

LANE = "lane"
"""Label of the nodes of a lane, and of their Leases."""

WRITES = ("create", "update", "patch", "delete")

CLIENT_SECONDS = 1.5
"""The time-out of operators that meet late answers; `OperatorInProcess` has it."""

HELD_SECONDS = CLIENT_SECONDS + 0.5
"""How long a request or its answer is held, which the operator has then given up and repeated."""

_PATH = re.compile(
    r"(?:api|apis/[^/]+)/[^/]+(?:/namespaces/(?P<namespace>[^/]+))?"
    r"/(?P<plural>[^/]+)(?:/(?P<name>[^/]+)(?:/(?P<subresource>[^/]+))?)?"
)
_VERBS = {"POST": "create", "PUT": "update", "PATCH": "patch", "DELETE": "delete"}
_OF_JOBS = {"elastictrainingjobs", "jobs", "leases", "pods"}
_HOP_BY_HOP = {"connection", "content-length", "host", "keep-alive", "transfer-encoding"}


class Fault(enum.StrEnum):
    """What the proxy does to a request in place of forwarding it and its answer."""

    CONFLICT = "409"
    THROTTLED = "429"
    INTERNAL = "500"
    TIMEOUT = "504"
    DONE_TIMEOUT = "done, then 504"
    CUT = "the connection is cut"
    DONE_CUT = "done, then the connection is cut"
    LATE_ANSWER = "done, answered after the client's time-out"
    LANDS_LATE = "done after the client's time-out"
    LANDS_AFTER_KILL = "kill, done after the next operator has written"
    STALE_LIST = "stale list"
    CUT_WATCH = "watch cut"
    GONE_WATCH = "watch ended with 410"
    GONE_REOPENED = "watch cut, the next one refused with 410"
    KILL_BEFORE = "kill before"
    KILL_AFTER = "kill after"


REFUSALS = {Fault.CONFLICT: 409, Fault.THROTTLED: 429, Fault.INTERNAL: 500, Fault.TIMEOUT: 504}
LATE = (Fault.LATE_ANSWER, Fault.LANDS_LATE, Fault.LANDS_AFTER_KILL)
WRITE_FAULTS = (*REFUSALS, Fault.DONE_TIMEOUT, Fault.DONE_CUT, *LATE)
OPEN_FAULTS = (Fault.THROTTLED, Fault.INTERNAL, Fault.TIMEOUT, Fault.CUT)
READ_FAULTS = (*OPEN_FAULTS, Fault.LATE_ANSWER)
WATCH_FAULTS = (Fault.CUT_WATCH, Fault.GONE_WATCH, Fault.GONE_REOPENED)
KILLS = (Fault.KILL_BEFORE, Fault.KILL_AFTER)


@dataclasses.dataclass(frozen=True, slots=True, order=True)
class Point:
    """One request of a recovery: the `number`-th with this verb and resource, from 0.

    For the verb `watch` it is the `number`-th event that watches of this resource deliver; for the verb `open` it is
    the request that begins a watch.
    """

    verb: str
    resource: str
    number: int

    def __str__(self) -> str:
        return f"{self.verb} {self.resource} #{self.number}"


@dataclasses.dataclass(frozen=True, slots=True)
class Rule:
    """A fault, and the request that it hits."""

    point: Point
    fault: Fault

    def __str__(self) -> str:
        return f"{self.fault}: {self.point}"


@dataclasses.dataclass(frozen=True, slots=True)
class Call:
    """A request to the API server."""

    verb: str
    resource: str
    name: str

    @property
    def is_write(self) -> bool:
        return self.verb in WRITES

    def __str__(self) -> str:
        return f"{self.verb} {self.resource} {self.name}".rstrip()


def read_call(method: str, path: str, query: Mapping[str, str]) -> Call:
    """Return what a request asks for."""
    found = _PATH.fullmatch(path)
    if found is None:
        return Call(method.lower(), path, "")
    name = found["name"] or ""
    resource = "/".join(filter(None, (found["plural"], found["subresource"])))
    reading = "watch" if query.get("watch") else "get" if name else "list"
    verb = _VERBS.get(method, reading)
    return Call(f"{verb} dry-run" if "dryRun" in query else verb, resource, name)


class View:
    """How the operators of one lane see the API server, one after the other.

    Attributes:
        log: the requests and faults since the last `arm`, for people.
        counts: how many requests of each verb and resource there were since then; for watches their events.
        hit: the rule's request has come, and the fault was injected.
    """

    def __init__(self, namespace: str, on_kill: Callable[[], None]) -> None:
        self.namespace = namespace
        self.alive = 0
        self.log: list[str] = []
        self.counts: Counter[tuple[str, str]] = Counter()
        self.hit = False
        self._rule: Rule | None = None
        self._on_kill = on_kill
        self._begin = self._last_request = time.monotonic()
        self._num_open = 0
        self._lists: dict[str, bytes] = {}
        self._old_lists: dict[str, bytes] = {}
        self._refused_watch = ""
        self._interruption: tuple[int, Callable[[], Awaitable[None]]] | None = None

    def arm(self, rule: Rule | None) -> None:
        """Begin to count at 0; inject the fault of `rule` when its request comes."""
        self._rule, self.hit = rule, False
        self._begin = time.monotonic()
        self.counts.clear()
        self.log.clear()
        self._old_lists = dict(self._lists)
        self._refused_watch = ""

    def interrupt_at(self, number: int, act: Callable[[], Awaitable[None]]) -> None:
        """Let something happen before the next request goes on, once `number` requests and events have come."""
        self._interruption = number, act

    def withdraw_interruption(self) -> bool:
        """Return whether what was to happen has not happened yet; then it will not."""
        is_due, self._interruption = self._interruption is not None, None
        return is_due

    async def interrupt(self) -> None:
        """Do what `interrupt_at` has named, if it is due."""
        if self._interruption is None or self.counts.total() < self._interruption[0]:
            return
        act, self._interruption = self._interruption[1], None
        self.note("--- interrupted")
        await asyncio.shield(asyncio.ensure_future(act()))  # also if the operator is killed, and its request ends

    def note(self, text: str) -> None:
        """Add a line to the log."""
        self.log.append(f"{time.monotonic() - self._begin:6.2f} s  {text}")

    @property
    def quiet_seconds(self) -> float:
        """Time since the last request ended, 0 while there is one; watches do not count."""
        return 0.0 if self._num_open else time.monotonic() - self._last_request

    @contextlib.contextmanager
    def busy(self) -> Any:
        self._num_open += 1
        try:
            yield
        finally:
            self._num_open -= 1
            self._last_request = time.monotonic()

    def next_fault(self, verb: str, resource: str) -> Fault | None:
        """Count a request, or an event of a watch; return the fault to inject."""
        number = self.counts[verb, resource]
        self.counts[verb, resource] += 1
        if self._rule is None or self.hit or self._rule.point != Point(verb, resource, number):
            return None
        self.hit = True
        self.note(f"--- {self._rule}")
        return self._rule.fault

    @property
    def num_writes(self) -> int:
        """Number of requests to write since the last `arm`."""
        return sum(count for (verb, _), count in self.counts.items() if verb in WRITES)

    def kill(self) -> None:
        """Kill the operator: from now on nothing that it sends reaches the API server."""
        self.alive += 1
        self._on_kill()

    def keep_list(self, key: str, body: bytes) -> None:
        self._lists[key] = body

    def stale_list(self, key: str, body: bytes) -> bytes:
        """Return the last answer to this list before `arm`; without one, `body`, and the fault was not injected."""
        if key not in self._old_lists:
            self.hit = False
        return self._old_lists.get(key, body)

    def refuse_watch(self, resource: str) -> None:
        self._refused_watch = resource

    def is_refused(self, resource: str) -> bool:
        if self._refused_watch != resource:
            return False
        self._refused_watch = ""
        return True


class FaultProxy:
    """The proxy; `serve` runs it."""

    def __init__(self, server: str, trust: ssl.SSLContext) -> None:
        self._server = server.rstrip("/")
        self._trust = trust
        self._views: dict[str, View] = {}
        self._session: aiohttp.ClientSession | None = None
        self.url = ""

    @contextlib.asynccontextmanager
    async def serve(self) -> AsyncIterator[FaultProxy]:
        """Listen on a free port of this machine."""
        application = web.Application(client_max_size=1 << 24)
        application.router.add_route("*", "/{view}/{alive}/{path:.*}", self._handle)
        # A killed operator closes its connections; the requests that it has open end with them.
        runner = web.AppRunner(application, access_log=None, shutdown_timeout=0.1, handler_cancellation=True)
        connector = aiohttp.TCPConnector(limit=0, ssl=self._trust)
        self._session = aiohttp.ClientSession(connector=connector, auto_decompress=False)
        try:
            await runner.setup()
            site = web.TCPSite(runner, "127.0.0.1", 0)
            await site.start()
            self.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
            yield self
        finally:
            await self._session.close()
            await runner.cleanup()

    def add(self, view: View) -> None:
        self._views[view.namespace] = view

    def address(self, view: View) -> str:
        """Return the URL of the API server for the next operator of a view."""
        return f"{self.url}/{view.namespace}/{view.alive}"

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        view = self._views[request.match_info["view"]]
        if int(request.match_info["alive"]) != view.alive:
            return _cut(request)
        path = request.match_info["path"]
        call = read_call(request.method, path, request.query)
        if call.verb == "watch":
            return await self._watch(request, view, call, path)
        with view.busy():
            return await self._answer(request, view, call, path)

    async def _answer(self, request: web.Request, view: View, call: Call, path: str) -> web.StreamResponse:
        alive = view.alive
        await view.interrupt()
        if alive != view.alive:
            return _cut(request)
        fault = view.next_fault(call.verb, call.resource)
        key = f"{path}?{request.query_string}"
        if fault is Fault.KILL_BEFORE:
            view.kill()
            return _cut(request)
        if fault is Fault.CUT:
            return _cut(request)
        if fault in REFUSALS:
            code = REFUSALS[fault]
            view.note(f"{code}  {call}")
            return _refusal(code, call)
        content = await request.read()

        async def forward() -> web.Response:
            return await self._forward(view, call, request, path, content)

        if fault in LATE:
            # Also when the client has given up, which ends this handler.
            late = asyncio.ensure_future(_be_late(view, fault, forward))
            if fault is Fault.LANDS_AFTER_KILL:
                view.kill()
                return _cut(request)
            return await asyncio.shield(late)
        response = await forward()
        if alive != view.alive:
            return _cut(request)
        if fault is Fault.KILL_AFTER:
            view.kill()
            return _cut(request)
        if fault is Fault.DONE_CUT:
            return _cut(request)
        if fault is Fault.DONE_TIMEOUT:
            return _refusal(504, call)
        if call.verb == "list" and response.status == 200:
            assert isinstance(response.body, bytes)
            if fault is Fault.STALE_LIST:
                response.body = view.stale_list(key, response.body)
            else:
                view.keep_list(key, response.body)
        return response

    async def _forward(self, view: View, call: Call, request: web.Request, path: str, content: bytes) -> web.Response:
        """Send a request to the API server, and return its answer."""
        assert self._session is not None
        async with self._session.request(
            request.method,
            self._url(view, call, path, request),
            data=content or None,
            headers=_headers(request.headers),
        ) as answer:
            body = await answer.read()
            view.note(f"{answer.status}  {call}")
        return web.Response(status=answer.status, body=body, headers=_content_headers(answer))

    async def _watch(self, request: web.Request, view: View, call: Call, path: str) -> web.StreamResponse:
        if view.is_refused(call.resource):
            view.note(f"410  {call}")
            return _refusal(410, call)
        fault = view.next_fault("open", call.resource)
        if fault in REFUSALS:
            return _refusal(REFUSALS[fault], call)
        if fault is not None:
            if fault in KILLS:
                view.kill()
            return _cut(request)
        assert self._session is not None
        alive = view.alive
        timeout = aiohttp.ClientTimeout(total=None)
        url = self._url(view, call, path, request)
        async with self._session.get(url, headers=_headers(request.headers), timeout=timeout) as answer:
            response = web.StreamResponse(status=answer.status, headers=_content_headers(answer))
            await response.prepare(request)
            async for line in answer.content:
                if alive != view.alive:
                    return _cut(request)
                fault = None if b'"type":"BOOKMARK"' in line[:40] else view.next_fault("watch", call.resource)
                if fault in KILLS:
                    view.kill()
                    return _cut(request)
                if fault is Fault.GONE_WATCH:
                    await response.write(_GONE_EVENT)
                    break
                if fault is not None:
                    if fault is Fault.GONE_REOPENED:
                        view.refuse_watch(call.resource)
                    return _cut(request)
                await response.write(line)
            await response.write_eof()
            return response

    def _url(self, view: View, call: Call, path: str, request: web.Request) -> Any:
        """Return the URL at the API server: what a view lists of the whole cluster is what belongs to its lane."""
        query = dict(request.query)
        if call.verb in ("list", "watch"):
            if call.resource == "nodes" or "/namespaces/kube-node-lease/" in path:
                query["labelSelector"] = f"{LANE}={view.namespace}"
            elif call.resource in _OF_JOBS and "/namespaces/" not in path:
                head, plural = path.rsplit("/", 1)
                path = f"{head}/namespaces/{view.namespace}/{plural}"
        return aiohttp.client.URL(f"{self._server}/{path}").with_query(query)


_GONE = {"kind": "Status", "apiVersion": "v1", "status": "Failure", "reason": "Expired", "code": 410}
_GONE_EVENT = json.dumps({"type": "ERROR", "object": {**_GONE, "message": "injected"}}).encode() + b"\n"


def _content_headers(answer: aiohttp.ClientResponse) -> dict[str, str]:
    """Return what a client needs to read a body; the API server compresses large ones."""
    encoding = answer.headers.get("Content-Encoding")
    return {"Content-Type": answer.content_type} | ({"Content-Encoding": encoding} if encoding else {})


def _headers(headers: Mapping[str, str]) -> dict[str, str]:
    return {key: value for key, value in headers.items() if key.lower() not in _HOP_BY_HOP}


def _refusal(code: int, call: Call) -> web.Response:
    reasons = {
        409: "AlreadyExists" if call.verb == "create" else "Conflict", 410: "Expired", 429: "TooManyRequests",
        500: "InternalError", 504: "Timeout",
    }  # fmt: skip
    status = {"kind": "Status", "apiVersion": "v1", "status": "Failure", "metadata": {}, "code": code}
    status |= {"reason": reasons[code], "message": f"injected: {call}"}
    return web.json_response(status, status=code, headers={"Retry-After": "1"} if code == 429 else None)


async def _be_late(view: View, fault: Fault, forward: Callable[[], Awaitable[web.Response]]) -> web.Response:
    """Forward a request at the time that the fault says, and return the answer after the client's time-out."""
    with view.busy():
        if fault is Fault.LATE_ANSWER:
            response = await forward()
            await asyncio.sleep(HELD_SECONDS)
            return response
        deadline, before = time.monotonic() + HELD_SECONDS, view.num_writes
        while time.monotonic() < deadline:
            await asyncio.sleep(0.02)
            if fault is Fault.LANDS_AFTER_KILL and view.num_writes > before:
                break
        view.note("--- lands")
        return await forward()


def _cut(request: web.Request) -> web.Response:
    """Cut the connection without an answer."""
    if request.transport is not None:
        request.transport.abort()
    raise asyncio.CancelledError
