"""Frozen dataclasses to and from the camelCase JSON of the Kubernetes API.

A field of type `Time` (seconds since the epoch) travels as RFC 3339 with milliseconds, in UTC. Fields that are `None`,
and empty tuples and mappings, are left out; keys that a class does not know are ignored, so that an older operator
reads a newer one's status.
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
    """RFC 3339 in UTC with milliseconds."""
    moment = datetime.datetime.fromtimestamp(value, tz=datetime.UTC)
    return moment.strftime("%Y-%m-%dT%H:%M:%S.") + f"{moment.microsecond // 1000:03d}Z"


def parse_time(text: str | None) -> Time | None:
    """Inverse of `format_time`; `None` for what is absent or unreadable, which is treated as unknown."""
    if not text:
        return None
    try:
        return Time(datetime.datetime.fromisoformat(text).timestamp())
    except (ValueError, OverflowError, TypeError):
        return None


def camel(name: str) -> str:
    """`first_step_time` to `firstStepTime`; `from_` to `from`."""
    head, *rest = name.split("_")
    return head + "".join(part.capitalize() for part in rest)


def to_wire(value: Any) -> dict[str, Any]:
    """JSON object of a dataclass."""
    fields = hints(type(value))
    pairs = ((name, _encode(getattr(value, name), hint)) for name, hint in fields.items())
    return {camel(name): item for name, item in pairs if item is not None and item not in ([], {})}


def from_wire(cls: type[_T], value: Mapping[str, Any]) -> _T:
    """Dataclass of a JSON object; fields that are absent keep their defaults.

    Raises:
        TypeError: a field without a default is absent.
    """
    return cls(
        **{
            name: _decode(value[camel(name)], hint)
            for name, hint in hints(cls).items()
            if value.get(camel(name)) is not None
        }
    )


def hints(cls: Any) -> dict[str, Any]:
    """Types of a dataclass's fields, by name."""
    if cls not in _HINTS:
        types_of = typing.get_type_hints(cls)
        _HINTS[cls] = {field.name: types_of[field.name] for field in dataclasses.fields(cls)}
    return _HINTS[cls]


_HINTS: dict[Any, dict[str, Any]] = {}
"""Resolving annotations is slow, and they never change."""


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
    """`T` of `T | None`; other types as they are."""
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        (hint,) = [item for item in typing.get_args(hint) if item is not type(None)]
    return hint
