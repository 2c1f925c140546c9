"""torch DCP checkpoints (`torch.distributed.checkpoint`, FileSystemWriter). Written against torch 2.13.

What is read, written and refused: docs/dcp-format.md.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from pathlib import Path

from reshard.commits.commit import Commit
from reshard.formats.base import Request, refuse_options, understood
from reshard.formats.dcp.metadata import METADATA_FILE
from reshard.formats.dcp.reader import NAME, read_index
from reshard.formats.dcp.tables import CONFIG_FILE, read_backend
from reshard.formats.dcp.writing.writer import lay_out
from reshard.tensors.layout import Index, TargetLayout


def understood_as_torch(folder: Path) -> contextlib.AbstractContextManager[None]:
    """Report errors of the block as those of a checkpoint that torch saved, see `base.understood`."""
    return understood(folder, "torch", instead="use an earlier checkpoint", also=(OverflowError, OSError))


def read_parts(path: Path, parts: Sequence[str], commit: Commit | None) -> Index:
    """Index a checkpoint that several DCP folders below `path` hold together; file names begin with those of `parts`.

    Raises:
        ReshardError: see `reshard.formats.base.Format.read`.
    """
    with understood_as_torch(path):
        return read_index(path, commit, parts)


def lay_out_parts(index: Index, request: Request, parts: Sequence[str]) -> TargetLayout:
    """Lay out a checkpoint that `read_parts` has read in folders of the same names, see `writing.parts`.

    Raises:
        ReshardError: see `reshard.formats.base.Format.layout`.
    """
    from reshard.formats.dcp.writing import parts as several  # only folders of several parts pay for this import

    refuse_options(NAME, request, like=False)
    return several.lay_out_parts(index, request, parts)


class DcpFormat:
    """`reshard.formats.base.Format` for DCP checkpoints."""

    name = NAME
    takes_patterns = False
    takes_ds_config = False
    keeps_zero_stage = False

    def sniff(self, path: Path) -> str | None:
        """Return why `path` is not a DCP checkpoint, or None if it is one."""
        if not path.is_dir():
            return "not a folder"
        if not (path / METADATA_FILE).is_file():
            return "no file .metadata (it is written last: a save that did not end has none)"
        if read_backend(path) is not None:
            return f"has the {CONFIG_FILE} of Megatron-Core"
        return None

    def read(
        self, path: Path, commit: Commit | None, patterns: Path | None = None, ds_config: Path | None = None
    ) -> Index:
        """Index the checkpoint, see `read_index`."""
        with understood_as_torch(path):
            return read_index(path, commit)

    def layout(self, index: Index, request: Request) -> TargetLayout:
        """Lay out a checkpoint for a topology, see `lay_out`."""
        refuse_options(NAME, request, weight_dtype=True)
        return lay_out(index, request)


FORMAT = DcpFormat()
