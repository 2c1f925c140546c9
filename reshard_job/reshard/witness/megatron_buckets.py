"""A stranger to the buckets in which Megatron-Core's distributed optimizer keeps its states (`dp_reshardable`).

Each group of data-parallel ranks has its own buckets: flat tensors with one parameter behind the other, in the reverse
order of the model. A parameter ends where a chunk ends, and chunks up to the next multiple of 64 elements are padding.
So the chunks are counted off against the parameters, one by one; the order in which nothing is left over is that of the
model. Source: megatron/core/optimizer/distrib_optimizer.py and megatron/core/distributed/param_and_grad_buffer.py of
Megatron-Core 0.16.1.
"""

from __future__ import annotations

import dataclasses
import itertools
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from reshard.witness.pickles import NotWitnessedError
from reshard.witness.table import OPTIMIZER, Ints, Key, Piece, Place, Storage, Table, Tensor, row_major

_KEY = re.compile(r"optimizer\.distributed\.dp_group_idx_(\d+)\.gbuf_idx_0\.dtype_.+\.bucket_idx_(\d+)\.(\w+)")
_IN_LAYER = re.compile(r"decoder\.layers\.(\d+)\.(.+)(?:\.|_)(weight|bias)")
_ALIGNED = 64
_WORDS, _LOGITS = "embedding.word_embeddings.weight", "output_layer.weight"
_MODULES = (
    "self_attention.linear_proj", "self_attention.linear_qkv", "self_attention.q_layernorm",
    "self_attention.k_layernorm", "mlp.linear_fc1.layer_norm", "mlp.linear_fc1", "mlp.linear_fc2",
)  # fmt: skip
_FIRST_NORM = "self_attention.linear_qkv.layer_norm"
_ORDERS = ((_FIRST_NORM, *_MODULES), (_MODULES[0], _FIRST_NORM, *_MODULES[1:]))
"""Modules of a layer: its first norm is in front of the attention, or inside of the attention's first linear layer."""
_ENDS = ("decoder.final_layernorm.weight", "decoder.final_layernorm.bias", _LOGITS, "output_layer.bias")


class Bucket(NamedTuple):
    """A state's elements in a bucket.

    Attributes:
        num_elements: of the bucket.
        dtype: of the state.
        chunks: first element, number of elements, storage, and position of the first element in the storage.
    """

    num_elements: int
    dtype: str
    chunks: Sequence[tuple[int, int, Storage, int]]


@dataclasses.dataclass(eq=False)
class Chain:
    """Chunks of a bucket, one behind the other; elements count from the start of the bucket."""

    chunks: Sequence[tuple[int, int, Storage, int]]

    @property
    def num_elements(self) -> int:
        return self.chunks[-1][0] + self.chunks[-1][1]

    @property
    def border(self) -> int:
        return 0

    @property
    def num_places(self) -> int:
        return len(self.chunks)

    def find(self, element: Ints) -> tuple[Ints, Ints]:
        starts = np.array([start for start, *_ in self.chunks], dtype=np.int64)
        at = np.searchsorted(starts, element, side="right") - 1
        files, positions = np.zeros(len(element), dtype=np.int64), np.zeros(len(element), dtype=np.int64)
        for number in np.unique(at).tolist():
            start, _, storage, offset = self.chunks[number]
            own = at == number
            files[own], positions[own] = storage.find(element[own] - start + offset)
        return files, positions

    def places(self) -> list[Place]:
        return [Place(storage, offset, start, count) for start, count, storage, offset in self.chunks]


def is_bucket(name: str) -> bool:
    """Return True if an entry is of a kind of bucket that the stranger knows."""
    return _KEY.fullmatch(name) is not None


def add_states(table: Table, names: Sequence[str], read: Callable[[str], Bucket]) -> None:
    """Add the states in buckets to the table, which has the weights, or say in `Table.unknown` that they are not known.

    Args:
        table: of the checkpoint.
        names: entries that `is_bucket` accepts.
        read: returns a state's elements in a bucket.
    """
    found: dict[int, dict[int, dict[str, str]]] = {}
    for name in names:
        group, bucket, state = _KEY.fullmatch(name).groups()  # type: ignore[union-attr]
        found.setdefault(int(group), {}).setdefault(int(bucket), {})[state] = name
    groups = [[found[group][at] for at in sorted(found[group])] for group in sorted(found)]
    states = sorted(groups[0][0])
    buckets = [[{state: read(bucket[state]) for state in states} for bucket in group] for group in groups]
    fitting: list[list[_Spot]] = []
    why = "the order of the parameters in the optimizer's buckets"
    for order in _ORDERS:
        try:
            spots = _count_off(table, buckets, states[0], order)
        except NotWitnessedError as error:
            why = str(error)
            continue
        if spots is not None and spots not in fitting:
            fitting.append(spots)
    if len(fitting) != 1:
        table.unknown[OPTIMIZER] = why
        return
    (placed,) = fitting
    chains = {
        (at, number, state): Chain(bucket[state].chunks)
        for at, group in enumerate(buckets)
        for number, bucket in enumerate(group)
        for state in bucket
    }
    for state in states:
        for name, ranks in _by_name(placed).items():
            weight = table.tensors[Key("weight", name)]
            copies = [
                [piece for spot in spots for piece in _pieces(spot, chains[spot.group, spot.bucket, state])]
                for spots in ranks
            ]
            key = Key("fp32" if state == "param" else state, name)
            table.tensors[key] = Tensor(weight.shape, buckets[0][0][state].dtype, copies)


