"""Lists and watches of the Kubernetes API as pages and events of plain objects. Stateless, except for connections.

lightkube's watch is not used: it does not request bookmarks, and it waits forever on a dead connection.
"""

from __future__ import annotations

import dataclasses
import socket
from collections.abc import AsyncIterator, Mapping
from http import HTTPStatus
from typing import Any

import httpx2
import msgspec
from lightkube.config.client_adapter import user_auth, verify_cluster
from lightkube.config.kubeconfig import SingleConfig
from lightkube.config.models import User
from lightkube.core.resource import api_info

SERVER_SECONDS = 290
"""Time that the API server keeps one watch open; the next one continues from the last version."""

SILENCE_SECONDS = 90.0
"""A watch without any event for so long is dead: the API server sends a bookmark about once a minute."""

_CONNECT_SECONDS = 10.0
_LIST_SECONDS = 60.0
_CHUNK = 500

_KEEPALIVE = [
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 10),
    (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 5),
    (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 2),
    (socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 20_000),
]
"""Keepalive options: a server without power sends nothing, and the kernel closes the connection after 20 s."""

Object = Mapping[str, Any]


class ExpiredError(Exception):
    """The API server has discarded this version: list again."""


class WatchError(Exception):
    """The API server ended a watch with an error."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class WatchedCollection:
    """A collection to list and watch.

    Attributes:
        kind: one of the kinds in `resources`.
        namespace: its namespace; empty for all.
        labels: label selector.
        fields: field selector.
    """

    kind: Any
    namespace: str = ""
    labels: str = ""
    fields: str = ""

    @property
    def path(self) -> str:
        """Path of the collection."""
        info = api_info(self.kind)
        api = f"apis/{info.resource.group}" if info.resource.group else "api"
        place = f"/namespaces/{self.namespace}" if self.namespace else ""
        return f"{api}/{info.resource.version}{place}/{info.plural}"

    @property
    def plural(self) -> str:
        """Plural of the kind, for instance `pods`."""
        return str(api_info(self.kind).plural)

    @property
    def params(self) -> dict[str, str]:
        """Query parameters with the selectors of the request."""
        selectors = {"labelSelector": self.labels, "fieldSelector": self.fields}
        return {name: text for name, text in selectors.items() if text}

    def __str__(self) -> str:
        return f"{self.path} {' '.join(self.params.values())}".rstrip()


class _Metadata(msgspec.Struct):
    resourceVersion: str = ""  # noqa: N815
    continue_: str = msgspec.field(name="continue", default="")


class _Page(msgspec.Struct):
    metadata: _Metadata
    items: list[dict[str, Any]] | None = None


class _Event(msgspec.Struct):
    type: str
    object: dict[str, Any]


def connect(config: SingleConfig) -> httpx2.AsyncClient:
    """Open a client for `list_pages` and `watch_events` with lightkube's credentials; the caller closes it.

    Lists are not compressed: inside one network, compressing costs the API server more than sending.
    """
    user = config.user or User()
    verify = verify_cluster(config.cluster, user, config.abs_file, trust_env=False)
    return httpx2.AsyncClient(
        base_url=config.cluster.server,
        auth=user_auth(user),
        transport=httpx2.AsyncHTTPTransport(verify=verify, socket_options=_KEEPALIVE),
        headers={"Accept": "application/json", "Accept-Encoding": "identity"},
        timeout=httpx2.Timeout(_CONNECT_SECONDS, read=_LIST_SECONDS),
        trust_env=False,
    )


async def list_pages(
    http: httpx2.AsyncClient, source: WatchedCollection
) -> AsyncIterator[tuple[list[dict[str, Any]], str]]:
    """List all objects in pages, each with the version of the collection.

    Raises:
        ExpiredError: the API server discarded the version of the list before its last page was read.
        httpx2.HTTPError: the request failed.
    """
    params = {**source.params, "limit": str(_CHUNK)}
    while True:
        answer = await http.get(source.path, params=params)
        _check(answer)
        page = _PAGE.decode(answer.content)
        yield page.items or [], page.metadata.resourceVersion
        if not page.metadata.continue_:
            return
        params["continue"] = page.metadata.continue_


async def watch_events(
    http: httpx2.AsyncClient, source: WatchedCollection, version: str
) -> AsyncIterator[tuple[str, dict[str, Any]] | None]:
    """Yield the changes since `version`: ADDED, MODIFIED, DELETED or BOOKMARK, each with the object.

    Yields None first, when the watch is open. Ends when the API server closes the watch.

    Raises:
        ExpiredError: the API server has discarded `version`.
        WatchError: the API server reported another error.
        httpx2.HTTPError: the request failed, or no event arrived for SILENCE_SECONDS.
    """
    params = {
        **source.params,
        "watch": "1",
        "allowWatchBookmarks": "true",
        "resourceVersion": version,
        "timeoutSeconds": str(SERVER_SECONDS),
    }
    timeout = httpx2.Timeout(_CONNECT_SECONDS, read=SILENCE_SECONDS)
    async with http.stream("GET", source.path, params=params, timeout=timeout) as answer:
        _check(answer)
        yield None
        async for line in split_lines(answer.aiter_raw()):
            event = _EVENT.decode(line)
            if event.type == "ERROR":
                if event.object.get("code") == HTTPStatus.GONE:
                    raise ExpiredError(str(event.object.get("message")))
                raise WatchError(str(event.object.get("message")))
            yield event.type, event.object


async def split_lines(chunks: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """Join chunks and yield complete lines; the text after the last line break is dropped."""
    rest: list[bytes] = []
    async for chunk in chunks:
        *complete, last = chunk.split(b"\n")
        for line in complete:
            rest.append(line)
            if text := b"".join(rest):
                yield text
            rest = []
        rest.append(last)


def _check(answer: httpx2.Response) -> None:
    if answer.status_code == HTTPStatus.GONE:
        raise ExpiredError(f"{answer.url.path}: the version is too old")
    answer.raise_for_status()


_PAGE = msgspec.json.Decoder(_Page)
_EVENT = msgspec.json.Decoder(_Event)
