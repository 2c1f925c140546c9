"""A small GPT with tensor parallelism written by hand, as a DeepSpeed PipelineModule.

What makes resharding hard in real models is all here: query, key and value fused in one weight with fewer key/value
heads than query heads, SwiGLU with gate and up fused, a padded vocabulary, tied embeddings, row- and column-parallel
weights, two optimizer parameter groups. It is a PipelineModule at pp=1 too, so that parameter names never change.

Shapes: B micro batch, S sequence, H hidden, V padded vocabulary, T tensor parallel degree.
"""

from __future__ import annotations

import dataclasses
import zlib
from collections.abc import Sequence
from typing import Any

import torch
from deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec
from deepspeed.runtime.pipe.topology import PipeModelDataParallelTopology
from torch import Tensor, distributed, nn

from reshard.topology import Topology


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class GptConfig:
    """Sizes of the model.

    Attributes:
        layers: transformer blocks.
        hidden: width H.
        heads: query heads.
        kv_heads: key and value heads.
        ffn: inner width of the feed-forward part.
        vocabulary: tokens that exist: 256 bytes and one start-of-text.
        padded_vocabulary: rows of the embedding, V.
        sequence: tokens per sample, S.
        seed: of the initial weights.
    """

    layers: int = 6
    hidden: int = 128
    heads: int = 4
    kv_heads: int = 2
    ffn: int = 256
    vocabulary: int = 257
    padded_vocabulary: int = 264
    sequence: int = 64
    seed: int = 1234

    @property
    def qkv_sizes(self) -> tuple[int, int, int]:
        """Rows of query, key and value in the fused weight."""
        head = self.hidden // self.heads
        return self.hidden, self.kv_heads * head, self.kv_heads * head


@dataclasses.dataclass(frozen=True, slots=True)
class TensorGroup:
    """This rank's place in its tensor parallel group."""

    size: int
    rank: int
    group: Any


_TENSOR = TensorGroup(1, 0, None)


def tensor_group() -> TensorGroup:
    """The tensor parallel group that layers are built for."""
    return _TENSOR


class _CopyToGroup(torch.autograd.Function):
    """Identity forward, sum over the group backward: before a column-parallel weight."""

    @staticmethod
    def forward(_context: Any, value: Tensor) -> Tensor:
        return value

    @staticmethod
    def backward(_context: Any, gradient: Tensor) -> Tensor:
        gradient = gradient.contiguous()
        distributed.all_reduce(gradient, group=tensor_group().group)
        return gradient


class _SumOverGroup(torch.autograd.Function):
    """Sum over the group forward, identity backward: after a row-parallel weight."""

    @staticmethod
    def forward(_context: Any, value: Tensor) -> Tensor:
        value = value.contiguous()
        distributed.all_reduce(value, group=tensor_group().group)
        return value

    @staticmethod
    def backward(_context: Any, gradient: Tensor) -> Tensor:
        return gradient


def join_tensor_group(topology: Topology) -> None:
    """Make the tensor parallel groups of all ranks; the layers of this rank are built for its own."""
    global _TENSOR  # noqa: PLW0603  (layers are built by DeepSpeed, which passes no context)
    place = topology.coordinate(distributed.get_rank())
    for pp in range(topology.pp):
        for dp in range(topology.dp):
            ranks = [topology.rank(pp=pp, dp=dp, tp=tp) for tp in range(topology.tp)]
            group = distributed.new_group(ranks) if topology.tp > 1 else None
            if (pp, dp) == (place.pp, place.dp):
                _TENSOR = TensorGroup(topology.tp, place.tp, group)


def copy_to_group(value: Tensor) -> Tensor:
    """See `_CopyToGroup`."""
    return value if tensor_group().size == 1 else _CopyToGroup.apply(value)  # type: ignore[no-untyped-call]


def sum_over_group(value: Tensor) -> Tensor:
    """See `_SumOverGroup`."""
    return value if tensor_group().size == 1 else _SumOverGroup.apply(value)  # type: ignore[no-untyped-call]


