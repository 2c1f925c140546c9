"""What the module of the run held: names and types of its weights, and which native files some of them have.

DeepSpeed's converter leaves it in the model files, but for those of a PipelineModule. Folders of ours say it in the
optimizer file, under a key of our own, as their model files hold no module.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from reshard.errors import CorruptSourceError
from reshard.tensors.layout import ITEM_BYTES

MODULE = -1
"""Number of the module where layers of a pipeline have theirs."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Weights:
    """Weights of a module.

    Attributes:
        dtypes: name -> type, in the module's order.
        layers: pipeline layer -> full names of what its file holds; None without a PipelineModule.
        experts: (layer of experts, expert) -> names in its file.
        attributes: of the module's state dict (`_metadata`), under `MODULE`, or of each layer's, as they are pickled.
        model_axis: names of layer files have the tensor-parallel rank.
    """

    dtypes: Mapping[str, str]
    layers: Mapping[int, tuple[str, ...]] | None = None
    experts: Mapping[tuple[int, int], tuple[str, ...]] = dataclasses.field(default_factory=dict)
    attributes: Mapping[int, Any] = dataclasses.field(default_factory=dict)
    model_axis: bool = False

    def to_dict(self) -> dict[str, Any]:
        """As it goes into the optimizer file; attributes as they are."""
        layers = None if self.layers is None else {layer: list(names) for layer, names in self.layers.items()}
        experts = [[layer, expert, list(names)] for (layer, expert), names in self.experts.items()]
        return {
            "dtypes": dict(self.dtypes),
            "layers": layers,
            "experts": experts,
            "attributes": dict(self.attributes),
            "model_axis": self.model_axis,
        }


def parse(value: Any, path: str) -> Weights:
    """Read what `to_dict` made.

    Raises:
        CorruptSourceError: it is something else.
    """
    try:
        layers = value["layers"]
        found = Weights(
            dtypes={_text(name): _text(dtype) for name, dtype in value["dtypes"].items()},
            layers=None if layers is None else {int(at): tuple(map(_text, names)) for at, names in layers.items()},
            experts={(int(at), int(number)): tuple(map(_text, names)) for at, number, names in value["experts"]},
            attributes={int(at): found for at, found in value["attributes"].items()},
            model_axis=bool(value["model_axis"]),
        )
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise CorruptSourceError(f"its list of weights is not one of reshard: {error!r:.90}", path=path) from error
    files = (*(found.layers or {}).values(), *found.experts.values())
    unknown = {name for names in files for name in names} - found.dtypes.keys()
    if unknown or set(found.dtypes.values()) - set(ITEM_BYTES):
        what = f"no type of {min(unknown)}" if unknown else "types that torch has not"
        raise CorruptSourceError(f"its list of weights has {what}", path=path)
    return found


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{value!r:.60} is no text")
    return value
