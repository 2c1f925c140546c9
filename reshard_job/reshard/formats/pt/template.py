"""Learn a template from one record of a pickle, and decode hundreds of records that fit it at once, without objects.

The pickle of five million chunks has ten million records that differ in a few integers and names. A template is the
opcodes of a record with holes for these. numpy decodes all records that fit the template, one opcode at a time, to the
values that the pickle machine would build. Source of the opcodes: Lib/pickletools.py of CPython 3.11.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from reshard.errors import ReshardError
from reshard.formats.pt.machine import MARK, TABLE, Machine, rebuild_containers
from reshard.formats.pt.objects import Global, Inert, Size, copy_container
from reshard.tensors.intervals import Int64Array

MIN_PREFIX_BYTES = 6
"""Least length of the bytes with which all records begin, and by which they are found."""

MAX_RECORD_BYTES = 1 << 12
_LITERAL, _INT, _TEXT, _REF, _PUT = range(5)
_BININT1, _BININT2, _BININT, _LONG1 = b"KMJ\x8a"
_SHORT_TEXT, _WIDE_TEXT = b"\x8cX"
_GET, _LONG_GET, _MEMOIZE, _SHORT_PUT, _LONG_PUT = b"hj\x94qr"
_PLAIN = frozenset(b")}(\x81R\x85\x86\x87tusbN\x88\x89")
"""Opcodes without arguments, which are part of a template's literals."""

_WIDTHS = np.zeros(256, dtype=np.uint64)
_WIDTHS[[_BININT1, _BININT2, _BININT]] = 1, 2, 4
_WORD = 8
_LOW32 = np.uint64((1 << 32) - 1)


class IntHole(int):
    """Hole for an integer that differs between records; its value is the column's number."""


class TextHole(str):
    """Hole for a string that differs between records; its value is the column's number, in digits."""

    __slots__ = ()


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Template:
    """Opcodes and objects that records have in common.

    Attributes:
        tokens: (kind, bytes of a literal) in the order of the pickle.
        tree: the objects that a record pushes, with holes.
        num_ints: number of integers in a record.
        num_texts: number of strings in a record.
        num_memos: number of objects that a record memoizes.
        text_memos: (column, number of objects that the record memoizes before it) of each string that it memoizes.
        put_index: for each PUT of the record, the number of objects that the record memoizes before it.
        sizes: columns of the integers that are part of a `torch.Size` and so cannot be negative.
    """

    tokens: tuple[tuple[int, bytes], ...]
    tree: tuple[Any, ...]
    num_ints: int
    num_texts: int
    num_memos: int
    text_memos: tuple[tuple[int, int], ...]
    put_index: tuple[int, ...]
    sizes: tuple[int, ...]

    @property
    def prefix(self) -> bytes:
        """Bytes with which every record begins."""
        return self.tokens[0][1]

    @property
    def reach(self) -> int:
        """Most bytes that decoding may read behind the start of a token, without the content of strings."""
        return sum(len(literal) + _WORD + 2 for _, literal in self.tokens) + 2 * _WORD


class DecodedRecords(NamedTuple):
    """Records that fit a template, not yet compared with the memo.

    Attributes:
        number: number of each record among those that were tried, [records].
        end: position behind each record, [records].
        ints: integers, [records, integers].
        text_start: first byte of each string that is in the record itself, else 0, [records, strings].
        text_length: bytes of each such string, else 0, [records, strings].
        ref: memo number of each string that is a reference, else -1, [records, strings].
        put: memo numbers that the record assigns by PUT, [records, puts].
    """

    number: Int64Array
    end: Int64Array
    ints: Int64Array
    text_start: Int64Array
    text_length: Int64Array
    ref: Int64Array
    put: Int64Array


class TemplateInput:
    """Bytes of a pickle as arrays: single bytes, and the eight bytes from every position on as one number."""

    def __init__(self, data: bytes) -> None:
        self.data = data
        self.bytes = np.frombuffer(data, dtype=np.uint8)
        self.words: npt.NDArray[np.uint64] = np.ndarray(
            (max(0, len(data) - _WORD + 1),), dtype="<u8", buffer=data, strides=(1,)
        )


