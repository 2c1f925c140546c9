"""DCP from other formats, and what a reader makes of unusual but valid checkpoints."""

import dataclasses
import tempfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from reshard.api import view_of
from reshard.errors import UnsafePickleError, UnsupportedError
from reshard.execution.executor import execute
from reshard.formats.base import Request
from reshard.formats.dcp import FORMAT
from reshard.formats.dcp.metadata import Entry
from reshard.formats.dcp.writing.cutting import split_rows
from reshard.formats.dcp.writing.metadata_file import build_metadata_file
from reshard.formats.dcp.writing.skeleton import RankFiles, file_name
from reshard.formats.pt.objects import Global, Inert, Storage, Tensor, new_tensor
from reshard.planning.check import check_plan
from reshard.planning.plan import make_plan
from reshard.tensors.geometry import whole
from reshard.tensors.layout import Index, LogicalTensor, ParamGroup, SourceFile, TargetFile, TensorKey
from reshard.tensors.shard_table import ShardTableBuilder
from reshard.tensors.views import keep_tensors, select_states
from reshard.topology import Topology
from tests.golden.dcp_files import edit_metadata
from tests.golden.files import any_name, assemble
from tests.randomness import examples

TORCH_CHUNKS = {  # len of torch.arange(n).chunk(world), by hand
    (12, 4): [3, 3, 3, 3],
    (13, 4): [4, 4, 4, 1],
    (5, 4): [2, 2, 1],
    (3, 4): [1, 1, 1],
    (6, 1): [6],
    (0, 4): [0],
}


@pytest.mark.parametrize(("rows", "world"), TORCH_CHUNKS)
def test_tensors_are_cut_as_torch_chunk_does(rows, world):
    found = [(rank, size) for first, last, size in split_rows((rows, 2), world) for rank in range(first, last)]
    assert [size[0] for _, size in found] == TORCH_CHUNKS[rows, world]
    assert [rank for rank, _ in found] == list(range(len(found)))
    assert list(split_rows((), world)) == [(0, 1, ())]


