"""Pickles that were made to harm: none runs anything, hangs, or takes memory; each is refused by name."""

import os
import pickle
import resource
import struct
from collections.abc import Iterable
from pathlib import Path

import pytest

from reshard.errors import CorruptSourceError, ReshardError, UnsafePickleError, UnsupportedError
from reshard.formats import read_checkpoint
from reshard.formats.pt.archive import Entry
from reshard.formats.pt.reader import build, read
from tests.fuzz.guard import outcome_of
from tests.fuzz.mutate import replace_pickle
from tests.fuzz.targets import GOLDEN, STEP, pickle_of

ENTRIES = {"data/0": Entry(name="data/0", offset=64, num_bytes=64, crc32=1)}
START = b"\x80\x02"


def text(value: str) -> bytes:
    return b"X" + len(value.encode()).to_bytes(4, "little") + value.encode()


KEY, CPU = text("0"), text("cpu")


def storage(kind=b"ctorch\nFloatStorage\n", key=KEY, location=CPU, count=b"K\x10") -> bytes:
    return b"(" + text("storage") + kind + key + location + count + b"tQ"


def tensor(size: bytes, stride: bytes, offset: bytes = b"K\x00", more: bytes = b"") -> bytes:
    return b"ctorch._utils\n_rebuild_tensor_v2\n(" + storage() + offset + size + stride + b"\x89}" + more + b"tR"


def newer_tensor(more: bytes) -> bytes:
    """A tensor of a type without a class of storages."""
    arguments = storage(kind=b"ctorch\nUntypedStorage\n", count=b"K\x40") + b"K\x00K\x02\x85K\x01\x85\x89}"
    return b"ctorch._utils\n_rebuild_tensor_v3\n(" + arguments + b"ctorch\nuint16\n" + more + b"tR"


NEGATIVE = b"}" + text("neg") + b"\x88s"


def with_attributes(state: bytes) -> bytes:
    """A tensor as torch saves one that has attributes."""
    arguments = b"(" + storage() + b"K\x00K\x02\x85K\x01\x85\x89}t"
    names = b"ctorch._utils\n_rebuild_tensor_v2\nctorch\nTensor\n"
    return b"ctorch._tensor\n_rebuild_from_type_v2\n(" + names + arguments + state + b"tR"


ORDERED, NAMESPACE = b"ccollections\nOrderedDict\n)R", b"cargparse\nNamespace\n)\x81"


def integer(num_bytes: int) -> bytes:
    return b"\x8b" + num_bytes.to_bytes(4, "little") + b"\x7f" * num_bytes


LAUGHS = b"N\x85" + b"2\x86" * 40
"""Forty pairs, each of the one before twice: a tree of 2^40 leaves in 83 bytes."""
DEEP = b"N" + b"\x85" * 50_000
MANY = b"(" + b"2" * 100_000 + b"t"


def repeated(first: bytes, again: bytes, count: int) -> bytes:
    """A dict in which an object that was made once is used many times."""
    return START + b"}" + first + b"q\x00N" + b"s" + again * count + b"."


def colliding(count: int) -> list[tuple[int, ...]]:
    """Tuples of the same hash, which a file can hold: `hash` of tuples of numbers knows no secret.

    Source: tuplehash in Objects/tupleobject.c of CPython 3.11 (xxHash), solved for the last of three numbers.
    """
    prime1, prime2, prime5 = 11400714785074694791, 14029467366897019727, 2870177450012600261
    mask, found = (1 << 64) - 1, []

    def turned(value: int) -> int:
        return (value << 31 | value >> 33) & mask

    def mixed(*lanes: int) -> int:
        acc = prime5
        for lane in lanes:
            acc = turned((acc + lane * prime2) & mask) * prime1 & mask
        return acc

    wanted, inverse = mixed(1, 1), pow(prime2, -1, 1 << 64)
    before = wanted * pow(prime1, -1, 1 << 64) & mask
    before = (before >> 31 | before << 33) & mask
    for first in range(1_000_000):
        last = (before - mixed(first)) * inverse & mask
        if last < 1 << 60:
            found.append((first, last))
            if len(found) == count:
                return found
    return found