def sharded(name: str, shape: Sequence[int], config: GptConfig, *, dim: int, parts: Sequence[int] = ()) -> nn.Parameter:
    """This rank's shard of a weight whose full value depends only on its name.

    Args:
        name: layer-global name; seeds the generator, so every topology starts from the same logical weights.
        shape: of the full weight.
        config: sizes and seed.
        dim: dim that is cut.
        parts: sizes of fused parts along dim 0, each of which is cut by itself.
    """
    generator = torch.Generator().manual_seed(config.seed ^ zlib.crc32(name.encode()))
    full = torch.randn(*shape, generator=generator) * 0.02
    tensor = tensor_group()
    pieces = torch.split(full, list(parts), dim=0) if parts else [full]
    return nn.Parameter(torch.cat([piece.chunk(tensor.size, dim=dim)[tensor.rank] for piece in pieces], dim=0).clone())


class Embedding(nn.Module):
    """Token embedding, cut by vocabulary rows; tied with the output projection."""

    def __init__(self, config: GptConfig) -> None:
        super().__init__()
        self.weight = sharded("embed", (config.padded_vocabulary, config.hidden), config, dim=0)

    def forward(self, tokens: Tensor) -> Tensor:
        """[B, S] -> [B, S, H]."""
        rows = self.weight.shape[0]
        local = tokens - tensor_group().rank * rows
        inside = (local >= 0) & (local < rows)
        found = nn.functional.embedding(local.clamp(0, rows - 1), self.weight) * inside.unsqueeze(-1)
        return sum_over_group(found)


