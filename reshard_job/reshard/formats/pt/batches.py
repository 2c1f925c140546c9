"""Records of a pickle in columns, and the memo of a machine that makes such columns.

A `RecordBatch` stands for hundreds of items of a list or pairs of a dict without an object for each. `columns` makes
batches; `formats.dcp` reads them.
"""

from __future__ import annotations

import bisect
import dataclasses
from collections.abc import Iterator
from typing import Any

import numpy as np

from reshard.formats.pt import machine
from reshard.formats.pt.template import Template, fill_tree
from reshard.tensors.intervals import Int64Array


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TemplateRecords:
    """Records of a batch that fit one template.

    Attributes:
        template: the opcodes and the object tree that the records share.
        number: position of each record in the batch, ascending, [records].
        ints: integers of each record, [records, integers].
        texts: strings of each record, as positions in `RecordBatch.strings`, [records, strings].
    """

    template: Template
    number: Int64Array
    ints: Int64Array
    texts: Int64Array


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RecordBatch:
    """Consecutive items of a list, or pairs of a dict, in columns.

    Attributes:
        count: number of records.
        parts: the records, by template.
        strings: strings of all batches of the pickle; the batches share the list.
    """

    count: int
    parts: tuple[TemplateRecords, ...]
    strings: list[str]


class BatchList(list[Any]):
    """A list in which an item may be a `RecordBatch` that stands for several items."""


class BatchDict(dict[Any, Any]):
    """A dict with more pairs in batches; the order between batches and single pairs is lost.

    Attributes:
        batches: batches of pairs.
    """

    def __init__(self) -> None:
        self.batches: list[RecordBatch] = []


def iterate_records(batch: RecordBatch, part: TemplateRecords) -> Iterator[tuple[int, tuple[Any, ...]]]:
    """Build the objects of one record after the other.

    Yields:
        The record's position in the batch, and its objects: one for a list, key and value for a dict.
    """
    for number, ints, texts in zip(part.number.tolist(), part.ints.tolist(), part.texts.tolist(), strict=True):
        strings = [batch.strings[position] for position in texts]
        yield number, tuple(fill_tree(item, ints, strings) for item in part.template.tree)


class UnusualPickleError(Exception):
    """The pickle does something that no pickler does around batches; the ordinary machine must read it."""


class StringTable(dict[bytes, int]):
    """Position in `strings` of each string, by its bytes; a lookup of new bytes adds the string."""

    def __init__(self) -> None:
        super().__init__()
        self.strings: list[str] = []

    def __missing__(self, data: bytes) -> int:
        self.strings.append(data.decode("utf-8", "surrogatepass"))
        self[data] = position = len(self.strings) - 1
        return position


class ColumnMemo(machine.Memo):
    """The memo of a pickle with batches: of the objects in batches, it knows the strings only."""

    def __init__(self, strings: list[str]) -> None:
        super().__init__()
        self._strings = strings
        self._highest = -1
        self._num_in_batches = 0
        self._batch_starts: list[int] = []
        self._batches: list[tuple[int, Int64Array, Int64Array]] = []  # number behind the last, and the strings
        self._found: dict[int, int] = {}

    @property
    def count(self) -> int:
        """Number of objects that were memoized."""
        return len(self) + self._num_in_batches

    @property
    def is_dense(self) -> bool:
        """True if the numbers so far are 0, 1, 2, ..., as picklers assign them."""
        return self._highest < self.count

    def put(self, number: int, value: Any) -> None:
        """Store an object under a number.

        Raises:
            UnusualPickleError: the number is out of order.
        """
        if number > self.count:
            raise UnusualPickleError
        self[number] = value

    def __setitem__(self, number: int, value: Any) -> None:
        if self._num_in_batches and number < self.count and number not in self:
            raise UnusualPickleError
        self._highest = max(self._highest, number)
        super().__setitem__(number, value)

    def __missing__(self, number: int) -> Any:
        return self._strings[self.find_batch_string(number)]

    def add_batch(self, count: int, numbers: Int64Array, strings: Int64Array) -> None:
        """Assign the next `count` numbers to the objects of a batch.

        Args:
            count: objects of the batch that are memoized.
            numbers: memo numbers of those that are strings, ascending.
            strings: position of each of these strings in the string table.
        """
        self._batch_starts.append(self.count)
        self._batches.append((self.count + count, numbers, strings))
        self._num_in_batches += count
        self._highest = max(self._highest, self.count - 1)

    def find_batch_string(self, number: int) -> int:
        """Return the position in the string table of a string that a batch memoized.

        Raises:
            KeyError: no batch has an object of this number.
            UnusualPickleError: the object is not a string; the batch does not keep it.
        """
        if number not in self._found:
            at = bisect.bisect_right(self._batch_starts, number) - 1
            if at < 0 or number >= self._batches[at][0]:
                raise KeyError(number)
            _, numbers, strings = self._batches[at]
            row = int(np.searchsorted(numbers, number))
            if row == len(numbers) or numbers[row] != number:
                raise UnusualPickleError
            self._found[number] = int(strings[row])
        return self._found[number]
