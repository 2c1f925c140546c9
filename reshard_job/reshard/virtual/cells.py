"""Split boxes that may overlap into disjoint boxes, the *cells*. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterable, Iterator, Sequence

from reshard.tensors.geometry import Box


def split_into_cells(boxes: Iterable[Box]) -> list[Box]:
    """Split boxes into disjoint cells with the same union; each cell lies inside or outside of each box.

    Boxes that are equal or do not touch stay whole; almost all boxes do.
    """
    cells: list[Box] = []
    for box in sorted(set(boxes), key=lambda item: (item.offset, item.size)):
        if box.num_elements == 0:
            continue
        rest, refined = [box], []
        for cell in cells:
            common = cell.intersect(box)
            if common is None:
                refined.append(cell)
                continue
            refined += [common, *subtract(cell, common)]
            rest = [smaller for larger in rest for smaller in subtract(larger, common)]
        cells = refined + rest
    return cells


def subtract(box: Box, other: Box) -> Iterator[Box]:
    """Yield disjoint boxes that are `box` without `other`; cut along the first dims first, so that rows stay whole."""
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


def join_cells(cells: Sequence[Box], copies: Sequence[tuple[Hashable, Box]]) -> list[Box]:
    """Join cells that the same copies hold if together they are a box.

    The ranks of one node often hold all of a tensor, cut between them. Joined cells are then read in whole rows, not in
    one short range for each column and rank.

    Args:
        cells: disjoint, each inside or outside of every box of `copies`.
        copies: each box with the copy of the tensor that it belongs to.
    """
    alike: dict[frozenset[Hashable], list[Box]] = defaultdict(list)
    for cell in cells:
        alike[frozenset(copy for copy, box in copies if cell.intersect(box) == cell)].append(cell)
    together: list[Box] = []
    for own in alike.values():
        hull = _hull(own)
        together += [hull] if hull.num_elements == sum(cell.num_elements for cell in own) else own
    return sorted(together, key=lambda box: (box.offset, box.size))


def _hull(boxes: Sequence[Box]) -> Box:
    """Return the smallest box that holds all boxes."""
    low = tuple(min(offsets) for offsets in zip(*(box.offset for box in boxes), strict=True))
    end = tuple(max(ends) for ends in zip(*(box.end for box in boxes), strict=True))
    return Box(low, tuple(last - first for first, last in zip(low, end, strict=True)))
