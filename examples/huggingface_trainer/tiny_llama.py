"""A tiny Llama and its text, the sources of Python's standard library byte by byte. Nothing is downloaded."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "gpt_deepspeed"))

from text import Windows, corpus
from torch import Tensor
from torch.utils.data import Dataset
from transformers import LlamaConfig, LlamaForCausalLM, set_seed

SEED = 42


class Text(Dataset[dict[str, Tensor]]):
    """Rows of 64 bytes; the model itself shifts the labels."""

    def __init__(self, num_samples: int) -> None:
        self.windows = Windows(corpus(num_samples * 64), 64)

    def __len__(self) -> int:
        return self.windows.num_samples

    def __getitem__(self, row: int) -> dict[str, Tensor]:
        _, tokens = self.windows.sample(row)
        return {"input_ids": tokens, "labels": tokens}


def build_model(*, dropout: float) -> Any:
    set_seed(SEED)
    config = LlamaConfig(
        vocab_size=257,
        hidden_size=64,
        intermediate_size=176,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        attention_dropout=dropout,
    )
    return LlamaForCausalLM(config)
