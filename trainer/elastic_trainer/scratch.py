"""A folder of this user alone in a folder that other users may write to, such as /dev/shm."""

from __future__ import annotations

import os
from pathlib import Path

from reshard.errors import TargetError


def private_folder(scratch: Path, *, variable: str) -> Path:
    """Create a folder that only this user can access; other users may write to the scratch folder.

    Args:
        scratch: folder in which to make it.
        variable: environment variable that names `scratch`, for the error.

    Raises:
        TargetError: the folder cannot be created, or another user has access to it.
    """
    folder = scratch / f"elastic-trainer-{os.getuid()}"
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        status = folder.lstat()
    except OSError as error:
        raise TargetError(
            f"cannot be made: {error.strerror}", path=str(folder), hint=f"set {variable} to a folder on this node"
        ) from error
    if not folder.is_dir() or folder.is_symlink() or status.st_uid != os.getuid() or status.st_mode & 0o077:
        raise TargetError("is not a folder of this user alone", path=str(folder), hint=f"remove it, or set {variable}")
    return folder
