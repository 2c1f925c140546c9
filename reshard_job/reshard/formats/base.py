"""What a checkpoint format has to offer."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Protocol

from reshard.commit import Commit
from reshard.errors import UsageError
from reshard.layout import Index, TargetLayout
from reshard.topology import Topology

DEFAULT_FILE_BYTES = 5 << 30
"""Largest file that formats make which choose the size of their files themselves."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What the target shall be.

    Attributes:
        topology: degrees of parallelism; formats that are not cut for ranks take no notice.
        weight_dtype: type of the weights in the target, or None to keep the source's.
        like: a checkpoint of the target's format and model, for what a source of another format cannot tell (files,
            scalars and settings that are not tensors); its topology does not matter.
        file_bytes: largest size of a file where the format leaves that open; None for `DEFAULT_FILE_BYTES`.
    """

    topology: Topology
    weight_dtype: str | None = None
    like: Index | None = None
    file_bytes: int | None = None


class Format(Protocol):
    """One on-disk format. Readers look at metadata only and never execute anything that a file says."""

    @property
    def name(self) -> str:
        """Name in commands and in COMMIT.json."""
        ...

    def sniff(self, path: Path) -> str | None:
        """Why `path` is not of this format, or None if it is."""
        ...

    def read(self, path: Path, commit: Commit | None) -> Index:
        """Index the checkpoint in folder `path`.

        Args:
            path: folder of one checkpoint (for DeepSpeed: of the tag).
            commit: its commit marker, if it has one.

        Raises:
            CorruptSourceError: truncated, missing or mixed files.
            UnsafePickleError: a pickle wants more than data.
            UnsupportedError: understood, but not read by this version.
        """
        ...

    def layout(self, index: Index, request: Request) -> TargetLayout:
        """Lay out the tensors of `index`, which any format may have read, in this format.

        Raises:
            UnsupportedError: a conversion that would need a guess, with the tensors that it would be about.
        """
        ...


def refuse_options(
    name: str, request: Request, *, weight_dtype: bool = False, like: bool = True, file_bytes: bool = False
) -> None:
    """Refuse what a format has no use for, rather than ignore it; what it has a use for is True.

    Raises:
        UsageError: naming the option.
    """
    if request.weight_dtype is not None and not weight_dtype:
        raise UsageError(
            f"--dtype {request.weight_dtype}: the format {name} keeps the types of the source",
            hint="leave --dtype out, or choose --format safetensors",
        )
    if request.like is not None and not like:
        raise UsageError(
            f"--like {request.like.root}: the format {name} holds nothing that a source could not tell",
            hint="leave --like out",
        )
    if request.file_bytes is not None and not file_bytes:
        raise UsageError(
            f"--file-size: the sizes of files of the format {name} follow from the topology",
            hint="leave --file-size out, or choose --format safetensors",
        )
