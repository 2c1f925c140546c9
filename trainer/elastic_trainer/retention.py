"""Which old commits may go. Pure, but for reading and removing folders at the edge."""

from __future__ import annotations

import contextlib
import logging
import re
import shutil
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

from reshard.commit import VIRTUAL, read_commit
from reshard.contract import COMMIT_FILE
from reshard.errors import SourceError

_log = logging.getLogger(__name__)
_ATTEMPT = re.compile(r"^a(\d+)$")


def superseded(
    commits: Sequence[tuple[int, int, Path]],
    *,
    attempt: int,
    keep: int,
    protected: Collection[Path],
    refers: Mapping[Path, Path] | None = None,
) -> list[Path]:
    """Commits to remove.

    Args:
        commits: (attempt, step, folder) of every commit under the root.
        attempt: the attempt that asks; it never touches what a later one wrote.
        keep: newest commits that stay.
        protected: folders that stay in any case (the one that this attempt was resumed from).
        refers: virtual commit to the folder that holds its bytes, which stays as long as the virtual commit does.
    """
    refers = refers or {}
    own = sorted((item for item in commits if item[0] <= attempt), reverse=True)
    doomed = [folder for _, _, folder in own[keep:] if folder not in protected]
    needed: set[Path] = set()
    todo = [folder for _, _, folder in commits if folder not in doomed] + list(protected)
    while todo:
        source = refers.get(todo.pop())
        if source is not None and source not in needed:
            needed.add(source)
            todo.append(source)
    return [folder for folder in doomed if folder not in needed]


def references(folders: Collection[Path]) -> dict[Path, Path]:
    """Virtual commits among `folders`, and all that they lead to, with the folder that each refers to.

    A source is named by the path in `folders` that is the same folder, if there is one.
    """
    known = {folder.resolve(): folder for folder in folders}
    found: dict[Path, Path] = {}
    todo = list(folders)
    while todo:
        folder = todo.pop()
        with contextlib.suppress(SourceError):
            commit = read_commit(folder)
            if commit.format == VIRTUAL and commit.source and folder not in found:
                source = Path(commit.source)
                found[folder] = known.get(source.resolve(), source)
                todo.append(found[folder])
    return found


def find_commits(root: Path) -> list[tuple[int, int, Path]]:
    """(attempt, step, folder) of every readable commit under `root`."""
    found = []
    for marker in root.glob(f"a*/step-*/{COMMIT_FILE}"):
        match = _ATTEMPT.match(marker.parents[1].name)
        with contextlib.suppress(SourceError):
            if match:
                found.append((int(match[1]), read_commit(marker.parent).step, marker.parent))
    return found


def prune(root: Path, *, attempt: int, keep: int, protected: Collection[Path]) -> None:
    """Remove superseded commits: the marker first, so that a half-removed folder is no commit."""
    commits = find_commits(root)
    refers = references({folder for _, _, folder in commits} | set(protected))
    for folder in superseded(commits, attempt=attempt, keep=keep, protected=protected, refers=refers):
        try:
            (folder / COMMIT_FILE).unlink(missing_ok=True)
            shutil.rmtree(folder)
        except OSError as error:
            _log.warning("cannot remove old commit %s: %s", folder, error)
