"""A pickle machine for millions of records that are alike: it makes columns of them, and objects of everything else.

It runs a pickle like `machine`. Where records of lists and dicts repeat, they are decoded by `template` and stand on
the stack as one `Run`, which nothing but the end of its list or dict may take. What a pickle does besides that makes it
unlike those that picklers write: then, and where anything is wrong, it is run again by `machine`, whose word counts.
"""

from __future__ import annotations

import bisect
import dataclasses
import functools
import itertools
import re
import struct
from collections.abc import Iterator
from typing import Any

import numpy as np

from reshard.errors import CorruptSourceError, UnsafePickleError, UnsupportedError
from reshard.formats.pt import machine
from reshard.formats.pt.extent import check_extent
from reshard.formats.pt.machine import TABLE, Machine, PersistentLoad, Rebuild
from reshard.formats.pt.objects import Inert
from reshard.formats.pt.template import Lanes, Template, TemplateInput, decode, filled, learn
from reshard.tensors.intervals import Int64Array

_MOST_RECORDS = 1000  # a pickler ends a list or dict after a thousand, and begins again
_MOST_TEMPLATES = 32
_SEARCHED_BYTES = 1 << 18
_AFTER_RUN = frozenset(b"hj\x95eu")
_GETS = b"hj"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """Records of one template.

    Attributes:
        template: what they are.
        lane: number of each in its run, ascending, [records].
        ints: [records, integers].
        texts: positions in `Run.strings`, [records, strings].
    """

    template: Template
    lane: Int64Array
    ints: Int64Array
    texts: Int64Array


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Run:
    """Consecutive items of a list, or pairs of a dict, in columns.

    Attributes:
        count: records.
        parts: by template.
        strings: all that occur, shared by all runs.
    """

    count: int
    parts: tuple[Part, ...]
    strings: list[str]


class Listing(list[Any]):
    """A list; its items may be a `Run`, which stands for several."""


class Table(dict[Any, Any]):
    """A dict whose pairs may also be in runs, and are in no order then."""

    def __init__(self) -> None:
        self.runs: list[Run] = []


def records(run: Run, part: Part) -> Iterator[tuple[int, tuple[Any, ...]]]:
    """(number in the run, objects) of each record of a part, made one by one."""
    for lane, ints, texts in zip(part.lane.tolist(), part.ints.tolist(), part.texts.tolist(), strict=True):
        strings = [run.strings[number] for number in texts]
        yield lane, tuple(filled(item, ints, strings) for item in part.template.tree)


def load_columns(data: bytes, *, persistent_load: PersistentLoad, rebuild: Rebuild, path: str) -> tuple[Any, bool]:
    """Build the object of `data`, with `Run`s in the place of records that repeat.

    Returns:
        The object, and whether there is a run in it.

    Raises:
        UnsafePickleError, CorruptSourceError: see `machine.load`.
        UnsupportedError: too large for objects, and not of columns alone.
    """
    found = ColumnMachine(data, persistent_load, rebuild, path)
    try:
        value = found.run()
        check_extent(value, path, found.weights)
        found.judge(value)
        return value, found.num_records > 0
    except UnsafePickleError:
        if len(data) > machine.MAX_PICKLE_BYTES:
            raise
    except _UnlikeError:
        pass
    except (IndexError, struct.error, UnicodeDecodeError, TypeError, ValueError, KeyError, AttributeError) as error:
        if len(data) > machine.MAX_PICKLE_BYTES:
            raise CorruptSourceError(
                f"broken pickle at byte {found.position}: {type(error).__name__}: {error!s:.300}", path=path
            ) from error
    del found
    return load_objects(data, persistent_load=persistent_load, rebuild=rebuild, path=path), False


