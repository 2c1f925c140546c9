"""Files of many ranks that differ in nothing but their names."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar

from reshard.formats.deepspeed.writing.target import File, Target
from reshard.formats.pt.writer import Pickled, pickled

Made = TypeVar("Made")


class Twins(Generic[Made]):
    """Adds files to a target; what is made of the same objects as the file before is pickled and laid out once."""

    def __init__(self, target: Target) -> None:
        self._target = target
        self._parts: tuple[Any, ...] | None = None  # kept, so that no other object gets the identity of one of them
        self._made: tuple[Pickled, Made] | None = None
        self._by_length: dict[int, File] = {}  # an archive's places depend on the length of its name

    def add(self, name: str, parts: Sequence[Any], make: Callable[[], tuple[Any, Made]]) -> tuple[File, Made]:
        """Add a file.

        Args:
            name: of the file.
            parts: all objects that the file's content depends on, besides the target.
            make: makes the content, and what else the caller wants to know of it.
        """
        same = self._parts is not None and len(parts) == len(self._parts)
        if self._made is None or not (same and all(map(operator.is_, parts, self._parts or ()))):
            value, made = make()
            self._parts, self._made, self._by_length = tuple(parts), (pickled(value), made), {}
        known = self._by_length.get(len(name))
        file = self._target.add_file(name, self._made[0]) if known is None else self._target.add_twin(name, known)
        self._by_length.setdefault(len(name), file)
        return file, self._made[1]
