"""Translates pydantic's errors into this project's error messages. Pure."""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Iterator, Mapping
from typing import Any

from pydantic import TypeAdapter, ValidationError
from pydantic_core import ErrorDetails

Location = tuple[int | str, ...]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """A value that does not fit its field.

    Attributes:
        location: names and list positions from the root to the value.
        expected: what the field accepts; empty if the value is missing.
        value: what was found.
    """

    location: Location
    expected: str
    value: Any

    def path(self, root: str) -> str:
        """Return the location as `root.field.list[0]`."""
        return root + "".join(f"[{item}]" if isinstance(item, int) else f".{item}" for item in self.location)


def find_problems(adapter: TypeAdapter[Any], error: ValidationError) -> Iterator[Problem]:
    """Yield the problems of a validation, in the order of the fields."""
    details = error.errors(include_url=False)
    parents = {detail["loc"][:depth] for detail in details for depth in range(len(detail["loc"]))}
    for detail in details:
        location, kind = detail["loc"], detail["type"]
        if kind == "too_short" and location in parents:
            continue  # pydantic counts valid items only
        if kind == "missing":
            yield Problem(location=location, expected="", value=None)
        else:
            yield Problem(location=location, expected=_expected(adapter, detail), value=detail["input"])


def shorten(value: object, limit: int = 60) -> str:
    """Return `value` as it is written in Python, without line breaks and control characters, cut to `limit`."""
    if isinstance(value, str):
        cut = ascii(value[:limit])
        return cut if len(value) <= limit else f"{cut}... ({len(value)} characters)"
    if isinstance(value, Mapping | list | tuple) and len(value) > 8:
        return f"{'an object' if isinstance(value, Mapping) else 'a list'} of {len(value)} items"
    try:
        text = ascii(value)
    except (ValueError, RecursionError):  # an integer of thousands of digits; data nested too deeply
        return f"a value of type {type(value).__name__}"
    return text if len(text) <= limit else f"{text[:limit]}..."


def _expected(adapter: TypeAdapter[Any], detail: ErrorDetails) -> str:
    """Return what the field accepts, from the error and from the schema of the field."""
    kind, context = detail["type"], detail.get("ctx") or {}
    if kind == "not_expected":
        return str(context["expected"])
    if kind in ("enum", "literal_error"):
        choices = re.findall(r"'([^']*)'", context["expected"])
        return f"one of {', '.join(choices)}"
    if kind in ("dataclass_type", "dict_type", "mapping_type"):
        return "an object"
    if kind in ("tuple_type", "list_type"):
        return "a list"
    if kind == "bool_type":
        return "true or false"
    if kind in ("string_type", "string_unicode", "string_too_long", "string_too_short"):
        return _text(context)
    if kind in ("too_short", "too_long"):
        return _list(_field_schema(adapter, detail["loc"]), context)
    if kind in ("int_type", "float_type", "finite_number", "greater_than_equal", "less_than_equal"):
        return _number(_field_schema(adapter, detail["loc"]))
    return detail["msg"].removeprefix("Input should be ").removeprefix("Value error, ")


def _text(context: Mapping[str, Any]) -> str:
    if "max_length" in context:
        return f"at most {context['max_length']} characters"
    if context.get("min_length", 0) > 1:
        return f"at least {context['min_length']} characters"
    return "a string"


def _list(schema: Mapping[str, Any], context: Mapping[str, Any]) -> str:
    if "max_length" in context:
        return f"a list of at most {context['max_length']} items"
    numbers = schema.get("items", {}).get("type") in ("integer", "number")
    return f"a list with at least one {'number' if numbers else 'entry'}"


def _number(schema: Mapping[str, Any]) -> str:
    noun = "a whole number" if schema.get("type") == "integer" else "a number"
    least, most = schema.get("minimum"), schema.get("maximum")
    if least is None or most is None:
        return noun
    return f"{noun} from {_digits(least)} to {_digits(most)}"


def _digits(value: float) -> str:
    return str(value) if isinstance(value, int) else f"{value:.15g}"


def _field_schema(adapter: TypeAdapter[Any], location: Location) -> Mapping[str, Any]:
    """Return the JSON schema of the field at `location`; empty if there is none."""
    root = _schema_of(adapter)
    node: Mapping[str, Any] = _resolve(root, root)
    for item in location:
        below = node.get("items") if isinstance(item, int) else node.get("properties", {}).get(item)
        node = _resolve(root, below or {})
    return node


@functools.lru_cache(maxsize=16)
def _schema_of(adapter: TypeAdapter[Any]) -> Mapping[str, Any]:
    return adapter.json_schema(by_alias=True)


def _resolve(root: Mapping[str, Any], node: Mapping[str, Any]) -> Mapping[str, Any]:
    """Follow references, and leave out null of `T | null`."""
    while True:
        if "anyOf" in node:
            node = next(item for item in node["anyOf"] if item != {"type": "null"})
        elif "$ref" in node:
            node = root["$defs"][node["$ref"].rsplit("/", 1)[-1]]
        else:
            return node
