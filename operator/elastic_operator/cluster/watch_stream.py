"""Lists and watches of the Kubernetes API as pages and events of plain objects. Stateless.

`kubernetes.aio.watch` is not used: it needs the client's generated methods, decodes each event twice, and connects
again by itself, so that nobody knows whether the watch is open.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import AsyncIterator, Mapping
from http import HTTPStatus
from typing import Any

from elastic_operator.client.api_client import KubernetesClient
from elastic_operator.client.api_errors import AnswerError
from elastic_operator.client.resources import ResourceKind, make_selectors

SERVER_SECONDS = 290
"""Time that the API server keeps one watch open; the next one continues from the last version."""

SILENCE_SECONDS = 90.0
"""A watch without any event for so long is dead: the API server sends a bookmark about once a minute."""

LIST_SECONDS = 60.0

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

    kind: ResourceKind
    namespace: str = ""
    labels: str = ""
    fields: str = ""

    @property
    def path(self) -> str:
        """Path of the collection."""
        return self.kind.path(self.namespace)

    @property
    def plural(self) -> str:
        """Plural of the kind, for instance `pods`."""
        return self.kind.plural

    @property
    def params(self) -> dict[str, str]:
        """Query parameters with the selectors of the request."""
        return make_selectors(self.labels, self.fields)

    def __str__(self) -> str:
        return f"{self.path} {' '.join(self.params.values())}".rstrip()


async def list_pages(
    client: KubernetesClient, source: WatchedCollection
) -> AsyncIterator[tuple[list[dict[str, Any]], str]]:
    """List all objects in pages, each with the version of the collection.

    Raises:
        ExpiredError: the API server discarded the version of the list before its last page was read.
        RequestError: the request failed.
    """
    try:
        async for page in client.pages(source.path, source.params, read_seconds=LIST_SECONDS):
            yield page
    except AnswerError as error:
        raise _expired_or(error) from error


async def watch_events(
    client: KubernetesClient, source: WatchedCollection, version: str
) -> AsyncIterator[tuple[str, dict[str, Any]] | None]:
    """Yield the changes since `version`: ADDED, MODIFIED, DELETED or BOOKMARK, each with the object.

    Yields None first, when the watch is open. Ends when the API server closes the watch.

    Raises:
        ExpiredError: the API server has discarded `version`.
        WatchError: the API server reported another error.
        RequestError: the request failed, or no event arrived for SILENCE_SECONDS.
    """
    params = {
        **source.params,
        "watch": "1",
        "allowWatchBookmarks": "true",
        "resourceVersion": version,
        "timeoutSeconds": str(SERVER_SECONDS),
    }
    try:
        async with client.stream(source.path, params, read_seconds=SILENCE_SECONDS) as chunks:
            yield None
            async for line in split_lines(chunks):
                event = json.loads(line)
                change, item = event["type"], event["object"]
                if change == "ERROR":
                    if item.get("code") == HTTPStatus.GONE:
                        raise ExpiredError(str(item.get("message")))
                    raise WatchError(str(item.get("message")))
                yield change, item
    except AnswerError as error:
        raise _expired_or(error) from error


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


def is_older_version(version: str, than: str) -> bool:
    """Return whether a resourceVersion is lower than another one of the same kind of object.

    Versions are decimal numbers (KEP-5504); the result is False if one of them is not.
    """
    return version.isdigit() and than.isdigit() and int(version) < int(than)


def _expired_or(error: AnswerError) -> Exception:
    if error.code == HTTPStatus.GONE:
        return ExpiredError(f"{error.path}: the version is too old")
    return error
