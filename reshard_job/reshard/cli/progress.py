"""Show progress on stderr: a line that is overwritten on a terminal, a new line every few seconds elsewhere."""

from __future__ import annotations

import shutil
import sys
import threading
import time
from typing import TextIO

from reshard.cli.output import can_overwrite_line, overwrite_line, write_log
from reshard.system.limits import format_bytes, format_seconds

_RECENT_SECONDS = 10.0
"""Time over which the rate is measured, so that the time left follows a storage that slows down."""


class ProgressLine:
    """Counts bytes and shows how many are done, the rate, and the time left.

    Args:
        total_bytes: bytes to move, or 0 if that is not known yet; see `expect`.
        stream: to write to; stderr by default.
        every_seconds: time between lines if the stream is no terminal.
        quiet: write nothing.
    """

    def __init__(
        self,
        total_bytes: int = 0,
        *,
        stream: TextIO | None = None,
        every_seconds: float = 5.0,
        quiet: bool = False,
    ) -> None:
        self._total = max(1, total_bytes)
        self._stream = stream or sys.stderr
        self._terminal = can_overwrite_line(self._stream)
        self._every = 0.2 if self._terminal else every_seconds
        self._quiet = quiet
        self._started = self._printed = time.monotonic()
        self._marks = [
            (self._started, 0)
        ]  # (monotonic seconds, bytes done then), the first about as old as _RECENT_SECONDS
        self._done = 0
        self._lock = threading.Lock()

    def expect(self, total_bytes: int) -> None:
        """Set the number of bytes to move, and start the clock."""
        self._total = max(1, total_bytes)
        self._started = self._printed = time.monotonic()
        self._marks = [(self._started, 0)]

    def __call__(self, num_bytes: int) -> None:
        """Count `num_bytes` more bytes as moved."""
        with self._lock:
            self._done += num_bytes
            now = time.monotonic()
            if not self._quiet and now - self._printed >= self._every:
                self._printed = now
                self._print(self.text(now))
                self._marks.append((now, self._done))
                while len(self._marks) > 2 and now - self._marks[1][0] >= _RECENT_SECONDS:
                    self._marks.pop(0)

    def text(self, now: float) -> str:
        """Return the text of the line at `now` (monotonic seconds)."""
        then, before = self._marks[0]
        rate = (self._done - before) / max(1e-6, now - then)
        left = format_seconds(max(0, self._total - self._done) / rate) if rate else "unknown time"
        percent = min(100.0, 100 * self._done / self._total)
        return f"{percent:5.1f} %  {format_bytes(self._done)}  {format_bytes(rate)}/s  {left} left"

    def close(self) -> None:
        """Clear the line on a terminal."""
        if self._terminal and not self._quiet:
            self._print("")

    def _print(self, text: str) -> None:
        if self._terminal:  # the next text could not overwrite a line that wraps
            overwrite_line(text[: shutil.get_terminal_size().columns - 1], self._stream)
        else:
            write_log([f"reshard: {text}"], self._stream)
