"""Compute which pipeline stage holds each layer (deepspeed/runtime/pipe/module.py and runtime/utils.py, 0.19.8)."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from reshard.errors import UnsupportedError
from reshard.formats.deepspeed.tensor_parallel.regex import Matcher, PatternError

MOST_LAYERS = 1 << 10
"""Limit on the layers of a pipeline, because balancing its stages takes time quadratic in their number."""

_UNBOUNDED = 1 << 62


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PipelineInfo:
    """Description of a PipelineModule that the files lack: the commit's `model["pipeline"]`.

    Attributes:
        num_layers: length of the list of layers.
        partition_method: `uniform`, `parameters` or `type:<regex>`.
        parts: first layer of each stage in the source, and the number of layers; empty if not known.
        tied: key of a tied module -> layers that use it; None if not known.
        layer_types: class name of each layer; empty if not known.
    """

    num_layers: int
    partition_method: str
    parts: tuple[int, ...] = ()
    tied: Mapping[str, tuple[int, ...]] | None = None
    layer_types: tuple[str, ...] = ()


def parse(value: Any) -> PipelineInfo | None:
    """Parse the wire form of a pipeline's description; return None if `value` is no mapping.

    Raises:
        UnsupportedError: it has another form than this version writes.
    """
    if not isinstance(value, Mapping):
        return None
    try:
        tied = value.get("tied")
        if not 0 <= int(value["num_layers"]) <= MOST_LAYERS:
            raise ValueError(f"num_layers is {value['num_layers']!r:.40}, expected at most {MOST_LAYERS}")
        return PipelineInfo(
            num_layers=int(value["num_layers"]),
            partition_method=str(value.get("partition_method", "parameters")).lower(),
            parts=tuple(int(part) for part in value.get("parts") or ()),
            tied=None if tied is None else {str(key): tuple(int(at) for at in layers) for key, layers in tied.items()},
            layer_types=tuple(str(name) for name in value.get("layer_types") or ()),
        )
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise UnsupportedError(f"the description of the pipeline is not understood: {error!r}") from error


def to_wire(info: PipelineInfo) -> dict[str, Any]:
    """Return the wire form of a pipeline's description, the inverse of `parse`."""
    wire: dict[str, Any] = {"num_layers": info.num_layers, "partition_method": info.partition_method}
    if info.parts:
        wire["parts"] = list(info.parts)
    if info.tied is not None:
        wire["tied"] = {key: list(layers) for key, layers in info.tied.items()}
    if info.layer_types:
        wire["layer_types"] = list(info.layer_types)
    return wire


def stage_bounds(info: PipelineInfo, num_stages: int, layer_elements: Sequence[int]) -> tuple[int, ...]:
    """Return the first layer of each stage, and the number of layers as the last element.

    Args:
        info: of the model.
        num_stages: pipeline degree.
        layer_elements: `[num_layers]`, trainable elements of one tensor-parallel rank in each layer.

    Raises:
        UnsupportedError: the partition method is unknown, or needs facts that the description lacks.
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
        try:
            wanted = Matcher(method.split(":")[1], re.IGNORECASE, anywhere=True)
            return balanced([int(wanted.match(name)) for name in info.layer_types], num_stages)
        except PatternError as error:
            raise UnsupportedError(f"partition method: {error}") from error
    raise UnsupportedError(f"partition method {method!r} is not known: expected uniform, parameters or type:<regex>")


def uniform(num_items: int, num_parts: int) -> tuple[int, ...]:
    """Cut items into equal shares; the first shares are larger by one if the division leaves a rest."""
    if num_items <= num_parts:
        return tuple(min(part, num_items) for part in range(num_parts + 1))
    share, rest = divmod(num_items, num_parts)
    return tuple(part * share + min(part, rest) for part in range(num_parts + 1))


def balanced(weights: Sequence[int], num_parts: int) -> tuple[int, ...]:
    """Cut items as DeepSpeed does: least difference between largest and smallest share; the last such cut wins.

    DeepSpeed's dynamic program keeps only the largest and smallest share of the best cut of each prefix, so its result
    is not always the optimum. This function gives the same result, because the trainer's stages do.
    """
    count = len(weights)
    if count <= num_parts:
        return uniform(count, num_parts)
    prefix = np.cumsum([0, *weights], dtype=np.int64)
    size = prefix[:, None] - prefix  # of the last share, [items, items before it]
    possible = np.tri(count + 1, k=-1, dtype=np.bool_)
    # No items in no shares: the largest share is 0 and the smallest is unbounded. Some items in no shares: impossible.
    largest, smallest = np.full(count + 1, _UNBOUNDED), np.full(count + 1, _UNBOUNDED)
    largest[0] = 0
    cuts = []
    for _ in range(num_parts):
        above, below = np.maximum(largest, size), np.minimum(smallest, size)
        spread = np.where(possible & (above < _UNBOUNDED), above - below, _UNBOUNDED)
        cut = count - np.argmin(spread[:, ::-1], axis=1)  # the last of the best cuts
        rows = np.arange(count + 1)
        reached = spread[rows, cut] < _UNBOUNDED
        largest = np.where(reached, above[rows, cut], _UNBOUNDED)
        smallest = np.where(reached, below[rows, cut], _UNBOUNDED)
        cuts.append(cut.tolist())
    bounds = [count]
    for parts in range(num_parts, 0, -1):
        bounds.append(cuts[parts - 1][bounds[-1]])
    return tuple(reversed(bounds))
