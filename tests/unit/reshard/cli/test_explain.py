"""Places of boxes in source and target, in words and in a picture."""

import itertools
import json
import xml.etree.ElementTree as ET
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from reshard.cli.explain import explain, find, to_dict, to_lines
from reshard.cli.svg import draw, matrix_shape, rectangles
from reshard.errors import UsageError
from reshard.planning.plan import Plan, make_plan
from reshard.tensors.geometry import Box
from reshard.tensors.layout import Index, LogicalTensor, SourceFile, TargetFile, TargetLayout, TensorKey
from reshard.tensors.shard_table import ShardTableBuilder
from reshard.topology import Topology

SVG = "{http://www.w3.org/2000/svg}"


def source() -> Index:
    """A 4 x 6 master weight cut by columns into two files, twice; and a vector."""
    builder = ShardTableBuilder()
    for copy in range(2):
        for at in range(2):
            box = Box((0, 3 * at), (4, 3))
            builder.add(tensor=0, box=box, file=2 * copy + at, byte_offset=100, replica=copy)
    builder.add(tensor=1, box=Box((0,), (6,)), file=0, byte_offset=500)
    return Index(
        root=Path("/ckpt"),
        format="deepspeed",
        topology=Topology(tp=2, dp=2),
        step=1,
        samples=1,
        tensors=(
            LogicalTensor(key=TensorKey("fp32", "layer.weight"), shape=(4, 6), dtype="float32"),
            LogicalTensor(key=TensorKey("weight", "layer.weight"), shape=(6,), dtype="bfloat16"),
        ),
        files=tuple(SourceFile(path=f"s{at}.pt", num_bytes=1000) for at in range(4)),
        shards=builder.build(),
        aliases={"head.weight": "layer.weight"},
    )


def planned() -> Plan:
    """The matrix becomes bfloat16, in one file, cut by rows with a gap between rows."""
    builder = ShardTableBuilder()
    builder.add(tensor=0, box=Box((0, 0), (1, 6)), file=0, byte_offset=64)
    builder.add(tensor=0, box=Box((1, 0), (3, 6)), file=0, byte_offset=76, strides=(10, 1))
    index = source()
    layout = TargetLayout(
        format="safetensors",
        topology=Topology(dp=3),
        files=(TargetFile(path="<&>.bin", num_bytes=1000),),
        shards=builder.build(),
        tensors=(LogicalTensor(key=TensorKey("weight", "layer.weight"), shape=(4, 6), dtype="bfloat16"),),
        origins=(0,),
    )
    return make_plan(index, layout)


def test_names_states_globs_and_second_names_find_tensors() -> None:
    index = source()
    assert find(index, "layer.weight") == find(index, "head.weight") == find(index, "*weight") == [0, 1]
    assert find(index, "fp32/layer.weight") == find(index, "fp32/*") == [0]


def test_a_name_that_is_not_there_is_told_what_comes_close() -> None:
    with pytest.raises(UsageError, match=r"layer\.weights") as caught:
        find(source(), "layer.weights")
    assert caught.value.problems[0] == "there is for instance layer.weight"


def test_the_source_alone_is_told_with_all_its_copies() -> None:
    (found,) = explain(source(), [0])
    assert [(place.label, place.file, place.copy, place.used) for place in found.places] == [
        ("S1", "s0.pt", 0, True),
        ("S2", "s1.pt", 0, True),
        ("S3", "s2.pt", 1, True),
        ("S4", "s3.pt", 1, True),
    ]
    assert (
        "\n".join(to_lines(found, {}))
        == """\
fp32/layer.weight  [4, 6] float32, 96 B
  source: deepspeed tp=2,pp=1,dp=2,zero=1
    S1  [0:4, 0:3]  s0.pt  bytes 100:148  copy 0
    S2  [0:4, 3:6]  s1.pt  bytes 100:148  copy 0
    S3  [0:4, 0:3]  s2.pt  bytes 100:148  copy 1
    S4  [0:4, 3:6]  s3.pt  bytes 100:148  copy 1"""
    )


def test_with_a_target_every_box_says_what_it_is_made_of() -> None:
    plan = planned()
    (found,) = explain(plan.index, [0], plan)
    assert (
        "\n".join(to_lines(found, plan.index.aliases))
        == """\
fp32/layer.weight  [4, 6] float32, 96 B; also called head.weight
  source: deepspeed tp=2,pp=1,dp=2,zero=1
    S1  [0:4, 0:3]  s0.pt  bytes 100:148  copy 0
    S2  [0:4, 3:6]  s1.pt  bytes 100:148  copy 0
    S3  [0:4, 0:3]  s2.pt  bytes 100:148  copy 1 (not read)
    S4  [0:4, 3:6]  s3.pt  bytes 100:148  copy 1 (not read)
  target: safetensors tp=1,pp=1,dp=3,zero=1
    as weight/layer.weight  [4, 6] bfloat16, 48 B, float32 rounded to nearest even
    T1  [0:1, 0:6]  <&>.bin  bytes 64:76                    <- S1 [0:1, 0:3], S2 [0:1, 3:6]
    T2  [1:4, 0:6]  <&>.bin  bytes 76:128  strides [10, 1]  <- S1 [1:4, 0:3], S2 [1:4, 3:6]"""
    )


