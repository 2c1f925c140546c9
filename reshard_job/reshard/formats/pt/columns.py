"""A pickle machine for millions of records that are alike: it makes columns of these, and objects of everything else.

It runs a pickle like `machine`. Where records of a list or dict repeat, `batch_decoder` decodes them, and the machine
pushes them as one `RecordBatch`, which only the end of that list or dict may take. If the pickle does anything else
with a batch, or if anything is wrong, `machine` reads the pickle again from the start, and its result counts.
"""

from __future__ import annotations

import dataclasses
import struct
from collections.abc import Callable
from typing import Any

from reshard.errors import UnsafePickleError, UnsupportedError
from reshard.formats.pt import machine
from reshard.formats.pt.batch_decoder import BatchDecoder
from reshard.formats.pt.batches import (
    BatchDict,
    BatchList,
    ColumnMemo,
    RecordBatch,
    StringTable,
    UnusualPickleError,
)
from reshard.formats.pt.extent import check_tree_size, make_pickle_error
from reshard.formats.pt.machine import TABLE, Machine, PersistentLoad, Rebuild
from reshard.formats.pt.objects import Inert

_MAX_SEGMENT_RECORDS = 1000  # a pickler ends a list or dict after a thousand items, and begins again
_GETS = b"hj"
_AFTER_BATCH = frozenset(b"hj\x95eu")  # the opcodes that a pickler writes behind a record


def load_columns(data: bytes, *, persistent_load: PersistentLoad, rebuild: Rebuild, path: str) -> tuple[Any, bool]:
    """Build the object of the pickle `data`, with a `RecordBatch` in place of records that repeat.

    Returns:
        The object, and whether there is a batch in it.

    Raises:
        UnsafePickleError, CorruptSourceError: see `machine.load`.
        UnsupportedError: too large for objects, and not of columns alone.
    """
    column_machine = ColumnMachine(data, persistent_load, rebuild, path)
    try:
        value = column_machine.run()
        check_tree_size(value, path, column_machine.weights)
        column_machine.check_globals(value)
        return value, column_machine.has_batches
    except UnsafePickleError:
        if len(data) > machine.MAX_PICKLE_BYTES:
            raise
    except UnusualPickleError:
        pass
    except (IndexError, struct.error, UnicodeDecodeError, TypeError, ValueError, KeyError, AttributeError) as error:
        if len(data) > machine.MAX_PICKLE_BYTES:
            raise make_pickle_error(error, column_machine.position, path) from error
    del column_machine
    return load_objects(data, persistent_load=persistent_load, rebuild=rebuild, path=path), False


def load_objects(data: bytes, *, persistent_load: PersistentLoad, rebuild: Rebuild, path: str) -> Any:
    """Build the object of the pickle `data` without columns.

    Raises:
        UnsupportedError: too large for that.
        UnsafePickleError, CorruptSourceError: see `machine.load`.
    """
    if len(data) > machine.MAX_PICKLE_BYTES:
        raise UnsupportedError(
            f"has {len(data)} bytes, and is not laid out like what torch writes: at most {machine.MAX_PICKLE_BYTES} are"
            " read of such a pickle",
            path=path,
            hint="load and save it again with torch.distributed.checkpoint",
        )
    return machine.load(data, persistent_load=persistent_load, rebuild=rebuild, path=path)


@dataclasses.dataclass(slots=True)
class _Segment:
    """Items of a list or dict since the last mark.

    Attributes:
        depth: length of the stack with the mark on top.
        num_items: objects on the stack for one record: an item of a list, or key and value of a dict.
        num_batches: batches on the stack.
        num_records: records in these batches.
    """

    depth: int
    num_items: int
    num_batches: int = 0
    num_records: int = 0


