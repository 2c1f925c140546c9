"""Reads a stored status, whatever has damaged it: an older operator, or a person with the right to write it. Pure.

A field that does not fit is left out and told with its path, so that the next write mends it. Where what is left would
not do (which attempt runs, from what it resumes, the only commits), nothing is decided: `Stored.lost` names the fields,
and a person has to put them right. To guess there could start the training from nothing.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any, get_args, get_origin

from elastic_operator.api.serialization import Time, camel, hints, parse_time, strip_optional
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
"""Bytes of texts for people: of the status and its conditions, and of everything below. Longer ones are cut."""

_TEXTS = ("message", "reason", "invalid_reason", "mode_reason")
_TOPOLOGIES = ("topology", "pinned", "target")
_NEEDED: tuple[tuple[type, str], ...] = ((Commit, "topology"), (Current, "topology"))
"""Topologies that cannot be left out."""

_BOUNDS = {"attempt": 2**31 - 1, "num_nodes": 2**31 - 1, "gpus_per_node": 2**31 - 1, "replicas": 2**31 - 1}
_Field = tuple[Any, str]
"""A dataclass, and the name of one of its fields."""

_ESSENTIAL = ("status.attempt", "status.current")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Stored:
    """What could be read.

    Attributes:
        problems: path of each field that does not fit, with what was expected and found; they are left out.
        lost: those among them that nothing can be decided without.
    """

    status: Status
    problems: tuple[str, ...] = ()
    lost: tuple[str, ...] = ()


def read_status(value: object) -> Stored:
    """A stored status; never raises."""
    problems: list[str] = []
    if not isinstance(value, Mapping):
        found = f"status: expected an object, found {type(value).__name__}"
        return Stored(status=Status(), problems=(found,), lost=(found,))
    status = _object(Status, value, "status", problems)
    checkpoint = status.checkpoint
    history = checkpoint.history[:MAX_COMMITS]
    lost = [item for item in problems if _is_essential(item)]
    if not any(not item.invalid for item in history):
        # Without any commit left the training would start from nothing.
        lost += [item for item in problems if item.startswith("status.checkpoint")]
    elif any(item.startswith("status.checkpoint") for item in problems):
        checkpoint = with_newest(dataclasses.replace(checkpoint, history=history))
    status = dataclasses.replace(
        status,
        checkpoint=dataclasses.replace(checkpoint, history=history),
        recoveries=status.recoveries[-MAX_RECOVERIES:],
    )
    return Stored(status=status, problems=tuple(problems), lost=tuple(lost))


def _is_essential(problem: str) -> bool:
    path = problem.partition(":")[0]
    return any(path == name or path.startswith((f"{name}.", f"{name}[")) for name in _ESSENTIAL)


def _object(cls: Any, value: object, path: str, problems: list[str]) -> Any:
    """A dataclass; fields that do not fit are left out and told.

    Raises:
        ValueError: it is no object, or a field that cannot be left out does not fit.
    """
    if not isinstance(value, Mapping):
        raise ValueError(f"{path}: expected an object, found {type(value).__name__}")
    needed = {
        field.name
        for field in dataclasses.fields(cls)
        if field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
    }
    found: dict[str, Any] = {}
    for name, hint in hints(cls).items():
        where = f"{path}.{camel(name)}"
        item = value.get(camel(name))
        if item is None:
            if name in needed:
                raise ValueError(f"{where}: expected a value, found none")
            continue
        try:
            found[name] = _value((cls, name), strip_optional(hint), item, where, problems)
        except ValueError as error:
            if name in needed:
                raise
            problems.append(str(error))
    return cls(**found)


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
        whole = isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= most
        return _checked(whole, value, path, f"an integer from 0 to {most}")
    if hint is float:
        return float(_checked(_is_finite(value), value, path, "a number"))
    return _mapping(cls, name, hint, value, path)


def _items(field: _Field, hint: Any, value: Any, path: str, problems: list[str]) -> tuple[Any, ...]:
    """Items of a list; those that do not fit are left out alone."""
    _checked(isinstance(value, list) and len(value) <= MAX_ITEMS, value, path, f"a list of at most {MAX_ITEMS} items")
    found = []
    for index, item in enumerate(value):
        try:
            found.append(_value(field, hint, item, f"{path}[{index}]", problems))
        except ValueError as error:
            problems.append(str(error))
    return tuple(found)


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
        whole = all(isinstance(item, int) and not isinstance(item, bool) for item in value.values())
        return dict(_checked(whole, value, path, "integers"))
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
    found = parse_time(value) if isinstance(value, str) else None
    if found is None or not 0 <= found < 2**36:
        raise ValueError(f"{path}: expected a time in RFC 3339, found {_brief(value)}")
    return found


def _checked(fits: bool, value: Any, path: str, expected: str) -> Any:
    if not fits:
        raise ValueError(f"{path}: expected {expected}, found {_brief(value)}")
    return value


def _is_finite(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _brief(value: Any) -> str:
    text = ascii(value) if isinstance(value, str | int | float | bool) else type(value).__name__
    return text if len(text) <= 60 else f"{text[:60]}..."
