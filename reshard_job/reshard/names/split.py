"""Split a name into the fields of a template, in time linear in the name however many ways there are to read it."""

from __future__ import annotations

import bisect
from collections.abc import Callable, Sequence

_MOST_DIGITS = 18

FindEnd = Callable[[str, int, Sequence[int]], int]
"""Function (name, start, ends) that returns the end of a field which begins at `start`, or -1 if it has none.

`ends` are the positions after which the rest of the name fits, ascending; the function returns one of them."""


def split(name: str, parts: Sequence[str | FindEnd]) -> list[str] | None:
    """Return the texts of a name's fields, or None if the name does not fit.

    A pass from the last part to the first notes the positions at which the rest fits. A pass from the first part to the
    last then reads the fields without backtracking.

    Args:
        name: the whole name.
        parts: fixed texts, and for each field the function that finds its end.
    """
    fitting = [[len(name)]]
    for part in reversed(parts):
        ends = fitting[-1]
        if isinstance(part, str):
            starts = [end - len(part) for end in ends if end >= len(part) and name.startswith(part, end - len(part))]
        else:
            starts = [start for start in range(len(name)) if part(name, start, ends) >= 0]
        fitting.append(starts)
    if not fitting[-1] or fitting[-1][0] != 0:
        return None
    fields, position = [], 0
    for part, ends in zip(parts, reversed(fitting[:-1]), strict=True):
        end = position + len(part) if isinstance(part, str) else part(name, position, ends)
        if not isinstance(part, str):
            fields.append(name[position:end])
        position = end
    return fields


def find_end_of_text(stop: str) -> FindEnd:
    """Return how to find the end of a text of at least one character without `stop`, as long as possible."""

    def end(name: str, start: int, ends: Sequence[int]) -> int:
        stops = name.find(stop, start)
        at = bisect.bisect_right(ends, len(name) if stops < 0 else stops) - 1
        return ends[at] if at >= 0 and ends[at] > start else -1

    return end


def find_end_of_number(name: str, start: int, ends: Sequence[int]) -> int:
    """Find the end of a whole number without leading zeros, as long as possible."""
    most = start
    while most < len(name) and most - start < _MOST_DIGITS and name[most] in "0123456789":
        most += 1
    if name.startswith("0", start):
        most = start + 1
    at = bisect.bisect_right(ends, most) - 1
    return ends[at] if at >= 0 and ends[at] > start else -1


def find_end_of_word(words: Sequence[str]) -> FindEnd:
    """Return how to find the end of one of some words, the first that fits."""

    def end(name: str, start: int, ends: Sequence[int]) -> int:
        for word in words:
            stop = start + len(word)
            at = bisect.bisect_left(ends, stop)
            if at < len(ends) and ends[at] == stop and name.startswith(word, start):
                return stop
        return -1

    return end
