"""Checkpoints that real DeepSpeed wrote: read right, convert to every layout and back without changing a bit.

The truth beside each checkpoint is what DeepSpeed's own accessors returned when it was saved. `make.py` makes it again.
"""

import contextlib
import hashlib
import json
import random
import shutil
import struct
import zipfile
from pathlib import Path

import numpy as np
import pytest

from reshard.api import plan_of, reshard
from reshard.commit import Commit, CommittedFile, read_commit, write_commit
from reshard.errors import CorruptSourceError, ReshardError, UnsupportedError
from reshard.formats import read_checkpoint
from reshard.formats.pt.objects import Size
from reshard.formats.pt.reader import read
from reshard.formats.pt.writer import lay_out_pt
from reshard.layout import Index
from reshard.topology import Topology

ROOT = Path(__file__).parent / "deepspeed-0.19.8"
STEP = "step-00000002"
TARGETS = {
    "pipeline-tp2-pp2": ["tp=1", "tp=2", "pp=2", "pp=3,dp=2", "tp=2,pp=2,dp=2", "dp=5", "tp=2,pp=1,dp=3"],
    "pipeline-dp2": ["tp=1", "tp=2", "pp=2", "tp=2,pp=2", "tp=2,pp=3,dp=2", "dp=7"],
    "zero2-dp3": ["dp=1,zero=2", "dp=2,zero=1", "dp=8,zero=2", "dp=64,zero=2"],
    "zero2-dp3-round-robin": ["dp=1,zero=2", "dp=2,zero=1", "dp=8,zero=2"],
    "zero3-dp3": ["dp=1,zero=3", "dp=2,zero=3", "dp=7,zero=3", "dp=64,zero=3"],
    "bf16-dp2": ["dp=1", "dp=3", "dp=4,zero=2"],
}
NUMPY = {"float32": np.uint32, "bfloat16": np.uint16, "uint8": np.uint8, "int64": np.int64}


def assemble(index: Index) -> dict[str, np.ndarray]:
    """Every replica of every logical tensor, put together from the files; replicas must agree."""
    contents = [np.fromfile(index.root / file.path, dtype=np.uint8) for file in index.files]
    result: dict[str, np.ndarray] = {}
    rows_of = index.shards.by_tensor(len(index.tensors))
    for tensor, rows in zip(index.tensors, rows_of, strict=True):
        kind = np.dtype(NUMPY[tensor.dtype])
        copies: dict[int, np.ndarray] = {}
        filled: dict[int, np.ndarray] = {}
        for number in rows:
            row = index.shards.row(int(number), len(tensor.shape))
            last = sum((size - 1) * stride for size, stride in zip(row.box.size, row.strides, strict=True))
            flat = contents[row.file][row.byte_offset : row.byte_offset + (last + 1) * kind.itemsize].copy().view(kind)
            view = np.lib.stride_tricks.as_strided(flat, row.box.size, [s * kind.itemsize for s in row.strides])
            target = copies.setdefault(row.replica, np.zeros(tensor.shape, kind))
            seen = filled.setdefault(row.replica, np.zeros(tensor.shape, np.int64))
            where = tuple(slice(low, high) for low, high in zip(row.box.offset, row.box.end, strict=True))
            target[where] = view
            seen[where] += 1
        assert all((seen == 1).all() for seen in filled.values()), tensor.key
        for copy in copies.values():
            assert (copy == copies[0]).all(), f"copies of {tensor.key} differ"
        result[str(tensor.key)] = copies[0]
    return result


def whole(tensors: dict[str, np.ndarray], key: str) -> np.ndarray:
    """A tensor with its vocabulary's padding rows put back."""
    padding = tensors.get(f"{key}#padding")
    return tensors[key] if padding is None else np.concatenate([tensors[key], padding])


def cut(name: str, value: np.ndarray, tp: int, rank: int) -> np.ndarray:
    """The example model's tensor parallelism in words of numpy: what rank `rank` holds."""
    leaf = name.rsplit(".", 1)[-1]
    if leaf in ("attention_norm", "ffn_norm", "norm"):
        return value
    if leaf in ("out", "down"):
        return np.split(value, tp, axis=1)[rank]
    if leaf == "qkv":  # 4 heads and twice 2 heads of width 2
        return np.concatenate([np.split(part, tp)[rank] for part in np.split(value, [8, 12])])
    if leaf == "gate_up":
        return np.concatenate([np.split(part, tp)[rank] for part in np.split(value, 2)])
    return np.split(value, tp)[rank]


