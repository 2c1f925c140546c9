"""Do two checkpoints, in whatever layouts and formats, hold the same tensors? Pure: digests in, answer out.

Tensors are compared under one key. A format that keeps no master weights has none to compare; there, a float32 `weight`
is compared with the other side's `fp32`, which training in fp32 keeps equal.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Mapping
from typing import Any

from reshard.layout import Index, LogicalTensor, TensorKey

_COUNTERPART = {"weight": "fp32", "fp32": "weight"}
_MARK = "#"
"""Begins the suffix of what is no part of a parameter (a vocabulary's padding rows), and may differ."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Side:
    """One checkpoint.

    Attributes:
        tensors: by key.
        digests: by key.
        aliases: second name of a tied weight -> name of the tensor that it is.
    """

    tensors: Mapping[TensorKey, LogicalTensor]
    digests: Mapping[TensorKey, str]
    aliases: Mapping[str, str] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Agreement:
    """What a comparison found.

    Attributes:
        same: keys of equal tensors, in the first and in the second.
        different: sentences about tensors that both hold and that differ, or that one side lacks though it holds others
            of that state. Empty if the two agree.
        not_compared: sentences about what only one side can tell.
    """

    same: tuple[tuple[TensorKey, TensorKey], ...]
    different: tuple[str, ...]
    not_compared: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        """As JSON."""
        across = [[str(left), str(right)] for left, right in self.same if left.state != right.state]
        return {
            "tensors": len({left for left, _ in self.same}),
            "states": sorted({left.state for left, _ in self.same}),
            "across_states": across,
            "different": list(self.different),
            "not_compared": list(self.not_compared),
        }


def side(index: Index, digests: Mapping[str, str]) -> Side:
    """One checkpoint, from its index and the digests that were read."""
    return Side(
        tensors={tensor.key: tensor for tensor in index.tensors},
        digests={tensor.key: digests[str(tensor.key)] for tensor in index.tensors if str(tensor.key) in digests},
        aliases=index.aliases,
    )


def compare(first: Side, second: Side) -> Agreement:
    """Compare two checkpoints."""
    same: list[tuple[TensorKey, TensorKey]] = []
    different: list[str] = []
    other_types: Counter[str] = Counter()
    pairs, alone = _pairs(first, second)
    for left_key, right_key in pairs:
        left, right = first.tensors[left_key], second.tensors[right_key]
        names = str(left_key) if left_key == right_key else f"{left_key} and {right_key}"
        if left.dtype != right.dtype:
            kind = f"{left_key.state} {left.dtype} in the first, {right_key.state} {right.dtype} in the second"
            other_types[kind] += 1
        elif left.shape != right.shape and _MARK not in left_key.name:
            different.append(f"{names}: {list(left.shape)} in the first, {list(right.shape)} in the second")
        elif first.digests[left_key] != second.digests[right_key]:
            found = f"{first.digests[left_key]} in the first, {second.digests[right_key]} in the second"
            different.append(f"{names}: {found}")
        else:
            same.append((left_key, right_key))
    states = {"first": {key.state for key in second.digests}, "second": {key.state for key in first.digests}}
    left_out: Counter[tuple[str, str]] = Counter()
    for where, key in alone:
        if key.state in states[where] and _MARK not in key.name:
            different.append(f"{key}: only in the {where}")
        else:
            left_out[where, key.state + (" (padding)" if _MARK in key.name else "")] += 1
    notes = [f"{state}, {_tensors(count)}: only in the {where}" for (where, state), count in left_out.items()]
    notes += [f"{kind}, {_tensors(count)}: other types" for kind, count in other_types.items()]
    return Agreement(same=tuple(same), different=tuple(different), not_compared=tuple(notes))


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
