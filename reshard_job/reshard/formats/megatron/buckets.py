"""Find parameters in the buckets of the distributed optimizer, as `dp_reshardable` stores its states.

A bucket is a flat tensor for each data-parallel group. It holds the group's parts of parameters one behind the other,
in the reverse order of the module's parameters, each at a multiple of 64 elements. A group has buckets of its own for
each of its virtual pipeline stages (a buffer each), and, with expert parallelism, for experts, which have an optimizer
and groups of their own. The files state no names, but every part is a chunk of its own or several, so its ends are ends
of chunks. An order (`model_order`) is taken only if all parts have the sizes and ends that it demands, and no other
order does. What they cannot tell (two parts of equal size in each other's places) the run finds out: weights must be
the rounded master weights.

Source: megatron/core/distributed/distributed_data_parallel.py and param_and_grad_buffer.py (`_ParamAndGradBuffer`),
megatron/core/optimizer/distrib_optimizer.py (`sharded_param_state_dp_reshardable`), optimizer.py (`ChainedOptimizer`)
and __init__.py (`get_megatron_optimizer`: `data_parallel_group_idx`), megatron/core/parallel_state.py (groups `tp-pp`
and `tp-ep-pp`) of Megatron-Core 0.16.1.
"""

from __future__ import annotations

import bisect
import dataclasses
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from reshard.formats.dcp.metadata import Entry
from reshard.formats.dcp.tables import FlatChunk, FlatPiece
from reshard.formats.megatron.example import TensorLocation
from reshard.formats.megatron.model_order import (
    EMBEDDING,
    OUTPUT,
    SPLIT_ALONG_LAST,
    Order,
    OrderError,
    Slot,
    is_of_experts,
    list_chunks,
    list_orders,
)
from reshard.formats.megatron.names import STATES
from reshard.tensors.geometry import Box, flat_interval_to_boxes, strides_of, whole
from reshard.tensors.layout import LogicalTensor, TensorKey

_BUCKET = re.compile(
    r"(?:chained_(?P<optimizer>\d+)\.)?optimizer\.distributed\.dp_group_idx_(?P<group>\d+)"
    r"\.gbuf_idx_(?P<buffer>\d+)\.dtype_(?P<dtype>\([^()]*\))\.bucket_idx_(?P<bucket>\d+)\.(?P<state>[^.]+)"
)
_ALIGNMENT = 64
_GATED = "linear_fc1."
_DENSE, _EXPERTS = 0, 1
"""Numbers of the optimizers; that of experts is a second one only if they are split over ranks."""


