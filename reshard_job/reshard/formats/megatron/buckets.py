"""Find parameters in the buckets of the distributed optimizer, as `dp_reshardable` stores its states.

A bucket is a flat tensor for each data-parallel group. It holds the group's parts of parameters one behind the other,
in the reverse order of the module's parameters, each at a multiple of 64 elements. The files state no names, but every
part is a chunk of its own or several, so its ends are ends of chunks. The orders below are those of GPTModel; one is
taken only if all parts have the sizes and ends that it demands, and no other order does. What they cannot tell (two
parts of equal size in each other's places) the run finds out: weights must be the rounded master weights.

Source: megatron/core/distributed/param_and_grad_buffer.py (`_ParamAndGradBuffer`), megatron/core/optimizer/
distrib_optimizer.py (`sharded_param_state_dp_reshardable`) and __init__.py (`data_parallel_group_idx`),
megatron/core/transformer/transformer_layer.py, attention.py and mlp.py of Megatron-Core 0.16.1; for fused norms
transformer_engine/pytorch/module/layernorm_linear.py.
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
from reshard.formats.megatron.names import STATES
from reshard.tensors.geometry import Box, flat_interval_to_boxes, strides_of, whole
from reshard.tensors.layout import LogicalTensor, TensorKey

_BUCKET = re.compile(
    r"optimizer\.distributed\.dp_group_idx_(?P<group>\d+)\.gbuf_idx_(?P<buffer>\d+)\.dtype_\([^()]*\)"
    r"\.bucket_idx_(?P<bucket>\d+)\.(?P<state>[^.]+)"
)
_LAYER = re.compile(r"decoder\.layers\.(?P<layer>\d+)\.(?P<leaf>.+)")
_ALIGNMENT = 64
_EMBEDDING, _OUTPUT = "embedding.word_embeddings.weight", "output_layer.weight"
_GATED = "mlp.linear_fc1."
_FIRST = (_EMBEDDING, "embedding.position_embeddings.weight")
_LAST = ("decoder.final_layernorm.weight", "decoder.final_layernorm.bias", _OUTPUT, "output_layer.bias")
_NORM_1 = tuple(f"self_attention.linear_qkv.layer_norm_{kind}" for kind in ("weight", "bias"))
_NORM_2 = tuple(f"mlp.linear_fc1.layer_norm_{kind}" for kind in ("weight", "bias"))


def _leaves(*modules: str) -> tuple[str, ...]:
    return tuple(f"{module}.{kind}" for module in modules for kind in ("weight", "bias"))


_PROJECTION, _QKV = _leaves("self_attention.linear_proj"), _leaves("self_attention.linear_qkv")
_HEAD_NORMS = _leaves("self_attention.q_layernorm", "self_attention.k_layernorm")
_MLP = _leaves("mlp.linear_fc1", "mlp.linear_fc2")
_REST = (*_QKV, *_HEAD_NORMS, *_NORM_2, *_MLP)
_ORDERS: Mapping[str, tuple[str, ...]] = {
    "norms of their own": (*_NORM_1, *_PROJECTION, *_REST),
    "norms fused into linear layers": (*_PROJECTION, *_NORM_1, *_REST),
}
"""Orders of a layer's parameters, by their keys: `layer_norm_*` is a module in front, or inside of the next one."""


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
    """A part, and the bucket and element at which it begins."""

    group: int
    bucket: int
    start: int
    part: _Part


_Buckets = dict[int, list[dict[str, Entry]]]
"""States of the buckets of each data-parallel group."""


def place_states(entries: Iterable[Entry], weights: Mapping[str, TensorLocation]) -> BucketStates:
    """Find every parameter's states in the buckets.

    Args:
        entries: tensors of the optimizer's buckets.
        weights: location of the weight of every name.

    Raises:
        PlacingError: the files do not tell which parameter is where.
    """
    buckets = _collect(entries)
    counts = weights[_EMBEDDING].counts if _EMBEDDING in weights else (0,)
    tp = counts[0]
    if tp < 1 or len(buckets) % tp or math.prod(counts) != tp:
        raise PlacingError(f"{_EMBEDDING} has {math.prod(counts)} parts, and there are {len(buckets)} groups of ranks")
    fitting: dict[str, list[_Placed]] = {}
    for order, leaves in _ORDERS.items():
        placed = _fit(buckets, weights, leaves, tp)
        if placed is not None and placed not in fitting.values():
            fitting[order] = placed
    if len(fitting) != 1:
        raise PlacingError(
            "parameters can be in several orders" if fitting else "no known order of parameters has these sizes"
        )
    ((order, placed),) = fitting.items()
    return _build(buckets, weights, placed, order)


def number_chunks(chunks: Iterable[FlatChunk], first: int) -> tuple[FlatChunk, ...]:
    """Return the chunks with their tensors numbered from `first` on."""
    return tuple(
        chunk._replace(pieces=tuple(piece._replace(tensor=piece.tensor + first) for piece in chunk.pieces))
        for chunk in chunks
    )


