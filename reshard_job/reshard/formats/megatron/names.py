"""Classify the entries of a Megatron-Core checkpoint by key: weights, optimizer states, and stacked layers.

Source: megatron/core/dist_checkpointing/mapping.py and optimizer.py, megatron/core/optimizer/distrib_optimizer.py
(`sharded_param_state_fully_reshardable`), megatron/core/transformer/transformer_block.py of Megatron-Core 0.16.1.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Mapping

import numpy as np

from reshard.errors import CorruptSourceError, UnsupportedError
from reshard.formats.dcp.chunks import Chunks
from reshard.formats.dcp.metadata import Entry
from reshard.tensors.layout import TensorKey

NAME = "megatron"
_OPTIMIZER = re.compile(r"^(?:chained_\d+\.)?optimizer\.")
_STATE = re.compile(r"^(?:chained_\d+\.)?optimizer\.state\.(?P<state>[^.]+)\.(?P<name>.+)$")
_BUCKETS = re.compile(r"^(?:chained_\d+\.)?optimizer\.distributed\.")
_STACKED = re.compile(r"^(?P<head>(?:.*\.)?layers\.)(?P<tail>(?!\d+(?:\.|$)).+)$")
STATES = {"fp32_param": "fp32", "param": "fp32"}
"""Names of master weights in Megatron-Core's optimizer and distributed optimizer; other states keep their names."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class EntryNames:
    """The class of every entry.

    Attributes:
        tensors: weights and optimizer states; stacked layers are not split yet.
        buckets: keys of optimizer states that are laid out for the optimizer's own buffers, not for weights.
        objects: keys of everything that is not a tensor.
    """

    tensors: Mapping[str, TensorKey]
    buckets: tuple[str, ...]
    objects: tuple[str, ...]


def is_optimizer_key(key: str) -> bool:
    """Return True if the key is that of an entry of the optimizer."""
    return _OPTIMIZER.match(key) is not None


def find_names(entries: Iterable[Entry], where: str) -> EntryNames:
    """Classify each entry.

    Raises:
        UnsupportedError: a state of no weight, or of another shape than its weight.
    """
    listed = list(entries)
    weights = {entry.key: entry.shape for entry in listed if entry.is_tensor and not _OPTIMIZER.match(entry.key)}
    tensors: dict[str, TensorKey] = {key: TensorKey("weight", key) for key in weights}
    problems: list[str] = []
    for entry in listed:
        match = _STATE.match(entry.key) if entry.is_tensor else None
        if match is None:
            if entry.is_tensor and _OPTIMIZER.match(entry.key) and not _BUCKETS.match(entry.key):
                problems.append(f"{entry.key}: neither optimizer.state nor optimizer.distributed")
            continue
        state, name = match["state"], match["name"]
        if name not in weights:
            problems.append(f"{entry.key}: no weight is called {name}")
        elif entry.shape != weights[name]:
            problems.append(
                f"{entry.key} is {list(entry.shape or ())}, its weight {list(weights[name] or ())}: flattened, "
                "as Megatron-Core before 0.15 did"
            )
        else:
            tensors[entry.key] = TensorKey(STATES.get(state, state), name)
    if len(set(tensors.values())) < len(tensors):
        problems.append("two optimizers have a state of one weight")
    if problems:
        raise UnsupportedError(
            f"cannot tell what {len(problems)} entries are",
            path=where,
            problems=problems[:20],
            hint="load and save it with a current Megatron-Core, with --dist-ckpt-optim-fully-reshardable",
        )
    return EntryNames(
        tensors=tensors,
        buckets=tuple(entry.key for entry in listed if _BUCKETS.match(entry.key)),
        objects=tuple(entry.key for entry in listed if not entry.is_tensor and not _BUCKETS.match(entry.key)),
    )


def split_layers(entry: Entry, name: str, chunks: Chunks, where: str) -> tuple[int, tuple[str, ...]]:
    """Split an entry of stacked layers into one tensor for each layer.

    `decoder.layers.mlp.linear_fc1.weight` of shape [layers, ...] is one tensor for each layer, called
    `decoder.layers.<layer>.mlp.linear_fc1.weight`; Megatron-Core puts a chunk's layer in front as a dim of size 1.

    Returns:
        Number of leading dims that the entry has and its tensors do not (0 or 1), and the name of each tensor.

    Raises:
        UnsupportedError: chunks of several layers, which Megatron-Core does not write.
        CorruptSourceError: more layers than chunks.
    """
    match = _STACKED.match(name)
    if match is None or not entry.shape:
        return 0, (name,)
    if entry.shape[0] > len(chunks.size):
        raise CorruptSourceError(
            f"{entry.key} {list(entry.shape)}: {len(chunks.size)} chunks cannot hold {entry.shape[0]} layers",
            path=where,
        )
    wide = np.flatnonzero(chunks.size[:, 0] != 1)
    if len(wide):
        box, _ = chunks.chunk(int(wide[0]), len(entry.shape))
        raise UnsupportedError(
            f"{entry.key} {list(entry.shape)}: chunk {box} is of {box.size[0]} layers, expected one layer each",
            path=where,
        )
    return 1, tuple(f"{match['head']}{layer}.{match['tail']}" for layer in range(entry.shape[0]))
