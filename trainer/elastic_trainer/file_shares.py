"""Assigns each file of a commit to the rank that checks it before it is loaded. Pure.

A rank checks the files that it will load itself, as far as their names say so. The framework then reads them from the
page cache of the node, and each file crosses the network once.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from reshard.commits.commit import CommittedFile
from reshard.topology import Topology

_DCP = re.compile(r"__(\d{1,9})_\d{1,9}\.distcp")
_DEEPSPEED = re.compile(r"(?:bf16_|fp16_)?(?:zero_pp_rank_(\d{1,9})_)?mp_rank_(\d{1,9})_(?:model|optim)_states\.pt")


def share_of(files: Sequence[CommittedFile], *, rank: int, topology: Topology) -> list[CommittedFile]:
    """Return the files that a rank checks; each file is in the share of exactly one rank.

    Args:
        files: all files of the commit.
        rank: global rank.
        topology: topology of this attempt.
    """
    world_size = topology.world_size
    owners = (_writer_of(file.path.rpartition("/")[2], topology) for file in files)
    return [
        file
        for at, (file, owner) in enumerate(zip(files, owners, strict=True))
        if (at if owner is None else owner) % world_size == rank
    ]


def _writer_of(name: str, topology: Topology) -> int | None:
    """Return the rank that wrote a file at this topology, and loads it; None if its name does not say it."""
    if match := _DCP.fullmatch(name):
        return int(match[1])
    if match := _DEEPSPEED.fullmatch(name):
        replica, model = int(match[1] or 0), int(match[2])
        pp, tp = divmod(model, topology.tp)
        if pp < topology.pp and replica < topology.dp:
            return topology.rank(pp=pp, dp=replica, tp=tp)
    return None
