"""Damage with knowledge of the structure. Every function draws all its decisions from one `random.Random`."""

from __future__ import annotations

import copy
import itertools
import json
import pickletools
import struct
import zlib
from collections.abc import Callable
from random import Random
from typing import Any

NUMBERS = (
    0, 1, 2, 3, 7, 8, 63, 64, 65, 127, 128, 255, 256, 32767, 32768, 65535, 65536,
    2**31 - 1, 2**31, 2**32 - 2, 2**32 - 1, 2**32, 2**53, 2**62, 2**63 - 1, 2**63, 2**64 - 1,
)  # fmt: skip
"""Numbers at the limits of fixed-width arithmetic."""

NAMES = (
    "", ".", "..", "/", "../x", "/etc/passwd", "a/../../b", "a\0b", "\ud800", "x" * 300, "x/" * 40 + "x", "data.pkl",
    "COMMIT.json", "\n", "weight", "archive/data.pkl", "é", "a//b", "./a", "-", "~",
)  # fmt: skip

VALUES: tuple[Any, ...] = (
    None, True, False, 0, 1, -1, 2**31, 2**63, 2**64, 10**30, -(10**30), 0.5, 1e308, float("nan"), float("inf"), "",
    "x", "0", "-1", "deadbeef", "1" * 5000, [], {}, [None], [[]], {"": 0}, "\0", "\ud800", "../x",
)  # fmt: skip


def number(chance: Random, bits: int) -> int:
    """A number that fits so many bits, often a critical one."""
    if chance.random() < 0.8:
        return chance.choice(NUMBERS) & ((1 << bits) - 1)
    return chance.getrandbits(bits)


def flip(data: bytes, chance: Random) -> bytes:
    """One bit."""
    changed = bytearray(data)
    if changed:
        at = chance.randrange(len(changed))
        changed[at] ^= 1 << chance.randrange(8)
    return bytes(changed)


def splice(data: bytes, chance: Random) -> bytes:
    """Bytes changed, removed, doubled, moved, cut off or added."""
    changed = bytearray(data)
    for _ in range(chance.choice((1, 1, 1, 2, 4))):
        if not changed:
            break
        at, length = chance.randrange(len(changed)), chance.choice((1, 2, 4, 8, 16, 64))
        kind = chance.randrange(7)
        if kind == 0:
            changed[at] = chance.randrange(256)
        elif kind == 1:
            del changed[at : at + length]
        elif kind == 2:
            changed[at:at] = changed[at : at + length]
        elif kind == 3:
            del changed[at:]
        elif kind == 4:
            changed[at : at + length] = number(chance, 8 * min(length, 8)).to_bytes(min(length, 8), "little")
        elif kind == 5:
            other = chance.randrange(len(changed))
            changed[at : at + length], changed[other : other + length] = (
                changed[other : other + length],
                changed[at : at + length],
            )
        else:
            changed += bytes([chance.randrange(256)]) * length
    return bytes(changed)


_LOCAL, _CENTRAL, _END, _END64, _LOCATOR = b"PK\x03\x04", b"PK\x01\x02", b"PK\x05\x06", b"PK\x06\x06", b"PK\x06\x07"
ZIP_FIELDS: dict[bytes, tuple[tuple[int, int], ...]] = {
    _LOCAL: ((0, 4), (4, 2), (6, 2), (8, 2), (10, 2), (12, 2), (14, 4), (18, 4), (22, 4), (26, 2), (28, 2)),
    _CENTRAL: (
        (0, 4), (4, 2), (6, 2), (8, 2), (10, 2), (12, 2), (14, 2), (16, 4), (20, 4), (24, 4), (28, 2), (30, 2), (32, 2),
        (34, 2), (36, 2), (38, 4), (42, 4),
    ),
    _END: ((0, 4), (4, 2), (6, 2), (8, 2), (10, 2), (12, 4), (16, 4), (20, 2)),
    _END64: ((0, 4), (4, 8), (12, 2), (14, 2), (16, 4), (20, 4), (24, 8), (32, 8), (40, 8), (48, 8)),
    _LOCATOR: ((0, 4), (4, 4), (8, 8), (16, 4)),
}  # fmt: skip
"""(offset, bytes) of every field of every record of a zip file (APPNOTE 6.3.10, section 4.3), by signature."""


def zip_records(data: bytes) -> list[tuple[bytes, int]]:
    """(signature, position) of every record."""
    found = []
    for signature in ZIP_FIELDS:
        at = data.find(signature)
        while at >= 0:
            found.append((signature, at))
            at = data.find(signature, at + 1)
    return sorted(found, key=lambda record: record[1])


