"""Damaged, mixed and tampered checkpoints are refused by name; conversions that need a guess are refused too."""

import contextlib
import random
import shutil
import struct
from pathlib import Path

import pytest

from reshard.api import plan_of, reshard
from reshard.errors import CorruptSourceError, ReshardError, UnsupportedError
from reshard.formats import read_checkpoint
from reshard.formats.pt.objects import Size
from reshard.formats.pt.reader import read
from reshard.topology import Topology
from tests.golden.files import LAYER, MODEL, OPTIMIZER, ROOT, STEP, TARGETS, edit, golden
from tests.randomness import seeds


@pytest.fixture
def copy(tmp_path) -> Path:
    return Path(shutil.copytree(golden("pipeline-tp2-pp2"), tmp_path / "copy"))


def rename(folder: Path, old: str, new: str) -> None:
    (folder / old).rename(folder / new)


def duplicate(folder: Path, old: str, new: str) -> None:
    shutil.copy(folder / old, folder / new)


def overwrite(folder: Path, old: str, new: str) -> None:
    shutil.copy(golden("pipeline-dp2") / old, folder / new)


def set_step(value) -> None:
    value["optimizer_state_dict"]["base_optimizer_state"]["state"][0]["step"].storage.data = struct.pack("<f", 3.0)


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


def test_of_copies_that_differ_the_one_that_is_not_what_was_committed_is_named(tmp_path):
    source = tmp_path / "source"
    reshard(golden("pipeline-tp2-pp2"), source, "tp=2,pp=2,dp=2")
    blamed = set()
    for damaged in (OPTIMIZER.format(0), LAYER.format(0, 0)):
        path = source / damaged
        content = path.read_bytes()
        for at in range(len(content) // 3, len(content) - len(content) // 4, 97):
            path.write_bytes(content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :])
            with pytest.raises(CorruptSourceError) as caught:
                reshard(source, tmp_path / f"out-{at}", "tp=1,pp=1,dp=6")
            assert "copies of one tensor differ" not in str(caught.value)
            blamed |= {problem.split(":")[0] for problem in caught.value.problems if "was committed" in problem}
        path.write_bytes(content)
    assert blamed == {OPTIMIZER.format(0), LAYER.format(0, 0)}


def test_files_of_layers_that_were_swapped_are_named_with_what_they_hold(copy, tmp_path):
    first, second = LAYER.format(0, 1), LAYER.format(1, 1)
    rename(copy, first, "aside")
    rename(copy, second, first)
    rename(copy, "aside", second)
    with pytest.raises(CorruptSourceError, match="the files of layer 0 hold different names") as caught:
        reshard(copy, tmp_path / "out", "dp=1")
    (problem,) = caught.value.problems
    assert problem.startswith(f"{first} and {LAYER.format(0, 0)} differ in ")


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


@pytest.mark.parametrize(
    "name",
    [
        "pipeline-tp2-pp2",
        "zero2-dp3",
        "zero3-dp3",
        "zero0-bf16-dp2",
        "experts-dp4-ep2",
        "experts-pp2-dp2-ep2",
        "autoep-dp2-ep2",
    ],
)
def test_field_of_another_kind_never_ends_in_another_error(tmp_path, name):
    """Replace or remove one field anywhere: the checkpoint is refused, or the field did not matter."""
    for seed in seeds(20, soak=200):
        folder = Path(shutil.copytree(golden(name), tmp_path / str(seed)))
        try:
            spoil_a_field(folder, random.Random(seed), Topology.parse(TARGETS[name][1]))
        except Exception as error:
            error.add_note(f"seed {seed}")
            raise
        shutil.rmtree(folder)


def spoil_a_field(folder: Path, chance: random.Random, topology: Topology) -> None:
    def spoil(value) -> None:
        container, key = chance.choice(places(value, []))
        if chance.random() < 0.3:
            del container[key]
        else:
            container[key] = chance.choice([None, 5, -1, "x", [], {}, (), 1.5, True, b"z", [None], {"a": 1}])

    edit(folder, chance.choice(sorted(path.name for path in folder.glob("*.pt"))), spoil)
    with contextlib.suppress(ReshardError):
        plan_of(read_checkpoint(folder, None), topology)


@pytest.mark.parametrize(
    ("name", "target", "text"),
    [
        ("zero2-dp3", "tp=2,zero=1", "nothing is said about how tensor parallelism cuts"),
        ("zero2-dp3", "pp=2,zero=1", "without a PipelineModule"),
        ("pipeline-dp2", "dp=2,zero=2", "neither ZeRO-2 nor ZeRO-3 with a PipelineModule"),
        ("pipeline-dp2", "dp=2,zero=3", "neither ZeRO-2 nor ZeRO-3 with a PipelineModule"),
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
