"""One rank that trains a tiny model of transformers with DeepSpeed's AutoTP. Started by `reshard_run.launch`.

Reads a JSON task from argv, as `reshard_rank` does. Each run has a `family`, and may have a `preset` of AutoTP.
"""

import functools
import json
import os
import sys
import types
from pathlib import Path

import deepspeed
import torch
import transformers
from deepspeed.module_inject.auto_tp_model_utils import build_bloom_alibi_tensor
from deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec
from deepspeed.utils import groups

from reshard.topology import Topology

GLOBAL_BATCH = 4
SIZES = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 16, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
    "tie_word_embeddings": False,
}  # fmt: skip
MODELS = {
    "llama": ("Llama", {}),
    "llama-biases": ("Llama", {"attention_bias": True, "mlp_bias": True}),
    "llama-tied": ("Llama", {"tie_word_embeddings": True}),
    "llama-megatron": ("Llama", {"rms_norm_eps": 1e-5}),
    "llama-megatron-tied": ("Llama", {"rms_norm_eps": 1e-5, "tie_word_embeddings": True}),
    "llama-one-kv-head": ("Llama", {"num_key_value_heads": 1}),
    "mistral": ("Mistral", {}),
    "qwen2": ("Qwen2", {}),
    "qwen2-tied": ("Qwen2", {"tie_word_embeddings": True}),
    "qwen3": ("Qwen3", {"head_dim": 8}),
    "phi": ("Phi", {}),
    "phi3": ("Phi3", {"num_key_value_heads": 4}),
    "mixtral": ("Mixtral", {"num_local_experts": 4}),
    "bloom": ("Bloom", {"n_layer": 2, "n_head": 4, "tie_word_embeddings": True}),
    "phimoe": ("Phimoe", {"num_local_experts": 4, "attention_bias": True, "lm_head_bias": True}),
}


class MegatronLayer(torch.nn.Module):
    """A layer with Megatron's names and fused heads of size 8; gated feed-forward network if asked for (SwiGLU)."""

    def __init__(self, hidden, inner, *, gated=False):
        super().__init__()
        self.gated = gated
        self.input_layernorm, self.post_attention_layernorm = (torch.nn.LayerNorm(hidden) for _ in range(2))
        self.self_attention, self.mlp = torch.nn.Module(), torch.nn.Module()
        self.self_attention.query_key_value = torch.nn.Linear(hidden, 3 * hidden)
        self.self_attention.dense = torch.nn.Linear(hidden, hidden)
        self.mlp.dense_h_to_4h = torch.nn.Linear(hidden, (1 + gated) * inner)
        self.mlp.dense_4h_to_h = torch.nn.Linear(inner, hidden)

    def forward(self, hidden):
        fused = self.self_attention.query_key_value(self.input_layernorm(hidden))
        query, key, value = fused.unflatten(-1, (-1, 3, 8)).transpose(1, 2).unbind(-2)
        mixed = torch.nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        hidden = hidden + self.self_attention.dense(mixed.transpose(1, 2).flatten(-2))
        inner = self.mlp.dense_h_to_4h(self.post_attention_layernorm(hidden))
        if self.gated:
            gate, up = inner.chunk(2, dim=-1)
            return hidden + self.mlp.dense_4h_to_h(torch.nn.functional.silu(gate) * up)
        return hidden + self.mlp.dense_4h_to_h(torch.nn.functional.gelu(inner))


class MegatronEmbedding(torch.nn.Module):
    """The embedding of Megatron-DeepSpeed's pipelines."""

    def __init__(self, hidden):
        super().__init__()
        self.word_embeddings = torch.nn.Embedding(64, hidden)
        self.position_embeddings = torch.nn.Embedding(16, hidden)

    def forward(self, tokens):
        return self.word_embeddings(tokens) + self.position_embeddings.weight[: tokens.shape[1]]


def make_logits(embedding, hidden):
    """Return the logits of the tied output head."""
    return hidden @ embedding.word_embeddings.weight.T