def as_pickle(pair: tuple[int, ...]) -> bytes:
    return b"".join(b"\x8a\x09" + number.to_bytes(9, "little") for number in pair) + b"\x86"


def chained(size: int) -> list[int]:
    """Numbers below 2^23 that meet in a dict of `size` places: half lie in one chain, the others begin to search there.

    Source: lookdict in Objects/dictobject.c of CPython 3.11: the next place is 5 times this, and 1, and the key's rest.
    """
    mask, at, order = size - 1, 1, []
    for _ in range(size):
        order.append(at)
        at = (5 * at + 1) & mask
    position = {place: number for number, place in enumerate(order)}
    end = size // 3 + 8
    keys, key = order[:end], size
    while len(keys) < size * 2 // 3 - 2:
        key += 1
        place, rest = key & mask, key
        while rest and position[place] < end:
            rest >>= 5
            place = (5 * place + rest + 1) & mask
        if rest == 0 and position[place] < end * 0.35:
            keys.append(key)
            end += 1
    return keys


def as_keys(numbers: Iterable[int]) -> bytes:
    return b"(" + b"".join(b"J" + number.to_bytes(4, "little") + b"N" for number in numbers) + b"u"


def with_gaps(count: int) -> bytes:
    """An optimizer's state in which the first 100 parameters, and every fifth, have none."""
    return START + b"}" + as_keys(at for at in range(100, count) if at % 5) + b"."


