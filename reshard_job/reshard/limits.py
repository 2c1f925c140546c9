"""What this process may use."""

from __future__ import annotations

import os


def default_num_threads() -> int:
    """Processors that this process may run on, at most 8: more streams do not make one file system faster."""
    return max(1, min(8, len(os.sched_getaffinity(0))))


def parse_bytes(text: str) -> int:
    """Read `256MiB`, `1GiB`, `64KiB` or a number of bytes.

    Raises:
        ValueError: anything else.
    """
    units = {"KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "B": 1, "": 1}
    number = text.rstrip("KMGiB")
    unit = text[len(number) :]
    if unit not in units or not number.strip().isdigit():
        raise ValueError(f"cannot read {text!r}: write for instance 256MiB")
    return int(number) * units[unit]


def format_bytes(num_bytes: float) -> str:
    """`1.5 GiB`."""
    for unit in ("B", "KiB", "MiB"):
        if num_bytes < 1024:
            return f"{num_bytes:.0f} {unit}" if unit == "B" else f"{num_bytes:.1f} {unit}"
        num_bytes /= 1024
    return f"{num_bytes:.2f} GiB"
