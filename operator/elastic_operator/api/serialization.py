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
from typing import Any, NamedTuple, NewType, TypeVar

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
    """Parse a time in RFC 3339; return None if it is absent, invalid, or not one that `format_time` writes."""
    if not text:
        return None
    try:
        value = datetime.datetime.fromisoformat(text).timestamp()
        datetime.datetime.fromtimestamp(value, tz=datetime.UTC)  # rounded or in UTC, its year may be 0 or 10000
    except (ValueError, OverflowError, TypeError):
        return None
    return Time(value)


def to_wire(value: Any) -> dict[str, Any]:
    """Convert a dataclass to a JSON object."""
    pairs = ((field.key, _encode(getattr(value, field.name), field.hint)) for field in _wire_fields(type(value)))
    return {key: item for key, item in pairs if item is not None and item not in ([], {})}


def adapter_of(cls: type[_T]) -> TypeAdapter[_T]:
    """Return the validator of a model."""
    if cls not in _ADAPTERS:
        _ADAPTERS[cls] = TypeAdapter(cls)
    return _ADAPTERS[cls]


_ADAPTERS: dict[Any, TypeAdapter[Any]] = {}
"""Validators by class; it takes milliseconds to build one."""


class _WireField(NamedTuple):
    """A field of a dataclass: its name, its key in JSON, and its type without `None`."""

    name: str
    key: str
    hint: Any


def _wire_fields(cls: Any) -> tuple[_WireField, ...]:
    if cls not in _WIRE_FIELDS:
        types_of = typing.get_type_hints(cls)
        names = [field.name for field in dataclasses.fields(cls)]
        _WIRE_FIELDS[cls] = tuple(
            _WireField(name, to_camel_case(name), _strip_optional(types_of[name])) for name in names
        )
    return _WIRE_FIELDS[cls]


_WIRE_FIELDS: dict[Any, tuple[_WireField, ...]] = {}
"""Fields by class; `typing.get_type_hints` is slow, and the operator writes thousands of values in a second."""


def _encode(value: Any, hint: Any) -> Any:
    """Convert a value; its type is needed for times and for the items of tuples."""
    if value is None:
        return None
    if hint is Time:
        return format_time(value)
    if dataclasses.is_dataclass(value):
        return to_wire(value)
    if isinstance(value, tuple):
        item_hint = _strip_optional(typing.get_args(hint)[0])
        return [_encode(item, item_hint) for item in value]
    if isinstance(value, Mapping):
        return dict(value)
    return value


def _strip_optional(hint: Any) -> Any:
    """Return `T` for `T | None`, and any other type unchanged."""
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        (hint,) = [item for item in typing.get_args(hint) if item is not type(None)]
    return hint
