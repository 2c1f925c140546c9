"""Megatron-Core distributed checkpoints (`torch_dist`), read only. Written against Megatron-Core 0.16.1.

What is read and refused: docs/dcp-format.md.
"""

from __future__ import annotations

from pathlib import Path

from reshard.commit import Commit
from reshard.errors import UnsupportedError
from reshard.formats.base import Request
from reshard.formats.dcp import understood
from reshard.formats.dcp.tables import CONFIG_FILE, backend_of
from reshard.formats.megatron.reader import NAME, read_index
from reshard.layout import Index, TargetLayout


class MegatronFormat:
    """`reshard.formats.base.Format` for Megatron-Core checkpoints."""

    name = NAME

    def sniff(self, path: Path) -> str | None:
        """Why `path` is not a Megatron-Core checkpoint, or None if it is."""
        if not path.is_dir():
            return "not a folder"
        if backend_of(path) is None:
            return f"no {CONFIG_FILE} with a sharded_backend (name the folder iter_*, not its parent)"
        return None

    def read(self, path: Path, commit: Commit | None) -> Index:
        """Index the checkpoint, see `read_index`."""
        with understood(path):
            return read_index(path, commit)

    def layout(self, index: Index, request: Request) -> TargetLayout:
        """Not written.

        Raises:
            UnsupportedError: always.
        """
        raise UnsupportedError(
            f"{request.topology}: Megatron-Core checkpoints are read, not written",
            path=str(index.root),
            hint="choose --format dcp, deepspeed or safetensors; Megatron-Core itself loads at another topology",
        )


FORMAT = MegatronFormat()
