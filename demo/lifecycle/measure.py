"""Measure a folder of safetensors with transformers. Arguments: what, folder, step, file for the answer."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from demo.lifecycle.texts import HELD_OUT, ROOT, SEQUENCE, Documentation, documentation

sys.path.insert(0, str(ROOT / "examples/gpt_deepspeed"))

import torch
from text import START, Windows, corpus
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, set_seed

from demo.lifecycle.finetune_rank import GLOBAL_BATCH, SEED
from elastic_trainer import BatchPlan, shuffled

TOKENS, ROWS = 257, 264
"""Bytes and the start of a text; rows of the embedding, of which the pretraining leaves the last out of its loss."""

PRETRAINING_BATCH, PRETRAINING_SEED = 20, 7
"""Global batch and seed of examples/gpt_deepspeed/train.py."""


def main() -> None:
    what, folder, step, answer = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4])
    torch.set_num_threads(1)
    with torch.no_grad():
        found = WAYS[what](folder, step)
    answer.write_text(json.dumps(found), encoding="utf-8")


def describe(folder: Path, _step: int) -> str:
    """Write config.json for the model of examples/gpt_deepspeed, or for what was fine-tuned from it."""
    config = LlamaConfig(
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=6,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=ROWS,
        rms_norm_eps=1e-5,
        tie_word_embeddings=True,
        bos_token_id=START,
        eos_token_id=None,
        attn_implementation="eager",
    )
    config.save_pretrained(folder)
    _, info = LlamaForCausalLM.from_pretrained(folder, output_loading_info=True)
    if missing := {name: found for name, found in info.items() if found}:
        raise RuntimeError(f"{folder}: transformers did not load everything: {missing}")
    return "described"


def loss_of(model: Any, rows: Iterator[tuple[Tensor, Tensor]], *, num_tokens: int = TOKENS) -> float:
    """Mean loss over windows: every label is predicted from what is before it, among the first `num_tokens` tokens."""
    losses = []
    for inputs, labels in rows:
        logits = model(inputs[None]).logits[0, :, :num_tokens]
        losses.append(torch.nn.functional.cross_entropy(logits, labels).double())
    return float(torch.stack(losses).mean())


def pretraining_loss(folder: Path, step: int) -> float:
    """Loss of the global batch of a step of the pretraining."""
    windows = Windows(corpus(), SEQUENCE)
    plan = BatchPlan(global_batch=PRETRAINING_BATCH, micro_batch=2, dp=1)
    numbers = [
        number for micro in plan.micro_batches(first_sample=step * PRETRAINING_BATCH, dp_rank=0) for number in micro
    ]
    rows = (shuffled(number, num_samples=windows.num_samples, seed=PRETRAINING_SEED) for number in numbers)
    return loss_of(LlamaForCausalLM.from_pretrained(folder), (windows.sample(row) for row in rows))


def first_loss(folder: Path, _step: int) -> float:
    """Loss of the first global batch of the fine-tuning: the order is that of the Trainer's seedable sampler."""
    data = Documentation()
    generator = torch.Generator()
    generator.manual_seed(SEED)
    order = torch.randperm(len(data), generator=generator).tolist()[:GLOBAL_BATCH]
    rows = ((data[row]["input_ids"][:-1], data[row]["labels"][1:]) for row in order)
    return loss_of(LlamaForCausalLM.from_pretrained(folder), rows, num_tokens=ROWS)


def documentation_loss(folder: Path, _step: int) -> float:
    """Loss on windows of the documentation that no stage trains on."""
    windows = documentation()
    return loss_of(LlamaForCausalLM.from_pretrained(folder), (windows.sample(row) for row in range(HELD_OUT)))


def generate(folder: Path, _step: int) -> str:
    """Continue the beginning of a sentence."""
    set_seed(1)
    prompt = torch.tensor([[START, *b"The "]])
    model = LlamaForCausalLM.from_pretrained(folder)
    tokens = model.generate(
        prompt,
        attention_mask=torch.ones_like(prompt),
        max_new_tokens=56,
        do_sample=True,
        top_k=3,
        pad_token_id=START,
        suppress_tokens=list(range(START, ROWS)),
    )
    return bytes(token for token in tokens[0].tolist() if token < START).decode("utf-8", "replace")


WAYS = {
    "describe": describe,
    "loss": pretraining_loss,
    "first-loss": first_loss,
    "documentation": documentation_loss,
    "generate": generate,
}

if __name__ == "__main__":
    main()