class Block(nn.Module):
    """Attention with grouped key/value heads and rotary positions, then SwiGLU; both with pre-normalisation."""

    def __init__(self, config: GptConfig, index: int) -> None:
        super().__init__()
        self.config = config
        name = f"block{index}"
        self.attention_norm = nn.Parameter(torch.ones(config.hidden))
        self.ffn_norm = nn.Parameter(torch.ones(config.hidden))
        rows = sum(config.qkv_sizes)
        self.qkv = sharded(f"{name}.qkv", (rows, config.hidden), config, dim=0, parts=config.qkv_sizes)
        self.out = sharded(f"{name}.out", (config.hidden, config.hidden), config, dim=1)
        self.gate_up = sharded(
            f"{name}.gate_up", (2 * config.ffn, config.hidden), config, dim=0, parts=(config.ffn, config.ffn)
        )
        self.down = sharded(f"{name}.down", (config.hidden, config.ffn), config, dim=1)

    def forward(self, hidden: Tensor) -> Tensor:
        """[B, S, H] -> [B, S, H]."""
        hidden = hidden + self._attention(_norm(hidden, self.attention_norm))
        gate, up = (copy_to_group(_norm(hidden, self.ffn_norm)) @ self.gate_up.T).chunk(2, dim=-1)
        return hidden + sum_over_group((nn.functional.silu(gate) * up) @ self.down.T)

    def _attention(self, value: Tensor) -> Tensor:
        config, size = self.config, tensor_group().size
        batch, sequence, _ = value.shape
        parts = [rows // size for rows in config.qkv_sizes]
        query, key, content = torch.split(copy_to_group(value) @ self.qkv.T, parts, dim=-1)
        head = config.hidden // config.heads
        query = rotate(query.view(batch, sequence, -1, head).transpose(1, 2))
        key = rotate(key.view(batch, sequence, -1, head).transpose(1, 2))
        content = content.view(batch, sequence, -1, head).transpose(1, 2)
        repeat = config.heads // config.kv_heads
        mixed = nn.functional.scaled_dot_product_attention(
            query, key.repeat_interleave(repeat, 1), content.repeat_interleave(repeat, 1), is_causal=True
        )
        return sum_over_group(mixed.transpose(1, 2).reshape(batch, sequence, -1) @ self.out.T)


class FinalNorm(nn.Module):
    """Normalisation before the output projection."""

    def __init__(self, config: GptConfig) -> None:
        super().__init__()
        self.norm = nn.Parameter(torch.ones(config.hidden))

    def forward(self, hidden: Tensor) -> Tensor:
        """[B, S, H] -> [B, S, H]."""
        return _norm(hidden, self.norm)


def project(embedding: Embedding, hidden: Tensor) -> Tensor:
    """Logits of this rank's vocabulary rows: [B, S, H] -> [B, S, V/T]."""
    return copy_to_group(hidden) @ embedding.weight.T


def vocabulary_loss(config: GptConfig) -> Any:
    """Mean cross entropy over vocabulary-parallel logits; rows of the padding take no part."""

    def loss(logits: Tensor, labels: Tensor) -> Tensor:
        rows = logits.shape[-1]
        first = tensor_group().rank * rows
        padding = torch.arange(first, first + rows) >= config.vocabulary
        logits = logits.float().masked_fill(padding, float("-inf"))
        top = logits.detach().amax(dim=-1)
        if tensor_group().size > 1:
            distributed.all_reduce(top, op=distributed.ReduceOp.MAX, group=tensor_group().group)
        total = sum_over_group((logits - top.unsqueeze(-1)).exp().sum(dim=-1))
        local = labels - first
        inside = (local >= 0) & (local < rows)
        picked = logits.gather(-1, local.clamp(0, rows - 1).unsqueeze(-1)).squeeze(-1)
        target = sum_over_group(picked.masked_fill(~inside, 0.0))
        return (total.log() + top - target).mean()

    return loss


def _norm(value: Tensor, weight: Tensor) -> Tensor:
    return value * torch.rsqrt(value.pow(2).mean(-1, keepdim=True) + 1e-5) * weight


def rotate(value: Tensor) -> Tensor:
    """Rotary position embedding (Su et al., 2021): [B, heads, S, head]."""
    half = value.shape[-1] // 2
    angle = torch.arange(value.shape[-2])[:, None] * 10000.0 ** (-torch.arange(half) / half)
    cos, sin = (part.to(value) for part in (angle.cos(), angle.sin()))  # in bf16 so are the values of the attention
    left, right = value[..., :half], value[..., half:]
    return torch.cat([left * cos - right * sin, right * cos + left * sin], dim=-1)


def build(config: GptConfig, topology: Topology) -> PipelineModule:
    """The model for one rank of `topology`; torch.distributed must be initialised with its world size."""
    join_tensor_group(topology)
    layers = [
        TiedLayerSpec("embed", Embedding, config, tied_weight_attr="weight"),
        *(LayerSpec(Block, config, index) for index in range(config.layers)),
        LayerSpec(FinalNorm, config),
        TiedLayerSpec("embed", Embedding, config, forward_fn=project, tied_weight_attr="weight"),
    ]
    return PipelineModule(
        layers=layers,
        loss_fn=vocabulary_loss(config),
        topology=PipeModelDataParallelTopology(num_pp=topology.pp, num_mp=topology.tp, num_dp=topology.dp),
        partition_method="uniform",
    )


def parameter_groups(model: nn.Module, *, weight_decay: float) -> list[dict[str, Any]]:
    """Matrices decay, norms do not."""
    parameters = [item for item in model.parameters() if item.requires_grad]
    return [
        {"params": [item for item in parameters if item.dim() > 1], "weight_decay": weight_decay},
        {"params": [item for item in parameters if item.dim() == 1], "weight_decay": 0.0},
    ]


def universal_checkpoint_info(config: GptConfig) -> dict[str, Any]:
    """How the weights are cut, in DeepSpeed's own words (deepspeed/checkpoint/constants.py, 0.19.8).

    Always complete, also at tp=1: the next launch may have another tensor parallel degree.
    """
    return {
        "universal_checkpoint_version": 0.2,
        "original_vocab_size": config.padded_vocabulary,
        "padded_vocab_size": config.padded_vocabulary,
        "vocabulary_parameter_patterns": [r"^tied_modules\.embed\.weight$"],
        "pipeline_replicated_parameter_patterns": [r"^tied_modules\.embed\.weight$"],
        "tp_replicated_parameter_patterns": [r"^\d+\.(attention_norm|ffn_norm|norm)$"],
        "parameter_to_average_patterns": [],
        "parameter_with_row_parallelism_patterns": [r"^\d+\.(out|down)$"],
        "parameter_with_2_sub_params_cat_dim_0": [r"^\d+\.gate_up$"],
        "parameter_with_sub_params": [
            {"patterns": [r"^\d+\.qkv$"], "shape": (config.qkv_sizes, config.hidden), "partition_dim": 0}
        ],
    }


def pipeline_description(config: GptConfig, model: PipelineModule) -> dict[str, Any]:
    """What a resharder has to know about the pipeline and the files do not say."""
    return {
        "pipeline": {
            "num_layers": config.layers + 3,
            "partition_method": "uniform",
            "tied": {"embed": [0, config.layers + 2]},
            "parts": [int(part) for part in model.parts],
        }
    }
