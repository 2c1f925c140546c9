"""Parameter groups of the optimizer, from options that are stored by group or by parameter."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from reshard.errors import UnsupportedError
from reshard.formats.dcp.items import to_plain
from reshard.tensors.layout import ParamGroup, Plain

_PARAMS = "params"
Number = int | float


def find_groups(
    listed: Mapping[tuple[int, str], Any],
    named: Mapping[tuple[str, str], Any],
    scalars: Mapping[str, Mapping[str, Number]],
    where: str,
) -> tuple[ParamGroup, ...]:
    """Find the parameter groups, in the optimizer's order.

    If options are stored by parameter, parameters with equal options form a group.

    Args:
        listed: values of options by (group, option), `params` among them.
        named: values of options by (parameter, option).
        scalars: parameter -> state -> number.
        where: folder of the checkpoint, for errors.

    Raises:
        CorruptSourceError: a group has no list of parameters, or an option is not plain data.
    """
    problems: list[str] = []
    options: dict[Any, dict[str, Plain]] = {}
    members: dict[int, tuple[str, ...]] = {}
    for (owner, option), value in (*listed.items(), *named.items()):
        own = options.setdefault(owner, {})
        if option == _PARAMS and isinstance(owner, int):
            if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
                problems.append(f"param_groups.{owner}.params: expected a list of names, found {value!r:.80}")
            else:
                members[owner] = tuple(value)
            continue
        try:
            own[option] = to_plain(value)
        except ValueError as error:
            problems.append(f"param_groups.{owner}.{option}: expected plain data, found {error}")
    numbers = sorted({owner for owner, _ in listed})
    problems += [f"param_groups.{number} has no params" for number in numbers if number not in members]
    if problems:
        raise UnsupportedError("cannot tell the optimizer's parameter groups", path=where, problems=problems[:20])
    if numbers:
        return tuple(_build_group(members[number], options[number], scalars) for number in numbers)
    alike: dict[str, list[str]] = {}
    for name in dict.fromkeys(name for name, _ in named):
        alike.setdefault(repr(sorted(options[name].items())), []).append(name)
    return tuple(_build_group(names, options[names[0]], scalars) for names in alike.values())


def _build_group(
    names: Sequence[str], options: Mapping[str, Plain], scalars: Mapping[str, Mapping[str, Number]]
) -> ParamGroup:
    return ParamGroup(names=tuple(names), options=options, scalars=find_common_scalars(names, scalars))


def find_common_scalars(names: Sequence[str], scalars: Mapping[str, Mapping[str, Number]]) -> dict[str, Number]:
    """Find the states that are the same number for all parameters of a group; parameters without state do not count."""
    states = [scalars[name] for name in names if name in scalars]
    if not states:
        return {}
    return {state: value for state, value in states[0].items() if all(other.get(state) == value for other in states)}
