"""Complete the model file of checkpoints with experts from before DeepSpeed 0.19.

`_save_moe_checkpoint` (deepspeed/runtime/engine.py, seen in 0.14.5 and 0.17.6) saves neither `param_shapes` nor
`buffer_names` nor `ds_config`. The optimizer's files have the configuration, and the names in the order of the flat
buffers (`param_slice_mappings`). The weights have the shapes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

from reshard.errors import CorruptSourceError, UnsupportedError
from reshard.formats.deepspeed.contents import DeepSpeedContents, require_mapping
from reshard.formats.pt.objects import Inert, Size, StatefulDict, Tensor
from reshard.formats.pt.reader import PtFile

NO_OPTIMIZER = {"optimizer": None}
"""The whole content of `expp_rank_*_optim_states.pt` if the ZeRO files have the optimizer's states."""


def complete_model_file(source: DeepSpeedContents) -> DeepSpeedContents:
    """Return the contents with a model file in the form of 0.19; contents of 0.19 are returned as they are.

    A weight that belongs to no parameter group is taken for a buffer.

    Raises:
        CorruptSourceError: the optimizer's files and the weights contradict each other.
        UnsupportedError: the order of the flat buffers is not known.
    """
    model = source.models[0, 0]
    is_older = (
        source.expert_files and source.optimizers and len(source.models) == 1 and "param_shapes" not in model.value
    )
    if not is_older:
        return source
    first = source.optimizers[0, 0]
    config = require_mapping(first, "ds_config")
    zero_config = config.get("zero_optimization")
    if isinstance(zero_config, Mapping) and zero_config.get("round_robin_gradients"):
        raise UnsupportedError(
            "has experts, round_robin_gradients, and no param_shapes: the order of parameters is not known",
            path=model.path,
            hint="load and save it with DeepSpeed 0.19",
        )
    module = require_mapping(model, "module")
    shapes = {name: tensor.shape for name, tensor in module.items() if isinstance(tensor, Tensor)}
    shapes |= {name: tensor.shape for file in source.expert_files.values() for name, tensor in file.value.items()}
    groups = [
        StatefulDict((name, Size(_find_shape(shapes, name, first))) for name in names) for names in _read_groups(source)
    ]
    optimized = {name for group in groups for name in group}
    value = {
        **model.value,
        "param_shapes": groups,
        "buffer_names": [name for name in module if name not in optimized],
        "ds_config": config,
        "ds_version": first.value.get("ds_version"),
    }
    return dataclasses.replace(source, models={(0, 0): dataclasses.replace(model, value=value)})


def _read_groups(source: DeepSpeedContents) -> Iterator[dict[str, None]]:
    """Yield the names of each parameter group in the flat buffer's order, as on the ranks of the first experts."""
    first = source.optimizers[0, 0]
    counts = source.optimizer(0, 0).get("partition_count")
    for at, count in enumerate(counts if isinstance(counts, list) else ()):
        if type(count) is not int or count < 1:
            raise UnsupportedError(f"partition_count of group {at} is {count!r:.80}", path=first.path)
        ranks = range(0, source.topology.dp, source.topology.dp // count)  # those that hold the first experts
        yield {
            name: None for dp in ranks for name in _read_names(source.optimizer(0, dp), at, source.optimizers[0, dp])
        }


def _read_names(state: Mapping[str, Any], at: int, file: PtFile) -> list[str]:
    """Return the names of the parameters in one partition of a group, by position.

    Raises:
        CorruptSourceError: `param_slice_mappings` lacks the group or a position.
    """
    mappings = state.get("param_slice_mappings")
    mapping = mappings[at] if isinstance(mappings, list) and at < len(mappings) else None
    if not isinstance(mapping, Mapping):
        raise CorruptSourceError(f"param_slice_mappings has no group {at}", path=file.path)
    starts: dict[str, int] = {}
    for name, address in mapping.items():
        start = (
            address.state.get("start") if isinstance(address, Inert) and isinstance(address.state, Mapping) else None
        )
        if type(start) is not int:
            raise UnsupportedError(f"param_slice_mappings: {name!r:.80} has no start", path=file.path)
        starts[name] = start
    return sorted(starts, key=starts.__getitem__)


def _find_shape(shapes: Mapping[str, tuple[int, ...]], name: str, file: PtFile) -> tuple[int, ...]:
    if name not in shapes:
        raise CorruptSourceError(f"{name} is in the optimizer, and in no file of weights", path=file.path)
    return shapes[name]
