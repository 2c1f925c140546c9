"""Find the files that each rank of the framework opens when it loads.

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
    """Return the positions of the files that each rank opens, [ranks][files], ascending.

    Raises:
        UnsupportedError: every rank of the format may open every file, or a file is of an unknown kind.
    """
    if layout.format not in FORMATS:
        raise UnsupportedError(
            f"--mode virtual --format {layout.format}: a rank of this format may open any file",
            hint=f"choose --mode materialize, or --format {FORMATS[0]}",
        )
    topology = layout.topology
    ranks_of_files = _RanksOfFiles(layout)
    by_key: dict[tuple[int, int, int, int], list[int]] = defaultdict(list)
    for at, file in enumerate(layout.files):
        for key in ranks_of_files.keys(file.path):
            by_key[key].append(at)
    files = []
    for rank in range(topology.world_size):
        place = topology.coordinate(rank)
        place_of, part = (place.pp, place.tp), place.dp % topology.ep
        keys = ((*place_of, *own) for own in ((place.dp, -1), (-1, part), (-1, -1)))
        files.append(np.array(sorted(at for key in keys for at in by_key.get(key, ())), dtype=np.int64))
    return tuple(files)


class _RanksOfFiles:
    """Finds the ranks that open a file: keys (pp, tp, dp, expert part), -1 for any dp or expert part."""

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
            # Every rank of the stage also opens the first file: DeepSpeed reads the number of files from it.
            parts = range(degrees.tp) if name.mp == 0 else (name.mp,)
            return [(pp, tp, -1, -1) for pp in sorted(self._stages[name.layer]) for tp in parts]
        if name.kind == "model" and name.mp == 0:
            # Every rank opens the first file: DeepSpeed compares the number of files with the one that it states.
            places = itertools.product(range(degrees.pp), range(degrees.tp))
            return [(pp, tp, name.dp, -1) for pp, tp in places]
        pp, tp = divmod(name.mp, degrees.tp)
        if name.kind == "expert":
            return [(pp, tp, -1, name.expert * degrees.ep // self._experts[name.layer])]
        return [(pp, tp, name.dp, -1)]


def _stages_of_layers(layout: TargetLayout) -> dict[int, set[int]]:
    """Return the pipeline stages that open each layer's file."""
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
    stages_of = {layer: set(stages) for layer in layers}
    for at, name in parsed:
        if name.kind == "layer":
            for parameter in _parameters(layout, at):
                stages_of[name.layer] &= held.get(parameter, set(stages))
    return _in_order(stages_of)


def _in_order(stages: Mapping[int, set[int]]) -> dict[int, set[int]]:
    """Narrow the stages of each layer: stages hold consecutive layers.

    Used where nothing describes the stages. The result may have one stage too many for a layer (tied, frozen), never
    one too few.

    Args:
        stages: the stages that hold all parameters of each layer.
    """
    layers = sorted(stages)
    known = {layer: next(iter(stages[layer])) for layer in layers if len(stages[layer]) == 1}
    result = {}
    for layer in layers:
        low = max((pp for other, pp in known.items() if other <= layer), default=0)
        high = min((pp for other, pp in known.items() if other >= layer), default=None)
        result[layer] = {pp for pp in stages[layer] if pp >= low and (high is None or pp <= high)}
    return result


def _bounds(model: Mapping[str, Any]) -> list[int]:
    """Return the first layer of each stage and the end, if the target's commit describes the stages; else empty."""
    described = model.get("pipeline")
    parts = described.get("parts") if isinstance(described, Mapping) else None
    return list(parts) if parts else []


def _parameters(layout: TargetLayout, file: int) -> set[str]:
    tensors = np.unique(layout.shards.tensor[layout.shards.file == file])
    return {layout.tensors[int(at)].key.name for at in tensors}
