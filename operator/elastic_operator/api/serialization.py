"""Conversion of frozen dataclasses to and from the camelCase JSON of the Kubernetes API.

A field of type `Time` (seconds since the epoch) is written as RFC 3339 with milliseconds, in UTC. Fields that are
`None`, and empty tuples and mappings, are left out. Unknown keys are ignored, so that an older operator can read the
status of a newer one.
"""

from __future__ import annotations

import dataclasses
import datetime
import types
import typing
from collections.abc import Mapping
from typing import Any, NewType, TypeVar

Time = NewType("Time", float)
"""Seconds since the epoch."""

_T = TypeVar("_T")


def format_time(value: float) -> str:
    """Format seconds since the epoch as RFC 3339 in UTC with milliseconds."""
    moment = datetime.datetime.fromtimestamp(value, tz=datetime.UTC)
    return moment.strftime("%Y-%m-%dT%H:%M:%S.") + f"{moment.microsecond // 1000:03d}Z"


def parse_time(text: str | None) -> Time | None:
    """Parse a time in RFC 3339; return None if it is absent or invalid."""
    if not text:
        return None
    try:
        return Time(datetime.datetime.fromisoformat(text).timestamp())
    except (ValueError, OverflowError, TypeError):
        return None


def to_camel_case(name: str) -> str:
    """Convert `first_step_time` to `firstStepTime`, and `from_` to `from`."""
    head, *rest = name.split("_")
    return head + "".join(part.capitalize() for part in rest)


def to_wire(value: Any) -> dict[str, Any]:
    """Convert a dataclass to a JSON object."""
    fields = field_types(type(value))
    pairs = ((name, _encode(getattr(value, name), hint)) for name, hint in fields.items())
    return {to_camel_case(name): item for name, item in pairs if item is not None and item not in ([], {})}


def from_wire(cls: type[_T], value: Mapping[str, Any]) -> _T:
    """Convert a JSON object to a dataclass; absent fields keep their defaults.

    Raises:
        TypeError: a field without a default is absent.
    """
    return cls(
        **{
            name: _decode(value[to_camel_case(name)], hint)
            for name, hint in field_types(cls).items()
            if value.get(to_camel_case(name)) is not None
        }
    )


def field_types(cls: Any) -> dict[str, Any]:
    """Return the types of a dataclass's fields by field name."""
    if cls not in _HINTS:
        types_of = typing.get_type_hints(cls)
        _HINTS[cls] = {field.name: types_of[field.name] for field in dataclasses.fields(cls)}
    return _HINTS[cls]


_HINTS: dict[Any, dict[str, Any]] = {}
"""Resolved annotations by class; `typing.get_type_hints` is slow."""


def _encode(value: Any, hint: Any) -> Any:
    if value is None:
        return None
    if strip_optional(hint) is Time:
        return format_time(value)
    if dataclasses.is_dataclass(value):
        return to_wire(value)
    if isinstance(value, tuple):
        (item_hint, *_) = typing.get_args(strip_optional(hint))
        return [_encode(item, item_hint) for item in value]
    if isinstance(value, Mapping):
        return dict(value)
    return value


def _decode(value: Any, hint: Any) -> Any:
    hint = strip_optional(hint)
    if hint is Time:
        return parse_time(value)
    if dataclasses.is_dataclass(hint) and isinstance(hint, type):
        return from_wire(hint, value)
    if typing.get_origin(hint) is tuple:
        (item_hint, *_) = typing.get_args(hint)
        return tuple(_decode(item, item_hint) for item in value)
    return hint(value) if hint in (int, float, str) else value


def strip_optional(hint: Any) -> Any:
    """Return `T` for `T | None`, and any other type unchanged."""
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        (hint,) = [item for item in typing.get_args(hint) if item is not type(None)]
    return hint