class PlacingError(Exception):
    """The files do not tell which parameter is where; the message says why."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class BucketStates:
    """Optimizer states that were found in buckets.

    Attributes:
        tensors: the states, one for each parameter and state.
        chunks: chunks of the buckets, with the parts of `tensors` in them; `tensors` are numbered from 0.
        locations: location that each state has in a checkpoint of the kind `fully_reshardable`.
        order: which of the orders fits.
    """

    tensors: tuple[LogicalTensor, ...]
    chunks: tuple[FlatChunk, ...]
    locations: Mapping[TensorKey, TensorLocation]
    order: str


class _Part(NamedTuple):
    """One rank's part of a parameter, flattened in a bucket.

    Attributes:
        name: name of the parameter.
        shape: shape of the part, [ndim].
        boxes: boxes of the whole tensor that are behind each other along `dim`.
        dim: dim along which the boxes are behind each other.
        is_shared: the parameter is in several stages, and has a bucket of its own there.
    """

    name: str
    shape: tuple[int, ...]
    boxes: tuple[Box, ...]
    dim: int
    is_shared: bool

    @property
    def num_elements(self) -> int:
        return math.prod(self.shape)


class _Placed(NamedTuple):
    """A part, and the buffer, bucket and element at which it begins."""

    buffer: tuple[int, int, int]
    bucket: int
    start: int
    part: _Part


class _Degrees(NamedTuple):
    """Degrees of parallelism of the run.

    Attributes:
        tp: of tensor parallelism.
        pp: pipeline stages.
        vp: virtual stages of each stage.
        ep: of expert parallelism.
        etp: of tensor parallelism of experts.
        num_local: experts that a rank has of each layer; 0 without experts.
    """

    tp: int
    pp: int
    vp: int
    ep: int
    etp: int
    num_local: int


_Buffer = list[dict[str, Entry]]
"""States of the buckets of a buffer."""
_Buffers = dict[tuple[int, int], list[_Buffer]]
"""Buffers of each optimizer and data-parallel group."""


def place_states(
    entries: Iterable[Entry], weights: Mapping[str, TensorLocation], *, has_sequential_experts: bool = False
) -> BucketStates:
    """Find every parameter's states in the buckets.

    Args:
        entries: tensors of the optimizer's buckets.
        weights: location of the weight of every name.
        has_sequential_experts: the checkpoint says that its experts are not grouped (`moe_grouped_gemm`).

    Raises:
        PlacingError: the files do not tell which parameter is where.
    """
    buffers = _collect(entries)
    degrees = _find_degrees(buffers, weights)
    if degrees.num_local == 1 and not has_sequential_experts:
        raise PlacingError("experts may be transposed: each rank has one, and args.moe_grouped_gemm is not False")
    fitting: dict[str, list[_Placed]] = {}
    for order in list_orders(weights):
        placed = _fit(buffers, weights, order, degrees)
        if placed is not None and placed not in fitting.values():
            fitting[order.name] = placed
    if len(fitting) != 1:
        raise PlacingError(
            "parameters can be in several orders" if fitting else "no known order of parameters has these sizes"
        )
    ((name, placed),) = fitting.items()
    return _build(buffers, weights, placed, name)


def number_chunks(chunks: Iterable[FlatChunk], first: int) -> tuple[FlatChunk, ...]:
    """Return the chunks with their tensors numbered from `first` on."""
    return tuple(
        chunk._replace(pieces=tuple(piece._replace(tensor=piece.tensor + first) for piece in chunk.pieces))
        for chunk in chunks
    )


def _collect(entries: Iterable[Entry]) -> _Buffers:
    """Return the buffers of each optimizer and group, in order.

    Raises:
        PlacingError: keys of another kind, or a bucket, a state, a buffer or a group is missing.
    """
    found: dict[tuple[int, int], dict[int, dict[int, dict[str, Entry]]]] = {}
    types: set[str] = set()
    for entry in entries:
        match = _BUCKET.fullmatch(entry.key)
        if match is None or len(entry.shape or ()) != 1:
            raise PlacingError(f"{entry.key} is not a known kind of bucket")
        types.add(match["dtype"])
        own = found.setdefault((int(match["optimizer"] or _DENSE), int(match["group"])), {})
        own.setdefault(int(match["buffer"]), {}).setdefault(int(match["bucket"]), {})[match["state"]] = entry
    if len(types) > 1:
        raise PlacingError("several buffers of a stage: parameters of several types")
    every = [buffer for own in found.values() for buffer in own.values()]
    states = {frozenset(bucket) for buffer in every for bucket in buffer.values()}
    numbers = [sorted(own) for own in found.values()] + [sorted(buffer) for buffer in every]
    if any(own != list(range(len(own))) for own in numbers) or len(states) != 1:
        raise PlacingError("buckets or states are missing")
    return {
        key: [[found[key][buffer][at] for at in range(len(found[key][buffer]))] for buffer in range(len(found[key]))]
        for key in sorted(found)
    }


def _find_degrees(buffers: _Buffers, weights: Mapping[str, TensorLocation]) -> _Degrees:
    """Find the degrees of parallelism from the numbers of groups, buffers and chunks.

    Raises:
        PlacingError: these numbers are not those of a GPTModel.
    """
    groups = [[group for optimizer, group in buffers if optimizer == number] for number in (_DENSE, _EXPERTS)]
    if any(own != list(range(len(own))) for own in groups) or sum(map(len, groups)) != len(buffers):
        raise PlacingError(f"optimizers and groups of ranks {list(buffers)}")
    dense, of_experts = map(len, groups)
    counts = weights[EMBEDDING].counts if EMBEDDING in weights else (0,)
    tp = counts[0]
    if tp < 1 or not dense or dense % tp or math.prod(counts) != tp:
        raise PlacingError(f"{EMBEDDING} has {math.prod(counts)} parts, and there are {dense} groups of ranks")
    pp, vp = dense // tp, len(buffers[_DENSE, 0])
    if vp > 1 and pp == 1:
        raise PlacingError("several buffers, but one pipeline stage")
    etp, number = _count_experts(weights)
    if not number:
        if of_experts:
            raise PlacingError("a second optimizer, but no experts")
        return _Degrees(tp, pp, vp, 1, tp, 0)
    ep = of_experts // (etp * pp) if of_experts else 1
    # without expert parallelism, experts are in the first optimizer, whose groups are those of tp
    is_known = ep > 1 and ep * etp * pp == of_experts if of_experts else etp == tp
    if not is_known or number % ep:
        raise PlacingError(f"{number} experts at tp={etp} in {of_experts} groups of ranks and {pp} stages")
    return _Degrees(tp, pp, vp, ep, etp, number // ep)


def _count_experts(weights: Mapping[str, TensorLocation]) -> tuple[int, int]:
    """Return the degree of tensor parallelism of experts, and their number in each layer; 1 and 0 if there are none.

    Raises:
        PlacingError: layers differ in them, or chunks are not of one expert each.
    """
    experts = {name: location for name, location in weights.items() if is_of_experts(name)}
    if not experts:
        return 1, 0
    if any(location.shape[0] != location.counts[0] for location in experts.values()):
        raise PlacingError("experts are grouped, in a layout that Megatron-Core transposes when it saves weights")
    numbers = {location.shape[0] for location in experts.values()}
    degrees = {location.counts[-1] for name, location in experts.items() if name.endswith(SPLIT_ALONG_LAST)}
    if len(numbers) != 1 or len(degrees) != 1:
        raise PlacingError(f"layers have {sorted(numbers)} experts, at tp={sorted(degrees)}")
    return degrees.pop(), numbers.pop()


def _fit(
    buffers: _Buffers, weights: Mapping[str, TensorLocation], order: Order, degrees: _Degrees
) -> list[_Placed] | None:
    """Place the parts of all groups in an order of a layer's parameters; None if a size or an end is another."""
    try:
        chunks = list_chunks(weights, order, degrees.pp * degrees.vp, degrees.num_local)
    except OrderError as error:
        raise PlacingError(str(error)) from error
    is_shared = len(chunks) > 1 and OUTPUT not in weights
    placed: list[_Placed] = []
    for (optimizer, group), own in buffers.items():
        every = [
            _cut_slots(slots, weights, degrees, optimizer, group, is_shared=is_shared)
            for slots in chunks[_stage_of(optimizer, group, degrees) :: degrees.pp]
        ]
        held = [parts for parts in every if parts]
        if len(held) != len(own):
            return None
        for number, (parts, buffer) in enumerate(zip(held, own, strict=True)):
            ends = _place_parts(parts[::-1], buffer)
            if ends is None:
                return None
            placed += [_Placed((optimizer, group, number), bucket, start, part) for bucket, start, part in ends]
    return placed


