"""Names and types of the module's weights, and the native files that hold some of them.

DeepSpeed's converter keeps the module in the model files, except for a PipelineModule. Model files that reshard writes
have no module; it stores this description in the optimizer file, under its own key.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from reshard.errors import CorruptSourceError
from reshard.tensors.layout import ITEM_BYTES

MODULE = -1
"""Key of the module in `Weights.attributes`, which has pipeline layers under their numbers."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Weights:
    """Weights of a module.

    Attributes:
        dtypes: name -> type, in the module's order.
        layers: pipeline layer -> full names of the weights in its file; None without a PipelineModule.
        experts: (layer of experts, expert) -> names in its file.
        attributes: `MODULE` or pipeline layer -> attributes of its state dict (`_metadata`), as they are pickled.
        model_axis: names of layer files have the tensor-parallel rank.
    """

    dtypes: Mapping[str, str]
    layers: Mapping[int, tuple[str, ...]] | None = None
    experts: Mapping[tuple[int, int], tuple[str, ...]] = dataclasses.field(default_factory=dict)
    attributes: Mapping[int, Any] = dataclasses.field(default_factory=dict)
    model_axis: bool = False

    def to_dict(self) -> dict[str, Any]:
        """Return the form that goes into the optimizer file; `attributes` are not copied."""
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
    """Parse the result of `to_dict`.

    Raises:
        CorruptSourceError: `value` has another form.
    """
    try:
        layers = value["layers"]
        weights = Weights(
            dtypes={_require_text(name): _require_text(dtype) for name, dtype in value["dtypes"].items()},
            layers=None
            if layers is None
            else {int(at): tuple(map(_require_text, names)) for at, names in layers.items()},
            experts={
                (int(at), int(number)): tuple(map(_require_text, names)) for at, number, names in value["experts"]
            },
            attributes={int(at): attributes for at, attributes in value["attributes"].items()},
            model_axis=bool(value["model_axis"]),
        )
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise CorruptSourceError(f"its list of weights is not one of reshard: {error!r:.90}", path=path) from error
    files = (*(weights.layers or {}).values(), *weights.experts.values())
    unknown = {name for names in files for name in names} - weights.dtypes.keys()
    if unknown or set(weights.dtypes.values()) - set(ITEM_BYTES):
        what = f"no type of {min(unknown)}" if unknown else "types that torch does not have"
        raise CorruptSourceError(f"its list of weights has {what}", path=path)
    return weights


def _require_text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{value!r:.60} is no text")
    return value
