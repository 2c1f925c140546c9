"""Reads what pods write: Lease annotations and termination messages. Strict, as a pod may write anything. Pure.

What does not fit is left out, and told as a problem with the path of its field. It is never stored, and nothing here
lets an exception into a decision.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from elastic_operator.api.serialization import parse_time
from reshard.contract import (
    COMMIT_FOLDER,
    MAX_COUNT,
    MAX_RELEASED,
    MAX_URI,
    CommitRef,
    LeaseKey,
    TrainerPhase,
    VirtualLoader,
    parse_json,
    sentence,
)
from reshard.errors import TopologyError
from reshard.topology import Topology

TEXT_BYTES = 512
"""Longest text of a pod that is told or stored."""

MAX_MESSAGE = 4 * 4096
"""Longest termination message that is looked at, in characters; the kubelet keeps 4096 bytes of a container."""

EARLIEST, LATEST = 0.0, 32_503_680_000.0
"""Times from 1970 to 3000, in seconds since the epoch."""

_DIGITS = re.compile(r"[0-9]{1,16}")
_REAL = re.compile(r"[+-]?[0-9]{1,40}(\.[0-9]{0,40})?([eE][+-]?[0-9]{1,4})?")
_NO_NUMBER = re.compile(r"[+-]?(nan|inf|infinity)", re.IGNORECASE)

_T = TypeVar("_T")


def count(text: str) -> int:
    """A step or a number of samples, in decimal."""
    if not _DIGITS.fullmatch(text) or int(text) > MAX_COUNT:
        raise ValueError(f"expected a decimal number from 0 to {MAX_COUNT}, found {brief(text)}")
    return int(text)


def loss(text: str) -> float | None:
    """A loss; None where training has diverged, as JSON has neither NaN nor infinity."""
    if _NO_NUMBER.fullmatch(text):
        return None
    if not _REAL.fullmatch(text) or not math.isfinite(float(text)):
        raise ValueError(f"expected a decimal number, found {brief(text)}")
    return float(text)


def moment(text: str) -> float:
    """A time in RFC 3339."""
    found = parse_time(text) if len(text) <= 64 else None
    if found is None or not EARLIEST <= found <= LATEST:
        raise ValueError(f"expected a time in RFC 3339 from 1970 to 3000, found {brief(text)}")
    return found


def names(text: str) -> tuple[str, ...]:
    """Names of commits below the checkpoint root, as a JSON array."""
    found = parse_json(text)
    if not isinstance(found, list) or len(found) > MAX_RELEASED or not all(isinstance(name, str) for name in found):
        raise ValueError(f"expected a JSON array of at most {MAX_RELEASED} names, found {brief(text)}")
    return tuple(found)


def phase(text: str) -> str:
    """A `TrainerPhase`."""
    if text not in _PHASES:
        raise ValueError(f"expected one of {', '.join(_PHASES)}, found {brief(text)}")
    return text


def commit(text: str) -> CommitRef:
    """A commit whose topology makes sense. Where it may lie is for `commit_problem`."""
    found = CommitRef.from_json(text)
    try:
        Topology.from_dict(found.topology)
    except TopologyError as error:
        raise ValueError(f"topology: {error}") from error
    return found


def commit_problem(found: CommitRef, *, root: str, attempt: int) -> str:
    """What is wrong with where a commit of `attempt` lies; empty where nothing is.

    A trainer writes below its own attempt's folder of the job's checkpoint root, and nowhere else. What is believed
    here is read by reshard pods and by all attempts that follow.
    """
    if found.attempt != attempt:
        return f"attempt: expected {attempt}, that of the Lease, found {found.attempt}"
    folder = f"{root}/a{attempt}/"
    if not found.uri.startswith(folder) or not COMMIT_FOLDER.fullmatch(found.uri, len(folder)):
        return f"uri: expected {folder}step-..., found {brief(found.uri)}"
    return ""


def path_problem(path: str, root: str) -> str:
    """What is wrong with a folder that has to be `root` or lie below it; empty where nothing is."""
    inside = path == root or path.startswith(f"{root}/")
    if not inside or len(path) > MAX_URI or ".." in path.split("/"):
        return f"expected {root} or a folder below it, found {brief(path)}"
    return ""


def value(read: Callable[[str], _T], text: str) -> _T | None:
    """What a text says, None for one that is empty or does not fit."""
    if not text:
        return None
    try:
        return read(text)
    except ValueError:
        return None


def problems(annotations: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Annotations of a Lease that do not fit: the path of each, and what was expected and found."""
    found: list[tuple[str, str]] = []
    for key, read in _READERS.items():
        text = annotations.get(key)
        if not text:
            continue
        try:
            read(text)
        except ValueError as error:
            found.append((f"annotation {key}", sentence(str(error), TEXT_BYTES)))
    return found


def brief(text: str) -> str:
    """A text for a message: short, and printable everywhere."""
    return ascii(text) if len(text) <= 60 else f"{text[:60]!a}... ({len(text)} characters)"


_PHASES = tuple(item.value for item in TrainerPhase)
_READERS: Mapping[str, Callable[[str], Any]] = {
    LeaseKey.PHASE: phase,
    LeaseKey.STEP: count,
    LeaseKey.SAMPLES: count,
    LeaseKey.LOSS: loss,
    LeaseKey.FIRST_STEP_TIME: moment,
    LeaseKey.STEP_TIME: moment,
    LeaseKey.COMMIT: commit,
    LeaseKey.LOADER: VirtualLoader.from_json,
    LeaseKey.REMOVED: names,
}
