"""Write files of many ranks that differ only in their names."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar

from reshard.formats.deepspeed.writing.target import File, Target
from reshard.formats.pt.writer import PickledObject, pickle_object

Result = TypeVar("Result")


class RankCopies(Generic[Result]):
    """Adds files to a target; a file made of the same objects as the previous one is not pickled again."""

    def __init__(self, target: Target) -> None:
        self._target = target
        self._sources: tuple[Any, ...] | None = None  # kept alive, because they are compared by identity
        self._made: tuple[PickledObject, Result] | None = None
        self._by_length: dict[int, File] = {}  # offsets in an archive depend on the length of its name

    def add(self, name: str, sources: Sequence[Any], make: Callable[[], tuple[Any, Result]]) -> tuple[File, Result]:
        """Add a file.

        Args:
            name: of the file.
            sources: all objects that the file's content depends on, besides the target.
            make: returns the content and a second result for the caller.
        """
        same = self._sources is not None and len(sources) == len(self._sources)
        if self._made is None or not (same and all(map(operator.is_, sources, self._sources or ()))):
            value, made = make()
            self._sources, self._made, self._by_length = tuple(sources), (pickle_object(value), made), {}
        known = self._by_length.get(len(name))
        file = self._target.add_file(name, self._made[0]) if known is None else self._target.add_twin(name, known)
        self._by_length.setdefault(len(name), file)
        return file, self._made[1]
