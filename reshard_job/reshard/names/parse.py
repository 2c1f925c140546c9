"""Read name maps from YAML files. docs/name-maps.md describes the form."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from reshard.errors import UsageError
from reshard.names.arithmetic import evaluate
from reshard.names.rules import NameMap, Rule
from reshard.names.syntax import read_rule, read_template
from reshard.storage.yaml_file import read_yaml

VERSION = 1
_TOP = {"version", "description", "constants", "rules", "drop", "tied", "untied"}


def load(path: str | Path, constants: Mapping[str, int] | None = None) -> NameMap:
    """Read a name map from a YAML file.

    Args:
        path: the file.
        constants: values that replace those of the file.

    Raises:
        UsageError: with everything that is wrong with it, each by rule.
    """
    value = read_yaml(Path(path))
    try:
        return build(value, constants, path=str(path))
    except UsageError as error:
        raise UsageError(error.message, path=str(path), hint=error.hint, problems=error.problems) from None


def build(value: Any, constants: Mapping[str, int] | None = None, *, path: str = "") -> NameMap:
    """Build the name map that a YAML document describes; see `load`."""
    if not isinstance(value, dict) or value.get("version") != VERSION:
        raise UsageError(f"is no name map: expected version: {VERSION} and rules", hint="see docs/name-maps.md")
    if unknown := sorted(str(key) for key in value.keys() - _TOP):
        raise UsageError(f"unknown keys {', '.join(unknown)}: expected some of {', '.join(sorted(_TOP))}")
    problems: list[str] = []
    known = _constants(value.get("constants") or {}, constants or {}, problems)
    rules: list[Rule] = []
    for number, entry in enumerate(_list(value.get("rules"), "rules", problems), 1):
        try:
            rules.append(read_rule(entry, known))
        except ValueError as error:
            problems.append(f"rule {number}: {error}")
    for entry in _list(value.get("drop"), "drop", problems):
        try:
            rules.append(Rule(sources=(read_template(entry, known),), targets=()))
        except ValueError as error:
            problems.append(f"drop: {error}")
    tied = _pairs(value.get("tied"), "tied", known, problems)
    untied = _pairs(value.get("untied"), "untied", known, problems)
    if problems:
        raise UsageError(f"{len(problems)} problems in the name map", problems=problems[:20])
    return NameMap(rules=tuple(rules), tied=tied, untied=untied, path=path)


def _constants(value: Any, replaced: Mapping[str, int], problems: list[str]) -> dict[str, int]:
    """Evaluate the constants in order: each may use those before it."""
    if not isinstance(value, dict):
        problems.append(f"constants: expected a map from names to numbers, found {str(value)[:80]}")
        return dict(replaced)
    known: dict[str, int] = {}
    problems += [f"constants: the map has no {name!r} to replace" for name in replaced.keys() - value.keys()]
    for name, text in value.items():
        if not isinstance(name, str) or not name.isidentifier():
            problems.append(f"constants: {str(name)[:80]!r} is no name")
            continue
        try:
            known[name] = replaced[name] if name in replaced else evaluate(text, known)
        except ValueError as error:
            problems.append(f"constants: {name}: {error}")
    return known


def _list(value: Any, key: str, problems: list[str]) -> list[Any]:
    if value is None:
        return []
    if not isinstance(value, list):
        problems.append(f"{key}: expected a list, found {str(value)[:80]}")
        return []
    return value


def _pairs(value: Any, key: str, known: Mapping[str, int], problems: list[str]) -> tuple[tuple[str, str], ...]:
    """Read pairs of a second name and a name; both are whole names without fields."""
    if value is None:
        return ()
    if not isinstance(value, dict):
        problems.append(f"{key}: expected a map from second names to names, found {str(value)[:80]}")
        return ()
    pairs = []
    for second, name in value.items():
        try:
            pair = read_template(second, known), read_template(name, known)
            if pair[0].fields or pair[1].fields:
                raise ValueError(f"{second!r}: whole names are expected here, without fields")
            pairs.append((str(pair[0]), str(pair[1])))
        except ValueError as error:
            problems.append(f"{key}: {error}")
    return tuple(pairs)
