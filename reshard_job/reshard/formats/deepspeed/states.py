"""Read the optimizer's partitions as saved: the flat tensors and scalars of each group in a rank's file."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from reshard.errors import CorruptSourceError, UnsupportedError
from reshard.formats.deepspeed.contents import DeepSpeedContents
from reshard.formats.deepspeed.muon import MOMENTUM
from reshard.formats.deepspeed.scalars import identify_scalars, require_plain
from reshard.formats.pt.objects import Tensor


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class GroupState:
    """States of one group (ZeRO-3: sub-group) in one rank's optimizer file.

    Attributes:
        flat: state (`fp32`, `exp_avg`, ...) -> the rank's partition, 1-dim.
        scalars: states that are not partitioned, as saved (`step`).
        order: names of the optimizer's states in its own order.
    """

    flat: Mapping[str, Tensor]
    scalars: Mapping[str, Any]
    order: tuple[str, ...]


def read_group_states(source: DeepSpeedContents, mp: int, dp: int) -> list[GroupState]:
    """Read the states of all groups of a rank.

    Raises:
        CorruptSourceError: partitions or states are missing.
        UnsupportedError: a state is neither partitioned nor a scalar.
    """
    state = source.optimizer(mp, dp)
    path = source.optimizers[mp, dp].path
    zero3 = source.topology.zero == 3
    masters = state.get("fp32_flat_groups" if zero3 else "single_partition_of_fp32_groups")
    inner = state.get("optimizer_state_dict" if zero3 else "base_optimizer_state")
    if not isinstance(masters, list) or not all(isinstance(master, Tensor) for master in masters):
        raise UnsupportedError("has no list of fp32 partitions", path=path)
    if isinstance(inner, Mapping) and isinstance(inner.get("state"), Mapping):
        per_group = [inner["state"].get(group, {}) for group in range(len(masters))]
        if inner["state"].keys() - set(range(len(masters))):
            raise UnsupportedError(f"optimizer states {list(inner['state'])} for {len(masters)} groups", path=path)
    elif isinstance(inner, list) and len(inner) == len(masters):  # elastic_checkpoint
        per_group = inner
    else:
        raise UnsupportedError("has no optimizer states", path=path)
    return [_split(master, states, path) for master, states in zip(masters, per_group, strict=True)]


def _split(master: Tensor, states: Any, path: str) -> GroupState:
    if not isinstance(states, Mapping):
        raise UnsupportedError(f"the states of a group are {states!r:.80}, expected a dict", path=path)
    flat: dict[str, Tensor] = {"fp32": master}
    scalars: dict[str, Any] = {}
    for key, value in states.items():
        if not isinstance(key, str):
            raise UnsupportedError(f"a state is called {key!r:.80}", path=path)
        if not isinstance(value, Tensor) or not value.shape:
            require_plain(key, value, path)
            scalars[key] = value
            continue
        if len(value.shape) != 1 or (value.num_elements < master.num_elements and key != MOMENTUM):
            raise UnsupportedError(
                f"optimizer state {key!r} has shape {value.shape}, the partition has {master.shape}",
                path=path,
                hint="only states with one value per weight, or one per group, are converted",
            )
        flat[key] = value
    for key, tensor in flat.items():
        if not tensor.is_contiguous or len(tensor.shape) != 1:
            raise UnsupportedError(f"partition {key!r} is not flat: {tensor.shape} {tensor.stride}", path=path)
    return GroupState(flat=flat, scalars=scalars, order=tuple(states))


def check_scalars(source: DeepSpeedContents) -> None:
    """Check that ranks which hold partitions of one group agree about its scalars; another `step` is another save.

    Raises:
        CorruptSourceError: `step` differs; the message names the files.
        UnsupportedError: other scalars differ, or only some ranks have one: each is a value of a partition.
    """
    topology = source.topology
    problems: list[str] = []
    of_partitions: list[str] = []

    @functools.cache
    def identify_first(mp: int) -> list[dict[str, Any]]:
        path = source.optimizers[mp, 0].path
        return [identify_scalars(group.scalars, path) for group in read_group_states(source, mp, 0)]

    for (mp, dp), file in source.optimizers.items():
        first = mp - mp % topology.tp
        if (mp, dp) == (first, 0):
            continue
        reference = Path(source.optimizers[first, 0].path).name
        pairs = zip(read_group_states(source, mp, dp), identify_first(first), strict=False)
        for at, (group, expected) in enumerate(pairs):
            own = identify_scalars(group.scalars, file.path)
            for key in {**own, **expected}:
                if key not in own or key not in expected or own[key] != expected[key]:
                    listed = problems if key == "step" else of_partitions
                    listed.append(f"{Path(file.path).name}: {key!r} of group {at} is not that of {reference}")
    if problems:
        raise CorruptSourceError(
            "optimizer files are of different steps", path=str(source.folder), problems=problems[:20]
        )
    if of_partitions:
        raise UnsupportedError(
            "its optimizer has states with one value for each rank's partition, which no other partition has",
            path=str(source.folder),
            problems=of_partitions[:20],
            hint="resume in the topology that it was saved in: only states with one value per weight, or one per group"
            " on all ranks, are converted",
        )
