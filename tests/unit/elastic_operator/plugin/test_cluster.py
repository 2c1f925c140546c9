"""The plugin's client against an HTTP server: what it asks, and what each failure is called."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from elastic_operator.client.credentials import CredentialPlugin, Credentials
from elastic_operator.plugin.cluster import Cluster, connect, split_lines
from elastic_operator.plugin.errors import Exit, PluginError

CRD = "/apis/elastictraining.dev/v1beta1"
FORBIDDEN = {"kind": "Status", "code": 403, "message": "User x\n cannot"}
UNAUTHORIZED = {"kind": "Status", "code": 401, "message": "Unauthorized"}
NO_OBJECT = {"kind": "Status", "code": 404, "message": "not found", "details": {"name": "gtp"}}
NO_PATH = {"kind": "Status", "code": 404, "message": "the server could not find the requested resource", "details": {}}


class Server(ThreadingHTTPServer):
    """Gives the answers in order, the last one for ever, and keeps the requests."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.answers: list[tuple[int, bytes]] = []
        self.asked: list[tuple[str, dict[str, str], bytes]] = []

    def say(self, *answers: tuple[int, Any]) -> None:
        self.answers += [
            (code, body if isinstance(body, bytes) else json.dumps(body).encode()) for code, body in answers
        ]

    def cluster(self, **user: Any) -> Any:
        return connect(Credentials(server=f"http://127.0.0.1:{self.server_port}", context="here", **user), "ns")


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Server

    def _answer(self) -> None:
        content = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        self.server.asked.append((f"{self.command} {self.path}", dict(self.headers), content))
        code, body = self.server.answers.pop(0) if len(self.server.answers) > 1 else self.server.answers[0]
        self.send_response(code)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    do_GET = do_PATCH = _answer  # noqa: N815

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def server() -> Iterator[Server]:
    made = Server()
    made.daemon_threads = True
    thread = threading.Thread(target=made.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield made
    made.shutdown()
    thread.join()
    made.server_close()


def item(name: str) -> dict[str, Any]:
    return {"metadata": {"name": name, "namespace": "ns"}}


def test_lists_are_read_in_chunks_with_selectors(server: Server) -> None:
    server.say((200, {"metadata": {"continue": "x"}, "items": [1]}), (200, {"metadata": {}, "items": [2]}))
    with server.cluster() as cluster:
        assert cluster.pods("gpt") == [1, 2]
    lines = [line for line, _, _ in server.asked]
    assert lines[0] == "GET /api/v1/namespaces/ns/pods?labelSelector=elastictraining.dev/job-name%3Dgpt&limit=500"
    assert lines[1] == lines[0] + "&continue=x"


def test_a_change_is_a_merge_patch_of_the_plugin(server: Server) -> None:
    server.say((200, item("gpt")))
    with server.cluster() as cluster:
        assert cluster.patch("gpt", {"spec": {"suspend": True}}) == item("gpt")
    ((line, headers, body),) = server.asked
    assert line == f"PATCH {CRD}/namespaces/ns/elastictrainingjobs/gpt?fieldManager=kubectl-etj"
    assert headers["Content-Type"] == "application/merge-patch+json"
    assert json.loads(body) == {"spec": {"suspend": True}}


@pytest.mark.parametrize(
    ("code", "body", "exit_code", "message"),
    [
        (403, FORBIDDEN, Exit.REFUSED, "^you may not list jobs: User x cannot$"),
        (401, UNAUTHORIZED, Exit.UNREACHABLE, "^the cluster does not accept the credentials of context here: Unauth"),
        (404, NO_PATH, Exit.NOT_INSTALLED, "install the CRD"),
        (404, b"404 page not found", Exit.NOT_INSTALLED, "install the CRD"),
        (200, b"<html>", Exit.REFUSED, "^cannot list jobs: http://127.0.0.1:.* does not answer with JSON$"),
        (502, b"<html>", Exit.REFUSED, "^cannot list jobs: http://127.0.0.1:.* answers 502$"),
        (500, {"kind": "Status", "message": "etcd\nis away"}, Exit.REFUSED, "^cannot list jobs: etcd is away$"),
    ],
    ids=["forbidden", "unauthorized", "no-crd", "no-path", "login-page", "proxy", "server"],
)
def test_a_rejection_is_one_line_with_its_code(
    server: Server, code: int, body: Any, exit_code: Exit, message: str
) -> None:
    server.say((code, body))
    with server.cluster() as cluster, pytest.raises(PluginError, match=message) as caught:
        cluster.jobs()
    assert caught.value.code == exit_code
    assert len(server.asked) == 1, "nothing is sent twice"


def test_a_job_that_is_not_there_is_told_with_near_names(server: Server) -> None:
    server.say((404, NO_OBJECT), (200, {"metadata": {}, "items": [item("gpt")]}))
    with server.cluster() as cluster, pytest.raises(PluginError, match=r"did you mean gpt\?"):
        cluster.job("gtp")


def test_a_rejected_token_is_read_again_once(server: Server, tmp_path: Path) -> None:
    plugin = CredentialPlugin(command=("sh", "-c", 'echo "{\\"status\\": {\\"token\\": \\"t$$\\"}}"'), environment={})
    server.say((401, UNAUTHORIZED), (200, item("gpt")))
    with server.cluster(plugin=plugin) as cluster:
        assert cluster.job("gpt") == item("gpt")
    first, second = (headers["authorization"] for _, headers, _ in server.asked)
    assert first.startswith("Bearer t")
    assert first != second


def test_credentials_that_cannot_be_used_are_told_so(server: Server, tmp_path: Path) -> None:
    broken = {"certificate_data": "no certificate", "key_data": "no key"}
    for user in ({"token_file": str(tmp_path / "absent")}, broken):
        with pytest.raises(
            PluginError, match=r"credentials of context here cannot be used: |cannot be reached"
        ) as caught:
            read_jobs(server, user)
        assert caught.value.code == Exit.UNREACHABLE
        assert "\n" not in str(caught.value)


def read_jobs(server: Server, user: dict[str, Any]) -> None:
    server.answers = [(200, b'{"metadata": {}}')]
    credentials = Credentials(server=f"https://127.0.0.1:{server.server_port}", context="here", **user)
    with connect(credentials, None) as cluster:
        cluster.jobs()


def test_a_log_is_read_line_by_line(server: Server) -> None:
    server.say((200, "first\nzweite Zeile \N{SNOWMAN}\r50 %\n\nlast".encode()))

    def read(cluster: Cluster) -> list[str]:
        return list(cluster.logs("p", "c", follow=False, tail_lines=7, timestamps=True))

    with server.cluster() as cluster:
        assert read(cluster) == ["first", "zweite Zeile \N{SNOWMAN}", "50 %", "", "last"]
    ((line, _, _),) = server.asked
    assert line == "GET /api/v1/namespaces/ns/pods/p/log?container=c&follow=false&timestamps=true&tailLines=7"


@pytest.mark.parametrize("size", [1, 2, 3, 50])
def test_lines_are_whole_however_they_arrive(size: int) -> None:
    text = "a\N{SNOWMAN}b\r\n\nc".encode() + b"\xff\rend"
    chunks = iter([text[begin : begin + size] for begin in range(0, len(text), size)])
    assert list(split_lines(chunks)) == ["a\N{SNOWMAN}b", "", "c\N{REPLACEMENT CHARACTER}", "end"]
