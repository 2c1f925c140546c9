"""Checkpoints with experts from before DeepSpeed 0.19, whose model file does not say what the optimizer holds.

`_save_moe_checkpoint` (deepspeed/runtime/engine.py, seen in 0.14.5 and 0.17.6) saves neither `param_shapes` nor
`buffer_names` nor `ds_config`. The optimizer's files have the configuration, and the names in the order of the flat
buffers (`param_slice_mappings`); the shapes are those of the weights.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

from reshard.errors import CorruptSourceError, UnsupportedError
from reshard.formats.deepspeed.contents import DeepSpeedContents, mapping_of
from reshard.formats.pt.objects import Inert, Size, StatefulDict, Tensor
from reshard.formats.pt.reader import PtFile

NO_OPTIMIZER = {"optimizer": None}
"""All that `expp_rank_*_optim_states.pt` holds where ZeRO has the optimizer's states."""


def complete(source: DeepSpeedContents) -> DeepSpeedContents:
    """The same with a model file as 0.19 saves it, if it is an older one; what is in no group is taken for a buffer.

    Raises:
        CorruptSourceError: the optimizer's files and the weights do not fit each other.
        UnsupportedError: the order of the flat buffers is not known.
    """
    model = source.models[0, 0]
    older = source.expert_files and source.optimizers and len(source.models) == 1 and "param_shapes" not in model.value
    if not older:
        return source
    first = source.optimizers[0, 0]
    config = mapping_of(first, "ds_config")
    zero_config = config.get("zero_optimization")
    if isinstance(zero_config, Mapping) and zero_config.get("round_robin_gradients"):
        raise UnsupportedError(
            "has experts, round_robin_gradients, and no param_shapes: the order of parameters is not known",
            path=model.path,
            hint="load and save it with DeepSpeed 0.19",
        )
    module = mapping_of(model, "module")
    shapes = {name: tensor.shape for name, tensor in module.items() if isinstance(tensor, Tensor)}
    shapes |= {name: tensor.shape for file in source.expert_files.values() for name, tensor in file.value.items()}
    groups = [StatefulDict((name, Size(_shape(shapes, name, first))) for name in names) for names in _groups(source)]
    held = {name for group in groups for name in group}
    value = {
        **model.value,
        "param_shapes": groups,
        "buffer_names": [name for name in module if name not in held],
        "ds_config": config,
        "ds_version": first.value.get("ds_version"),
    }
    return dataclasses.replace(source, models={(0, 0): dataclasses.replace(model, value=value)})


def _groups(source: DeepSpeedContents) -> Iterator[dict[str, None]]:
    """Names of each parameter group in the flat buffer's order, as the first part of the experts calls them."""
    first = source.optimizers[0, 0]
    counts = source.optimizer(0, 0).get("partition_count")
    for at, count in enumerate(counts if isinstance(counts, list) else ()):
        if type(count) is not int or count < 1:
            raise CorruptSourceError(f"partition_count of group {at} is {count!r:.80}", path=first.path)
        ranks = range(0, source.topology.dp, source.topology.dp // count)  # those that hold the first part
        yield {name: None for dp in ranks for name in _names(source.optimizer(0, dp), at, source.optimizers[0, dp])}


def _names(state: Mapping[str, Any], at: int, file: PtFile) -> list[str]:
    """What one partition of a group holds, by position."""
    mappings = state.get("param_slice_mappings")
    found = mappings[at] if isinstance(mappings, list) and at < len(mappings) else None
    if not isinstance(found, Mapping):
        raise CorruptSourceError(f"param_slice_mappings has no group {at}", path=file.path)
    starts: dict[str, int] = {}
    for name, address in found.items():
        start = (
            address.state.get("start") if isinstance(address, Inert) and isinstance(address.state, Mapping) else None
        )
        if type(start) is not int:
            raise CorruptSourceError(f"param_slice_mappings: {name!r:.80} has no start", path=file.path)
        starts[name] = start
    return sorted(starts, key=starts.__getitem__)


def _shape(shapes: Mapping[str, tuple[int, ...]], name: str, file: PtFile) -> tuple[int, ...]:
    if name not in shapes:
        raise CorruptSourceError(f"{name} is in the optimizer, and in no file of weights", path=file.path)
    return shapes[name]
