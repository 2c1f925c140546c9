"""How tensor parallelism cuts one parameter: which boxes of the whole tensor a rank holds. Pure arithmetic."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import NamedTuple

from reshard.errors import UnsupportedError

Shape = tuple[int, ...]


class Piece(NamedTuple):
    """A box of a rank's shard and the box of the whole tensor that it is; both `[ndim]`, of the same size."""

    local: Shape
    whole: Shape
    size: Shape


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """How one parameter is cut over the tensor-parallel ranks.

    Fused tensors lie one after the other along `dim`, each cut by itself. With `repeat` the whole sequence recurs: a
    mixture of experts fused as `[experts * out, in]` has `experts` runs of `out` rows. With `unit` an element of a
    part is that many elements along `dim`: heads of a width, for instance.

    Attributes:
        dim: the dim that is cut, or None for a parameter that every rank holds whole; of `view` if there is one.
        parts: sizes along `dim` of the tensors fused into one; empty for one tensor, or where `num_parts` says it.
        num_parts: number of equal fused tensors where `parts` is not known before the shape is.
        vocabulary: its rows are padded to a multiple of the tensor-parallel degree.
        repeat: how often the parts recur along `dim`.
        unit: elements along `dim` for each element of a part.
        widths: `[parts][ranks]`, what each rank of the source holds of each part; empty where all hold the same.
        view: shape `[view ndim]` in which `dim` counts, -1 for what follows from the number of elements; `resolve`
            turns it into `repeat` and `unit`.
    """

    dim: int | None
    parts: Shape = ()
    num_parts: int = 1
    vocabulary: bool = False
    repeat: int = 1
    unit: int = 1
    widths: tuple[Shape, ...] = ()
    view: Shape = ()

    def resolve(self, name: str, shards: Sequence[Shape]) -> tuple[Rule, Shape]:
        """The rule without view and with widths, and the whole tensor's shape.

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
        """Shape `[ndim]` of the whole tensor whose shards have these shapes; see `resolve`."""
        return self.resolve(name, shards)[1]

    def _along_dim(self, name: str, shards: Sequence[Shape]) -> tuple[Rule, Shape]:
        dim, first = self.dim or 0, shards[0]
        if dim >= len(first):
            raise UnsupportedError(f"{name} has {len(first)} dims, universal_checkpoint_info cuts dim {dim}")
        if len({_with(shape, dim, 0) for shape in shards}) > 1:
            raise UnsupportedError(f"{name}: its shards {sorted(set(shards))} differ in other dims than {dim}")
        held = tuple(shape[dim] for shape in shards)
        size = sum(held)
        if self.parts and sum(self.parts) != size:
            raise UnsupportedError(
                f"{name}: universal_checkpoint_info names the parts {self.parts} along dim {dim},"
                f" the shards have {size}"
            )
        return self._with_widths(name, held, size), _with(first, dim, size)

    def _with_widths(self, name: str, held: Shape, size: int) -> Rule:
        """The rule with what each rank holds of each part, where that is not the same for all."""
        single = len(self.parts) < 2 and self.num_parts == 1
        if not self.widths and single and len(set(held)) > 1:
            return dataclasses.replace(self, parts=(size,), widths=(held,))
        if not self.widths and len(set(held)) > 1:
            raise UnsupportedError(
                f"{name}: its shards have {list(held)} elements along dim {self.dim}: expected equal ones",
                hint="what each rank holds of each fused part must be told: sub_param_shard_widths",
            )
        if self.widths and tuple(map(sum, zip(*self.widths, strict=True))) != held:
            raise UnsupportedError(f"{name}: the widths {self.widths} do not add up to the shards' {list(held)}")
        if self.widths and all(len(set(part)) == 1 for part in self.widths):
            return dataclasses.replace(self, widths=())
        return self

    def _through_view(self, name: str, shards: Sequence[Shape]) -> tuple[Rule, Shape]:
        """Find the dim of the tensor that the view's dim lies in, whose elements follow each other in runs."""
        dim, first = self.dim or 0, shards[0]
        outer, total = self.view[:dim], sum(self.parts)
        held = tuple(map(sum, zip(*self.widths, strict=True))) or (total // len(shards),) * len(shards)
        if -1 in outer or not total or any(size % len(shards) for size in self.parts if not self.widths):
            raise UnsupportedError(f"{name}: the view {self.view} with parts {self.parts} does not say what is cut")
        for at in range(len(first)):
            repeat, rest = divmod(math.prod(outer), math.prod(first[:at]) or 1)
            unit, more = divmod(first[at], repeat * held[0]) if repeat and held[0] and not rest else (0, 1)
            expected = [_with(first, at, repeat * own * unit) for own in held]
            if more or not unit or list(shards) != expected or not self._fits_inner(first, at, unit):
                continue
            widths = () if all(len(set(part)) == 1 for part in self.widths) else self.widths
            rule = dataclasses.replace(self, dim=at, repeat=repeat, unit=unit, widths=widths, view=())
            return rule, _with(first, at, repeat * total * unit)
        raise UnsupportedError(
            f"{name}: its shards of the shapes {sorted(set(shards))} are no parts of the view {self.view}, cut along"
            f" its dim {dim} into {self.parts}"
        )

    def _fits_inner(self, shard: Shape, at: int, unit: int) -> bool:
        inner = self.view[(self.dim or 0) + 1 :]
        found = unit * math.prod(shard[at + 1 :])
        known = math.prod(size for size in inner if size != -1)
        return found % max(known, 1) == 0 if -1 in inner else found == known

    def shard_shape(self, name: str, whole: Shape, tp: int, rank: int = 0) -> Shape:
        """Shape `[ndim]` of the shard of rank `rank` of `tp`.

        Raises:
            UnsupportedError: a part is not divisible by `tp`.
        """
        if self.dim is None:
            return whole
        held = sum(self._widths(name, whole, tp, rank))
        return _with(whole, self.dim, held * self.repeat * self.unit)

    def pieces(self, whole: Shape, tp: int, rank: int) -> tuple[Piece, ...]:
        """What rank `rank` of `tp` holds of the whole tensor."""
        zero = (0,) * len(whole)
        if self.dim is None:
            return (Piece(zero, zero, whole),)
        sizes, widths = self._sizes(whole), self._widths("", whole, tp, rank)
        pieces: list[Piece] = []
        local = 0
        for run in range(self.repeat):
            start = run * sum(sizes)
            for part, (size, width) in enumerate(zip(sizes, widths, strict=True)):
                first = start + self._before(part, rank, width, tp)
                if width:
                    pieces.append(
                        Piece(
                            _with(zero, self.dim, local * self.unit),
                            _with(zero, self.dim, first * self.unit),
                            _with(whole, self.dim, width * self.unit),
                        )
                    )
                local += width
                start += size
        return tuple(pieces)

    def _sizes(self, whole: Shape) -> Shape:
        assert self.dim is not None
        return self.parts or (whole[self.dim] // self.num_parts,) * self.num_parts

    def _widths(self, name: str, whole: Shape, tp: int, rank: int) -> Shape:
        """What a rank holds of each part."""
        if self.widths and tp == len(self.widths[0]):
            return tuple(part[rank] for part in self.widths)
        sizes = self._sizes(whole)
        if uneven := [size for size in sizes if size % tp]:
            raise UnsupportedError(
                f"{name}: {uneven[0]} along dim {self.dim} is not divisible by tp={tp}", hint="choose another tp"
            )
        return tuple(size // tp for size in sizes)

    def _before(self, part: int, rank: int, width: int, tp: int) -> int:
        """What the ranks before hold of a part."""
        return sum(self.widths[part][:rank]) if self.widths and tp == len(self.widths[0]) else rank * width


WHOLE = Rule(dim=None)


def _with(values: Shape, dim: int, value: int) -> Shape:
    return (*values[:dim], value, *values[dim + 1 :])
