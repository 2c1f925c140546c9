"""A GPT with the parameter names, splits and descriptions of Megatron-DeepSpeed's pipelines, in miniature.

What differs from the example's model: linear layers with biases (whole and split), learned positions in the tied
module, which only the first stage uses, layer norms, heads that are fused one after the other, functions in the list
of layers, stages that are balanced by layers of a type, and a vocabulary whose padding depends on tp.
"""

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "examples" / "gpt_deepspeed"))

import torch
from deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec
from deepspeed.runtime.pipe.topology import PipeModelDataParallelTopology
from model import GptConfig, copy_to_group, join_tensor_group, sharded, sum_over_group, tensor_group, vocabulary_loss
from torch import nn

CONFIG = GptConfig(layers=4, hidden=32, heads=4, kv_heads=4, ffn=48, vocabulary=50, padded_vocabulary=64, sequence=16)
TINY = GptConfig(layers=2, hidden=8, heads=4, kv_heads=4, ffn=6, vocabulary=13, padded_vocabulary=16, sequence=4)
DIVISIBLE_BY = 8
"""Megatron pads the vocabulary to a multiple of this times tp."""


def shrink():
    """Build models of the size of golden checkpoints from now on."""
    global CONFIG  # noqa: PLW0603  (layers are built by DeepSpeed, which passes no context)
    CONFIG = TINY


