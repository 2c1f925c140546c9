"""The affine maps of `universal_checkpoint_info` 0.4, read as boxes and held against the rules.

A map says where every block of a shard lies in the whole tensor, as arguments of `torch.as_strided`. Rules say the same
for any number of ranks, so they lay out the target; a map that contradicts its rule is refused.
Source: deepspeed/checkpoint/affine.py, `ParamAffineMap.to_dict` (0.19.8).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from reshard.errors import CorruptSourceError, UnsupportedError
from reshard.formats.deepspeed.tensor_parallel.rules import Piece, Rule, Shape
from reshard.tensors.geometry import strides_of

_VERSION = 1
_MAX_PIECES = 1 << 16  # of one piece
_MAX_UNROLLED = 1 << 22  # of all maps together


@dataclasses.dataclass(slots=True)
class Unrolled:
    """How many parts of pieces the maps of one description have been taken apart into."""

    count: int = 0

    def add(self, more: int) -> None:
        """Count `more` parts.

        Raises:
            ValueError: they are more than are taken apart.
        """
        self.count += more
        if self.count > _MAX_UNROLLED:
            raise ValueError(f"its maps have more than {_MAX_UNROLLED} pieces")


def check_map(name: str, entry: Any, rule: Rule, whole: Shape, tp: int, *, unrolled: Unrolled | None = None) -> None:
    """Hold a parameter's map against its rule.

    Raises:
        UnsupportedError: they differ, or the map scales values.
        CorruptSourceError: it is no such map.
    """
    try:
        ranks = {int(rank): value for rank, value in entry["ranks"].items()}
        logical = tuple(entry["logical_shape"])
        unrolled = unrolled or Unrolled()
        scaled = sorted({piece.get("scale", 1.0) for value in ranks.values() for piece in value["pieces"]} - {1.0})
        found = {
            rank: sorted(
                piece
                for found in value["pieces"]
                for piece in _boxes(found, tuple(value["shard_shape"]), logical, unrolled)
            )
            for rank, value in ranks.items()
        }
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise CorruptSourceError(f"the affine map of {name} is not understood: {error!r}") from error
    if scaled:
        raise UnsupportedError(
            f"{name}: its affine map scales values by {scaled[0]}",
            hint="scaled values and their moments are no copies: no exact conversion exists",
        )
    expected = {rank: sorted(rule.pieces(whole, tp, rank)) for rank in range(tp)}
    if (
        logical != whole
        or found.keys() != expected.keys()
        or any(_merged(found[rank]) != _merged(expected[rank]) for rank in found)
    ):
        raise UnsupportedError(
            f"{name}: its affine map cuts {list(logical)} otherwise than the patterns of universal_checkpoint_info do",
            hint="only parameters that one of the patterns describes are converted",
        )


def maps_of(info: Mapping[str, Any]) -> Mapping[str, Any]:
    """Pattern -> map.

    Raises:
        UnsupportedError: a later version of maps.
    """
    found = info.get("affine_map") or {}
    version = found.get("version", _VERSION) if isinstance(found, Mapping) else None
    if not isinstance(version, int | float) or version > _VERSION:
        raise UnsupportedError(f"affine maps of version {version}: this version of reshard knows {_VERSION}")
    params = found.get("params") or {}
    return params if isinstance(params, Mapping) else {}


def _boxes(piece: Mapping[str, Any], shard: Shape, whole: Shape, unrolled: Unrolled) -> Iterator[Piece]:
    """Boxes of a piece; leading dims of the piece that no dim of the tensor is are unrolled."""
    shape = tuple(piece["shape"])
    todo = [(shape, piece["source"][0], tuple(piece["source"][1]), piece["dest"][0], tuple(piece["dest"][1]))]
    done = 0
    while todo:
        size, source, source_strides, dest, dest_strides = todo.pop()
        unrolled.add(1)
        if 0 in size:
            continue
        inside = _box(size, source, source_strides, whole)
        local = _box(size, dest, dest_strides, shard)
        if inside is not None and local is not None and inside[1] == local[1]:
            yield Piece(local[0], inside[0], inside[1])
        elif not size or (done := done + size[0]) > _MAX_PIECES:
            raise ValueError(f"the piece {piece!r:.200} is no box")
        else:
            todo += [
                (size[1:], source + at * source_strides[0], source_strides[1:], dest + at * dest_strides[0],
                 dest_strides[1:])
                for at in range(size[0])
            ]  # fmt: skip


def _box(size: Shape, offset: int, strides: Shape, tensor: Shape) -> tuple[Shape, Shape] | None:
    """First element and size `[ndim]` of a strided block of a row-major tensor, if it is a box."""
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


def _merged(pieces: Sequence[Piece]) -> list[Piece]:
    """Pieces that continue each other along one dim on both sides become one."""
    result: list[Piece] = []
    for piece in pieces:
        last = result[-1] if result else None
        if last is not None and (joined := _join(last, piece)) is not None:
            result[-1] = joined
        elif math.prod(piece.size):
            result.append(piece)
    return result


def _join(first: Piece, second: Piece) -> Piece | None:
    for dim in range(len(first.size)):
        step = (0,) * dim + (first.size[dim],) + (0,) * (len(first.size) - dim - 1)
        same = all(first.size[at] == second.size[at] for at in range(len(first.size)) if at != dim)
        if same and all(
            tuple(a + b for a, b in zip(low, step, strict=True)) == high
            for low, high in ((first.local, second.local), (first.whole, second.whole))
        ):
            grown = tuple(size + (second.size[dim] if at == dim else 0) for at, size in enumerate(first.size))
            return Piece(first.local, first.whole, grown)
    return None
