"""Compute what the nodes of a target read of the source and of its files, for the choice of a mode. Pure."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from reshard.planning.plan import Plan
from reshard.tensors.intervals import Int64Array
from reshard.virtual.auto_mode import Needs
from reshard.virtual.restrict import restrict

_MOST_NODES = 4
"""Most nodes whose part of the plan is computed; of more nodes, an evenly spread sample of this size is used."""


def compute_needs(plan: Plan, ranks: Sequence[Int64Array], ranks_per_node: int) -> Needs:
    """Compute what a conversion moves, and what its nodes read.

    Args:
        plan: of the conversion.
        ranks: files that each rank opens, [ranks][files].
        ranks_per_node: consecutive ranks share a node.
    """
    nodes = [
        np.array(sorted(set(np.concatenate(ranks[first : first + ranks_per_node]).tolist())), dtype=np.int64)
        for first in range(0, len(ranks), ranks_per_node)
    ]
    sizes = np.array([file.num_bytes for file in plan.layout.files], dtype=np.int64)
    files = [int(sizes[own].sum()) for own in nodes]
    sampled = sorted({at * (len(nodes) - 1) // (_MOST_NODES - 1) for at in range(_MOST_NODES)})
    source = [restrict(plan, nodes[at].tolist()).bytes_to_read for at in sampled]
    return Needs(
        read=plan.bytes_to_read,
        write=plan.bytes_to_write,
        node_source=max(source),
        node_files=max(files),
        all_source=sum(source) * len(nodes) // len(source),
        all_files=sum(files),
    )
