"""Megatron-Core distributed checkpoints (`torch_dist`). Written against Megatron-Core 0.16.1.

What is read, written and refused: docs/dcp-format.md.
"""

from __future__ import annotations

from pathlib import Path

from reshard.commits.commit import Commit
from reshard.formats.base import Request, refuse_options
from reshard.formats.dcp import understood_as_torch
from reshard.formats.dcp.tables import CONFIG_FILE, read_backend
from reshard.formats.megatron.names import NAME
from reshard.formats.megatron.reader import read_index
from reshard.formats.megatron.writer import lay_out
from reshard.tensors.layout import Index, TargetLayout


class MegatronFormat:
    """`reshard.formats.base.Format` for Megatron-Core checkpoints."""

    name = NAME
    takes_patterns = False
    takes_ds_config = False
    keeps_zero_stage = False

    def sniff(self, path: Path) -> str | None:
        """Return why `path` is not a Megatron-Core checkpoint, or None if it is one."""
        if not path.is_dir():
            return "not a folder"
        if read_backend(path) is None:
            return f"no {CONFIG_FILE} with a sharded_backend (name the folder iter_*, not its parent)"
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
        request.topology.refuse_partitioned_pipeline()
        with understood_as_torch(index.root):
            return lay_out(index, request)


FORMAT = MegatronFormat()
