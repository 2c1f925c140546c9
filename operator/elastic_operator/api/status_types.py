"""Field types of the status: times, counts, and texts that are shortened to a maximum length."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import AfterValidator, BeforeValidator, Field, Strict

from elastic_operator.api.schema_types import INT32, INT64, OPEN, Keywords, ReadAs, not_expected
from elastic_operator.api.serialization import Time, parse_time
from reshard.contract import MAX_URI, sentence
from reshard.errors import TopologyError
from reshard.topology import Topology

MAX_INTEGER = 2**63 - 1
MAX_ITEMS = 65_536
_MAX_FIELDS = 64
_LONG_TEXT, _SHORT_TEXT = 4096, 1024
"""Longest texts for people, in characters and in bytes of what is left of a longer one."""

_LAST_SECOND = 2**36


def _cut(text: str, most: int) -> str:
    return text if len(text) <= most else sentence(text, most)


def _to_time(text: str) -> Time:
    seconds = parse_time(text)
    if seconds is None or not 0 <= seconds < _LAST_SECOND:
        raise not_expected("a time in RFC 3339")
    return seconds


def _to_optional_topology(degrees: Mapping[str, Any]) -> Topology | None:
    return _to_topology(degrees) if degrees else None


def _to_topology(degrees: Mapping[str, Any]) -> Topology:
    if not 0 < len(degrees) <= _MAX_FIELDS:
        raise not_expected("degrees of parallelism")
    if not all(isinstance(item, int) and not isinstance(item, bool) for item in degrees.values()):
        raise not_expected("integers")
    try:
        return Topology.from_dict(degrees)
    except (TopologyError, TypeError) as error:
        raise not_expected(f"a possible topology: {sentence(str(error))}") from error


def _check_numbers(values: Any) -> Any:
    if not isinstance(values, Mapping) or len(values) > _MAX_FIELDS:
        raise not_expected("an object of few fields")
    if not all(map(_is_finite, values.values())):
        raise not_expected("numbers")
    return dict(values)


def _is_finite(value: Any) -> bool:
    if isinstance(value, float):
        return math.isfinite(value)
    return isinstance(value, int) and not isinstance(value, bool) and abs(value) <= MAX_INTEGER


Text = Annotated[str, Strict(), Field(max_length=MAX_URI)]
"""A text that is used as it is."""
Word = Annotated[str, Strict(), Field(max_length=1024)]
LongText = Annotated[
    str, Strict(), AfterValidator(functools.partial(_cut, most=_LONG_TEXT)), Keywords(maxLength=_LONG_TEXT)
]
ShortText = Annotated[
    str, Strict(), AfterValidator(functools.partial(_cut, most=_SHORT_TEXT)), Keywords(maxLength=_LONG_TEXT)
]
Count = Annotated[int, Strict(), Field(ge=0, le=MAX_INTEGER), INT64]
Count32 = Annotated[int, Strict(), Field(ge=0, le=2**31 - 1), INT32]
Real = Annotated[float, Strict(), Field(allow_inf_nan=False)]
Moment = Annotated[Time, ReadAs(Annotated[str, Strict()], _to_time), Keywords(format="date-time")]
NodeNames = Annotated[
    tuple[Annotated[str, Strict(), Field(max_length=253)], ...],
    Field(max_length=MAX_ITEMS),
]
Degrees = Annotated[Topology, ReadAs(Mapping[str, Any], _to_topology), OPEN]
"""A topology, which the resource holds as `Topology.to_dict`."""
OptionalDegrees = Annotated[Topology | None, ReadAs(Mapping[str, Any], _to_optional_topology), OPEN]
"""A topology or none; an empty object stands for none."""
NumbersByName = Annotated[Mapping[str, float], BeforeValidator(_check_numbers), OPEN]
