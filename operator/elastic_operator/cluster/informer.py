"""Keeps a copy of a collection true: a list, then what changes, and a list again wherever changes may have been missed.

What is kept of an object is the business of `put` and `drop`. After a list, whatever is not on it any more is dropped:
there are no ghosts. An object that cannot be read is set aside (`aside`), alone: the watch goes on.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any

import httpx2

from elastic_operator.cluster import unreadable_objects
from elastic_operator.cluster.watch_stream import ExpiredError, Object, WatchedCollection, events, pages

FIRST_BACKOFF_SECONDS = 0.5
LAST_BACKOFF_SECONDS = 30.0

Id = tuple[str, str]
"""Namespace and name of an object; the namespace of a cluster's object is empty."""

logger = logging.getLogger(__name__)


class Informer:
    """One collection.

    Args:
        put: take up an object that is new or may have changed.
        drop: forget one that is gone.

    Attributes:
        live: it has been listed and is being watched now.
        begun: set once it has been live.
    """

    def __init__(self, source: WatchedCollection, put: Callable[[Object], None], drop: Callable[[Id], None]) -> None:
        self.source = source
        self.live = False
        self.begun = asyncio.Event()
        self._put = put
        self._drop = drop
        self._known: set[Id] = set()
        self._version = ""

    async def follow(self, http: httpx2.AsyncClient) -> None:
        """Never ends. While the API server cannot be reached, `live` is False and everything is kept."""
        backoff = FIRST_BACKOFF_SECONDS
        while True:
            try:
                if not self._version:
                    await self._list(http)
                async for event in events(http, self.source, self._version):
                    self.live, backoff = True, FIRST_BACKOFF_SECONDS
                    self.begun.set()
                    if event is not None:
                        self.take(*event)
            except ExpiredError:
                self.live, self._version = False, ""
            except Exception as error:
                # Whatever it was: until this works again, nobody believes this copy.
                self.live = False
                if not isinstance(error, httpx2.HTTPError):
                    self._version = ""
                logger.warning("watching %s: %s: again in %g s", self.source, error or repr(error), backoff)
                await asyncio.sleep(backoff)
                backoff = min(2 * backoff, LAST_BACKOFF_SECONDS)

    async def _list(self, http: httpx2.AsyncClient) -> None:
        seen: set[Id] = set()
        version = ""
        async for items, version in pages(http, self.source):  # noqa: B007  # that of the last page
            for item in items:
                seen.add(identity(item))
                self.take("ADDED", item)
        for gone in self._known - seen:
            self._drop(gone)
        self._known &= seen
        self._version = version

    def take(self, change: str, item: Object) -> None:
        """One event of the watch."""
        if change in ("ADDED", "MODIFIED"):
            self._known.add(identity(item))
            self._take_up(item)
        elif change == "DELETED":
            self._known.discard(identity(item))
            self._drop(identity(item))
            unreadable_objects.settled(self.source.plural, identity(item))
        if self._version:
            self._version = item["metadata"]["resourceVersion"]

    def _take_up(self, item: Object) -> None:
        """Hand an object on. One that cannot be read is set aside alone, or nobody's changes would be seen any more.

        What was known of it before is dropped: it is not so any more.
        """
        try:
            self._put(item)
        except Exception as error:
            unreadable_objects.tell(
                self.source.plural, identity(item), item["metadata"].get("resourceVersion") or "", error
            )
            self._drop(identity(item))
        else:
            unreadable_objects.settled(self.source.plural, identity(item))


def identity(item: Object) -> Id:
    """Namespace and name."""
    meta: dict[str, Any] = item["metadata"]
    return meta.get("namespace") or "", meta["name"]