def write(folder: Path, files: tuple[TargetFile, ...], entries: list[Entry]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for file in (*files, build_metadata_file(entries)):
        content = bytearray(file.num_bytes)
        for position, data in file.fixed:
            content[position : position + len(data)] = data
        (folder / file.path).write_bytes(content)
    return folder


class Maker:
    """A DCP checkpoint from values, in one file."""

    def __init__(self):
        self.files = RankFiles(1)
        self.entries: list[Entry] = []

    def tensor(self, *path, values, dtype="float32", tensor=None):
        values = np.asarray(values, dtype=dtype)
        tensor = tensor or new_tensor(dtype, values.shape, values.tobytes())
        place = self.files.add_object(0, tensor)
        self._add(path, values.shape, dtype, ((whole(values.shape), place),))

    def object(self, *path, value):
        with any_name():
            self._add(path, None, "", ((None, self.files.add_object(0, value)),))

    def _add(self, path, shape, dtype, chunks):
        key = ".".join(map(str, path))
        self.entries.append(Entry(key=key, path=path, shape=shape, dtype=dtype, chunks=chunks))

    def write(self, folder: Path) -> Path:
        return write(folder, self.files.build(), self.entries)


def adam(maker: Maker, names=("a", "b"), steps=(3.0, 3.0), optimizer="optim") -> Maker:
    for at, name in enumerate(names):
        maker.tensor("model", name, values=[[at, 1.5], [2, -at]])
        maker.tensor(optimizer, f"state.{name}.exp_avg", values=[[at, 0.5], [2, at]])
        maker.tensor(optimizer, f"state.{name}.step", values=steps[at])
        maker.object(optimizer, f"param_groups.{name}.lr", value=0.1)
    return maker


def test_parameters_that_took_part_in_fewer_steps_keep_their_own(tmp_path):
    index = FORMAT.read(adam(Maker(), steps=(3.0, 2.0)).write(tmp_path / "a"), None)
    assert index.step == 3
    assert index.groups[0].scalars == {}
    tensors = assemble(index)
    assert [tensors[f"step/{name}"].view(np.float32) for name in "ab"] == [3.0, 2.0]


def test_steps_that_agree_are_the_groups(tmp_path):
    index = FORMAT.read(adam(Maker()).write(tmp_path / "a"), None)
    assert index.groups == (ParamGroup(names=("a", "b"), options={"lr": 0.1}, scalars={"step": 3.0}),)
    assert {item.key.state for item in index.tensors} == {"weight", "exp_avg"}


def test_numbers_may_be_objects_and_options_tensors(tmp_path):
    maker = Maker()
    maker.tensor("model", "a", values=[1.0])
    maker.tensor("optim", "state", "a", "exp_avg", values=[2.0])
    maker.object("optim", "state", "a", "step", value=4)
    maker.object("optim", "param_groups", 0, "params", value=["a"])
    maker.tensor("optim", "param_groups", 0, "lr", values=0.25)
    index = FORMAT.read(maker.write(tmp_path / "a"), None)
    assert index.groups == (ParamGroup(names=("a",), options={"lr": 0.25}, scalars={"step": 4}),)
    assert index.step == 4


def test_groups_may_be_one_object(tmp_path):
    """As torch before 2.4 left lists without tensors."""
    maker = Maker()
    maker.tensor("model", "a", values=[1.0])
    maker.tensor("optim", "state", "a", "exp_avg", values=[2.0])
    maker.object("optim", "param_groups", value=[{"lr": 0.1, "params": ["a"]}, {"lr": 0.2, "params": []}])
    index = FORMAT.read(maker.write(tmp_path / "a"), None)
    assert index.groups == (ParamGroup(names=("a",), options={"lr": 0.1}), ParamGroup(names=(), options={"lr": 0.2}))
    convert(index, tmp_path / "out", 2)
    assert FORMAT.read(tmp_path / "out", None).groups == index.groups


def test_a_replica_that_is_listed_twice_is_one(tmp_path):
    maker = adam(Maker())
    maker.entries = [
        dataclasses.replace(item, chunks=item.chunks * (2 if item.key == "model.a" else 1)) for item in maker.entries
    ]
    folder = maker.write(tmp_path / "a")
    edit_metadata(folder, lambda state: [state["storage_data"].pop(at) for at in doubled(state)])
    assert set(assemble(FORMAT.read(folder, None))) == {"weight/a", "weight/b", "exp_avg/a", "exp_avg/b"}


def doubled(state):
    """Recipes of indices that torch would find equal."""
    seen: set[tuple] = set()
    for index in list(state["storage_data"]):
        at = (index.state["fqn"], index.state.get("offset"))
        if at in seen:
            yield index
        seen.add(at)


def test_elements_may_lie_in_another_order(tmp_path):
    """`torch.save` keeps the strides of a dense tensor: channels last, or a transposed weight."""
    values = np.arange(6, dtype=np.float32).reshape(2, 3)
    storage = Storage(dtype="float32", num_elements=6, data=values.T.tobytes())
    maker = Maker()
    maker.tensor("model", "a", values=values, tensor=Tensor(storage=storage, offset=0, shape=(2, 3), stride=(1, 2)))
    index = FORMAT.read(maker.write(tmp_path / "a"), None)
    assert (assemble(index)["weight/a"].view(np.float32) == values).all()
    convert(index, tmp_path / "out", 2)
    assert (assemble(FORMAT.read(tmp_path / "out", None))["weight/a"].view(np.float32) == values).all()


def test_an_average_of_the_weights_is_a_state_of_its_own(tmp_path):
    maker = adam(Maker())
    for name in "ab":
        maker.tensor("ema", name, values=[[5, 6], [7, 8]])
    index = FORMAT.read(maker.write(tmp_path / "a"), None)
    assert {item.key.state for item in index.tensors} == {"weight", "exp_avg", "ema"}


def test_an_empty_tensor_travels(tmp_path):
    maker = adam(Maker())
    maker.tensor("model", "none", values=np.zeros((0, 3)))
    index = FORMAT.read(maker.write(tmp_path / "a"), None)
    convert(index, tmp_path / "out", 3)
    found = FORMAT.read(tmp_path / "out", None)
    assert {item.key.name: item.shape for item in found.tensors}["none"] == (0, 3)


def test_keys_without_recorded_paths_are_understood(tmp_path):
    maker = adam(Maker())
    maker.entries = [
        Entry(key=item.key, path=(item.key,), shape=item.shape, dtype=item.dtype, chunks=item.chunks)
        for item in maker.entries
    ]
    index = FORMAT.read(maker.write(tmp_path / "a"), None)
    assert {str(item.key) for item in index.tensors} == {"weight/a", "weight/b", "exp_avg/a", "exp_avg/b"}
    assert index.groups[0].names == ("a", "b")


def test_a_name_that_can_be_read_in_two_ways_is_refused(tmp_path):
    maker = adam(Maker(), names=("a", "a.b"))
    maker.tensor("optim", "state.a.b.c", values=[1.0])
    index = FORMAT.read(maker.write(tmp_path / "a"), None)
    with pytest.raises(UnsupportedError, match=r"state\.a\.b\.exp_avg: b\.exp_avg of a or exp_avg of a\.b"):
        view_of(index)


def test_a_large_tensor_of_no_known_purpose_is_refused(tmp_path):
    maker = adam(Maker())
    maker.tensor("cache", "x", values=np.zeros((5 << 20,)))
    with pytest.raises(UnsupportedError, match=r"cache\.x float32 \[5242880\] in 1 chunks"):
        FORMAT.read(maker.write(tmp_path / "a"), None)


EVIL = Inert("reduce", Global("os", "system"), ("touch executed",))


def test_code_in_an_option_is_refused(tmp_path):
    maker = adam(Maker())
    maker.object("optim", "param_groups.a.eps", value=EVIL)
    with pytest.raises(UnsafePickleError, match=r"param_groups\.a\.eps.*names os\.system"):
        FORMAT.read(maker.write(tmp_path / "a"), None)


def test_code_in_an_object_is_not_carried_along(tmp_path):
    maker = adam(Maker())
    maker.object("loader", "state", value=EVIL)
    index = FORMAT.read(maker.write(tmp_path / "a"), None)
    with pytest.raises(UnsafePickleError, match=r"loader\.state.*names os\.system"):
        FORMAT.layout(index, Request(topology=Topology(dp=2, zero=3)))


def test_an_option_that_is_not_data_is_refused(tmp_path):
    maker = adam(Maker())
    maker.object("optim", "param_groups.a.eps", value=Inert("new", Global("argparse", "Namespace"), ()))
    with pytest.raises(UnsupportedError, match=r"param_groups\.a\.eps: expected plain data"):
        FORMAT.read(maker.write(tmp_path / "a"), None)


def convert(index: Index, target: Path, world: int, **request):
    layout = FORMAT.layout(index, Request(topology=Topology(dp=world, zero=3), **request))
    plan = make_plan(index, layout, num_threads=1)
    check_plan(plan)
    target.mkdir(parents=True)
    execute(plan, target, sync=False)
    return layout


def foreign(folder: Path, tensors: dict[str, np.ndarray], dtypes: dict[str, str] | None = None, **more) -> Index:
    """An index as a reader of another format makes it, of one plain file."""
    folder.mkdir()
    table, logical, position = ShardTableBuilder(), [], 0
    with (folder / "data").open("wb") as stream:
        for at, (key, value) in enumerate(tensors.items()):
            state, _, name = key.partition("/")
            dtype = (dtypes or {}).get(state, str(value.dtype))
            logical.append(LogicalTensor(key=TensorKey(state, name), shape=value.shape, dtype=dtype))
            table.add(tensor=at, box=whole(value.shape), file=0, byte_offset=position)
            position += stream.write(value.tobytes())
    return Index(
        root=folder,
        format="deepspeed",
        topology=Topology(dp=2, zero=1),
        step=4,
        samples=0,
        tensors=tuple(logical),
        files=(SourceFile(path="data", num_bytes=position),),
        shards=table.build(),
        **more,
    )


def mixed_precision(tmp_path, **more) -> Index:
    """bf16 weights, fp32 masters, a buffer, a vocabulary with padding, one moment."""
    chance = np.random.default_rng(3)
    masters = {name: chance.normal(size=shape).astype(np.float32) for name, shape in (("a", (5, 2)), ("b", (3,)))}
    tensors = {
        **{f"weight/{name}": (value.view(np.uint32) >> 16).astype(np.uint16) for name, value in masters.items()},
        "weight/buffer": np.array([7, 8], dtype=np.uint16),
        **{f"fp32/{name}": value for name, value in masters.items()},
        "fp32/a#padding": np.zeros((1, 2), dtype=np.float32),
        **{f"exp_avg/{name}": value * 2 for name, value in masters.items()},
    }
    groups = (ParamGroup(names=("a", "b"), options={"lr": 0.1, "betas": (0.9, 0.95)}, scalars={"step": 4}),)
    arguments = {"groups": groups, "aliases": {"head": "a"}, **more}
    return foreign(tmp_path / "source", tensors, {"weight": "bfloat16"}, **arguments)


def test_master_weights_become_the_weights(tmp_path):
    index = mixed_precision(tmp_path)
    layout = convert(index, tmp_path / "out", 2)
    found = FORMAT.read(tmp_path / "out", None)
    types = {str(item.key): item.dtype for item in found.tensors}
    assert types == {
        "weight/a": "float32",
        "weight/b": "float32",
        "weight/head": "float32",
        "weight/buffer": "bfloat16",
        "exp_avg/a": "float32",
        "exp_avg/b": "float32",
    }
    before, after = assemble(index), assemble(found)
    assert (after["weight/a"] == before["fp32/a"]).all()
    assert (after["weight/head"] == before["fp32/a"]).all()
    assert (after["weight/buffer"] == before["weight/buffer"]).all()
    assert (after["exp_avg/b"] == before["exp_avg/b"]).all()
    assert found.groups == index.groups
    assert found.step == 4
    assert any("2 weights of type bfloat16 are left behind" in note for note in layout.notes)
    assert any("padding rows of a are left behind" in note for note in layout.notes)


def test_weights_of_the_type_that_was_asked_for_are_taken_as_they_are(tmp_path):
    index = mixed_precision(tmp_path)
    layout = convert(index, tmp_path / "out", 2, weight_dtype="bfloat16")
    before, after = assemble(index), assemble(FORMAT.read(tmp_path / "out", None))
    assert (after["weight/a"] == before["weight/a"]).all()
    assert not any("left behind: model" in note for note in layout.notes)


def test_a_source_without_settings_is_said_to_have_none(tmp_path):
    layout = convert(mixed_precision(tmp_path, groups=()), tmp_path / "out", 2)
    assert any("says nothing of the optimizer's settings" in note for note in layout.notes)


def test_names_that_collide_are_refused(tmp_path):
    index = mixed_precision(tmp_path, aliases={"b": "a"})
    with pytest.raises(UnsupportedError, match=r"such as model\.b"):
        FORMAT.layout(index, Request(topology=Topology(dp=2, zero=3)))


@settings(max_examples=examples(40), deadline=None)
@given(
    shapes=st.lists(st.lists(st.integers(0, 7), max_size=3).map(tuple), min_size=1, max_size=4),
    worlds=st.lists(st.integers(1, 9), min_size=1, max_size=3),
)
def test_any_tensors_survive_any_worlds(shapes, worlds):
    with tempfile.TemporaryDirectory() as scratch:
        values = {f"weight/{at}.w": np.arange(np.prod(shape), dtype=np.float32) + at for at, shape in enumerate(shapes)}
        values = {key: value.reshape(shape) for (key, value), shape in zip(values.items(), shapes, strict=True)}
        index = foreign(Path(scratch) / "source", values)
        for number, world in enumerate(worlds):
            target = Path(scratch) / str(number)
            convert(index, target, world)
            index = FORMAT.read(target, None)
        found = assemble(keep_tensors(index, [at for at, item in enumerate(index.tensors) if item.num_elements]))
        assert {str(item.key): item.shape for item in index.tensors} == {
            key: value.shape for key, value in values.items()
        }
        for key, value in values.items():
            assert value.size == 0 or (found[key].view(np.float32) == value).all(), key


def example(tmp_path, *, rows=5, nested=False) -> Index:
    """A checkpoint of the same model as `mixed_precision`, with another tree, more options, and more besides."""
    maker = Maker()
    for name, shape in (("a", (rows, 2)), ("head", (rows, 2)), ("b", (3,)), ("buffer", (2,))):
        maker.tensor(name, values=np.zeros(shape))
    for name, shape in (("a", (rows, 2)), ("b", (3,))):
        state = ("optimizer", "state", name) if nested else ("optimizer",)
        prefix = "" if nested else f"state.{name}."
        maker.tensor(*state, f"{prefix}exp_avg", values=np.zeros(shape))
        maker.tensor(*state, f"{prefix}step", values=1.0)
        if not nested:
            maker.object("optimizer", f"param_groups.{name}.lr", value=0.5)
            maker.object("optimizer", f"param_groups.{name}.amsgrad", value=False)
    if nested:
        maker.object("optimizer", "param_groups", 0, "lr", value=0.5)
        maker.object("optimizer", "param_groups", 0, "amsgrad", value=False)
        maker.object("optimizer", "param_groups", 0, "params", value=["a", "b"])
    maker.object("schedule", "last_epoch", value=1)
    return FORMAT.read(maker.write(tmp_path / "example"), None)


@pytest.mark.parametrize("nested", [False, True])
def test_the_target_can_be_like_another_checkpoint(nested, tmp_path):
    like, index = example(tmp_path, nested=nested), mixed_precision(tmp_path)
    layout = convert(index, tmp_path / "out", 2, like=like)
    found = FORMAT.read(tmp_path / "out", None)
    assert found.extra.order == like.extra.order
    assert found.extra.paths == like.extra.paths
    (group,) = found.groups
    assert (group.names, group.options, group.scalars) == (("a", "b"), {"lr": 0.1, "amsgrad": False}, {"step": 4.0})
    before, after = assemble(index), assemble(found)
    assert (after["weight/head"] == before["fp32/a"]).all()
    assert (after["exp_avg/b"] == before["exp_avg/b"]).all()
    assert any("amsgrad" in note and "schedule.last_epoch" in note for note in layout.notes)


@pytest.mark.parametrize("nested", [False, True])
def test_weights_alone_become_the_model_of_another_checkpoint_without_its_optimizer(nested, tmp_path):
    like = example(tmp_path, nested=nested)
    index = select_states(mixed_precision(tmp_path), ("fp32", "weight"))
    layout = convert(index, tmp_path / "out", 2, like=like)
    found = FORMAT.read(tmp_path / "out", None)
    assert {tensor.key.state for tensor in found.tensors} == {"weight"}
    assert {key: path for key, path in like.extra.paths.items() if key.state == "weight"} == found.extra.paths
    assert set(found.extra.order) == {"a", "b", "head", "buffer"}
    assert (assemble(found)["weight/head"] == assemble(index)["fp32/a"]).all()
    assert any(note.endswith("besides is left out") for note in layout.notes)


def test_a_weight_that_only_the_example_has_is_named(tmp_path):
    like, index = example(tmp_path), select_states(mixed_precision(tmp_path, aliases={}), ("fp32", "weight"))
    with pytest.raises(UnsupportedError, match=r"weight/head is only in the checkpoint that the target shall be like"):
        FORMAT.layout(index, Request(topology=Topology(dp=2, zero=3), like=like))


def test_another_model_is_no_example(tmp_path):
    like, index = example(tmp_path, rows=6), mixed_precision(tmp_path)
    with pytest.raises(UnsupportedError, match=r"weight/a is \[5, 2\], and \[6, 2\] in the one"):
        FORMAT.layout(index, Request(topology=Topology(dp=2, zero=3), like=like))


def test_an_example_of_another_format_is_refused(tmp_path):
    index = mixed_precision(tmp_path)
    with pytest.raises(UnsupportedError, match="is of the format deepspeed, not dcp"):
        FORMAT.layout(index, Request(topology=Topology(dp=2, zero=3), like=index))


def test_without_optimizer_states_nothing_but_weights_is_carried(tmp_path):
    maker = adam(Maker())
    maker.object("loader", "state", value=[1, 2])
    maker.tensor("progress", "tokens", values=7.0)  # no weight, which only the optimizer's states tell
    index = select_states(FORMAT.read(maker.write(tmp_path / "a"), None), ("weight",))
    layout = convert(index, tmp_path / "out", 2)
    found = FORMAT.read(tmp_path / "out", None)
    assert set(found.extra.order) == {"model.a", "model.b"}
    assert layout.notes == ("left behind with the optimizer: loader.state, progress.tokens",)


def test_a_source_without_checksums_is_read(tmp_path):
    """torch.serialization.set_crc32_options(False)."""
    maker = adam(Maker())
    folder = maker.write(tmp_path / "a")
    content = bytearray((folder / file_name(0)).read_bytes())
    for entry in maker.entries:
        place = entry.chunks[0][1]
        item = content[place.offset : place.offset + place.length]
        at = item.find(b"PK\x01\x02")
        while at >= 0:
            item[at + 16 : at + 20] = bytes(4)
            at = item.find(b"PK\x01\x02", at + 4)
        content[place.offset : place.offset + place.length] = item
    (folder / file_name(0)).write_bytes(content)
    index = FORMAT.read(folder, None)
    assert index.files[0].checksums == ()
    assert index.groups[0].scalars == {"step": 3.0}
