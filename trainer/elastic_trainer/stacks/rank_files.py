"""Files of a commit that belong to one rank: states of random number generators and of data streams.

They lie in a folder of their own, which neither frameworks nor `reshard` read. A resharded commit has none of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from reshard.commits.commit import read_commit
from reshard.topology import Topology

FOLDER = "elastic_trainer"
"""Folder below the commit's folder."""


def write(folder: Path, rank: int, states: Mapping[str, Any]) -> None:
    """Write the states of a rank."""
    import torch

    path = _path(folder, rank)
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.save(dict(states), path)


def read(folder: Path, topology: Topology, rank: int) -> tuple[dict[str, Any] | None, dict[str, Any] | None]:
    """Return the states of this rank, and of the first rank of the same replica.

    Args:
        folder: the commit's folder, after its files were checked.
        topology: of this attempt.
        rank: of this process.

    Returns:
        The states of this rank, or None if the commit has another topology or no such file. The states of a rank that
        had the same data, or None if the number of replicas is another.
    """
    written = read_commit(folder).topology
    own = _load(folder, rank) if written == topology else None
    if written.num_replicas != topology.num_replicas:
        return own, None
    peer = written.rank(pp=0, dp=topology.replica(rank) * written.cp, tp=0)
    return own, _load(folder, peer)


def _load(folder: Path, rank: int) -> dict[str, Any] | None:
    import torch

    path = _path(folder, rank)
    if not path.exists():
        return None
    states: dict[str, Any] = torch.load(path, weights_only=True)
    return states


def _path(folder: Path, rank: int) -> Path:
    return folder / FOLDER / f"rank-{rank:05d}.state"
