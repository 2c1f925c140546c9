"""Strict readers for what pods write: Lease annotations and termination messages. Pure.

A pod may write anything. A value that does not fit is ignored, is never stored, and is reported as a problem with the
path of its field. `parse_or_none` and `find_problems` never raise.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeVar

from elastic_operator.api.schema_types import MAX_ALLOWED_GLOBALS, is_global_name
from elastic_operator.api.serialization import parse_time
from elastic_operator.api.validation import shorten
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
"""Maximum bytes of a text from a pod that the operator reports or stores."""

MAX_MESSAGE = 4 * 4096
"""Maximum characters of a termination message that are read; the kubelet keeps 4096 bytes per container."""

EARLIEST, LATEST = 0.0, 32_503_680_000.0
"""Accepted times, in seconds since the epoch: from 1970 to 3000."""

_DIGITS = re.compile(r"[0-9]{1,16}")
_REAL = re.compile(r"[+-]?[0-9]{1,40}(\.[0-9]{0,40})?([eE][+-]?[0-9]{1,4})?")
_NO_NUMBER = re.compile(r"[+-]?(nan|inf|infinity)", re.IGNORECASE)

_T = TypeVar("_T")


def parse_count(text: str) -> int:
    """Parse a decimal step number or number of samples.

    Raises:
        ValueError: `text` is no decimal number from 0 to MAX_COUNT.
    """
    if not _DIGITS.fullmatch(text) or int(text) > MAX_COUNT:
        raise ValueError(f"expected a decimal number from 0 to {MAX_COUNT}, found {shorten(text)}")
    return int(text)


def parse_loss(text: str) -> float | None:
    """Parse a training loss; return None for NaN and infinity, which JSON cannot express.

    Raises:
        ValueError: `text` is no decimal number.
    """
    if _NO_NUMBER.fullmatch(text):
        return None
    if not _REAL.fullmatch(text) or not math.isfinite(float(text)):
        raise ValueError(f"expected a decimal number, found {shorten(text)}")
    return float(text)


def parse_timestamp(text: str) -> float:
    """Parse a time in RFC 3339 into seconds since the epoch.

    Raises:
        ValueError: `text` is no time from 1970 to 3000.
    """
    seconds = parse_time(text) if len(text) <= 64 else None
    if seconds is None or not EARLIEST <= seconds <= LATEST:
        raise ValueError(f"expected a time in RFC 3339 from 1970 to 3000, found {shorten(text)}")
    return seconds


def parse_commit_names(text: str) -> tuple[str, ...]:
    """Parse a JSON array with names of commits below the checkpoint root.

    Raises:
        ValueError: `text` is no array of strings, or too long.
    """
    value = parse_json(text)
    if not isinstance(value, list) or len(value) > MAX_RELEASED or not all(isinstance(name, str) for name in value):
        raise ValueError(f"expected a JSON array of at most {MAX_RELEASED} names, found {shorten(text)}")
    return tuple(value)


class Refused(NamedTuple):
    """What the resharder would refuse of an attempt's commits.

    Attributes:
        message: empty for nothing.
        to_allow: names that make them convertible, for `spec.checkpoint.allowedGlobals`; empty if that is not enough.
    """

    message: str
    to_allow: tuple[str, ...]


def parse_refused(text: str) -> Refused:
    """Parse what rank 0 has found in its first commit.

    Raises:
        ValueError: `text` is not an object with a message and names.
    """
    value = parse_json(text)
    if isinstance(value, dict):
        message, names = value.get("message"), value.get("toAllow")
        names = names if isinstance(names, list) else [None]
        are_names = all(isinstance(name, str) and is_global_name(name) for name in names)
        if isinstance(message, str) and are_names and len(names) <= MAX_ALLOWED_GLOBALS:
            return Refused(sentence(message, TEXT_BYTES), tuple(names))
    raise ValueError(f"expected a message and toAllow, names of classes, found {shorten(text)}")


def parse_phase(text: str) -> str:
    """Check that `text` is a `TrainerPhase`, and return it.

    Raises:
        ValueError: it is not.
    """
    if text not in _PHASES:
        raise ValueError(f"expected one of {', '.join(_PHASES)}, found {shorten(text)}")
    return text


def parse_commit(text: str) -> CommitRef:
    """Parse a commit and check its topology; `find_commit_problem` checks its location.

    Raises:
        ValueError: a field is missing or invalid.
    """
    commit = CommitRef.from_json(text)
    try:
        Topology.from_dict(commit.topology)
    except TopologyError as error:
        raise ValueError(f"topology: {error}") from error
    return commit


def find_commit_problem(commit: CommitRef, *, root: str, attempt: int) -> str:
    """Return what is wrong with the location of a commit of `attempt`, or an empty string.

    A trainer writes only below the folder of its own attempt in the job's checkpoint root. Reshard pods and all later
    attempts read the commits that pass this check.
    """
    if commit.attempt != attempt:
        return f"attempt: expected {attempt}, that of the Lease, found {commit.attempt}"
    folder = f"{root}/a{attempt}/"
    if not commit.uri.startswith(folder) or not COMMIT_FOLDER.fullmatch(commit.uri, len(folder)):
        return f"uri: expected {folder}step-..., found {shorten(commit.uri)}"
    return ""


def find_path_problem(path: str, root: str) -> str:
    """Return why `path` is neither `root` nor a folder below it, or an empty string if it is."""
    is_inside = path == root or path.startswith(f"{root}/")
    if not is_inside or len(path) > MAX_URI or ".." in path.split("/"):
        return f"expected {root} or a folder below it, found {shorten(path)}"
    return ""


def parse_or_none(read: Callable[[str], _T], text: str) -> _T | None:
    """Parse `text` with `read`; return None if it is empty or invalid."""
    if not text:
        return None
    try:
        return read(text)
    except ValueError:
        return None


def find_problems(annotations: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return the path of each invalid annotation of a Lease, with what was expected and found."""
    problems: list[tuple[str, str]] = []
    for key, read in _READERS.items():
        text = annotations.get(key)
        if not text:
            continue
        try:
            read(text)
        except ValueError as error:
            problems.append((f"annotation {key}", sentence(str(error), TEXT_BYTES)))
    return problems


_PHASES = tuple(item.value for item in TrainerPhase)
_READERS: Mapping[str, Callable[[str], Any]] = {
    LeaseKey.PHASE: parse_phase,
    LeaseKey.STEP: parse_count,
    LeaseKey.SAMPLES: parse_count,
    LeaseKey.LOSS: parse_loss,
    LeaseKey.FIRST_STEP_TIME: parse_timestamp,
    LeaseKey.STEP_TIME: parse_timestamp,
    LeaseKey.COMMIT: parse_commit,
    LeaseKey.LOADER: VirtualLoader.from_json,
    LeaseKey.REFUSED: parse_refused,
    LeaseKey.REMOVED: parse_commit_names,
}
