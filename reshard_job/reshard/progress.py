"""Progress on stderr: one living line on a terminal, a plain line every few seconds elsewhere."""

from __future__ import annotations

import sys
import threading
import time
from typing import TextIO

from reshard.limits import format_bytes


class ProgressLine:
    """Counts bytes and says how far, how fast and how long still.

    Args:
        total_bytes: to be moved, or 0 where that is not known yet; see `expect`.
        stream: where to; stderr by default.
        every_seconds: between lines where the stream is no terminal.
    """

    def __init__(self, total_bytes: int = 0, *, stream: TextIO | None = None, every_seconds: float = 5.0) -> None:
        self._total = max(1, total_bytes)
        self._stream = stream or sys.stderr
        self._terminal = self._stream.isatty()
        self._every = 0.2 if self._terminal else every_seconds
        self._started = self._printed = time.monotonic()
        self._done = 0
        self._lock = threading.Lock()

    def expect(self, total_bytes: int) -> None:
        """There are `total_bytes` to move; the clock starts now."""
        self._total = max(1, total_bytes)
        self._started = self._printed = time.monotonic()

    def __call__(self, num_bytes: int) -> None:
        """`num_bytes` more have been moved."""
        with self._lock:
            self._done += num_bytes
            now = time.monotonic()
            if now - self._printed >= self._every:
                self._printed = now
                self._print(self.text(now))

    def text(self, now: float) -> str:
        """What the line says at `now` (monotonic seconds)."""
        elapsed = max(1e-6, now - self._started)
        rate = self._done / elapsed
        left = (self._total - self._done) / rate if rate else 0.0
        percent = 100 * self._done / self._total
        return f"{percent:5.1f} %  {format_bytes(self._done)}  {format_bytes(rate)}/s  {left:.0f} s left"

    def close(self) -> None:
        """Clear the living line."""
        if self._terminal:
            self._print("")

    def _print(self, text: str) -> None:
        self._stream.write(f"\r\x1b[K{text}" if self._terminal else f"reshard: {text}\n")
        self._stream.flush()