def test_what_the_target_leaves_out_is_said() -> None:
    plan = planned()
    (found,) = explain(plan.index, [1], plan)
    assert to_lines(found, {})[-1].endswith("target: safetensors tp=1,pp=1,dp=3,zero=1: does not hold this tensor")
    assert to_dict(found)["target"]["tensors"] == []


def test_the_same_as_json() -> None:
    plan = planned()
    (found,) = explain(plan.index, [0], plan)
    value = json.loads(json.dumps(to_dict(found)))
    assert (value["state"], value["shape"], value["bytes"]) == ("fp32", [4, 6], 96)
    assert [box["used"] for box in value["boxes"]] == [True, True, False, False]
    (target,) = value["target"]["tensors"]
    assert target["boxes"][1]["strides"] == [10, 1]
    assert target["boxes"][0]["from"] == [
        {"label": "S1", "offset": [0, 0], "size": [1, 3]},
        {"label": "S2", "offset": [0, 3], "size": [1, 3]},
    ]


def test_the_origins_of_a_box_cover_it_exactly() -> None:
    plan = planned()
    (found,) = explain(plan.index, [0], plan)
    for place in found.targets[0].places:
        count = np.zeros((4, 6), dtype=int)
        for _, box in place.origins:
            count[tuple(slice(low, high) for low, high in zip(box.offset, box.end, strict=True))] += 1
        inside = tuple(slice(low, high) for low, high in zip(place.box.offset, place.box.end, strict=True))
        assert (count[inside] == 1).all()
        assert count.sum() == place.box.num_elements


def test_the_picture_is_xml_with_a_frame_for_every_box_and_the_colours_of_the_source() -> None:
    plan = planned()
    text = draw(explain(plan.index, [0], plan))
    root = ET.fromstring(text)
    frames = [item for item in root.iter(f"{SVG}rect") if item.get("class") == "box"]
    parts = [item for item in root.iter(f"{SVG}rect") if item.get("class") == "part"]
    assert len(frames) == 2 + 2  # one copy of the source, and the target
    assert len(parts) == 2 + 4
    left, right = parts[:2], parts[2:]
    assert {item.get("fill") for item in right} == {item.get("fill") for item in left}
    assert len({item.get("fill") for item in left}) == 2
    tips = [item.text or "" for item in root.iter(f"{SVG}title")]
    assert "T2 [1:4, 0:6]: <&>.bin, bytes 76:128" in tips
    words = [item.text or "" for item in root.iter(f"{SVG}text")]
    assert {"S1", "S2", "T1", "T2"} <= set(words)
    assert any("one of 2 copies" in word for word in words)
    assert any("<&>.bin" in word for word in words)


def test_parts_fill_the_frame_of_the_picture() -> None:
    """The areas of all parts of a side add up to the whole matrix."""
    plan = planned()
    root = ET.fromstring(draw(explain(plan.index, [0], plan)))
    areas = [
        float(item.get("width", 0)) * float(item.get("height", 0))
        for item in root.iter(f"{SVG}rect")
        if item.get("class") == "part"
    ]
    assert sum(areas[:2]) == pytest.approx(sum(areas[2:]), rel=1e-3)


def test_a_tensor_without_a_target_is_drawn_alone() -> None:
    index = source()
    root = ET.fromstring(draw(explain(index, [0, 1])))
    assert len([item for item in root.iter(f"{SVG}rect") if item.get("class") == "box"]) == 2 + 1


@given(st.lists(st.integers(1, 4), max_size=4), st.data())
def test_the_matrix_view_of_a_box_is_the_box(shape: list[int], data: st.DataObject) -> None:
    offset = [data.draw(st.integers(0, size - 1)) for size in shape]
    size = [data.draw(st.integers(1, full - low)) for full, low in zip(shape, offset, strict=True)]
    wanted = np.zeros(shape, dtype=int)
    wanted[tuple(slice(low, low + length) for low, length in zip(offset, size, strict=True))] = 1
    found = np.zeros(matrix_shape(shape), dtype=int)
    for cut in rectangles(Box(tuple(offset), tuple(size)), shape):
        found[cut.row : cut.row + cut.rows, cut.column : cut.column + cut.columns] += 1
    assert (found == wanted.reshape(matrix_shape(shape))).all()


def test_neighbouring_rows_are_one_rectangle() -> None:
    assert len(list(rectangles(Box((0, 0, 0), (2, 3, 4)), (2, 3, 4)))) == 1
    assert len(list(rectangles(Box((0, 1, 0), (2, 1, 4)), (2, 3, 4)))) == 2


def test_an_empty_tensor_has_a_picture_too() -> None:
    assert list(itertools.chain(rectangles(Box((0, 0), (0, 4)), (0, 4)), rectangles(Box((), ()), ()))) != []