def learn_template(data: bytes, start: int, end: int, num_items: int, memo: Mapping[int, Any]) -> Template | None:
    """Learn the template of a record that the machine has run.

    Args:
        data: the pickle.
        start: first byte of the record.
        end: byte behind it.
        num_items: number of objects that it pushes.
        memo: memo of the machine.

    Returns:
        The template; None if the record has opcodes that a template cannot have.
    """
    if end - start > MAX_RECORD_BYTES:
        return None
    try:
        return _Probe(data, start, end, memo).learn(num_items)
    except (ReshardError, IndexError, TypeError, ValueError, KeyError, AttributeError):
        return None


class _Probe:
    """Machine that runs one record with holes in place of integers and strings."""

    def __init__(self, data: bytes, start: int, end: int, memo: Mapping[int, Any]) -> None:
        self.data, self.start, self.end, self.memo = data, start, end, memo
        self.machine = Machine(data, _refuse_persistent, _rebuild, "")
        self.machine.position = start
        self.tokens: list[tuple[int, bytes]] = []
        self.texts: dict[int, str] = {}
        self.num_ints = self.num_memos = 0
        self.text_memos: dict[int, int] = {}
        self.put_index: list[int] = []

    def learn(self, num_items: int) -> Template | None:
        machine = self.machine
        while machine.position < self.end:
            if not self.run_opcode():
                return None
        if machine.position != self.end or len(machine.stack) != num_items or MARK in machine.stack:
            return None
        keys: set[int] = set()
        tree = tuple(self.restore_keys(item, keys) for item in machine.stack)
        kept = {old: new for new, old in enumerate(number for number in self.texts if number not in keys)}
        tree = tuple(_renumber_holes(item, kept) for item in tree)
        tokens = _join_literals(
            [(_LITERAL if at in keys else kind, data) for at, (kind, data) in enumerate(self.tokens)]
        )
        if tokens[0][0] != _LITERAL or len(tokens[0][1]) < MIN_PREFIX_BYTES:
            return None
        return Template(
            tokens=tokens,
            tree=tree,
            num_ints=self.num_ints,
            num_texts=len(kept),
            num_memos=self.num_memos,
            text_memos=tuple((kept[at], number) for at, number in self.text_memos.items() if at in kept),
            put_index=tuple(self.put_index),
            sizes=tuple(sorted({int(hole) for item in tree for hole in _find_size_holes(item)})),
        )

    def run_opcode(self) -> bool:
        machine, first = self.machine, self.machine.position
        opcode = self.data[first]
        machine.position += 1
        kind = _LITERAL
        if opcode in (_BININT1, _BININT2, _BININT, _LONG1):
            kind = _INT
            machine.take(self.data[first + 1] + 1 if opcode == _LONG1 else int(_WIDTHS[opcode]))
            machine.stack.append(IntHole(self.num_ints))
            self.num_ints += 1
        elif opcode in (_SHORT_TEXT, _WIDE_TEXT):
            text = machine.take(machine.uint(1 if opcode == _SHORT_TEXT else 4))
            kind = _TEXT
            self.push_text(text.decode("utf-8", "surrogatepass"))
        elif opcode in (_GET, _LONG_GET):
            value = self.memo[machine.uint(1 if opcode == _GET else 4)]
            if type(value) is str:
                kind = _REF
                self.push_text(value)
            elif type(value) is Global:
                machine.stack.append(value)
            else:
                return False
        elif opcode in (_MEMOIZE, _SHORT_PUT, _LONG_PUT):
            if opcode != _MEMOIZE:
                kind = _PUT
                self.put_index.append(self.num_memos)
                machine.take(1 if opcode == _SHORT_PUT else 4)
            if self.tokens and self.tokens[-1][0] == _TEXT:
                self.text_memos[len(self.tokens) - 1] = self.num_memos
            self.num_memos += 1
        elif opcode in _PLAIN and (operation := TABLE[opcode]) is not None:
            operation(machine)
        else:
            return False
        self.tokens.append((kind, self.data[first : machine.position]))
        return True

    def push_text(self, value: str) -> None:
        self.texts[len(self.tokens)] = value
        self.machine.stack.append(TextHole(len(self.tokens)))

    def restore_keys(self, value: Any, keys: set[int]) -> Any:
        """Copy a tree with strings in place of holes for keys of dicts, which are the same in every record.

        Args:
            value: the tree.
            keys: extended by the numbers of these holes.
        """
        if type(value) is dict:
            copied: dict[Any, Any] = {}
            for key, item in value.items():
                name = key
                if type(key) is TextHole:
                    keys.add(int(key))
                    name = self.texts[int(key)]
                copied[name] = self.restore_keys(item, keys)
            return copied
        return copy_container(value, lambda item: self.restore_keys(item, keys))


