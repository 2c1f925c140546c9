"""A stranger to the buckets in which Megatron-Core's distributed optimizer keeps its states (`dp_reshardable`).

Each group of data-parallel ranks has its own buckets: flat tensors with one parameter behind the other, in the reverse
order of the model. A parameter ends where a chunk ends, and chunks up to the next multiple of 64 elements are padding.
So the chunks are counted off against the parameters, one by one; the order in which nothing is left over is that of the
model. A group has a buffer, with buckets of its own, for each of its virtual stages. Experts that are split over ranks
have a second optimizer, with groups of its own. Source: megatron/core/optimizer/distrib_optimizer.py and __init__.py,
megatron/core/distributed/distributed_data_parallel.py and param_and_grad_buffer.py of Megatron-Core 0.16.1.
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

_KEY = re.compile(
    r"(?:chained_([01])\.)?optimizer\.distributed\.dp_group_idx_(\d+)\.gbuf_idx_(\d+)\.dtype_.+\.bucket_idx_(\d+)\.(\w+)"
)
_IN_LAYER = re.compile(r"decoder\.layers\.(\d+)\.(.+)(?:\.|_)(weight|bias)")
_NO_PARAMETER = ".mlp.router.expert_bias"
_ALIGNED = 64
_WORDS, _LOGITS = "embedding.word_embeddings.weight", "output_layer.weight"
_EXPERTS = ("mlp.experts.experts.linear_fc1", "mlp.experts.experts.linear_fc2")
_MODULES = (
    "self_attention.linear_proj", "self_attention.linear_qkv", "self_attention.q_layernorm",
    "self_attention.k_layernorm", "mlp.linear_fc1.layer_norm", "pre_mlp_layernorm", "mlp.linear_fc1", "mlp.linear_fc2",
    "mlp.router", *_EXPERTS, "mlp.shared_experts.gate", "mlp.shared_experts.linear_fc1",
    "mlp.shared_experts.linear_fc2",
)  # fmt: skip
_FIRST_NORM = "self_attention.linear_qkv.layer_norm"
_ORDERS = ((_FIRST_NORM, *_MODULES), (_MODULES[0], _FIRST_NORM, *_MODULES[1:]))
"""Modules of a layer: its first norm is in front of the attention, or inside of the attention's first linear layer."""
_ENDS = ("decoder.final_layernorm.weight", "decoder.final_layernorm.bias", _LOGITS, "output_layer.bias")
_WHY = "the order of the parameters in the optimizer's buckets"


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


def add_states(
    table: Table, names: Sequence[str], read: Callable[[str], Bucket], *, is_sequential: bool = False
) -> None:
    """Add the states in buckets to the table, which has the weights, or say in `Table.unknown` that they are not known.

    Args:
        table: of the checkpoint.
        names: entries that `is_bucket` accepts.
        read: returns a state's elements in a bucket.
        is_sequential: the checkpoint says that experts are modules of their own, which are never transposed.
    """
    found: dict[_Bucket, dict[str, Bucket]] = {}
    for name in names:
        chain, group, buffer, bucket, state = _KEY.fullmatch(name).groups()  # type: ignore[union-attr]
        found.setdefault((int(chain or 0), int(group), int(buffer), int(bucket)), {})[state] = read(name)
    states = sorted(next(iter(found.values())))
    fitting: list[list[_Spot]] = []
    why = _WHY
    for order, is_grouped in itertools.product(_ORDERS, (False, True)):
        try:
            counted = _Model(table, list(found), order, is_grouped=is_grouped, is_sequential=is_sequential)
            spots = counted.count_off({at: bucket[states[0]] for at, bucket in found.items()})
        except NotWitnessedError as error:
            why = str(error)
            continue
        if spots is not None and spots not in fitting:
            fitting.append(spots)
    if len(fitting) != 1:
        table.unknown[OPTIMIZER] = why
        return
    (placed,) = fitting
    chains = {(at, state): Chain(bucket[state].chunks) for at, bucket in found.items() for state in bucket}
    first = next(iter(found.values()))
    for state in states:
        for name, ranks in _by_name(placed).items():
            weight = table.tensors[Key("weight", name)]
            copies = [
                [piece for spot in spots for piece in _pieces(spot, chains[spot.bucket, state])] for spots in ranks
            ]
            key = Key("fp32" if state == "param" else state, name)
            table.tensors[key] = Tensor(weight.shape, first[state].dtype, copies)


_Bucket = tuple[int, int, int, int]
"""Optimizer, group of ranks, buffer and bucket."""


class _Spot(NamedTuple):
    """Position of a rank's boxes of a parameter: the first element, in a bucket."""

    name: str
    boxes: tuple[Piece, ...]
    is_whole: bool
    bucket: _Bucket
    start: int


