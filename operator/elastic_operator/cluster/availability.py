"""Since when the API server can be reached, by the operator's own clock.

While the API server is away, no kubelet and no training can report. Ages of their reports therefore count only from
the end of the last interruption, plus a time in which everybody reconnects.
"""

from __future__ import annotations

INTERRUPTION_SECONDS = 15.0
"""Time without a successful poll that counts as an interruption. A poll follows every 5 s, so one or two may fail."""

SETTLE_SECONDS = 30.0
"""Time that kubelets and trainings get to reconnect after an interruption; clients back off for up to 10 s."""


class Availability:
    """Successful polls of the API server.

    A pause of the operator itself and a step of its clock look like an interruption, and are treated alike: the
    operator could not see anything in that time, or cannot know how long it was.
    """

    def __init__(self) -> None:
        self._last_success: float | None = None
        self._since = 0.0

    def record_success(self, now: float) -> None:
        """Note that a poll has just succeeded."""
        self._since = self.evidence_since(now)
        self._last_success = now

    def evidence_since(self, now: float) -> float:
        """Return the time from which ages count; it may be in the future, 0 if there was no interruption."""
        if self._last_success is None or abs(now - self._last_success) <= INTERRUPTION_SECONDS:
            return self._since
        return now + SETTLE_SECONDS
