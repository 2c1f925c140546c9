"""Where the fields of a name begin and end, found in time linear in the name however many ways there are to read it."""

from __future__ import annotations

import bisect
from collections.abc import Callable, Sequence

_MOST_DIGITS = 18

Ends = Callable[[str, int, Sequence[int]], int]
"""Of a field that begins at a position: the end that is preferred of those behind which the rest fits, or -1."""


def split(name: str, parts: Sequence[str | Ends]) -> list[str] | None:
    """Return what the fields of a name are, or None if it does not fit.

    From the last part to the first, the positions are noted at which the rest fits. Then the fields are read from the
    first to the last, and none has to be taken back.

    Args:
        name: the whole name.
        parts: texts that stand in it, and for each field how it chooses its end.
    """
    fitting = [[len(name)]]
    for part in reversed(parts):
        behind = fitting[-1]
        if isinstance(part, str):
            starts = [end - len(part) for end in behind if end >= len(part) and name.startswith(part, end - len(part))]
        else:
            starts = [start for start in range(len(name)) if part(name, start, behind) >= 0]
        fitting.append(starts)
    if not fitting[-1] or fitting[-1][0] != 0:
        return None
    found, position = [], 0
    for part, behind in zip(parts, reversed(fitting[:-1]), strict=True):
        end = position + len(part) if isinstance(part, str) else part(name, position, behind)
        if not isinstance(part, str):
            found.append(name[position:end])
        position = end
    return found


def text_without(stop: str) -> Ends:
    """Text of at least one character without `stop`, as long as possible."""

    def end(name: str, start: int, behind: Sequence[int]) -> int:
        stops = name.find(stop, start)
        at = bisect.bisect_right(behind, len(name) if stops < 0 else stops) - 1
        return behind[at] if at >= 0 and behind[at] > start else -1

    return end


def number(name: str, start: int, behind: Sequence[int]) -> int:
    """A whole number without zeros in front, as long as possible."""
    most = start
    while most < len(name) and most - start < _MOST_DIGITS and name[most] in "0123456789":
        most += 1
    if name.startswith("0", start):
        most = start + 1
    at = bisect.bisect_right(behind, most) - 1
    return behind[at] if at >= 0 and behind[at] > start else -1


def one_of(words: Sequence[str]) -> Ends:
    """One of some words, the first that fits."""

    def end(name: str, start: int, behind: Sequence[int]) -> int:
        for word in words:
            stop = start + len(word)
            at = bisect.bisect_left(behind, stop)
            if at < len(behind) and behind[at] == stop and name.startswith(word, start):
                return stop
        return -1

    return end