CHAINED = chained(1 << 16)
MANY_ZEROS = b"(" + b"K\x00" * 60_000 + b"t"
HARMLESS = {
    "an index of the memo that is huge": START + b"Nr\xff\xff\xff\xff.",
    "a frame that lies about its length": b"\x80\x04\x95" + b"\xff" * 8 + b"N.",
    "a tuple as a key of many dicts": START + b"K\x01K\x02\x86q\x000](" + b"}h\x00Ns" * 5_000 + b"e.",
    "many tuples as keys": START + b"}(" + b"".join(as_pickle((at, 7)) + b"N" for at in range(5_000)) + b"u.",
    "a text in many places": START + text("x" * 200) + b"q\x000](" + b"h\x00" * 5_000 + b"e.",
    "numbers of the memo that meet in a dict": (
        START + b"N" + b"".join(b"r" + number.to_bytes(4, "little") for number in CHAINED) + b"."
    ),
    "numbers of many parameters": START + b"}" + as_keys(range(100_000)) + b".",
    "numbers of many parameters, some of which have no state": with_gaps(100_000),
    "attributes of an ordered dict": START + ORDERED + b"}" + text("_metadata") + b"}sb.",
    "attributes of a tensor": START + with_attributes(b"}" + text("tensor_model_parallel") + b"\x88s") + b".",
    "a tensor with metadata that say nothing": START + tensor(b"K\x02\x85", b"K\x01\x85", more=b"}") + b".",
    "a newer tensor with metadata that say nothing": START + newer_tensor(b"}") + b".",
    "a tensor of a class and no attributes": START + with_attributes(b"N") + b".",
    "shared, but not much": START + b"N\x85" + b"2\x86" * 15 + b".",
}
REFUSED = {
    "billion laughs": (START + LAUGHS + b".", UnsafePickleError, r"unfold to 2\^41"),
    "billion laughs of lists": (START + b"]" + b"q\x000](h\x00h\x00e" * 60 + b".", UnsafePickleError, "unfold to"),
    "billion laughs as a persistent id": (START + LAUGHS + b"Q.", UnsupportedError, "is not a storage"),
    "billion laughs as a key": (START + b"}" + LAUGHS + b"Ns.", UnsafePickleError, "a key is a tuple"),
    "billion laughs as a size": (START + b"ctorch\nSize\n" + LAUGHS + b"R.", UnsafePickleError, "unfold"),
    "billion laughs as a storage's class": (START + storage(kind=LAUGHS) + b".", UnsupportedError, "storage class"),
    "billion laughs as a storage's key": (START + storage(key=LAUGHS) + b".", CorruptSourceError, "with key"),
    "billion laughs as a device": (START + storage(location=LAUGHS) + b".", CorruptSourceError, "at tuple"),
    "billion laughs as a count": (START + storage(count=LAUGHS) + b".", CorruptSourceError, "storage '0'"),
    "billion laughs as a shape": (START + tensor(LAUGHS, LAUGHS) + b".", CorruptSourceError, "tensor of size"),
    "billion laughs in an unknown object": (START + b"cx\ny\n" + LAUGHS + b"R.", UnsafePickleError, "unfold"),
    "deep": (START + DEEP + b".", UnsafePickleError, "more than 100 levels deep"),
    "deep as a persistent id": (START + DEEP + b"Q.", UnsupportedError, "is not a storage"),
    "deep in a state": (START + b"cx\ny\n)R" + DEEP + b"b.", UnsafePickleError, "levels deep"),
    "a list that holds itself": (START + b"]q\x00h\x00a.", UnsafePickleError, "a list that contains itself"),
    "a dict that holds itself": (START + b"}q\x00K\x01h\x00s.", UnsafePickleError, "a dict that contains itself"),
    "an object that holds itself": (START + b"cx\ny\n)Rq\x00h\x00b.", UnsafePickleError, "contains itself"),
    "one long tuple as a key again and again": (repeated(MANY_ZEROS, b"h\x00Ns", 12_000), UnsafePickleError,
                                                "a key is a tuple of 60000 parts"),
    "one long tuple as a key of many dicts": (
        START + MANY_ZEROS + b"q\x000](" + b"}h\x00Ns" * 12_000 + b"e.", UnsafePickleError, "tuple of 60000 parts"),
    "tuples of one hash": (
        START + b"}(" + b"".join(as_pickle(pair) + b"N" for pair in colliding(100)) + b"u.", UnsafePickleError,
        "17 keys of a dict are tuples with the same hash"),
    "two equal long texts as keys in turn": (
        START + b"}" + text("x" * 200_000) + b"q\x00Ns" + text("x" * 200_000) + b"q\x01Ns" + b"h\x00Nsh\x01Ns" * 20_000
        + b".", UnsafePickleError, "a key of 200000 characters"),
    "copies of a long torch.Size": (
        START + b"ctorch\nSize\nq\x000" + MANY_ZEROS + b"\x85q\x010](" + b"h\x00h\x01R" * 12_000 + b"e.",
        UnsafePickleError, "a torch.Size of 60000 dims"),
    "a long text in many places": (
        START + text("x" * 100_000) + b"q\x000](" + b"h\x00" * 50_000 + b"e.", UnsafePickleError, "unfold to"),
    "long bytes in many places": (
        START + b"B" + (100_000).to_bytes(4, "little") + bytes(100_000) + b"q\x000](" + b"h\x00" * 50_000 + b"e.",
        UnsafePickleError, "unfold to"),
    "a huge integer": (START + integer(100_000) + b".", UnsafePickleError, "an integer of 100000 bytes"),
    "numbers that meet in a dict": (START + b"}" + as_keys(CHAINED) + b".", UnsafePickleError, "scattered numbers"),
    "fractions that meet in a dict": (
        START + b"}(" + b"".join(b"G" + struct.pack(">d", number) + b"N" for number in CHAINED) + b"u.",
        UnsafePickleError, "scattered numbers"),
    "tuples of scattered numbers": (
        START + b"}(" + b"".join(as_pickle((at, 7)) + b"N" for at in range(100_000)) + b"u.", UnsafePickleError,
        "scattered numbers"),
    "numbers that meet in a dict, each again and again": (
        START + b"}" + as_keys(CHAINED[:8_000] + CHAINED[7_000:8_000] * 20) + b".", UnsafePickleError,
        "scattered numbers"),
    "keys whose hashes collide": (
        START + b"}(" + b"".join(b"\x8a\x09" + (i * (2**61 - 1)).to_bytes(9, "little") + b"N" for i in range(1, 60))
        + b"u.", UnsafePickleError, "a key is an integer"),
    "a string that is longer than the file": (START + b"\x8d" + struct.pack("<Q", 1 << 62) + b".", CorruptSourceError,
                                              "are announced"),
    "a name of a million letters": (START + b"cos\n" + b"x" * 1_000_000 + b"\n.", UnsafePickleError, "a name of"),
    "marks": (START + b"(" * 200_000 + b".", CorruptSourceError, "left on the stack"),
    "nothing": (b"", CorruptSourceError, "broken pickle"),
    "a call of what is not a name": (START + MANY + b")R.", CorruptSourceError, "it calls a tuple"),
    "os.system": (START + b"cos\nsystem\n(" + text("touch executed") + b"tR.", UnsafePickleError, "os.system"),
    "builtins.eval": (START + b"cbuiltins\neval\n(" + text("1") + b"tR.", UnsafePickleError, "builtins.eval"),
    "eval of Python 2": (START + b"c__builtin__\neval\n(" + text("1") + b"tR.", UnsafePickleError, "__builtin__.eval"),
    "a name through the stack": (
        b"\x80\x04\x8c\x05posix\x8c\x06system\x93" + b"(" + text("id") + b"tR.", UnsafePickleError, "posix.system"),
    "subprocess": (START + b"csubprocess\nPopen\n(" + text("id") + b"tR.", UnsafePickleError, "subprocess.Popen"),
    "getattr": (START + b"cbuiltins\ngetattr\n)R.", UnsafePickleError, "builtins.getattr"),
    "a nested pickle": (START + b"cpickle\nloads\n(C\x01.tR.", UnsafePickleError, "pickle.loads"),
    "a special attribute of an ordered dict": (
        START + ORDERED + b"}" + text("__class__") + b"K\x01sb.", UnsafePickleError, "a state that nobody writes"),
    "a special attribute of an ordered dict, set later": (
        START + ORDERED + b"}q\x00bh\x00" + text("__class__") + b"K\x01s\x86.", UnsafePickleError, "state that"),
    "two states of an object": (
        START + NAMESPACE + b"}" + text("__class__") + b"K\x01sb}b.", CorruptSourceError, "a second state"),
    "two states of an ordered dict": (
        START + ORDERED + b"}" + text("__class__") + b"K\x01sb}b.", CorruptSourceError, "a second state"),
    "a special attribute of a tensor": (
        START + with_attributes(b"}" + text("__class__") + b"K\x01s") + b".", UnsafePickleError,
        "a state that nobody writes"),
    "attributes of a tensor that are none": (
        START + with_attributes(b"K\x01") + b".", UnsafePickleError, "a state that nobody writes"),
    "an instance by INST": (START + b"(ios\nsystem\n.", UnsafePickleError, "opcode b'i'"),
    "an extension code": (START + b"\x82\x01.", UnsafePickleError, "opcode"),
    "a tensor whose values are the negative of its bytes": (
        START + tensor(b"K\x02\x85", b"K\x01\x85", more=NEGATIVE) + b".", UnsupportedError, r"resolve_neg\(\)"),
    "a newer tensor whose values are the negative of its bytes": (
        START + newer_tensor(NEGATIVE) + b".", UnsupportedError, r"resolve_neg\(\)"),
    "a tensor with an argument of a later version": (
        START + tensor(b"K\x02\x85", b"K\x01\x85", more=b"}N") + b".", UnsupportedError, "values are not its bytes"),
    "a tensor outside of its storage": (START + tensor(b"K\x11\x85", b"K\x01\x85") + b".", CorruptSourceError,
                                        "reaches element 16 of a storage of 16"),
    "a tensor far outside": (START + tensor(b"K\x02\x85", b"J\xff\xff\xff\x7f\x85") + b".", CorruptSourceError,
                             "reaches element 2147483647"),
    "a tensor before its storage": (START + tensor(b"K\x02\x85", b"K\x01\x85", b"J\xff\xff\xff\xff") + b".",
                                    CorruptSourceError, "tensor of size"),
    "a tensor of too many elements": (
        START + tensor(b"(" + b"\x8a\x08" + (1 << 57).to_bytes(8, "little") + b"K\x04t", b"K\x00K\x00\x86") + b".",
        UnsafePickleError, "elements are read"),
    "a tensor of 65 dims": (
        START + tensor(b"(" + b"K\x01" * 65 + b"t", b"(" + b"K\x01" * 65 + b"t") + b".", UnsafePickleError, "65 dims"),
    "an empty tensor with a size of 2^62": (
        START + tensor(b"(K\x00\x8a\x08" + (1 << 62).to_bytes(8, "little") + b"t", b"K\x00K\x00\x86") + b".",
        UnsafePickleError, "elements are read"),
    "a storage of another length": (START + storage(count=b"K\x11") + b".", CorruptSourceError, "an entry of 64 bytes"),
    "a storage that is not there": (START + storage(key=text("../../x")) + b".", CorruptSourceError, "has no entry"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_a_hostile_pickle_is_refused_at_once(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    data, kind, message = REFUSED[name]
    error = outcome_of(lambda: build(data, ENTRIES, "the file"))
    assert isinstance(error, kind)
    assert "the file" in str(error)
    assert len(str(error)) < 2000
    with pytest.raises(kind, match=message):
        raise error
    assert not list(tmp_path.iterdir())


def test_tuples_of_one_hash_are_what_they_are_called():
    found = colliding(100)
    assert len(set(found)) == 100 and len(set(map(hash, found))) == 1


@pytest.mark.parametrize("name", HARMLESS)
def test_what_only_looks_hostile_is_read(name):
    assert not isinstance(outcome_of(lambda: build(HARMLESS[name], ENTRIES, "the file")), ReshardError)


class Evil:
    def __reduce__(self):
        return os.system, ("touch executed",)


def test_a_real_checkpoint_with_code_in_it_is_refused_and_nothing_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    source = GOLDEN / "deepspeed-0.19.8/zero2-dp3" / STEP
    for path in source.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    victim = tmp_path / "mp_rank_00_model_states.pt"
    evil = pickle.dumps({"module": Evil()}, protocol=2)
    victim.write_bytes(replace_pickle(victim.read_bytes(), pickle_of(victim), evil))
    with pytest.raises(UnsafePickleError, match=r"mp_rank_00_model_states\.pt: its pickle names posix\.system"):
        read_checkpoint(tmp_path, None)
    assert not Path("executed").exists()


def test_time_and_memory_grow_no_faster_than_the_pickle(tmp_path):
    """A pickle of 200 KB of the opcodes that make most objects out of a byte."""
    archive = tmp_path / "a.pt"
    source = next((GOLDEN / "deepspeed-0.19.8/zero2-dp3" / STEP).glob("mp_rank*.pt"))
    bulk = START + b"](" + b"]" * 100_000 + b"e(" + b"N" * 100_000 + b"e."
    archive.write_bytes(replace_pickle(source.read_bytes(), pickle_of(source), bulk))
    before = resource.getrusage(resource.RUSAGE_SELF)
    read(archive)
    after = resource.getrusage(resource.RUSAGE_SELF)
    assert after.ru_utime - before.ru_utime < 4
    assert (after.ru_maxrss - before.ru_maxrss) * 1024 < (64 << 20) + 256 * len(bulk)
