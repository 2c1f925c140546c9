"""The .pt container: what is written is a valid zip, reads back equal, and hostile files are refused."""

import io
import pickle
import struct
import subprocess
import sys
import zipfile
import zlib
from pathlib import Path

import pytest

from reshard.errors import CorruptSourceError, ReshardError, UnsafePickleError, UnsupportedError
from reshard.formats.pt import machine
from reshard.formats.pt.archive import Payload, lay_out
from reshard.formats.pt.emit import emit
from reshard.formats.pt.objects import (
    Global,
    Inert,
    Size,
    StatefulDict,
    Storage,
    Tensor,
    contiguous_stride,
    new_tensor,
)
from reshard.formats.pt.reader import read
from reshard.formats.pt.trust import trusting
from reshard.formats.pt.writer import lay_out_pt


def write(path: Path, value: object, payloads: dict[Storage, bytes] | None = None) -> Path:
    layout = lay_out_pt(path.stem, value)
    content = bytearray(layout.num_bytes)
    for offset, data in layout.fixed:
        content[offset : offset + len(data)] = data
    for storage, slot in layout.slots.items():
        data = (payloads or {}).get(storage, bytes(storage.num_bytes))
        content[slot.offset : slot.offset + slot.num_bytes] = data
        for position in slot.crc_positions:
            content[position : position + 4] = struct.pack("<I", zlib.crc32(data))
    path.write_bytes(content)
    return path


def archive(path: Path, pickled: bytes, **entries: bytes) -> Path:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_STORED) as stream:
        stream.writestr("archive/data.pkl", pickled)
        for name, data in entries.items():
            stream.writestr(f"archive/{name.replace('__', '/')}", data)
    return path


def load_pickle(data: bytes) -> object:
    return machine.load(data, persistent_load=lambda key: key, rebuild=machine.rebuild_containers, path="test.pt")


PLAIN = {
    "numbers": [0, 1, 255, 256, 65535, 65536, -1, 2**31 - 1, -(2**31), 2**31, 2**100, -(2**2100), 1.5, float("inf")],
    "texts": ["", "a", "é\n", "x" * 300],
    "bytes": [b"", b"\x00\xff", b"y" * 300],
    "nothing": None,
    "flags": (True, False),
    "nested": {"a": ((), (1,), (1, 2), (1, 2, 3), (1, 2, 3, 4)), 5: [], "b": [{}, [[]]]},
}


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_machine_reads_what_the_standard_pickler_writes(protocol):
    found = load_pickle(pickle.dumps(PLAIN, protocol=protocol))
    if protocol == 2:  # bytes are written as a call there, which stays a recipe
        assert [item.target for item in found["bytes"] if isinstance(item, Inert)]
        assert {**found, "bytes": PLAIN["bytes"]} == PLAIN
    else:
        assert found == PLAIN


def test_standard_unpickler_reads_what_is_emitted():
    pickled, storages = emit(PLAIN)
    assert pickle.loads(pickled) == PLAIN
    assert storages == []


def test_objects_that_occur_twice_stay_one_object():
    shared = [1, 2]
    found = pickle.loads(emit({"a": shared, "b": shared})[0])
    assert found["a"] is found["b"]


def test_file_is_a_valid_zip_with_aligned_payloads(tmp_path):
    weight = new_tensor("float32", (3, 5))
    bias = new_tensor("bfloat16", (7,))
    payloads = {weight.storage: bytes(range(60)), bias.storage: b"\x01\x02" * 7}
    path = write(tmp_path / "a.pt", {"weight": weight, "bias": bias, "step": 7}, payloads)
    with zipfile.ZipFile(path) as found:
        assert found.testzip() is None
        assert found.read("a/data/0") == payloads[weight.storage]
        assert found.read("a/data/1") == payloads[bias.storage]
    assert all(storage.file_offset % 64 == 0 for storage in read(path).storages.values())


