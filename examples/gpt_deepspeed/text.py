"""Training text that is on every machine: the Python standard library's own sources, byte by byte."""

from __future__ import annotations

import sysconfig
from pathlib import Path

import torch
from torch import Tensor

START = 256
"""Token before the first byte of a sample."""

_FOLDERS = ("asyncio", "collections", "concurrent", "email", "html", "http", "importlib", "json", "logging", "unittest")


def corpus(limit_bytes: int = 4_000_000) -> bytes:
    """Sources in the order of their names."""
    root = Path(sysconfig.get_path("stdlib"))
    paths = [path for folder in _FOLDERS for path in sorted((root / folder).rglob("*.py"))]
    return b"\n".join(path.read_bytes() for path in paths)[:limit_bytes]


class Windows:
    """Consecutive windows of `sequence` bytes."""

    def __init__(self, text: bytes, sequence: int) -> None:
        self.sequence = sequence
        self._bytes = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        self.num_samples = len(text) // sequence

    def sample(self, row: int) -> tuple[Tensor, Tensor]:
        """Inputs and labels of one window, each [S]: the label of a position is the byte that follows."""
        labels = self._bytes[row * self.sequence : (row + 1) * self.sequence].long()
        return torch.cat([torch.tensor([START]), labels[:-1]]), labels
