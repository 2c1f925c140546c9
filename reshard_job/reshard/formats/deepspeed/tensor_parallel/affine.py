"""Read the affine maps of `universal_checkpoint_info` 0.4 as boxes and compare them with the rules.

A map says where every block of a shard lies in the whole tensor, as arguments of `torch.as_strided`. Rules say the same
for any number of ranks, so the target is laid out by rules. A map that contradicts its rule is refused.
Source: deepspeed/checkpoint/affine.py, `ParamAffineMap.to_dict` (0.19.8).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from reshard.errors import UnsupportedError
from reshard.formats.deepspeed.tensor_parallel.rules import BoxPair, Rule, Shape
from reshard.tensors.geometry import strides_of

_VERSION = 1
_MAX_BOXES = 1 << 16  # of one piece of a map
_MAX_UNROLLED = 1 << 22  # of all maps together


@dataclasses.dataclass(slots=True)
class Unrolled:
    """Counts the blocks into which the pieces of all maps of one description were split."""

    count: int = 0

    def add(self, more: int) -> None:
        """Count `more` blocks.

        Raises:
            ValueError: there are more than the limit.
        """
        self.count += more
        if self.count > _MAX_UNROLLED:
            raise ValueError(f"its maps have more than {_MAX_UNROLLED} pieces")


def check_map(name: str, entry: Any, rule: Rule, whole: Shape, tp: int, *, unrolled: Unrolled | None = None) -> None:
    """Compare a parameter's map with its rule.

    Raises:
        UnsupportedError: they differ, or the map scales values.
        CorruptSourceError: the map has another form.
    """
    try:
        ranks = {int(rank): value for rank, value in entry["ranks"].items()}
        logical = tuple(entry["logical_shape"])
        unrolled = unrolled or Unrolled()
        scaled = sorted({piece.get("scale", 1.0) for value in ranks.values() for piece in value["pieces"]} - {1.0})
        mapped = {
            rank: sorted(
                pair
                for piece in value["pieces"]
                for pair in _find_boxes(piece, tuple(value["shard_shape"]), logical, unrolled)
            )
            for rank, value in ranks.items()
        }
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise UnsupportedError(f"the affine map of {name} is not understood: {error!r}") from error
    if scaled:
        raise UnsupportedError(
            f"{name}: its affine map scales values by {scaled[0]}",
            hint="scaled values and their moments are no copies: no exact conversion exists",
        )
    expected = {rank: sorted(rule.box_pairs(whole, tp, rank)) for rank in range(tp)}
    if (
        logical != whole
        or mapped.keys() != expected.keys()
        or any(_merge(mapped[rank]) != _merge(expected[rank]) for rank in mapped)
    ):
        raise UnsupportedError(
            f"{name}: its affine map cuts {list(logical)} otherwise than the patterns of universal_checkpoint_info do",
            hint="only parameters that one of the patterns describes are converted",
        )


def read_maps(info: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the affine maps of a description: pattern -> map.

    Raises:
        UnsupportedError: the maps have a later version than this code knows.
    """
    section = info.get("affine_map") or {}
    version = section.get("version", _VERSION) if isinstance(section, Mapping) else None
    if not isinstance(version, int | float) or version > _VERSION:
        raise UnsupportedError(f"affine maps of version {version}: this version of reshard knows {_VERSION}")
    params = section.get("params") or {}
    return params if isinstance(params, Mapping) else {}


def _find_boxes(piece: Mapping[str, Any], shard: Shape, whole: Shape, unrolled: Unrolled) -> Iterator[BoxPair]:
    """Yield the boxes of a piece; leading dims of the piece that match no dim of the tensor are unrolled."""
    shape = tuple(piece["shape"])
    todo = [(shape, piece["source"][0], tuple(piece["source"][1]), piece["dest"][0], tuple(piece["dest"][1]))]
    done = 0
    while todo:
        size, source, source_strides, dest, dest_strides = todo.pop()
        unrolled.add(1)
        if 0 in size:
            continue
        inside = _find_box(size, source, source_strides, whole)
        local = _find_box(size, dest, dest_strides, shard)
        if inside is not None and local is not None and inside[1] == local[1]:
            yield BoxPair(local[0], inside[0], inside[1])
        elif not size or (done := done + size[0]) > _MAX_BOXES:
            raise ValueError(f"the piece {piece!r:.200} is no box")
        else:
            todo += [
                (size[1:], source + at * source_strides[0], source_strides[1:], dest + at * dest_strides[0],
                 dest_strides[1:])
                for at in range(size[0])
            ]  # fmt: skip


def _find_box(size: Shape, offset: int, strides: Shape, tensor: Shape) -> tuple[Shape, Shape] | None:
    """Return offset and size `[ndim]` of a strided block of a row-major tensor, or None if it is no box."""
    steps, box = strides_of(tensor), [1] * len(tensor)
    dims = iter(range(len(tensor)))
    for count, stride in zip(size, strides, strict=True):
        if count == 1:
            continue
        at = next((dim for dim in dims if steps[dim] == stride and tensor[dim] > 1), None)
        if at is None:
            return None
        box[at] = count
    first, rest = [], offset
    for step in steps:
        first.append(rest // step)
        rest %= step
    fits = all(low + count <= limit for low, count, limit in zip(first, box, tensor, strict=True))
    return (tuple(first), tuple(box)) if fits else None


def _merge(pairs: Sequence[BoxPair]) -> list[BoxPair]:
    """Merge pairs of boxes that are adjacent along one dim in the shard and in the whole tensor."""
    result: list[BoxPair] = []
    for pair in pairs:
        last = result[-1] if result else None
        if last is not None and (joined := _join(last, pair)) is not None:
            result[-1] = joined
        elif math.prod(pair.size):
            result.append(pair)
    return result


def _join(first: BoxPair, second: BoxPair) -> BoxPair | None:
    for dim in range(len(first.size)):
        step = (0,) * dim + (first.size[dim],) + (0,) * (len(first.size) - dim - 1)
        same = all(first.size[at] == second.size[at] for at in range(len(first.size)) if at != dim)
        if same and all(
            tuple(a + b for a, b in zip(low, step, strict=True)) == high
            for low, high in ((first.local, second.local), (first.whole, second.whole))
        ):
            grown = tuple(size + (second.size[dim] if at == dim else 0) for at, size in enumerate(first.size))
            return BoxPair(first.local, first.whole, grown)
    return None