def test_read_gives_back_what_was_written(tmp_path):
    base = Storage(dtype="float32", num_elements=20)
    first = Tensor(storage=base, offset=2, shape=(2, 3), stride=(3, 1))
    second = Tensor(storage=base, offset=8, shape=(3, 2), stride=(1, 3), parameter=True, requires_grad=True)
    named = Tensor(
        storage=base, offset=0, shape=(), stride=(), attributes=(Global("torch", "Tensor"), {"ds_id": "0_5"})
    )
    state = StatefulDict(a=first, b=second, c=named)
    state.state = {"_metadata": StatefulDict(x={"version": 1})}
    recipe = Inert("new", Global("argparse", "Namespace"), (), {"a": Size((1, 2))})
    path = write(
        tmp_path / "a.pt", {"module": state, "args": recipe, "size": Size((4,)), "dtype": Global("torch", "int8")}
    )
    found = read(path).value
    module = found["module"]
    assert list(module) == ["a", "b", "c"]
    assert module.state["_metadata"]["x"] == {"version": 1}
    assert module["a"].storage is module["b"].storage is module["c"].storage
    assert (module["b"].shape, module["b"].stride, module["b"].offset) == ((3, 2), (1, 3), 8)
    assert module["b"].parameter
    assert module["b"].requires_grad
    assert not module["b"].is_contiguous
    assert module["c"].attributes == (Global("torch", "Tensor"), {"ds_id": "0_5"})
    assert found["args"].target == Global("argparse", "Namespace")
    assert found["args"].state["a"] == (1, 2)
    assert isinstance(found["args"].state["a"], Size)
    assert found["dtype"] == Global("torch", "int8")
    assert module["a"].file_offset == module["a"].storage.file_offset + 8


def test_archive_larger_than_four_gigabytes_is_zip64():
    large = 5 << 30
    skeleton = lay_out("big", [Payload(name="a", num_bytes=large), Payload(name="b", num_bytes=3, data=b"xyz")])
    assert skeleton.slots[1].offset > large
    local = skeleton.fixed[0][1]
    assert local[18:26] == b"\xff" * 8  # sizes are in the ZIP64 extra field
    assert struct.unpack_from("<HHQQ", local, 30 + len("big/a")) == (1, 16, large, large)
    content = skeleton.fixed[-1][1]
    assert struct.pack("<Q", large) in content
    assert skeleton.slots[1].crc_positions[1] < skeleton.num_bytes


def test_zip64_archive_is_read_back(tmp_path):
    """A sparse file of more than 4 GiB: directory, sizes and offsets survive."""
    tensor = new_tensor("uint8", ((4 << 30) + 100,))
    last = new_tensor("uint8", (3,), data=b"end")
    layout = lay_out_pt("big", {"large": tensor, "last": last})
    path = tmp_path / "big.pt"
    with open(path, "wb") as stream:
        stream.truncate(layout.num_bytes)
        for offset, data in layout.fixed:
            stream.seek(offset)
            stream.write(data)
    found = read(path).value
    assert found["large"].num_elements == (4 << 30) + 100
    with open(path, "rb") as stream:
        stream.seek(found["last"].file_offset)
        assert stream.read(3) == b"end"


def test_stride_of_contiguous_tensors():
    assert contiguous_stride((2, 3, 4)) == (12, 4, 1)
    assert contiguous_stride((2, 0, 4)) == (4, 4, 1)
    assert contiguous_stride(()) == ()


class Hostile:
    """Runs a command when unpickled by the standard library."""

    def __init__(self, command: str, how: str) -> None:
        self.command, self.how = command, how

    def __reduce__(self):
        if self.how == "os.system":
            import os

            return os.system, (self.command,)
        if self.how == "subprocess":
            return subprocess.call, (self.command.split(),)
        return eval, (f"__import__('os').system({self.command!r})",)


@pytest.mark.parametrize("protocol", [2, 4])
@pytest.mark.parametrize("how", ["os.system", "subprocess", "eval"])
def test_pickle_that_runs_a_command_is_refused_and_runs_nothing(tmp_path, how, protocol):
    trap = tmp_path / "trap"
    path = archive(tmp_path / "a.pt", pickle.dumps(Hostile(f"touch {trap}", how), protocol=protocol))
    with pytest.raises(UnsafePickleError) as caught:
        read(path)
    assert caught.value.path == str(path)
    assert not trap.exists()


