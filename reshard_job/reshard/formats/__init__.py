"""Registry of checkpoint formats. Each says by itself whether a folder is its own."""

from __future__ import annotations

from pathlib import Path

from reshard.commit import Commit
from reshard.errors import NotACheckpointError, UnsupportedError
from reshard.formats.base import Format
from reshard.formats.deepspeed import FORMAT as DEEPSPEED
from reshard.formats.safetensors import FORMAT as SAFETENSORS
from reshard.layout import Index

FORMATS: tuple[Format, ...] = (DEEPSPEED, SAFETENSORS)


def known_formats() -> str:
    """Their names, for people."""
    return ", ".join(item.name for item in FORMATS)


def read_checkpoint(path: Path, commit: Commit | None) -> Index:
    """Index the checkpoint in folder `path`, whatever its format.

    Raises:
        NotACheckpointError: no format recognises it; says why each said no.
        SourceError: recognised, but damaged.
        UnsupportedError: recognised, but not read by this version.
    """
    reasons = []
    for candidate in FORMATS:
        reason = candidate.sniff(path)
        if reason is None:
            return candidate.read(path, commit)
        reasons.append(f"{candidate.name}: {reason}")
    raise NotACheckpointError("no known checkpoint format", path=str(path), problems=reasons)


def writer_of(name: str) -> Format:
    """The format called `name`.

    Raises:
        UnsupportedError: this version does not know it.
    """
    for candidate in FORMATS:
        if candidate.name == name:
            return candidate
    raise UnsupportedError(f"format {name!r}: this version knows {known_formats()}")
