"""The pages of the site by path. Bounds what readers cost: one snapshot in two seconds, one thread, a share of it."""

from __future__ import annotations

import asyncio
import html
import logging
import re
import time
import urllib.parse
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from http import HTTPStatus
from importlib.metadata import version

from elastic_operator.observed.observation import Key
from elastic_operator.web.forward import ForwardError, fetch
from elastic_operator.web.pages.document import View, cell, read_view, write_document
from elastic_operator.web.pages.fleet_page import write_fleet
from elastic_operator.web.pages.inventory import Inventory, survey
from elastic_operator.web.pages.job_page import write_job
from elastic_operator.web.pages.snapshot import Snapshot
from elastic_operator.web.response import Response

SNAPSHOT_SECONDS = 2.0
"""All readers get the same pages for this time."""

MAX_PAGES = 64
"""Pages of one snapshot that are kept."""

MAX_WAITING = 16
"""Requests that wait for a page to be made; more are told to come again."""

IDLE_SHARE = 3.0
"""After a page was made, the thread rests for so many times as long: readers never get more than a quarter of a CPU."""

_JOB = re.compile(r"/jobs/([a-z0-9][a-z0-9.-]{0,252})/([a-z0-9][a-z0-9.-]{0,252})")

logger = logging.getLogger(__name__)


class Site:
    """Makes pages of what the operator holds.

    Args:
        describe_leader: says in a sentence which replica leads; for a replica that does not.
        find_leader: returns IP address and port of the leader's status page; empty if they are not known.

    Attributes:
        take_snapshot: copies what the operator holds, in the event loop; None while this replica does not lead.
    """

    def __init__(self, describe_leader: Callable[[], str], find_leader: Callable[[], str] = str) -> None:
        self.take_snapshot: Callable[[], Snapshot] | None = None
        self._describe_leader = describe_leader
        self._find_leader = find_leader
        self._version = version("elastic-training-operator")
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="status-page")
        self._lock = asyncio.Lock()
        self._num_waiting = 0
        self._taken = self._rest_until = float("-inf")
        self._snapshot: Snapshot | None = None
        self._fleet: Inventory | None = None
        self._pages: dict[tuple[Key | None, View], Response] = {}

    async def respond(self, target: str, *, is_forwarded: bool = False) -> Response:
        """Return a page.

        Args:
            target: path and query, such as `/jobs/team/gpt?refresh=off`.
            is_forwarded: another replica asks, for a reader.
        """
        path, _, query = target.partition("?")
        view, key = read_view(query), _read_key(path)
        if path != "/" and key is None:
            return self._tell(HTTPStatus.NOT_FOUND, "There is no such page.", view)
        if self._is_current() and (page := self._pages.get((key, view))) is not None:
            return page
        if self._num_waiting >= MAX_WAITING:
            return self._tell(HTTPStatus.SERVICE_UNAVAILABLE, "Too many readers at once. Come again.", view)
        self._num_waiting += 1
        try:
            if self.take_snapshot is None:
                return await self._forward(key, view, is_forwarded=is_forwarded)
            async with self._lock:
                return await self._make(key, view)
        finally:
            self._num_waiting -= 1

    def close(self) -> None:
        """Stop the thread; a page that is being made is not waited for."""
        self._thread.shutdown(wait=False, cancel_futures=True)

    async def _forward(self, key: Key | None, view: View, *, is_forwarded: bool) -> Response:
        """Return the leader's page, or a page that says who leads."""
        address = "" if is_forwarded else self._find_leader()
        if address:
            path = "/" if key is None else f"/jobs/{key[0]}/{key[1]}"
            try:
                return await fetch(address, path + html.unescape(view.link()))
            except ForwardError as error:
                logger.debug("the leader's status page cannot be read: %s", error)
        return self._tell(HTTPStatus.SERVICE_UNAVAILABLE, self._describe_leader(), view)

    def _is_current(self) -> bool:
        return self._snapshot is not None and time.monotonic() - self._taken < SNAPSHOT_SECONDS

    async def _make(self, key: Key | None, view: View) -> Response:
        if self._is_current() and (page := self._pages.get((key, view))) is not None:
            return page
        await asyncio.sleep(self._rest_until - time.monotonic())
        if not self._is_current():
            assert self.take_snapshot is not None, "a replica that leads never stands by again"
            self._snapshot, self._taken = self.take_snapshot(), time.monotonic()
            self._pages.clear()
        assert self._snapshot is not None
        begin = time.monotonic()
        try:
            page = await asyncio.get_running_loop().run_in_executor(
                self._thread, self._write, self._snapshot, key, view
            )
        finally:
            end = time.monotonic()
            self._rest_until = end + IDLE_SHARE * (end - begin)
        if len(self._pages) < MAX_PAGES:
            self._pages[key, view] = page
        return page

    def _write(self, snapshot: Snapshot, key: Key | None, view: View) -> Response:
        """Make a page, in the thread."""
        try:
            if self._fleet is None or self._fleet.snapshot is not snapshot:
                self._fleet = survey(snapshot)
            page = write_fleet(self._fleet, view, self._version) if key is None else None
            if key is not None:
                page = write_job(self._fleet, key, view, self._version)
        except Exception:
            logger.exception("the status page of %s cannot be made", "the fleet" if key is None else "/".join(key))
            return self._tell(HTTPStatus.INTERNAL_SERVER_ERROR, "The page cannot be made; the log says why.", view)
        if page is None:
            return self._tell(HTTPStatus.NOT_FOUND, "There is no such job, or this operator does not serve it.", view)
        return Response(HTTPStatus.OK, page)

    def _tell(self, status: HTTPStatus, sentence: str, view: View) -> Response:
        """Make a page with one sentence."""
        body = [f"<h1>{status.phrase}</h1>", f"<p>{cell(sentence)}</p>"]
        page = write_document(status.phrase, body, time=time.time(), view=view, version=self._version)
        return Response(status, page)


def _read_key(path: str) -> Key | None:
    match = _JOB.fullmatch(urllib.parse.unquote(path))
    return (match[1], match[2]) if match else None