def golden(name: str) -> Path:
    return ROOT / name / STEP


# DeepSpeed's accessors go by param_slice_mappings, which are wrong under round_robin_gradients.
@pytest.mark.parametrize("name", [name for name in TARGETS if not name.endswith("round-robin")])
def test_read_finds_the_values_that_deepspeed_reported(name):
    index = read_checkpoint(golden(name), None)
    tensors = assemble(index)
    assert index.step == 2
    assert index.samples == 24
    truths = sorted(golden(name).parent.glob("truth-*.json"))
    assert len(truths) == index.topology.tp * index.topology.pp
    compared = set()
    for path in truths:
        rank = int(path.stem.rpartition("tp")[2])
        for key, expected in json.loads(path.read_text()).items():
            found = whole(tensors, key)
            local = cut(key, found, index.topology.tp, rank) if index.topology.tp > 1 else found
            digest = hashlib.sha256(np.ascontiguousarray(local).tobytes()).hexdigest()
            assert f"{local.shape} {digest}" == expected, key
            compared.add(key)
    states = {key for key in tensors if not key.startswith("weight/") and not key.endswith("#padding")}
    assert compared == states


@pytest.mark.parametrize("name", TARGETS)
def test_weights_are_the_master_weights_in_the_model_type(name):
    tensors = assemble(read_checkpoint(golden(name), None))
    names = [key.removeprefix("fp32/") for key in tensors if key.startswith("fp32/")]
    for parameter in names:
        weight, master = tensors.get(f"weight/{parameter}"), tensors[f"fp32/{parameter}"]
        if name == "zero3-dp3":
            assert weight is None
        elif name == "bf16-dp2":  # round to nearest, ties to even
            assert (weight == ((master + 0x7FFF + ((master >> 16) & 1)) >> 16).astype(np.uint16)).all(), parameter
        else:
            assert (weight == master).all(), parameter


@pytest.mark.parametrize(("name", "target"), [(name, target) for name, to in TARGETS.items() for target in to])
def test_conversion_and_back_changes_no_bit(tmp_path, name, target):
    source = read_checkpoint(golden(name), None)
    report = reshard(golden(name), tmp_path / "there" / STEP, Topology.parse(target))
    back = reshard(tmp_path / "there" / STEP, tmp_path / "back" / STEP, source.topology)
    assert report.digest == back.digest
    there = read_checkpoint(tmp_path / "there" / STEP, None)
    assert there.topology == Topology.parse(target)
    before, between = assemble(source), assemble(there)
    after = assemble(read_checkpoint(tmp_path / "back" / STEP, None))
    assert before.keys() == between.keys() == after.keys()
    for key, value in before.items():
        assert (value == between[key]).all(), key
        assert (value == after[key]).all(), key


@pytest.mark.parametrize(
    ("name", "target", "back"),
    [
        ("zero2-dp3", "dp=2,zero=3", "dp=3,zero=2"),
        ("zero2-dp3-round-robin", "dp=5,zero=3", "dp=3,zero=2"),
        ("zero3-dp3", "dp=2,zero=1", "dp=3,zero=3"),
        ("zero3-dp3", "dp=64,zero=2", "dp=3,zero=3"),
        ("bf16-dp2", "dp=3,zero=3", None),
    ],
)
def test_change_between_zero3_and_lower_stages_changes_no_bit(tmp_path, name, target, back):
    """ZeRO-3 has no weights beside the master weights: they disappear, or come back as a copy of those."""
    reshard(golden(name), tmp_path / "there" / STEP, Topology.parse(target))
    before = assemble(read_checkpoint(golden(name), None))
    between = assemble(read_checkpoint(tmp_path / "there" / STEP, None))
    states = {key for key in before if not key.startswith("weight/")}
    assert states == {key for key in between if not key.startswith("weight/")}
    assert all((before[key] == between[key]).all() for key in states)
    for key in between.keys() - states - {"weight/scale"}:
        assert (between[key] == before[key.replace("weight/", "fp32/")]).all(), key
    if back is None:
        with pytest.raises(UnsupportedError, match="would have to be rounded"):
            reshard(tmp_path / "there" / STEP, tmp_path / "back" / STEP, Topology.parse("dp=2"))
        return
    reshard(tmp_path / "there" / STEP, tmp_path / "back" / STEP, Topology.parse(back))
    after = assemble(read_checkpoint(tmp_path / "back" / STEP, None))
    assert before.keys() == after.keys()
    assert all((value == after[key]).all() for key, value in before.items())


