"""The queue of notifications: bounded, with retries and rate limits; sends each fact once as long as it remembers it.

Passes of the controller put notifications in and go on; one task sends them. After a crash, the next leader makes the
notifications again that became facts since the mark that the last leader kept in the Lease (`settled_until`). They have
the same IDs, so a receiver can tell.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import random
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Iterable, Mapping

from elastic_operator.api.serialization import format_time
from elastic_operator.api.status import Status
from elastic_operator.manifests.attempt import JobRef
from elastic_operator.metrics import definitions, exporter
from elastic_operator.metrics.counters import Sample
from elastic_operator.metrics.definitions import NotificationResult
from elastic_operator.reconcile.notifications.formats import CONTENT_TYPES, format_body
from elastic_operator.reconcile.notifications.notification import (
    Notification,
    NotificationKind,
    find_notifications,
    find_recorded,
)
from elastic_operator.settings import NotificationSettings
from elastic_operator.webhook.client import Answer
from elastic_operator.webhook.rate_limit import TokenBucket

Key = tuple[str, str]
"""Namespace and name of a job."""

MAX_QUEUED = 256
"""Maximum number of notifications that wait to be sent."""

MAX_TRIES = 8
MAX_AGE_SECONDS = 900.0
"""Time in the queue after which a failed try is the last one."""

FIRST_BACKOFF_SECONDS = 1.0
MAX_BACKOFF_SECONDS = 60.0

JOB_BURST, JOB_SECONDS = 10, 60.0
"""Notifications of one job that are sent at once, and the time after which one more is."""

ALL_BURST, ALL_SECONDS = 10, 1.0
"""Requests that are sent at once, and the time after which one more is. Slack takes one a second."""

MARK_MARGIN_SECONDS = 60.0
"""Largest age of a fact, before the mark, that is written after it: clocks differ, and reports take time."""

MARK_HOLD_SECONDS = 240.0
"""Time for which a new leader leaves the last one's mark as it is: every job has its first pass in this time, of which
the first lists may take half.
"""

MAX_REPEAT_SECONDS = 3600.0
"""Oldest fact that a new leader tells."""

_MAX_KNOWN = 4096
_UNLIMITED = (NotificationKind.FAILED, NotificationKind.COMPLETE)
"""Kinds that the limit of a job does not drop: nothing follows that would tell."""

logger = logging.getLogger(__name__)

Post = Callable[[bytes, Mapping[str, str]], Awaitable[Answer]]


@dataclasses.dataclass(slots=True, kw_only=True)
class _Entry:
    """A notification that waits to be sent; times are of the monotonic clock."""

    notification: Notification
    queued_at: float
    due: float
    num_left_out: int
    tries: int = 0


class Outbox:
    """Notifications that wait to be sent.

    Args:
        post: sends one request.
        settings: format, kinds and source.
        fence: called before every request; exits if this process is not the leader any more.
        since: facts in stored statuses after this time are told once more, seconds since the epoch; None for no facts.
        clock: monotonic clock.
    """

    def __init__(
        self,
        post: Post,
        settings: NotificationSettings,
        *,
        fence: Callable[[], None] = lambda: None,
        since: float | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._post = post
        self._settings = settings
        self._fence = fence
        self._since = None if since is None else max(since, time.time() - MAX_REPEAT_SECONDS)
        self._clock = clock
        self._mark_held_until = clock() + MARK_HOLD_SECONDS
        self._entries: OrderedDict[str, _Entry] = OrderedDict()
        self._known: OrderedDict[str, None] = OrderedDict()
        self._repeated: dict[Key, str] = {}
        self._job_limits: dict[Key, TokenBucket] = {}
        self._left_out: dict[Key, int] = {}
        self._limit = TokenBucket(ALL_BURST, ALL_SECONDS)
        self._not_before = 0.0
        self._warned: set[NotificationResult] = set()
        self._changed = asyncio.Event()

    def report(self, job: JobRef, before: Status, after: Status) -> None:
        """Queue what follows from a status that was written. Never raises: a pass must not fail for a notification."""
        try:
            self._put_all(find_notifications(job, before, after))
        except Exception:
            logger.exception("%s/%s: making notifications failed", job.namespace, job.name)

    def report_recorded(self, job: JobRef, status: Status) -> None:
        """Queue what the last leader may not have sent; once for each job. Never raises."""
        key = (job.namespace, job.name)
        if self._since is None or self._repeated.get(key) == job.uid:
            return
        self._repeated[key] = job.uid
        try:
            self._put_all(find_recorded(job, status, self._since))
        except Exception:
            logger.exception("%s/%s: making notifications failed", job.namespace, job.name)

    def forget(self, key: Key) -> None:
        """Forget the limits of a job that does not exist any more; what is queued is still sent."""
        for table in (self._repeated, self._job_limits, self._left_out):
            table.pop(key, None)

    def settled_until(self) -> str:
        """Return the time up to which every fact was told or dropped, in RFC 3339: the mark for the next leader."""
        times = [time.time(), *(entry.notification.time for entry in self._entries.values())]
        mark = min(times) - MARK_MARGIN_SECONDS
        if self._since is not None and self._clock() < self._mark_held_until:
            mark = min(mark, self._since)
        return format_time(mark)

    async def run(self) -> None:
        """Send forever."""
        while True:
            entry = None
            try:
                entry = await self._next()
                await self._send(entry)
            except Exception as error:
                # The name only: the message may contain the URL.
                name = type(error).__name__
                if entry is not None:
                    self._finish(entry.notification, NotificationResult.GAVE_UP, f"a defect of the operator: {name}")
                    continue
                logger.error("the queue of notifications failed: %s; going on in %g s", name, MAX_BACKOFF_SECONDS)
                await asyncio.sleep(MAX_BACKOFF_SECONDS)

    async def drain(self, seconds: float) -> None:
        """Wait until everything is sent, at most `seconds`; `run` has to run meanwhile."""
        end = self._clock() + seconds
        while self._entries and self._clock() < end:
            await asyncio.sleep(0.02)

    def _put_all(self, notifications: Iterable[Notification]) -> None:
        for item in notifications:
            if item.kind in self._settings.kinds and item.id not in self._known:
                self._put(item)

    def _put(self, item: Notification) -> None:
        self._known[item.id] = None
        while len(self._known) > _MAX_KNOWN:
            self._known.popitem(last=False)
        key, now = (item.namespace, item.name), self._clock()
        limit = self._job_limits.setdefault(key, TokenBucket(JOB_BURST, JOB_SECONDS))
        if not limit.take(now) and item.kind not in _UNLIMITED:
            self._finish(
                item, NotificationResult.RATE_LIMITED, f"more than {JOB_BURST}, and one every {JOB_SECONDS:g} s"
            )
            return
        if len(self._entries) >= MAX_QUEUED:
            self._finish(item, NotificationResult.QUEUE_FULL, f"{MAX_QUEUED} notifications wait to be sent")
            return
        num_left_out = self._left_out.pop(key, 0)
        self._entries[item.id] = _Entry(notification=item, queued_at=now, due=now, num_left_out=num_left_out)
        self._changed.set()

    async def _next(self) -> _Entry:
        """Wait for the first notification that is due and may be sent."""
        while True:
            self._changed.clear()
            entry = min(self._entries.values(), key=lambda item: item.due, default=None)
            if entry is None:
                await self._changed.wait()
                continue
            now = self._clock()
            wait = max(entry.due - now, self._not_before - now, self._limit.wait_seconds(now))
            if wait <= 0.0 and self._limit.take(now):
                return entry
            try:
                await asyncio.wait_for(self._changed.wait(), timeout=max(0.0, wait))
            except TimeoutError:
                continue

    async def _send(self, entry: _Entry) -> None:
        item, settings = entry.notification, self._settings
        body = format_body(item, settings.format, source=settings.source, num_left_out=entry.num_left_out)
        self._fence()
        answer = await self._post(body, {"Content-Type": CONTENT_TYPES[settings.format], "Idempotency-Key": item.id})
        entry.tries += 1
        if answer.is_success:
            self._finish(item, NotificationResult.SENT)
        elif answer.is_final:
            self._finish(item, NotificationResult.REFUSED, f"the receiver answered with {answer}")
        elif entry.tries >= MAX_TRIES or self._clock() - entry.queued_at >= MAX_AGE_SECONDS:
            self._finish(item, NotificationResult.GAVE_UP, f"{entry.tries} tries failed, the last one with {answer}")
        else:
            self._retry(entry, answer)

    def _retry(self, entry: _Entry, answer: Answer) -> None:
        longest = min(MAX_BACKOFF_SECONDS, FIRST_BACKOFF_SECONDS * 2 ** (entry.tries - 1))
        # From half to all of it, so that operators that failed together do not try again together.
        seconds = longest * (0.5 + 0.5 * random.random())
        now = self._clock()
        if answer.retry_after is not None:
            # The receiver asks all requests to wait, not this one.
            self._not_before = max(self._not_before, now + answer.retry_after)
            seconds = max(seconds, answer.retry_after)
        entry.due = now + seconds
        logger.debug("notification %s: %s; trying again in %.1f s", entry.notification.id, answer, seconds)

    def _finish(self, item: Notification, result: NotificationResult, why: str = "") -> None:
        """Count a notification that is sent or dropped; log the first drop for each reason since the last success."""
        entry = self._entries.pop(item.id, None)
        exporter.count([Sample(definition=definitions.NOTIFICATIONS, labels=(result,))])
        if result is NotificationResult.SENT:
            self._warned.clear()
            return
        key = (item.namespace, item.name)
        if key in self._job_limits:  # else the job is gone
            num_before = entry.num_left_out if entry is not None else 0
            self._left_out[key] = self._left_out.get(key, 0) + num_before + 1
        if result not in self._warned:
            self._warned.add(result)
            logger.warning(
                "%s/%s: notification %s is dropped: %s; until one is sent, further ones are only counted in %s",
                *key,
                item.kind,
                why,
                definitions.NOTIFICATIONS.name,
            )
