"""The reader of a stored status, which an older operator or a user may have damaged. Pure.

An invalid field is left out and reported with its path; the next write of the status removes it. If the field is
essential (the current attempt, what it resumes from, the only commits), the operator makes no decision for the job:
`StoredStatus.lost` names these fields, and a user has to correct them. The operator does not guess, because
a wrong guess could start the training from step 0.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Set
from typing import Any

from pydantic import ValidationError

from elastic_operator.api.schema_types import without_nulls
from elastic_operator.api.serialization import adapter_of
from elastic_operator.api.status import MAX_COMMITS, MAX_RECOVERIES, Status, with_newest
from elastic_operator.api.validation import Location, Problem, find_problems, shorten

_ESSENTIAL = ("status.attempt", "status.current")
_MAPPINGS = frozenset({"topology", "pinned", "target", "seconds", "partsSeconds"})
"""Fields whose keys are data: a null in them is a mistake, and no absent field."""

_MAX_ROUNDS = 16
"""Most validations of one status: each removes what the one before found invalid, and the models are not as deep."""


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
    if not isinstance(value, Mapping):
        problem = f"status: expected an object, found {type(value).__name__}"
        return StoredStatus(status=Status(), problems=(problem,), lost=(problem,))
    status, problems = _validate(without_nulls(value, opaque=_MAPPINGS))
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
        pauses=status.pauses[-MAX_RECOVERIES:],
    )
    return StoredStatus(status=status, problems=tuple(problems), lost=tuple(lost))


def _is_essential(problem: str) -> bool:
    path = problem.partition(":")[0]
    return path == "status" or any(path == name or path.startswith((f"{name}.", f"{name}[")) for name in _ESSENTIAL)


def _validate(wire: dict[str, Any]) -> tuple[Status, list[str]]:
    """Validate a status; remove what is invalid, and everything that cannot be used without it, and repeat.

    The first round finds all problems. What is missing later was removed before.
    """
    problems: list[str] = []
    for round_ in range(_MAX_ROUNDS):
        try:
            return adapter_of(Status).validate_python(wire), problems
        except ValidationError as error:
            invalid = list(find_problems(adapter_of(Status), error))
        problems += [_sentence(item) for item in invalid if item.expected or round_ == 0]
        gone = {item.location if item.expected else item.location[:-1] for item in invalid}
        if () in gone:
            break
        above = {location[:depth] for location in gone for depth in range(len(location))}
        wire = _remove(wire, gone, above)
    return Status(), [*problems, "status: expected an object that can be read without its invalid fields"]


def _remove(value: Any, gone: Set[Location], above: Set[Location], here: Location = ()) -> Any:
    """Return JSON data without the values at some locations; an item of a list leaves no gap.

    Args:
        value: JSON data.
        gone: locations of the values to remove.
        above: locations of everything that contains such a value.
        here: location of `value`.
    """
    if here not in above:
        return value
    if isinstance(value, Mapping):
        kept = ((key, item) for key, item in value.items() if (*here, key) not in gone)
        return {key: _remove(item, gone, above, (*here, key)) for key, item in kept}
    items = ((at, item) for at, item in enumerate(value) if (*here, at) not in gone)
    return [_remove(item, gone, above, (*here, at)) for at, item in items]


def _sentence(problem: Problem) -> str:
    path = problem.path("status")
    if not problem.expected:
        return f"{path}: expected a value, found none"
    return f"{path}: expected {problem.expected}, found {shorten(problem.value)}"
