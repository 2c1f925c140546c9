"""The file beside checkpoints in which a framework looks for the name of the checkpoint to load.

Sources: `DeepSpeedEngine.load_checkpoint` (deepspeed/runtime/engine.py, 0.19.8) without a tag: the file's text,
stripped, is the name of the folder beside it. `read_metadata` and `get_checkpoint_name` (megatron/training/
checkpointing.py of Megatron-LM with Megatron-Core 0.16.1): the text is an iteration above 0, whose folder is
`iter_<iteration, at least 7 digits>`, or `release`, whose folder has that name.
"""

from __future__ import annotations

import contextlib
import re
import stat
from collections.abc import Iterator
from pathlib import Path

from reshard.commits.commit import Commit
from reshard.errors import NotACheckpointError, TargetError, UsageError
from reshard.storage.durable import replace_file
from reshard.storage.files import open_file

_MEGATRON = "megatron"
FILES = {"deepspeed": "latest", "universal": "latest_universal", _MEGATRON: "latest_checkpointed_iteration.txt"}
"""Format -> name of the file."""

_ITERATION = re.compile(r"^iter_(\d{7,})$", re.ASCII)
_RELEASE = "release"
_MOST_BYTES = 4096


def latest_file(target: Path, target_format: str) -> Path:
    """Return the path of the file that will name `target`; the target need not exist yet.

    Args:
        target: folder of the checkpoint.
        target_format: name of the checkpoint's format.

    Raises:
        UsageError: the format has no such file, or the framework would not read the folder's name from it.
        TargetError: a folder or a link has the file's name.
    """
    check_format(target_format)
    path = target.parent / FILES[target_format]
    name = target.name
    if path == target:
        raise UsageError(f"--latest: the file {name} would be the target itself", hint="give the target another name")
    if target_format == _MEGATRON:
        if _iteration(name) is None:
            raise UsageError(
                f"--latest: Megatron-LM would not look for a folder {name!a:.100}: {path.name} names an iteration",
                hint="name the target iter_ and the iteration (above 0) in 7 digits, for instance iter_0000100, or, for"
                " weights that no run has trained, release",
            )
    elif not name.isprintable() or name != name.strip():
        raise UsageError(
            f"--latest: DeepSpeed would not read the name {name!a:.100} back: it strips spaces and decodes text",
            hint="give the target another name",
        )
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        if not stat.S_ISREG(path.lstat().st_mode):
            raise TargetError("is a folder or a link, expected the file that names a checkpoint", path=str(path))
    return path


def _iteration(name: str) -> str | None:
    """Return the text that names a folder in Megatron-LM's file; None for a folder that Megatron-LM cannot find."""
    match = _ITERATION.match(name)
    if match is None:
        return name if name == _RELEASE else None
    iteration = int(match[1])
    return str(iteration) if iteration and name == f"iter_{iteration:07d}" else None


def read_names(folder: Path) -> Iterator[str]:
    """Yield the folder names that the files in `folder` state; the folders need not exist.

    Raises:
        NotACheckpointError: a file is a link that leads out of the folder.
    """
    yield from (name for name in (read_name(folder, target_format) for target_format in FILES) if name is not None)


def read_name(folder: Path, target_format: str) -> str | None:
    """Return the folder name that one format's file in `folder` states; None if there is no such file.

    Raises:
        NotACheckpointError: the file is a link that leads out of the folder.
    """
    path = folder / FILES[target_format]
    if not path.is_file() or path.stat().st_size >= _MOST_BYTES:
        return None
    with open_file(_resolve_link(path)) as content:
        text = content.read(_MOST_BYTES, 0).decode("utf-8", "replace").strip()
    if target_format != _MEGATRON:
        return text
    if text == _RELEASE or (text.isascii() and text.isdigit()):
        return text if text == _RELEASE else f"iter_{text:0>7}"
    return None


def _resolve_link(path: Path) -> Path:
    """Return the file that a link names; a link out of its folder is refused, because its content would be printed.

    Raises:
        NotACheckpointError: the link leads out of its folder.
    """
    if not path.is_symlink():
        return path
    file = path.resolve()
    if file.parent != path.parent.resolve():
        raise NotACheckpointError(
            "is a link that leads out of its folder, expected the file that names a checkpoint",
            path=str(path),
            hint="copy what it links to into its place: cp --remove-destination",
        )
    return file


def is_training_folder(commit: Commit) -> bool:
    """Return True if a commit is of a folder that names the checkpoint inside by itself."""
    return any(file.path in FILES.values() for file in commit.files)


def check_format(target_format: str) -> None:
    """Refuse formats whose frameworks do not look for such a file.

    Raises:
        UsageError: the format is one of them.
    """
    if target_format not in FILES:
        raise UsageError(
            f"--latest: nobody looks for a file that names a checkpoint of the format {target_format}",
            hint=f"leave it out; there is one for the formats {', '.join(sorted(FILES))}",
        )


def write_latest(path: Path, target: Path) -> None:
    """Write the name of `target` to the file atomically: a reader finds the old name or the new one.

    Raises:
        TargetError: the file cannot be written; the target itself is published.
    """
    try:
        text = _iteration(target.name) if path.name == FILES[_MEGATRON] else None
        replace_file(path, (text or target.name).encode())
    except OSError as error:
        raise TargetError(
            f"cannot be written: {error.strerror or error}; {target.name} itself is published, whole and verified",
            path=str(path),
            hint="run the same command again, which only writes this file, or name the folder itself when it is loaded",
        ) from error
