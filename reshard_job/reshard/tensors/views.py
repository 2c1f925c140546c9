"""Select states and tensors of an index before a plan is made. Pure."""

from __future__ import annotations

import dataclasses

import numpy as np

from reshard.errors import UsageError
from reshard.tensors.layout import Index
from reshard.tensors.shard_table import ShardTable


def select_states(index: Index, states: tuple[str, ...]) -> Index:
    """Return the index with some states only (`weight`, `fp32`, `exp_avg`, ...); an empty tuple selects all.

    Raises:
        UsageError: the source does not hold a requested state.
        UnsupportedError: the source holds states that the format's reader cannot read, and they were requested.
    """
    if index.unread is not None and states == ("weight",):
        index = dataclasses.replace(index, unread=None)
    if index.unread is not None:
        raise index.unread
    if not states:
        return index
    held = sorted({tensor.key.state for tensor in index.tensors})
    if absent := sorted(set(states) - set(held)):
        raise UsageError(
            f"--states {','.join(states)}: the source does not hold {', '.join(absent)}, it holds {', '.join(held)}",
            path=str(index.root),
        )
    chosen = [at for at, tensor in enumerate(index.tensors) if tensor.key.state in states]
    left_out = tuple(state for state in held if state not in states)
    return dataclasses.replace(keep_tensors(index, chosen), left_out=left_out)


def keep_tensors(index: Index, chosen: list[int]) -> Index:
    """Return the index with the tensors at these positions only."""
    new = np.full(len(index.tensors), -1, dtype=np.int64)
    new[chosen] = np.arange(len(chosen))
    shards = index.shards
    rows = np.flatnonzero(new[shards.tensor] >= 0)
    columns = {field.name: getattr(shards, field.name)[rows] for field in dataclasses.fields(ShardTable)}
    columns["tensor"] = new[columns["tensor"]]
    tensors = tuple(index.tensors[at] for at in chosen)
    return dataclasses.replace(index, tensors=tensors, shards=ShardTable(**columns))