def _refuse_persistent(_identifier: Any) -> Any:
    raise ValueError("a persistent id")


def _rebuild(target: Global, args: tuple[Any, ...]) -> Any:
    if target == Global("torch", "Size") and len(args) == 1 and type(args[0]) is tuple:
        if all(type(part) is IntHole for part in args[0]):
            return Size(args[0])
        raise ValueError("a torch.Size of other things than integers")
    return rebuild_containers(target, args)


def _renumber_holes(value: Any, numbers: Mapping[int, int]) -> Any:
    if type(value) is TextHole:
        return TextHole(numbers[int(value)])
    return copy_container(value, lambda item: _renumber_holes(item, numbers))


def _find_size_holes(value: Any) -> list[int]:
    if type(value) is Size:
        return list(value)
    if isinstance(value, dict):
        return [hole for item in value.values() for hole in _find_size_holes(item)]
    if isinstance(value, list | tuple):
        return [hole for item in value for hole in _find_size_holes(item)]
    return _find_size_holes([value.args, value.state]) if isinstance(value, Inert) else []


def _join_literals(tokens: Sequence[tuple[int, bytes]]) -> tuple[tuple[int, bytes], ...]:
    joined: list[tuple[int, bytes]] = []
    for kind, data in tokens:
        if kind == _LITERAL and joined and joined[-1][0] == _LITERAL:
            joined[-1] = (_LITERAL, joined[-1][1] + data)
        else:
            joined.append((kind, data if kind == _LITERAL else b""))
    return tuple(joined)


def fill_tree(value: Any, ints: Sequence[int], texts: Sequence[str]) -> Any:
    """Fill the holes of a tree with the integers and strings of a record."""
    if type(value) is IntHole:
        return ints[value]
    if type(value) is TextHole:
        return texts[int(value)]
    if type(value) is Size:
        return Size(ints[hole] for hole in value)
    return copy_container(value, lambda item: fill_tree(item, ints, texts))


def decode_records(source: TemplateInput, template: Template, starts: Int64Array) -> DecodedRecords:
    """Decode the records at `starts`; leave out those that do not fit, or are too close to the end of the pickle."""
    decoder = _Decoder(source, starts, len(source.data) - template.reach)
    for kind, literal in template.tokens:
        if not len(decoder.number):
            break
        decoder.decode_token(kind, literal)
    return decoder.build_records(template)


