"""A receiver of notifications on this machine: an HTTP server that answers as a test tells it to."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

from aiohttp import web
from aiohttp.test_utils import TestServer

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
SECRET = "T000-B000-verysecret"
"""The path of its URL."""


class Receiver:
    """Keeps what it has accepted; the first requests are answered by `answers`, one each, and all others with 200."""

    def __init__(self, *answers: Handler) -> None:
        self.answers = list(answers)
        self.bodies: list[Any] = []
        self.headers: list[dict[str, str]] = []
        self.paths: list[str] = []
        self.num_requests = 0

    async def handle(self, request: web.Request) -> web.StreamResponse:
        self.num_requests += 1
        self.paths.append(request.path)
        body = await request.json()
        if self.answers:
            return await self.answers.pop(0)(request)
        self.bodies.append(body)
        self.headers.append(dict(request.headers))
        return web.Response(text="ok")

    @contextlib.asynccontextmanager
    async def serving(self, context: ssl.SSLContext | None = None) -> AsyncIterator[str]:
        """Serve; yield the URL."""
        application = web.Application()
        application.router.add_route("*", "/{path:.*}", self.handle)
        server = TestServer(application, scheme="https" if context else "http", shutdown_timeout=0)
        await server.start_server(ssl=context, access_log=None)  # whose lines have the path
        try:
            yield str(server.make_url(f"/services/{SECRET}"))
        finally:
            await server.close()

    @property
    def texts(self) -> list[str]:
        return [body["text"] for body in self.bodies]

    async def wait_for(self, count: int) -> None:
        async with asyncio.timeout(5):
            while len(self.bodies) < count:
                await asyncio.sleep(0.005)


def status(code: int, **headers: str) -> Handler:
    async def answer(_: web.Request) -> web.Response:
        return web.Response(status=code, text=f"no such path: /services/{SECRET}", headers=headers)

    return answer


async def close(request: web.Request) -> web.StreamResponse:
    """Close the connection instead of an answer."""
    assert request.transport is not None
    request.transport.abort()
    return web.Response()
