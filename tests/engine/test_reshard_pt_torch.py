"""The .pt container against torch itself: what torch.save wrote, read and written again, loads equal in torch.load."""

import argparse
import random
import struct
import zipfile
import zlib
from collections import OrderedDict
from importlib.util import find_spec

import numpy as np
import pytest

from reshard.errors import UnsupportedError, VerificationError
from reshard.formats.pt.objects import UNTYPED_DTYPES
from reshard.formats.pt.reader import read
from reshard.formats.pt.writer import lay_out_pt
from reshard.witness import pickles
from reshard.witness.archives import Archive

pytestmark = [pytest.mark.engine, pytest.mark.skipif(find_spec("torch") is None, reason="needs torch: make setup")]


def rewrite(source, target):
    """Read `source` with our reader, write it to `target` with our writer."""
    layout = lay_out_pt(target.stem, read(source).value)
    content, cover = bytearray(layout.num_bytes), np.zeros(layout.num_bytes, np.int8)
    original = source.read_bytes()
    pieces = list(layout.fixed)
    for storage, slot in layout.slots.items():
        pieces.append((slot.offset, original[storage.file_offset : storage.file_offset + storage.num_bytes]))
    for offset, data in pieces:
        content[offset : offset + len(data)] = data
        cover[offset : offset + len(data)] += 1
    assert (cover == 1).all()
    for slot in layout.slots.values():
        checksum = zlib.crc32(content[slot.offset : slot.offset + slot.num_bytes])
        for position in slot.crc_positions:
            content[position : position + 4] = struct.pack("<I", checksum)
    target.write_bytes(content)


def assert_equal(left, right, path="root"):
    import torch

    assert type(left) is type(right), path
    if isinstance(left, torch.Tensor):
        assert torch.equal(*(one.reshape(-1).clone().view(torch.uint8) for one in (left, right))), path
        assert left.shape == right.shape, path
        assert (left.dtype, left.stride(), left.requires_grad) == (right.dtype, right.stride(), right.requires_grad)
    elif isinstance(left, np.ndarray):
        assert (left == right).all(), path
    elif isinstance(left, dict):
        assert list(left) == list(right), path
        for key, value in left.items():
            assert_equal(value, right[key], f"{path}.{key}")
    elif isinstance(left, list | tuple):
        assert len(left) == len(right), path
        for at, (a, b) in enumerate(zip(left, right, strict=True)):
            assert_equal(a, b, f"{path}[{at}]")
    else:
        assert left == right, path


def everything():
    import torch

    base = torch.arange(100).to(torch.bfloat16)
    with_attribute = torch.ones(3)
    with_attribute.ds_id = "0_5"
    dtypes = [
        torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16, torch.int8,
        torch.uint8, torch.bool, torch.complex64,
    ]  # fmt: skip
    newer = [getattr(torch, name) for name in sorted(UNTYPED_DTYPES)]
    of_bits = {str(dtype): torch.arange(5 * dtype.itemsize, dtype=torch.uint8).view(dtype) for dtype in newer}
    eight = torch.arange(12, dtype=torch.uint8).view(torch.float8_e5m2).reshape(3, 4)
    return {
        "dtypes": {str(dtype): torch.arange(5).to(dtype) for dtype in dtypes},
        "newer": of_bits,
        "newer views": [eight[1:], eight.t(), torch.nn.Parameter(eight, requires_grad=False)],
        "dtype": torch.float32,
        "size": torch.Size([1, 2]),
        "module": torch.nn.Linear(2, 3).state_dict(),
        "parameter": torch.nn.Parameter(torch.zeros(2)),
        "scalar": torch.tensor(1.5),
        "empty": torch.zeros(0, 4),
        "views": [base[3:13].view(2, 5), base[50:60].view(5, 2).t(), base[::7]],
        "attribute": with_attribute,
        "namespace": argparse.Namespace(lr=1e-3, names=["a", {"b": 3}]),
        "random": random.getstate(),
        "numpy": np.random.RandomState(5).get_state(),
        "torch": torch.get_rng_state(),
        "numbers": [0, 255, 256, 65535, 65536, -1, 2**31, -(2**31) - 1, 1 << 200, float("inf"), 2.5],
        "others": (None, True, False, b"bytes", {1, 2}, frozenset([3]), OrderedDict(a=1), "text é", 1 + 2j),
    }


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
def test_rewritten_file_loads_equal(tmp_path):
    import torch

    value = everything()
    torch.save(value, tmp_path / "source.pt")
    rewrite(tmp_path / "source.pt", tmp_path / "target.pt")
    with zipfile.ZipFile(tmp_path / "target.pt") as archive:
        assert archive.testzip() is None
    for mmap in (False, True):
        loaded = torch.load(tmp_path / "target.pt", weights_only=False, mmap=mmap)
        assert_equal(value, loaded)
        assert loaded["module"]._metadata == value["module"]._metadata
        assert loaded["attribute"].ds_id == "0_5"
        storages = {view.untyped_storage().data_ptr() for view in loaded["views"]}
        assert len(storages) == 1
        assert len({view.untyped_storage().data_ptr() for view in loaded["newer views"]}) == 1


