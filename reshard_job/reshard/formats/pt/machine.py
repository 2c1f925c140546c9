"""A pickle machine that builds data and nothing else.

The machine of the standard library calls whatever a pickle names, and its C form can be made to allocate gigabytes by
a short pickle. This one knows the opcodes that torch.save and the standard pickler emit for data (protocols 2 to 5),
calls no name at all, accepts those of the allow list (`trust`), and turns their objects into `Inert` recipes. Time and
memory are linear in the pickle's length.
Source of the opcodes: Lib/pickletools.py of CPython 3.11.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any

from reshard.errors import CorruptSourceError, ReshardError, UnsafePickleError
from reshard.formats.pt.extent import check_extent
from reshard.formats.pt.objects import ORDERED_DICT, WITH_ATTRIBUTES, Global, Inert, Size, StatefulDict, brief
from reshard.formats.pt.trust import is_accepted, judge

MAX_PICKLE_BYTES = 256 << 20
"""A pickle of metadata is a few hundred bytes per tensor; a longer one is not metadata."""

_MAX_INTEGER_BYTES = 1 << 10  # longer ones take Python quadratic time to print
_MAX_KEY_PARTS = 16  # a tuple is hashed anew wherever it is a key
_MAX_KEY_CHARACTERS = 1 << 14  # equal texts of two objects are compared whole
_MAX_COLLISIONS = 16  # of tuples, whose hashes can be made to collide: each takes a comparison with all the others
_MAX_KEY_BITS = 60  # integers up to 2**61 - 1 differ in their hashes; larger ones can be made to collide
_MOST_PROBES = 1 << 26  # of numbers that are keys, besides those for each byte of the pickle
_PROBES_PER_BYTE = 64
_NEAR = 16
_MAX_NAME = 1 << 10
MARK = object()
"""What stands on the stack for a mark."""
_UINT2 = struct.Struct("<H")
_UINT4 = struct.Struct("<I")
_SCALARS = (str, int, float, bool, bytes, type(None))

MAX_DIMS = 64
"""Of a tensor."""

LONG_BYTES = 64
"""Texts and numbers of so many bytes count as several objects, in each place where they are."""

_BYTES_OF_AN_OBJECT = 32

PersistentLoad = Callable[[Any], Any]
Rebuild = Callable[[Global, tuple[Any, ...]], Any]
"""Turns a known callable with arguments into data, or returns NotImplemented."""


def load(data: bytes, *, persistent_load: PersistentLoad, rebuild: Rebuild, path: str) -> Any:
    """Build the object of `data`.

    Args:
        data: the pickle.
        persistent_load: called with each persistent id.
        rebuild: called with each callable that the pickle applies.
        path: file to name in errors.

    Raises:
        UnsafePickleError: a name that is not accepted (`trust`), an opcode that data does not need, or too large.
        CorruptSourceError: not a well-formed pickle.
    """
    if len(data) > MAX_PICKLE_BYTES:
        raise UnsafePickleError(f"its pickle has {len(data)} bytes: at most {MAX_PICKLE_BYTES} are read", path=path)
    machine = Machine(data, persistent_load, rebuild, path)
    try:
        value = machine.run()
    except ReshardError:
        machine.judge_names()
        raise
    except (IndexError, struct.error, UnicodeDecodeError, TypeError, ValueError, KeyError, AttributeError) as error:
        machine.judge_names()
        raise CorruptSourceError(
            f"broken pickle at byte {machine.position}: {type(error).__name__}: {error!s:.300}", path=path
        ) from error
    check_extent(value, path, machine.weights)
    machine.judge(value)
    return value


class Memo(dict[int, Any]):
    """Objects by number, which picklers count from 0.

    A number out of that order is kept apart, as a text: a file cannot choose the hash of a text, and that of a number
    it can, so that each look at it meets all the others.
    """

    def __init__(self) -> None:
        super().__init__()
        self.apart: dict[str, Any] = {}

    @property
    def count(self) -> int:
        """Objects that were memoized."""
        return len(self) + len(self.apart)

    def put(self, number: int, value: Any) -> None:
        """Keep an object under a number."""
        if number > len(self):
            self.apart[str(number)] = value
            return
        self[number] = value
        if self.apart:
            self.apart.pop(str(number), None)

    def __missing__(self, number: int) -> Any:
        return self.apart[str(number)]


class Machine:
    """Stack, memo and position of one run."""

    def __init__(self, data: bytes, persistent_load: PersistentLoad, rebuild: Rebuild, path: str) -> None:
        self.data = data
        self.position = 0
        self.stack: list[Any] = []
        self.memo = Memo()
        self.persistent_load = persistent_load
        self.rebuild = rebuild
        self.path = path
        self.made: list[Inert] = []
        self.refused: dict[Global, None] = {}
        self.weights: dict[int, int] = {}
        self._kept: list[Any] = []
        self._tuples: dict[int, dict[int, int]] = {}
        self._scattered: dict[int, int] = {}
        self._probes_left = _MOST_PROBES + _PROBES_PER_BYTE * len(data)

    def judge(self, value: Any) -> None:
        """Refuse the pickle, of which `value` was made, for all that it names and is not accepted.

        Raises:
            UnsafePickleError: lists the names, and those that are used as nobody uses them.
        """
        judge(self.refused, self.made, value, self.path)

    def judge_names(self) -> None:
        """Refuse a pickle that was not read to its end for its names: they say more than where it breaks off.

        Raises:
            UnsafePickleError: lists the names.
        """
        judge(self.refused, (), None, self.path)

    def weigh(self, value: Any, num_bytes: int) -> None:
        """Remember how much work it is to walk over a long text or number: a pickle can refer to it many times."""
        if num_bytes >= LONG_BYTES:
            self.weights[id(value)] = num_bytes // _BYTES_OF_AN_OBJECT
            self._kept.append(value)  # so that nothing else is ever called by its identity

    def count_tuple(self, target: dict[Any, Any], key: tuple[Any, ...]) -> None:
        """Count how many tuples that are keys of a dict have the same hash.

        Raises:
            ValueError: they were made to.
        """
        hashes = self._tuples.setdefault(id(target), {})
        hashes[hash(key)] = count = hashes.get(hash(key), 0) + 1
        if count > _MAX_COLLISIONS:
            raise ValueError(f"{count} keys of a dict are tuples with the same hash")

    def count_key(self, target: dict[Any, Any], key: Any) -> None:
        """Count how many places a dict may have to look at for a key whose hash a file can choose.

        Numbers that follow each other from 0, as optimizers number parameters, have places of their own: a dict has
        at least 1.5 places for a key. Other numbers, and tuples of them, can be made to meet all the keys before.

        Raises:
            ValueError: more than is in proportion to the pickle.
        """
        if isinstance(key, tuple):
            self.count_tuple(target, key)
        elif not isinstance(key, int | float):
            return
        scattered = self._scattered.get(id(target), 0)
        if isinstance(key, int) and 0 <= key < len(target) * 3 // 2 + _NEAR:
            self._probes_left -= min(scattered, len(target))
        else:
            if not scattered:
                self._kept.append(target)  # so that no other dict is ever called by its identity
            self._scattered[id(target)] = scattered + 1
            self._probes_left -= len(target)
        if self._probes_left < 0:
            raise ValueError(f"a dict of {len(target)} keys has too many that are scattered numbers")

    def run(self) -> Any:
        """Most opcodes of a large pickle are handled here: a call for each would double the time."""
        data, table, stack, memo, position = self.data, TABLE, self.stack, self.memo, 0
        apart = memo.apart
        try:
            while True:  # with a condition here, CPython 3.11 would not specialize the loop of one long run
                opcode = data[position]
                position += 1
                if opcode == 0x94 and not apart:  # MEMOIZE
                    memo[len(memo)] = stack[-1]
                elif opcode == 0x6A:  # LONG_BINGET
                    stack.append(memo[_UINT4.unpack_from(data, position)[0]])
                    position += 4
                elif opcode == 0x68:  # BINGET
                    stack.append(memo[data[position]])
                    position += 1
                elif opcode == 0x4B:  # BININT1
                    stack.append(data[position])
                    position += 1
                elif opcode == 0x4D:  # BININT2
                    stack.append(_UINT2.unpack_from(data, position)[0])
                    position += 2
                elif (operation := table[opcode]) is not None:
                    self.position = position
                    operation(self)
                    position = self.position
                elif opcode == 0x2E:  # STOP
                    break
                else:
                    raise self.unwanted(opcode, position - 1)
        finally:
            self.position = max(self.position, position)
        value = stack.pop()
        if stack:
            raise ValueError(f"{len(stack)} objects are left on the stack")
        return value

    def unwanted(self, opcode: int, position: int) -> UnsafePickleError:
        """The error for an opcode that data does not need."""
        return UnsafePickleError(
            f"pickle opcode {bytes([opcode])!r} at byte {position} is not used for plain data",
            path=self.path,
            hint="the file was not written by torch.save from plain data, or was tampered with",
        )

    def take(self, count: int) -> bytes:
        """The next bytes."""
        start, end = self.position, self.position + count
        if count < 0 or end > len(self.data):
            raise ValueError(f"{count} bytes are announced, {len(self.data) - start} are left")
        self.position = end
        return self.data[start:end]

    def uint(self, count: int) -> int:
        """The next bytes, as a number."""
        return int.from_bytes(self.take(count), "little")

    def integer(self, count: int) -> int:
        """The next bytes, as a signed number."""
        if count > _MAX_INTEGER_BYTES:
            raise ValueError(f"an integer of {count} bytes: at most {_MAX_INTEGER_BYTES} are read")
        value = int.from_bytes(self.take(count), "little", signed=True)
        self.weigh(value, count)
        return value

    def text(self, width: int) -> str:
        """A text, behind a length of `width` bytes."""
        count = self.uint(width)
        value = self.take(count).decode("utf-8", "surrogatepass")
        if count >= LONG_BYTES:
            self.weigh(value, count)
        return value

    def content(self, width: int) -> bytes:
        """Bytes, behind a length of `width` bytes."""
        count = self.uint(width)
        value = self.take(count)
        self.weigh(value, count)
        return value

    def line(self) -> str:
        """Up to the next end of a line."""
        end = self.data.index(b"\n", self.position)
        text = self.data[self.position : end].decode("utf-8")
        self.position = end + 1
        return text

    def since_mark(self) -> list[Any]:
        """Take everything down to the mark, and the mark."""
        stack = self.stack
        for index in range(len(stack) - 1, -1, -1):
            if stack[index] is MARK:
                items = stack[index + 1 :]
                del stack[index:]
                return items
        raise ValueError("no mark on the stack")

    def apply(self, kind: str, target: Any, args: Any) -> Any:
        """What the pickle calls, as data or as a recipe."""
        if not isinstance(target, Global):
            raise UnsafePickleError(f"it calls a {type(target).__name__}, not a name", path=self.path)
        if not isinstance(args, tuple):
            raise ValueError(f"arguments of {target} are a {type(args).__name__}")
        known = self.rebuild(target, args)
        made = Inert(kind, target, args)
        if known is NotImplemented or target.name == WITH_ATTRIBUTES.name:
            self.made.append(made)
        return made if known is NotImplemented else known


def _check_key(key: Any) -> Any:
    """Only keys whose hash takes constant time: a tuple of tuples can take 2**depth."""
    kind = type(key)
    if kind is Inert or (kind is str and len(key) <= _MAX_KEY_CHARACTERS):  # an Inert hashes by identity
        return key
    if isinstance(key, str | bytes):
        if len(key) > _MAX_KEY_CHARACTERS:
            raise ValueError(f"a key of {len(key)} characters: at most {_MAX_KEY_CHARACTERS} are read")
    elif isinstance(key, tuple):
        if len(key) > _MAX_KEY_PARTS:
            raise ValueError(f"a key is a tuple of {len(key)} parts: at most {_MAX_KEY_PARTS} are read")
        for part in key:
            if not isinstance(part, _SCALARS):
                raise ValueError("a key is a tuple of something other than scalars")
            _check_key(part)
    elif isinstance(key, int) and key.bit_length() > _MAX_KEY_BITS:
        raise ValueError(f"a key is an integer of {key.bit_length()} bits")
    elif not isinstance(key, (*_SCALARS, Global, Inert)):
        raise ValueError(f"a key is a {type(key).__name__}")
    return key


def set_items(machine: Machine, pairs: list[Any]) -> None:
    """Put keys and values, in turn, into the dict on top of the stack."""
    if len(pairs) % 2:
        raise ValueError("a key without a value")
    target = machine.stack[-1]
    if isinstance(target, dict):
        for index in range(0, len(pairs), 2):
            key = _check_key(pairs[index])
            if type(key) is not str:
                machine.count_key(target, key)
            target[key] = pairs[index + 1]
    elif isinstance(target, Inert):
        target.pairs += [(_check_key(pairs[index]), pairs[index + 1]) for index in range(0, len(pairs), 2)]
    else:
        raise ValueError(f"items are set on a {type(target).__name__}")


def append(machine: Machine, items: list[Any]) -> None:
    """Put items at the end of the list on top of the stack."""
    target = machine.stack[-1]
    if isinstance(target, list):
        target.extend(items)
    elif isinstance(target, Inert):
        target.items += items
    else:
        raise ValueError(f"items are appended to a {type(target).__name__}")


def _build(machine: Machine) -> None:
    state = machine.stack.pop()
    target = machine.stack[-1]
    if not isinstance(target, Inert | StatefulDict):
        raise ValueError(f"a state is set on a {type(target).__name__}")
    if target.state is not None:
        raise ValueError(f"a second state is set on a {type(target).__name__}")
    target.state = state
    if isinstance(target, StatefulDict):
        machine.made.append(Inert("reduce", ORDERED_DICT, (), state))


def _pop_item(machine: Machine) -> None:
    value = machine.stack.pop()
    append(machine, [value])


def _pop_pair(machine: Machine) -> None:
    value = machine.stack.pop()
    key = machine.stack.pop()
    set_items(machine, [key, value])


def _name(machine: Machine, module: str, name: str) -> None:
    """Push a name; one that is not accepted is refused when all is read (`Machine.judge`)."""
    if len(module) + len(name) > _MAX_NAME:
        raise ValueError(f"a name of {len(module) + len(name)} characters")
    found = Global(module, name)
    if not is_accepted(found):
        machine.refused[found] = None
    machine.stack.append(found)


def _global(machine: Machine) -> None:
    module = machine.line()
    _name(machine, module, machine.line())


def _stack_global(machine: Machine) -> None:
    name, module = machine.stack.pop(), machine.stack.pop()
    if not isinstance(name, str) or not isinstance(module, str):
        raise ValueError("a name is not a string")
    _name(machine, module, name)


def _reduce(machine: Machine) -> None:
    args = machine.stack.pop()
    machine.stack.append(machine.apply("reduce", machine.stack.pop(), args))


def _new_object(machine: Machine) -> None:
    args = machine.stack.pop()
    machine.stack.append(machine.apply("new", machine.stack.pop(), args))


def _persistent(machine: Machine) -> None:
    machine.stack.append(machine.persistent_load(machine.stack.pop()))


def _tuple_of(count: int) -> Callable[[Machine], None]:
    def operation(machine: Machine) -> None:
        stack = machine.stack
        found = tuple(stack[-count:])
        if len(found) < count or MARK in found:
            raise ValueError("a tuple reaches over the mark")
        del stack[-count:]
        stack.append(found)

    return operation


def _put(width: int) -> Callable[[Machine], None]:
    def operation(machine: Machine) -> None:
        machine.memo.put(machine.uint(width), machine.stack[-1])

    return operation


def _memoize(machine: Machine) -> None:
    machine.memo.put(machine.memo.count, machine.stack[-1])


def _push(read: Callable[[Machine], Any]) -> Callable[[Machine], None]:
    return lambda machine: machine.stack.append(read(machine))


def _protocol(machine: Machine) -> None:
    found = machine.uint(1)
    if not 2 <= found <= 5:
        raise ValueError(f"pickle protocol {found}: expected 2 to 5")


TABLE: list[Callable[[Machine], None] | None] = [None] * 256
"""What each opcode does, but for those that `Machine.run` does itself."""
for _code, _operation in {
    b"\x80": _protocol,
    b"\x95": lambda m: m.take(8) and None,  # FRAME: a hint about buffering
    b"(": lambda m: m.stack.append(MARK),
    b"0": lambda m: m.stack.pop() and None,
    b"1": lambda m: m.since_mark() and None,
    b"2": lambda m: m.stack.append(m.stack[-1]),
    b"N": _push(lambda m: None),
    b"\x88": _push(lambda m: True),
    b"\x89": _push(lambda m: False),
    b"J": _push(lambda m: m.integer(4)),
    b"\x8a": _push(lambda m: m.integer(m.uint(1))),
    b"\x8b": _push(lambda m: m.integer(m.uint(4))),
    b"G": _push(lambda m: struct.unpack(">d", m.take(8))[0]),
    b"X": _push(lambda m: m.text(4)),
    b"\x8c": _push(lambda m: m.text(1)),
    b"\x8d": _push(lambda m: m.text(8)),
    b"B": _push(lambda m: m.content(4)),
    b"C": _push(lambda m: m.content(1)),
    b"\x8e": _push(lambda m: m.content(8)),
    b")": _push(lambda m: ()),
    b"t": lambda m: m.stack.append(tuple(m.since_mark())),
    b"\x85": _tuple_of(1),
    b"\x86": _tuple_of(2),
    b"\x87": _tuple_of(3),
    b"]": _push(lambda m: []),
    b"a": _pop_item,
    b"e": lambda m: append(m, m.since_mark()),
    b"}": _push(lambda m: {}),
    b"s": _pop_pair,
    b"u": lambda m: set_items(m, m.since_mark()),
    b"q": _put(1),
    b"r": _put(4),
    b"\x94": _memoize,
    b"c": _global,
    b"\x93": _stack_global,
    b"R": _reduce,
    b"\x81": _new_object,
    b"b": _build,
    b"Q": _persistent,
}.items():
    TABLE[_code[0]] = _operation


def rebuild_containers(target: Global, args: tuple[Any, ...]) -> Any:
    """The containers that pickles build by a call: OrderedDict and torch.Size; NotImplemented for all else."""
    name = target.name
    if name == "Size" and target.module == "torch" and len(args) == 1 and isinstance(args[0], tuple | list):
        if len(args[0]) > MAX_DIMS:  # every call makes a copy
            raise ValueError(f"a torch.Size of {len(args[0])} dims: at most {MAX_DIMS} are read")
        for size in args[0]:
            if type(size) is not int or size < 0:
                raise ValueError(f"a torch.Size of {brief(args[0])}")
        return Size(args[0])
    if name == "OrderedDict" and target.module == "collections" and not args:
        return StatefulDict()
    return NotImplemented
