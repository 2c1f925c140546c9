"""Since when the API server can be reached, by the operator's own clock.

While the API server is away, no kubelet and no training can report. Ages of their reports therefore count only from
the end of the last interruption, plus a time in which everybody reconnects.
"""

from __future__ import annotations

INTERRUPTION_SECONDS = 15.0
"""Time without a successful poll that counts as an interruption. A poll follows every 5 s, so one or two may fail."""

SETTLE_SECONDS = 60.0
"""Time that kubelets and trainings get to reconnect; a kubelet needs 45 s to notice a dead connection (client-go)."""

LONGEST_SHIFT_SECONDS = 600.0
"""Longest time for which interruptions that follow one another delay ages. Without it, an API server that is often
away would hide a failure for ever."""

_CALM_SECONDS = 2 * SETTLE_SECONDS
"""Time after an interruption from which the next one is another outage."""

HOLD_SECONDS = 600.0
"""Time for which the silence of most nodes counts against no node, while other nodes report that could run the job."""


class Availability:
    """Successful polls of the API server.

    A pause of the operator itself and a step of its clock look like an interruption, and are treated alike: the
    operator could not see anything in that time, or cannot know how long it was.
    """

    def __init__(self) -> None:
        self._last_success: float | None = None
        self._since = 0.0
        self._first_shift = self._last_interruption = 0.0

    def record_start(self, now: float) -> None:
        """Note that this process begins to poll; a first success that comes late ends an interruption."""
        self._last_success = now

    def record_failure(self, now: float) -> None:
        """Note that a request failed at `now`, before the first poll."""
        self._since = max(self._since, now + SETTLE_SECONDS)

    def record_success(self, started: float, ended: float | None = None) -> None:
        """Note that a poll has succeeded.

        The time that the poll took is no interruption, because a slow API server answers others, too.

        Args:
            started: when the poll began.
            ended: when it ended; None for at once.
        """
        ended = started if ended is None else ended
        if self._is_interrupted(started):
            if abs(ended - self._last_interruption) > _CALM_SECONDS:
                self._first_shift = ended
            self._last_interruption = ended
            if ended - self._first_shift <= LONGEST_SHIFT_SECONDS:
                self._since = ended + SETTLE_SECONDS
        self._last_success = ended

    def evidence_since(self, now: float) -> float:
        """Return the time from which ages count; it may be in the future, 0 if there was no interruption."""
        return now + SETTLE_SECONDS if self._is_interrupted(now) else self._since

    def _is_interrupted(self, now: float) -> bool:
        return self._last_success is not None and abs(now - self._last_success) > INTERRUPTION_SECONDS


class WidespreadSilence:
    """Spell in which most nodes of the cluster are silent, although the API server answers the operator.

    Then nobody can write (etcd without space, a failing webhook), or the kubelets do not reach the API server.
    """

    def __init__(self) -> None:
        self._since: float | None = None
        self._was_long = False
        self.settled_at = 0.0
        """Time from which ages count after the last spell; 0 if there was none."""

    def record_poll(self, now: float, *, is_widespread: bool, is_long: bool) -> None:
        """Note what a poll has shown.

        Args:
            now: time of the poll.
            is_widespread: most nodes have missed a renewal.
            is_long: most nodes are silent for so long that they count as stale. A shorter spell changes no age.
        """
        if is_widespread:
            self._since = now if self._since is None else self._since
            self._was_long = self._was_long or is_long
            return
        if self._was_long:
            self.settled_at = now + SETTLE_SECONDS
        self._since, self._was_long = None, False

    def is_over(self, now: float, *, is_total: bool) -> bool:
        """Return whether the silence has lasted for so long that it counts again.

        Args:
            now: seconds since the epoch.
            is_total: True if no node reports. A job could then start nowhere else, so waiting costs nothing.
        """
        return self._since is not None and not is_total and now - self._since >= HOLD_SECONDS
