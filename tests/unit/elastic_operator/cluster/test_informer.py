"""A copy of a collection stays true: through cuts, bookmarks, expired versions and objects that vanished meanwhile."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from typing import Any

import httpx2
import pytest

from elastic_operator.cluster import informer as module
from elastic_operator.cluster.informer import Id, Informer
from elastic_operator.cluster.resources import LEASE, NODE, POD
from elastic_operator.cluster.watch_stream import Object, WatchedCollection, split_lines


def item(name: str, version: int, value: str = "") -> dict[str, Any]:
    return {"metadata": {"name": name, "resourceVersion": str(version)}, "value": value}


def page(*items: dict[str, Any], version: int, more: str = "") -> httpx2.Response:
    return httpx2.Response(200, json={"metadata": {"resourceVersion": str(version), "continue": more}, "items": items})


def watch(*events: tuple[str, dict[str, Any]]) -> httpx2.Response:
    text = b"".join(json.dumps({"type": change, "object": found}).encode() + b"\n" for change, found in events)
    return httpx2.Response(200, stream=httpx2.ByteStream(text))


def expired() -> dict[str, Any]:
    return {"kind": "Status", "code": 410, "message": "too old resource version", "metadata": {}}


def follow(answers: Sequence[httpx2.Response | Exception], monkeypatch: pytest.MonkeyPatch) -> Story:
    """Let a informer hear these answers, one after another."""
    monkeypatch.setattr(module, "FIRST_BACKOFF_SECONDS", 0.001)
    story = Story(list(answers))
    asyncio.run(story.run())
    return story


def void(_: object) -> None:
    pass


class Story:
    """What was asked and what is kept at the end."""

    def __init__(self, answers: list[httpx2.Response | Exception]) -> None:
        self.answers = answers
        self.requests: list[dict[str, str]] = []
        self.kept: dict[Id, Object] = {}
        self.is_live: list[bool] = []
        self.over = asyncio.Event()
        self.informer = Informer(WatchedCollection(kind=NODE), self.put, lambda gone: void(self.kept.pop(gone, None)))

    def put(self, found: Object) -> None:
        if found.get("value") == "poison":
            raise KeyError("poison")
        self.kept["", found["metadata"]["name"]] = found

    async def answer(self, request: httpx2.Request) -> httpx2.Response:
        self.requests.append(dict(request.url.params))
        self.is_live.append(self.informer.is_live)
        if not self.answers:
            self.over.set()
            await asyncio.Event().wait()
        found = self.answers.pop(0)
        if isinstance(found, Exception):
            raise found
        return found

    async def run(self) -> None:
        async with httpx2.AsyncClient(transport=httpx2.MockTransport(self.answer), base_url="http://api") as http:
            task = asyncio.create_task(self.informer.follow(http))
            await asyncio.wait_for(self.over.wait(), timeout=20)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    @property
    def names(self) -> set[str]:
        return {name for _, name in self.kept}

    @property
    def watched_from(self) -> list[str]:
        return [params["resourceVersion"] for params in self.requests if params.get("watch")]


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


@pytest.mark.parametrize("gone", [httpx2.Response(410), watch(("ERROR", expired()))], ids=["answer", "event"])
def test_after_an_expired_version_a_list_drops_the_ghosts(
    gone: httpx2.Response, monkeypatch: pytest.MonkeyPatch
) -> None:
    story = follow([page(item("a", 1), item("b", 2), version=9), gone, page(item("b", 30), version=31)], monkeypatch)
    assert story.names == {"b"}
    assert story.watched_from == ["9", "31"]


@pytest.mark.parametrize(
    "trouble",
    [httpx2.ReadTimeout("silence"), httpx2.ConnectError("away"), httpx2.Response(500)],
    ids=["silence", "away", "error"],
)
def test_a_cut_watch_is_not_believed_until_it_goes_on_and_misses_nothing(
    trouble: httpx2.Response | Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    story = follow(
        [page(item("a", 1), version=9), watch(("ADDED", item("b", 10))), trouble, watch(("DELETED", item("a", 11)))],
        monkeypatch,
    )
    assert story.names == {"b"}
    assert story.watched_from == ["9", "10", "10", "11"]
    assert story.is_live == [False, False, True, False, True]


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