def test_trusted_class_is_kept_as_a_recipe_and_not_imported(tmp_path):
    module = "module_that_must_not_be_imported"
    (tmp_path / f"{module}.py").write_text("raise AssertionError('imported')\n")
    pickled = b"\x80\x02c" + module.encode() + b"\nThing\n)\x81}X\x01\x00\x00\x00aK\x01sb."
    with pytest.raises(UnsafePickleError, match=rf"names {module}\.Thing"):
        load_pickle(pickled)
    with trusting([f"{module}.Thing"]):
        found = load_pickle(pickled)
        assert isinstance(found, Inert)
        assert found.target == Global(module, "Thing")
        assert found.state == {"a": 1}
        assert emit(found)[0].startswith(b"\x80\x02c" + module.encode())
    assert module not in sys.modules


NESTED_KEY = b"\x80\x02}" + b"K\x01" + b"2\x86" * 60 + b"N" + b"s."
"""A key that is a tuple of two of itself, 60 levels deep: hashing it would take 2**60 steps."""

HOSTILE_PICKLES = {
    "memo far away": b"\x80\x02K\x01r\xff\xff\xff\xffh\x05.",
    "huge announced length": b"\x80\x04\x8e" + struct.pack("<Q", 2**62) + b"x.",
    "hash bomb": NESTED_KEY,
    "calls a number": b"\x80\x02K\x01)R.",
    "calls a tensor": b"\x80\x02}K\x01\x85R.",
    "opcode for extensions": b"\x80\x02\x82\x01.",
    "opcode inst": b"\x80\x02(ios\nsystem\n.",
    "protocol 0": b"I1\n.",
    "no stop": b"\x80\x02K\x01",
    "empty": b"",
    "stack underflow": b"\x80\x02R.",
    "state on a list": b"\x80\x02]}b.",
    "two objects left": b"\x80\x02K\x01K\x02.",
    "not a mark": b"\x80\x02K\x01t.",
    "invalid text": b"\x80\x02X\x01\x00\x00\x00\xff.",
    "name without end": b"\x80\x02cabc",
    "odd items": b"\x80\x02}(K\x01u.",
    "negative size": b"\x80\x02ctorch\nSize\nJ\xff\xff\xff\xff\x85\x85R.",
}


@pytest.mark.parametrize("name", HOSTILE_PICKLES)
def test_hostile_pickle_is_refused(tmp_path, name):
    path = archive(tmp_path / "a.pt", HOSTILE_PICKLES[name])
    with pytest.raises((CorruptSourceError, UnsafePickleError)) as caught:
        read(path)
    assert str(path) in str(caught.value)


def test_nesting_that_overflows_the_stack_is_refused_when_written():
    deep: tuple = ()
    for _ in range(100_000):
        deep = (deep,)
    with pytest.raises(UnsupportedError, match="nested"):
        emit(deep)


def small(path: Path) -> bytes:
    weight = new_tensor("float32", (3, 5), data=bytes(60))
    return write(path, {"weight": weight, "names": ["a", "b"]}).read_bytes()


def test_file_cut_anywhere_is_refused(tmp_path):
    content = small(tmp_path / "a.pt")
    path = tmp_path / "cut.pt"
    for length in range(0, len(content), 7):
        path.write_bytes(content[:length])
        with pytest.raises(ReshardError):
            read(path)


def test_flipped_byte_in_the_metadata_is_refused(tmp_path):
    content = small(tmp_path / "a.pt")
    start = content.index(b"\x80\x02")
    path = tmp_path / "flipped.pt"
    for at in range(start, start + 100, 3):
        changed = bytearray(content)
        changed[at] ^= 0x40
        path.write_bytes(changed)
        with pytest.raises(CorruptSourceError, match="CRC-32"):
            read(path)


