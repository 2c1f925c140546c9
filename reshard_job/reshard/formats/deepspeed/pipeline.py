"""Which pipeline layer is on which stage (deepspeed/runtime/pipe/module.py and runtime/utils.py, 0.19.8)."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from reshard.errors import UnsupportedError
from reshard.formats.deepspeed.tensor_parallel.regex import Matcher, PatternError

MOST_LAYERS = 1 << 10
"""Of a pipeline. DeepSpeed's way to balance stages takes work in proportion to the square of the layers."""

_UNBOUNDED = 1 << 62


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
        try:
            wanted = Matcher(method.split(":")[1], re.IGNORECASE, anywhere=True)
            return balanced([int(wanted.match(name)) for name in info.layer_types], num_stages)
        except PatternError as error:
            raise UnsupportedError(f"partition method: {error}") from error
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
    prefix = np.cumsum([0, *weights], dtype=np.int64)
    size = prefix[:, None] - prefix  # of a last part, [items, items before it]
    possible = np.tri(count + 1, k=-1, dtype=np.bool_)
    # With no items in no parts the largest part is 0 and the smallest is unbounded; some items in none are impossible.
    largest, smallest = np.full(count + 1, _UNBOUNDED), np.full(count + 1, _UNBOUNDED)
    largest[0] = 0
    cuts = []
    for _ in range(num_parts):
        above, below = np.maximum(largest, size), np.minimum(smallest, size)
        spread = np.where(possible & (above < _UNBOUNDED), above - below, _UNBOUNDED)
        cut = count - np.argmin(spread[:, ::-1], axis=1)  # the last of the best
        rows = np.arange(count + 1)
        reached = spread[rows, cut] < _UNBOUNDED
        largest = np.where(reached, above[rows, cut], _UNBOUNDED)
        smallest = np.where(reached, below[rows, cut], _UNBOUNDED)
        cuts.append(cut.tolist())
    bounds = [count]
    for parts in range(num_parts, 0, -1):
        bounds.append(cuts[parts - 1][bounds[-1]])
    return tuple(reversed(bounds))
