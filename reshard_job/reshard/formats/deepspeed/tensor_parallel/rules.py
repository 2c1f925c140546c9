"""Compute which boxes of a whole tensor each tensor-parallel rank holds. Pure arithmetic."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import NamedTuple

from reshard.errors import UnsupportedError

Shape = tuple[int, ...]


class BoxPair(NamedTuple):
    """A box of the same size in a rank's shard and in the whole tensor; `local` and `whole` are offsets, `[ndim]`."""

    local: Shape
    whole: Shape
    size: Shape


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """Rule that cuts one parameter over the tensor-parallel ranks.

    Fused tensors lie one after the other along `dim`, and each is cut by itself. With `repeat` the whole sequence
    recurs: a mixture of experts fused as `[experts * out, in]` has `experts` times `out` rows. With `unit` a fused
    tensor of size 1 is that many elements along `dim`, such as the width of a head.

    Attributes:
        dim: the dim that is cut, or None for a parameter that every rank holds whole; a dim of `view` if there is one.
        parts: sizes along `dim` of the tensors fused into one; empty for one tensor, or if `num_parts` is given.
        num_parts: number of equal fused tensors, if their sizes are not known before the shape is.
        vocabulary: the rows are padded to a multiple of the tensor-parallel degree.
        repeat: how often the fused tensors recur along `dim`.
        unit: elements along `dim` for each element that `parts` counts.
        widths: `[parts][ranks]`, size that each rank of the source holds of each fused tensor; empty if all ranks hold
            the same.
        view: shape `[view ndim]` that has `dim`, with -1 for sizes that follow from the number of elements; `resolve`
            converts it to `repeat` and `unit`.
        averaged: every rank holds a copy that it has trained by itself; the parameter is the mean of the copies.
    """

    dim: int | None
    parts: Shape = ()
    num_parts: int = 1
    vocabulary: bool = False
    repeat: int = 1
    unit: int = 1
    widths: tuple[Shape, ...] = ()
    view: Shape = ()
    averaged: bool = False

    def resolve(self, name: str, shards: Sequence[Shape]) -> tuple[Rule, Shape]:
        """Return the rule without view and with widths, and the whole tensor's shape.

        Args:
            name: of the parameter.
            shards: shape of each rank's shard.

        Raises:
            UnsupportedError: the rule does not fit the shapes.
        """
        if self.dim is None:
            if any(shape != shards[0] for shape in shards):
                raise UnsupportedError(
                    f"{name} is whole on every rank, its shards have the shapes {sorted(set(shards))}"
                )
            return self, shards[0]
        return self._through_view(name, shards) if self.view else self._along_dim(name, shards)

    def whole_shape(self, name: str, shards: Sequence[Shape]) -> Shape:
        """Return the shape `[ndim]` of the whole tensor whose shards have these shapes; see `resolve`."""
        return self.resolve(name, shards)[1]

    def _along_dim(self, name: str, shards: Sequence[Shape]) -> tuple[Rule, Shape]:
        dim, first = self.dim or 0, shards[0]
        if dim >= len(first):
            raise UnsupportedError(f"{name} has {len(first)} dims, universal_checkpoint_info cuts dim {dim}")
        if len({_replace_dim(shape, dim, 0) for shape in shards}) > 1:
            raise UnsupportedError(f"{name}: its shards {sorted(set(shards))} differ in other dims than {dim}")
        sizes = tuple(shape[dim] for shape in shards)
        size = sum(sizes)
        if self.parts and sum(self.parts) != size:
            raise UnsupportedError(
                f"{name}: universal_checkpoint_info names the parts {self.parts} along dim {dim},"
                f" the shards have {size}"
            )
        return self._with_widths(name, sizes, size), _replace_dim(first, dim, size)

    def _with_widths(self, name: str, sizes: Shape, size: int) -> Rule:
        """Return the rule with `widths`, if the ranks do not all hold the same size of each fused tensor.

        Raises:
            UnsupportedError: the sizes are not known, or do not fit the shards.
        """
        single = len(self.parts) < 2 and self.num_parts == 1
        if not self.widths and single and len(set(sizes)) > 1:
            return dataclasses.replace(self, parts=(size,), widths=(sizes,))
        if not self.widths and len(set(sizes)) > 1:
            raise UnsupportedError(
                f"{name}: its shards have {list(sizes)} elements along dim {self.dim}: expected equal ones",
                hint="what each rank holds of each fused part must be told: sub_param_shard_widths",
            )
        if self.widths and tuple(map(sum, zip(*self.widths, strict=True))) != sizes:
            raise UnsupportedError(f"{name}: the widths {self.widths} do not add up to the shards' {list(sizes)}")
        if self.widths and all(len(set(part)) == 1 for part in self.widths):
            return dataclasses.replace(self, widths=())
        return self

    def _through_view(self, name: str, shards: Sequence[Shape]) -> tuple[Rule, Shape]:
        """Find the dim of the tensor that contains the view's dim, and express the view by `repeat` and `unit`."""
        dim, first = self.dim or 0, shards[0]
        outer, total = self.view[:dim], sum(self.parts)
        sizes = tuple(map(sum, zip(*self.widths, strict=True))) or (total // len(shards),) * len(shards)
        if -1 in outer or not total or any(size % len(shards) for size in self.parts if not self.widths):
            raise UnsupportedError(f"{name}: the view {self.view} with parts {self.parts} does not say what is cut")
        for at in range(len(first)):
            repeat, rest = divmod(math.prod(outer), math.prod(first[:at]) or 1)
            unit, more = divmod(first[at], repeat * sizes[0]) if repeat and sizes[0] and not rest else (0, 1)
            expected = [_replace_dim(first, at, repeat * own * unit) for own in sizes]
            if more or not unit or list(shards) != expected or not self._fits_inner(first, at, unit):
                continue
            widths = () if all(len(set(part)) == 1 for part in self.widths) else self.widths
            rule = dataclasses.replace(self, dim=at, repeat=repeat, unit=unit, widths=widths, view=())
            return rule, _replace_dim(first, at, repeat * total * unit)
        raise UnsupportedError(
            f"{name}: its shards of the shapes {sorted(set(shards))} are no parts of the view {self.view}, cut along"
            f" its dim {dim} into {self.parts}"
        )

    def _fits_inner(self, shard: Shape, at: int, unit: int) -> bool:
        inner = self.view[(self.dim or 0) + 1 :]
        num_inner = unit * math.prod(shard[at + 1 :])
        known = math.prod(size for size in inner if size != -1)
        return num_inner % max(known, 1) == 0 if -1 in inner else num_inner == known

    def shard_shape(self, name: str, whole: Shape, tp: int, rank: int = 0) -> Shape:
        """Return the shape `[ndim]` of the shard of rank `rank` of `tp`.

        Raises:
            UnsupportedError: a fused tensor is not divisible by `tp`.
        """
        if self.dim is None:
            return whole
        size = sum(self._widths(name, whole, tp, rank))
        return _replace_dim(whole, self.dim, size * self.repeat * self.unit)

    def box_pairs(self, whole: Shape, tp: int, rank: int) -> tuple[BoxPair, ...]:
        """Return the boxes of the whole tensor that rank `rank` of `tp` holds."""
        zero = (0,) * len(whole)
        if self.dim is None:
            return (BoxPair(zero, zero, whole),)
        sizes, widths = self._sizes(whole), self._widths("", whole, tp, rank)
        pairs: list[BoxPair] = []
        local = 0
        for repetition in range(self.repeat):
            start = repetition * sum(sizes)
            for part, (size, width) in enumerate(zip(sizes, widths, strict=True)):
                first = start + self._before(part, rank, width, tp)
                if width:
                    pairs.append(
                        BoxPair(
                            _replace_dim(zero, self.dim, local * self.unit),
                            _replace_dim(zero, self.dim, first * self.unit),
                            _replace_dim(whole, self.dim, width * self.unit),
                        )
                    )
                local += width
                start += size
        return tuple(pairs)

    def _sizes(self, whole: Shape) -> Shape:
        assert self.dim is not None
        if not self.parts and not 0 < self.num_parts <= max(whole[self.dim], 1):
            raise UnsupportedError(f"{self.num_parts} fused tensors along dim {self.dim} of {list(whole)}")
        return self.parts or (whole[self.dim] // self.num_parts,) * self.num_parts

    def _widths(self, name: str, whole: Shape, tp: int, rank: int) -> Shape:
        """Return the size that a rank holds of each fused tensor."""
        if self.widths and tp == len(self.widths[0]):
            return tuple(part[rank] for part in self.widths)
        sizes = self._sizes(whole)
        if uneven := [size for size in sizes if size % tp]:
            raise UnsupportedError(
                f"{name}: {uneven[0]} along dim {self.dim} is not divisible by tp={tp}", hint="choose another tp"
            )
        return tuple(size // tp for size in sizes)

    def _before(self, part: int, rank: int, width: int, tp: int) -> int:
        """Return the size that the lower ranks hold of a fused tensor."""
        return sum(self.widths[part][:rank]) if self.widths and tp == len(self.widths[0]) else rank * width


WHOLE = Rule(dim=None)


def _replace_dim(values: Shape, dim: int, value: int) -> Shape:
    return (*values[:dim], value, *values[dim + 1 :])
