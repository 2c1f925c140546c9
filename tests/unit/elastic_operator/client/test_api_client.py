"""What the client sends and what it makes of answers; `test_ownership` writes with it, `test_informer` watches."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from elastic_operator.client import api_client
from elastic_operator.client.api_client import KubernetesClient
from elastic_operator.client.api_errors import AnswerError, ApiError, RequestError
from elastic_operator.client.credentials import CredentialPlugin, Credentials
from elastic_operator.client.resources import JOB, LEASE, NODE, POD, TRAINING_JOB

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
CONFLICT = {
    "kind": "Status",
    "code": 409,
    "reason": "AlreadyExists",
    "message": "jobs x exists",
    "details": {"name": "x"},
}


@contextlib.asynccontextmanager
async def serving(handler: Handler, **user: Any) -> AsyncIterator[KubernetesClient]:
    application = web.Application()
    application.router.add_route("*", "/{path:.*}", handler)
    async with TestServer(application, shutdown_timeout=0) as server:
        client = KubernetesClient(Credentials(server=str(server.make_url("")).rstrip("/"), **user))
        try:
            yield client
        finally:
            await client.close()


def ask(handler: Handler, question: Callable[[KubernetesClient], Awaitable[Any]], **user: Any) -> Any:
    async def run() -> Any:
        async with serving(handler, **user) as client:
            return await question(client)

    return asyncio.run(run())


class Recorder:
    """Answers every request with an empty object, and keeps what was asked."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.headers: list[dict[str, str]] = []
        self.bodies: list[Any] = []

    async def answer(self, request: web.Request) -> web.Response:
        self.lines.append(f"{request.method} {request.path_qs}")
        self.headers.append(dict(request.headers))
        self.bodies.append(await request.json() if request.can_read_body else None)
        return web.json_response({})


async def write_everything(client: KubernetesClient) -> None:
    job = {"metadata": {"name": "a/b", "namespace": "ns"}}
    await client.create(JOB, job, dryRun="All", fieldManager="me")
    await client.replace(TRAINING_JOB, job, subresource="status")
    await client.patch(NODE, "n", {"metadata": {}}, fieldManager="me")
    await client.delete(POD, "p", namespace="ns", preconditions={"uid": "u"}, gracePeriodSeconds=0)


def test_every_verb_has_its_method_path_and_body() -> None:
    recorder = Recorder()
    ask(recorder.answer, write_everything)
    assert recorder.lines == [
        "POST /apis/batch/v1/namespaces/ns/jobs?dryRun=All&fieldManager=me",
        "PUT /apis/elastictraining.dev/v1beta1/namespaces/ns/elastictrainingjobs/a%2Fb/status",
        "PATCH /api/v1/nodes/n?fieldManager=me",
        "DELETE /api/v1/namespaces/ns/pods/p",
    ]
    assert recorder.bodies[1]["kind"] == "ElasticTrainingJob"
    assert recorder.bodies[3] == {
        "apiVersion": "v1", "kind": "DeleteOptions", "preconditions": {"uid": "u"}, "gracePeriodSeconds": 0
    }  # fmt: skip
    assert recorder.headers[2]["Content-Type"] == "application/merge-patch+json"
    assert {found["Accept-Encoding"] for found in recorder.headers} == {"identity"}
    assert not [found for found in recorder.headers if "Authorization" in found]


def test_a_list_is_read_in_chunks_with_its_selectors() -> None:
    asked: list[dict[str, str]] = []

    async def answer(request: web.Request) -> web.Response:
        asked.append(dict(request.query))
        more = "" if len(asked) == 2 else "a+/=b"
        return web.json_response({"metadata": {"continue": more}, "items": [{"n": len(asked)}]})

    async def read(client: KubernetesClient) -> list[Any]:
        return [item async for item in client.list_objects(POD, labels="!x,y=1", fields="status.phase!=Failed")]

    assert ask(answer, read) == [{"n": 1}, {"n": 2}]
    selectors = {"labelSelector": "!x,y=1", "fieldSelector": "status.phase!=Failed", "limit": "500"}
    assert asked == [selectors, {**selectors, "continue": "a+/=b"}]


