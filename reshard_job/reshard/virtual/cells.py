"""Disjoint boxes that are made of boxes which may overlap. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterable, Iterator, Sequence

from reshard.tensors.geometry import Box


def cells(boxes: Iterable[Box]) -> list[Box]:
    """Disjoint boxes with the same union, each inside or outside of every one of `boxes`.

    Boxes that are equal or do not touch, as almost all are, stay whole.
    """
    found: list[Box] = []
    for box in sorted(set(boxes), key=lambda item: (item.offset, item.size)):
        if box.num_elements == 0:
            continue
        rest, refined = [box], []
        for cell in found:
            common = cell.intersect(box)
            if common is None:
                refined.append(cell)
                continue
            refined += [common, *subtract(cell, common)]
            rest = [part for piece in rest for part in subtract(piece, common)]
        found = refined + rest
    return found


def subtract(box: Box, other: Box) -> Iterator[Box]:
    """Disjoint boxes that are `box` without `other`; cut along the first dims first, so that rows stay whole."""
    common = box.intersect(other)
    if common is None:
        yield box
        return
    low, size = list(box.offset), list(box.size)
    for dim in range(box.ndim):
        before, after = common.offset[dim] - low[dim], low[dim] + size[dim] - common.end[dim]
        if before:
            yield Box(tuple(low), (*size[:dim], before, *size[dim + 1 :]))
        if after:
            yield Box((*low[:dim], common.end[dim], *low[dim + 1 :]), (*size[:dim], after, *size[dim + 1 :]))
        low[dim], size[dim] = common.offset[dim], common.size[dim]


def joined(found: Sequence[Box], copies: Sequence[tuple[Hashable, Box]]) -> list[Box]:
    """Cells as one, where the same copies hold them and they are a box together.

    What ranks of one node hold of a tensor is often all of it, cut between them: so it is read in whole rows, not in
    as many short runs as they have columns.

    Args:
        found: disjoint, each inside or outside of every box of `copies`.
        copies: each box with the copy of the tensor that it is a part of.
    """
    alike: dict[frozenset[Hashable], list[Box]] = defaultdict(list)
    for cell in found:
        alike[frozenset(copy for copy, box in copies if cell.intersect(box) == cell)].append(cell)
    together: list[Box] = []
    for own in alike.values():
        hull = _hull(own)
        together += [hull] if hull.num_elements == sum(cell.num_elements for cell in own) else own
    return sorted(together, key=lambda box: (box.offset, box.size))


def _hull(boxes: Sequence[Box]) -> Box:
    """The smallest box that holds all."""
    low = tuple(min(offsets) for offsets in zip(*(box.offset for box in boxes), strict=True))
    end = tuple(max(ends) for ends in zip(*(box.end for box in boxes), strict=True))
    return Box(low, tuple(last - first for first, last in zip(low, end, strict=True)))
