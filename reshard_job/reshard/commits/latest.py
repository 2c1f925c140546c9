"""The file beside a checkpoint that names it to the framework, which looks there for the one to load.

Sources: `DeepSpeedEngine.load_checkpoint` (deepspeed/runtime/engine.py, 0.19.8), where no tag is given: the file's
text, stripped, is the name of the folder beside it. `read_metadata` and `get_checkpoint_name` (megatron/training/
checkpointing.py of Megatron-LM with Megatron-Core 0.16.1): the text is an iteration above 0, whose folder is
`iter_<iteration, at least 7 digits>`, or `release`, whose folder has that name.
"""

from __future__ import annotations

import contextlib
import re
import stat
from collections.abc import Iterator
from pathlib import Path

from reshard.errors import NotACheckpointError, TargetError, UsageError
from reshard.storage.durable import replace_file
from reshard.storage.files import open_file

_MEGATRON = "megatron"
FILES = {"deepspeed": "latest", "universal": "latest_universal", _MEGATRON: "latest_checkpointed_iteration.txt"}
"""Format to name of the file."""

_ITERATION = re.compile(r"^iter_(\d{7,})$", re.ASCII)
_RELEASE = "release"
_MOST_BYTES = 4096


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
    """What the file says for a folder of that name; None where Megatron-LM does not look for such a folder."""
    match = _ITERATION.match(name)
    if match is None:
        return name if name == _RELEASE else None
    iteration = int(match[1])
    return str(iteration) if iteration and name == f"iter_{iteration:07d}" else None


def named_in(folder: Path) -> Iterator[str]:
    """Names that the files in `folder` give, whether or not there are such folders.

    Raises:
        NotACheckpointError: such a file is a link that leads out of the folder.
    """
    for target_format, file in FILES.items():
        path = folder / file
        if path.is_file() and path.stat().st_size < _MOST_BYTES:
            with open_file(_file_of(path)) as content:
                text = content.read(_MOST_BYTES, 0).decode("utf-8", "replace").strip()
            if target_format != _MEGATRON:
                yield text
            elif text == _RELEASE or (text.isascii() and text.isdigit()):
                yield text if text == _RELEASE else f"iter_{text:0>7}"


def _file_of(path: Path) -> Path:
    """Return the file that holds the text: that of a link outside of the folder could be any, and would be told."""
    if not path.is_symlink():
        return path
    found = path.resolve()
    if found.parent != path.parent.resolve():
        raise NotACheckpointError(
            "is a link that leads out of its folder, expected the file that names a checkpoint",
            path=str(path),
            hint="copy what it links to into its place: cp --remove-destination",
        )
    return found


def check_format(target_format: str) -> None:
    """Refuse formats that no such file belongs to.

    Raises:
        UsageError: it is one of those.
    """
    if target_format not in FILES:
        raise UsageError(
            f"--latest: nobody looks for a file that names a checkpoint of the format {target_format}",
            hint=f"leave it out; there is one for the formats {', '.join(sorted(FILES))}",
        )


def point(path: Path, target: Path) -> None:
    """Let the file name `target`; who reads it meanwhile finds the old name or the new one.

    Raises:
        TargetError: it cannot be written; the target itself is published.
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
