"""Selects and removes old commits. The selection is pure; other functions read and remove folders.

In a cluster the operator decides which commits are removed, because only the operator knows which commits are still
referred to. The trainer removes only commits that the operator has released (`remove_released`). Without a cluster
`prune` keeps the newest commits.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import shutil
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

from reshard.commits.commit import VIRTUAL, read_commit
from reshard.contract import COMMIT_FILE, COMMIT_NAME, MAX_RELEASED
from reshard.errors import SourceError

_log = logging.getLogger(__name__)
_ATTEMPT = re.compile(r"^a(\d+)$")
_MAX_RELEASED_CHARACTERS = 8192


def find_superseded(
    commits: Sequence[tuple[int, int, Path]],
    *,
    attempt: int,
    keep: int,
    protected: Collection[Path],
    refers: Mapping[Path, Path] | None = None,
) -> list[Path]:
    """Return the commits to remove.

    Args:
        commits: (attempt, step, folder) of every commit below the root.
        attempt: the current attempt; commits of later attempts stay.
        keep: number of newest commits that stay.
        protected: folders that stay in any case (the one from which this attempt resumed).
        refers: folder with the bytes of each virtual commit; it stays as long as the virtual commit.
    """
    refers = refers or {}
    own = sorted((item for item in commits if item[0] <= attempt), reverse=True)
    doomed = [folder for _, _, folder in own[keep:] if folder not in protected]
    stay = {folder for _, _, folder in commits if folder not in doomed}
    needed = find_sources(stay | set(protected), refers)
    return [folder for folder in doomed if folder not in needed]


def find_sources(folders: Collection[Path], refers: Mapping[Path, Path]) -> set[Path]:
    """Return the folders that `folders` refer to, directly or through other virtual commits."""
    sources: set[Path] = set()
    todo = list(folders)
    while todo:
        source = refers.get(todo.pop())
        if source is not None and source not in sources:
            sources.add(source)
            todo.append(source)
    return sources


def find_references(folders: Collection[Path]) -> dict[Path, Path]:
    """Return each virtual commit that is in `folders`, or that one of them refers to, with the folder of its bytes.

    A source folder that is also in `folders` is returned with the same path as there.
    """
    known = {folder.resolve(): folder for folder in folders}
    references: dict[Path, Path] = {}
    todo = list(folders)
    while todo:
        folder = todo.pop()
        with contextlib.suppress(SourceError):
            commit = read_commit(folder)
            if commit.format == VIRTUAL and commit.source and folder not in references:
                source = Path(commit.source)
                with contextlib.suppress(OSError, RuntimeError):  # links may form a cycle
                    source = known.get(source.resolve(), source)
                references[folder] = source
                todo.append(references[folder])
    return references


def find_commits(root: Path) -> list[tuple[int, int, Path]]:
    """Return (attempt, step, folder) of every readable commit below `root`."""
    commits = []
    for marker in root.glob(f"a*/step-*/{COMMIT_FILE}"):
        match = _ATTEMPT.match(marker.parents[1].name)
        with contextlib.suppress(SourceError):
            if match:
                commits.append((int(match[1]), read_commit(marker.parent).step, marker.parent))
    return commits


def prune(root: Path, *, attempt: int, keep: int, protected: Collection[Path]) -> None:
    """Remove superseded commits of a training without a cluster; commits that a job owns stay."""
    commits = [item for item in find_commits(root) if not _owner(item[2])]
    refers = find_references({folder for _, _, folder in commits} | set(protected))
    for folder in find_superseded(commits, attempt=attempt, keep=keep, protected=protected, refers=refers):
        remove_commit(folder)


def read_released(text: str) -> tuple[str, ...]:
    """Parse the annotation LeaseKey.RELEASED: names of commits relative to the root; return none if it is invalid."""
    if not text or len(text) > _MAX_RELEASED_CHARACTERS:
        return ()
    try:
        names = json.loads(text)
    except (ValueError, RecursionError):
        names = None
    valid = isinstance(names, list) and len(names) <= MAX_RELEASED
    if not valid or not all(isinstance(name, str) and COMMIT_NAME.fullmatch(name) for name in names):
        _log.warning("the operator's list of released commits is ignored: %.200r", text)
        return ()
    return tuple(names)


def remove_released(
    root: Path, names: Sequence[str], *, owner: str, keep: int, protected: Collection[Path]
) -> tuple[str, ...]:
    """Remove commits that the operator has released; return the names of those that no longer exist.

    Args:
        root: folder of all attempts' checkpoints.
        names: released commits, relative to `root`.
        owner: UID of the job; commits of other owners stay.
        keep: number of the job's newest commits that stay even if they were released.
        protected: folders that stay in any case (the one from which this attempt resumed).
    """
    commits = sorted(find_commits(root), reverse=True)
    own = [folder for _, _, folder in commits if _owner(folder) in ("", owner)]
    doomed = {root / name for name in names} - set(own[:keep]) - set(protected)
    refers = find_references({folder for _, _, folder in commits} | set(protected))
    stay = {folder for _, _, folder in commits if folder not in doomed} | set(protected)
    for folder in sorted(doomed - find_sources(stay, refers)):
        # A folder without COMMIT.json is left over from an interrupted removal.
        if folder in own or (folder.is_dir() and not os.path.lexists(folder / COMMIT_FILE)):
            remove_commit(folder)
    return tuple(name for name in names if not os.path.lexists(root / name))


def remove_commit(folder: Path) -> None:
    """Remove a commit; log a failure. COMMIT.json is removed first, so that a partly removed folder is no commit."""
    try:
        if folder.is_symlink() or folder.parent.is_symlink():
            raise OSError("it is reached through a symbolic link, which may lead anywhere")
        (folder / COMMIT_FILE).unlink(missing_ok=True)
        shutil.rmtree(folder)
    except OSError as error:
        _log.warning("cannot remove old commit %s: %s", folder, error)


def _owner(folder: Path) -> str | None:
    """Return the UID of the job that wrote a commit, empty if unknown; None if the commit cannot be read."""
    with contextlib.suppress(SourceError):
        return read_commit(folder).owner
    return None
