"""Where a job starts: `spec.checkpoint.path`, `startFrom`, `startOptions` and the word in `resumeFrom`."""

from __future__ import annotations

import dataclasses
import math
import posixpath
from typing import Annotated, Final

from pydantic import AfterValidator, Field, Strict

from elastic_operator.api.schema_types import not_expected

_OTHER_CHARACTERS = frozenset("_.=+@,-")


def find_path_problem(path: str) -> str | None:
    """Return why `path` is no valid relative path inside the claim, or None."""
    parts = path.split("/")
    if path.startswith("/") or ".." in parts:
        return "expected a place inside the claim, relative and without '..'"
    if path and not all(part and all(_is_permitted(character) for character in part) for part in parts):
        return "expected letters, digits and _ . = + @ , - between single '/', with none at its end"
    return None


def normalize_path(path: str) -> str:
    """Remove `.` and doubled slashes from a path inside the claim, as the trainer and `reshard` do."""
    return "" if posixpath.normpath(path or ".") == "." else posixpath.normpath(path)


def _check_path(path: str) -> str:
    if problem := find_path_problem(path):
        raise not_expected(problem.removeprefix("expected "))
    return path


CheckedPath = Annotated[str, Strict(), Field(max_length=512), AfterValidator(_check_path)]
"""A path inside the claim; empty for the claim's root, or for none."""

BEGINNING: Final = "Beginning"
"""Value of `spec.checkpoint.resumeFrom`: begin as a job without commits does."""

RelativePath = Annotated[CheckedPath, AfterValidator(normalize_path)]


def _is_permitted(character: str) -> bool:
    return (character.isascii() and character.isalnum()) or character in _OTHER_CHARACTERS


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StartOptions:
    """`spec.checkpoint.startOptions`."""

    patterns: CheckedPath = ""
    """YAML file with the tensor parallel layout of a DeepSpeed checkpoint that does not record it: --patterns. Default
    empty.
    """
    names: CheckedPath = ""
    """YAML file that maps the checkpoint's tensor names to the model's: --names. Default empty."""
    like: CheckedPath = ""
    """Folder of a DeepSpeed checkpoint of the same model, as template for a checkpoint of another format: --like.
    Default empty.
    """


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """A job that is about to start from a folder.

    Attributes:
        job: name of that job.
        claim: the claim that holds the folder.
        folder: path of the folder inside the claim.
        reads_after: from this time on a reshard pod may read the folder; infinity if none can before the status of the
            job changes.
    """

    job: str
    claim: str
    folder: str
    reads_after: float = math.inf