def zip_fields(data: bytes, chance: Random) -> bytes:
    """A few fields of a few records changed to critical or neighbouring numbers, or copied from another record."""
    changed, records = bytearray(data), zip_records(data)
    for _ in range(chance.choice((1, 1, 2, 3))):
        signature, at = chance.choice(records)
        offset, length = chance.choice(ZIP_FIELDS[signature])
        start = at + offset
        old = int.from_bytes(changed[start : start + length], "little")
        kind = chance.randrange(4)
        if kind == 0:
            value = old + chance.choice((-65, -64, -1, 1, 2, 64, 65, 4096))
        elif kind == 1:
            other = chance.choice([position for sign, position in records if sign == signature])
            value = int.from_bytes(changed[other + offset : other + offset + length], "little")
        else:
            value = number(chance, 8 * length)
        changed[start : start + length] = (value % (1 << (8 * length))).to_bytes(length, "little")
    if chance.random() < 0.15:
        return splice(bytes(changed), chance)
    return bytes(changed)


def replace_pickle(archive: bytes, old: bytes, new: bytes) -> bytes:
    """A `.pt` archive with another `data.pkl`, and checksums that fit."""
    out, directory = bytearray(), bytearray()
    count = 0
    for signature, at in zip_records(archive):
        if signature != _CENTRAL:
            continue
        fields = list(struct.unpack_from("<4s6H3I5H2I", archive, at))
        name = archive[at + 46 : at + 46 + fields[10]]
        header = fields[16]
        local = struct.unpack_from("<4s5H3I2H", archive, header)
        start = header + 30 + local[9] + local[10]
        payload = archive[start : start + fields[8]]
        if payload == old:
            payload = new
        padding = -(len(out) + 30 + len(name) + 4) % 64
        checksum = zlib.crc32(payload)
        position = len(out)
        out += struct.pack(
            "<4s5H3I2H", _LOCAL, 0, 0, 0, 0, 0, checksum, len(payload), len(payload), len(name), padding + 4
        )
        out += name + b"FB" + struct.pack("<H", padding) + b"Z" * padding + payload
        directory += struct.pack(
            "<4s6H3I5H2I",
            _CENTRAL, *(0,) * 6, checksum, len(payload), len(payload), len(name), *(0,) * 5, position,
        )  # fmt: skip
        directory += name
        count += 1
    end = struct.pack("<4s4H2IH", _END, 0, 0, count, count, len(directory), len(out), 0)
    return bytes(out + directory + end)


def pickle_ops(data: bytes) -> list[bytes]:
    """A pickle cut into its operations."""
    positions = [position for _, _, position in pickletools.genops(data)] + [len(data)]
    return [data[start:end] for start, end in itertools.pairwise(positions)]


def op(chance: Random) -> bytes:
    """One operation that data may contain, with an argument of its kind; or, rarely, any byte."""
    return _OPS[chance.randrange(len(_OPS))](chance)


def _text(chance: Random) -> bytes:
    text = chance.choice((*NAMES, "torch", "FloatStorage", "storage", "cpu", "0", "step")).encode(
        "utf-8", "surrogatepass"
    )
    return text[:200]


_GLOBALS = (
    "torch._utils _rebuild_tensor_v2", "torch._utils _rebuild_parameter", "torch Size", "collections OrderedDict",
    "torch FloatStorage", "torch._tensor _rebuild_from_type_v2", "os system", "builtins eval", "builtins set",
    "torch BFloat16Storage", "x y", "copyreg _reconstructor", "torch._utils _rebuild_tensor", "__builtin__ getattr",
)  # fmt: skip
_OPS: tuple[Callable[[Random], bytes], ...] = (
    *((lambda c, code=code: code) for code in (b"(", b"(", b"t", b"l", b"]", b"}", b")", b"u", b"e", b"s", b"a", b"R",
      b"Q", b"\x81", b"b", b"N", b"\x88", b"\x89", b"\x85", b"\x86", b"\x87", b"0", b"1", b"2", b"\x94", b"\x93",
      b".")),
    lambda c: b"K" + bytes([number(c, 8)]),
    lambda c: b"M" + number(c, 16).to_bytes(2, "little"),
    lambda c: b"J" + number(c, 32).to_bytes(4, "little"),
    lambda c: b"\x8a" + bytes([c.choice((0, 1, 4, 8, 9, 16, 255))]) + b"\xff" * c.choice((0, 1, 8, 255)),
    lambda c: b"\x8b" + number(c, 32).to_bytes(4, "little") + b"\x7f" * c.choice((0, 300)),
    lambda c: b"X" + (text := _text(c)) and b"X" + len(text := _text(c)).to_bytes(4, "little") + text,
    lambda c: b"X" + number(c, 32).to_bytes(4, "little") + _text(c),
    lambda c: b"\x8c" + bytes([len(text := _text(c))]) + text,
    lambda c: b"\x8d" + number(c, 64).to_bytes(8, "little"),
    lambda c: b"\x8e" + number(c, 64).to_bytes(8, "little"),
    lambda c: b"B" + number(c, 32).to_bytes(4, "little"),
    lambda c: b"G" + struct.pack(">d", c.choice((0.0, -1.5, float("nan"), float("inf"), 1e308))),
    lambda c: b"q" + bytes([c.randrange(4)]),
    lambda c: b"h" + bytes([c.randrange(4)]),
    lambda c: b"r" + number(c, 32).to_bytes(4, "little"),
    lambda c: b"j" + number(c, 32).to_bytes(4, "little"),
    lambda c: b"c" + "\n".join(c.choice(_GLOBALS).split()).encode() + b"\n",
    lambda c: b"\x80" + bytes([c.randrange(7)]),
    lambda c: b"\x95" + number(c, 64).to_bytes(8, "little"),
    lambda c: bytes([c.randrange(256)]),
)  # fmt: skip