class ColumnMachine(Machine):
    """A `Machine` that decodes records that repeat into batches.

    Attributes:
        has_batches: a batch was decoded.
    """

    def __init__(self, data: bytes, persistent_load: PersistentLoad, rebuild: Rebuild, path: str) -> None:
        super().__init__(data, persistent_load, rebuild, path)
        table = StringTable()
        self.memo: ColumnMemo = ColumnMemo(table.strings)
        self.has_batches = False
        self._decoder = BatchDecoder(data, self.memo, table)
        self._segments: list[_Segment] = []
        self._pushed_at: dict[int, int] = {}  # place on the stack -> position of the opcode that last pushed there
        self._frame_end = 0

    def run(self) -> Any:
        """Run the pickle to its end and return the object that it leaves, see `Machine.run`."""
        data, stack, pushed_at, segments = self.data, self.stack, self._pushed_at, self._segments
        while True:
            opcode = data[self.position]
            if opcode in _GETS and segments and self._decode_batches():
                continue
            pushed_at[len(stack)] = self.position
            if stack and type(stack[-1]) is RecordBatch and opcode not in _AFTER_BATCH:
                raise UnusualPickleError
            self.position += 1
            operation = _COLUMN_TABLE[opcode] or TABLE[opcode]
            if operation is not None:
                operation(self)
            elif opcode == 0x2E:  # STOP
                break
            else:
                raise self.make_opcode_error(opcode, self.position - 1)
        value = stack.pop()
        if stack:
            raise ValueError(f"{len(stack)} objects are left on the stack")
        return value

    def _decode_batches(self) -> bool:
        """Decode the records that begin at the current position, if it is between two records of a segment.

        Returns:
            True if there was a record, and the position moved behind it.
        """
        stack, segments = self.stack, self._segments
        while segments and segments[-1].depth > len(stack):
            segments.pop()
        if not segments:
            return False
        segment = segments[-1]
        if (len(stack) - segment.depth - segment.num_batches) % segment.num_items or not self.memo.is_dense:
            return False
        self._learn_last_record(segment)
        before = self.position
        for prefix in self._decoder.list_prefixes(segment.num_items):
            if self.data.startswith(prefix, self.position):
                self._decode_batch(prefix, segment)
        return self.position > before

    def _learn_last_record(self, segment: _Segment) -> None:
        """Learn a template from the record on top of the stack, if there is one."""
        stack, num_items = self.stack, segment.num_items
        if (
            len(stack) - segment.depth >= num_items
            and self._decoder.can_learn
            and all(type(item) is Inert for item in stack[-num_items:])
        ):
            self._decoder.learn(self._pushed_at[len(stack) - num_items], self.position, num_items)

    def _decode_batch(self, prefix: bytes, segment: _Segment) -> None:
        """Push the records that follow, if any fits a template, and move behind them."""
        decoded = self._decoder.decode(
            self.position,
            prefix,
            num_items=segment.num_items,
            max_records=max(1, _MAX_SEGMENT_RECORDS - segment.num_records),
            frame_end=self._frame_end,
        )
        if decoded is not None:
            batch, self.position = decoded
            self.stack.append(batch)
            segment.num_batches += 1
            segment.num_records += batch.count
            self.has_batches = True

    def begin_segment(self) -> None:
        """Run MARK: on top of a list or dict, items follow that may be batches."""
        below = type(self.stack[-1]) if self.stack else None
        self.stack.append(machine.MARK)
        if below is BatchList or below is BatchDict:
            self._segments.append(_Segment(len(self.stack), 1 if below is BatchList else 2))

    def begin_frame(self) -> None:
        """Run FRAME: a pickler ends a frame (64 KiB) between two opcodes, so no batch reaches over its end."""
        num_bytes = self.uint(8)
        self._frame_end = self.position + num_bytes

    def memoize(self) -> None:
        """Run MEMOIZE: store the object on top of the stack under the next number."""
        self.memo[self.memo.count] = self.stack[-1]

    def set_segment(self) -> None:
        """Run SETITEMS: put the pairs down to the mark, single ones and batches, into a dict.

        Raises:
            UnusualPickleError: a batch that is not of pairs, or not between two pairs.
        """
        items = self.pop_to_mark()
        target = self.stack[-1]
        singles: list[Any] = []
        for item in items:
            if type(item) is not RecordBatch:
                singles.append(item)
            elif type(target) is not BatchDict or len(singles) % 2 or len(item.parts[0].template.tree) != 2:
                raise UnusualPickleError
            else:
                target.batches.append(item)
        machine.set_items(self, singles)

    def append_segment(self) -> None:
        """Run APPENDS: put the items down to the mark, single ones and batches, at the end of a list.

        Raises:
            UnusualPickleError: a batch that is not of items.
        """
        items = self.pop_to_mark()
        for item in items:
            is_batch = type(item) is RecordBatch
            if is_batch and (type(self.stack[-1]) is not BatchList or len(item.parts[0].template.tree) != 1):
                raise UnusualPickleError
        machine.append_items(self, items)


def _make_get(width: int) -> Callable[[ColumnMachine], None]:
    def operation(column_machine: ColumnMachine) -> None:
        column_machine.stack.append(column_machine.memo[column_machine.uint(width)])

    return operation


_COLUMN_TABLE: list[Any] = [None] * 256
"""Operations of the opcodes that `ColumnMachine` runs in another way than `Machine`, by opcode."""
for _code, _operation in {
    b"(": ColumnMachine.begin_segment,
    b"u": ColumnMachine.set_segment,
    b"e": ColumnMachine.append_segment,
    b"\x95": ColumnMachine.begin_frame,
    b"]": lambda m: m.stack.append(BatchList()),
    b"}": lambda m: m.stack.append(BatchDict()),
    b"h": _make_get(1),
    b"j": _make_get(4),
    b"\x94": ColumnMachine.memoize,
    b"K": lambda m: m.stack.append(m.uint(1)),
    b"M": lambda m: m.stack.append(m.uint(2)),
}.items():
    _COLUMN_TABLE[_code[0]] = _operation
