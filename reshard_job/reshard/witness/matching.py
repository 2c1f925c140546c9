"""Match the tensors of a target with those of a source, by state and name."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from reshard.witness.names import NameMap, Origin
from reshard.witness.table import PADDING, Key, Table, Tensor

_TWINS = {"weight": "fp32", "fp32": "weight"}
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
    """What the target shall hold.

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
    result = Match()
    origins, aliases = wanted.names.apply(source, source_table.aliases)
    used: set[Key] = set()
    for key, tensor in target.tensors.items():
        reason = _why_unknown(key, source_table, target, wanted.names)
        found = _find_origin(key, tensor, origins, aliases, target, wanted)
        if found is None:
            if reason:
                result.unknown[reason] += 1
            elif key.name.endswith(PADDING):
                result.pairs.append(Pair(key, tensor, None))
            elif tensor.num_elements:
                result.problems.append(f"{key} {list(tensor.shape)}: is in the target, and not in the source")
            continue
        used.add(found)
        origin = origins[found]
        if problem := _find_type_problem(key, tensor, found, origin, target, wanted):
            result.problems.append(problem)
        else:
            result.pairs.append(Pair(key, tensor, origin))
    _add_missing(result, origins, used, source_table, target, wanted)
    return result


def _why_unknown(key: Key, source: Table, target: Table, names: NameMap) -> str:
    for table in (source, target):
        for name in (str(key), key.name, *names.sources_of(key.name), "*"):
            if name in table.unknown:
                return table.unknown[name]
    return ""


def _find_origin(
    key: Key, tensor: Tensor, origins: Mapping[Key, Origin], aliases: Mapping[str, str], target: Table,
    wanted: Wanted,
) -> Key | None:  # fmt: skip
    """Return the key of what a tensor of the target is made of."""
    base, mark, _ = key.name.partition(PADDING)
    seconds = [second for second, first in (*target.aliases.items(), *aliases.items()) if first == base]
    own = [base, *([aliases[base]] if base in aliases else []), *seconds]
    states = [key.state, _TWINS[key.state]] if key.state in _TWINS else [key.state]
    found = [at for state in states for name in own if (at := Key(state, name + mark)) in origins]
    if not found:
        return None
    if mark:  # padding of another size was not converted
        found = [at for at in found if origins[at].shape == tensor.shape]
    masters = [at for at in found if at.state == "fp32"]
    if key.state == "weight" and masters and origins[found[0]].dtype in _FLOATS and not _holds_masters(target):
        if wanted.prefers_masters or origins[found[0]].dtype != tensor.dtype:  # rounded once, not twice
            return masters[0]
    return found[0] if found else None


def _find_type_problem(key: Key, tensor: Tensor, found: Key, origin: Origin, target: Table, wanted: Wanted) -> str:
    """Describe a shape or a type that is not the expected one."""
    if tensor.shape != origin.shape:
        return f"{key}: expected the shape {list(origin.shape)} of {found} in the source, found {list(tensor.shape)}"
    allowed = {origin.dtype}
    if key.state == "weight" and origin.dtype in _FLOATS:
        if wanted.weight_dtype is not None:
            allowed = {wanted.weight_dtype}
        elif found.state == "fp32" and target.model_dtype:
            allowed = {target.model_dtype}
        elif target.model_dtype and Key("fp32", key.name) in target.tensors:
            allowed.add(target.model_dtype)  # a source without masters, whose weights become the target's masters
    elif key.state == "fp32" and found.state == "weight":
        allowed = {"float32"}
    if tensor.dtype not in allowed:
        return f"{key}: expected the type {' or '.join(sorted(allowed))}, found {tensor.dtype}"
    return ""


def _add_missing(
    result: Match, origins: Mapping[Key, Origin], used: set[Key], source: Table, target: Table, wanted: Wanted
) -> None:
    """Add a problem for each tensor of the source that the target lacks."""
    has_masters = _holds_masters(target)
    names = {key.name for key in used}
    for key in _unused(origins, used):
        first = target.aliases.get(key.name)
        held = [
            at for state in (key.state, _TWINS.get(key.state, "")) if (at := Key(state, first or "")) in target.tensors
        ]
        if held:  # the target holds both names as one tensor
            result.pairs.append(Pair(held[0], target.tensors[held[0]], origins[key]))
            continue
        reason = _why_unknown(key, source, target, wanted.names)
        if reason:
            result.unknown[reason] += 1
        elif key.state in _TWINS:
            is_dropped = key.state == "weight" or not has_masters
            if not (is_dropped and key.name in names):
                result.problems.append(f"{key} {list(origins[key].shape)}: is in the source, and not in the target")
        elif not wanted.only_weights:
            result.problems.append(f"{key} {list(origins[key].shape)}: is in the source, and not in the target")


def _holds_masters(table: Table) -> bool:
    return any(key.state == "fp32" for key in table.tensors)


def _unused(origins: Mapping[Key, Origin], used: set[Key]) -> Iterator[Key]:
    for key, origin in origins.items():
        if key not in used and not key.name.endswith(PADDING) and origin.num_elements:
            yield key