class _Decoder:
    """Decoder of one token of all records at a time; records that do not fit are dropped."""

    def __init__(self, source: TemplateInput, starts: Int64Array, last: int) -> None:
        """Start at `starts`; `last` is the last position at which a token may begin without reading over the end."""
        self.source = source
        self.at = starts
        self.number: Int64Array = np.arange(len(starts))
        self.ints: list[Int64Array] = []
        self.text_starts: list[Int64Array] = []
        self.text_lengths: list[Int64Array] = []
        self.refs: list[Int64Array] = []
        self.puts: list[Int64Array] = []
        self.last = last
        self.keep(self.at <= last)

    def decode_token(self, kind: int, literal: bytes) -> None:
        if kind == _LITERAL:
            self.decode_literal(literal)
        elif kind == _INT:
            self.decode_integer()
        elif kind == _PUT:
            self.puts.append(self.decode_number(_SHORT_PUT, _LONG_PUT))
        elif kind == _REF:
            self.text_starts.append(np.zeros_like(self.at))
            self.text_lengths.append(np.zeros_like(self.at))
            self.refs.append(self.decode_number(_GET, _LONG_GET))
        else:
            self.decode_text()

    def keep(self, good: npt.NDArray[np.bool_]) -> None:
        if good.all():
            return
        self.at, self.number = self.at[good], self.number[good]
        for columns in (self.ints, self.text_starts, self.text_lengths, self.refs, self.puts):
            columns[:] = [column[good] if len(column) == len(good) else column for column in columns]

    def decode_literal(self, literal: bytes) -> None:
        for first in range(0, len(literal), _WORD):
            part = literal[first : first + _WORD]
            word = self.source.words[self.at + first if first else self.at]
            if len(part) < _WORD:
                word &= np.uint64((1 << 8 * len(part)) - 1)
            self.keep(word == np.uint64(int.from_bytes(part, "little")))
        self.at = self.at + len(literal)

    def decode_integer(self) -> None:
        opcode = self.source.bytes[self.at]
        width, long = _WIDTHS[opcode], opcode == _LONG1
        if any_long := bool(long.any()):
            width = np.where(long, self.source.bytes[self.at + 1], width)
        good = (width > 0) & (width <= _WORD)
        if not good.all():
            opcode, width, long = opcode[good], width[good], long[good]
            self.keep(good)
        skip = np.where(long, 2, 1) if any_long else 1
        shift = np.uint64(64) - np.uint64(8) * width.astype(np.uint64)
        high = self.source.words[self.at + skip] << shift
        signed = high.view(np.int64) >> shift.view(np.int64)
        unsigned = (high >> shift).view(np.int64)
        self.ints.append(np.where((opcode == _BININT1) | (opcode == _BININT2), unsigned, signed))
        self.at = self.at + skip + width.astype(np.int64)

    def decode_number(self, short: int, long: int) -> Int64Array:
        """Decode a memo number of one byte (opcode `short`) or four bytes (opcode `long`)."""
        opcode, word = self.source.bytes[self.at], self.source.words[self.at + 1]
        is_short = opcode == short
        value: Int64Array = np.where(is_short, word & np.uint64(0xFF), word & _LOW32).astype(np.int64)
        self.at = self.at + np.where(is_short, 2, 5)
        good = is_short | (opcode == long)
        self.keep(good)
        kept: Int64Array = value[good]
        return kept

    def decode_text(self) -> None:
        opcode, word = self.source.bytes[self.at], self.source.words[self.at + 1]
        is_short = opcode == _SHORT_TEXT
        length: Int64Array = np.where(is_short, word & np.uint64(0xFF), word & _LOW32).astype(np.int64)
        start = self.at + np.where(is_short, 2, 5)
        self.refs.append(np.full_like(start, -1))
        self.text_starts.append(start)
        self.text_lengths.append(length)
        self.at = start + length
        self.keep((is_short | (opcode == _WIDE_TEXT)) & (self.at <= self.last))

    def build_records(self, template: Template) -> DecodedRecords:
        def matrix(columns: list[Int64Array], count: int) -> Int64Array:
            if not count or not len(self.number):
                return np.zeros((len(self.number), count), dtype=np.int64)
            return np.stack(columns, axis=1)

        return DecodedRecords(
            number=self.number,
            end=self.at,
            ints=matrix(self.ints, template.num_ints),
            text_start=matrix(self.text_starts, template.num_texts),
            text_length=matrix(self.text_lengths, template.num_texts),
            ref=matrix(self.refs, template.num_texts),
            put=matrix(self.puts, len(template.put_index)),
        )
