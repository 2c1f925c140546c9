"""Weights in files of torch.save, whole tensors by name: `pytorch_model.bin` and its like. Read, not written.

What is read and refused: docs/pytorch-format.md.
"""

from __future__ import annotations

from pathlib import Path

from reshard.commits.commit import Commit
from reshard.errors import UnsupportedError
from reshard.formats.base import Request, understood
from reshard.formats.pytorch.files import NAME, find_files
from reshard.tensors.layout import Index, TargetLayout


class PytorchFormat:
    """`reshard.formats.base.Format` for weights in files of torch.save."""

    name = NAME
    takes_patterns = False
    takes_ds_config = False
    keeps_zero_stage = False

    def sniff(self, path: Path) -> str | None:
        """Return why `path` holds no such weights, or None if it does."""
        if not path.is_dir():
            return "not a folder (name the folder of the file)"
        return find_files(path).reason

    def read(
        self, path: Path, commit: Commit | None, patterns: Path | None = None, ds_config: Path | None = None
    ) -> Index:
        """Index the weights, see `read_index`."""
        from reshard.formats.pytorch.reader import read_index  # a sniff needs no reader

        with understood(path, "torch", instead="use an earlier checkpoint"):
            return read_index(path)

    def layout(self, index: Index, request: Request) -> TargetLayout:
        """Refuse to write: the readers of such files run what their pickles say, and safetensors took their place.

        Raises:
            UnsupportedError: always.
        """
        raise UnsupportedError(
            f"the format {NAME} is read and not written",
            path=str(index.root),
            hint="say --format: safetensors, or dcp for a training that starts from the weights alone",
        )


FORMAT = PytorchFormat()