class _Model:
    """A model whose parameters are counted off against the chunks of buckets, in one order of a layer's modules."""

    def __init__(
        self,
        table: Table,
        buckets: Sequence[_Bucket],
        order: Sequence[str],
        *,
        is_grouped: bool,
        is_sequential: bool,
    ) -> None:
        self._weights = {
            key.name: tensor
            for key, tensor in table.tensors.items()
            if key.state == "weight" and not key.name.endswith(_NO_PARAMETER)
        }
        self._order, self._is_grouped = order, is_grouped
        groups = [len({group for chain, group, *_ in buckets if chain == number}) for number in (0, 1)]
        self._tp = self._etp = len(self._weights[_WORDS].copies[0])
        self._ep = self._experts = 1
        self._stages = groups[0] // self._tp
        self._turns = len({buffer for chain, _, buffer, _ in buckets if chain == 0})
        second = next((name for name in self._weights if name.endswith(f".{_EXPERTS[1]}.weight")), None)
        if second is not None:
            self._experts = self._weights[second].shape[0]
            pieces = self._weights[second].copies[0]
            self._etp = sum(piece.low[0] == 0 for piece in pieces)
            if any(piece.size[0] > 1 for piece in pieces):
                raise NotWitnessedError("experts in a layout of their own")
        if groups[1]:
            self._ep = groups[1] // (self._etp * self._stages)
        layers = {int(match[1]) for name in self._weights if (match := _IN_LAYER.fullmatch(name))}
        if groups != [self._tp * self._stages, groups[1] and self._etp * self._ep * self._stages] or self._ep < 1:
            raise NotWitnessedError(_WHY)
        if self._experts % self._ep or len(layers) % (self._stages * self._turns):
            raise NotWitnessedError(_WHY)
        if second is not None and self._experts == self._ep and not is_sequential:
            raise NotWitnessedError("whether experts are transposed in the optimizer's buckets: each rank has one")
        self._each = len(layers) // (self._stages * self._turns)

    def count_off(self, buckets: Mapping[_Bucket, Bucket]) -> list[_Spot] | None:
        """Count the chunks of every bucket off against the parameters; None if they do not come out even."""
        spots: list[_Spot] = []
        groups = itertools.groupby(sorted(buckets), key=lambda at: at[:2])
        for (chain, group), listed in groups:
            own = list(listed)
            tp = self._etp if chain else self._tp
            rest, rank = divmod(group, tp)
            stage, expert_rank = divmod(rest, self._ep) if chain else (rest, 0)
            turns = [self._list_items(stage + self._stages * turn, chain) for turn in range(self._turns)]
            turns = [items for items in turns if items]
            if {buffer for _, _, buffer, _ in own} != set(range(len(turns))):
                return None
            first = expert_rank * (self._experts // self._ep)
            for number, items in enumerate(turns):
                todo = iter(
                    (name, self._boxes(name, expert, first, tp, rank), self._is_whole(name))
                    for name, expert in reversed(items)
                )
                for at in own:
                    if at[2] == number and not _count_bucket(at, buckets[at], todo, spots):
                        return None
                if next(todo, None) is not None:
                    return None
        return spots

    def _list_items(self, chunk: int, chain: int) -> list[tuple[str, int | None]]:
        """Return the parameters of a part of the model that an optimizer has, with the number of a rank's expert."""
        ranked: list[tuple[tuple[int, ...], tuple[str, int | None]]] = []
        for name in self._weights:
            rank = _rank_of(name, self._order)
            match = _IN_LAYER.fullmatch(name)
            is_expert = match is not None and match[2] in _EXPERTS
            if chain != (is_expert and self._ep > 1) or self._chunk_of(name) != chunk:
                continue
            if not is_expert or match is None:
                ranked.append((rank, (name, None)))
                continue
            module, start = _EXPERTS.index(match[2]), self._order.index(_EXPERTS[0])
            for at in range(self._experts // self._ep):
                inside = (module, at) if self._is_grouped else (at, module)
                ranked.append(((*rank[:2], start, *inside, rank[3]), (name, at)))
        last = self._stages * self._turns - 1
        if chunk == last and last > 0 and not chain and _LOGITS not in self._weights:
            ranked.append(((2, _ENDS.index(_LOGITS)), (_WORDS, None)))
        return [item for _, item in sorted(ranked)]

    def _chunk_of(self, name: str) -> int:
        match = _IN_LAYER.fullmatch(name)
        if match is not None:
            return int(match[1]) // self._each
        return 0 if name.startswith("embedding.") else self._stages * self._turns - 1

    def _is_whole(self, name: str) -> bool:
        return len(self._weights[name].copies[0]) == 1

    def _boxes(self, name: str, expert: int | None, first: int, tp: int, rank: int) -> tuple[Piece, ...]:
        pieces = sorted(self._weights[name].copies[0], key=lambda piece: piece.low)
        if expert is not None:
            pieces = [piece for piece in pieces if piece.low[0] == first + expert]
        return tuple(pieces if len(pieces) == 1 else pieces[rank::tp])


def _count_bucket(
    at: _Bucket, bucket: Bucket, todo: Iterator[tuple[str, tuple[Piece, ...], bool]], spots: list[_Spot]
) -> bool:
    """Count a bucket's chunks off against the next parameters, and add where they are; False if it is not even."""
    chunks = iter(bucket.chunks)
    position = 0
    while position < bucket.num_elements:
        if position % _ALIGNED:  # padding
            start, count, *_ = next(chunks)
            if start // _ALIGNED != (start + count - 1) // _ALIGNED:
                return False
            position = start + count
            continue
        name, boxes, is_whole = next(todo, ("", (), False))
        if not boxes:
            return False
        spots.append(_Spot(name, boxes, is_whole, at, position))
        end = position + sum(piece.num_elements for piece in boxes)
        while position < end:
            start, count, *_ = next(chunks, (-1, 0))
            if start != position:
                return False
            position += count
        if position != end:
            return False
    return True


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
