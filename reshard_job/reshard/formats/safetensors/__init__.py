"""Safetensors: weights by name in one file or several, as Hugging Face's libraries read and write them.

What is read, written and refused: docs/safetensors.md.
"""

from __future__ import annotations

from pathlib import Path

from reshard.commits.commit import Commit
from reshard.formats.base import Request, refuse_options
from reshard.formats.safetensors.file_names import NAME, list_names
from reshard.tensors.layout import Index, TargetLayout


class SafetensorsFormat:
    """`reshard.formats.base.Format` for safetensors files."""

    name = NAME
    takes_patterns = False
    takes_ds_config = False
    keeps_zero_stage = False

    def sniff(self, path: Path) -> str | None:
        """Return why `path` is not a safetensors checkpoint, or None if it is one."""
        if not path.is_dir():
            return "not a folder (name the folder of the files)"
        return None if list_names(path) else "no file *.safetensors"

    def read(
        self, path: Path, commit: Commit | None, patterns: Path | None = None, ds_config: Path | None = None
    ) -> Index:
        """Index the checkpoint, see `read_index`."""
        from reshard.formats.safetensors.reader import read_index  # a sniff needs no reader

        return read_index(path, commit)

    def layout(self, index: Index, request: Request) -> TargetLayout:
        """Lay out the weights of a checkpoint, see `lay_out`."""
        from reshard.formats.safetensors.writer import lay_out

        refuse_options(NAME, request, weight_dtype=True, like=False, file_bytes=True)
        return lay_out(index, request)


FORMAT = SafetensorsFormat()
