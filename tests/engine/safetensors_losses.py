"""Load safetensors files with the libraries that people use, and compute losses. Started by the test, never collected.

Reads a JSON list of tasks from argv and prints a JSON list of results, in the same order.
"""

import contextlib
import dataclasses
import json
import sys
from pathlib import Path

with contextlib.redirect_stdout(sys.stderr):
    import torch
    from model import Block, Embedding, FinalNorm, GptConfig, project, vocabulary_loss
    from reshard_rank import GLOBAL_BATCH, SIZES, FlatModel, batch

from safetensors.torch import load_file


class FlatGpt(torch.nn.Module):
    """The example's layers as a plain module; its names are those of examples/name_maps/gpt-flat.yaml."""

    def __init__(self, config):
        super().__init__()
        self.embed = Embedding(config)
        self.blocks = torch.nn.ModuleList([Block(config, index) for index in range(config.layers)])
        self.norm = FinalNorm(config)

    def forward(self, tokens):
        hidden = self.embed(tokens)
        for block in self.blocks:
            hidden = block(hidden)
        return project(self.embed, self.norm(hidden))


def weights(folder):
    found = {}
    for path in sorted(Path(folder).glob("*.safetensors")):
        found |= load_file(path)
    return found


def config_of(size):
    """Sizes of a run, or of the golden models; without padding of the vocabulary."""
    config = SIZES[size] if size in SIZES else GptConfig(**json.loads(size))
    return dataclasses.replace(config, padded_vocabulary=config.vocabulary)


def gpt_flat(folder, size):
    model = FlatGpt(config_of(size))
    model.load_state_dict(weights(folder))
    return model


def llama(folder, size):
    """Hugging Face's own class and loader."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = config_of(size)
    LlamaConfig(
        hidden_size=config.hidden,
        intermediate_size=config.ffn,
        num_hidden_layers=config.layers,
        num_attention_heads=config.heads,
        num_key_value_heads=config.kv_heads,
        vocab_size=config.vocabulary,
        rms_norm_eps=1e-5,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=None,
        attn_implementation="eager",
    ).save_pretrained(folder)
    model, info = LlamaForCausalLM.from_pretrained(folder, output_loading_info=True, dtype=torch.float32)
    assert not any(info.values()), info
    return lambda tokens: model(tokens).logits


def flat(folder, size, dtype):
    """The model without a pipeline, which computes its own loss."""
    model = FlatModel(SIZES[size]).to(dtype)
    found = weights(folder)
    assert {tensor.dtype for tensor in found.values()} == {dtype}, {key: item.dtype for key, item in found.items()}
    model.load_state_dict({**found, "head.weight": found["embed.weight"]})  # strict: nothing missing, nothing more
    return model


def loss_of(task):
    """Mean loss of the global batch of one step."""
    config = SIZES[task["size"]]
    batches = [batch(config, task["step"], sample) for sample in range(GLOBAL_BATCH)]
    if task["kind"] == "flat":
        model = flat(task["folder"], task["size"], getattr(torch, task["dtype"]))
        losses = [model(tokens, labels) for tokens, labels in batches]
    else:
        model = {"gpt-flat": gpt_flat, "llama": llama}[task["kind"]](task["folder"], task["size"])
        losses = [vocabulary_loss(config_of(task["size"]))(model(tokens), labels) for tokens, labels in batches]
    return float(torch.stack([loss.detach().double() for loss in losses]).mean())


def logits_of(task):
    """Of the tokens that tests/golden/safetensors/make.py uses."""
    model = gpt_flat(task["folder"], task["size"])
    return model(torch.arange(8).reshape(2, 4) % 13).flatten().tolist()


if __name__ == "__main__":
    torch.set_num_threads(1)
    with contextlib.redirect_stdout(sys.stderr), torch.no_grad():
        results = [logits_of(task) if task["kind"] == "logits" else loss_of(task) for task in json.loads(sys.argv[1])]
    print(json.dumps(results))
