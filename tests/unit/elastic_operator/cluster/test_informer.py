"""A copy of a collection stays true: through cuts, bookmarks, expired versions and objects that vanished meanwhile."""

from __future__ import annotations

import asyncio
import dataclasses
import enum
import json
from collections.abc import AsyncIterator, Sequence
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from elastic_operator.client.api_client import KubernetesClient
from elastic_operator.client.credentials import Credentials
from elastic_operator.client.resources import LEASE, NODE, POD
from elastic_operator.cluster import informer as module
from elastic_operator.cluster import watch_stream
from elastic_operator.cluster.informer import Id, Informer
from elastic_operator.cluster.watch_stream import Object, WatchedCollection, split_lines


def item(name: str, version: int, value: str = "") -> dict[str, Any]:
    return {"metadata": {"name": name, "resourceVersion": str(version)}, "value": value}


@dataclasses.dataclass(frozen=True)
class Answer:
    code: int = 200
    text: str = ""


class Trouble(enum.Enum):
    """What the API server does instead of an answer."""

    SILENCE = "opens the answer, and sends nothing"
    AWAY = "closes the connection"
    CUT = "closes the connection within a line"


def page(*items: dict[str, Any], version: int, more: str = "") -> Answer:
    meta = {"resourceVersion": str(version), "continue": more}
    return Answer(text=json.dumps({"metadata": meta, "items": items}))


def watch(*events: tuple[str, dict[str, Any]]) -> Answer:
    return Answer(text="".join(json.dumps({"type": change, "object": found}) + "\n" for change, found in events))


def expired() -> dict[str, Any]:
    return {"kind": "Status", "code": 410, "message": "too old resource version", "metadata": {}}


def follow(
    answers: Sequence[Answer | Trouble],
    monkeypatch: pytest.MonkeyPatch,
    *,
    may_become_empty: bool = True,
    is_optional: bool = False,
) -> Story:
    """Let a informer hear these answers, one after another."""
    monkeypatch.setattr(module, "FIRST_BACKOFF_SECONDS", 0.001)
    monkeypatch.setattr(watch_stream, "SILENCE_SECONDS", 0.2)
    monkeypatch.setattr(module, "OPTIONAL_SECONDS", 0.001)
    story = Story(list(answers), may_become_empty=may_become_empty, is_optional=is_optional)
    asyncio.run(story.run())
    return story


def void(_: object) -> None:
    pass


class Story:
    """What was asked and what is kept at the end."""

    def __init__(
        self, answers: list[Answer | Trouble], *, may_become_empty: bool = True, is_optional: bool = False
    ) -> None:
        self.answers = answers
        self.requests: list[dict[str, str]] = []
        self.kept: dict[Id, Object] = {}
        self.is_live: list[bool] = []
        self.over = asyncio.Event()
        self.was_away = False
        self.informer = Informer(
            WatchedCollection(kind=NODE),
            self.put,
            lambda gone: void(self.kept.pop(gone, None)),
            may_become_empty=may_become_empty,
            is_optional=is_optional,
        )

    def put(self, found: Object) -> None:
        if found.get("value") == "poison":
            raise KeyError("poison")
        self.kept["", found["metadata"]["name"]] = found

    async def answer(self, request: web.Request) -> web.StreamResponse:
        assert request.transport is not None
        if self.answers[:1] == [Trouble.AWAY] and not self.was_away:
            self.was_away = True  # aiohttp repeats a GET once when the connection is closed
            request.transport.abort()
            return web.Response()
        self.requests.append(dict(request.query))
        self.is_live.append(self.informer.is_live)
        if not self.answers:
            self.over.set()
            await asyncio.Event().wait()
        found = self.answers.pop(0)
        answer = web.StreamResponse(status=found.code if isinstance(found, Answer) else 200)
        if found is Trouble.AWAY:
            request.transport.abort()
            return answer
        await answer.prepare(request)
        if found is Trouble.SILENCE:
            await asyncio.sleep(20)
        elif found is Trouble.CUT:
            await answer.write(b'{"type": "ADDED", "obj')
            request.transport.abort()
        elif isinstance(found, Answer):
            await answer.write(found.text.encode())
        return answer

    async def run(self) -> None:
        application = web.Application()
        application.router.add_get("/{path:.*}", self.answer)
        async with TestServer(application, shutdown_timeout=0) as server:
            client = KubernetesClient(Credentials(server=str(server.make_url("")).rstrip("/")))
            task = asyncio.create_task(self.informer.follow(client))
            await asyncio.wait_for(self.over.wait(), timeout=20)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            await client.close()

    @property
    def names(self) -> set[str]:
        return {name for _, name in self.kept}

    @property
    def watched_from(self) -> list[str]:
        return [params["resourceVersion"] for params in self.requests if params.get("watch")]


@pytest.mark.parametrize("code", [404, 403])
def test_a_kind_that_is_not_served_counts_as_empty_until_it_is(code: int, monkeypatch: pytest.MonkeyPatch) -> None:
    missing = Answer(code=code, text="404 page not found")
    story = follow(
        [missing, missing, page(item("a", 1), version=5), watch(("ADDED", item("b", 6)))], monkeypatch, is_optional=True
    )
    assert story.is_live[1:3] == [True, True]
    assert story.names == {"a", "b"}
    assert story.informer.is_served


def test_a_kind_that_is_no_longer_served_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    gone = Answer(code=404, text="404 page not found")
    story = follow([page(item("a", 1), version=5), gone, gone], monkeypatch, is_optional=True)
    assert story.kept == {}
    assert story.informer.is_served is False
    assert story.is_live[-1]


