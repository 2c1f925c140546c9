"""Every type of elements that torch's DCP saves: read, cut, written, carried to safetensors, or refused by name."""

import dataclasses
import hashlib
import json
from pathlib import Path

import pytest

from reshard.api import Conversion, RunOptions, convert, index_of
from reshard.errors import UnsupportedError
from reshard.execution.verify import read_digests
from reshard.formats.dcp import FORMAT
from reshard.formats.pt import objects
from reshard.formats.safetensors.header import DTYPES
from reshard.tensors.layout import ITEM_BYTES
from reshard.topology import Topology
from tests.golden.dcp_files import golden

TYPES = golden("types")
NOT_IN_SAFETENSORS = {"complex32", "complex128", "float4_e2m1fn_x2", "float8_e8m0fnu"}


def shas(folder: Path) -> dict[str, str]:
    """SHA-256 of the elements of every tensor that one file holds whole."""
    index = index_of(folder)
    found = {}
    for tensor, number in zip(index.tensors, range(len(index.tensors)), strict=True):
        (at,) = index.shards.by_tensor(len(index.tensors))[number]
        row = index.shards.row(int(at), len(tensor.shape))
        content = (folder / index.files[row.file].path).read_bytes()
        found[tensor.key.name] = hashlib.sha256(
            content[row.byte_offset : row.byte_offset + tensor.num_bytes]
        ).hexdigest()
    return found


def test_every_type_is_read_as_torch_saved_it() -> None:
    truth = json.loads((TYPES.parent / "truth.json").read_text())
    index = FORMAT.read(TYPES, None)
    assert {tensor.dtype for tensor in index.tensors} == set(ITEM_BYTES)
    assert shas(TYPES) == {key.removeprefix("model/"): value["sha256"] for key, value in truth.items()}


def test_every_type_is_cut_for_other_ranks_and_put_together_again(tmp_path: Path) -> None:
    wanted = Conversion(source=TYPES, target=tmp_path / "three", topology=Topology(dp=3, zero=3))
    convert(wanted, RunOptions(reread=True, sync=False))
    assert read_digests(index_of(wanted.target)) == read_digests(index_of(TYPES))
    back = dataclasses.replace(wanted, source=wanted.target, target=tmp_path / "one", topology=Topology(zero=3))
    convert(back, RunOptions(reread=True, sync=False))
    assert shas(back.target) == shas(TYPES)


def test_types_that_safetensors_lack_are_named(tmp_path: Path) -> None:
    wanted = Conversion(source=TYPES, target=tmp_path / "st", topology=Topology(), target_format="safetensors")
    with pytest.raises(UnsupportedError) as refused:
        convert(wanted, RunOptions(sync=False))
    assert {problem.rpartition(" ")[2] for problem in refused.value.problems} == NOT_IN_SAFETENSORS
    assert set(ITEM_BYTES) - NOT_IN_SAFETENSORS == set(DTYPES.values())


def test_layouts_and_files_agree_on_the_bytes_of_each_type() -> None:
    assert {dtype: objects.ITEM_BYTES.get(dtype) for dtype in ITEM_BYTES} == dict(ITEM_BYTES)
    assert set(DTYPES.values()) <= set(ITEM_BYTES)
