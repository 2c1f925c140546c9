"""Compare shapes with named sizes, such as `[inner, hidden]`: a name has one value in the whole model. Pure."""

from __future__ import annotations

import re
from collections.abc import Sequence

_TERM = re.compile(r"(\d*)([a-z][a-z_]*)")

Size = dict[str, int]
"""Sum of named sizes: name -> factor."""


class MisfitError(Exception):
    """A model is not of a family; the message names the first parameter that differs."""


def parse_size(text: str) -> Size:
    """Parse a sum of named sizes.

    >>> parse_size("query + 2key")
    {'query': 1, 'key': 2}
    """
    size: Size = {}
    for term in text.split("+"):
        match = _TERM.fullmatch(term.strip())
        if match is None:
            raise ValueError(f"{term!r} is no named size")
        size[match[2]] = size.get(match[2], 0) + int(match[1] or 1)
    return size


class Sizes:
    """The values of named sizes, learned from one shape after the other."""

    def __init__(self) -> None:
        self.values: dict[str, int] = {}
        """Name -> value."""

    def fit(self, name: str, shape: Sequence[int], expected: Sequence[str]) -> None:
        """Compare a parameter's shape with named sizes; a size that is not known yet gets its value.

        Raises:
            MisfitError: the shape is another one.
        """
        if len(shape) != len(expected):
            raise MisfitError(f"{name} has the shape {list(shape)}, expected [{', '.join(expected)}]")
        for number, text in zip(shape, expected, strict=True):
            if not self._fit_size(number, parse_size(text)):
                known = ", ".join(f"{key} = {self.values[key]}" for key in parse_size(text) if key in self.values)
                raise MisfitError(
                    f"{name} has the shape {list(shape)}, expected [{', '.join(expected)}] with"
                    f" {known or 'sizes above 0'}"
                )

    def _fit_size(self, number: int, size: Size) -> bool:
        unknown = [key for key in size if key not in self.values]
        rest = number - sum(self.values[key] * factor for key, factor in size.items() if key in self.values)
        if not unknown:
            return rest == 0
        (key,) = unknown  # a table lists a parameter only after those that tell all but one of its sizes
        value, remainder = divmod(rest, size[key])
        self.values[key] = value
        return remainder == 0 and value > 0

    def value_of(self, text: str) -> int:
        """Return the value of a sum of named sizes, all of which are known."""
        return sum(self.values[key] * factor for key, factor in parse_size(text).items())
