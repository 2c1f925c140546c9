"""Conversion of frozen dataclasses to the camelCase JSON of the Kubernetes API, and the validators that read it.

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

from pydantic import TypeAdapter

from elastic_operator.api.schema_types import to_camel_case

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


def to_wire(value: Any) -> dict[str, Any]:
    """Convert a dataclass to a JSON object."""
    pairs = ((name, _encode(getattr(value, name), hint)) for name, hint in _field_types(type(value)).items())
    return {to_camel_case(name): item for name, item in pairs if item is not None and item not in ([], {})}


def adapter_of(cls: type[_T]) -> TypeAdapter[_T]:
    """Return the validator of a model."""
    if cls not in _ADAPTERS:
        _ADAPTERS[cls] = TypeAdapter(cls)
    return _ADAPTERS[cls]


_ADAPTERS: dict[Any, TypeAdapter[Any]] = {}
"""Validators by class; it takes milliseconds to build one."""


def _field_types(cls: Any) -> dict[str, Any]:
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
    if _strip_optional(hint) is Time:
        return format_time(value)
    if dataclasses.is_dataclass(value):
        return to_wire(value)
    if isinstance(value, tuple):
        (item_hint, *_) = typing.get_args(_strip_optional(hint))
        return [_encode(item, item_hint) for item in value]
    if isinstance(value, Mapping):
        return dict(value)
    return value


def _strip_optional(hint: Any) -> Any:
    """Return `T` for `T | None`, and any other type unchanged."""
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        (hint,) = [item for item in typing.get_args(hint) if item is not type(None)]
    return hint