def _stage_of(optimizer: int, group: int, degrees: _Degrees) -> int:
    return group // (degrees.etp * degrees.ep if optimizer == _EXPERTS else degrees.tp)


def _cut_slots(
    slots: Iterable[Slot],
    weights: Mapping[str, TensorLocation],
    degrees: _Degrees,
    optimizer: int,
    group: int,
    *,
    is_shared: bool,
) -> list[_Part]:
    """Cut out the parts that a group's ranks have of a chunk's parameters, of those in this optimizer."""
    tp = degrees.etp if optimizer == _EXPERTS else degrees.tp
    rank = group % tp
    first = group // tp % degrees.ep * degrees.num_local if optimizer == _EXPERTS else 0
    return [
        _cut(slot.name, weights[slot.name], tp, rank, shared=is_shared)
        if slot.expert is None
        else _cut_expert(slot.name, weights[slot.name], tp, rank, first + slot.expert)
        for slot in slots
        if (optimizer == _EXPERTS) == (slot.expert is not None and degrees.ep > 1)
    ]


def _cut_expert(name: str, location: TensorLocation, tp: int, rank: int, expert: int) -> _Part:
    """Cut out a rank's part of one expert, from the parameter of all experts of a layer."""
    own = dataclasses.replace(location, shape=location.shape[1:], counts=location.counts[1:])
    part = _cut(name, own, tp, rank, shared=False)
    boxes = tuple(Box((expert, *box.offset), (1, *box.size)) for box in part.boxes)
    return part._replace(shape=(1, *part.shape), boxes=boxes, dim=part.dim + 1)


