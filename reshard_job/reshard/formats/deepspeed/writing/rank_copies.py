"""Write files of many ranks that differ only in their names."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from typing import Any, Generic, NamedTuple, TypeVar

from reshard.formats.deepspeed.writing.target import File, Target
from reshard.formats.pt.writer import PickledObject, pickle_object

Result = TypeVar("Result")

_MAX_KNOWN_BYTES = 16 << 20
"""Limit on the pickles to share; the latest are kept."""


class _Made(NamedTuple, Generic[Result]):
    """Content of a file that was added.

    Attributes:
        sources: objects that it was made of, kept alive because they are compared by identity.
        pickle: the content.
        result: for the caller.
        by_length: length of a name -> file with this content; offsets in an archive depend on the length of its name.
    """

    sources: tuple[Any, ...]
    pickle: PickledObject
    result: Result
    by_length: dict[int, File]


class RankCopies(Generic[Result]):
    """Adds files to a target; a file made of the same objects and facts as an earlier one is not pickled again.

    Args:
        target: the target.
        are_adjacent: compare a file with the previous one only. The plan's fingerprint then has the bytes of the first
            of several equal files, instead of those of each. Commits hold fingerprints, so a caller must keep to it.
    """

    def __init__(self, target: Target, *, are_adjacent: bool) -> None:
        self._target = target
        self._are_adjacent = are_adjacent
        self._known: OrderedDict[Hashable, _Made[Result]] = OrderedDict()
        self._num_bytes = 0

    def add(
        self, name: str, sources: Sequence[Any], make: Callable[[], tuple[Any, Result]], facts: Hashable = ()
    ) -> tuple[File, Result]:
        """Add a file.

        Args:
            name: of the file.
            sources: all objects that the file's content depends on, besides the target; they are compared by identity.
            make: returns the content and a second result for the caller.
            facts: all that the content depends on besides; compared by value.
        """
        key = (facts, tuple(map(id, sources)))
        if key not in self._known:
            value, result = make()
            self._remember(key, _Made(tuple(sources), pickle_object(value), result, {}))
        made = self._known[key]
        self._known.move_to_end(key)
        known = made.by_length.get(len(name))
        if known is None:
            file = self._target.add_file(name, made.pickle)
        else:
            file = self._target.add_twin(name, known, is_own=not self._are_adjacent)
        made.by_length.setdefault(len(name), file)
        return file, made.result

    def _remember(self, key: Hashable, made: _Made[Result]) -> None:
        self._known[key] = made
        self._num_bytes += len(made.pickle.data)
        limit = 0 if self._are_adjacent else _MAX_KNOWN_BYTES
        while self._num_bytes > limit and len(self._known) > 1:
            self._num_bytes -= len(self._known.popitem(last=False)[1].pickle.data)
