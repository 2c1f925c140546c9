"""Do two checkpoints, in whatever layouts and formats, hold the same tensors? Pure: digests in, answer out.

Tensors are compared under one key. A format that keeps no master weights has none to compare; there, a float32 `weight`
is compared with the other side's `fp32`, which training in fp32 keeps equal.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Mapping
from typing import Any

from reshard.tensors.cast import can_cast
from reshard.tensors.layout import ITEM_BYTES, PADDING, Index, LogicalTensor, TensorKey

_COUNTERPART = {"weight": "fp32", "fp32": "weight"}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Side:
    """One checkpoint.

    Attributes:
        tensors: by key.
        digests: by key.
        aliases: second name of a tied weight -> name of the tensor that it is.
        rounded: digests of tensors rounded to a narrower type, by key; see `to_round`.
    """

    tensors: Mapping[TensorKey, LogicalTensor]
    digests: Mapping[TensorKey, str]
    aliases: Mapping[str, str] = dataclasses.field(default_factory=dict)
    rounded: Mapping[TensorKey, str] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Agreement:
    """What a comparison found.

    Attributes:
        same: keys of equal tensors, in the first and in the second.
        different: sentences about tensors that both hold and that differ, or that one side lacks though it holds others
            of that state. Empty if the two agree.
        not_compared: sentences about what only one side can tell.
        rounded: how many of `same` are of different types, and equal when the wider is rounded.
    """

    same: tuple[tuple[TensorKey, TensorKey], ...]
    different: tuple[str, ...]
    not_compared: tuple[str, ...]
    rounded: int = 0

    def to_dict(self) -> dict[str, Any]:
        """As JSON."""
        across = [[str(left), str(right)] for left, right in self.same if left.state != right.state]
        return {
            "tensors": len({left for left, _ in self.same}),
            "states": sorted({left.state for left, _ in self.same}),
            "across_states": across,
            "rounded": self.rounded,
            "different": list(self.different),
            "not_compared": list(self.not_compared),
        }


def side(index: Index, digests: Mapping[str, str]) -> Side:
    """One checkpoint, from its index and the digests that were read, by `state/name`."""
    return Side(
        tensors={tensor.key: tensor for tensor in index.tensors},
        digests={tensor.key: digests[str(tensor.key)] for tensor in index.tensors if str(tensor.key) in digests},
        aliases=index.aliases,
    )


def compare_sides(first: Side, second: Side) -> Agreement:
    """Compare two checkpoints."""
    same: list[tuple[TensorKey, TensorKey]] = []
    different: list[str] = []
    other_types: Counter[str] = Counter()
    pairs, alone = _pairs(first, second)
    for pair in pairs:
        left, right = first.tensors[pair[0]], second.tensors[pair[1]]
        if left.dtype == right.dtype or pair[0] in first.rounded or pair[1] in second.rounded:
            problem = _difference(first, second, pair)
            if problem:
                different.append(problem)
            else:
                same.append(pair)
        else:
            kind = f"{pair[0].state} {left.dtype} in the first, {pair[1].state} {right.dtype} in the second"
            other_types[kind] += 1
    states = {"first": {key.state for key in second.digests}, "second": {key.state for key in first.digests}}
    left_out: Counter[tuple[str, str]] = Counter()
    for where, key in alone:
        if key.state in states[where] and PADDING not in key.name:
            different.append(f"{key}: only in the {where}")
        else:
            left_out[where, key.state + (" (padding)" if PADDING in key.name else "")] += 1
    notes = [f"{state}, {_tensors(count)}: only in the {where}" for (where, state), count in left_out.items()]
    notes += [f"{kind}, {_tensors(count)}: other types" for kind, count in other_types.items()]
    rounded = sum(first.tensors[left].dtype != second.tensors[right].dtype for left, right in same)
    return Agreement(same=tuple(same), different=tuple(different), not_compared=tuple(notes), rounded=rounded)


def _difference(first: Side, second: Side, pair: tuple[TensorKey, TensorKey]) -> str:
    """How two tensors differ; empty if they do not."""
    left, right = first.tensors[pair[0]], second.tensors[pair[1]]
    names = str(pair[0]) if pair[0] == pair[1] else f"{pair[0]} and {pair[1]}"
    if left.shape != right.shape and PADDING not in pair[0].name:
        return f"{names}: {list(left.shape)} in the first, {list(right.shape)} in the second"
    if left.dtype != right.dtype:
        here = first.rounded.get(pair[0], first.digests[pair[0]])
        there = second.rounded.get(pair[1], second.digests[pair[1]])
        told = f"{names}: {left.dtype} in the first and {right.dtype} in the second differ by more than rounding"
        return "" if here == there else told
    here, there = first.digests[pair[0]], second.digests[pair[1]]
    return "" if here == there else f"{names}: {here} in the first, {there} in the second"


def to_round(first: Side, second: Side) -> tuple[dict[TensorKey, str], dict[TensorKey, str]]:
    """Tensors of either side that can be compared only if they are rounded, and to which type.

    That is where no tensor of the same type is there to compare with: weights in bfloat16 that were made of master
    weights alone.
    """
    pairs, _ = _pairs(first, second)
    types = [(first.tensors[left].dtype, second.tensors[right].dtype) for left, right in pairs]
    equal = [pair for pair, (left, right) in zip(pairs, types, strict=True) if left == right]
    done = ({left for left, _ in equal}, {right for _, right in equal})
    found: tuple[dict[TensorKey, str], dict[TensorKey, str]] = ({}, {})
    for (left, right), (here, there) in zip(pairs, types, strict=True):
        if here == there or left in done[0] or right in done[1] or not can_cast(here, there):
            continue
        if ITEM_BYTES[here] > ITEM_BYTES[there]:
            found[0][left] = there
        elif ITEM_BYTES[here] < ITEM_BYTES[there]:
            found[1][right] = here
    return found


def _tensors(count: int) -> str:
    return f"{count} tensor{'' if count == 1 else 's'}"


def _pairs(first: Side, second: Side) -> tuple[list[tuple[TensorKey, TensorKey]], list[tuple[str, TensorKey]]]:
    """Keys that belong together, of both sides; and those that only one side has."""
    pairs: list[tuple[TensorKey, TensorKey]] = []
    alone: list[tuple[str, TensorKey]] = []
    for key in first.digests:
        other = _partner(key, first, second)
        if other is None:
            alone.append(("first", key))
        else:
            pairs.append((key, other))
    matched = {right for _, right in pairs}
    for key in second.digests:
        if key not in matched:
            other = _partner(key, second, first)
            if other is None:
                alone.append(("second", key))
            else:
                pairs.append((other, key))
    return pairs, alone


def _partner(key: TensorKey, own: Side, other: Side) -> TensorKey | None:
    """The tensor of the other side that should be equal to this one: of the same state, else its counterpart."""
    names = [key.name]
    names += [name for alias, name in other.aliases.items() if alias == key.name]
    names += [alias for alias, name in own.aliases.items() if name == key.name]
    for state in (key.state, _COUNTERPART.get(key.state, "")):
        for name in names:
            if TensorKey(state, name) in other.digests:
                return TensorKey(state, name)
    return None
