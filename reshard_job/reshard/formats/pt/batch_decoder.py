"""Decode consecutive records of a pickle into a batch: find them, match them to templates, resolve their memo numbers.

The decoder trusts nothing that it finds: records must follow each other without a gap, and must number their objects
as a pickler does. From the first record that does not, the pickle machine goes on opcode by opcode.
"""

from __future__ import annotations

import functools
import itertools
import re
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from reshard.formats.pt.batches import ColumnMemo, RecordBatch, StringTable, TemplateRecords
from reshard.formats.pt.template import DecodedRecords, Template, TemplateInput, decode_records, learn_template
from reshard.tensors.intervals import Int64Array

_MAX_TEMPLATES = 32
_SEARCHED_BYTES = 1 << 18


class _Match(NamedTuple):
    """A template, and the records that fit it."""

    template: Template
    records: DecodedRecords


class _MemoizedStrings(NamedTuple):
    """Strings that the records of a batch memoize: ascending memo numbers, and positions in the string table."""

    numbers: Int64Array
    strings: Int64Array


class BatchDecoder:
    """Templates of one pickle, and the decoder of the records that fit them."""

    def __init__(self, data: bytes, memo: ColumnMemo, table: StringTable) -> None:
        self._data = data
        self._memo = memo
        self._table = table
        self._source = TemplateInput(data)
        self._templates: list[tuple[int, Template]] = []  # objects that a record pushes, and the template

    @property
    def can_learn(self) -> bool:
        """True while there is room for another template."""
        return len(self._templates) < _MAX_TEMPLATES

    def learn(self, start: int, end: int, num_items: int) -> None:
        """Learn a template from the record at bytes `start:end`, which pushed `num_items` objects."""
        template = learn_template(self._data, start, end, num_items, self._memo)
        if template is not None and (num_items, template) not in self._templates:
            self._templates.insert(0, (num_items, template))

    def list_prefixes(self, num_items: int) -> list[bytes]:
        """List the bytes with which records of `num_items` objects begin, latest template first."""
        return list(dict.fromkeys(template.prefix for count, template in self._templates if count == num_items))

    def decode(
        self, position: int, prefix: bytes, *, num_items: int, max_records: int, frame_end: int
    ) -> tuple[RecordBatch, int] | None:
        """Decode the records that follow each other from `position` on.

        Args:
            position: first byte of the first record.
            prefix: bytes that every record begins with.
            num_items: objects that each record pushes.
            max_records: most records to decode.
            frame_end: byte behind the current FRAME of the pickle, or something before `position`.

        Returns:
            The batch and the byte behind it; None if not even one record fits.
        """
        starts = self._find_starts(position, prefix, max_records, frame_end)
        matches, match_of, end = self._match_templates(starts, prefix, num_items)
        # A record must begin where the one before ends: the search may have found bytes inside of another.
        follows = np.r_[True, end[:-1] == starts[1:]] & (match_of >= 0)
        num_records = len(starts) if follows.all() else int(np.argmin(follows))
        while num_records:
            batch = self._build_batch(matches, match_of[:num_records])
            if isinstance(batch, RecordBatch):
                return batch, int(end[num_records - 1])
            num_records = batch
        return None

    def _find_starts(self, position: int, prefix: bytes, max_records: int, frame_end: int) -> Int64Array:
        """Find the positions at which records may begin; the search ends where a pickler would do something else."""
        last = frame_end if frame_end > position else position + _SEARCHED_BYTES
        last = min(last, len(self._data))  # a damaged FRAME may promise more bytes than the platform can index
        matches = itertools.islice(_compile(prefix).finditer(self._data, position, last), max_records)
        starts = np.array([match.start() for match in matches], dtype=np.int64)
        gap = np.diff(starts)
        far = np.flatnonzero(gap > 1.5 * np.sort(gap)[len(gap) // 2] + 16) if len(gap) else gap
        return starts[: int(far[0]) + 1] if len(far) else starts

    def _match_templates(
        self, starts: Int64Array, prefix: bytes, num_items: int
    ) -> tuple[list[_Match], Int64Array, Int64Array]:
        """Decode each record with the first template that it fits.

        Returns:
            The templates with their records; per record the position of its template among these, or -1; per record the
            byte behind it.
        """
        match_of = np.full(len(starts), -1)
        end = np.zeros(len(starts), dtype=np.int64)
        matches: list[_Match] = []
        rest = np.arange(len(starts))
        for count, template in self._templates:
            if count != num_items or template.prefix != prefix or not len(rest):
                continue
            records = decode_records(self._source, template, starts[rest])
            if not len(records.number):
                continue
            records = records._replace(number=rest[records.number])
            match_of[records.number], end[records.number] = len(matches), records.end
            matches.append(_Match(template, records))
            rest = np.flatnonzero(match_of < 0)
        return matches, match_of, end

    def _build_batch(self, matches: Sequence[_Match], match_of: Int64Array) -> RecordBatch | int:
        """Build a batch of the first `len(match_of)` records.

        Returns:
            The batch; or, if a record contradicts the memo, how many records before it do not.
        """
        num_records = len(match_of)
        matches = [_Match(template, _take_first(records, num_records)) for template, records in matches]
        num_memos = np.array([template.num_memos for template, _ in matches], dtype=np.int64)[match_of]
        first_memo = self._memo.count + np.cumsum(num_memos) - num_memos
        num_fitting = min(_count_numbered(match, first_memo) for match in matches)
        if num_fitting < num_records:
            return num_fitting
        texts = [self._read_inline_texts(records) for _, records in matches]
        memoized = _collect_memoized(matches, texts, first_memo)
        num_fitting = min(
            self._resolve_references(records, columns, first_memo, memoized)
            for (_, records), columns in zip(matches, texts, strict=True)
        )
        if num_fitting < num_records:
            return num_fitting
        parts = tuple(
            TemplateRecords(template=template, number=records.number, ints=records.ints, texts=columns)
            for (template, records), columns in zip(matches, texts, strict=True)
            if len(records.number)
        )
        self._memo.add_batch(int(num_memos.sum()), *memoized)
        return RecordBatch(count=num_records, parts=parts, strings=self._table.strings)

    def _read_inline_texts(self, records: DecodedRecords) -> Int64Array:
        """Add the strings that stand in the records to the string table.

        Returns:
            Position of each string in the table, -1 for a reference, [records, strings].
        """
        data, table = self._data, self._table
        texts = np.full(records.ref.shape, -1, dtype=np.int64)
        for column in range(records.ref.shape[1] if len(texts) else 0):
            if records.ref[0, column] >= 0:
                continue
            start = records.text_start[:, column]
            stop = start + records.text_length[:, column]
            texts[:, column] = [table[data[a:b]] for a, b in zip(start.tolist(), stop.tolist(), strict=True)]
        return texts

    def _resolve_references(
        self, records: DecodedRecords, texts: Int64Array, first_memo: Int64Array, memoized: _MemoizedStrings
    ) -> int:
        """Set the columns of `texts` whose strings the records take from the memo.

        Returns:
            Number of records of the batch before the first whose string is not memoized before it.
        """
        num_fitting = len(first_memo)
        for column in range(records.ref.shape[1]):
            ref = records.ref[:, column]
            if not len(ref) or ref[0] < 0:
                continue
            positions = {number: self._find_string(number, memoized) for number in set(ref.tolist())}
            texts[:, column] = [positions[number] for number in ref.tolist()]
            bad = (texts[:, column] < 0) | (ref >= first_memo[records.number])
            if bad.any():
                num_fitting = min(num_fitting, int(records.number[np.argmax(bad)]))
        return num_fitting

    def _find_string(self, number: int, memoized: _MemoizedStrings) -> int:
        """Find a memoized string, of these records or of what was before them.

        Returns:
            Its position in the string table; -1 if the number is not that of a string.
        """
        if number >= self._memo.count:
            row = int(np.searchsorted(memoized.numbers, number))
            is_known = row < len(memoized.numbers) and memoized.numbers[row] == number
            return int(memoized.strings[row]) if is_known else -1
        value = self._memo.get(number)
        if value is None:
            try:
                return self._memo.find_batch_string(number)
            except KeyError:
                return -1
        if type(value) is not str:
            return -1
        return self._table[value.encode("utf-8", "surrogatepass")]


def _take_first(records: DecodedRecords, num_records: int) -> DecodedRecords:
    """Select the records whose number is below `num_records`."""
    chosen = records.number < num_records
    return records if chosen.all() else DecodedRecords(*(column[chosen] for column in records))


def _count_numbered(match: _Match, first_memo: Int64Array) -> int:
    """Count the records of the batch before the first that numbers its objects wrongly, or has a negative size.

    Args:
        match: a template and its records.
        first_memo: memo number that a pickler gives the first object of each record, [records of the batch].
    """
    template, records = match
    expected = first_memo[records.number, None] + np.array(template.put_index, dtype=np.int64)
    bad = (records.put != expected).any(axis=1)
    bad |= (records.ints[:, template.sizes] < 0).any(axis=1)
    return int(records.number[np.argmax(bad)]) if bad.any() else len(first_memo)


def _collect_memoized(
    matches: Sequence[_Match], texts: Sequence[Int64Array], first_memo: Int64Array
) -> _MemoizedStrings:
    """Collect the strings that the records memoize."""
    numbers, strings = [np.zeros(0, dtype=np.int64)], [np.zeros(0, dtype=np.int64)]
    for (template, records), columns in zip(matches, texts, strict=True):
        for column, index in template.text_memos:
            numbers.append(first_memo[records.number] + index)
            strings.append(columns[:, column])
    number, string = np.concatenate(numbers), np.concatenate(strings)
    order = np.argsort(number)
    return _MemoizedStrings(number[order], string[order])


@functools.cache
def _compile(prefix: bytes) -> re.Pattern[bytes]:
    return re.compile(re.escape(prefix))
