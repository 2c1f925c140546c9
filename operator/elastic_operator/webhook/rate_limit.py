"""Rate limit as a token bucket. No clock: the present is an argument."""

from __future__ import annotations


class TokenBucket:
    """Allows `burst` events at once, and one more every `seconds`.

    Args:
        burst: number of events that are allowed at once.
        seconds: time after which one more is allowed.
    """

    def __init__(self, burst: int, seconds: float) -> None:
        self._burst = float(burst)
        self._seconds = seconds
        self._tokens = float(burst)
        self._time: float | None = None

    def wait_seconds(self, now: float) -> float:
        """Return the time until one event is allowed; 0 if it is allowed now."""
        if self._time is not None:
            self._tokens = min(self._burst, self._tokens + max(0.0, now - self._time) / self._seconds)
        self._time = now
        # A little less than one token is one: otherwise rounding would ask for waits that end a moment too early.
        return 0.0 if self._tokens >= 1.0 - 1e-9 else (1.0 - self._tokens) * self._seconds

    def take(self, now: float) -> bool:
        """Use one token; return False if there is none."""
        if self.wait_seconds(now) > 0.0:
            return False
        self._tokens -= 1.0
        return True
