"""What a checkpoint format has to offer."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

from reshard.commit import Commit
from reshard.layout import Index, TargetLayout
from reshard.topology import Topology


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

    def layout(self, index: Index, target: Topology) -> TargetLayout:
        """Lay out the same logical tensors for `target`, in this format.

        Raises:
            UnsupportedError: a conversion that would need a guess, with the tensors that it would be about.
        """
        ...