def load_objects(data: bytes, *, persistent_load: PersistentLoad, rebuild: Rebuild, path: str) -> Any:
    """Build the object of `data` without columns.

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


class _UnlikeError(Exception):
    """The pickle does something that the columns cannot follow."""


class _Memo(machine.Memo):
    """Objects by number; those of records are not there, but for their strings."""

    def __init__(self, strings: list[str]) -> None:
        super().__init__()
        self.strings = strings
        self.top = -1
        self.num_hidden = 0
        self.hidden_from: list[int] = []
        self.hidden: list[tuple[int, Int64Array, Int64Array]] = []
        self.seen: dict[int, int] = {}

    @property
    def count(self) -> int:
        """Objects that were memoized."""
        return len(self) + self.num_hidden

    @property
    def is_dense(self) -> bool:
        """Numbers are 0, 1, 2, ... so far, as picklers give them."""
        return self.top < self.count

    def put(self, number: int, value: Any) -> None:
        """Keep an object under a number, which no pickler takes out of order."""
        if number > self.count:
            raise _UnlikeError
        self[number] = value

    def __setitem__(self, number: int, value: Any) -> None:
        if self.num_hidden and number < self.count and number not in self:
            raise _UnlikeError
        self.top = max(self.top, number)
        super().__setitem__(number, value)

    def __missing__(self, number: int) -> Any:
        return self.strings[self.string_of(number)]

    def hide(self, count: int, numbers: Int64Array, strings: Int64Array) -> None:
        """Count objects of records; `numbers` of them (ascending) are strings."""
        self.hidden_from.append(self.count)
        self.hidden.append((self.count + count, numbers, strings))
        self.num_hidden += count
        self.top = max(self.top, self.count - 1)

    def string_of(self, number: int) -> int:
        """Position in `strings` of a string of a record."""
        if number not in self.seen:
            at = bisect.bisect_right(self.hidden_from, number) - 1
            if at < 0 or number >= self.hidden[at][0]:
                raise KeyError(number)
            _, numbers, strings = self.hidden[at]
            place = int(np.searchsorted(numbers, number))
            if place == len(numbers) or numbers[place] != number:
                raise _UnlikeError  # another object of a record: it is not there any more
            self.seen[number] = int(strings[place])
        return self.seen[number]


class _Strings(dict[bytes, int]):
    """Number of each string by its bytes; new ones are appended to `values`."""

    def __init__(self, values: list[str]) -> None:
        super().__init__()
        self.values_ = values

    def __missing__(self, data: bytes) -> int:
        self.values_.append(data.decode("utf-8", "surrogatepass"))
        self[data] = number = len(self.values_) - 1
        return number


@dataclasses.dataclass(slots=True)
class _Frame:
    """A mark above a list or dict: where its items begin."""

    depth: int
    num_items: int
    runs: int = 0
    num_records: int = 0


class ColumnMachine(Machine):
    """The machine, with templates."""

    def __init__(self, data: bytes, persistent_load: PersistentLoad, rebuild: Rebuild, path: str) -> None:
        super().__init__(data, persistent_load, rebuild, path)
        self.strings: list[str] = []
        self.known = _Strings(self.strings)
        self.numbers: dict[str, int] = {}
        self.memo: _Memo = _Memo(self.strings)
        self.source = TemplateInput(data)
        self.templates: list[tuple[int, Template]] = []
        self.frames: list[_Frame] = []
        self.starts: dict[int, int] = {}
        self.num_records = 0
        self.frame_end = 0

    def run(self) -> Any:
        """See `Machine.run`."""
        data, stack, starts = self.data, self.stack, self.starts
        while True:
            opcode = data[self.position]
            if opcode in _GETS and self.frames and self.at_item():
                continue
            starts[len(stack)] = self.position
            if stack and type(stack[-1]) is Run and opcode not in _AFTER_RUN:
                raise _UnlikeError
            self.position += 1
            operation = _OWN[opcode] or TABLE[opcode]
            if operation is not None:
                operation(self)
            elif opcode == 0x2E:  # STOP
                break
            else:
                raise self.unwanted(opcode, self.position - 1)
        value = stack.pop()
        if stack:
            raise ValueError(f"{len(stack)} objects are left on the stack")
        return value

    def at_item(self) -> bool:
        """Learn from the item before, and decode those that follow; whether there was one."""
        stack, frames = self.stack, self.frames
        while frames and frames[-1].depth > len(stack):
            frames.pop()
        if not frames:
            return False
        frame = frames[-1]
        if (len(stack) - frame.depth - frame.runs) % frame.num_items or not self.memo.is_dense:
            return False
        items = stack[-frame.num_items :]
        if (
            len(stack) - frame.depth >= frame.num_items
            and len(self.templates) < _MOST_TEMPLATES
            and all(type(item) is Inert for item in items)
        ):
            start = self.starts[len(stack) - frame.num_items]
            found = learn(self.data, start, self.position, frame.num_items, self.memo)
            if found is not None and (frame.num_items, found) not in self.templates:
                self.templates.insert(0, (frame.num_items, found))
        before = self.position
        for prefix in dict.fromkeys(item.prefix for count, item in self.templates if count == frame.num_items):
            if self.data.startswith(prefix, self.position):
                self.decode(prefix, frame)
        return self.position > before

    def decode(self, prefix: bytes, frame: _Frame) -> None:
        """Put the records that follow on the stack, as one run."""
        starts = self.candidates(prefix, frame)
        chosen = np.full(len(starts), -1)
        end = np.zeros(len(starts), dtype=np.int64)
        found: list[tuple[Template, Lanes]] = []
        rest = np.arange(len(starts))
        for count, template in self.templates:
            if count != frame.num_items or template.prefix != prefix or not len(rest):
                continue
            lanes = decode(self.source, template, starts[rest])
            if not len(lanes.lane):
                continue
            lanes = lanes._replace(lane=rest[lanes.lane])
            chosen[lanes.lane], end[lanes.lane] = len(found), lanes.end
            found.append((template, lanes))
            rest = np.flatnonzero(chosen < 0)
        # A record must begin where the one before ends: the search may have found bytes inside of another.
        follows = np.r_[True, end[:-1] == starts[1:]] & (chosen >= 0)
        num_records = len(starts) if follows.all() else int(np.argmin(follows))
        while num_records:
            fitting = self.finish(found, chosen[:num_records], num_records)
            if fitting == num_records:
                frame.runs += 1
                frame.num_records += num_records
                self.num_records += num_records
                self.position = int(end[num_records - 1])
                return
            num_records = fitting

    def candidates(self, prefix: bytes, frame: _Frame) -> Int64Array:
        """Where records may begin, from here on; where a pickler would do something else between, the search ends."""
        first, most = self.position, max(1, _MOST_RECORDS - frame.num_records)
        last = self.frame_end if self.frame_end > first else first + _SEARCHED_BYTES
        matches = _pattern(prefix).finditer(self.data, first, last)
        starts = np.array([match.start() for match in itertools.islice(matches, most)], dtype=np.int64)
        gap = np.diff(starts)
        far = np.flatnonzero(gap > 1.5 * np.sort(gap)[len(gap) // 2] + 16) if len(gap) else gap
        return starts[: int(far[0]) + 1] if len(far) else starts

    def finish(self, found: list[tuple[Template, Lanes]], chosen: Int64Array, num_records: int) -> int:
        """Resolve memo numbers and strings and push the run; or how many records, which are fewer, fit."""
        num_memos = np.array([template.num_memos for template, _ in found], dtype=np.int64)[chosen]
        base = self.memo.count + np.cumsum(num_memos) - num_memos
        own = [lanes.lane < num_records for _, lanes in found]
        found = [
            (template, lanes if some.all() else Lanes(*(column[some] for column in lanes)))
            for (template, lanes), some in zip(found, own, strict=True)
        ]
        wrong = num_records
        texts: list[Int64Array] = []
        numbers, strings = [], []
        for template, lanes in found:
            bad = (lanes.put != base[lanes.lane, None] + np.array(template.put_index, dtype=np.int64)).any(axis=1)
            bad |= (lanes.ints[:, template.sizes] < 0).any(axis=1)
            if bad.any():
                wrong = min(wrong, int(lanes.lane[np.argmax(bad)]))
            texts.append(self.inline(lanes))
            for column, index in template.text_memos:
                numbers.append(base[lanes.lane] + index)
                strings.append(texts[-1][:, column])
        if wrong < num_records:
            return wrong
        number, string = _sorted(numbers, strings)
        for (_, lanes), text in zip(found, texts, strict=True):
            if (unknown := self.refer(lanes, text, base, number, string)) >= 0:
                wrong = min(wrong, unknown)
        if wrong < num_records:
            return wrong
        parts = tuple(
            Part(template=template, lane=lanes.lane, ints=lanes.ints, texts=text)
            for (template, lanes), text in zip(found, texts, strict=True)
            if len(lanes.lane)
        )
        self.memo.hide(int(num_memos.sum()), number, string)
        self.stack.append(Run(count=num_records, parts=parts, strings=self.strings))
        return num_records

    def inline(self, lanes: Lanes) -> Int64Array:
        """Strings that stand in the records; those that do not are -1."""
        data, known = self.data, self.known
        texts = np.full(lanes.ref.shape, -1, dtype=np.int64)
        for column in range(lanes.ref.shape[1] if len(texts) else 0):
            if lanes.ref[0, column] >= 0:
                continue
            start = lanes.text_start[:, column]
            stop = start + lanes.text_length[:, column]
            texts[:, column] = [known[data[a:b]] for a, b in zip(start.tolist(), stop.tolist(), strict=True)]
        return texts

    def refer(self, lanes: Lanes, texts: Int64Array, base: Int64Array, number: Int64Array, string: Int64Array) -> int:
        """Fill in strings that stand elsewhere; the first record whose string does not stand before it, or -1."""
        failed = []
        for column in range(lanes.ref.shape[1]):
            ref = lanes.ref[:, column]
            if not len(ref) or ref[0] < 0:
                continue
            found = {value: self.string_before(value, number, string) for value in set(ref.tolist())}
            texts[:, column] = [found[value] for value in ref.tolist()]
            bad = (texts[:, column] < 0) | (ref >= base[lanes.lane])
            if bad.any():
                failed.append(int(lanes.lane[np.argmax(bad)]))
        return min(failed, default=-1)

    def string_before(self, ref: int, number: Int64Array, string: Int64Array) -> int:
        """The string with a memo number: of these records, or of what was before them; -1 where it is none."""
        if ref >= self.memo.count:
            place = int(np.searchsorted(number, ref))
            return int(string[place]) if place < len(number) and number[place] == ref else -1
        value = self.memo.get(ref)
        if value is None:
            try:
                return self.memo.string_of(ref)
            except KeyError:
                return -1
        if type(value) is not str:
            return -1
        return self.known[value.encode("utf-8", "surrogatepass")]


def _sorted(numbers: list[Int64Array], strings: list[Int64Array]) -> tuple[Int64Array, Int64Array]:
    if not numbers:
        return np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.int64)
    number, string = np.concatenate(numbers), np.concatenate(strings)
    order = np.argsort(number)
    return number[order], string[order]


def _mark(found: ColumnMachine) -> None:
    below = type(found.stack[-1]) if found.stack else None
    found.stack.append(machine.MARK)
    if below is Listing or below is Table:
        found.frames.append(_Frame(len(found.stack), 1 if below is Listing else 2))


def _set_items(found: ColumnMachine) -> None:
    items = found.since_mark()
    target = found.stack[-1]
    if type(target) is not Table:
        if any(type(item) is Run for item in items):
            raise _UnlikeError
        machine.set_items(found, items)
        return
    runs = [item for item in items if type(item) is Run]
    pairs: list[Any] = []
    for item in items:
        if type(item) is not Run:
            pairs.append(item)
        elif len(pairs) % 2 or len(item.parts[0].template.tree) != 2:
            raise _UnlikeError
    target.runs += runs
    machine.set_items(found, pairs)


def _append_items(found: ColumnMachine) -> None:
    items = found.since_mark()
    for item in items:
        if type(item) is Run and (type(found.stack[-1]) is not Listing or len(item.parts[0].template.tree) != 1):
            raise _UnlikeError
    machine.append(found, items)


@functools.cache
def _pattern(prefix: bytes) -> re.Pattern[bytes]:
    return re.compile(re.escape(prefix))


def _begin_frame(found: ColumnMachine) -> None:
    """A hint about buffering, 64 KiB each: no record goes on behind its end without the next in between."""
    num_bytes = found.uint(8)
    found.frame_end = found.position + num_bytes


def _get(width: int) -> Any:
    def operation(found: ColumnMachine) -> None:
        found.stack.append(found.memo[found.uint(width)])

    return operation


def _memoize(found: ColumnMachine) -> None:
    found.memo[found.memo.count] = found.stack[-1]


_OWN: list[Any] = [None] * 256
for _code, _operation in {
    b"(": _mark,
    b"u": _set_items,
    b"e": _append_items,
    b"\x95": _begin_frame,
    b"]": lambda m: m.stack.append(Listing()),
    b"}": lambda m: m.stack.append(Table()),
    b"h": _get(1),
    b"j": _get(4),
    b"\x94": _memoize,
    b"K": lambda m: m.stack.append(m.uint(1)),
    b"M": lambda m: m.stack.append(m.uint(2)),
}.items():
    _OWN[_code[0]] = _operation
