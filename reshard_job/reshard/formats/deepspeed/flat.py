"""Compute where each parameter lies in ZeRO's flat buffers (deepspeed/runtime/zero, 0.19.8). Pure arithmetic."""

from __future__ import annotations

import bisect
import dataclasses
import functools
import itertools
import math
import operator
from collections.abc import Iterable, Sequence

_START_ALIGNMENT = 2
"""`nccl_start_alignment_factor` of stage_1_and_2.py: a group is padded to this many elements times dp."""

Range = tuple[int, int, int]
"""First element, first element behind the range, and number of the parameter."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """Consecutive elements of a parameter's shard that lie in one partition.

    Attributes:
        index: position of the parameter in its group.
        start: first element, in the flattened shard of the parameter.
        stop: one past the last.
        offset: position of the first element in the partition, in elements.
    """

    index: int
    start: int
    stop: int
    offset: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class FlatGroup:
    """One parameter group of ZeRO-1/2, flattened, padded and cut into `dp` equal partitions.

    All ranks that share the group's partitions can share one object, which computes the positions once.

    Attributes:
        num_elements: `[num_params]`, elements of each parameter's shard, in buffer order.
        dp: number of partitions.
        param_alignment: elements that each parameter's start is aligned to (`parameter_alignment`), 1 if not.
        start_alignment: the buffer is padded to a multiple of this times dp.
    """

    num_elements: tuple[int, ...]
    dp: int
    param_alignment: int = 1
    start_alignment: int = _START_ALIGNMENT

    @functools.cached_property
    def param_paddings(self) -> tuple[int, ...]:
        """Return `[num_params]`, the elements between the end of a parameter and the start of the next one."""
        paddings: list[int] = []
        end = 0
        for index, count in enumerate(self.num_elements):
            end += count
            padding = 0 if index == len(self.num_elements) - 1 else -end % self.param_alignment
            paddings.append(padding)
            end += padding
        return tuple(paddings)

    @functools.cached_property
    def offsets(self) -> tuple[int, ...]:
        """Return `[num_params]`, the first element of each parameter in the whole buffer."""
        offsets: list[int] = []
        end = 0
        for count, padding in zip(self.num_elements, self.param_paddings, strict=True):
            offsets.append(end)
            end += count + padding
        return tuple(offsets)

    @functools.cached_property
    def used(self) -> int:
        """Return the number of elements before the padding at the end."""
        return sum(self.num_elements) + sum(self.param_paddings)

    @functools.cached_property
    def partition(self) -> int:
        """Return the number of elements of each partition."""
        unit = self.start_alignment * self.dp
        return math.ceil(self.used / unit) * unit // self.dp

    def padding(self, rank: int) -> int:
        """Return the number of padding elements at the end of a rank's partition."""
        return min(self.partition, max(0, (rank + 1) * self.partition - self.used))

    def gaps(self, rank: int) -> tuple[tuple[int, int], ...]:
        """Return the padding of a rank's partition, after parameters and at the end, as (position, elements)."""
        low, high = rank * self.partition, (rank + 1) * self.partition
        cut = [(max(start, low), min(stop, high)) for start, stop, _ in _select(self._padding_ranges, low, high)]
        return tuple((start - low, stop - start) for start, stop in cut)

    def spans(self, rank: int) -> tuple[Span, ...]:
        """Return the spans of parameters in a rank's partition, in order."""
        low, high = rank * self.partition, (rank + 1) * self.partition
        spans = (
            Span(index=index, start=max(low - start, 0), stop=min(high, stop) - start, offset=max(start - low, 0))
            for start, stop, index in _select(self._param_ranges, low, high)
        )
        return tuple(sorted(spans, key=operator.attrgetter("index")))

    @functools.cached_property
    def _param_ranges(self) -> list[Range]:
        """Return the elements of each parameter in the whole buffer."""
        return _list_ranges(self.offsets, self.num_elements)

    @functools.cached_property
    def _padding_ranges(self) -> list[Range]:
        """Return the padding after each parameter and at the end of the whole buffer."""
        ends = [start + count for start, count in zip(self.offsets, self.num_elements, strict=True)]
        return _list_ranges((*ends, self.used), (*self.param_paddings, self.partition * self.dp - self.used))


def _list_ranges(starts: Iterable[int], counts: Iterable[int]) -> list[Range]:
    """Return the ranges that have elements, in ascending order; they do not overlap."""
    pairs = zip(starts, counts, strict=True)
    return sorted((start, start + count, index) for index, (start, count) in enumerate(pairs) if count)


def _select(ranges: list[Range], low: int, high: int) -> list[Range]:
    """Return the ranges that have elements in `low:high`, without a look at the others."""
    first = bisect.bisect_right(ranges, low, key=operator.itemgetter(1))
    return ranges[first : bisect.bisect_left(ranges, high, key=operator.itemgetter(0))]


def param_alignment(element_bytes: int, enabled: bool) -> int:
    """Return the alignment in elements: `parameter_alignment` aligns to 16 bytes of the model's dtype."""
    return 16 // math.gcd(16, element_bytes) if enabled else 1


@dataclasses.dataclass(frozen=True, slots=True)
class Slot:
    """Position of a parameter in every rank's ZeRO-3 sub-group: rank r has elements `r * size` to `(r + 1) * size`.

    Attributes:
        offset: first element in the sub-group.
        size: number of elements; on the last ranks some or all of them can be padding.
    """

    offset: int
    size: int


def zero3_slots(num_elements: Sequence[int], dp: int) -> tuple[tuple[Slot, ...], int]:
    """Return the slot of each parameter in a sub-group and the sub-group's length, which all ranks share.

    Source: partition_parameters.py, `_partition_numel`.
    """
    sizes = [math.ceil(count / dp) for count in num_elements]
    offsets = itertools.accumulate(sizes, initial=0)
    return tuple(map(Slot, offsets, sizes)), sum(sizes)


def zero3_sub_groups(num_elements: Sequence[int], dp: int, sub_group_size: int) -> tuple[tuple[int, int], ...]:
    """Cut a parameter group into sub-groups: pairs of first and one-past-last parameter.

    Source: stage3.py, `_create_fp16_sub_groups`: a sub-group is complete once its partitions hold `sub_group_size`.
    """
    slots = [math.ceil(count / dp) for count in num_elements]
    if sub_group_size >= sum(slots):
        return ((0, len(slots)),)
    cuts: list[tuple[int, int]] = []
    start = size = 0
    for index, slot in enumerate(slots):
        size += slot
        if size >= sub_group_size or index == len(slots) - 1:
            cuts.append((start, index + 1))
            start, size = index + 1, 0
    return tuple(cuts)


def round_robin(count: int, dp: int) -> tuple[int, ...]:
    """Return the buffer order under `round_robin_gradients`: element i is the original position of parameter i.

    Source: stage_1_and_2.py, `_round_robin_reorder`.
    """
    return tuple(index for first in range(min(dp, count)) for index in range(first, count, dp))
