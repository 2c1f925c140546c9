"""Registry of checkpoint formats. Each says by itself whether a folder is its own."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from pathlib import Path

from reshard.commits.commit import Commit
from reshard.errors import NotACheckpointError, UnsupportedError, UsageError
from reshard.formats.base import Format
from reshard.tensors.layout import Index

TARGET_FORMATS = ("universal", "deepspeed", "dcp", "megatron", "safetensors")
"""Names of the formats that are read and written."""

FORMATS = (*TARGET_FORMATS, "pytorch")
"""Names, in the order in which they are asked about a folder; each is a package here, imported when it is needed."""

WEIGHT_FORMATS = ("safetensors", "pytorch")
"""Names of the formats that hold weights alone, and that trainers write beside the state of a training."""


def known_formats() -> str:
    """Their names, for people."""
    return ", ".join(FORMATS)


def known_target_formats() -> str:
    """Names of the formats that can be written, for people."""
    return ", ".join(TARGET_FORMATS)


def format_of(name: str) -> Format:
    """Return the format called `name`.

    Raises:
        UnsupportedError: this version does not know it.
    """
    if name not in FORMATS:
        raise UnsupportedError(f"format {name!r}: this version knows {known_formats()}")
    found: Format = importlib.import_module(f"reshard.formats.{name}").FORMAT
    return found


def recognise(path: Path) -> Iterator[tuple[str, str | None]]:
    """Name of each format, and why it says that a folder is not its own, or None."""
    for name in FORMATS:
        yield name, format_of(name).sniff(path)


def read_checkpoint(
    path: Path, commit: Commit | None, patterns: Path | None = None, ds_config: Path | None = None
) -> Index:
    """Index the checkpoint in folder `path`, whatever its format.

    Args:
        path: folder of one checkpoint.
        commit: its commit marker, if it has one.
        patterns: file that says how tensor parallelism cut the checkpoint; only formats that take patterns are tried.
        ds_config: DeepSpeed's configuration of the run that saved an elastic checkpoint; only formats that take it are
            tried.

    Raises:
        UsageError: a file cannot be read, or no format that takes it recognises the folder.
        NotACheckpointError: no format recognises it; says why each said no.
        SourceError: recognised, but damaged.
        UnsupportedError: recognised, but not read by this version.

    >>> read_checkpoint(Path("ckpt/global_step2"), None).format
    'deepspeed'
    """
    if patterns is not None or ds_config is not None:
        return _read_with_files(path, commit, patterns, ds_config)
    reasons = []
    for name, reason in recognise(path):
        if reason is None:
            return format_of(name).read(path, commit)
        reasons.append(f"{name}: {reason}")
    raise NotACheckpointError("no known checkpoint format", path=str(path), problems=reasons)


def _read_with_files(path: Path, commit: Commit | None, patterns: Path | None, ds_config: Path | None) -> Index:
    reason: str | None = None
    for candidate in map(format_of, FORMATS):
        if (patterns and not candidate.takes_patterns) or (ds_config and not candidate.takes_ds_config):
            continue
        reason = candidate.sniff(path)
        if reason is None:
            return candidate.read(path, commit, patterns, ds_config)
    what = "patterns are for DeepSpeed's" if ds_config is None else "--ds-config is for DeepSpeed's native"
    raise UsageError(f"{what} checkpoints: {reason}", path=str(path))
