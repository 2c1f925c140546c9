"""Name maps on checkpoints that are cut at random: values arrive where numpy puts them, and the way back is the way."""

import dataclasses
import itertools
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from reshard.execution.verify import read_digests
from reshard.names import NameMap, build, rename
from reshard.tensors.geometry import flat_interval_to_boxes
from reshard.tensors.layout import Index, LogicalTensor, ParamGroup, SourceFile, TensorKey
from reshard.tensors.shard_table import ShardTableBuilder
from reshard.topology import Topology
from tests.golden.files import assemble
from tests.randomness import examples

STATES = ("weight", "fp32", "exp_avg")
DTYPES = {"weight": "bfloat16", "fp32": "float32", "exp_avg": "float32"}
BITS = {"bfloat16": np.uint16, "float32": np.uint32}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("source")


def source(folder: Path, tensors: dict[TensorKey, np.ndarray], cuts: list[float], copies: int, **more) -> Index:
    """A checkpoint of one file, each tensor in flat partitions as ZeRO makes them, so many times."""
    builder, content = ShardTableBuilder(), bytearray(b"some header")
    logical = []
    for number, (key, value) in enumerate(tensors.items()):
        dtype = DTYPES.get(key.state, "float32")
        logical.append(LogicalTensor(key=key, shape=value.shape, dtype=dtype))
        bounds = sorted({0, value.size, *(int(cut * value.size) for cut in cuts)})
        for replica in range(copies):
            for start, stop in itertools.pairwise(bounds):
                for box, first in flat_interval_to_boxes(value.shape, start, stop):
                    position = len(content) + (first - start) * value.itemsize
                    strides = tuple(stride // value.itemsize for stride in value.strides)
                    builder.add(tensor=number, box=box, file=0, byte_offset=position, strides=strides, replica=replica)
                content += value.reshape(-1)[start:stop].tobytes()
    (folder / "data.bin").write_bytes(content)
    return Index(
        root=folder,
        format="made-up",
        topology=Topology(),
        step=3,
        samples=36,
        tensors=tuple(logical),
        files=(SourceFile(path="data.bin", num_bytes=len(content)),),
        shards=builder.build(),
        **more,
    )


def values(shape: tuple[int, ...], state: str, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(1, 60000, shape).astype(BITS[DTYPES[state]])


@dataclasses.dataclass(frozen=True)
class Case:
    """A tensor, the rule that cuts it, and how numpy cuts it."""

    shape: tuple[int, ...]
    dim: int
    groups: int
    sizes: tuple[int, ...]
    stacked: bool

    def rule(self, number: int) -> dict:
        names = [f"part{at}.{{layer+1}}.of{number}" for at in range(len(self.sizes))]
        if self.stacked:
            return {
                "from": f"{{layer}}.whole{number}", "to": f"part{{at}}.{{layer+1}}.of{number}",
                "over": {"at": len(self.sizes)}, "dim": self.dim, "stack": True,
            }  # fmt: skip
        return {
            "from": f"{{layer}}.whole{number}", "to": names,
            "dim": self.dim, "groups": self.groups, "sizes": list(self.sizes),
        }  # fmt: skip

    def parts(self, value: np.ndarray) -> list[np.ndarray]:
        front = np.moveaxis(value, self.dim, 0)
        if self.stacked:
            return list(front)
        grouped = front.reshape(self.groups, sum(self.sizes), *front.shape[1:])
        found = np.split(grouped, np.cumsum(self.sizes)[:-1], axis=1)
        return [np.moveaxis(part.reshape(-1, *front.shape[1:]), 0, self.dim) for part in found]


@st.composite
def cases(draw: st.DrawFn) -> Case:
    ndim = draw(st.integers(1, 3))
    dim = draw(st.integers(0, ndim - 1))
    stacked = draw(st.booleans())
    sizes = (
        (1,) * draw(st.integers(1, 4)) if stacked else tuple(draw(st.lists(st.integers(1, 4), min_size=2, max_size=4)))
    )
    groups = 1 if stacked else draw(st.integers(1, 3))
    shape = [draw(st.integers(1, 5)) for _ in range(ndim)]
    shape[dim] = groups * sum(sizes)
    return Case(tuple(shape), dim, groups, sizes, stacked)


@pytest.mark.slow
@settings(
    deadline=None,
    max_examples=examples(60),
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
@given(
    found=st.lists(cases(), min_size=1, max_size=3),
    layers=st.integers(1, 2),
    cuts=st.lists(st.floats(0, 1), max_size=4),
    copies=st.integers(1, 2),
)
def test_parts_are_where_numpy_puts_them_and_the_way_back_changes_nothing(folder, found, layers, cuts, copies):
    name_map = build({"version": 1, "rules": [case.rule(number) for number, case in enumerate(found)]})
    before: dict[TensorKey, np.ndarray] = {}
    expected: dict[str, np.ndarray] = {}
    names: list[str] = []
    after: list[str] = []
    for layer in range(layers):
        for number, case in enumerate(found):
            names.append(f"{layer}.whole{number}")
            after += [f"part{at}.{layer + 1}.of{number}" for at in range(len(case.sizes))]
            for state in STATES:
                value = values(case.shape, state, seed=len(before))
                before[TensorKey(state, names[-1])] = value
                for at, part in enumerate(case.parts(value)):
                    expected[f"{state}/part{at}.{layer + 1}.of{number}"] = part
    index = source(folder, before, cuts, copies, groups=(ParamGroup(names=tuple(names), scalars={"step": 3}),))
    renamed = rename(index, name_map)
    assert [group.names for group in renamed.groups] == [tuple(after)]
    found_parts = assemble(renamed)
    assert found_parts.keys() == expected.keys()
    for key, value in expected.items():
        assert found_parts[key].shape == value.shape, key
        assert (found_parts[key] == value).all(), key
    back = rename(renamed, name_map.inverse())
    assert name_map.inverse().inverse() == name_map
    assert read_digests(back) == read_digests(index)
    assert sorted(back.tensors, key=str) == sorted(index.tensors, key=str)
    assert back.groups == index.groups
    returned = assemble(back)
    for key, value in before.items():
        assert (returned[str(key)] == value).all(), key


@st.composite
def renames(draw: st.DrawFn) -> tuple[NameMap, list[str]]:
    """Plain rules with fields of every kind, and names that they match."""
    offset = draw(st.integers(0, 3))
    rules = [
        {"from": f"{{layer+{offset}}}.{{kind:weight|bias}}", "to": "blocks.{layer}.{kind}"},
        {"from": "top.{rest:any}", "to": "model.{rest}"},
        {"from": "{module:word}.scale", "to": "scales.{module}"},
    ]
    words = st.text("abc_", min_size=1, max_size=4)
    names = [f"{layer + offset}.{kind}" for layer in draw(st.sets(st.integers(0, 12))) for kind in ("weight", "bias")]
    names += [f"top.{word}.{word}" for word in draw(st.sets(words))]
    names += [f"{word}.scale" for word in draw(st.sets(words.filter(lambda word: word != "top")))]
    return build({"version": 1, "rules": rules}), names


@pytest.mark.slow
@settings(deadline=None, max_examples=examples(40))
@given(case=renames())
def test_other_names_and_back_give_the_same_index(folder, case):
    name_map, names = case
    tensors = {
        TensorKey(state, name + suffix): values((2, 3), state, seed=len(name))
        for name in names
        for state in STATES
        for suffix in ("", "#padding")
    }
    index = source(folder, tensors, [0.4], 1, groups=(ParamGroup(names=tuple(names)),))
    renamed = rename(index, name_map)
    assert len({tensor.key for tensor in renamed.tensors}) == len(tensors)
    assert sorted(read_digests(renamed).values()) == sorted(read_digests(index).values())
    assert name_map.inverse().inverse() == name_map
    back = rename(renamed, name_map.inverse())
    assert back.tensors == index.tensors
    assert back.groups == index.groups
    for field in dataclasses.fields(index.shards):
        assert (getattr(back.shards, field.name) == getattr(index.shards, field.name)).all(), field.name