@pytest.mark.parametrize(
    "first, second",
    [("float8_e5m2", "uint16"), ("float8_e4m3fn", "uint8"), ("uint8", "float8_e4m3fn"), ("uint16", "uint8")],
)
def test_a_storage_that_is_seen_in_two_types_is_refused(first, second, tmp_path):
    import torch

    bits = torch.arange(16, dtype=torch.uint8)
    torch.save([bits.view(getattr(torch, name)) for name in (first, second)], tmp_path / "both.pt")
    with pytest.raises(UnsupportedError, match=f"seen both as {first} and as {second}"):
        read(tmp_path / "both.pt")


def test_a_tensor_that_ends_before_its_storage_of_bytes_is_not_called_damaged(tmp_path):
    import torch

    torch.save(torch.zeros(7, dtype=torch.uint8)[:6].view(torch.uint16), tmp_path / "odd.pt")
    with pytest.raises(UnsupportedError, match="7 bytes"):
        read(tmp_path / "odd.pt")


@pytest.mark.parametrize("bit", ["conj", "neg"])
def test_a_tensor_whose_values_are_not_its_bytes_is_refused_by_the_reader_and_by_the_witness(bit, tmp_path):
    import torch

    conjugated = torch.complex(torch.ones(3), torch.arange(1.0, 4)).conj()
    lazy = conjugated if bit == "conj" else conjugated.imag
    torch.save({"w": lazy}, tmp_path / "lazy.pt")
    torch.save({"w": lazy.resolve_conj().resolve_neg()}, tmp_path / "physical.pt")
    read(tmp_path / "physical.pt")
    with pytest.raises(UnsupportedError, match=rf"resolve_{bit}\(\)"):
        read(tmp_path / "lazy.pt")
    pickles.load(Archive(tmp_path / "physical.pt").pickle)
    with pytest.raises(VerificationError, match=f"are not its bytes.*{bit}"):
        pickles.load(Archive(tmp_path / "lazy.pt").pickle)


def test_plain_tensors_load_with_weights_only(tmp_path):
    import torch

    value = {"weight": torch.randn(3, 5), "module": torch.nn.Linear(2, 3).state_dict(), "step": 7}
    torch.save(value, tmp_path / "source.pt")
    rewrite(tmp_path / "source.pt", tmp_path / "target.pt")
    assert_equal(value, torch.load(tmp_path / "target.pt", weights_only=True))


def test_file_of_the_legacy_layout_is_refused_by_name(tmp_path):
    import torch

    torch.save({"a": torch.zeros(2)}, tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    with pytest.raises(UnsupportedError, match="legacy layout"):
        read(tmp_path / "old.pt")


def test_a_file_without_checksums_is_no_damaged_file(tmp_path):
    import torch

    before = torch.serialization.get_crc32_options()
    try:
        torch.serialization.set_crc32_options(False)
        torch.save({"w": torch.arange(10.0), "step": 3}, tmp_path / "plain.pt")
    finally:
        torch.serialization.set_crc32_options(before)
    found = read(tmp_path / "plain.pt")
    assert found.value["step"] == 3
    assert [storage.crc32 for storage in found.storages.values()] == [None]
    rewrite(tmp_path / "plain.pt", tmp_path / "again.pt")
    assert_equal(torch.load(tmp_path / "plain.pt"), torch.load(tmp_path / "again.pt"))
    assert zipfile.ZipFile(tmp_path / "again.pt").testzip() is None
