"""Each chunk with its item: two tables that must be one and the same set of keys and offsets."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from reshard.formats.dcp.chunks import Chunks, made_of
from reshard.formats.dcp.listed import (
    Listed,
    Rows,
    WrongError,
    built,
    chunk_columns,
    is_file_name,
    item_columns,
    place_of,
)
from reshard.formats.pt.template import Template
from reshard.tensors.geometry import Box
from reshard.tensors.intervals import Int64Array

_MOST_PROBLEMS = 1000
Mask = npt.NDArray[np.bool_]


class Joined(NamedTuple):
    """What was found.

    Attributes:
        chunks: of all entries, in their order; worth nothing if there are problems.
        bounds: first row of every entry, and the number of rows, [entries + 1].
        problems: what does not fit.
    """

    chunks: Chunks
    bounds: Int64Array
    problems: list[str]


def join(
    boxes: Rows,
    items: Rows,
    *,
    shapes: Sequence[tuple[int, ...] | None],
    left_out: Collection[int],
    numbers: dict[str, int],
    files: dict[str, int],
    strings: Sequence[str],
) -> Joined:
    """Give every chunk its item.

    Args:
        boxes: what `state_dict_metadata` lists.
        items: what `storage_data` lists.
        shapes: of every entry; None for what is not a tensor.
        left_out: entries that are wrong already: nothing is said about them.
        numbers: number of every entry by its key; keys that are only in items are added behind.
        files: number of every file by its name; more are added.
        strings: that columns of items refer to.
    """
    max_ndim = max(1, *(len(shape) for shape in shapes if shape is not None), _max_ndim(boxes), _max_ndim(items), 0)
    stored = built(items, 3, _Named(numbers, files, strings), max_ndim)
    listed = built(boxes, max_ndim, _boxes, max_ndim)
    names, keys = tuple(files), tuple(numbers)
    problems: list[str] = []
    stored = _only(stored, ~_misplaced(stored, names, keys, problems))
    shape = np.ones((len(keys), max_ndim), dtype=np.int64)
    for at, sizes in enumerate(shapes):
        if sizes is not None:
            shape[at, : len(sizes)] = sizes
    wrong = np.zeros(len(keys), dtype=np.bool_)
    wrong[list(left_out)] = True
    _outside(listed, shape, shapes=shapes, keys=keys, wrong=wrong, problems=problems)
    listed, stored = _only(listed, ~wrong[listed.entry]), _only(stored, ~wrong[stored.entry])
    listed = _only(listed, _order(listed))
    again = np.flatnonzero(_same(listed)) + 1
    # A replica that was not left out when it was saved is listed twice, and stored once.
    again = again[(listed.rest[again] == listed.rest[again - 1]).all(axis=1)]
    listed = _only(listed, np.delete(np.arange(len(listed.entry)), again))
    stored = _only(stored, _order(stored))
    twice = np.flatnonzero(_same(stored)) + 1
    problems += [f"storage_data: {keys[stored.entry[row]]}: two items{_at(stored, row)}" for row in twice.tolist()]
    stored = _only(stored, np.delete(np.arange(len(stored.entry)), twice))
    problems += _unmatched(listed, stored, keys)
    if problems:
        return Joined(made_of(()), np.zeros(0, dtype=np.int64), problems)
    order = np.lexsort((listed.order, listed.entry))
    chunks = Chunks(
        names=names,
        offset=listed.offset[order],
        size=listed.rest[order],
        file=stored.rest[order, 0],
        start=stored.rest[order, 1],
        length=stored.rest[order, 2],
    )
    return Joined(chunks, np.searchsorted(listed.entry[order], np.arange(len(shapes) + 1)), problems)


def _max_ndim(rows: Rows) -> int:
    single = max((len(offset) for _, offset, _ in rows.single if offset is not None), default=0)
    return max([single, *(template.num_ints for template in rows.templates.values())])


class _Named:
    """Columns of items: keys and file names become numbers."""

    def __init__(self, numbers: dict[str, int], files: dict[str, int], strings: Sequence[str]) -> None:
        self.numbers, self.files, self.strings = numbers, files, strings

    def __call__(
        self, template: Template, ints: Int64Array, texts: Int64Array
    ) -> tuple[Int64Array | None, Int64Array | None, Int64Array]:
        found = item_columns(template)
        assert found is not None
        key, offset, name, place = found
        rest = np.stack((self._number(texts[:, name], self.files), ints[:, place[0]], ints[:, place[1]]), axis=1)
        return self._number(texts[:, key], self.numbers), None if offset is None else ints[:, offset], rest

    def _number(self, texts: Int64Array, numbers: dict[str, int]) -> Int64Array:
        table = np.zeros(len(self.strings), dtype=np.int64)
        for text in np.flatnonzero(np.bincount(texts, minlength=len(self.strings))).tolist():
            table[text] = numbers.setdefault(self.strings[text], len(numbers))
        return table[texts]


def _boxes(
    template: Template, ints: Int64Array, _texts: Int64Array
) -> tuple[Int64Array | None, Int64Array | None, Int64Array]:
    found = chunk_columns(template)
    assert found is not None
    return None, ints[:, found[0]], ints[:, found[1]]


def _only(listed: Listed, rows: Int64Array | Mask) -> Listed:
    return Listed(
        entry=listed.entry[rows],
        order=listed.order[rows],
        ndim=listed.ndim[rows],
        offset=listed.offset[rows],
        rest=listed.rest[rows],
    )


def _order(listed: Listed) -> Int64Array:
    """By entry, offset, and place in the file."""
    return np.lexsort((listed.order, *listed.offset.T[::-1], listed.ndim, listed.entry))


def _same(listed: Listed) -> Mask:
    """Rows with the entry and offset of the row before, without the first."""
    same: Mask = (listed.entry[1:] == listed.entry[:-1]) & (listed.ndim[1:] == listed.ndim[:-1])
    same &= (listed.offset[1:] == listed.offset[:-1]).all(axis=1)
    return same


def _misplaced(stored: Listed, names: Sequence[str], keys: Sequence[str], problems: list[str]) -> Mask:
    """Items that lie nowhere."""
    bad_name = np.array([not is_file_name(name) for name in names], dtype=np.bool_)
    file, start, length = stored.rest.T
    bad: Mask = (start < 0) | (length < 1) | (start >= 1 << 62) | (length >= 1 << 62)
    if len(names):
        bad |= bad_name[file]
    for row in np.flatnonzero(bad)[:_MOST_PROBLEMS].tolist():
        fields = {"relative_path": names[file[row]], "offset": int(start[row]), "length": int(length[row])}
        try:
            place_of(keys[stored.entry[row]], fields)
        except WrongError as error:
            problems.append(f"storage_data: {error}")
    return bad


def _outside(
    listed: Listed,
    shape: Int64Array,
    *,
    shapes: Sequence[tuple[int, ...] | None],
    keys: Sequence[str],
    wrong: Mask,
    problems: list[str],
) -> None:
    """Report chunks that reach out of their tensors, one of each tensor, and mark the tensor."""
    limit = shape[listed.entry]
    bad = ((listed.rest > limit) | (listed.offset > limit - listed.rest)).any(axis=1) & (listed.ndim >= 0)
    for row in np.flatnonzero(bad).tolist():
        entry = int(listed.entry[row])
        if wrong[entry]:
            continue
        wrong[entry] = True
        ndim = int(listed.ndim[row])
        box = Box(tuple(listed.offset[row, :ndim].tolist()), tuple(listed.rest[row, :ndim].tolist()))
        problems.append(f"{keys[entry]}: chunk {box} lies outside of the tensor {list(shapes[entry] or ())}")


def _unmatched(listed: Listed, stored: Listed, keys: Sequence[str]) -> Iterator[str]:
    """Chunks without an item, one of each entry, and items without a chunk, of entries that have all of theirs."""
    if len(listed.entry) == len(stored.entry) and all(
        np.array_equal(*pair)
        for pair in ((listed.entry, stored.entry), (listed.ndim, stored.ndim), (listed.offset, stored.offset))
    ):
        return
    lacking: dict[int, str] = {}
    found = {(int(entry), *_offset(stored, row)): row for row, entry in enumerate(stored.entry.tolist())}
    for row, entry in enumerate(listed.entry.tolist()):
        if found.pop((int(entry), *_offset(listed, row)), None) is None:
            lacking.setdefault(entry, _at(listed, row))
    for entry, where in lacking.items():
        yield f"{keys[entry]}: storage_data has no item for it{where}"
    for (entry, *_), row in found.items():
        if entry not in lacking:
            yield (f"{keys[entry]}: storage_data has an item{_at(stored, row)} that state_dict_metadata does not have")


def _offset(listed: Listed, row: int) -> tuple[int, ...]:
    ndim = int(listed.ndim[row])
    return (ndim, *listed.offset[row, : max(0, ndim)].tolist())


def _at(listed: Listed, row: int) -> str:
    return "" if listed.ndim[row] < 0 else f" at {list(_offset(listed, row)[1:])}"
