"""The file beside a checkpoint that names it to DeepSpeed, which reads it where it is given no tag.

Source: `DeepSpeedEngine.load_checkpoint` (deepspeed/runtime/engine.py, 0.19.8): the file's text, stripped, is the name
of the folder beside it.
"""

from __future__ import annotations

import contextlib
import stat
from pathlib import Path

from reshard.commit import replace_file
from reshard.errors import TargetError, UsageError

FILES = {"deepspeed": "latest", "universal": "latest_universal"}
"""Format to name of the file."""


def latest_file(target: Path, target_format: str) -> Path:
    """The file that shall name `target`, which need not be there yet.

    Args:
        target: folder of the checkpoint.
        target_format: name of its format.

    Raises:
        UsageError: nobody looks for such a file for that format, or the folder's name cannot stand in it.
        TargetError: something else than a file has its name.
    """
    check_format(target_format)
    path = target.parent / FILES[target_format]
    name = target.name
    if path == target:
        raise UsageError(f"--latest: the file {name} would be the target itself", hint="give the target another name")
    if not name.isprintable() or name != name.strip():
        raise UsageError(
            f"--latest: DeepSpeed would not read the name {name!a:.100} back: it strips spaces and decodes text",
            hint="give the target another name",
        )
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        if not stat.S_ISREG(path.lstat().st_mode):
            raise TargetError("is a folder or a link, expected the file that names a checkpoint", path=str(path))
    return path


def check_format(target_format: str) -> None:
    """Refuse formats that no such file belongs to.

    Raises:
        UsageError: it is one of those.
    """
    if target_format not in FILES:
        raise UsageError(
            f"--latest: nobody looks for a file that names a checkpoint of the format {target_format}",
            hint=f"leave it out; there is one for the formats {' and '.join(sorted(FILES))}",
        )


def point(path: Path, target: Path) -> None:
    """Let the file name `target`; who reads it meanwhile finds the old name or the new one.

    Raises:
        TargetError: it cannot be written; the target itself is published.
    """
    try:
        replace_file(path, target.name.encode())
    except OSError as error:
        raise TargetError(
            f"cannot be written: {error.strerror or error}; {target.name} itself is published, whole and verified",
            path=str(path),
            hint="run the same command again, which only writes this file, or load with tag=",
        ) from error