def _collect(entries: Iterable[Entry]) -> _Buckets:
    found: dict[int, dict[int, dict[str, Entry]]] = {}
    for entry in entries:
        match = _BUCKET.fullmatch(entry.key)
        if match is None or match["buffer"] != "0" or len(entry.shape or ()) != 1:
            raise PlacingError("several buffers: experts, virtual stages, or parameters of several types")
        found.setdefault(int(match["group"]), {}).setdefault(int(match["bucket"]), {})[match["state"]] = entry
    if not found or sorted(found) != list(range(len(found))):
        raise PlacingError(f"groups {sorted(found)}")
    states = {frozenset(bucket) for group in found.values() for bucket in group.values()}
    if any(sorted(group) != list(range(len(group))) for group in found.values()) or len(states) != 1:
        raise PlacingError("buckets or states are missing")
    return {group: [found[group][at] for at in range(len(found[group]))] for group in sorted(found)}


def _fit(
    buckets: _Buckets, weights: Mapping[str, TensorLocation], leaves: tuple[str, ...], tp: int
) -> list[_Placed] | None:
    """Place the parts of all groups in an order of a layer's parameters; None if a size or an end is another."""
    stages = _list_stages(weights, leaves, len(buckets) // tp)
    placed: list[_Placed] = []
    for group, own in buckets.items():
        stage, rank = divmod(group, tp)
        shared = stages[0] is not stages[-1] and _OUTPUT not in weights
        parts = [_cut(name, weights[name], tp, rank, shared=shared) for name in stages[stage]]
        ends = _place_parts(parts[::-1], own)
        if ends is None:
            return None
        placed += [_Placed(group, bucket, start, part) for bucket, start, part in ends]
    return placed


def _list_stages(weights: Mapping[str, TensorLocation], leaves: tuple[str, ...], pp: int) -> list[list[str]]:
    """List the names of each stage's parameters, in the module's order.

    Raises:
        PlacingError: a parameter of which the place in the order is not known, or layers that are not split evenly.
    """
    layers: dict[int, set[str]] = {}
    for name in weights:
        match = _LAYER.fullmatch(name)
        if match is not None and match["leaf"] in leaves:
            layers.setdefault(int(match["layer"]), set()).add(match["leaf"])
        elif name not in (*_FIRST, *_LAST):
            raise PlacingError(f"the order of {name} is not known")
    if sorted(layers) != list(range(len(layers))) or len(layers) % pp:
        raise PlacingError(f"{len(layers)} layers in {pp} stages")
    each = len(layers) // pp
    stages = []
    for stage in range(pp):
        names = [name for name in _FIRST if name in weights] if stage == 0 else []
        names += [
            f"decoder.layers.{layer}.{leaf}"
            for layer in range(stage * each, (stage + 1) * each)
            for leaf in leaves
            if leaf in layers[layer]
        ]
        if stage == pp - 1:
            last = [_EMBEDDING if name == _OUTPUT and name not in weights and pp > 1 else name for name in _LAST]
            names += [name for name in last if name in weights]
        stages.append(names)
    return stages


def _cut(name: str, location: TensorLocation, tp: int, rank: int, *, shared: bool) -> _Part:
    """Cut out a rank's part; a gated layer has two boxes, of which the rank has a part each.

    Raises:
        PlacingError: the weight is not split as tensor parallelism splits it.
    """
    dims = [dim for dim, count in enumerate(location.counts) if count > 1]
    is_shared = shared and name == _EMBEDDING
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
    buckets: _Buckets, weights: Mapping[str, TensorLocation], placed: Sequence[_Placed], order: str
) -> BucketStates:
    first = buckets[0][0]
    types = {state: entry.dtype for state, entry in first.items()}
    if any(bucket[state].dtype != types[state] for own in buckets.values() for bucket in own for state in types):
        raise PlacingError("buckets of several types")
    tensors: list[LogicalTensor] = []
    locations: dict[TensorKey, TensorLocation] = {}
    numbers: dict[tuple[str, str], int] = {}
    for state, dtype in types.items():
        for name, weight in weights.items():
            numbers[state, name] = len(tensors)
            key = TensorKey(STATES.get(state, state), name)
            tensors.append(LogicalTensor(key=key, shape=weight.shape, dtype=dtype))
            locations[key] = dataclasses.replace(weight, key=f"optimizer.state.{state}.{weight.key}", dtype=dtype)
    copies: dict[tuple[str, tuple[Box, ...]], int] = {}
    by_bucket: dict[tuple[int, int], list[tuple[int, int, _Part]]] = {}
    for group, bucket, start, part in placed:
        replica = copies.setdefault((part.name, part.boxes), 0)
        copies[part.name, part.boxes] += 1
        by_bucket.setdefault((group, bucket), []).append((start, replica, part))
    chunks = [
        chunk
        for (group, bucket), parts in by_bucket.items()
        for state, entry in buckets[group][bucket].items()
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