def _cut(name: str, location: TensorLocation, tp: int, rank: int, *, shared: bool) -> _Part:
    """Cut out a rank's part; a gated layer has two boxes, of which the rank has a part each.

    Raises:
        PlacingError: the weight is not split as tensor parallelism splits it.
    """
    dims = [dim for dim, count in enumerate(location.counts) if count > 1]
    is_shared = shared and name == EMBEDDING
    if not dims:
        return _Part(name, location.shape, (whole(location.shape),), 0, is_shared)
    dim, count, size = dims[0], location.counts[dims[0]], location.shape[dims[0]]
    repeats = count // tp
    if len(dims) > 1 or count % tp or size % count or repeats not in ((1, 2) if _GATED in name else (1,)):
        raise PlacingError(f"{name} {list(location.shape)} has {list(location.counts)} chunks at tp={tp}")
    step = size // count
    boxes = tuple(
        Box(
            tuple((repeat * tp + rank) * step if at == dim else 0 for at in range(len(location.shape))),
            tuple(step if at == dim else other for at, other in enumerate(location.shape)),
        )
        for repeat in range(repeats)
    )
    shape = tuple(step * repeats if at == dim else other for at, other in enumerate(location.shape))
    return _Part(name, shape, boxes, dim, is_shared)


def _place_parts(parts: Sequence[_Part], buckets: Sequence[Mapping[str, Entry]]) -> list[tuple[int, int, _Part]] | None:
    """Place parts one behind the other; return bucket and first element of each, or None if ends of chunks differ."""
    placed: list[tuple[int, int, _Part]] = []
    for number, states in enumerate(buckets):
        size = next(iter(states.values())).shape
        ends = _find_ends(states)
        stop = 0
        while len(placed) < len(parts) and size is not None and stop < size[0]:
            part, start = parts[len(placed)], _align(stop)
            if start + part.num_elements > size[0]:
                break
            stop = start + part.num_elements
            if ends is None or not {start, stop} <= ends:
                return None
            placed.append((number, start, part))
        is_before_shared = len(placed) < len(parts) and parts[len(placed)].is_shared
        if size is None or size[0] not in ((stop, _align(stop)) if is_before_shared else (stop,)):
            return None
    return placed if len(placed) == len(parts) else None


