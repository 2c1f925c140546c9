"""Layout of weights as safetensors files: cuts, names, notes, refusals."""

import json

import pytest

from reshard.errors import UnsupportedError
from reshard.formats.base import Request
from reshard.formats.safetensors import FORMAT, header
from reshard.tensors.layout import ITEM_BYTES, TargetLayout
from reshard.topology import Topology
from tests.unit.reshard.names.test_names_maps import index_of

NOT_IN_FORMAT = {"complex32", "complex128", "float4_e2m1fn_x2", "float8_e8m0fnu"}


def layout_of(index, **request) -> TargetLayout:
    return FORMAT.layout(index, Request(topology=Topology(), **request))


def header_of(layout: TargetLayout, file: int) -> dict:
    ((position, content),) = layout.files[file].fixed
    assert position == 0
    return json.loads(content[8:])


def test_the_format_has_a_name_for_every_type_of_elements_but_four():
    assert set(ITEM_BYTES) - set(header.DTYPES.values()) == NOT_IN_FORMAT
    assert set(header.DTYPES.values()) <= set(ITEM_BYTES)


@pytest.mark.parametrize("dtype", sorted(NOT_IN_FORMAT))
def test_types_that_the_format_has_no_name_for_are_refused_with_the_tensor_named(dtype):
    with pytest.raises(UnsupportedError) as error:
        layout_of(index_of({"weight/a": (2,)}, dtypes={"weight/a": dtype}))
    assert any("weight/a" in problem and dtype in problem for problem in error.value.problems)


def test_the_files_are_the_same_for_all_topologies():
    index = index_of({"weight/a": (2,)})
    one, other = (FORMAT.layout(index, Request(topology=Topology(tp=tp, dp=2))) for tp in (1, 4))
    assert one.files == other.files
    assert (one.topology, other.topology) == (Topology(dp=2), Topology(tp=4, dp=2))


@pytest.mark.parametrize("file_bytes", [700, 1000, 1200, 1700, 10_000])
def test_no_file_is_larger_than_asked_for(file_bytes):
    index = index_of({f"weight/layer.{number}.weight": (number % 7 + 1, 8) for number in range(30)})
    layout = layout_of(index, file_bytes=file_bytes)
    shards = [file for file in layout.files if file.path.endswith(".safetensors")]
    assert len(shards) > 1 or file_bytes == 10_000
    assert all(file.num_bytes <= file_bytes for file in shards)
    assert len(layout.shards) == 30
    names = [name for at in range(len(shards)) for name in header_of(layout, at) if name != header.METADATA]
    assert names == [tensor.key.name for tensor in index.tensors]


def test_a_tensor_larger_than_a_file_gets_its_own_and_is_noted():
    index = index_of({"weight/a": (2,), "weight/large": (500,), "weight/b": (2,)})
    layout = layout_of(index, file_bytes=600)
    assert [set(header_of(layout, at)) - {header.METADATA} for at in range(3)] == [{"a"}, {"large"}, {"b"}]
    assert layout.notes == ("larger than a file of 600 bytes may be, each in a file of its own: large",)


def test_a_header_has_a_limit_of_its_own(monkeypatch):
    monkeypatch.setattr(header, "MAX_HEADER_BYTES", 400)
    layout = layout_of(index_of({f"weight/{'x' * 60}.{number}": (1,) for number in range(5)}))
    assert [len(header_of(layout, at)) - 1 for at in range(3)] == [2, 2, 1]
    assert all(len(file.fixed[0][1]) <= 408 for file in layout.files[:-1])
    with pytest.raises(UnsupportedError, match=r"a header of \d+ bytes: the format allows 400"):
        layout_of(index_of({f"weight/{'x' * 600}": (1,)}))


def test_wide_elements_come_first_so_that_all_are_aligned():
    dtypes = {"weight/a": "bool", "weight/b": "float32", "weight/c": "bfloat16", "weight/d": "int64"}
    layout = layout_of(index_of(dict.fromkeys(dtypes, (3,)), dtypes=dtypes))
    found = {name: entry["data_offsets"] for name, entry in header_of(layout, 0).items() if name != header.METADATA}
    assert found == {"d": [0, 24], "b": [24, 36], "c": [36, 42], "a": [42, 45]}


def test_the_weight_is_taken_and_the_master_where_there_is_none_or_another_type_is_wanted():
    index = index_of(
        {"weight/a": (2,), "fp32/a": (2,), "fp32/b": (2,), "weight/c": (2,), "exp_avg/a": (2,)},
        dtypes={"weight/a": "bfloat16", "weight/c": "int64"},
    )
    layout = layout_of(index)
    assert [(str(tensor.key), tensor.dtype) for tensor in layout.tensors] == [
        ("weight/a", "bfloat16"), ("weight/b", "float32"), ("weight/c", "int64"),
    ]  # fmt: skip
    assert layout.origins == (0, 2, 3)
    layout = layout_of(index, weight_dtype="bfloat16")
    assert ([tensor.dtype for tensor in layout.tensors], layout.origins) == (
        ["bfloat16", "bfloat16", "int64"],
        (0, 2, 3),
    )
    layout = layout_of(index, weight_dtype="float16")
    assert ([tensor.dtype for tensor in layout.tensors], layout.origins) == (["float16", "float16", "int64"], (1, 2, 3))
    assert layout.notes == (
        "the optimizer stays behind: exp_avg of 1 tensors",
        "2 weights are the float32 master weights, rounded once where the type is another",
    )


@pytest.mark.parametrize(
    ("tensors", "more", "found"),
    [
        ({"exp_avg/a": (2,)}, {}, "holds no weights: safetensors files hold nothing else"),
        ({"weight/__metadata__": (2,)}, {}, "'__metadata__' cannot be the name of a tensor"),
        ({"weight/a\ud800": (2,)}, {}, r"'a\ud800' cannot be the name of a tensor"),
        ({"weight/a": (2,)}, {"aliases": {"format": "a"}}, "second names of tied weights are keys of the file's"),
    ],
)
def test_what_cannot_be_written_is_refused(tensors, more, found):
    with pytest.raises(UnsupportedError) as error:
        layout_of(index_of(tensors, **more))
    assert found in str(error.value)


def test_a_second_name_stands_in_the_file_of_its_tensor():
    index = index_of({"weight/a": (99,), "weight/b": (99,)}, aliases={"x": "a", "y": "b"})
    layout = layout_of(index, file_bytes=700)
    keys = [set(header_of(layout, at)[header.METADATA]) & {"x", "y"} for at in range(2)]
    assert keys == [{"x"}, {"y"}]
    assert layout.notes[-1] == "y is b: stored once, its second name is in the metadata"
