"""Match the tensors of a target with those of a source, by state and name."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Mapping
from typing import NamedTuple

from reshard.witness.names import NameMap, Origin
from reshard.witness.table import OPTIMIZER, PADDING, Key, Table, Tensor

_TWINS = {"weight": "fp32", "fp32": "weight"}
_HALVES = {"float16", "bfloat16"}
_FLOATS = ("float64", "float32", "float16", "bfloat16")


class Pair(NamedTuple):
    """A tensor of the target, and what it is made of; None for padding that the source does not hold, which is zero."""

    key: Key
    target: Tensor
    origin: Origin | None


@dataclasses.dataclass(slots=True)
class Match:
    """The result of a comparison by name.

    Attributes:
        pairs: tensors of the target with their origins.
        problems: what is wrong.
        unknown: reason -> number of tensors about which the stranger cannot say anything.
    """

    pairs: list[Pair] = dataclasses.field(default_factory=list)
    problems: list[str] = dataclasses.field(default_factory=list)
    unknown: Counter[str] = dataclasses.field(default_factory=Counter)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """Requested contents of the target.

    Attributes:
        names: the name map; it maps nothing if none was given.
        weight_dtype: type that was asked for, or None.
        only_weights: the target's format holds nothing but weights.
        prefers_masters: the target's format has no masters, and its weights are the source's masters.
    """

    names: NameMap
    weight_dtype: str | None
    only_weights: bool
    prefers_masters: bool


def match(source: Mapping[Key, Tensor], source_table: Table, target: Table, wanted: Wanted) -> Match:
    """Compare names, shapes and types of a target's tensors with those of the source."""
    matcher = _Matcher(source, source_table, target, wanted)
    matcher.match_targets()
    matcher.add_missing()
    return matcher.result


class _Matcher:
    def __init__(self, source: Mapping[Key, Tensor], source_table: Table, target: Table, wanted: Wanted) -> None:
        self._origins, self._aliases = wanted.names.apply(source, source_table.aliases)
        self._source, self._target, self._wanted = source_table, target, wanted
        self._holds_masters = any(key.state == "fp32" for key in target.tensors)
        self._second_names: dict[str, list[str]] = {}
        for second, first in (*target.aliases.items(), *self._aliases.items()):
            self._second_names.setdefault(first, []).append(second)
        self._used: set[Key] = set()
        self.result = Match()

    def match_targets(self) -> None:
        """Find what each tensor of the target is made of."""
        for key, tensor in self._target.tensors.items():
            found = self._find_origin(key, tensor)
            if found is not None:
                self._used.add(found)
                if problem := self._find_type_problem(key, tensor, found):
                    self.result.problems.append(problem)
                else:
                    self.result.pairs.append(Pair(key, tensor, self._origins[found]))
            elif reason := self._why_unknown(key):
                self.result.unknown[reason] += 1
            elif key.name.endswith(PADDING):
                self.result.pairs.append(Pair(key, tensor, None))
            elif tensor.num_elements:
                self.result.problems.append(f"{key} {list(tensor.shape)}: is in the target, and not in the source")

    def add_missing(self) -> None:
        """Add a problem for each tensor of the source that the target lacks."""
        names = {key.name for key in self._used}
        for key, origin in self._origins.items():
            if key in self._used or key.name.endswith(PADDING) or not origin.num_elements:
                continue
            first = self._target.aliases.get(key.name, "")
            held = [at for state in _states_like(key.state) if (at := Key(state, first)) in self._target.tensors]
            is_other_half = key.state in _TWINS and key.name in names
            if held:  # the target holds both names as one tensor
                self.result.pairs.append(Pair(held[0], self._target.tensors[held[0]], origin))
            elif reason := self._why_unknown(key):
                self.result.unknown[reason] += 1
            elif is_other_half and (key.state == "weight" or not self._holds_masters):
                pass  # the target's format holds either weights or masters
            elif key.state in _TWINS or not self._wanted.only_weights:
                self.result.problems.append(f"{key} {list(origin.shape)}: is in the source, and not in the target")

    def _why_unknown(self, key: Key) -> str:
        names = [str(key), key.name, *self._wanted.names.sources_of(key.name)]
        if key.state != "weight":
            names.append(OPTIMIZER)
        for table in (self._source, self._target):
            for name in names:
                if name in table.unknown:
                    return table.unknown[name]
        return ""

    def _find_origin(self, key: Key, tensor: Tensor) -> Key | None:
        """Return the key of what a tensor of the target is made of."""
        base, mark, _ = key.name.partition(PADDING)
        first_name = [self._aliases[base]] if base in self._aliases else []
        names = [base, *first_name, *self._second_names.get(base, ())]
        found = [
            at
            for state in _states_like(key.state)
            for name in names
            if (at := Key(state, name + mark)) in self._origins
        ]
        if mark:  # padding of another size was not converted
            found = [at for at in found if self._origins[at].shape == tensor.shape]
        if not found:
            return None
        masters = [at for at in found if at.state == "fp32"]
        first = self._origins[found[0]]
        rounds_once = first.dtype in _FLOATS and (self._wanted.prefers_masters or first.dtype != tensor.dtype)
        is_rounded_mean = first.is_average and first.dtype in _FLOATS
        if key.state == "weight" and masters and (is_rounded_mean or (rounds_once and not self._holds_masters)):
            return masters[0]
        return found[0]

    def _find_type_problem(self, key: Key, tensor: Tensor, found: Key) -> str:
        """Describe a shape or a type that is not the expected one."""
        origin, target = self._origins[found], self._target
        stated, kind = self._source.kind_of(found.name), target.kind_of(key.name)
        if stated and kind and stated != kind and self._wanted.names.is_identity:
            return f"{key}: the source says that tensor parallelism cuts it {stated}, the target {kind}"
        if tensor.shape != origin.shape:
            expected = f"the shape {list(origin.shape)} of {found} in the source"
            return f"{key}: expected {expected}, found {list(tensor.shape)}"
        allowed = {origin.dtype}
        if key.state == "weight" and origin.dtype in _FLOATS:
            if self._wanted.weight_dtype is not None:
                allowed = {self._wanted.weight_dtype}
            elif found.state == "fp32" and target.model_dtype:
                allowed = {target.model_dtype}
            elif Key("fp32", key.name) in target.tensors:  # a source without masters: its weights become them
                allowed |= {target.model_dtype} if target.model_dtype else _HALVES
        elif key.state == "fp32" and found.state == "weight":
            allowed = {"float32"}
        if tensor.dtype in allowed:
            return ""
        return f"{key}: expected the type {' or '.join(sorted(allowed))}, found {tensor.dtype}"


def _states_like(state: str) -> tuple[str, ...]:
    """Return a state, and the one that stands in for it where a format does not hold it."""
    return (state, _TWINS[state]) if state in _TWINS else (state,)
