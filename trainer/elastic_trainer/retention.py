"""Which old commits may go. Pure, but for reading and removing folders at the edge."""

from __future__ import annotations

import contextlib
import logging
import re
import shutil
from collections.abc import Collection, Sequence
from pathlib import Path

from reshard.commit import read_commit
from reshard.contract import COMMIT_FILE
from reshard.errors import SourceError

_log = logging.getLogger(__name__)
_ATTEMPT = re.compile(r"^a(\d+)$")


def superseded(
    commits: Sequence[tuple[int, int, Path]], *, attempt: int, keep: int, protected: Collection[Path]
) -> list[Path]:
    """Commits to remove.

    Args:
        commits: (attempt, step, folder) of every commit under the root.
        attempt: the attempt that asks; it never touches what a later one wrote.
        keep: newest commits that stay.
        protected: folders that stay in any case (the one that this attempt was resumed from).
    """
    own = sorted((item for item in commits if item[0] <= attempt), reverse=True)
    return [folder for _, _, folder in own[keep:] if folder not in protected]


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
    for folder in superseded(find_commits(root), attempt=attempt, keep=keep, protected=protected):
        try:
            (folder / COMMIT_FILE).unlink(missing_ok=True)
            shutil.rmtree(folder)
        except OSError as error:
            _log.warning("cannot remove old commit %s: %s", folder, error)
