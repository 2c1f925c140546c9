"""Join each chunk with its item: the two tables of `.metadata` must have the same keys and offsets."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from reshard.formats.dcp.chunks import Chunks, build_chunks
from reshard.formats.dcp.listed import (
    EntryError,
    RowCollector,
    RowTable,
    build_table,
    find_chunk_columns,
    find_item_columns,
    is_file_name,
    parse_place,
)
from reshard.formats.pt.template import Template
from reshard.tensors.geometry import Box
from reshard.tensors.intervals import Int64Array

_MOST_PROBLEMS = 1000
Mask = npt.NDArray[np.bool_]


class JoinResult(NamedTuple):
    """Chunks with their items, or the problems that prevent the join.

    Attributes:
        chunks: chunks of all entries, in the order of the entries; empty if there are problems.
        bounds: first row of every entry, and the number of rows, [entries + 1].
        problems: messages about chunks and items that do not fit each other.
    """

    chunks: Chunks
    bounds: Int64Array
    problems: list[str]


def join_items(
    boxes: RowCollector,
    items: RowCollector,
    *,
    shapes: Sequence[tuple[int, ...] | None],
    left_out: Collection[int],
    numbers: dict[str, int],
    files: dict[str, int],
    strings: Sequence[str],
) -> JoinResult:
    """Join every chunk with the item of the same key and offset.

    Args:
        boxes: chunks that `state_dict_metadata` lists.
        items: items that `storage_data` lists.
        shapes: shape of every entry; None for an entry that is not a tensor.
        left_out: entries that are known to be wrong; no problem is reported for them.
        numbers: number of every entry by its key; extended by keys that only items have.
        files: number of every file by its name; extended by files that items name.
        strings: strings that columns of items refer to.
    """
    max_ndim = max(
        1, *(len(shape) for shape in shapes if shape is not None), _find_max_ndim(boxes), _find_max_ndim(items), 0
    )
    stored = build_table(items, 3, _ItemColumns(numbers, files, strings), max_ndim)
    listed = build_table(boxes, max_ndim, _build_box_columns, max_ndim)
    names, keys = tuple(files), tuple(numbers)
    problems: list[str] = []
    stored = _select_rows(stored, ~_find_misplaced(stored, names, keys, problems))
    shape = np.ones((len(keys), max_ndim), dtype=np.int64)
    for at, sizes in enumerate(shapes):
        if sizes is not None:
            shape[at, : len(sizes)] = sizes
    wrong = np.zeros(len(keys), dtype=np.bool_)
    wrong[list(left_out)] = True
    _report_outside(listed, shape, shapes=shapes, keys=keys, wrong=wrong, problems=problems)
    listed, stored = _select_rows(listed, ~wrong[listed.entry]), _select_rows(stored, ~wrong[stored.entry])
    listed = _select_rows(listed, _sort_rows(listed))
    again = np.flatnonzero(_is_repeated(listed)) + 1
    # If torch does not deduplicate a replicated chunk when it plans the save, the chunk is listed twice, stored once.
    again = again[(listed.rest[again] == listed.rest[again - 1]).all(axis=1)]
    listed = _select_rows(listed, np.delete(np.arange(len(listed.entry)), again))
    stored = _select_rows(stored, _sort_rows(stored))
    twice = np.flatnonzero(_is_repeated(stored)) + 1
    problems += [
        f"storage_data: {keys[stored.entry[row]]}: two items{_describe_offset(stored, row)}" for row in twice.tolist()
    ]
    stored = _select_rows(stored, np.delete(np.arange(len(stored.entry)), twice))
    problems += _find_unmatched(listed, stored, keys)
    if problems:
        return JoinResult(build_chunks(()), np.zeros(0, dtype=np.int64), problems)
    order = np.lexsort((listed.order, listed.entry))
    chunks = Chunks(
        names=names,
        offset=listed.offset[order],
        size=listed.rest[order],
        file=stored.rest[order, 0],
        start=stored.rest[order, 1],
        length=stored.rest[order, 2],
    )
    return JoinResult(chunks, np.searchsorted(listed.entry[order], np.arange(len(shapes) + 1)), problems)


def _find_max_ndim(rows: RowCollector) -> int:
    single = max((len(offset) for _, offset, _ in rows.single if offset is not None), default=0)
    return max([single, *(template.num_ints for template in rows.templates.values())])


class _ItemColumns:
    """Builder of the columns of items, in which keys and file names are numbers."""

    def __init__(self, numbers: dict[str, int], files: dict[str, int], strings: Sequence[str]) -> None:
        self.numbers, self.files, self.strings = numbers, files, strings

    def __call__(
        self, template: Template, ints: Int64Array, texts: Int64Array
    ) -> tuple[Int64Array | None, Int64Array | None, Int64Array]:
        found = find_item_columns(template)
        assert found is not None
        key, offset, name, place = found
        rest = np.stack((self._number(texts[:, name], self.files), ints[:, place[0]], ints[:, place[1]]), axis=1)
        return self._number(texts[:, key], self.numbers), None if offset is None else ints[:, offset], rest

    def _number(self, texts: Int64Array, numbers: dict[str, int]) -> Int64Array:
        table = np.zeros(len(self.strings), dtype=np.int64)
        for text in np.flatnonzero(np.bincount(texts, minlength=len(self.strings))).tolist():
            table[text] = numbers.setdefault(self.strings[text], len(numbers))
        return table[texts]


def _build_box_columns(
    template: Template, ints: Int64Array, _texts: Int64Array
) -> tuple[Int64Array | None, Int64Array | None, Int64Array]:
    fields = find_chunk_columns(template)
    assert fields is not None
    return None, ints[:, fields[0]], ints[:, fields[1]]


def _select_rows(listed: RowTable, rows: Int64Array | Mask) -> RowTable:
    return RowTable(
        entry=listed.entry[rows],
        order=listed.order[rows],
        ndim=listed.ndim[rows],
        offset=listed.offset[rows],
        rest=listed.rest[rows],
    )


def _sort_rows(listed: RowTable) -> Int64Array:
    """Return the order of the rows by entry, then offset, then place in `.metadata`."""
    return np.lexsort((listed.order, *listed.offset.T[::-1], listed.ndim, listed.entry))


def _is_repeated(listed: RowTable) -> Mask:
    """Mark each row, from the second on, that has the entry and offset of the row before, [rows - 1]."""
    same: Mask = (listed.entry[1:] == listed.entry[:-1]) & (listed.ndim[1:] == listed.ndim[:-1])
    same &= (listed.offset[1:] == listed.offset[:-1]).all(axis=1)
    return same


def _find_misplaced(stored: RowTable, names: Sequence[str], keys: Sequence[str], problems: list[str]) -> Mask:
    """Mark the items whose file name or byte range is impossible, and report them in `problems`."""
    bad_name = np.array([not is_file_name(name) for name in names], dtype=np.bool_)
    file, start, length = stored.rest.T
    bad: Mask = (start < 0) | (length < 1) | (start >= 1 << 62) | (length >= 1 << 62)
    if len(names):
        bad |= bad_name[file]
    for row in np.flatnonzero(bad)[:_MOST_PROBLEMS].tolist():
        fields = {"relative_path": names[file[row]], "offset": int(start[row]), "length": int(length[row])}
        try:
            parse_place(keys[stored.entry[row]], fields)
        except EntryError as error:
            problems.append(f"storage_data: {error}")
    return bad


def _report_outside(
    listed: RowTable,
    shape: Int64Array,
    *,
    shapes: Sequence[tuple[int, ...] | None],
    keys: Sequence[str],
    wrong: Mask,
    problems: list[str],
) -> None:
    """Report one chunk of each tensor that has chunks outside of its shape, and mark the tensor in `wrong`."""
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


def _find_unmatched(listed: RowTable, stored: RowTable, keys: Sequence[str]) -> Iterator[str]:
    """Yield a message for one chunk without an item of each entry, and for items without a chunk of other entries."""
    if len(listed.entry) == len(stored.entry) and all(
        np.array_equal(*pair)
        for pair in ((listed.entry, stored.entry), (listed.ndim, stored.ndim), (listed.offset, stored.offset))
    ):
        return
    missing: dict[int, str] = {}
    unused = {(int(entry), *_row_offset(stored, row)): row for row, entry in enumerate(stored.entry.tolist())}
    for row, entry in enumerate(listed.entry.tolist()):
        if unused.pop((int(entry), *_row_offset(listed, row)), None) is None:
            missing.setdefault(entry, _describe_offset(listed, row))
    for entry, where in missing.items():
        yield f"{keys[entry]}: storage_data has no item for it{where}"
    for (entry, *_), row in unused.items():
        if entry not in missing:
            where = _describe_offset(stored, row)
            yield f"{keys[entry]}: storage_data has an item{where} that state_dict_metadata does not have"


def _row_offset(listed: RowTable, row: int) -> tuple[int, ...]:
    ndim = int(listed.ndim[row])
    return (ndim, *listed.offset[row, : max(0, ndim)].tolist())


def _describe_offset(listed: RowTable, row: int) -> str:
    return "" if listed.ndim[row] < 0 else f" at {list(_row_offset(listed, row)[1:])}"
