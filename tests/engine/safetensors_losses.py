"""Load converted checkpoints with the libraries that people use, and compute losses. Started by the test.

Reads a JSON list of tasks from argv and prints a JSON list of results, in the same order.
"""

import contextlib
import dataclasses
import json
import sys
from pathlib import Path

with contextlib.redirect_stdout(sys.stderr):
    import torch
    import torch.distributed.checkpoint as dcp
    from deepspeed.runtime.lr_schedules import WarmupLR
    from model import Block, Embedding, FinalNorm, GptConfig, parameter_groups, project, vocabulary_loss
    from reshard_rank import GLOBAL_BATCH, SIZES, FlatModel, batch
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict

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


def losses_of(task):
    """Three more steps in plain torch, from a checkpoint of torch.distributed.checkpoint, as the run takes them."""
    config = config_of(task["size"])
    model, loss_of_batch = FlatGpt(config), vocabulary_loss(config)
    optimizer = torch.optim.AdamW(parameter_groups(model, weight_decay=0.1), lr=1e-2, betas=(0.9, 0.95))
    schedule = WarmupLR(optimizer, warmup_max_lr=2e-2, warmup_num_steps=4)
    flat_names = StateDictOptions(flatten_optimizer_state_dict=True)
    weights, states = get_state_dict(model, optimizer, options=flat_names)
    dcp.load({"model": weights, "optim": states}, checkpoint_id=task["folder"], no_dist=True)
    set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=states, options=flat_names)
    if task.get("spoil"):
        for state in optimizer.state.values():
            state["exp_avg"].zero_()
    schedule.load_state_dict({"last_batch_iteration": task["step"] - 1})
    losses = []
    for step in range(task["step"], task["step"] + 3):
        optimizer.zero_grad()
        batches = [batch(config, step, sample) for sample in range(GLOBAL_BATCH)]
        loss = torch.stack([loss_of_batch(model(tokens), labels) for tokens, labels in batches]).mean()
        loss.backward()
        optimizer.step()
        schedule.step()
        losses.append(float(loss))
    return losses


def logits_of(task):
    """Of the tokens that tests/golden/safetensors/make.py uses."""
    model = gpt_flat(task["folder"], task["size"])
    return model(torch.arange(8).reshape(2, 4) % 13).flatten().tolist()


KINDS = {"logits": logits_of, "train": losses_of}

if __name__ == "__main__":
    torch.set_num_threads(1)
    with contextlib.redirect_stdout(sys.stderr):
        results = []
        for task in json.loads(sys.argv[1]):
            with torch.set_grad_enabled(task["kind"] == "train"):
                results.append(KINDS.get(task["kind"], loss_of)(task))
    print(json.dumps(results))
