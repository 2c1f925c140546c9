"""Inspect a folder: find out what it is, damaged or not, and list everything that is wrong with it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

import numpy as np

from reshard.commits.commit import Commit, check_files, read_commit
from reshard.contract import COMMIT_FILE, ExitCode
from reshard.errors import ReshardError, UncommittedError, UnsafePickleError
from reshard.execution.origin import add_identities
from reshard.execution.source_checks import mismatches
from reshard.folders import describe
from reshard.formats import recognise
from reshard.formats.pt.trust import trusting
from reshard.planning.check import cover_problems
from reshard.storage.files import record_opened_files
from reshard.tensors.layout import Index


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """A problem of a folder.

    Attributes:
        kind: class of the error.
        exit_code: of that class.
        lines: first what is wrong (file or tensor, expected and found), then one line for each detail.
        hint: what to do.
    """

    kind: str
    exit_code: ExitCode
    lines: tuple[str, ...]
    hint: str = ""

    @property
    def message(self) -> str:
        """All lines as one text."""
        return "\n".join(self.lines)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Inspection:
    """Result of the inspection of a folder.

    Attributes:
        path: the folder.
        commit: its marker, or None if there is none that can be read.
        committed: `absent`, `intact` (all files have their sizes) or `damaged`.
        format: name of the format; empty if none is recognised.
        index: the tensors, or None if the files cannot be read.
        num_files: number of files in the folder, without the marker.
        file_bytes: their size.
        problems: everything that is wrong; empty for a good checkpoint.
        notes: facts that are worth knowing and no problem.
    """

    path: Path
    commit: Commit | None
    committed: str
    format: str
    index: Index | None
    num_files: int
    file_bytes: int
    problems: tuple[Problem, ...]
    notes: tuple[str, ...]

    @property
    def exit_code(self) -> ExitCode:
        """Of the first problem."""
        return self.problems[0].exit_code if self.problems else ExitCode.OK


def inspect(path: Path, read: Callable[[Commit | None], Index], *, has_patterns: bool = False) -> Inspection:
    """Inspect a folder; read only its metadata. What is wrong with it is returned, not raised.

    Args:
        path: the folder.
        read: indexes it, given its marker.
        has_patterns: `read` takes from a file of patterns how tensors are cut.
    """
    problems: list[Problem] = []
    notes: list[str] = []
    commit, committed = _commit(path, problems, notes)
    index: Index | None = None
    refused: list[UnsafePickleError] = []
    try:
        with trusting((), refused), record_opened_files() as opened:
            index = add_identities(read(commit), opened, commit)
    except ReshardError as error:
        problems.append(_problem(error))
    problems = [*map(_problem, refused), *problems]
    if index is not None:
        problems += [_problem(index.unread)] if index.unread is not None else []
        problems += [_corrupt(message) for message in _cover(index)]
        notes += [describe(index.folder)] if index.folder is not None else []
        if commit is not None:
            problems += [_corrupt(message) for message in disagreements(index, commit, has_patterns=has_patterns)]
    files = {str(item.relative_to(path)): item.stat().st_size for item in path.rglob("*") if item.is_file()}
    files.pop(COMMIT_FILE, None)
    if commit is not None:
        strays = sorted(files.keys() - {file.path for file in commit.files})
        notes += [f"{name} is no part of the commit" for name in strays[:20]]
    return Inspection(
        path=path,
        commit=commit,
        committed=committed,
        format=index.format if index else next((name for name, reason in recognise(path) if reason is None), ""),
        index=index,
        num_files=len(files),
        file_bytes=sum(files.values()),
        problems=tuple(problems),
        notes=tuple(notes),
    )


def disagreements(index: Index, commit: Commit, *, has_patterns: bool = False) -> list[str]:
    """Return where the marker contradicts the files; the arguments are those of `inspect`."""
    # Few formats state cp.
    known = commit.topology if index.topology.cp > 1 else dataclasses.replace(commit.topology, cp=1)
    pairs = [
        ("step", commit.step, index.step),
        ("topology", str(known), str(index.topology)),
    ]
    lines = [
        f"{COMMIT_FILE} says {what} {stated}, the files say {real}" for what, stated, real in pairs if stated != real
    ]
    return lines + mismatches(index, commit, has_patterns=has_patterns)


def _commit(path: Path, problems: list[Problem], notes: list[str]) -> tuple[Commit | None, str]:
    try:
        commit = read_commit(path)
    except UncommittedError:
        notes.append(f"no {COMMIT_FILE}: whether files are missing or cut short is known from the files alone")
        return None, "absent"
    except ReshardError as error:
        problems.append(_problem(error))
        return None, "damaged"
    try:
        check_files(path, commit)
    except ReshardError as error:
        problems += [_corrupt(message, error.hint) for message in error.problems] or [_problem(error)]
        return commit, "damaged"
    return commit, "intact"


def _cover(index: Index) -> list[str]:
    """Return a line for each copy of a tensor that is not complete."""
    rows = np.arange(len(index.shards))
    present = {index.tensors[at].key for at in np.unique(index.shards.tensor).tolist()}
    absent = [tensor for tensor in index.tensors if tensor.key not in present and tensor.num_elements]
    lines = [f"{tensor.key}: no file holds it" for tensor in absent[:20]]
    return lines + cover_problems(index.tensors, index.shards, rows, side="source")[:20]


def _problem(error: ReshardError) -> Problem:
    where = f"{error.path}: " if error.path else ""
    lines = (f"{where}{error.message}", *(f"  - {problem}" for problem in error.problems))
    return Problem(kind=type(error).__name__, exit_code=error.exit_code, lines=lines, hint=error.hint)


def _corrupt(message: str, hint: str = "") -> Problem:
    return Problem(kind="CorruptSourceError", exit_code=ExitCode.SOURCE_INVALID, lines=(message,), hint=hint)