def _align(element: int) -> int:
    return -(-element // _ALIGNMENT) * _ALIGNMENT


def _find_ends(states: Mapping[str, Entry]) -> set[int] | None:
    """Find where chunks of a bucket begin and end; None if its states differ in that, or leave a gap."""
    every = []
    for entry in states.values():
        chunks = sorted((box.offset[0], box.end[0]) for box, _ in entry.chunks if box is not None)
        starts, stops = ([chunk[at] for chunk in chunks] for at in (0, 1))
        if [*starts, *(entry.shape or ())] != [0, *stops]:
            return None
        every.append({0, *stops})
    return every[0] if all(ends == every[0] for ends in every) else None


def _build(
    buffers: _Buffers, weights: Mapping[str, TensorLocation], placed: Sequence[_Placed], order: str
) -> BucketStates:
    every = [bucket for own in buffers.values() for buffer in own for bucket in buffer]
    types = {state: entry.dtype for state, entry in every[0].items()}
    if any(bucket[state].dtype != types[state] for bucket in every for state in types):
        raise PlacingError("buckets of several types")
    names = {part.name for _, _, _, part in placed}
    tensors: list[LogicalTensor] = []
    locations: dict[TensorKey, TensorLocation] = {}
    numbers: dict[tuple[str, str], int] = {}
    for state, dtype in types.items():
        for name, weight in weights.items():
            if name not in names:
                continue
            numbers[state, name] = len(tensors)
            key = TensorKey(STATES.get(state, state), name)
            tensors.append(LogicalTensor(key=key, shape=weight.shape, dtype=dtype))
            locations[key] = dataclasses.replace(weight, key=f"optimizer.state.{state}.{weight.key}", dtype=dtype)
    copies: dict[tuple[str, tuple[Box, ...]], int] = {}
    by_bucket: dict[tuple[tuple[int, int, int], int], list[tuple[int, int, _Part]]] = {}
    for buffer, bucket, start, part in placed:
        replica = copies.setdefault((part.name, part.boxes), 0)
        copies[part.name, part.boxes] += 1
        by_bucket.setdefault((buffer, bucket), []).append((start, replica, part))
    chunks = [
        chunk
        for ((optimizer, group, buffer), bucket), parts in by_bucket.items()
        for state, entry in buffers[optimizer, group][buffer][bucket].items()
        for chunk in _cut_chunks(entry, parts, {part.name: numbers[state, part.name] for _, _, part in parts})
    ]
    return BucketStates(tensors=tuple(tensors), chunks=tuple(chunks), locations=locations, order=order)


def _cut_chunks(
    entry: Entry, parts: Sequence[tuple[int, int, _Part]], numbers: Mapping[str, int]
) -> Iterator[FlatChunk]:
    """Yield each chunk of a bucket with the boxes of the parts in it; chunks of padding have none, and are left out."""
    starts = [start for start, _, _ in parts]
    for box, place in entry.chunks:
        if box is None or not box.num_elements:
            continue
        low, high = box.offset[0], box.end[0]
        pieces: list[FlatPiece] = []
        for start, replica, part in parts[
            max(0, bisect.bisect_right(starts, low) - 1) : bisect.bisect_left(starts, high)
        ]:
            begin, stop = max(low, start) - start, min(high, start + part.num_elements) - start
            if begin < stop:
                pieces += [
                    FlatPiece(numbers[part.name], replica, target, start - low + first)
                    for target, first in _locate(part, begin, stop)
                ]
        if pieces:
            yield FlatChunk(entry, box, place, tuple(pieces))


def _locate(part: _Part, begin: int, stop: int) -> Iterator[tuple[Box, int]]:
    """Yield the boxes of the whole tensor that elements of the flattened part fill, with the first element of each."""
    row = strides_of(part.shape)
    step = part.boxes[0].size[part.dim] if part.shape else 1
    for box, first in flat_interval_to_boxes(part.shape, begin, stop):
        for at, target in enumerate(part.boxes):
            if len(part.boxes) == 1:
                yield box.shift(target.offset), first
                continue
            window = [
                slice(at * step, (at + 1) * step) if dim == part.dim else slice(0, size)
                for dim, size in enumerate(part.shape)
            ]
            own = box.intersect(Box(tuple(w.start for w in window), tuple(w.stop - w.start for w in window)))
            if own is not None:
                moved = own.shift([target.offset[dim] - window[dim].start for dim in range(own.ndim)])
                inside = sum((low - base) * s for low, base, s in zip(own.offset, box.offset, row, strict=True))
                yield moved, first + inside
