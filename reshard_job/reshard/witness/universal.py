"""A stranger to DeepSpeed's universal checkpoints: a folder for each parameter, with a file for each state."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from reshard.witness import deepspeed
from reshard.witness.opened import OpenedFile
from reshard.witness.pickles import NotWitnessedError, StoredTensor
from reshard.witness.table import Key, Piece, Table, Tensor, row_major
from reshard.witness.tensor_parallel import Patterns

_ZERO = "zero"
_MASTER = "fp32"


def read(root: Path, *, info: Any = None, is_target: bool = False) -> Table:
    """Read the tensors of a universal checkpoint.

    Args:
        root: folder of the checkpoint.
        info: `universal_checkpoint_info` that replaces the checkpoint's own, or None.
        is_target: every byte of the files will be accounted for.
    """
    table = Table(root)
    names = sorted(item.name for item in root.iterdir() if item.name.endswith("_model_states.pt"))
    models = [OpenedFile(table, name, is_target=is_target) for name in names]
    patterns = Patterns(models[0].find("universal_checkpoint_info") if info is None else info)
    table.kind_of = patterns.kind_of
    shapes: dict[str, list[tuple[int, ...]]] = {}
    for model in models if not models[0].name.startswith("zero_pp") else models[:1]:
        for group in model.find("param_shapes") or ():
            for name, shape in group.items():
                shapes.setdefault(name, []).append(tuple(shape))
    for item in sorted((root / _ZERO).iterdir()):
        if item.name.endswith(".pt"):
            OpenedFile(table, f"{_ZERO}/{item.name}", is_target=is_target)
        else:
            _add_parameter(table, item, shapes, patterns, is_target=is_target)
    _add_rest(table, models)
    return table


def _add_parameter(
    table: Table, folder: Path, shapes: Mapping[str, list[tuple[int, ...]]], patterns: Patterns, *, is_target: bool
) -> None:
    name = folder.name
    for path in sorted(folder.iterdir()):
        file = OpenedFile(table, f"{_ZERO}/{name}/{path.name}", is_target=is_target)
        atom = file.value
        stored: Any = atom.get("param") if isinstance(atom, Mapping) else atom
        if not isinstance(stored, StoredTensor) or path.stem == "step":
            continue
        state = path.stem if name in shapes or path.stem != _MASTER else "weight"
        rows = patterns.vocabulary_rows(name)
        known = shapes.get(name)
        shape: tuple[int, ...] = stored.shape
        if known is not None and len(known) == 1 and math.prod(known[0]) == math.prod(shape):
            shape = known[0]  # the bare tensor of ZeRO-3 is flat, and a view of fused parts has more dims
        if shape != stored.shape and stored.stride != row_major(stored.shape):
            raise NotWitnessedError(f"{name} is a view with gaps")
        strides = stored.stride if shape == stored.shape else row_major(shape)
        piece = Piece((0,) * len(shape), shape, file.storage_of(stored), stored.offset, strides, shape)
        table.add(Key(state, name), Tensor(shape, stored.dtype, [[piece]]), rows)


def _add_rest(table: Table, models: list[OpenedFile]) -> None:
    """Add buffers and frozen parameters that have no folder, and second names."""
    first = models[0]
    table.aliases.update(first.find("shared_params") or {})
    for name in first.find("buffer_names") or ():
        stored = first.find("module", name)
        if isinstance(stored, StoredTensor) and Key("weight", name) not in table.tensors:
            table.tensors[Key("weight", name)] = first.tensor_of(stored)
    module = first.find("module")
    for name, shape in (first.find("frozen_param_shapes") or {}).items():
        parts = [model.find("frozen_param_fragments", name) for model in models]
        if Key("weight", name) in table.tensors:
            continue
        if all(isinstance(part, StoredTensor) for part in parts) and first.name.startswith("zero_pp"):
            shard = deepspeed.make_slots(models, parts, tuple(shape), 0)
            zero = (0,) * len(shard.shape)
            piece = Piece(zero, shard.shape, shard.holder, 0, shard.strides, shard.shape)
            table.tensors[Key("weight", name)] = Tensor(shard.shape, shard.dtype, [[piece]])
        else:
            table.unknown[name] = "frozen, and in none of the folders of parameters"
    if isinstance(module, Mapping):  # DeepSpeed's converter copies model files of ZeRO-1 and 2 with their weights
        seen: dict[tuple[Any, ...], str] = {}
        for name, stored in module.items():
            if isinstance(stored, StoredTensor) and stored.shape and 0 not in stored.shape:
                twin = seen.setdefault((stored.storage.key, stored.offset, stored.shape, stored.stride), name)
                if twin != name:
                    table.aliases[name] = twin
    for second, name in table.aliases.items():
        if Key("weight", name) in table.tensors or Key(_MASTER, name) in table.tensors:
            table.tensors.pop(Key("weight", second), None)
