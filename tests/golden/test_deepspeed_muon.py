"""Muon's momentum at ZeRO-1 and 2 is that of whole parameters: read, laid out again, refused where it would differ."""

import shutil
from pathlib import Path

import numpy as np
import pytest

from reshard.api import plan_of, reshard
from reshard.contract import COMMIT_FILE
from reshard.errors import CorruptSourceError, UnsupportedError
from reshard.formats import read_checkpoint
from reshard.formats.pt.reader import read, read_tensor_bytes
from reshard.topology import Topology
from tests.golden.files import MODEL, STEP, assemble, edit, golden, refused_but_for_weights

NAME = "muon-zero2-dp3"
RANKS = [f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt" for rank in range(3)]
MOMENTUM = "momentum_buffer"


def momentum_of(folder: Path, rank: str) -> np.ndarray | None:
    file = read(folder / rank)
    tensor = file.value["optimizer_state_dict"]["base_optimizer_state"]["state"][0].get(MOMENTUM)
    return None if tensor is None else np.frombuffer(read_tensor_bytes(file.path, tensor, limit_bytes=1 << 20), "<f4")


def test_momentum_is_found_in_every_copy():
    """`assemble` compares copies; here the files are cut by hand, with nothing of ours but the order of the names."""
    index = read_checkpoint(golden(NAME), None)
    found = assemble(index)
    first, second = (found[f"{MOMENTUM}/{name}"].ravel().view("<f4") for name in index.groups[0].names)
    held = [momentum_of(golden(NAME), rank) for rank in RANKS]
    assert [len(part) for part in held] == [21, 42, 21]
    assert (held[0] == first).all()
    assert (held[1] == np.concatenate([first, second])).all()
    assert (held[2] == second).all()
    assert first.any()
    assert second.any()


def test_the_same_layout_again_is_what_deepspeed_wrote(tmp_path):
    reshard(golden(NAME), tmp_path / STEP, Topology(dp=3, zero=2))
    for rank in RANKS:
        ours, theirs = momentum_of(tmp_path / STEP, rank), momentum_of(golden(NAME), rank)
        assert ours is not None
        assert theirs is not None
        assert ours.tobytes() == theirs.tobytes()


@pytest.mark.parametrize("there", ["dp=1,zero=1", "dp=2,zero=2", "dp=4,zero=1", "dp=2,zero=3", "dp=64,zero=1"])
def test_there_and_back_changes_no_bit(tmp_path, there):
    reshard(golden(NAME), tmp_path / "there" / STEP, Topology.parse(there))
    reshard(tmp_path / "there" / STEP, tmp_path / "back" / STEP, Topology(dp=3, zero=2))
    between, before = (assemble(read_checkpoint(path, None)) for path in (tmp_path / "there" / STEP, golden(NAME)))
    assert between.keys() | {key for key in before if key.startswith("weight/")} == before.keys()
    assert all((before[key] == value).all() for key, value in between.items())
    for rank in RANKS:
        assert (momentum_of(tmp_path / "back" / STEP, rank) == momentum_of(golden(NAME), rank)).all()


def test_a_rank_of_padding_alone_has_no_momentum(tmp_path):
    """42 elements for 64 ranks: DeepSpeed makes no buffer where its partition has no part of a parameter."""
    reshard(golden(NAME), tmp_path / STEP, Topology(dp=64, zero=1))
    held = [momentum_of(tmp_path / STEP, RANKS[0].replace("rank_0_", f"rank_{rank}_")) for rank in (0, 20, 21, 63)]
    assert [None if part is None else len(part) for part in held] == [21, 21, None, None]


def edited(tmp_path: Path, zero: dict, change=None) -> Path:
    folder = Path(shutil.copytree(golden(NAME), tmp_path / "source"))
    for name in (MODEL.format(0), *RANKS):
        edit(folder, name, lambda value: value["ds_config"]["zero_optimization"].update(zero))
    if change is not None:
        for name in RANKS:
            edit(folder, name, lambda value: change(value["optimizer_state_dict"]))
    return folder


@pytest.mark.parametrize("zero", [{"offload_optimizer": {"device": "cpu"}}, {"cpu_offload": True}])
def test_offloaded_it_is_partitioned(tmp_path, zero):
    """Said of files that were not: their lengths tell that it cannot be."""
    with pytest.raises(UnsupportedError, match="partition 'momentum_buffer' has 21 elements, expected 14"):
        plan_of(read_checkpoint(edited(tmp_path, zero), None), Topology(dp=2, zero=1))


@pytest.mark.parametrize("zero", [{"offload_optimizer": {"device": "cpu"}}, {"cpu_offload": True}])
def test_a_target_of_an_offloaded_run_is_partitioned(tmp_path, zero):
    reshard(golden(NAME), tmp_path / "zero3" / STEP, Topology(dp=3, zero=3))
    for path in sorted((tmp_path / "zero3" / STEP).glob("*.pt")):
        edit(path.parent, path.name, lambda value: value["ds_config"]["zero_optimization"].update(zero))
    (tmp_path / "zero3" / STEP / COMMIT_FILE).unlink()
    reshard(tmp_path / "zero3" / STEP, tmp_path / STEP, Topology(dp=3, zero=1))
    assert [len(part) for rank in RANKS if (part := momentum_of(tmp_path / STEP, rank)) is not None] == [14, 14, 14]
    found, expected = (assemble(read_checkpoint(path, None)) for path in (tmp_path / STEP, golden(NAME)))
    key = f"{MOMENTUM}/up.weight"
    assert (found[key] == expected[key]).all()


def shorten(state: dict) -> None:
    group = state["base_optimizer_state"]["state"][0]
    group[MOMENTUM] = state["single_partition_of_fp32_groups"][0]


def test_momentum_of_another_length_is_damage(tmp_path):
    with pytest.raises(CorruptSourceError, match="'momentum_buffer' has 14 elements, expected 21: Muon keeps that"):
        read_checkpoint(edited(tmp_path, {}, shorten), None)


def test_elastic_momentum_is_refused(tmp_path):
    def lean(state: dict) -> None:
        inner = state["base_optimizer_state"]
        state["base_optimizer_state"] = [inner["state"][at] for at in range(2)]

    folder = edited(tmp_path, {"elastic_checkpoint": True}, lean)
    refused_but_for_weights(folder, "is an elastic checkpoint with a momentum of another length")


@pytest.mark.parametrize(
    ("target", "format_", "text"),
    [
        (
            "dp=2,zero=0",
            "deepspeed",
            "Muon trains with other numbers in optimizer of torch than in DeepSpeedZeroOptimizer",
        ),
        ("dp=2,zero=1", "universal", "no place for the momentum of DeepSpeed's Muon"),
    ],
)
def test_what_would_go_on_otherwise_is_refused(target, format_, text):
    with pytest.raises(UnsupportedError, match=text):
        plan_of(read_checkpoint(golden(NAME), None), Topology.parse(target), target_format=format_)


def test_the_run_is_told_what_to_keep():
    index = read_checkpoint(golden(NAME), None)
    notes = plan_of(index, Topology(dp=2, zero=1)).summary()["notes"]
    assert notes == ["resume without offload_optimizer, as the source ran: Muon's momentum is laid out for that"]
    assert not any("offload" in note for note in plan_of(index, Topology(dp=2, zero=3)).summary()["notes"])
