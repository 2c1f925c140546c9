"""Optimizers that do not compute each element by itself: what their states show, a conversion refuses or notes."""

import dataclasses
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from reshard.api import index_of, plan_of
from reshard.errors import CorruptSourceError, UnsupportedError
from reshard.formats.base import Request
from reshard.formats.pt.objects import Global, Inert, Tensor, new_tensor
from reshard.topology import Topology
from tests.golden.files import STEP, edit, golden
from tests.golden.without_checksums import copied

NAME = "zero2-dp3"
MODEL = "mp_rank_00_model_states.pt"


def change_states(folder: Path, change, name: str = NAME) -> Path:
    """Copy a golden checkpoint and call `change` with the rank and the states of each of its groups."""
    shutil.copytree(golden(name), folder)
    for rank in range(3):

        def change_file(value: dict, rank: int = rank) -> None:
            state = value["optimizer_state_dict"]
            base = state.get("base_optimizer_state") or state["optimizer_state_dict"]
            for states in base["state"].values():
                change(rank, states)

        edit(folder, next(folder.glob(f"zero_pp_rank_{rank}_*optim_states.pt")).name, change_file)
    return folder


def keep_variance(_rank: int, states: dict) -> None:
    """Keep what torch's Adafactor has for a tensor with one dim: for a matrix it has rows and columns instead."""
    states["variance"] = states.pop("exp_avg_sq")
    del states["exp_avg"]


@pytest.mark.parametrize("name", [NAME, "zero3-dp3"])
def test_a_state_of_flat_partitions_is_not_given_to_matrices(tmp_path, name):
    """DeepSpeed loads it at ZeRO-0, and Adafactor's first step fails on an assertion."""
    index = index_of(change_states(tmp_path / STEP, keep_variance, name))
    with pytest.raises(UnsupportedError, match=r"variance/\S+ \[\d+, \d+\]: the source has this state for a flat"):
        plan_of(index, Topology(dp=1, zero=0))


def test_a_state_that_may_depend_on_the_partition_is_noted_where_partitions_change(tmp_path):
    index = index_of(change_states(tmp_path / STEP, keep_variance))

    def find(topology: Topology) -> list[str]:
        return [note for note in plan_of(index, topology).layout.notes if note.startswith("variance: ")]

    assert len(find(Topology(dp=1, zero=2))) == len(find(Topology(dp=3, zero=1))) == 1
    assert not find(index.topology)


def test_a_number_beside_the_step_is_a_state_that_may_depend_on_the_partition(tmp_path: Path) -> None:
    """Adafactor of transformers keeps `exp_avg_sq` for a partition, and rows and columns for a matrix."""
    index = index_of(change_states(tmp_path / STEP, lambda _rank, states: states.update(RMS=0.5)))
    notes = plan_of(index, Topology(dp=2, zero=1)).layout.notes
    assert [note for note in notes if note.startswith("RMS: states of an optimizer that may compute over whole")]
    with pytest.raises(UnsupportedError, match="RMS: the source has this state for a flat partition"):
        plan_of(index, Topology(dp=1, zero=0))


@pytest.mark.parametrize("numbers", [{"mu_product": 0.5}, {"eta": 0.5, "mu": 1.0}])
def test_numbers_that_follow_from_the_step_are_no_such_state(tmp_path: Path, numbers: dict[str, float]) -> None:
    index = index_of(change_states(tmp_path / STEP, lambda _rank, states: states.update(numbers)))
    assert not [note for note in plan_of(index, Topology(dp=2, zero=1)).layout.notes if "whole tensors" in note]
    plan_of(index, Topology(dp=1, zero=0))


def test_a_state_of_each_partition_is_not_called_a_mix_of_two_saves(tmp_path):
    """Adafactor of transformers keeps the root mean square of the tensor that it sees, which is a partition."""
    source = change_states(tmp_path / "own" / STEP, lambda rank, states: states.update(RMS=0.5 + rank))
    with pytest.raises(UnsupportedError, match="one value for each rank's partition"):
        plan_of(index_of(source), Topology(dp=2, zero=1))
    equal = change_states(tmp_path / "equal" / STEP, lambda _rank, states: states.update(RMS=0.5))
    plan_of(index_of(equal), Topology(dp=2, zero=1))
    mixed = change_states(tmp_path / "mixed" / STEP, lambda rank, states: states.update(step=float(rank)))
    with pytest.raises(CorruptSourceError, match="of different steps"):
        index_of(mixed)


def number(value: float) -> Tensor:
    return new_tensor("float32", (), np.float32(value).tobytes())


def view(at: int) -> Tensor:
    """One element of three."""
    numbers = new_tensor("float32", (3,), np.arange(3, dtype="<f4").tobytes())
    return dataclasses.replace(numbers, offset=at, shape=(), stride=())


