"""Names of the parameters of optimizers in DeepSpeed before 0.19, whose model files lack them if there are experts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from reshard.witness.opened import OpenedFile
from reshard.witness.pickles import NotWitnessedError

Shapes = Mapping[str, tuple[int, ...]]


def read_shapes(
    model: OpenedFile, experts: Sequence[OpenedFile], optimizers: Sequence[OpenedFile]
) -> list[dict[str, tuple[int, ...]]]:
    """Return names and shapes of each group, in the order of its buffer, as on the ranks of the first experts.

    Each rank's `param_slice_mappings` lists the parameters in its partition by position.

    Args:
        model: the one model file.
        experts: files of experts.
        optimizers: `[dp]`, files of the optimizer.

    Raises:
        NotWitnessedError: a parameter has no weight that would tell its shape.
    """
    shapes = {name: tuple(tensor.shape) for name, tensor in model.value["module"].items() if hasattr(tensor, "shape")}
    for file in experts:
        shapes |= {name: tuple(tensor.shape) for name, tensor in file.value.items()}
    groups: list[dict[str, tuple[int, ...]]] = []
    for at, count in enumerate(optimizers[0].find("optimizer_state_dict", "partition_count") or ()):
        names: dict[str, tuple[int, ...]] = {}
        for file in optimizers[:: len(optimizers) // int(count)]:
            for name in _order(file.find("optimizer_state_dict", "param_slice_mappings")[at]):
                if name not in shapes:
                    raise NotWitnessedError(f"the shape of {name}, which no file of weights holds")
                names[name] = shapes[name]
        groups.append(names)
    return groups


def _order(mapping: Mapping[str, Any]) -> list[str]:
    return sorted(mapping, key=lambda name: int(mapping[name].field("start")))
