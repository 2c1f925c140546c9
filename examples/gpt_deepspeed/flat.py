"""The same GPT as a plain module, for ZeRO-3 and sequence parallelism (Ulysses) instead of pipelines.

`examples/name_maps/gpt-flat.yaml` says which of its parameters is which of the pipeline's: `reshard` takes checkpoints
from one to the other.

Shapes: B micro batch, S sequence, C ranks that share it, H hidden, A heads, D width of a head.
"""

from __future__ import annotations

from typing import Any

import torch
from deepspeed.runtime.sequence_parallel import parallel_state_sp as sequence_groups
from deepspeed.sequence.layer import DistributedAttention
from model import Block, Embedding, FinalNorm, GptConfig, project, rotate, vocabulary_loss
from torch import Tensor, nn

from reshard.topology import Topology


class Attention(nn.Module):
    """Causal attention of whole sequences, by some of the heads; it has no parameters."""

    def forward(self, query: Tensor, key: Tensor, content: Tensor) -> Tensor:
        """[B, S, A, D], with fewer heads in key and content, -> [B, S, A, D]."""
        repeat = query.shape[2] // key.shape[2]
        query, key = rotate(query.transpose(1, 2)), rotate(key.transpose(1, 2)).repeat_interleave(repeat, 1)
        content = content.transpose(1, 2).repeat_interleave(repeat, 1)
        mixed = nn.functional.scaled_dot_product_attention(query, key, content, is_causal=True)
        return mixed.transpose(1, 2).contiguous()


class FlatBlock(Block):
    """A block whose ranks exchange parts of the sequence for heads before its attention, and back behind it."""

    def __init__(self, config: GptConfig, index: int, group: Any) -> None:
        super().__init__(config, index)
        self.mix: nn.Module = Attention()
        self.exchanged: tuple[int, ...] = ()
        if group is not None:
            self.mix = DistributedAttention(self.mix, group, num_kv_heads=config.kv_heads)
            self.exchanged = (0,)  # the dimension of the batch, which it asks for

    def _attention(self, value: Tensor) -> Tensor:
        """[B, S/C, H] -> [B, S/C, H]."""
        head = self.config.hidden // self.config.heads
        parts = torch.split(value @ self.qkv.T, list(self.config.qkv_sizes), dim=-1)
        mixed = self.mix(*(part.reshape(*part.shape[:2], -1, head) for part in parts), *self.exchanged)
        result: Tensor = mixed.flatten(2) @ self.out.T
        return result


class FlatGpt(nn.Module):
    """All layers in one module."""

    def __init__(self, config: GptConfig, topology: Topology) -> None:
        super().__init__()
        group = sequence_groups.get_sequence_parallel_group() if topology.cp > 1 else None
        self.embed = Embedding(config)
        self.blocks = nn.ModuleList(FlatBlock(config, index, group) for index in range(config.layers))
        self.norm = FinalNorm(config)
        self.loss = vocabulary_loss(config)

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        """Mean loss of this rank's part: [B, S/C], [B, S/C] -> []."""
        hidden = self.embed(tokens)
        for block in self.blocks:
            hidden = block(hidden)
        loss: Tensor = self.loss(project(self.embed, self.norm(hidden)), labels)
        return loss


def build_flat(config: GptConfig, topology: Topology) -> tuple[FlatGpt, Any]:
    """The model for one rank, and what `deepspeed.initialize` takes as `mpu`: the groups that share a sequence.

    Raises:
        ValueError: a topology that the model has no layers for.
    """
    if topology.tp > 1 or topology.pp > 1:
        raise ValueError(f"this model is not cut into tensors or stages, and the topology is {topology}")
    if topology.cp > 1:
        sequence_groups.initialize_sequence_parallel(topology.cp)
    return FlatGpt(config, topology), sequence_groups if topology.cp > 1 else None
