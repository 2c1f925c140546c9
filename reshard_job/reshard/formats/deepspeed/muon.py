"""Locate the momentum of DeepSpeed's Muon at ZeRO-1 and 2, which is kept for whole parameters.

Muon orthogonalizes matrices, so a rank holds the momentum of every parameter that has elements in its partition. The
buffer has one momentum after the other, without padding. Where a border of partitions cuts a parameter, both ranks hold
all of its momentum: two copies (stage_1_and_2.py 0.19.8, `_muon_momentum_buffer`). If the optimizer is offloaded to the
CPU (`_apply_muon_updates_cpu_offload`), and always in ZeRO-3 and BF16_Optimizer, momentum is partitioned like any other
state.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from reshard.errors import CorruptSourceError, UnsupportedError
from reshard.formats.deepspeed.fields import Kind, read_offload_device
from reshard.formats.deepspeed.flat import FlatGroup, Span
from reshard.formats.pt.objects import Tensor

MOMENTUM = "momentum_buffer"
"""Name of the state; torch's SGD has a state of the same name, which is partitioned."""


def is_muon(group: Mapping[str, Any]) -> bool:
    """Return whether Muon updates an entry of the optimizer's `param_groups`; Adam updates the other entries."""
    return group.get("use_muon") is True


def has_whole_momentum(kind: Kind, group: Mapping[str, Any], zero_config: Mapping[str, Any]) -> bool:
    """Return whether an optimizer of this kind keeps the momentum of whole parameters for the group."""
    return kind is Kind.ZERO12 and is_muon(group) and read_offload_device(zero_config) is None


def is_same_training(one: Kind, other: Kind) -> bool:
    """Return whether Muon trains with the same numbers in both kinds of optimizer.

    ZeRO-1 to 3 orthogonalize before gradients are clipped, the others after.
    """
    sharded = {Kind.ZERO12, Kind.ZERO3}
    return one is other or {one, other} <= sharded


def locate_momentum(layout: FlatGroup, rank: int) -> tuple[Span, ...]:
    """Return the position of each parameter's momentum in a rank's buffer."""
    spans: list[Span] = []
    end = 0
    for span in layout.spans(rank):
        count = layout.num_elements[span.index]
        spans.append(Span(index=span.index, start=0, stop=count, offset=end))
        end += count
    return tuple(spans)


def count_momentum(layout: FlatGroup, rank: int) -> int:
    """Return the elements of a rank's buffer; 0 if its partition is all padding, for which DeepSpeed has no buffer."""
    return sum(span.stop for span in locate_momentum(layout, rank))


def count_earlier_copies(layout: FlatGroup, rank: int, index: int) -> int:
    """Count the earlier ranks that also hold the momentum of the parameter at an index."""
    return rank - layout.offsets[index] // layout.partition


def split_states(flat: Mapping[str, Tensor], *, whole: bool) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Split a rank's states into those that are partitioned and those of whole parameters."""
    whole_states = {key: tensor for key, tensor in flat.items() if whole and key == MOMENTUM}
    return {key: tensor for key, tensor in flat.items() if key not in whole_states}, whole_states


def check_momentum(at: int, whole: Mapping[str, Tensor], layout: FlatGroup, rank: int, path: str) -> None:
    """Check the length of the momentum against the sizes of the parameters.

    Raises:
        CorruptSourceError: it has another length.
    """
    expected = count_momentum(layout, rank)
    for key, tensor in whole.items():
        if tensor.num_elements != expected:
            raise CorruptSourceError(
                f"group {at}: {key!r} has {tensor.num_elements} elements, expected {expected}: Muon keeps that of whole"
                " parameters where the optimizer is not offloaded",
                path=path,
            )


def refuse_elastic(path: str) -> None:
    """Raise UnsupportedError for momentum in an elastic checkpoint, which trims momentum and omits Muon's settings."""
    raise UnsupportedError(
        "is an elastic checkpoint with a momentum of another length than its partition",
        path=path,
        hint="save Muon's states with elastic_checkpoint false: DeepSpeed takes the padding of the partition off them",
    )


def refuse_experts(name: str, path: str) -> None:
    """Raise UnsupportedError for experts that Muon optimizes."""
    raise UnsupportedError(
        f"the momentum of Muon for experts, such as {name}, is not laid out",
        path=path,
        hint="resume at the degrees of parallelism that it was saved with, or let Adam optimize the experts",
    )