def padded_vocabulary(tp):
    """Return the rows of the embedding: 56 at tp=1, 64 at tp=2."""
    return -(-CONFIG.vocabulary // (DIVISIBLE_BY * tp)) * DIVISIBLE_BY * tp


def mark_split(*parameters):
    """Tell DeepSpeed that each rank's gradient counts in the norm for clipping; that of a whole parameter, once."""
    for parameter in parameters:
        parameter.tensor_model_parallel = True


class Linear(nn.Module):
    """A linear layer, split along dim 0 (column-parallel) or dim 1 (row-parallel, with a whole bias)."""

    def __init__(self, name, rows, columns, dim, parts=()):
        super().__init__()
        self.weight = sharded(f"{name}.weight", (rows, columns), CONFIG, dim=dim, parts=parts)
        bias = sharded(f"{name}.bias", (rows,), CONFIG, dim=0, parts=parts if dim == 0 else ())
        if dim == 1:
            generator = torch.Generator().manual_seed(rows)
            bias = nn.Parameter(torch.randn(rows, generator=generator) * 0.02)
        self.bias, self.dim = bias, dim
        mark_split(self.weight, *([self.bias] if dim == 0 else []))

    def forward(self, value):
        if self.dim == 0:
            return copy_to_group(value) @ self.weight.T + self.bias
        return sum_over_group(value @ self.weight.T) + self.bias


class Vocabulary(nn.Module):
    """Rows of the embedding of words; the real rows are the same whatever the padding."""

    def __init__(self, name):
        super().__init__()
        tensor = tensor_group()
        rows = padded_vocabulary(tensor.size)
        generator = torch.Generator().manual_seed(len(name))
        whole = torch.zeros(rows, CONFIG.hidden)
        whole[: CONFIG.vocabulary] = torch.randn(CONFIG.vocabulary, CONFIG.hidden, generator=generator) * 0.1
        self.weight = nn.Parameter(whole.chunk(tensor.size)[tensor.rank].clone())
        mark_split(self.weight)

    def forward(self, tokens):
        rows = self.weight.shape[0]
        local = tokens - tensor_group().rank * rows
        inside = (local >= 0) & (local < rows)
        return sum_over_group(nn.functional.embedding(local.clamp(0, rows - 1), self.weight) * inside.unsqueeze(-1))


class EmbeddingPipe(nn.Module):
    """Words and positions; the output head is tied to the words."""

    def __init__(self, stage):
        super().__init__()
        self.word_embeddings = Vocabulary("words")
        self.position_embeddings = nn.Embedding(CONFIG.sequence, CONFIG.hidden)
        generator = torch.Generator().manual_seed(77 + stage)  # Megatron draws other values on every stage, too
        self.position_embeddings.weight.data = torch.randn(CONFIG.sequence, CONFIG.hidden, generator=generator) / 10

    @property
    def word_embeddings_weight(self):
        return self.word_embeddings.weight

    def forward(self, tokens):
        return self.word_embeddings(tokens) + self.position_embeddings.weight[: tokens.shape[1]]


class ParallelTransformerLayerPipe(nn.Module):
    """A layer; queries, keys and values of a head follow each other."""

    def __init__(self, index, *, swiglu):
        super().__init__()
        hidden, inner = CONFIG.hidden, CONFIG.ffn
        self.swiglu = swiglu
        self.input_layernorm, self.post_attention_layernorm = nn.LayerNorm(hidden), nn.LayerNorm(hidden)
        self.self_attention, self.mlp = nn.Module(), nn.Module()
        self.self_attention.query_key_value = Linear(f"{index}.qkv", 3 * hidden, hidden, 0)
        self.self_attention.dense = Linear(f"{index}.dense", hidden, hidden, 1)
        parts = (inner, inner) if swiglu else ()
        self.mlp.dense_h_to_4h = Linear(f"{index}.up", inner * (1 + swiglu), hidden, 0, parts)
        self.mlp.dense_4h_to_h = Linear(f"{index}.down", hidden, inner, 1)

    def forward(self, value):
        fused = self.self_attention.query_key_value(self.input_layernorm(value))
        query, key, content = fused.unflatten(-1, (-1, 3, CONFIG.hidden // CONFIG.heads)).transpose(1, 2).unbind(-2)
        mixed = nn.functional.scaled_dot_product_attention(query, key, content, is_causal=True)
        value = value + self.self_attention.dense(mixed.transpose(1, 2).flatten(-2))
        inner = self.mlp.dense_h_to_4h(self.post_attention_layernorm(value))
        if self.swiglu:
            gate, up = inner.chunk(2, dim=-1)
            return value + self.mlp.dense_4h_to_h(nn.functional.silu(gate) * up)
        return value + self.mlp.dense_4h_to_h(nn.functional.gelu(inner))


class LMHeadPipe(nn.Module):
    """The output head of a model that does not tie it."""

    def __init__(self):
        super().__init__()
        self.lm_head = Vocabulary("output head")

    def forward(self, value):
        return copy_to_group(value) @ self.lm_head.weight.T


def project(embedding, value):
    """Return the logits of the tied head."""
    return copy_to_group(value) @ embedding.word_embeddings_weight.T


def cast_nothing(value):
    """Stand for the casts in Megatron-DeepSpeed's list of layers: a layer with a number and without parameters."""
    return value


def build(topology, *, swiglu=False, untied=False):
    """Build the model of one rank."""
    join_tensor_group(topology)
    stage = topology.coordinate(torch.distributed.get_rank()).pp
    tie = {"tied_weight_attr": "word_embeddings_weight"}
    layers = [
        cast_nothing,
        LayerSpec(EmbeddingPipe, stage) if untied else TiedLayerSpec("embed", EmbeddingPipe, stage, **tie),
        *(LayerSpec(ParallelTransformerLayerPipe, index, swiglu=swiglu) for index in range(CONFIG.layers)),
        LayerSpec(nn.LayerNorm, CONFIG.hidden),
        LayerSpec(LMHeadPipe) if untied else TiedLayerSpec("embed", EmbeddingPipe, stage, forward_fn=project, **tie),
    ]
    return PipelineModule(
        layers=layers,
        loss_fn=vocabulary_loss(CONFIG),
        topology=PipeModelDataParallelTopology(num_pp=topology.pp, num_mp=topology.tp, num_dp=topology.dp),
        partition_method="type:transformer",
    )


def universal_checkpoint_info(topology, *, swiglu=False, untied=False):
    """Describe the splits as Megatron-DeepSpeed does: at tp=1 it names neither whole nor row-parallel parameters."""
    words = [r"\d+.word_embeddings.weight", r"\d+.lm_head.weight"]
    words = words if untied else ["tied_modules.embed.word_embeddings.weight"]
    positions = r"\d+.position_embeddings.weight" if untied else "tied_modules.embed.position_embeddings.weight"
    layer = [
        f"{norm}.{part}" for norm in ("input_layernorm", "post_attention_layernorm") for part in ("weight", "bias")
    ]
    layer += ["self_attention.dense.bias", "mlp.dense_4h_to_h.bias"]
    info = {
        "universal_checkpoint_version": 0.2,
        "original_vocab_size": CONFIG.vocabulary,
        "padded_vocab_size": padded_vocabulary(topology.tp),
        "vocabulary_parameter_patterns": words,
        "pipeline_replicated_parameter_patterns": [] if untied else [*words, positions],
        "parameter_with_2_sub_params_cat_dim_0": [
            rf"\d+.mlp.dense_h_to_4h.{part}" for part in ("weight", "bias") if swiglu
        ],
    }
    if topology.tp > 1:
        whole = [r"\d+.weight", r"\d+.bias", positions, *(rf"\d+.{name}" for name in layer)]
        info["tp_replicated_parameter_patterns"] = whole
        row = [r"\d+.mlp.dense_4h_to_h.weight", r"\d+.self_attention.dense.weight"]
        info["parameter_with_row_parallelism_patterns"] = row
    return info


def client_state(topology, model, *, swiglu=False, untied=False):
    """Return what Megatron-DeepSpeed gives to `save_checkpoint`, and the description of the pipeline."""
    return {
        "args": argparse.Namespace(
            num_layers=CONFIG.layers,
            hidden_size=CONFIG.hidden,
            tensor_model_parallel_size=topology.tp,
            pipeline_model_parallel_size=topology.pp,
            make_vocab_size_divisible_by=DIVISIBLE_BY,
            padded_vocab_size=padded_vocabulary(topology.tp),
        ),
        "checkpoint_version": 3.0,
        "universal_checkpoint_info": universal_checkpoint_info(topology, swiglu=swiglu, untied=untied),
        "pipeline_layout": {
            "num_layers": CONFIG.layers + 4,
            "partition_method": "type:transformer",
            "parts": [int(part) for part in model.parts],
            "tied": {} if untied else {"embed": [1, CONFIG.layers + 3]},
            "layer_types": ["function", "EmbeddingPipe", *["ParallelTransformerLayerPipe"] * CONFIG.layers,
                            "LayerNorm", "EmbeddingPipe"],
        },
    }  # fmt: skip