def test_another_error_of_an_optional_kind_keeps_what_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    story = follow([page(item("a", 1), version=5), Answer(code=500), watch()], monkeypatch, is_optional=True)
    assert story.names == {"a"}
    assert story.is_live[2] is False


def test_a_list_in_pages_then_what_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    story = follow(
        [
            page(item("a", 1), item("b", 2), version=9, more="next"),
            page(item("c", 3), version=9),
            watch(("ADDED", item("d", 10)), ("DELETED", item("b", 11)), ("MODIFIED", item("a", 12, "new"))),
        ],
        monkeypatch,
    )
    assert story.names == {"a", "c", "d"}
    assert story.kept["", "a"]["value"] == "new"
    assert story.requests[1]["continue"] == "next"
    assert story.watched_from == ["9", "12"], "a watch that ended goes on where it was, without another list"
    assert story.informer.has_synced.is_set()


def test_a_bookmark_moves_the_version_on(monkeypatch: pytest.MonkeyPatch) -> None:
    story = follow([page(version=9), watch(("BOOKMARK", {"metadata": {"resourceVersion": "500"}}))], monkeypatch)
    assert story.watched_from == ["9", "500"]
    assert story.requests[1]["allowWatchBookmarks"] == "true"


@pytest.mark.parametrize("gone", [Answer(410), watch(("ERROR", expired()))], ids=["answer", "event"])
def test_after_an_expired_version_a_list_drops_the_ghosts(gone: Answer, monkeypatch: pytest.MonkeyPatch) -> None:
    story = follow([page(item("a", 1), item("b", 2), version=9), gone, page(item("b", 30), version=31)], monkeypatch)
    assert story.names == {"b"}
    assert story.watched_from == ["9", "31"]


def test_an_empty_list_of_nodes_drops_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = [page(item("a", 1), version=9), Answer(410), page(version=31), page(item("a", 1), version=32)]
    story = follow(answers, monkeypatch, may_become_empty=False)
    assert story.names == {"a"}
    assert story.watched_from == ["9", "32"], "the empty list was not believed"
    assert follow(answers[:3], monkeypatch).names == set(), "other collections may become empty"


def test_the_first_list_of_nodes_may_be_empty(monkeypatch: pytest.MonkeyPatch) -> None:
    story = follow([page(version=9)], monkeypatch, may_become_empty=False)
    assert story.informer.has_listed


@pytest.mark.parametrize(
    "trouble",
    [*Trouble, Answer(500)],
    ids=["silence", "away", "cut", "error"],
)
def test_a_cut_watch_is_not_believed_until_it_goes_on_and_misses_nothing(
    trouble: Answer | Trouble, monkeypatch: pytest.MonkeyPatch
) -> None:
    story = follow(
        [page(item("a", 1), version=9), watch(("ADDED", item("b", 10))), trouble, watch(("DELETED", item("a", 11)))],
        monkeypatch,
    )
    assert story.names == {"b"}
    assert story.watched_from == ["9", "10", "10", "11"]
    assert story.is_live == [False, False, True, False, True]


def test_an_event_as_large_as_the_api_server_stores_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    large = item("a", 10, "x" * 3_000_000)
    story = follow([page(version=9), watch(("ADDED", large), ("ADDED", item("b", 11)))], monkeypatch)
    assert story.names == {"a", "b"}
    assert story.kept["", "a"] == large


def test_an_object_that_cannot_be_read_is_set_aside_alone_and_the_watch_goes_on(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    story = follow(
        [
            page(item("a", 1), item("bad", 2, "poison"), item("c", 3), version=9),
            watch(
                ("MODIFIED", item("bad", 10, "poison")), ("MODIFIED", item("a", 11, "poison")), ("ADDED", item("d", 12))
            ),
            watch(("MODIFIED", item("a", 13, "good")), ("DELETED", item("bad", 14))),
        ],
        monkeypatch,
    )
    assert story.names == {"a", "c", "d"}
    assert story.kept["", "a"]["value"] == "good"
    assert story.watched_from == ["9", "12", "14"], "nothing is listed again"
    assert all(story.is_live[2:])
    told = [record.getMessage() for record in caplog.records if "left out" in record.getMessage()]
    assert [text.split(" cannot")[0] for text in told] == [
        "nodes bad (resourceVersion 2)",
        "nodes a (resourceVersion 11)",
    ], "once for each"


@pytest.mark.parametrize("size", [1, 2, 7, 100])
def test_lines_are_whole_however_they_arrive(size: int) -> None:
    text = b'{"a": 1}\n\n{"b": 2}\n{"cut'

    async def parts() -> AsyncIterator[bytes]:
        for begin in range(0, len(text), size):
            yield text[begin : begin + size]

    async def run() -> list[bytes]:
        return [line async for line in split_lines(parts())]

    assert asyncio.run(run()) == [b'{"a": 1}', b'{"b": 2}']


@pytest.mark.parametrize(
    ("source", "path", "params"),
    [
        (WatchedCollection(kind=NODE), "api/v1/nodes", {}),
        (WatchedCollection(kind=POD, namespace="ns", labels="x"), "api/v1/namespaces/ns/pods", {"labelSelector": "x"}),
        (WatchedCollection(kind=LEASE, fields="y"), "apis/coordination.k8s.io/v1/leases", {"fieldSelector": "y"}),
    ],
)
def test_a_source_names_its_collection(source: WatchedCollection, path: str, params: dict[str, str]) -> None:
    assert (source.path, source.params) == (path, params)
