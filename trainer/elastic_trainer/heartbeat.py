"""Rank 0's heartbeat: renews the mailbox from a thread of its own and remembers what the operator asks.

The thread shows that the process lives; the progress annotations show that training moves. Losing the API server for a
while never disturbs training; losing the mailbox for good (fenced) ends it.
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
"""A refused Lease may be a glitch of the API server's authorizer; after this long it is the operator's will."""

_LAST_BEATS = 3
_LAST_BEAT_PAUSE_SECONDS = 1.0


class Heartbeat:
    """Beats until stopped.

    Args:
        mailbox: where to write.
        every_seconds: time between beats.
        on_fenced: called once, from the thread, when the attempt has been superseded.
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
        """Begin to beat; the first beat is immediate."""
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
        """Number of exchanges that were answered; it stands still while the mailbox cannot be reached."""
        return self._answers

    def update(self, annotations: dict[LeaseKey, str], *, now: bool = False) -> None:
        """Put annotations into the next beat; with `now`, beat at once (and still not wait for it)."""
        with self._lock:
            self._annotations.update({str(key): value for key, value in annotations.items()})
        if now:
            self._pending.set()

    def flush(self) -> bool:
        """Write what is there and wait for it; returns whether it was written."""
        return self._exchange()

    def stop(self) -> None:
        """Write what is there once more, then end the thread."""
        self._stopping.set()
        self._pending.set()
        if self._thread.is_alive():
            self._thread.join(timeout=_LAST_BEATS * (_LAST_BEAT_PAUSE_SECONDS + 6))

    def _beat(self) -> None:
        while True:
            self._pending.wait(self._every_seconds)
            self._pending.clear()
            if self._stopping.is_set():
                break
            self._exchange()
        # How it ended is worth a few tries.
        for _ in range(_LAST_BEATS):
            if self._exchange():
                return
            time.sleep(_LAST_BEAT_PAUSE_SECONDS)

    def _exchange(self) -> bool:
        with self._exchanging:
            with self._lock:
                annotations = dict(self._annotations)
            try:
                found = self._mailbox.exchange(annotations)
            except FencedError as error:
                self._refused(str(error))
                return False
            except OSError as error:
                self._refused_since = None  # nobody has refused it all the time
                _log.warning("heartbeat: %s (training goes on)", error)
                return False
            self._refused_since = None
            self._answers += 1
            self._released = found.get(LeaseKey.RELEASED, "")
            self._see(found.get(LeaseKey.REQUEST, ""))
            return True

    def _see(self, request: str) -> None:
        if request != self._request:
            _log.info("the operator asks for %r", request)
            self._request = request
            self.update({LeaseKey.REQUEST_SEEN: request}, now=True)

    def _refused(self, reason: str) -> None:
        since = self._refused_since = self._refused_since or time.monotonic()
        if time.monotonic() - since >= FENCED_AFTER_SECONDS and not self._stopping.is_set():
            self._stopping.set()
            self._on_fenced(reason)