PIPELINE = {"num_layers": 5, "partition_method": "uniform", "parts": [0, 5], "tied": {"embed": [0, 4]}}


def strip(folder: Path, *keys: str) -> Path:
    """A copy's model files without some keys of the client state."""
    for path in folder.glob("*mp_rank_*_model_states.pt"):
        edit(folder, path.name, lambda value: [value.pop(key) for key in keys])
    return folder


def test_commit_describes_the_pipeline_where_the_files_do_not(tmp_path):
    folder = strip(Path(shutil.copytree(golden("pipeline-dp2"), tmp_path / "source" / STEP)), "pipeline_layout")
    with pytest.raises(UnsupportedError, match="which layers each stage gets is not known"):
        reshard(folder, tmp_path / "refused" / STEP, Topology(pp=2))
    files = [CommittedFile(path=path.name, num_bytes=path.stat().st_size) for path in folder.glob("*.pt")]
    commit = Commit(
        format="deepspeed", step=2, samples=24, topology=Topology(dp=2), attempt=1, writer="trainer", files=files,
        model={"pipeline": PIPELINE},
    )  # fmt: skip
    write_commit(folder, commit)
    target = tmp_path / "target" / STEP
    reshard(folder, target, Topology(pp=2, tp=2), require_commit=True)
    assert read_commit(target).model == {"pipeline": {**PIPELINE, "parts": [0, 3, 5]}}
    stages = [set(read(target / MODEL.format(2 * pp)).value["param_shapes"][0]) for pp in (0, 1)]
    assert "tied_modules.embed.weight" in stages[0] & stages[1]
    assert {name.partition(".")[0] for name in stages[0]} == {"tied_modules", "1", "2"}


def test_tied_layers_must_be_told_before_a_pipeline_is_split(tmp_path):
    folder = Path(shutil.copytree(golden("pipeline-dp2"), tmp_path / "source"))
    untold = {**PIPELINE, "tied": None}
    edit(folder, MODEL.format(0), lambda value: value.update(pipeline_layout=untold))
    with pytest.raises(UnsupportedError, match=r"tied modules \['embed'\] stand"):
        reshard(folder, tmp_path / STEP, Topology(pp=2))


def test_layout_without_tensor_parallelism_needs_no_description(tmp_path):
    folder = Path(shutil.copytree(golden("pipeline-dp2"), tmp_path / "source"))
    strip(folder, "pipeline_layout", "universal_checkpoint_info")
    assert reshard(folder, tmp_path / STEP, Topology(dp=3)).ok
    with pytest.raises(UnsupportedError, match="nothing is said about how tensor parallelism cuts"):
        reshard(folder, tmp_path / "refused", Topology(tp=2))


def test_source_with_tensor_parallelism_and_no_description_is_refused(tmp_path):
    folder = Path(shutil.copytree(golden("pipeline-tp2-pp2"), tmp_path / "source"))
    strip(folder, "universal_checkpoint_info")
    with pytest.raises(UnsupportedError, match="says nothing about how tensors are cut"):
        read_checkpoint(folder, None)


def test_description_without_row_parallel_parameters_is_refused(tmp_path):
    """What Megatron-DeepSpeed writes at tp=1: cut along dim 0, the same number of elements, silently wrong."""
    folder = Path(shutil.copytree(golden("pipeline-dp2"), tmp_path / "source"))
    key = "parameter_with_row_parallelism_patterns"
    edit(folder, MODEL.format(0), lambda value: value["universal_checkpoint_info"].update({key: []}))
    with pytest.raises(UnsupportedError, match="no row-parallel parameter"):
        reshard(folder, tmp_path / STEP, Topology(tp=2))


