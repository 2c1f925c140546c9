"""Which pipeline layer is on which stage (deepspeed/runtime/pipe/module.py and runtime/utils.py, 0.19.8)."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

from reshard.errors import UnsupportedError


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PipelineInfo:
    """What the files do not say about a PipelineModule: the commit's `model["pipeline"]`.

    Attributes:
        num_layers: length of the list of layers.
        partition_method: `uniform`, `parameters` or `type:<regex>`.
        parts: first layer of each stage in the source, and the number of layers; empty if not known.
        tied: key of a tied module -> layers at which it stands; None if not known.
        layer_types: class name of each layer; empty if not known.
    """

    num_layers: int
    partition_method: str
    parts: tuple[int, ...] = ()
    tied: Mapping[str, tuple[int, ...]] | None = None
    layer_types: tuple[str, ...] = ()


def parse(value: Any) -> PipelineInfo | None:
    """Read the wire form; None if there is none.

    Raises:
        UnsupportedError: not what this version writes.
    """
    if not isinstance(value, Mapping):
        return None
    try:
        tied = value.get("tied")
        return PipelineInfo(
            num_layers=int(value["num_layers"]),
            partition_method=str(value.get("partition_method", "parameters")).lower(),
            parts=tuple(int(part) for part in value.get("parts") or ()),
            tied=None if tied is None else {str(key): tuple(int(at) for at in layers) for key, layers in tied.items()},
            layer_types=tuple(str(name) for name in value.get("layer_types") or ()),
        )
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise UnsupportedError(f"the description of the pipeline is not understood: {error!r}") from error


def described(info: PipelineInfo) -> dict[str, Any]:
    """The wire form, inverse of `parse`."""
    found: dict[str, Any] = {"num_layers": info.num_layers, "partition_method": info.partition_method}
    if info.parts:
        found["parts"] = list(info.parts)
    if info.tied is not None:
        found["tied"] = {key: list(layers) for key, layers in info.tied.items()}
    if info.layer_types:
        found["layer_types"] = list(info.layer_types)
    return found


def stage_bounds(info: PipelineInfo, num_stages: int, layer_elements: Sequence[int]) -> tuple[int, ...]:
    """First layer of each stage, and the number of layers.

    Args:
        info: of the model.
        num_stages: pipeline degree.
        layer_elements: `[num_layers]`, trainable elements of one tensor-parallel rank in each layer.

    Raises:
        UnsupportedError: a partition method that needs more than is known.
    """
    method = info.partition_method
    if method == "uniform":
        return uniform(info.num_layers, num_stages)
    if method == "parameters":
        return balanced(layer_elements, num_stages)
    if method.startswith("type:"):
        if len(info.layer_types) != info.num_layers:
            raise UnsupportedError(
                f"partition method {method!r} needs the layers' class names",
                hint="write them as layer_types into the commit's model.pipeline",
            )
        wanted = re.compile(method.split(":")[1], re.IGNORECASE)
        return balanced([int(bool(wanted.search(name))) for name in info.layer_types], num_stages)
    raise UnsupportedError(f"partition method {method!r} is not known: expected uniform, parameters or type:<regex>")


def uniform(num_items: int, num_parts: int) -> tuple[int, ...]:
    """Equal shares, the first ones larger by one where it does not divide."""
    if num_items <= num_parts:
        return tuple(min(part, num_items) for part in range(num_parts + 1))
    share, rest = divmod(num_items, num_parts)
    return tuple(part * share + min(part, rest) for part in range(num_parts + 1))


def balanced(weights: Sequence[int], num_parts: int) -> tuple[int, ...]:
    """The cut that DeepSpeed chooses: the smallest spread between largest and smallest part, ties to the last cut.

    Its dynamic program takes largest and smallest part of the chosen prefix cut, so the result is not always the
    optimum; the trainer's stages follow it, hence so does this.
    """
    count = len(weights)
    if count <= num_parts:
        return uniform(count, num_parts)
    prefix = [0]
    for weight in weights:
        prefix.append(prefix[-1] + weight)
    # With no items in no parts the largest part is 0 and the smallest is unbounded.
    best: list[list[tuple[float, float, float, int]]] = [
        [(math.inf, math.inf, math.inf, 0)] * (num_parts + 1) for _ in range(count + 1)
    ]
    best[0][0] = (0.0, 0.0, math.inf, 0)
    for items in range(1, count + 1):
        for parts in range(1, min(items, num_parts) + 1):
            for cut in range(items):
                _, largest, smallest, _ = best[cut][parts - 1]
                size = prefix[items] - prefix[cut]
                largest, smallest = max(largest, size), min(smallest, size)
                if best[items][parts][0] >= largest - smallest:
                    best[items][parts] = (largest - smallest, largest, smallest, cut)
    bounds = [count]
    for parts in range(num_parts, 0, -1):
        bounds.append(best[bounds[-1]][parts][3])
    return tuple(reversed(bounds))
