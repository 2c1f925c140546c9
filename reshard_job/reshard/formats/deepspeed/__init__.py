"""DeepSpeed's native checkpoints, ZeRO stages 1 to 3, with tensor and pipeline parallelism. Written against 0.19.8.

What is read, written and refused: docs/deepspeed-format.md.
"""

from __future__ import annotations

from pathlib import Path

from reshard.commit import Commit
from reshard.formats.deepspeed.reader import NAME, read_index
from reshard.formats.deepspeed.source import has_checkpoint
from reshard.formats.deepspeed.writer import lay_out
from reshard.layout import Index, TargetLayout
from reshard.topology import Topology


class DeepSpeedFormat:
    """`reshard.formats.base.Format` for native DeepSpeed checkpoints."""

    name = NAME

    def sniff(self, path: Path) -> str | None:
        """Why `path` is not a native checkpoint, or None if it is."""
        if not path.is_dir():
            return "not a folder"
        if not has_checkpoint(path):
            return "no file *mp_rank_*_model_states.pt (name the folder of the tag, not its parent)"
        return None

    def read(self, path: Path, commit: Commit | None) -> Index:
        """Index the checkpoint, see `read_index`."""
        return read_index(path, commit)

    def layout(self, index: Index, target: Topology) -> TargetLayout:
        """Lay out the checkpoint for another topology, see `lay_out`."""
        return lay_out(index, target)


FORMAT = DeepSpeedFormat()
