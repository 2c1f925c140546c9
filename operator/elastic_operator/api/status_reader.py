"""The reader of a stored status, which an older operator or a user may have damaged. Pure.

An invalid field is left out and reported with its path; the next write of the status removes it. If the field is
essential (the current attempt, what it resumes from, the only commits), the operator makes no decision for the job:
`StoredStatus.lost` names these fields, and a user has to correct them. A guess could start the training from step 0.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any, get_args, get_origin

from elastic_operator.api.serialization import Time, field_types, parse_time, strip_optional, to_camel_case
from elastic_operator.api.status import (
    MAX_COMMITS,
    MAX_RECOVERIES,
    Commit,
    Condition,
    Current,
    Status,
    with_newest,
)
from reshard.contract import MAX_URI, sentence
from reshard.errors import TopologyError
from reshard.topology import Topology

MAX_INTEGER = 2**63 - 1
MAX_ITEMS = 65_536
LONG_TEXT, SHORT_TEXT = 4096, 1024
"""Maximum bytes of texts for people: in the status and its conditions, and elsewhere. Longer texts are cut."""

_TEXTS = ("message", "reason", "invalid_reason", "mode_reason")
_TOPOLOGIES = ("topology", "pinned", "target")
_NEEDED: tuple[tuple[type, str], ...] = ((Commit, "topology"), (Current, "topology"))
"""Topologies without which the object that contains them cannot be used."""

_BOUNDS = {"attempt": 2**31 - 1, "num_nodes": 2**31 - 1, "gpus_per_node": 2**31 - 1, "replicas": 2**31 - 1}
_Field = tuple[Any, str]
"""A dataclass and the name of one of its fields."""

_ESSENTIAL = ("status.attempt", "status.current")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StoredStatus:
    """The readable part of a stored status.

    Attributes:
        problems: path of each invalid field, with what was expected and found; these fields are left out.
        lost: the problems of essential fields; with any, the operator makes no decision for the job.
    """

    status: Status
    problems: tuple[str, ...] = ()
    lost: tuple[str, ...] = ()


def read_status(value: object) -> StoredStatus:
    """Read a stored status, and leave out invalid fields; never raises."""
    problems: list[str] = []
    if not isinstance(value, Mapping):
        problem = f"status: expected an object, found {type(value).__name__}"
        return StoredStatus(status=Status(), problems=(problem,), lost=(problem,))
    status = _object(Status, value, "status", problems)
    checkpoint = status.checkpoint
    history = checkpoint.history[:MAX_COMMITS]
    lost = [item for item in problems if _is_essential(item)]
    if not any(not item.invalid for item in history):
        # Without any valid commit the training would start from step 0.
        lost += [item for item in problems if item.startswith("status.checkpoint")]
    elif any(item.startswith("status.checkpoint") for item in problems):
        checkpoint = with_newest(dataclasses.replace(checkpoint, history=history))
    status = dataclasses.replace(
        status,
        checkpoint=dataclasses.replace(checkpoint, history=history),
        recoveries=status.recoveries[-MAX_RECOVERIES:],
    )
    return StoredStatus(status=status, problems=tuple(problems), lost=tuple(lost))


def _is_essential(problem: str) -> bool:
    path = problem.partition(":")[0]
    return any(path == name or path.startswith((f"{name}.", f"{name}[")) for name in _ESSENTIAL)


def _object(cls: Any, value: object, path: str, problems: list[str]) -> Any:
    """Read a dataclass; add a problem for each invalid field, and leave the field out.

    Raises:
        ValueError: `value` is no object, or a required field is missing or invalid.
    """
    if not isinstance(value, Mapping):
        raise ValueError(f"{path}: expected an object, found {type(value).__name__}")
    required = {
        field.name
        for field in dataclasses.fields(cls)
        if field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
    }
    fields: dict[str, Any] = {}
    for name, hint in field_types(cls).items():
        field_path = f"{path}.{to_camel_case(name)}"
        item = value.get(to_camel_case(name))
        if item is None:
            if name in required:
                raise ValueError(f"{field_path}: expected a value, found none")
            continue
        try:
            fields[name] = _value((cls, name), strip_optional(hint), item, field_path, problems)
        except ValueError as error:
            if name in required:
                raise
            problems.append(str(error))
    return cls(**fields)


def _value(field: _Field, hint: Any, value: Any, path: str, problems: list[str]) -> Any:
    cls, name = field
    if hint is Time:
        return _time(value, path)
    if dataclasses.is_dataclass(hint):
        return _object(hint, value, path, problems)
    if get_origin(hint) is tuple:
        return _items(field, get_args(hint)[0], value, path, problems)
    if hint is str:
        return _text(cls, name, value, path)
    if hint is bool:
        return _checked(isinstance(value, bool), value, path, "true or false")
    if hint is int:
        most = _BOUNDS.get(name, MAX_INTEGER)
        is_whole = isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= most
        return _checked(is_whole, value, path, f"an integer from 0 to {most}")
    if hint is float:
        return float(_checked(_is_finite(value), value, path, "a number"))
    return _mapping(cls, name, hint, value, path)


def _items(field: _Field, hint: Any, value: Any, path: str, problems: list[str]) -> tuple[Any, ...]:
    """Read the items of a list; add a problem for each invalid item, and leave only that item out."""
    _checked(isinstance(value, list) and len(value) <= MAX_ITEMS, value, path, f"a list of at most {MAX_ITEMS} items")
    items = []
    for index, item in enumerate(value):
        try:
            items.append(_value(field, hint, item, f"{path}[{index}]", problems))
        except ValueError as error:
            problems.append(str(error))
    return tuple(items)


def _mapping(cls: Any, name: str, hint: Any, value: Any, path: str) -> dict[str, Any]:
    _checked(isinstance(value, Mapping) and len(value) <= 64, value, path, "an object of few fields")
    if name in _TOPOLOGIES:
        if not value and (cls, name) not in _NEEDED:
            return {}
        _checked(bool(value), value, path, "degrees of parallelism")
        try:
            Topology.from_dict(value)
        except (TopologyError, TypeError) as error:
            raise ValueError(f"{path}: {sentence(str(error))}") from error
        is_whole = all(isinstance(item, int) and not isinstance(item, bool) for item in value.values())
        return dict(_checked(is_whole, value, path, "integers"))
    for item in value.values():
        parts = item.values() if isinstance(item, Mapping) else (item,)
        _checked(all(_is_finite(part) for part in parts), item, path, "numbers")
    return dict(value)


def _text(cls: Any, name: str, value: Any, path: str) -> str:
    _checked(isinstance(value, str), value, path, "a string")
    if name in _TEXTS:
        most = LONG_TEXT if cls in (Status, Condition) else SHORT_TEXT
        return value if len(value) <= most else sentence(value, most)
    return str(_checked(len(value) <= MAX_URI, value, path, f"at most {MAX_URI} characters"))


def _time(value: Any, path: str) -> Time:
    seconds = parse_time(value) if isinstance(value, str) else None
    if seconds is None or not 0 <= seconds < 2**36:
        raise ValueError(f"{path}: expected a time in RFC 3339, found {_brief(value)}")
    return seconds


def _checked(is_valid: bool, value: Any, path: str, expected: str) -> Any:
    if not is_valid:
        raise ValueError(f"{path}: expected {expected}, found {_brief(value)}")
    return value


def _is_finite(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _brief(value: Any) -> str:
    text = ascii(value) if isinstance(value, str | int | float | bool) else type(value).__name__
    return text if len(text) <= 60 else f"{text[:60]}..."
