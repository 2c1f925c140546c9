"""A pickle machine that builds data and nothing else.

The unpickler of the standard library calls whatever a pickle names, and a short pickle can make its C version allocate
gigabytes. This machine knows the opcodes that torch.save and the standard pickler emit for data (protocols 2 to 5). It
calls no name, accepts only those of the allow list (`trust`), and turns their objects into `Inert` recipes. Time and
memory are linear in the pickle's length.
Source of the opcodes: Lib/pickletools.py of CPython 3.11.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any

from reshard.errors import ReshardError, UnsafePickleError
from reshard.formats.pt.extent import LimitError, check_key, check_tree_size, make_pickle_error
from reshard.formats.pt.objects import (
    ORDERED_DICT,
    WITH_ATTRIBUTES,
    Global,
    Inert,
    Size,
    StatefulDict,
    Tensor,
    abbreviate,
)
from reshard.formats.pt.trust import is_accepted, refuse_globals, trusting

MAX_PICKLE_BYTES = 256 << 20
"""A pickle of metadata is a few hundred bytes per tensor; a longer one is not metadata."""

_MAX_INTEGER_BYTES = 1 << 10  # longer ones take Python quadratic time to print
_MAX_COLLISIONS = 16  # a file can make the hashes of tuples collide: each is then compared with all the others
_MAX_PROBES = 1 << 26  # probes for keys that are numbers, in addition to those for each byte of the pickle
_PROBES_PER_BYTE = 64
_NEAR = 16
_MAX_NAME = 1 << 10
_OTHER_OPCODES = b"FIPSTUVdgilop\x82\x83\x84\x8f\x90\x91\x92\x96\x97\x98"  # of pickle protocols 0 to 5
MARK = object()
"""The object on the stack that represents a mark."""
_UINT2 = struct.Struct("<H")
_UINT4 = struct.Struct("<I")

MAX_DIMS = 64  # of a tensor

LONG_BYTES = 64
"""Texts and numbers of this many bytes or more count as several objects, each time that they occur."""

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
        UnsafePickleError: it is too large, has a name that is not accepted (`trust`), or an opcode not for data.
        CorruptSourceError: it is not a well-formed pickle.
    """
    if len(data) > MAX_PICKLE_BYTES:
        raise UnsafePickleError(f"its pickle has {len(data)} bytes: at most {MAX_PICKLE_BYTES} are read", path=path)
    machine = Machine(data, persistent_load, rebuild, path)
    try:
        value = machine.run()
    except ReshardError as error:
        machine.check_names(error)
        raise
    except (IndexError, struct.error, UnicodeDecodeError, TypeError, ValueError, KeyError, AttributeError) as error:
        broken = make_pickle_error(error, machine.position, path)
        machine.check_names(broken)
        raise broken from error
    check_tree_size(value, path, machine.weights)
    machine.check_globals(value)
    return value


