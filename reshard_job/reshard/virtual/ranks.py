"""Which files each rank of the framework opens when it loads.

DeepSpeed 0.19.8: runtime/engine.py (`_get_all_ckpt_names`, `_get_all_zero_checkpoint_state_dicts`,
`load_moe_state_dict`), runtime/state_dict_factory.py (`SDLoaderBase.load`), runtime/pipe/module.py (`load_state_dir`).
A rank lists all files of a kind and opens those of its own model-parallel rank, its own partition of the optimizer, the
layers of its own pipeline stage and its own experts. To count them it also opens the first file of a list, that of
tensor parallel rank 0: of the model states, and of each of these layers (`SDLoaderBase.check_ckpt_list`).
"""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict
from collections.abc import Mapping
from typing import Any

import numpy as np

from reshard.errors import UnsupportedError
from reshard.formats.deepspeed import names
from reshard.tensors.intervals import Int64Array
from reshard.tensors.layout import TargetLayout
from reshard.topology import Topology

FORMATS = ("deepspeed",)
"""Target formats whose ranks open files of their own."""


def files_by_rank(layout: TargetLayout) -> tuple[Int64Array, ...]:
    """Positions of the files that each rank opens, [ranks][files], ascending.

    Raises:
        UnsupportedError: a format where every rank may open every file, or a file of a kind that is not known.
    """
    if layout.format not in FORMATS:
        raise UnsupportedError(
            f"--mode virtual --format {layout.format}: a rank of this format may open any file",
            hint=f"choose --mode materialize, or --format {FORMATS[0]}",
        )
    topology = layout.topology
    opened = _Opened(layout)
    by_key: dict[tuple[int, int, int, int], list[int]] = defaultdict(list)
    for at, file in enumerate(layout.files):
        for key in opened.keys(file.path):
            by_key[key].append(at)
    found = []
    for rank in range(topology.world_size):
        place = topology.coordinate(rank)
        place_of, part = (place.pp, place.tp), place.dp % topology.ep
        keys = ((*place_of, *own) for own in ((place.dp, -1), (-1, part), (-1, -1)))
        found.append(np.array(sorted(at for key in keys for at in by_key.get(key, ())), dtype=np.int64))
    return tuple(found)


class _Opened:
    """Who opens a file: (pp, tp, dp, expert part), -1 for any dp or part."""

    def __init__(self, layout: TargetLayout) -> None:
        self._layout = layout
        self._topology: Topology = layout.topology
        parsed = [names.parse(file.path) for file in layout.files]
        self._experts = Counter(name.layer for name in parsed if name is not None and name.kind == "expert")
        self._stages = _stages_of_layers(layout)

    def keys(self, path: str) -> list[tuple[int, int, int, int]]:
        name = names.parse(path)
        if name is None or name.kind in ("other", "expert_optimizer"):
            raise UnsupportedError(f"{path}: which ranks open it is not known", hint="choose --mode materialize")
        degrees = self._topology
        if name.kind == "layer":
            # Every rank of the stage opens the first one too, to look into it for the number of files.
            parts = range(degrees.tp) if name.mp == 0 else (name.mp,)
            return [(pp, tp, -1, -1) for pp in sorted(self._stages[name.layer]) for tp in parts]
        if name.kind == "model" and name.mp == 0:
            # DeepSpeed opens the first one on every rank, to compare the number of files with what it says.
            places = itertools.product(range(degrees.pp), range(degrees.tp))
            return [(pp, tp, name.dp, -1) for pp, tp in places]
        pp, tp = divmod(name.mp, degrees.tp)
        if name.kind == "expert":
            return [(pp, tp, -1, name.expert * degrees.ep // self._experts[name.layer])]
        return [(pp, tp, name.dp, -1)]


def _stages_of_layers(layout: TargetLayout) -> dict[int, set[int]]:
    """Pipeline stages that open each layer's file."""
    parsed = [(at, name) for at, file in enumerate(layout.files) if (name := names.parse(file.path)) is not None]
    layers = sorted({name.layer for _, name in parsed if name.kind == "layer"})
    stages = range(layout.topology.pp)
    bounds = _bounds(layout.model)
    if len(bounds) == len(stages) + 1:
        return {layer: {pp for pp in stages if bounds[pp] <= layer < bounds[pp + 1]} for layer in layers}
    if len(stages) == 1:
        return {layer: {0} for layer in layers}
    held: dict[str, set[int]] = defaultdict(set)
    for at, name in parsed:
        if name.kind == "optimizer":
            for parameter in _parameters(layout, at):
                held[parameter].add(name.mp // layout.topology.tp)
    found = {layer: set(stages) for layer in layers}
    for at, name in parsed:
        if name.kind == "layer":
            for parameter in _parameters(layout, at):
                found[name.layer] &= held.get(parameter, set(stages))
    return _in_order(found)


def _in_order(found: Mapping[int, set[int]]) -> dict[int, set[int]]:
    """Stages that may hold each layer, given those that hold all its parameters: stages hold consecutive layers.

    Used where nothing describes the stages. It may name one stage too many for a layer (tied, frozen), never too few.
    """
    layers = sorted(found)
    known = {layer: next(iter(found[layer])) for layer in layers if len(found[layer]) == 1}
    result = {}
    for layer in layers:
        low = max((pp for other, pp in known.items() if other <= layer), default=0)
        high = min((pp for other, pp in known.items() if other >= layer), default=None)
        result[layer] = {pp for pp in found[layer] if pp >= low and (high is None or pp <= high)}
    return result


def _bounds(model: Mapping[str, Any]) -> list[int]:
    """First layer of each stage and the end, where the commit will say it."""
    described = model.get("pipeline")
    parts = described.get("parts") if isinstance(described, Mapping) else None
    return list(parts) if parts else []


def _parameters(layout: TargetLayout, file: int) -> set[str]:
    tensors = np.unique(layout.shards.tensor[layout.shards.file == file])
    return {layout.tensors[int(at)].key.name for at in tensors}
