"""Texts for training and measurement: Python's sources and its documentation, byte by byte."""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "examples/gpt_deepspeed"))

import torch
from text import Windows
from torch import Tensor
from torch.utils.data import Dataset

SEQUENCE = 64
HELD_OUT = 64
"""Windows of the documentation that nothing trains on."""


def documentation() -> Windows:
    """Return the texts of `help()` as running English, in contrast to the sources that the model was pretrained on."""
    from pydoc_data.topics import topics

    text = " ".join(" ".join(topics[name].split()) for name in sorted(topics))
    return Windows(text.encode(), SEQUENCE)


class Documentation(Dataset[dict[str, Tensor]]):
    """Rows for the Trainer: tokens [S] and labels [S], which the model itself shifts."""

    def __init__(self) -> None:
        self._windows = documentation()

    def __len__(self) -> int:
        return self._windows.num_samples - HELD_OUT

    def __getitem__(self, row: int) -> dict[str, Tensor]:
        inputs, labels = self._windows.sample(HELD_OUT + row)
        tokens = torch.cat([inputs, labels[-1:]])
        return {"input_ids": tokens, "labels": tokens}