def storage_pickle(
    kind: bytes = b"FloatStorage", count: int = 4, offset: int = 0, size: int = 4, stride: int = 1
) -> bytes:
    return (
        b"\x80\x02ctorch._utils\n_rebuild_tensor_v2\n(("
        b"X\x07\x00\x00\x00storagectorch\n" + kind + b"\nX\x01\x00\x00\x000X\x03\x00\x00\x00cpu"
        b"J" + struct.pack("<i", count) + b"tQJ" + struct.pack("<i", offset) + b"J" + struct.pack("<i", size)
        + b"\x85J" + struct.pack("<i", stride) + b"\x85\x89ccollections\nOrderedDict\n)RtR."
    )  # fmt: skip


@pytest.mark.parametrize(
    ("pickled", "entry", "error"),
    [
        (storage_pickle(), bytes(16), None),
        (storage_pickle(), bytes(15), CorruptSourceError),
        (storage_pickle(count=2**30), bytes(16), CorruptSourceError),
        (storage_pickle(count=-4), bytes(16), CorruptSourceError),
        (storage_pickle(offset=1), bytes(16), CorruptSourceError),
        (storage_pickle(offset=-1), bytes(16), CorruptSourceError),
        (storage_pickle(size=5), bytes(16), CorruptSourceError),
        (storage_pickle(stride=2), bytes(16), CorruptSourceError),
        (storage_pickle(stride=0), bytes(16), None),
        (storage_pickle(kind=b"QInt8Storage"), bytes(16), UnsupportedError),
    ],
)
def test_tensor_must_lie_inside_its_storage(tmp_path, pickled, entry, error):
    path = archive(tmp_path / "a.pt", pickled, data__0=entry)
    if error is None:
        assert read(path).value.shape == (4,)
    else:
        with pytest.raises(error):
            read(path)


def test_tensor_without_its_storage_is_refused(tmp_path):
    with pytest.raises(CorruptSourceError, match="no entry"):
        read(archive(tmp_path / "a.pt", storage_pickle()))


def test_zip_bomb_is_refused_unread(tmp_path):
    path = tmp_path / "bomb.pt"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as stream:
        stream.writestr("archive/data.pkl", bytes(50 << 20))
    with pytest.raises(UnsupportedError, match="compressed"):
        read(path)


def test_overlapping_entries_are_refused(tmp_path):
    content = bytearray(small(tmp_path / "a.pt"))
    directory = content.index(b"PK\x01\x02")
    second = content.index(b"PK\x01\x02", directory + 4)
    content[second + 42 : second + 46] = content[directory + 42 : directory + 46]  # offset of the first entry
    path = tmp_path / "overlap.pt"
    path.write_bytes(content)
    with pytest.raises(CorruptSourceError):
        read(path)


@pytest.mark.parametrize(
    ("content", "error", "text"),
    [
        (b"", CorruptSourceError, "empty"),
        (b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19.", UnsupportedError, "legacy"),
        (b"hello world", CorruptSourceError, "not a zip"),
        (b"PK\x03\x04" + bytes(100), CorruptSourceError, "truncated"),
    ],
)
def test_other_files_are_named_for_what_they_are(tmp_path, content, error, text):
    path = tmp_path / "a.pt"
    path.write_bytes(content)
    with pytest.raises(error, match=text):
        read(path)


def test_big_endian_and_torchscript_files_are_refused(tmp_path):
    with pytest.raises(UnsupportedError, match="byte order"):
        read(archive(tmp_path / "big.pt", pickle.dumps({}, protocol=2), byteorder=b"big"))
    path = tmp_path / "script.pt"
    with zipfile.ZipFile(path, "w") as stream:
        stream.writestr("archive/constants.pkl", b"")
    with pytest.raises(UnsupportedError, match=r"data\.pkl"):
        read(path)


def test_missing_file_is_an_error_of_the_source(tmp_path):
    with pytest.raises(CorruptSourceError, match="cannot be opened"):
        read(tmp_path / "absent.pt")


def test_importing_the_resharder_does_not_import_torch():
    code = "import reshard.cli.command_line, reshard.formats, sys; assert not {'torch', 'deepspeed'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_archive_name_does_not_matter_when_reading(tmp_path):
    buffer = io.BytesIO(small(tmp_path / "a.pt"))
    path = tmp_path / "renamed.pt"
    path.write_bytes(buffer.getvalue())
    assert read(path).value["names"] == ["a", "b"]
