"""Lets torch.save write into the memory of the save before.

A new file in memory costs more time than the copy of its content: the kernel finds and maps every page. So the files
of a save that has been copied stay on the node as spares, and torch.save writes over the spare of the same name. The
checksums inside the files are switched off meanwhile, because the copy process computes those of the whole files.
"""

from __future__ import annotations

import contextlib
import io
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

SPARES = "spares"
"""Folder of the spares, in the node's staging folder."""

_USED = "used-torch-save"


@contextlib.contextmanager
def reuse_spares(folder: Path, spares: Path) -> Iterator[None]:
    """Redirect torch.save to spares in this context, for paths below `folder`; do nothing if torch is not loaded.

    Args:
        folder: folder that the framework writes, in the folder of a staged save.
        spares: folder with files that nobody needs any more; one of the same relative path is written over.
    """
    torch: Any = sys.modules.get("torch")
    if torch is None or not hasattr(torch, "save"):
        yield
        return
    original = torch.save

    def save(obj: Any, f: Any, *args: Any, **kwargs: Any) -> Any:
        path = Path(os.fspath(f)) if isinstance(f, str | os.PathLike) else None
        if path is None or not path.is_relative_to(folder):
            return original(obj, f, *args, **kwargs)
        mark_used(folder)
        try:
            (spares / path.relative_to(folder)).rename(path)
        except OSError:  # the first save, or a new file
            return original(obj, f, *args, **kwargs)
        with io.BufferedWriter(io.FileIO(path, "r+")) as stream:  # writes all of a large tensor, unlike FileIO
            original(obj, stream, *args, **kwargs)
            stream.flush()
            stream.raw.truncate(stream.raw.tell())
        return None

    torch.save = save
    try:
        with _without_checksums(torch):
            yield
    finally:
        torch.save = original


@contextlib.contextmanager
def _without_checksums(torch: Any) -> Iterator[None]:
    options = torch.serialization
    if not hasattr(options, "set_crc32_options"):  # torch before 2.6
        yield
        return
    before = options.get_crc32_options()
    options.set_crc32_options(False)
    try:
        yield
    finally:
        options.set_crc32_options(before)


def mark_used(folder: Path) -> None:
    """Note that torch.save has written files of a staged save, so that they are worth keeping."""
    with contextlib.suppress(OSError):
        folder.parent.parent.joinpath(_USED).touch()


def is_used(folder: Path) -> bool:
    """Return whether torch.save has written files of a staged save."""
    return folder.parent.parent.joinpath(_USED).exists()


def num_bytes(spares: Path) -> int:
    """Return the bytes of memory that spares hold."""
    return sum(path.stat().st_blocks * 512 for path in spares.rglob("*") if path.is_file())
