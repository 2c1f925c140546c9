"""Compare the tensors of two checkpoints of any layouts and formats by their digests. Pure.

Tensors of the same key are compared. Some formats keep no master weights. Then a float32 `weight` is compared with the
other side's `fp32`, because training in fp32 keeps both equal.
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
    """One of the two checkpoints.

    Attributes:
        tensors: tensors by key.
        digests: digests by key.
        aliases: second name of a tied weight -> name of the tensor that holds it.
        rounded: digests of tensors rounded to a narrower type, by key; see `find_types_to_round`.
    """

    tensors: Mapping[TensorKey, LogicalTensor]
    digests: Mapping[TensorKey, str]
    aliases: Mapping[str, str] = dataclasses.field(default_factory=dict)
    rounded: Mapping[TensorKey, str] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Agreement:
    """Result of a comparison.

    Attributes:
        same: keys of equal tensors, in the first and in the second checkpoint.
        different: sentences about tensors that differ, and about tensors that one side lacks although it holds others
            of the same state. Empty if the checkpoints are equal.
        not_compared: sentences about tensors that could not be compared.
        rounded: number of pairs in `same` that have different types and are equal after rounding the wider one.
    """

    same: tuple[tuple[TensorKey, TensorKey], ...]
    different: tuple[str, ...]
    not_compared: tuple[str, ...]
    rounded: int = 0

    def to_dict(self) -> dict[str, Any]:
        """Return the result as values for JSON."""
        across = [[str(left), str(right)] for left, right in self.same if left.state != right.state]
        return {
            "tensors": len({left for left, _ in self.same}),
            "states": sorted({left.state for left, _ in self.same}),
            "across_states": across,
            "rounded": self.rounded,
            "different": list(self.different),
            "not_compared": list(self.not_compared),
        }


def make_side(index: Index, digests: Mapping[str, str]) -> Side:
    """Make a side from a checkpoint's index and its digests by `state/name`."""
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
    """Describe how two tensors differ; empty if they are equal."""
    left, right = first.tensors[pair[0]], second.tensors[pair[1]]
    names = str(pair[0]) if pair[0] == pair[1] else f"{pair[0]} and {pair[1]}"
    if left.shape != right.shape and PADDING not in pair[0].name:
        return f"{names}: {list(left.shape)} in the first, {list(right.shape)} in the second"
    if left.dtype != right.dtype:
        here = first.rounded.get(pair[0], first.digests[pair[0]])
        there = second.rounded.get(pair[1], second.digests[pair[1]])
        problem = f"{names}: {left.dtype} in the first and {right.dtype} in the second differ by more than rounding"
        return "" if here == there else problem
    here, there = first.digests[pair[0]], second.digests[pair[1]]
    return "" if here == there else f"{names}: {here} in the first, {there} in the second"


def find_types_to_round(first: Side, second: Side) -> tuple[dict[TensorKey, str], dict[TensorKey, str]]:
    """Find the tensors of each side that must be rounded to be compared, and the types to round them to.

    A tensor must be rounded if the other side has no tensor of the same type to compare it with, for instance weights
    in bfloat16 that were made of master weights alone.
    """
    pairs, _ = _pairs(first, second)
    types = [(first.tensors[left].dtype, second.tensors[right].dtype) for left, right in pairs]
    equal = [pair for pair, (left, right) in zip(pairs, types, strict=True) if left == right]
    done = ({left for left, _ in equal}, {right for _, right in equal})
    to_round: tuple[dict[TensorKey, str], dict[TensorKey, str]] = ({}, {})
    for (left, right), (here, there) in zip(pairs, types, strict=True):
        if here == there or left in done[0] or right in done[1] or not can_cast(here, there):
            continue
        if ITEM_BYTES[here] > ITEM_BYTES[there]:
            to_round[0][left] = there
        elif ITEM_BYTES[here] < ITEM_BYTES[there]:
            to_round[1][right] = here
    return to_round


def _tensors(count: int) -> str:
    return f"{count} tensor{'' if count == 1 else 's'}"


def _pairs(first: Side, second: Side) -> tuple[list[tuple[TensorKey, TensorKey]], list[tuple[str, TensorKey]]]:
    """Match the keys of both sides; return the pairs, and the keys without a partner with their side."""
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
    """Find the tensor of the other side to compare with: one of the same state, else one of the counterpart state."""
    names = [key.name]
    names += [name for alias, name in other.aliases.items() if alias == key.name]
    names += [alias for alias, name in own.aliases.items() if name == key.name]
    for state in (key.state, _COUNTERPART.get(key.state, "")):
        for name in names:
            if TensorKey(state, name) in other.digests:
                return TensorKey(state, name)
    return None
