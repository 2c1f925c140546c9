"""Make the tiny checkpoints beside this file again: `python -m tests.golden.safetensors.make`.

Needs transformers 5.23.0 and safetensors 0.8.0, which the project itself does not. Each folder has what
`save_pretrained` wrote (its own files, names and cuts); `truth.json` has what the libraries say each tensor is.
"""

import hashlib
import json
import shutil
from pathlib import Path

import torch
import transformers
from safetensors.torch import load_file, save_model

HERE = Path(__file__).parent
SMALL = {"hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 13}
GROUPED = {**SMALL, "num_key_value_heads": 2, "intermediate_size": 6, "max_position_embeddings": 16}
ROTARY = {"rms_norm_eps": 1e-5, "rope_theta": 10000.0, "tie_word_embeddings": True}
TOKENS = torch.arange(8).reshape(2, 4) % 13
SPECIAL = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}


def models():
    """Name -> model; all weights random, also biases and norms."""
    torch.manual_seed(7)
    found = {
        "llama": transformers.LlamaForCausalLM(transformers.LlamaConfig(**GROUPED, **ROTARY, **SPECIAL)),
        "bloom": transformers.BloomForCausalLM(
            transformers.BloomConfig(hidden_size=8, n_layer=2, n_head=4, vocab_size=13, **SPECIAL)
        ),
        "phi3": transformers.Phi3ForCausalLM(transformers.Phi3Config(**GROUPED, **ROTARY, **SPECIAL)),
        "phimoe": transformers.PhimoeForCausalLM(
            transformers.PhimoeConfig(**GROUPED, num_local_experts=4, num_experts_per_tok=2, **SPECIAL)
        ),
    }
    for model in found.values():
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.normal_(std=0.2)
    return found


def describe(tensors):
    """Shape, type and SHA-256 of the bytes of each tensor."""
    return {
        name: f"{list(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')} {digest(tensor)}"
        for name, tensor in sorted(tensors.items())
    }


def digest(tensor):
    """SHA-256 of a tensor's bytes, row-major."""
    return hashlib.sha256(tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes()).hexdigest()


class Odd(torch.nn.Module):
    """Tensors as in no model of Hugging Face: a tied name kept by save_model, a scalar, an empty one, more types."""

    def __init__(self):
        super().__init__()
        self.first = torch.nn.Linear(3, 5, bias=False).to(torch.bfloat16)
        self.second = torch.nn.Linear(3, 5, bias=False)
        self.second.weight = self.first.weight
        self.register_buffer("count", torch.tensor(41))
        self.register_buffer("empty", torch.zeros(0, 4, dtype=torch.float16))
        self.register_buffer("mask", torch.tensor([True, False, True]))
        self.register_buffer("scale", torch.arange(3, dtype=torch.float64) / 7)
        self.register_buffer("packed", torch.arange(4).to(torch.float8_e4m3fn))


def main():
    """Make all."""
    truth = {}
    for name, model in models().items():
        folder = HERE / name
        shutil.rmtree(folder, ignore_errors=True)
        model.eval().save_pretrained(folder, max_shard_size="3KB" if name in ("llama", "phimoe") else "5GB")
        for path in folder.iterdir():
            if "safetensors" not in path.name:
                path.unlink()
        loaded = {}
        for path in sorted(folder.glob("*.safetensors")):
            loaded |= load_file(path)
        truth[name] = {"tensors": describe(loaded)}
        if name in ("llama", "phi3"):
            truth[name]["logits"] = model(TOKENS).logits.flatten().tolist()
    torch.manual_seed(3)
    odd = Odd()
    (HERE / "odd").mkdir(exist_ok=True)
    save_model(odd, str(HERE / "odd" / "model.safetensors"), {"about": "odd ones"})
    truth["odd"] = {"tensors": describe(odd.state_dict())}
    (HERE / "truth.json").write_text(json.dumps(truth, indent=1) + "\n")


if __name__ == "__main__":
    main()