def drop_nothing(hidden):
    """Stand for the functions in Megatron-DeepSpeed's list of layers, which have a number and no parameters."""
    return hidden


def make_megatron_pipeline(hidden=32, inner=48, layers=2):
    """Build a PipelineModule with the names of Megatron-DeepSpeed's: layers count from 3, the last norm is `6`."""
    return PipelineModule(
        [
            drop_nothing,
            TiedLayerSpec("embed", MegatronEmbedding, hidden, tied_weight_attr="word_embeddings.weight"),
            drop_nothing,
            *[LayerSpec(MegatronLayer, hidden, inner, gated=True) for _ in range(layers)],
            drop_nothing,
            LayerSpec(torch.nn.LayerNorm, hidden),
            TiedLayerSpec(
                "embed", MegatronEmbedding, hidden, forward_fn=make_logits, tied_weight_attr="word_embeddings.weight"
            ),
        ],
        num_stages=1,
        loss_fn=lambda logits, labels: torch.nn.functional.cross_entropy(
            logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()
        ),
    )


MEGATRON_INFO = {
    "universal_checkpoint_version": 0.2,
    "vocabulary_parameter_patterns": ["tied_modules.embed.word_embeddings.weight"],
    "tp_replicated_parameter_patterns": [
        "tied_modules.embed.position_embeddings.weight", r"\d+.input_layernorm.weight", r"\d+.input_layernorm.bias",
        r"\d+.post_attention_layernorm.weight", r"\d+.post_attention_layernorm.bias",
        r"\d+.self_attention.dense.bias", r"\d+.mlp.dense_4h_to_h.bias", r"\d+.weight", r"\d+.bias",
    ],
    "parameter_with_2_sub_params_cat_dim_0": [r"\d+.mlp.dense_h_to_4h.weight"],
    "original_vocab_size": 61,
    "padded_vocab_size": 64,
}  # fmt: skip
"""Description that Megatron-DeepSpeed saves at tp=1: no row-parallel parameter."""


class Megatron(torch.nn.Module):
    """Parameters with the names and shapes that Megatron-DeepSpeed's GPT has without a pipeline."""

    def __init__(self, hidden=32, inner=48, layers=2):
        super().__init__()
        self.language_model = torch.nn.Module()
        self.language_model.embedding = torch.nn.Module()
        self.language_model.embedding.word_embeddings = torch.nn.Embedding(64, hidden)
        self.language_model.embedding.position_embeddings = torch.nn.Embedding(16, hidden)
        self.language_model.encoder = torch.nn.Module()
        self.language_model.encoder.layers = torch.nn.ModuleList(MegatronLayer(hidden, inner) for _ in range(layers))
        self.language_model.encoder.final_layernorm = torch.nn.LayerNorm(hidden)

    def forward(self, input_ids, labels):
        model = self.language_model
        hidden = model.embedding.word_embeddings(input_ids)
        hidden = hidden + model.embedding.position_embeddings.weight[: input_ids.shape[1]]
        for layer in model.encoder.layers:
            hidden = layer(hidden)
        logits = model.encoder.final_layernorm(hidden) @ model.embedding.word_embeddings.weight.T
        loss = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        return types.SimpleNamespace(loss=loss)


def build(family, seed=3):
    if family == "megatron-pipeline":
        torch.manual_seed(3)
        return make_megatron_pipeline()
    if family == "megatron":
        torch.manual_seed(3)
        return Megatron()
    name, changes = MODELS[family]
    torch.manual_seed(seed)
    config = getattr(transformers, f"{name}Config")(**{**SIZES, **changes}, attn_implementation="eager")
    model = getattr(transformers, f"{name}ForCausalLM")(config)
    with torch.no_grad():
        for parameter in model.parameters():  # biases and norms of a new model are all zero or one
            parameter.add_(torch.randn(parameter.shape) * 0.05)
    return model