def random_pickle(chance: Random) -> bytes:
    """Operations in no order, or chains that double or nest what they have."""
    body = b"".join(op(chance) for _ in range(chance.choice((3, 10, 40))))
    if chance.random() < 0.3:
        step = chance.choice(
            (b"2\x86", b"q\x00h\x00h\x00\x86", b"\x85", b"]2a", b"}2K\x01s", b"(2t", b"2\x87", b")R", b"\x85Q")
        )
        body += step * chance.choice((3, 40, 2000))
    return b"\x80\x02" + body + op(chance) + b"."


def pickle_edit(data: bytes, chance: Random) -> bytes:
    """Operations of a pickle removed, doubled, swapped, replaced, or with other arguments."""
    ops = pickle_ops(data)
    for _ in range(chance.choice((1, 1, 2, 5))):
        at, other = chance.randrange(len(ops)), chance.randrange(len(ops))
        kind = chance.randrange(7)
        if kind == 0:
            del ops[at]
        elif kind == 1:
            ops.insert(other, ops[at])
        elif kind == 2:
            ops[at], ops[other] = ops[other], ops[at]
        elif kind == 3:
            ops[at] = op(chance)
        elif kind == 4:
            ops.insert(at, op(chance))
        else:
            ops[at] = _other_argument(ops[at], chance)
        if not ops:
            return b"."
    return b"".join(ops)


def _other_argument(item: bytes, chance: Random) -> bytes:
    """The same operation with another number or text."""
    code = item[:1]
    width = {b"K": 1, b"M": 2, b"J": 4, b"h": 1, b"q": 1, b"r": 4, b"j": 4}.get(code)
    if width is not None:
        return code + number(chance, 8 * width).to_bytes(width, "little")
    if code == b"X":
        text = _text(chance)
        return code + len(text).to_bytes(4, "little") + text
    if code == b"G":
        return code + struct.pack(">d", chance.choice((0.0, -1.0, float("nan"), float("inf"))))
    if code == b"\x8a":
        raw = number(chance, 64).to_bytes(9, "little")
        return code + bytes([len(raw)]) + raw
    return op(chance) if chance.random() < 0.3 else item


def json_places(value: Any, found: list[tuple[Any, Any]]) -> list[tuple[Any, Any]]:
    """(container, key) of everything inside a JSON value."""
    if isinstance(value, dict | list):
        for key in list(value) if isinstance(value, dict) else range(len(value)):
            found.append((value, key))
            json_places(value[key], found)
    return found


def json_edit(text: bytes, chance: Random) -> bytes:
    """A JSON text with values removed, replaced, doubled or renamed, deeply nested, or damaged as text."""
    kind = chance.random()
    if kind < 0.15:
        return splice(text, chance)
    value = json.loads(text)
    for _ in range(chance.choice((1, 1, 2, 4))):
        places = json_places(value, [])
        if not places:
            break
        container, key = chance.choice(places)
        action = chance.randrange(5)
        if action == 0:
            del container[key]
        elif action == 1 and isinstance(container, dict):
            container[chance.choice(NAMES)] = container.pop(key)
        elif action == 2:
            _, _ = container, key
            other, name = chance.choice(places)
            container[key] = json.loads(
                json.dumps(other.get(name) if isinstance(other, dict) else (other or [None])[-1])
            )
        elif action == 3 and type(container[key]) is int:
            container[key] = chance.choice(NUMBERS) * chance.choice((1, 1, -1))
        else:
            # A copy: what one case does to it must not reach the next.
            container[key] = copy.deepcopy(chance.choice((*VALUES, *NAMES)))
    dumped = json.dumps(value, ensure_ascii=chance.random() < 0.5)
    if 0.15 <= kind < 0.2:
        depth = chance.choice((100, 2000, 100_000))
        dumped = dumped[:-1] + ', "deep": ' + "[" * depth + "]" * depth + "}"
    elif kind < 0.25:
        dumped = dumped.replace('"bytes":', '"bytes": 1e999, "bytes2":', 1)
    elif kind < 0.3:
        dumped = dumped.replace("1", "1" * chance.choice((10, 5000)), 1)
    return dumped.encode("utf-8", "surrogatepass")
