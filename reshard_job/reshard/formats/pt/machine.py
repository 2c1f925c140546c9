"""A pickle machine that builds data and nothing else.

The machine of the standard library calls whatever a pickle names, and its C form can be made to allocate gigabytes by
a short pickle. This one knows the opcodes that torch.save and the standard pickler emit for data (protocols 2 to 5),
calls no name at all, and turns unknown classes into `Inert` recipes. Time and memory are linear in the pickle's length.
Source of the opcodes: Lib/pickletools.py of CPython 3.11.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any

from reshard.errors import CorruptSourceError, UnsafePickleError
from reshard.formats.pt.extent import check_extent
from reshard.formats.pt.objects import Global, Inert, Size, StatefulDict, brief

MAX_PICKLE_BYTES = 256 << 20
"""A pickle of metadata is a few hundred bytes per tensor; a longer one is not metadata."""

_MAX_INTEGER_BYTES = 1 << 10  # longer ones take Python quadratic time to print
_MAX_KEY_BITS = 60  # integers up to 2**61 - 1 differ in their hashes; larger ones can be made to collide
_MAX_NAME = 1 << 10
MARK = object()
"""What stands on the stack for a mark."""
_UINT2 = struct.Struct("<H")
_UINT4 = struct.Struct("<I")
_SCALARS = (str, int, float, bool, bytes, type(None))

_SAFE_BUILTINS = frozenset(
    [
        "bool",
        "bytearray",
        "bytes",
        "complex",
        "dict",
        "float",
        "frozenset",
        "int",
        "list",
        "object",
        "range",
        "set",
        "slice",
        "str",
        "tuple",
    ]
)
_BUILTINS = frozenset(("builtins", "__builtin__"))
_FORBIDDEN = frozenset(
    [
        "_pickle",
        "asyncio",
        "code",
        "codeop",
        "commands",
        "ctypes",
        "gc",
        "importlib",
        "inspect",
        "io",
        "marshal",
        "multiprocessing",
        "nt",
        "operator",
        "os",
        "pdb",
        "pickle",
        "pip",
        "pkgutil",
        "platform",
        "posix",
        "pty",
        "pydoc",
        "runpy",
        "shutil",
        "signal",
        "site",
        "socket",
        "ssl",
        "subprocess",
        "sys",
        "tempfile",
        "threading",
        "timeit",
        "types",
        "urllib",
        "webbrowser",
        "zipimport",
    ]
)
"""Modules that checkpoints have no use for. Nothing of them would run here, but it would in who loads the target."""

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
        UnsafePickleError: an opcode that data does not need, or too large.
        CorruptSourceError: not a well-formed pickle.
    """
    if len(data) > MAX_PICKLE_BYTES:
        raise UnsafePickleError(f"its pickle has {len(data)} bytes: at most {MAX_PICKLE_BYTES} are read", path=path)
    machine = Machine(data, persistent_load, rebuild, path)
    try:
        value = machine.run()
    except (IndexError, struct.error, UnicodeDecodeError, TypeError, ValueError, KeyError, AttributeError) as error:
        raise CorruptSourceError(
            f"broken pickle at byte {machine.position}: {type(error).__name__}: {error!s:.300}", path=path
        ) from error
    check_extent(value, path)
    return value


class Machine:
    """Stack, memo and position of one run."""

    def __init__(self, data: bytes, persistent_load: PersistentLoad, rebuild: Rebuild, path: str) -> None:
        self.data = data
        self.position = 0
        self.stack: list[Any] = []
        self.memo: dict[int, Any] = {}
        self.persistent_load = persistent_load
        self.rebuild = rebuild
        self.path = path

    def run(self) -> Any:
        """Most opcodes of a large pickle are handled here: a call for each would double the time."""
        data, table, stack, memo, position = self.data, TABLE, self.stack, self.memo, 0
        try:
            while True:  # with a condition here, CPython 3.11 would not specialize the loop of one long run
                opcode = data[position]
                position += 1
                if opcode == 0x94:  # MEMOIZE
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
        return int.from_bytes(self.take(count), "little", signed=True)

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
        return Inert(kind, target, args) if known is NotImplemented else known


def _check_key(key: Any) -> Any:
    """Only keys whose hash takes constant time: a tuple of tuples can take 2**depth."""
    if type(key) is str or type(key) is Inert:  # an Inert hashes by identity
        return key
    if isinstance(key, tuple):
        for part in key:
            if not isinstance(part, _SCALARS):
                raise ValueError("a key is a tuple of something other than scalars")
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
            target[_check_key(pairs[index])] = pairs[index + 1]
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
    target.state = state


def _pop_item(machine: Machine) -> None:
    value = machine.stack.pop()
    append(machine, [value])


def _pop_pair(machine: Machine) -> None:
    value = machine.stack.pop()
    key = machine.stack.pop()
    set_items(machine, [key, value])


def _name(machine: Machine, module: str, name: str) -> None:
    """Push a name; refuse those that only serve to break out."""
    if len(module) + len(name) > _MAX_NAME:
        raise ValueError(f"a name of {len(module) + len(name)} characters")
    root = module.partition(".")[0]
    if root in _FORBIDDEN or (root in _BUILTINS and name not in _SAFE_BUILTINS):
        raise UnsafePickleError(
            f"its pickle names {module}.{name}, which no checkpoint has use for",
            path=machine.path,
            hint="do not load this file with anything: it was made to run code",
        )
    machine.stack.append(Global(module, name))


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
        machine.memo[machine.uint(width)] = machine.stack[-1]

    return operation


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
    b"X": _push(lambda m: m.take(m.uint(4)).decode("utf-8", "surrogatepass")),
    b"\x8c": _push(lambda m: m.take(m.uint(1)).decode("utf-8", "surrogatepass")),
    b"\x8d": _push(lambda m: m.take(m.uint(8)).decode("utf-8", "surrogatepass")),
    b"B": _push(lambda m: m.take(m.uint(4))),
    b"C": _push(lambda m: m.take(m.uint(1))),
    b"\x8e": _push(lambda m: m.take(m.uint(8))),
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
        for size in args[0]:
            if type(size) is not int or size < 0:
                raise ValueError(f"a torch.Size of {brief(args[0])}")
        return Size(args[0])
    if name == "OrderedDict" and target.module == "collections" and not args:
        return StatefulDict()
    return NotImplemented