def make_engine(run, topology):
    model = build(run["family"], run.get("seed", 3))
    preset = {"preset_model": run["preset"]} if run.get("preset") else {}
    cut = {"autotp_size": topology.tp, **preset}
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": GLOBAL_BATCH // topology.dp,
        "zero_optimization": {"stage": topology.zero},
        "bf16": {"enabled": bool(run.get("bf16"))},
        "steps_per_print": 10**9,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "checkpoint": {"load_universal": bool(run.get("universal"))},
        **({"gradient_clipping": 0.0} if run["family"].startswith("llama-megatron") else {}),
        **({"tensor_parallel": cut} if topology.tp > 1 or preset else {}),
    }
    weights = list(model.parameters())
    if run["family"].startswith("llama-megatron"):  # Megatron-Core's groups: norms do not decay
        kinds = [[weight for weight in weights if (weight.ndim > 1) == is_matrix] for is_matrix in (True, False)]
        weights = [{"params": kinds[0]}, {"params": kinds[1], "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(weights, lr=1e-2, betas=(0.9, 0.95), weight_decay=0.1)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    if run.get("alibi") and topology.tp > 1:  # as DeepSpeed's inference does, and its training does not
        engine.module.transformer.build_alibi_tensor = functools.partial(
            build_bloom_alibi_tensor, mp_group=groups.get_tensor_model_parallel_group(), total_num_heads=4
        )
    return engine


@functools.cache
def batch(step, sample):
    generator = torch.Generator().manual_seed(1000 + step)
    return torch.randint(3, SIZES["vocab_size"], (GLOBAL_BATCH, 12), generator=generator)[sample : sample + 1]


def step_once(engine, run, topology, rank):
    replica, micro = topology.coordinate(rank).dp, GLOBAL_BATCH // topology.dp
    if isinstance(engine.module, PipelineModule):
        batches = [batch(engine.global_steps, replica * micro + at) for at in range(micro)]
        return float(engine.train_batch(data_iter=iter([(tokens, tokens) for tokens in batches])))
    total = torch.zeros((), dtype=torch.float64)
    for at in range(micro):
        sample = replica * micro + at
        tokens = batch(engine.global_steps, sample)
        torch.manual_seed(GLOBAL_BATCH * engine.global_steps + sample)  # Phi-MoE draws experts at random
        mask = {"attention_mask": torch.ones_like(tokens)} if run.get("alibi") else {}
        loss = engine(input_ids=tokens, labels=tokens, **mask).loss
        engine.backward(loss)
        engine.step()
        total += loss.detach().double() / micro
    torch.distributed.all_reduce(total)
    return float(total) / topology.world_size


def step_or_refuse(engine, run, topology, rank):
    """Return the loss of a step, or the message of an error that the run expects."""
    try:
        return step_once(engine, run, topology, rank)
    except RuntimeError as failure:
        if not run.get("refused"):
            raise
        return str(failure)


def main():
    task = json.loads(sys.argv[1])
    torch.set_num_threads(1)
    rank = int(os.environ["RANK"])
    deepspeed.init_distributed(dist_backend="gloo", verbose=False)
    for run in task["runs"]:
        topology = Topology.parse(run["topology"])
        engine = make_engine(run, topology)
        losses = []
        error = ""
        if run.get("load"):
            folder = Path(run["load"])
            try:
                path, _ = engine.load_checkpoint(str(folder.parent), tag=folder.name)
                assert path is not None, folder
            except RuntimeError as failure:
                if not run.get("refused"):
                    raise
                error = str(failure)
        for _ in range(0 if error else run["steps"]):
            losses.append(step_or_refuse(engine, run, topology, rank))
            if run.get("save") and engine.global_steps == run["save_at"]:
                is_pipeline = isinstance(engine.module, PipelineModule)
                client = {"universal_checkpoint_info": MEGATRON_INFO} if is_pipeline else {}
                engine.save_checkpoint(str(Path(run["save"]).parent), tag=Path(run["save"]).name, client_state=client)
        engine.destroy()
        if rank == 0:
            with open(task["results"], "a", encoding="utf-8") as stream:
                stream.write(json.dumps({"name": run["name"], "losses": error or losses}) + "\n")
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