class Memo(dict[int, Any]):
    """Objects by number; picklers count from 0.

    A number out of that order is stored in another dict, as a text. A file can choose numbers with colliding hashes,
    which would make each lookup compare all of them; it cannot choose the hash of a text.
    """

    def __init__(self) -> None:
        super().__init__()
        self.apart: dict[str, Any] = {}

    @property
    def count(self) -> int:
        """Number of objects that were memoized."""
        return len(self) + len(self.apart)

    def put(self, number: int, value: Any) -> None:
        """Store an object under a number."""
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
        self._probes_left = _MAX_PROBES + _PROBES_PER_BYTE * len(data)

    def check_globals(self, value: Any) -> None:
        """Refuse the pickle of `value` for globals that are not accepted, or are used in an unknown way.

        Raises:
            UnsafePickleError: lists the globals.
        """
        refuse_globals(self.refused, self.made, value, self.path)

    def check_names(self, reason: ReshardError) -> None:
        """Refuse a pickle that was not read to its end for its globals, which tell more than where it breaks off.

        Raises:
            UnsafePickleError: lists the globals that are not accepted, and none to allow, because of `reason`.
        """
        found: list[UnsafePickleError] = []
        with trusting((), found):
            refuse_globals(self.refused, (), None, self.path)
        for error in found:
            if error.to_allow:
                error.to_allow, error.hint = (), "save the checkpoint again as plain data"
            error.problems += (f"and not read to its end: {reason.message}",)
            raise error

    def weigh(self, value: Any, num_bytes: int) -> None:
        """Store how many objects a long text or number counts as: a pickle can refer to it many times."""
        if num_bytes >= LONG_BYTES:
            self.weights[id(value)] = num_bytes // _BYTES_OF_AN_OBJECT
            self._kept.append(value)  # so that no other object gets its identity

    def count_tuple(self, target: dict[Any, Any], key: tuple[Any, ...]) -> None:
        """Count the tuples with the same hash that are keys of a dict.

        Raises:
            LimitError: there are more than chance explains.
        """
        hashes = self._tuples.setdefault(id(target), {})
        hashes[hash(key)] = count = hashes.get(hash(key), 0) + 1
        if count > _MAX_COLLISIONS:
            raise LimitError(f"{count} keys of a dict are tuples with the same hash")

    def count_key(self, target: dict[Any, Any], key: Any) -> None:
        """Count the places that a dict may have to probe for a key whose hash a file can choose.

        Numbers that follow each other from 0, as optimizers number parameters, have places of their own: a dict has
        at least 1.5 places for a key. Other numbers, and tuples of them, can be made to meet all the keys before.

        Raises:
            LimitError: there are too many for the length of the pickle.
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
                self._kept.append(target)  # so that no other dict gets its identity
            self._scattered[id(target)] = scattered + 1
            self._probes_left -= len(target)
        if self._probes_left < 0:
            raise LimitError(f"a dict of {len(target)} keys has too many that are scattered numbers")

    def run(self) -> Any:
        """Run the pickle to its end and return the object that it leaves.

        Frequent opcodes are handled in the loop: a call for each would double the time.
        """
        data, table, stack, memo, position = self.data, TABLE, self.stack, self.memo, 0
        apart = memo.apart
        try:
            while True:  # CPython 3.11 does not specialize a loop with a condition that is entered only once
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
                    raise self.make_opcode_error(opcode, position - 1)
        finally:
            self.position = max(self.position, position)
        value = stack.pop()
        if stack:
            raise ValueError(f"{len(stack)} objects are left on the stack")
        return value

    def make_opcode_error(self, opcode: int, position: int) -> Exception:
        """Create the error for an opcode that data does not need, or for a byte that is no opcode."""
        if opcode not in _OTHER_OPCODES:
            return ValueError(f"{bytes([opcode])!r} is no opcode")
        return UnsafePickleError(
            f"pickle opcode {bytes([opcode])!r} at byte {position} is not used for plain data",
            path=self.path,
            hint="the file was not written by torch.save from plain data, or was tampered with",
        )

    def take(self, count: int) -> bytes:
        """Return the next `count` bytes and move behind them."""
        start, end = self.position, self.position + count
        if count < 0 or end > len(self.data):
            raise ValueError(f"{count} bytes are announced, {len(self.data) - start} are left")
        self.position = end
        return self.data[start:end]

    def uint(self, count: int) -> int:
        """Read an unsigned integer of `count` bytes."""
        return int.from_bytes(self.take(count), "little")

    def integer(self, count: int) -> int:
        """Read a signed integer of `count` bytes."""
        if count > _MAX_INTEGER_BYTES:
            raise LimitError(f"an integer of {count} bytes: at most {_MAX_INTEGER_BYTES} are read")
        value = int.from_bytes(self.take(count), "little", signed=True)
        self.weigh(value, count)
        return value

    def text(self, width: int) -> str:
        """Read a text after its length, which has `width` bytes."""
        count = self.uint(width)
        value = self.take(count).decode("utf-8", "surrogatepass")
        if count >= LONG_BYTES:
            self.weigh(value, count)
        return value

    def content(self, width: int) -> bytes:
        """Read bytes after their length, which has `width` bytes."""
        count = self.uint(width)
        value = self.take(count)
        self.weigh(value, count)
        return value

    def line(self) -> str:
        """Read a text up to the next end of a line."""
        end = self.data.index(b"\n", self.position)
        text = self.data[self.position : end].decode("utf-8")
        self.position = end + 1
        return text

    def pop_to_mark(self) -> list[Any]:
        """Pop everything above the last mark, and the mark; return what was above it."""
        stack = self.stack
        for index in range(len(stack) - 1, -1, -1):
            if stack[index] is MARK:
                items = stack[index + 1 :]
                del stack[index:]
                return items
        raise ValueError("no mark on the stack")

    def apply(self, kind: str, target: Any, args: Any) -> Any:
        """Turn a call of the pickle into data, or into a recipe."""
        if not isinstance(target, Global):
            raise (LimitError if isinstance(target, Inert) else ValueError)(
                f"it calls a {type(target).__name__}, not a name"
            )
        if not isinstance(args, tuple):
            raise ValueError(f"arguments of {target} are a {type(args).__name__}")
        known = self.rebuild(target, args)
        made = Inert(kind, target, args)
        if known is NotImplemented or target.name == WITH_ATTRIBUTES.name:
            self.made.append(made)
        return made if known is NotImplemented else known


def set_items(machine: Machine, pairs: list[Any]) -> None:
    """Set the alternating keys and values of `pairs` in the dict on top of the stack."""
    if len(pairs) % 2:
        raise ValueError("a key without a value")
    target = machine.stack[-1]
    if isinstance(target, dict):
        for index in range(0, len(pairs), 2):
            key = check_key(pairs[index])
            if type(key) is not str:
                machine.count_key(target, key)
            target[key] = pairs[index + 1]
    elif isinstance(target, Inert):
        target.pairs += [(check_key(pairs[index]), pairs[index + 1]) for index in range(0, len(pairs), 2)]
    else:
        raise ValueError(f"items are set on a {type(target).__name__}")


def append_items(machine: Machine, items: list[Any]) -> None:
    """Append items to the list on top of the stack."""
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
        is_tensor = isinstance(target, Tensor)  # of a subclass with attributes
        raise (LimitError if is_tensor else ValueError)(f"a state is set on a {type(target).__name__}")
    if target.state is not None:
        raise ValueError(f"a second state is set on a {type(target).__name__}")
    target.state = state
    if isinstance(target, StatefulDict):
        machine.made.append(Inert("reduce", ORDERED_DICT, (), state))


def _append_one(machine: Machine) -> None:
    value = machine.stack.pop()
    append_items(machine, [value])


def _set_one(machine: Machine) -> None:
    value = machine.stack.pop()
    key = machine.stack.pop()
    set_items(machine, [key, value])


def _push_global(machine: Machine, module: str, name: str) -> None:
    """Push a global; one that is not accepted is refused when the pickle is read (`Machine.check_globals`)."""
    if len(module) + len(name) > _MAX_NAME:
        raise LimitError(f"a name of {len(module) + len(name)} characters")
    target = Global(module, name)
    if not is_accepted(target):
        machine.refused[target] = None
    machine.stack.append(target)


def _read_global(machine: Machine) -> None:
    module = machine.line()
    _push_global(machine, module, machine.line())


def _pop_global(machine: Machine) -> None:
    name, module = machine.stack.pop(), machine.stack.pop()
    if not isinstance(name, str) or not isinstance(module, str):
        raise ValueError("a name is not a string")
    _push_global(machine, module, name)


def _reduce(machine: Machine) -> None:
    args = machine.stack.pop()
    machine.stack.append(machine.apply("reduce", machine.stack.pop(), args))


def _new_object(machine: Machine) -> None:
    args = machine.stack.pop()
    machine.stack.append(machine.apply("new", machine.stack.pop(), args))


def _load_persistent(machine: Machine) -> None:
    machine.stack.append(machine.persistent_load(machine.stack.pop()))


def _make_tuple(count: int) -> Callable[[Machine], None]:
    def operation(machine: Machine) -> None:
        stack = machine.stack
        found = tuple(stack[-count:])
        if len(found) < count or MARK in found:
            raise ValueError("a tuple reaches over the mark")
        del stack[-count:]
        stack.append(found)

    return operation


def _make_put(width: int) -> Callable[[Machine], None]:
    def operation(machine: Machine) -> None:
        machine.memo.put(machine.uint(width), machine.stack[-1])

    return operation


def _memoize(machine: Machine) -> None:
    machine.memo.put(machine.memo.count, machine.stack[-1])


def _make_push(read: Callable[[Machine], Any]) -> Callable[[Machine], None]:
    return lambda machine: machine.stack.append(read(machine))


def _check_protocol(machine: Machine) -> None:
    protocol = machine.uint(1)
    if not 2 <= protocol <= 5:
        raise LimitError(f"pickle protocol {protocol}: expected 2 to 5")


TABLE: list[Callable[[Machine], None] | None] = [None] * 256
"""Operation of each opcode, but for those that `Machine.run` handles itself."""
for _code, _operation in {
    b"\x80": _check_protocol,
    b"\x95": lambda m: m.take(8) and None,  # FRAME: a hint about buffering
    b"(": lambda m: m.stack.append(MARK),
    b"0": lambda m: m.stack.pop() and None,
    b"1": lambda m: m.pop_to_mark() and None,
    b"2": lambda m: m.stack.append(m.stack[-1]),
    b"N": _make_push(lambda m: None),
    b"\x88": _make_push(lambda m: True),
    b"\x89": _make_push(lambda m: False),
    b"J": _make_push(lambda m: m.integer(4)),
    b"\x8a": _make_push(lambda m: m.integer(m.uint(1))),
    b"\x8b": _make_push(lambda m: m.integer(m.uint(4))),
    b"G": _make_push(lambda m: struct.unpack(">d", m.take(8))[0]),
    b"X": _make_push(lambda m: m.text(4)),
    b"\x8c": _make_push(lambda m: m.text(1)),
    b"\x8d": _make_push(lambda m: m.text(8)),
    b"B": _make_push(lambda m: m.content(4)),
    b"C": _make_push(lambda m: m.content(1)),
    b"\x8e": _make_push(lambda m: m.content(8)),
    b")": _make_push(lambda m: ()),
    b"t": lambda m: m.stack.append(tuple(m.pop_to_mark())),
    b"\x85": _make_tuple(1),
    b"\x86": _make_tuple(2),
    b"\x87": _make_tuple(3),
    b"]": _make_push(lambda m: []),
    b"a": _append_one,
    b"e": lambda m: append_items(m, m.pop_to_mark()),
    b"}": _make_push(lambda m: {}),
    b"s": _set_one,
    b"u": lambda m: set_items(m, m.pop_to_mark()),
    b"q": _make_put(1),
    b"r": _make_put(4),
    b"\x94": _memoize,
    b"c": _read_global,
    b"\x93": _pop_global,
    b"R": _reduce,
    b"\x81": _new_object,
    b"b": _build,
    b"Q": _load_persistent,
}.items():
    TABLE[_code[0]] = _operation


def rebuild_containers(target: Global, args: tuple[Any, ...]) -> Any:
    """Build an OrderedDict or a torch.Size, which pickles make by a call; return NotImplemented for any other call."""
    name = target.name
    if name == "Size" and target.module == "torch" and len(args) == 1 and isinstance(args[0], tuple | list):
        if len(args[0]) > MAX_DIMS:  # every call makes a copy
            raise LimitError(f"a torch.Size of {len(args[0])} dims: at most {MAX_DIMS} are read")
        for size in args[0]:
            if type(size) is not int or size < 0:
                raise ValueError(f"a torch.Size of {abbreviate(args[0])}")
        return Size(args[0])
    if name == "OrderedDict" and target.module == "collections" and not args:
        return StatefulDict()
    return NotImplemented
