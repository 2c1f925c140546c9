"""Entries of a state dict that belong to single ranks, such as `dataloader.dp_rank_1` of torchtitan.

DCP gives such an entry to whoever asks for its name. At another number of ranks some ranks would find the entry of a
rank that did other work, and others none.
"""

from __future__ import annotations

import dataclasses
import re
from collections import defaultdict
from collections.abc import Iterable

from reshard.formats.dcp.metadata import Entry
from reshard.topology import Topology

_RANK = re.compile(
    r"(?:^|[.])((?:(?:rng|data|dataloader|sampler|global|local|world|[dtpces]p)[_-])*)rank[._-]?([0-9]{1,9})(?=\.|$)"
)
"""A whole part of a name that says `rank` and a number; `dp_rank` counts data-parallel replicas.

Other words before it mean something else: `low_rank.0` is a module, and `lora_rank_0` a setting.
"""

_SHOWN = 5


def select_entries(
    entries: Iterable[Entry], source: Topology, target: Topology
) -> tuple[tuple[Entry, ...], tuple[str, ...]]:
    """Leave out the entries of single ranks, unless the target has the same ranks.

    Entries belong to ranks if their names differ only in the rank's number, and the numbers begin at 0. All stay if all
    degrees of parallelism stay; `dp_rank` also if the target has as many data-parallel replicas as there are numbers.
    Tensors of floating-point numbers below `rank` alone are weights, averaged ones for instance, and stay.

    Args:
        entries: entries of neither model nor optimizer.
        source: topology that wrote them.
        target: topology of the target.

    Returns:
        The entries that are copied, and a note about the others.
    """
    chosen, ranks = tuple(entries), defaultdict[tuple[str, str], dict[int, None]](dict)
    if dataclasses.replace(source, zero=0) == dataclasses.replace(target, zero=0):
        return chosen, ()
    found = {
        entry.key: match
        for entry in chosen
        if (match := _RANK.search(entry.key)) is not None and (match[1] or "float" not in entry.dtype)
    }
    for match in found.values():
        ranks[_family(match)][int(match[2])] = None

    def is_kept(key: str) -> bool:
        match = found.get(key)
        if match is None or 0 not in (numbers := ranks[_family(match)]):
            return True
        return match[1][-3:-1] == "dp" and len(numbers) == target.num_replicas

    left = [entry.key for entry in chosen if not is_kept(entry.key)]
    if not left:
        return chosen, ()
    few = ", ".join(left[:_SHOWN]) + (", ..." if len(left) > _SHOWN else "")
    note = (
        f"left out, as they belong to single ranks and {target} has other ranks than the source: {few}; leave them out"
        " of what is loaded, too (torchtitan: checkpoint.exclude_from_loading)"
    )
    return tuple(entry for entry in chosen if is_kept(entry.key)), (note,)


def _family(match: re.Match[str]) -> tuple[str, str]:
    """Return the parts of a name that are the same for all ranks, before and after the number."""
    return match.string[: match.start(2)], match[1]
