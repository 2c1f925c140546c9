"""List the parameters of each chunk of a GPTModel, in the order in which its modules hold them.

A chunk is what one pipeline stage holds of the model, or one of its virtual stages. Chunks count from the first layer
to the last one: chunk `virtual * pp + stage` is on that stage. Parameters of a layer are in one of a few orders: norms
are modules of their own or fused into linear layers, and experts are modules of their own or grouped.

Source: megatron/core/transformer/transformer_layer.py (`get_transformer_layer_offset`), attention.py, mlp.py,
moe/moe_layer.py, moe/router.py, moe/experts.py (`SequentialMLP`, `TEGroupedMLP`) and moe/shared_experts.py of
Megatron-Core 0.16.1; for fused norms and grouped experts transformer_engine/pytorch/module/layernorm_linear.py and
grouped_linear.py.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from typing import NamedTuple

EMBEDDING, OUTPUT = "embedding.word_embeddings.weight", "output_layer.weight"
SPLIT_ALONG_LAST = "linear_fc2.weight"
"""End of the name of an experts' weight that tensor parallelism splits along its last dim."""
_LAYER = re.compile(r"decoder\.layers\.(?P<layer>\d+)\.(?P<leaf>.+)")
_FIRST = (EMBEDDING, "embedding.position_embeddings.weight")
_LAST = ("decoder.final_layernorm.weight", "decoder.final_layernorm.bias", OUTPUT, "output_layer.bias")


def _leaves(*modules: str) -> tuple[str, ...]:
    return tuple(f"{module}.{kind}" for module in modules for kind in ("weight", "bias"))


_NORM_1 = tuple(f"self_attention.linear_qkv.layer_norm_{kind}" for kind in ("weight", "bias"))
_NORM_2 = tuple(f"mlp.linear_fc1.layer_norm_{kind}" for kind in ("weight", "bias"))
_PROJECTION, _QKV = _leaves("self_attention.linear_proj"), _leaves("self_attention.linear_qkv")
_HEAD_NORMS = _leaves("self_attention.q_layernorm", "self_attention.k_layernorm")
_BEFORE_MLP = (*_NORM_2, *_leaves("pre_mlp_layernorm"))
"""The norm before the MLP; in front of experts, it is a module of its own in every order."""
_MLP = _leaves("mlp.linear_fc1", "mlp.linear_fc2")
_EXPERTS = _leaves("mlp.experts.experts.linear_fc1", "mlp.experts.experts.linear_fc2")
_SHARED_EXPERTS = (
    "mlp.shared_experts.gate_weight",
    *_leaves("mlp.shared_experts.linear_fc1", "mlp.shared_experts.linear_fc2"),
)
_REST = (*_QKV, *_HEAD_NORMS, *_BEFORE_MLP, *_MLP, *_leaves("mlp.router"), *_EXPERTS, *_SHARED_EXPERTS)
_ATTENTION: Mapping[str, tuple[str, ...]] = {
    "norms of their own": (*_NORM_1, *_PROJECTION),
    "norms fused into linear layers": (*_PROJECTION, *_NORM_1),
}
"""Orders of a layer's parameters, by their keys: `layer_norm_*` is a module in front, or inside of the next one."""
_GROUPED: Mapping[str, bool] = {"experts one after the other": False, "grouped experts": True}
_BUFFERS = frozenset({"mlp.router.expert_bias"})
"""Tensors of a layer that are not parameters: the optimizer does not have them."""


class OrderError(Exception):
    """The place of a parameter in the model is not known; the message says why."""


class Order(NamedTuple):
    """An order of a layer's parameters.

    Attributes:
        name: words for the user.
        leaves: names of the parameters in a layer, in the order.
        is_grouped: first linear layers of all experts are in front of their second ones.
    """

    name: str
    leaves: tuple[str, ...]
    is_grouped: bool


class Slot(NamedTuple):
    """A parameter in a chunk.

    Attributes:
        name: name of the parameter.
        expert: number of the expert among those of the rank; None if the parameter is not one of an expert.
    """

    name: str
    expert: int | None = None


def list_orders(names: Collection[str]) -> tuple[Order, ...]:
    """List the orders in which a model with these parameters may hold them."""
    experts = _GROUPED if any(is_of_experts(name) for name in names) else {"": False}
    return tuple(
        Order(f"{norms} and {kind}" if kind else norms, (*leaves, *_REST), is_grouped)
        for norms, leaves in _ATTENTION.items()
        for kind, is_grouped in experts.items()
    )


def is_of_experts(name: str) -> bool:
    """Return True if the name is that of a parameter of all experts of a layer, of shape [experts, ...]."""
    match = _LAYER.fullmatch(name)
    return match is not None and match["leaf"] in _EXPERTS


def list_chunks(names: Collection[str], order: Order, num_chunks: int, num_local: int) -> list[list[Slot]]:
    """List the parameters of each chunk, in the module's order.

    Args:
        names: all parameters of the model.
        order: order of the parameters in a layer.
        num_chunks: number of stages, each counted as often as it has virtual stages.
        num_local: number of experts that a rank has of each layer.

    Raises:
        OrderError: a parameter of which the place in the order is not known, or layers that are not split evenly.
    """
    layers: dict[int, set[str]] = {}
    for name in names:
        match = _LAYER.fullmatch(name)
        if match is not None and match["leaf"] in order.leaves:
            layers.setdefault(int(match["layer"]), set()).add(match["leaf"])
        elif name not in (*_FIRST, *_LAST) and (match is None or match["leaf"] not in _BUFFERS):
            raise OrderError(f"the order of {name} is not known")
    if sorted(layers) != list(range(len(layers))) or len(layers) % num_chunks:
        raise OrderError(f"{len(layers)} layers in {num_chunks} stages")
    each = len(layers) // num_chunks
    chunks = []
    for chunk in range(num_chunks):
        slots = [Slot(name) for name in _FIRST if name in names] if chunk == 0 else []
        for layer in range(chunk * each, (chunk + 1) * each):
            slots += _list_layer(f"decoder.layers.{layer}.", layers[layer], order, num_local)
        if chunk == num_chunks - 1:
            last = [EMBEDDING if name == OUTPUT and name not in names and num_chunks > 1 else name for name in _LAST]
            slots += [Slot(name) for name in last if name in names]
        chunks.append(slots)
    return chunks


def _list_layer(head: str, leaves: Collection[str], order: Order, num_local: int) -> list[Slot]:
    """List the parameters of a layer; experts come where their first parameter is in the order."""
    slots: list[Slot] = []
    experts = [leaf for leaf in _EXPERTS if leaf in leaves]
    for leaf in order.leaves:
        if leaf not in leaves:
            continue
        if leaf not in _EXPERTS:
            slots.append(Slot(head + leaf))
        elif leaf == experts[0]:
            slots += _list_experts(head, experts, num_local, is_grouped=order.is_grouped)
    return slots


def _list_experts(head: str, leaves: list[str], num_local: int, *, is_grouped: bool) -> list[Slot]:
    modules = dict.fromkeys(leaf.rpartition(".")[0] for leaf in leaves)
    blocks = [[leaf for leaf in leaves if leaf.startswith(f"{module}.")] for module in modules]
    if not is_grouped:
        blocks = [leaves]
    return [Slot(head + leaf, expert) for block in blocks for expert in range(num_local) for leaf in block]
