"""Rank 0's heartbeat: a thread that renews the mailbox and keeps the operator's newest request.

The renewals show that the process is alive; the progress annotations show that training advances. Training goes on
while the API server cannot be reached. It ends when the mailbox is refused permanently (fenced).
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

from elastic_trainer.errors import FencedError
from elastic_trainer.mailbox import Mailbox
from reshard.contract import LeaseKey

_log = logging.getLogger(__name__)

FENCED_AFTER_SECONDS = 15.0
"""Time for which the Lease must be refused before the attempt counts as fenced; a shorter refusal may be an error of
the API server's authorizer."""

_LAST_BEATS = 3
LAST_BEAT_PAUSE_SECONDS = 1.0


class Heartbeat:
    """A thread that exchanges annotations with the mailbox until it is stopped.

    Args:
        mailbox: mailbox to write to.
        every_seconds: time between beats.
        on_fenced: called once, from the thread, when a newer attempt has replaced this one.
    """

    def __init__(self, mailbox: Mailbox, *, every_seconds: float, on_fenced: Callable[[str], None]) -> None:
        self._mailbox = mailbox
        self._every_seconds = every_seconds
        self._on_fenced = on_fenced
        self._annotations: dict[str, str] = {}
        self._pending = threading.Event()
        self._stopping = threading.Event()
        self._lock = threading.Lock()
        self._exchanging = threading.Lock()
        self._request = ""
        self._released = ""
        self._answers = 0
        self._refused_since: float | None = None
        self._thread = threading.Thread(target=self._beat, name="heartbeat", daemon=True)

    def start(self) -> None:
        """Start the thread; the first beat is immediate."""
        self._pending.set()
        self._thread.start()

    @property
    def request(self) -> str:
        """The operator's newest request, or an empty string."""
        return self._request

    @property
    def released(self) -> str:
        """The operator's newest LeaseKey.RELEASED, or an empty string."""
        return self._released

    @property
    def answers(self) -> int:
        """Number of answered exchanges; it does not grow while the mailbox cannot be reached."""
        return self._answers

    def update(self, annotations: dict[LeaseKey, str], *, now: bool = False) -> None:
        """Add annotations to the next beat; with `now`, beat at once, without waiting for the answer."""
        with self._lock:
            self._annotations.update({str(key): value for key, value in annotations.items()})
        if now:
            self._pending.set()

    def flush(self) -> bool:
        """Beat now, and wait for the answer; return whether the annotations were written."""
        return self._exchange()

    def stop(self) -> None:
        """Beat once more, then end the thread."""
        self._stopping.set()
        self._pending.set()
        if self._thread.is_alive():
            self._thread.join(timeout=_LAST_BEATS * (LAST_BEAT_PAUSE_SECONDS + 6))

    def _beat(self) -> None:
        while True:
            self._pending.wait(self._every_seconds)
            self._pending.clear()
            if self._stopping.is_set():
                break
            self._exchange()
        # The last beat tells the operator how training ended, so it is tried several times.
        for _ in range(_LAST_BEATS):
            if self._exchange():
                return
            time.sleep(LAST_BEAT_PAUSE_SECONDS)

    def _exchange(self) -> bool:
        with self._exchanging:
            with self._lock:
                annotations = dict(self._annotations)
            try:
                answer = self._mailbox.exchange(annotations)
            except FencedError as error:
                self._refused(str(error))
                return False
            except OSError as error:
                self._refused_since = None  # fencing needs refusals without interruption
                _log.warning("heartbeat: %s (training goes on)", error)
                return False
            self._refused_since = None
            self._answers += 1
            self._released = answer.get(LeaseKey.RELEASED, "")
            self._acknowledge(answer.get(LeaseKey.REQUEST, ""))
            return True

    def _acknowledge(self, request: str) -> None:
        if request != self._request:
            _log.info("the operator asks for %r", request)
            self._request = request
            self.update({LeaseKey.REQUEST_SEEN: request}, now=True)

    def _refused(self, reason: str) -> None:
        since = self._refused_since = self._refused_since or time.monotonic()
        if time.monotonic() - since >= FENCED_AFTER_SECONDS and not self._stopping.is_set():
            self._stopping.set()
            self._on_fenced(reason)