@pytest.mark.parametrize(
    ("answer", "error", "message"),
    [
        (web.json_response, ApiError, "jobs x exists"),
        (lambda body, status: web.Response(text="404 page not found", status=404), AnswerError, "HTTP status 404"),
        (lambda body, status: web.json_response([], status=502), AnswerError, "HTTP status 502"),
        (lambda body, status: web.Response(text="<html>", status=200), RequestError, "expected JSON"),
    ],
    ids=["status", "text", "other-json", "html"],
)
def test_an_answer_that_is_no_success_is_an_error_with_its_reason(
    answer: Callable[..., web.Response], error: type[Exception], message: str
) -> None:
    async def handler(_: web.Request) -> web.Response:
        return answer(CONFLICT, status=409)

    with pytest.raises(error, match=message) as caught:
        ask(handler, lambda client: client.get(LEASE, "x", namespace="ns"))
    assert type(caught.value) is error
    if isinstance(caught.value, ApiError):
        assert (caught.value.code, caught.value.reason, caught.value.details) == (409, "AlreadyExists", {"name": "x"})


def test_an_api_server_that_is_away_or_silent_is_a_request_error() -> None:
    async def silent(_: web.Request) -> web.Response:
        await asyncio.sleep(20)
        return web.Response()

    with pytest.raises(RequestError, match=r"[Tt]imeout"):
        ask(silent, lambda client: anext(client.pages("api/v1/nodes", {}, read_seconds=0.1)))

    async def away() -> None:
        with socket.create_server(("127.0.0.1", 0)) as taken:
            port = taken.getsockname()[1]
        client = KubernetesClient(Credentials(server=f"http://127.0.0.1:{port}"))
        try:
            await client.get(NODE, "n")
        finally:
            await client.close()

    with pytest.raises(RequestError, match="connect"):
        asyncio.run(away())


def test_a_rejected_token_is_read_again_once(tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text("old\n")
    asked: list[str] = []

    async def answer(request: web.Request) -> web.Response:
        asked.append(request.headers["Authorization"])
        token.write_text("new")
        status = {"kind": "Status", "code": 401, "message": "Unauthorized"}
        return web.json_response({}) if asked[-1] == "Bearer new" else web.json_response(status, status=401)

    async def read_twice(client: KubernetesClient) -> None:
        await client.get(NODE, "n")
        await client.get(NODE, "n")

    ask(answer, read_twice, token_file=str(token))
    assert asked == ["Bearer old", "Bearer new", "Bearer new"]


def test_a_token_that_stays_rejected_is_an_error_after_the_second_request() -> None:
    asked: list[str] = []

    async def answer(request: web.Request) -> web.Response:
        asked.append(request.headers["Authorization"])
        return web.json_response({"kind": "Status", "message": "Unauthorized"}, status=401)

    plugin = CredentialPlugin(command=("echo", '{"status": {"token": "t"}}'), environment={})
    for user, count in (({"plugin": plugin}, 2), ({"token": "t"}, 1)):
        asked.clear()
        with pytest.raises(ApiError, match="Unauthorized"):
            ask(answer, lambda client: client.get(NODE, "n"), **user)
        assert asked == ["Bearer t"] * count


def test_a_credential_plugin_that_fails_is_a_request_error_with_its_reason() -> None:
    plugin = CredentialPlugin(command=("sh", "-c", "echo no ticket >&2; exit 3"), environment={})
    with pytest.raises(RequestError, match="credential plugin sh returned 3: no ticket"):
        ask(Recorder().answer, lambda client: client.get(NODE, "n"), plugin=plugin)


def test_proxies_of_the_environment_are_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:1")
    monkeypatch.delenv("NO_PROXY", raising=False)
    monkeypatch.delenv("no_proxy", raising=False)
    assert ask(Recorder().answer, lambda client: client.get(NODE, "n")) == {}


def test_connections_notice_a_server_without_power() -> None:
    made = api_client._make_socket((socket.AF_INET, socket.SOCK_STREAM, 0, "", ("127.0.0.1", 1)))
    with made:
        assert made.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
        assert made.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 20_000
