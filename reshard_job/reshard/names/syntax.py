"""Read one rule of a name map from its YAML form: `{from: ..., to: ..., sizes: ...}`."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from reshard.names.arithmetic import evaluate
from reshard.names.rules import Rule
from reshard.names.template import Field, Template, parse

_MAX_PARTS = 1 << 16
_KEYS = {"from", "to", "dim", "groups", "sizes", "over", "stack"}


def read_template(value: Any, known: Mapping[str, int]) -> Template:
    """Read a template from YAML.

    Raises:
        ValueError: what is wrong with it.
    """
    if not isinstance(value, str):
        raise ValueError(f"{str(value)[:80]!r} is no name")
    return parse(value, known)


def read_rule(entry: Any, known: Mapping[str, int]) -> Rule:
    """Read a rule from YAML.

    Raises:
        ValueError: what is wrong with it.
    """
    if not isinstance(entry, dict) or not {"from", "to"} <= entry.keys() <= _KEYS:
        raise ValueError(f"expected from, to and some of {', '.join(sorted(_KEYS))}, found {str(entry)[:120]}")
    sources, targets = (_templates(entry[key], known) for key in ("from", "to"))
    sources, targets = _agree(sources, targets)
    joins = len(sources) > 1
    if len(sources) > 1 and len(targets) > 1:
        raise ValueError("several names on both sides: write one rule for each")
    stacked = _flag(entry.get("stack", False))
    if "over" in entry:
        sources, targets, joins = _over(entry["over"], sources, targets, known)
    elif stacked:
        raise ValueError("stack needs over: a field that counts the parts")
    fields = {frozenset(template.fields.items()) for template in (*sources, *targets)}
    if len(fields) > 1:
        raise ValueError(f"{entry['from']} and {entry['to']} do not have the same fields: names would be lost")
    rule = Rule(
        sources=sources,
        targets=targets,
        dim=_at_least(evaluate(entry.get("dim", 0), known), 0, "dim"),
        groups=_at_least(evaluate(entry.get("groups", 1), known), 1, "groups"),
        stacked=stacked,
        joins=joins,
    )
    return _with_sizes(rule, entry, known)


def _with_sizes(rule: Rule, entry: Mapping[str, Any], known: Mapping[str, int]) -> Rule:
    sizes = entry.get("sizes")
    if rule.is_rename and "over" not in entry:
        if surplus := sorted(entry.keys() - {"from", "to"}):
            raise ValueError(f"{', '.join(surplus)}: one name becomes one other, nothing is cut")
        return rule
    if rule.stacked:
        if sizes is not None or rule.groups > 1:
            raise ValueError("stack: each part is one step along dim, sizes and groups make no sense")
        return rule
    if isinstance(sizes, list):
        part_sizes = tuple(_at_least(evaluate(size, known), 1, "sizes") for size in sizes)
        if len(part_sizes) != rule.parts:
            raise ValueError(f"{len(part_sizes)} sizes for {rule.parts} parts")
        return dataclasses.replace(rule, sizes=part_sizes)
    if sizes == "equal" or (sizes is None and "over" in entry):
        return dataclasses.replace(rule, equal=True)
    if sizes is None and rule.joins:
        return rule
    raise ValueError("sizes: expected a list with the size of each part in one group, or equal")


def _templates(value: Any, known: Mapping[str, int]) -> tuple[Template, ...]:
    values = value if isinstance(value, list) else [value]
    if not values:
        raise ValueError("an empty list of names: to leave tensors out, use drop")
    return tuple(read_template(item, known) for item in values)


def _agree(
    sources: tuple[Template, ...], targets: tuple[Template, ...]
) -> tuple[tuple[Template, ...], tuple[Template, ...]]:
    """Give a field the same kind in all templates: the one that any of them states."""
    kinds = {name: kind for item in (*sources, *targets) for name, kind in item.fields.items() if kind != "int"}

    def with_kinds(template: Template) -> Template:
        parts = [
            dataclasses.replace(part, kind=kinds.get(part.name, part.kind))
            if isinstance(part, Field) and part.kind == "int" and not part.offset
            else part
            for part in template.parts
        ]
        return Template(tuple(parts))

    return tuple(map(with_kinds, sources)), tuple(map(with_kinds, targets))


def _over(
    value: Any, sources: tuple[Template, ...], targets: tuple[Template, ...], known: Mapping[str, int]
) -> tuple[tuple[Template, ...], tuple[Template, ...], bool]:
    """Replace the name whose field counts the parts by one name for each part; return whether the parts are sources."""
    if not isinstance(value, dict) or len(value) != 1 or len(sources) != 1 or len(targets) != 1:
        raise ValueError("over: expected one field and its count, and one name on each side")
    ((field, text),) = value.items()
    count = _at_least(evaluate(text, known), 1, "over")
    if count > _MAX_PARTS:
        raise ValueError(f"over: {count} parts, at most {_MAX_PARTS} are known")
    joins = field in sources[0].fields
    if joins == (field in targets[0].fields):
        raise ValueError(f"over: {field!r} has to be a field of one side")

    side = sources[0] if joins else targets[0]
    if side.fields[field] != "int":
        raise ValueError(f"over: {field!r} has to be a number")
    parts = tuple(side.bind(field, number) for number in range(count))
    return (parts, targets, True) if joins else (sources, parts, False)


def _flag(value: Any) -> bool:
    if not isinstance(value, bool):
        raise ValueError(f"stack: expected true or false, found {str(value)[:80]}")
    return value


def _at_least(value: int, least: int, key: str) -> int:
    if value < least:
        raise ValueError(f"{key}: {value}, expected at least {least}")
    return value
