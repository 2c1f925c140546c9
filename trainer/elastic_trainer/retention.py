"""Which old commits may go. Pure, but for reading and removing folders at the edge.

In a cluster the operator decides: only it knows what statuses, conversions and starts refer to. This process removes
what the operator has released, and nothing else (`remove_released`). Without a cluster there is no such party, and
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
    stay = {folder for _, _, folder in commits if folder not in doomed}
    needed = sources_of(stay | set(protected), refers)
    return [folder for folder in doomed if folder not in needed]


def sources_of(folders: Collection[Path], refers: Mapping[Path, Path]) -> set[Path]:
    """Return the folders with the bytes of virtual commits, which may be virtual commits of others in turn."""
    found: set[Path] = set()
    todo = list(folders)
    while todo:
        source = refers.get(todo.pop())
        if source is not None and source not in found:
            found.add(source)
            todo.append(source)
    return found


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
                with contextlib.suppress(OSError, RuntimeError):  # a circle of links
                    source = known.get(source.resolve(), source)
                found[folder] = source
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
    """Remove superseded commits of a training without a cluster; those that a job owns stay."""
    commits = [item for item in find_commits(root) if not _owner(item[2])]
    refers = references({folder for _, _, folder in commits} | set(protected))
    for folder in superseded(commits, attempt=attempt, keep=keep, protected=protected, refers=refers):
        remove_commit(folder)


def read_released(text: str) -> tuple[str, ...]:
    """Read the annotation LeaseKey.RELEASED: names of commits, relative to the root; none where it makes no sense."""
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
    """Remove commits that the operator has released; return the names that are not there any more.

    Args:
        root: folder of all attempts' checkpoints.
        names: released commits, relative to `root`.
        owner: UID of the job; a commit of another owner stays.
        keep: so many of the job's newest commits stay, whatever was released.
        protected: folders that stay in any case (the one that this attempt was resumed from).
    """
    commits = sorted(find_commits(root), reverse=True)
    own = [folder for _, _, folder in commits if _owner(folder) in ("", owner)]
    doomed = {root / name for name in names} - set(own[:keep]) - set(protected)
    refers = references({folder for _, _, folder in commits} | set(protected))
    stay = {folder for _, _, folder in commits if folder not in doomed} | set(protected)
    for folder in sorted(doomed - sources_of(stay, refers)):
        # A folder without a marker is the rest of a commit whose removal was interrupted.
        if folder in own or (folder.is_dir() and not os.path.lexists(folder / COMMIT_FILE)):
            remove_commit(folder)
    return tuple(name for name in names if not os.path.lexists(root / name))


def remove_commit(folder: Path) -> None:
    """Remove a commit: the marker first, so that a half-removed folder is no commit. A failure is logged."""
    try:
        if folder.is_symlink() or folder.parent.is_symlink():
            raise OSError("it is reached through a symbolic link, which may lead anywhere")
        (folder / COMMIT_FILE).unlink(missing_ok=True)
        shutil.rmtree(folder)
    except OSError as error:
        _log.warning("cannot remove old commit %s: %s", folder, error)


def _owner(folder: Path) -> str | None:
    """UID of the job that wrote a commit, empty if it does not say; None where the commit cannot be read."""
    with contextlib.suppress(SourceError):
        return read_commit(folder).owner
    return None