@pytest.mark.parametrize(("target", "rows"), [("tp=1", 14), ("tp=2", 16), ("tp=2,dp=2", 16)])
def test_vocabulary_is_padded_anew_with_zeros_where_its_multiple_is_told(tmp_path, target, rows):
    """13 true rows, padded to a multiple of 2 * tp."""
    folder = Path(shutil.copytree(golden("pipeline-dp2"), tmp_path / "source"))
    edit(folder, MODEL.format(0), lambda value: value["universal_checkpoint_info"].update(vocab_multiple=2))
    topology = Topology.parse(target)
    reshard(folder, tmp_path / STEP, topology)
    layer = "layer_00-model_{:02d}-model_states.pt"
    shards = []
    for tp in range(topology.tp):
        tensor = read(tmp_path / STEP / layer.format(tp)).value["weight"]
        data = (tmp_path / STEP / layer.format(tp)).read_bytes()[tensor.file_offset :][: 4 * tensor.num_elements]
        shards.append(np.frombuffer(data, np.uint32).reshape(tensor.shape))
    found = np.concatenate(shards)
    before = assemble(read_checkpoint(golden("pipeline-dp2"), None))
    assert found.shape == (rows, 8)
    assert (found[:13] == before["weight/tied_modules.embed.weight"]).all()
    padding = before["weight/tied_modules.embed.weight#padding"]
    assert (found[13:] == (padding if rows == 16 else 0)).all()


FLAT_INFO = {
    "universal_checkpoint_version": 0.2,
    "tp_replicated_parameter_patterns": ["norm", "embed", "head", "scale", r"down\.bias"],
    "parameter_with_row_parallelism_patterns": [r"down\.weight"],
}


@pytest.mark.parametrize("target", ["tp=3,zero=2", "tp=3,dp=4"])
def test_model_without_pipeline_is_cut_for_tensor_parallelism(tmp_path, target):
    """No real run at tp > 1 stands behind this one: the description is added by hand, the shapes say what was cut."""
    folder = Path(shutil.copytree(golden("zero2-dp3"), tmp_path / "source"))
    edit(folder, MODEL.format(0), lambda value: value.update(universal_checkpoint_info=FLAT_INFO))
    there = tmp_path / "there" / STEP
    reshard(folder, there, Topology.parse(target))
    module = read(there / MODEL.format(2)).value["module"]
    shapes = {name: tensor.shape for name, tensor in module.items()}
    assert shapes["up.weight"] == (1, 7)
    assert shapes["down.weight"] == (7, 1)
    assert shapes["norm.weight"] == (3,)
    assert shapes["embed.weight"] == (13, 7)
    assert module["head.weight"].storage is module["embed.weight"].storage
    reshard(there, tmp_path / "back" / STEP, Topology.parse("dp=3,zero=2"))
    before = assemble(read_checkpoint(golden("zero2-dp3"), None))
    after = assemble(read_checkpoint(tmp_path / "back" / STEP, None))
    assert before.keys() == after.keys()
    assert all((value == after[key]).all() for key, value in before.items())


@pytest.mark.parametrize("name", TARGETS)
def test_written_files_are_whole_archives(tmp_path, name):
    reshard(golden(name), tmp_path / STEP, Topology.parse(TARGETS[name][1]))
    for path in (tmp_path / STEP).glob("*.pt"):
        with zipfile.ZipFile(path) as archive:
            assert archive.testzip() is None, path.name


@pytest.mark.parametrize("name", TARGETS)
def test_conversion_to_the_same_layout_rebuilds_every_field(tmp_path, name):
    """The same topology again: scalars, groups, mappings, names and their order are those that DeepSpeed wrote."""
    topology = read_checkpoint(golden(name), None).topology
    reshard(golden(name), tmp_path / STEP, topology)
    originals = {path.name: path for path in golden(name).glob("*.pt")}
    assert {path.name for path in (tmp_path / STEP).glob("*.pt")} == originals.keys()
    for file, path in originals.items():
        ours, theirs = describe(read(tmp_path / STEP / file).value), describe(read(path).value)
        if name.endswith("round-robin"):  # DeepSpeed's own are wrong there
            for value in (ours, theirs):
                value.get("optimizer_state_dict", {}).pop("param_slice_mappings", None)
        assert ours == theirs, file


