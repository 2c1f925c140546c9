"""ATTEMPT-<owner>.json: a marker file on the checkpoint volume that says that an attempt has started.

An attempt that cannot reach the API server does not learn there that another attempt has replaced it. Both share the
checkpoint volume, so the older attempt can see the marker of the newer one.
"""

from __future__ import annotations

import contextlib
import json
import re
import stat
from pathlib import Path

from reshard.storage.durable import make_folder, replace_file

_FOLDER = re.compile(r"a([0-9]{1,9})")
_MAX_BYTES = 4096


def announce(root: Path, attempt: int, owner: str) -> None:
    """Write the marker of this attempt; markers of other owners of the root stay.

    Args:
        root: folder of all attempts' checkpoints.
        attempt: number of this attempt.
        owner: UID of the job; empty without a cluster.

    Raises:
        OSError: the marker cannot be written.
    """
    folder = root / f"a{attempt}"
    make_folder(folder)
    content = json.dumps({"version": 1, "attempt": attempt, "owner": owner}) + "\n"
    replace_file(folder / _file_name(owner), content.encode())


def find_newest_attempt(root: Path, owner: str) -> int:
    """Return the highest attempt of `owner` that has a marker below `root`; 0 for none."""
    newest = 0
    for folder in root.glob("a*"):
        match = _FOLDER.fullmatch(folder.name)
        if match and int(match[1]) > newest and _announced_by(folder / _file_name(owner)) == owner:
            newest = int(match[1])
    return newest


def _file_name(owner: str) -> str:
    mark = re.sub(r"[^A-Za-z0-9]", "", owner)[:8]
    return f"ATTEMPT-{mark}.json" if mark else "ATTEMPT.json"


def _announced_by(path: Path) -> str | None:
    with contextlib.suppress(OSError, ValueError, RecursionError):
        status = path.lstat()
        if stat.S_ISREG(status.st_mode) and status.st_size <= _MAX_BYTES:
            value = json.loads(path.read_bytes())
            owner = value.get("owner") if isinstance(value, dict) else None
            return owner if isinstance(owner, str) else None
    return None
