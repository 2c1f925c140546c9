"""An informer: it lists a collection, watches its changes, and lists again when it may have missed a change.

The callbacks `put` and `drop` decide what is stored of an object. After a list, objects that are not on it are dropped.
An object that cannot be read is reported (`unreadable_objects`) and dropped; the watch of the others goes on.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from http import HTTPStatus
from typing import Any

from elastic_operator.client.api_client import KubernetesClient
from elastic_operator.client.api_errors import AnswerError, RequestError
from elastic_operator.cluster import unreadable_objects
from elastic_operator.cluster.watch_stream import ExpiredError, Object, WatchedCollection, list_pages, watch_events

FIRST_BACKOFF_SECONDS = 0.5
LAST_BACKOFF_SECONDS = 30.0

Id = tuple[str, str]
"""Namespace and name of an object; the namespace of a cluster-scoped object is empty."""

logger = logging.getLogger(__name__)


OPTIONAL_SECONDS = 30.0
"""Time until an informer looks again for a kind that is not served."""

_NOT_SERVED = (HTTPStatus.NOT_FOUND, HTTPStatus.FORBIDDEN)


class EmptyListError(Exception):
    """The API server listed no objects where some are known; nothing is concluded from such a list."""


class Informer:
    """Follows one collection.

    Args:
        source: collection to list and watch.
        put: stores an object that is new or may have changed.
        drop: removes an object that was deleted.
        may_become_empty: False if a list without objects, after one with some, is an error of the API server.
        is_optional: True if the cluster may not have the kind, or the operator no right to it; then the collection
            counts as empty, and the informer looks again from time to time.

    Attributes:
        is_live: the collection was listed and the watch is open.
        has_listed: the collection was listed at least once.
        is_served: the last list found the kind; None before.
        has_synced: set when `is_live` becomes True for the first time.
        version: resourceVersion of the newest change that was delivered; empty before the first list.
    """

    def __init__(
        self,
        source: WatchedCollection,
        put: Callable[[Object], None],
        drop: Callable[[Id], None],
        *,
        may_become_empty: bool = True,
        is_optional: bool = False,
    ) -> None:
        self.source = source
        self.is_live = False
        self.has_listed = False
        self.is_served: bool | None = None
        self._may_become_empty = may_become_empty
        self._is_optional = is_optional
        self.has_synced = asyncio.Event()
        self._put = put
        self._drop = drop
        self._known: set[Id] = set()
        self.version = ""

    async def follow(self, client: KubernetesClient) -> None:
        """List and watch forever; while the API server is unreachable, `is_live` is False and no object is dropped."""
        backoff = FIRST_BACKOFF_SECONDS
        while True:
            try:
                if not self.version:
                    await self._list(client)
                async for event in watch_events(client, self.source, self.version):
                    self.is_live, backoff = True, FIRST_BACKOFF_SECONDS
                    self.has_synced.set()
                    if event is not None:
                        self.apply(*event)
            except ExpiredError:
                self.is_live, self.version = False, ""
            except AnswerError as error:
                if not (self._is_optional and error.code in _NOT_SERVED):
                    backoff = await self._pause(error, backoff)
                    continue
                self._become_empty(error)
                await asyncio.sleep(OPTIONAL_SECONDS)
            except Exception as error:
                backoff = await self._pause(error, backoff)

    async def _pause(self, error: Exception, backoff: float) -> float:
        """Sleep after an error; return the time to sleep after the next one."""
        # Any error may mean a missed change: passes must not rely on this copy until the watch is open again.
        self.is_live = False
        if not isinstance(error, RequestError):
            self.version = ""
        logger.warning("watching %s: %s: again in %g s", self.source, error or repr(error), backoff)
        await asyncio.sleep(backoff)
        return min(2 * backoff, LAST_BACKOFF_SECONDS)

    def _become_empty(self, error: AnswerError) -> None:
        """Drop all objects of a kind that is not served."""
        if self.is_served is not False:
            logger.info("not watching %s: %s; looking again every %g s", self.source, error, OPTIONAL_SECONDS)
        for known in self._known:
            self._drop(known)
        self._known, self.version = set(), ""
        self.is_served = False
        self.is_live = self.has_listed = True
        self.has_synced.set()

    async def _list(self, client: KubernetesClient) -> None:
        seen: set[Id] = set()
        version = ""
        async for items, version in list_pages(client, self.source):  # noqa: B007  # that of the last page
            for item in items:
                seen.add(identity(item))
                self.apply("ADDED", item)
        if self._known and not seen and not self._may_become_empty:
            raise EmptyListError(f"expected some of {len(self._known)} known objects, found an empty list")
        for deleted in self._known - seen:
            self._drop(deleted)
        self._known &= seen
        self.version = version
        self.has_listed = self.is_served = True

    def apply(self, change: str, item: Object) -> None:
        """Apply one event of the watch."""
        if change in ("ADDED", "MODIFIED"):
            self._known.add(identity(item))
            self._store(item)
        elif change == "DELETED":
            self._known.discard(identity(item))
            self._drop(identity(item))
            unreadable_objects.clear(self.source.plural, identity(item))
        if self.version:
            self.version = item["metadata"]["resourceVersion"]

    def _store(self, item: Object) -> None:
        """Store an object; if it cannot be read, report it and drop its previous state, which is outdated.

        An exception here would end the watch, and the changes of all other objects would be missed.
        """
        try:
            self._put(item)
        except Exception as error:
            unreadable_objects.report(
                self.source.plural, identity(item), item["metadata"].get("resourceVersion") or "", error
            )
            self._drop(identity(item))
        else:
            unreadable_objects.clear(self.source.plural, identity(item))


def identity(item: Object) -> Id:
    """Return namespace and name of an object."""
    meta: dict[str, Any] = item["metadata"]
    return meta.get("namespace") or "", meta["name"]