def describe(value):
    """A comparable form: tensors by type and shape."""
    if hasattr(value, "storage"):
        return ("tensor", value.dtype, value.shape)
    if hasattr(value, "target"):
        args = value.args
        if value.target.name == "Generator":
            args = ()
        return ("object", str(value.target), describe(args), describe(value.state))
    if isinstance(value, dict):
        return {key: describe(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [describe(item) for item in value]
    return value


# Damage -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def copy(tmp_path) -> Path:
    return Path(shutil.copytree(golden("pipeline-tp2-pp2"), tmp_path / "copy"))


def rename(folder: Path, old: str, new: str) -> None:
    (folder / old).rename(folder / new)


def duplicate(folder: Path, old: str, new: str) -> None:
    shutil.copy(folder / old, folder / new)


def overwrite(folder: Path, old: str, new: str) -> None:
    shutil.copy(golden("pipeline-dp2") / old, folder / new)


def edit(folder: Path, name: str, change) -> None:
    """Write a file again with its object changed."""
    file, original = read(folder / name), (folder / name).read_bytes()
    for storage in file.storages.values():
        storage.data = original[storage.file_offset : storage.file_offset + storage.num_bytes]
    change(file.value)
    layout = lay_out_pt(name.removesuffix(".pt"), file.value)
    content = bytearray(layout.num_bytes)
    for offset, data in layout.fixed:
        content[offset : offset + len(data)] = data
    (folder / name).write_bytes(content)


def set_step(value) -> None:
    value["optimizer_state_dict"]["base_optimizer_state"]["state"][0]["step"].storage.data = struct.pack("<f", 3.0)


OPTIMIZER = "zero_pp_rank_0_mp_rank_{:02d}_optim_states.pt"
MODEL = "mp_rank_{:02d}_model_states.pt"
LAYER = "layer_{:02d}-model_{:02d}-model_states.pt"
DAMAGE = {
    "an optimizer file is missing": (lambda f: (f / OPTIMIZER.format(2)).unlink(), OPTIMIZER.format(2)),
    "a model file is missing": (lambda f: (f / MODEL.format(3)).unlink(), MODEL.format(3)),
    "the first model file is missing": (lambda f: (f / MODEL.format(0)).unlink(), "rank 0"),
    "a shard of a layer is missing": (lambda f: (f / LAYER.format(1, 1)).unlink(), LAYER.format(1, 1)),
    "a whole layer is missing": (
        lambda f: [(f / LAYER.format(1, tp)).unlink() for tp in (0, 1)], "1.attention_norm"),
    "a file of a larger dp is left over": (
        lambda f: duplicate(f, OPTIMIZER.format(1), "zero_pp_rank_1_mp_rank_01_optim_states.pt"),
        "zero_pp_rank_1_mp_rank_01"),
    "a file of a larger tp is left over": (lambda f: duplicate(f, MODEL.format(1), MODEL.format(4)), MODEL.format(4)),
    "bf16 and fp32 files are mixed": (
        lambda f: rename(f, OPTIMIZER.format(0), "bf16_" + OPTIMIZER.format(0)), "bf16_"),
    "stages are swapped": (lambda f: duplicate(f, OPTIMIZER.format(0), OPTIMIZER.format(2)), OPTIMIZER.format(2)),
    "a file of another layout": (lambda f: overwrite(f, OPTIMIZER.format(0), OPTIMIZER.format(1)), "partition"),
    "a model file of another layout": (lambda f: overwrite(f, MODEL.format(0), MODEL.format(1)), MODEL.format(1)),
    "a model file of another step": (
        lambda f: edit(f, MODEL.format(1), lambda value: value.update(global_steps=3)), MODEL.format(1)),
    "an optimizer file of another step": (lambda f: edit(f, OPTIMIZER.format(1), set_step), OPTIMIZER.format(1)),
    "a group is missing": (
        lambda f: edit(f, MODEL.format(0), lambda value: value["param_shapes"].pop()), "different parameters"),
    "a parameter is missing": (
        lambda f: edit(f, MODEL.format(0), lambda value: value["param_shapes"][0].popitem()), "different parameters"),
    "a parameter has another shape": (
        lambda f: [
            edit(f, MODEL.format(tp), lambda value: value["param_shapes"][0].update({"1.out": Size((8, 5))}))
            for tp in (0, 1)
        ], "weight 1.out has the shapes"),
    "positions are stated wrong": (
        lambda f: edit(f, OPTIMIZER.format(0), lambda value: value["optimizer_state_dict"]["param_slice_mappings"][0]
                       ["1.out"].state.update(start=0)), "disagree about 1.out"),
    "a file is empty": (lambda f: (f / LAYER.format(2, 0)).write_bytes(b""), LAYER.format(2, 0)),
}  # fmt: skip


@pytest.mark.parametrize("name", DAMAGE)
def test_damaged_checkpoint_is_refused_and_the_file_named(copy, tmp_path, name):
    damage, mentioned = DAMAGE[name]
    damage(copy)
    with pytest.raises(CorruptSourceError) as caught:
        reshard(copy, tmp_path / "out" / STEP, Topology(tp=1))
    assert mentioned in str(caught.value)
    assert not (tmp_path / "out" / STEP).exists()


def test_flipped_byte_in_any_payload_is_caught(tmp_path):
    """Every storage of an optimizer file, one byte each: the archive's own CRC-32 tells."""
    original = golden("zero2-dp3")
    victim = "zero_pp_rank_1_mp_rank_00_optim_states.pt"
    offsets = [tensor.file_offset + 1 for tensor in read(original / victim).storages.values() if tensor.num_bytes > 4]
    assert len(offsets) >= 6
    for number, offset in enumerate(offsets):
        folder = Path(shutil.copytree(original, tmp_path / f"source{number}"))
        content = bytearray((folder / victim).read_bytes())
        content[offset] ^= 1
        (folder / victim).write_bytes(content)
        with pytest.raises(CorruptSourceError, match=victim.replace(".", r"\.")):
            reshard(folder, tmp_path / f"out{number}" / STEP, Topology(dp=2, zero=2))
        assert not (tmp_path / f"out{number}" / STEP).exists()


def places(value, found: list) -> list:
    """(container, key) of everything inside an object tree."""
    if isinstance(value, dict | list):
        for key in list(value) if isinstance(value, dict) else range(len(value)):
            found.append((value, key))
            places(value[key], found)
    elif hasattr(value, "target"):
        places(value.state, found)
    return found


@pytest.mark.parametrize("seed", range(60))
@pytest.mark.parametrize("name", ["pipeline-tp2-pp2", "zero2-dp3", "zero3-dp3"])
def test_field_of_another_kind_never_ends_in_another_error(tmp_path, name, seed):
    """Replace or remove one field anywhere: the checkpoint is refused, or the field did not matter."""
    chance = random.Random(seed)
    folder = Path(shutil.copytree(golden(name), tmp_path / "source"))

    def spoil(value) -> None:
        container, key = chance.choice(places(value, []))
        if chance.random() < 0.3:
            del container[key]
        else:
            container[key] = chance.choice([None, 5, -1, "x", [], {}, (), 1.5, True, b"z", [None], {"a": 1}])

    edit(folder, chance.choice(sorted(path.name for path in folder.glob("*.pt"))), spoil)
    with contextlib.suppress(ReshardError):
        index = read_checkpoint(folder, None)
        plan_of(index, Topology.parse(TARGETS[name][1]))


@pytest.mark.parametrize(
    ("name", "target", "text"),
    [
        ("zero2-dp3", "tp=2,zero=1", "nothing is said about how tensor parallelism cuts"),
        ("zero2-dp3", "pp=2,zero=1", "without a PipelineModule"),
        ("pipeline-dp2", "dp=2,zero=3", "no ZeRO-3 with a PipelineModule"),
        ("zero2-dp3", "dp=2,zero=0", "ZeRO stage 2 to 0"),
        ("pipeline-dp2", "tp=3", "not divisible by tp=3"),
        ("pipeline-dp2", "pp=8", "no parameters"),
        ("pipeline-dp2", "dp=2,ep=2", "expert"),
    ],
)
def test_conversion_that_would_need_a_guess_is_refused(tmp_path, name, target, text):
    with pytest.raises(UnsupportedError, match=text):
        reshard(golden(name), tmp_path / STEP, Topology.parse(target))
    assert not tmp_path.joinpath(STEP).exists()


def test_folder_above_the_tag_is_not_taken_for_a_checkpoint():
    with pytest.raises(ReshardError, match="name the folder of the tag"):
        read_checkpoint(ROOT / "zero2-dp3", None)