NUMBERS: dict[str, Callable[[int], Any]] = {
    "float": float,
    "complex": lambda rank: Inert("reduce", Global("__builtin__", "complex"), (0.0, float(rank))),
    "numpy": lambda rank: Inert(
        "reduce",
        Global("numpy._core.multiarray", "scalar"),
        (
            Inert("reduce", Global("numpy", "dtype"), ("f8", False, True), (3, "<", None, None, None, -1, -1, 0)),
            np.float64(rank).tobytes(),
        ),
    ),
    "tensor": number,
    "view": view,
    "list": lambda rank: [1.0, {"at": (rank, "x")}],
    "missing": lambda rank: rank if rank == 0 else None,
}


@pytest.mark.parametrize("kind", NUMBERS)
def test_values_of_partitions_that_differ_are_refused_and_equal_ones_stay(tmp_path: Path, kind: str) -> None:
    def add(value: Any) -> dict[str, Any]:
        return {} if value is None else {"d": value}

    source = change_states(tmp_path / "own" / STEP, lambda rank, states: states.update(add(NUMBERS[kind](rank))))
    with pytest.raises(UnsupportedError, match="one value for each rank's partition"):
        plan_of(index_of(source), Topology(dp=2, zero=1))
    equal = change_states(tmp_path / "equal" / STEP, lambda _rank, states: states.update(add(NUMBERS[kind](0))))
    plan_of(index_of(equal), Topology(dp=2, zero=1))


def test_a_value_that_is_no_number_on_all_ranks_is_equal(tmp_path: Path) -> None:
    source = change_states(tmp_path / STEP, lambda _rank, states: states.update(d=float("nan")))
    plan_of(index_of(source), Topology(dp=2, zero=1))


@pytest.mark.parametrize("name", [NAME, "zero3-dp3"])
def test_steps_of_two_saves_are_found_without_checksums(tmp_path: Path, name: str) -> None:
    edited = change_states(
        tmp_path / "edited" / STEP, lambda rank, states: states.update(step=number(2.0 + rank)), name
    )
    with pytest.raises(CorruptSourceError, match="of different steps"):
        index_of(copied(edited, tmp_path / "copy"))


@pytest.mark.parametrize("kind", [list, tuple, dict, "object"])
@pytest.mark.parametrize(
    ("name", "target"), [(NAME, "dp=2,zero=1"), ("zero3-dp3", "dp=2,zero=1"), ("zero0-dp2", "dp=2")]
)
def test_tensors_and_objects_inside_of_a_state_are_refused(tmp_path: Path, kind: Any, name: str, target: str) -> None:
    """SOAP keeps its matrices in lists. Those of rank 0, or of a group's first parameter, are not those of all."""

    def hold(like: Tensor) -> Any:
        if kind == "object":
            return Inert("reduce", Global("collections", "deque"), ([], 3), None, [1.0])
        return {"0": like} if kind is dict else kind([like])

    def add(states: dict[str, Any]) -> None:
        states["Q"] = hold(new_tensor("float32", (2,), bytes(8)))

    folder = tmp_path / STEP
    if name == "zero0-dp2":
        shutil.copytree(golden(name), folder)
        edit(folder, MODEL, lambda value: [add(one) for one in value["optimizer"]["state"].values()])
    else:
        change_states(folder, lambda _rank, states: add(states), name)
    with pytest.raises(UnsupportedError, match=r"optimizer state 'Q' is a .* that holds tensors or objects"):
        plan_of(index_of(folder), Topology.parse(target))


@pytest.mark.parametrize("name", [NAME, "zero3-dp3"])
def test_a_state_of_another_length_than_its_partition_is_not_called_damage(tmp_path, name):
    def lengthen(_rank: int, states: dict) -> None:
        count = states["exp_avg"].num_elements + 5
        states["exp_avg"] = new_tensor("float32", (count,), bytes(4 * count))

    with pytest.raises(UnsupportedError, match=r"exp_avg' has \d+ elements, expected"):
        plan_of(index_of(change_states(tmp_path / STEP, lengthen, name)), Topology(dp=2, zero=1))


def test_a_template_whose_group_lacks_a_state_is_refused_by_the_states(tmp_path):
    def without(value: dict) -> None:
        value["optimizer_state_dict"]["base_optimizer_state"]["state"][0].pop("exp_avg_sq")

    like = Path(shutil.copytree(golden(NAME), tmp_path / STEP))
    for rank in range(3):
        edit(like, f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt", without)
    with pytest.raises(UnsupportedError, match="no place for 3 states of the source") as caught:
        plan_of(index_of(golden(NAME)), Request(topology=Topology(dp=2, zero=1), like=index_of(like)))
    assert "exp_avg_sq/embed.weight [13, 7]" in caught.value.problems