class _Spot(NamedTuple):
    """Where a rank's boxes of a parameter are: the first element, in a bucket of a group."""

    name: str
    boxes: tuple[Piece, ...]
    is_whole: bool
    group: int
    bucket: int
    start: int


def _count_off(
    table: Table, groups: Sequence[Sequence[Mapping[str, Bucket]]], state: str, order: Sequence[str]
) -> list[_Spot] | None:
    """Count the chunks of every bucket off against the parameters; None if they do not come out even."""
    weights = {key.name: tensor for key, tensor in table.tensors.items() if key.state == "weight"}
    tp = len(weights[_WORDS].copies[0])
    stages, rest = divmod(len(groups), tp)
    layers = {int(match[1]) for name in weights if (match := _IN_LAYER.fullmatch(name))}
    if rest or len(layers) % stages:
        return None
    spots: list[_Spot] = []
    for at, buckets in enumerate(groups):
        stage, rank = at // tp, at % tp
        names = sorted(weights, key=lambda name: _rank_of(name, order))
        each = len(layers) // stages
        own = [name for name in names if _stage_of(name, each, stages) == stage]
        if stage == stages - 1 and stages > 1 and _LOGITS not in weights:
            own.insert(len([name for name in own if name != "output_layer.bias"]), _WORDS)
        todo = iter(reversed(own))
        name: str | None = next(todo, None)
        for number, bucket in enumerate(buckets):
            chunks = iter(bucket[state].chunks)
            position = 0
            while position < bucket[state].num_elements:
                if position % _ALIGNED:  # padding
                    start, count, *_ = next(chunks)
                    if start // _ALIGNED != (start + count - 1) // _ALIGNED:
                        return None
                    position = start + count
                    continue
                if name is None:
                    return None
                pieces = sorted(weights[name].copies[0], key=lambda piece: piece.low)
                boxes = tuple(pieces if len(pieces) == 1 else pieces[rank::tp])
                spots.append(_Spot(name, boxes, len(pieces) == 1, at, number, position))
                end = position + sum(piece.num_elements for piece in boxes)
                while position < end:
                    start, count, *_ = next(chunks, (-1, 0))
                    if start != position:
                        return None
                    position += count
                if position != end:
                    return None
                name = next(todo, None)
        if name is not None:
            return None
    return spots


def _rank_of(name: str, order: Sequence[str]) -> tuple[int, ...]:
    """Return the place of a parameter in the model.

    Raises:
        NotWitnessedError: a module that the stranger does not know.
    """
    match = _IN_LAYER.fullmatch(name)
    if match is not None and match[2] in order:
        return 1, int(match[1]), order.index(match[2]), match[3] == "bias"
    if name in _ENDS:
        return 2, _ENDS.index(name)
    if name.startswith("embedding.") and name.split(".")[1] in ("word_embeddings", "position_embeddings"):
        return 0, name != _WORDS
    raise NotWitnessedError(f"the place of {name} in the model, and so in the optimizer's buckets")


def _stage_of(name: str, each: int, stages: int) -> int:
    match = _IN_LAYER.fullmatch(name)
    if match is not None:
        return int(match[1]) // each
    return 0 if name.startswith("embedding.") else stages - 1


def _by_name(spots: Sequence[_Spot]) -> dict[str, list[list[_Spot]]]:
    """Return the copies of every parameter, each with the spots that make it up."""
    copies: dict[str, list[list[_Spot]]] = {}
    for name, own in itertools.groupby(sorted(spots, key=lambda spot: spot.name), key=lambda spot: spot.name):
        listed = list(own)
        if listed[0].is_whole:
            copies[name] = [[spot] for spot in listed]
            continue
        by_rank: dict[tuple[int, ...], list[_Spot]] = {}
        for spot in listed:
            by_rank.setdefault(spot.boxes[0].low, []).append(spot)
        copies[name] = [list(row) for row in zip(*by_rank.values(), strict=True)]
    return copies


def _pieces(spot: _Spot, chain: Chain) -> Iterator[Piece]:
    start = spot.start
    for box in spot.boxes:
        yield Piece(box.low, box.size, chain, start, row_major(box.size), box.whole)
        start += box.num_elements
