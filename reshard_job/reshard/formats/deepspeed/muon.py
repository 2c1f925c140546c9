"""The momentum of DeepSpeed's Muon at ZeRO-1 and 2: it orthogonalizes matrices, and so keeps it for whole parameters.

A rank holds that of every parameter of which its partition has a part, one behind the other and without padding. Where
a border of partitions cuts a parameter, both ranks hold all of its momentum: two copies (stage_1_and_2.py 0.19.8,
`_muon_momentum_buffer`). Offloaded to the CPU it is partitioned like any other state
(`_apply_muon_updates_cpu_offload`), as it always is in ZeRO-3 and BF16_Optimizer.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from reshard.errors import CorruptSourceError, UnsupportedError
from reshard.formats.deepspeed.fields import Kind, offload_device
from reshard.formats.deepspeed.flat import FlatGroup, Span
from reshard.formats.pt.objects import Tensor

MOMENTUM = "momentum_buffer"
"""Name of the state; that of torch's SGD, which is partitioned, is called the same."""


def is_muon(group: Mapping[str, Any]) -> bool:
    """An entry of the optimizer's `param_groups` is updated by Muon, and not by the Adam at its side."""
    return group.get("use_muon") is True


def keeps_whole(kind: Kind, group: Mapping[str, Any], zero_config: Mapping[str, Any]) -> bool:
    """An optimizer of this kind keeps the momentum of whole parameters for the group."""
    return kind is Kind.ZERO12 and is_muon(group) and offload_device(zero_config) is None


def same_numbers(one: Kind, other: Kind) -> bool:
    """Muon goes on alike in both: ZeRO-1 to 3 orthogonalize before gradients are clipped, the others after."""
    sharded = {Kind.ZERO12, Kind.ZERO3}
    return one is other or {one, other} <= sharded


def whole_spans(layout: FlatGroup, rank: int) -> tuple[Span, ...]:
    """Where each parameter's momentum lies in a rank's buffer."""
    found: list[Span] = []
    end = 0
    for span in layout.spans(rank):
        count = layout.num_elements[span.index]
        found.append(Span(index=span.index, start=0, stop=count, offset=end))
        end += count
    return tuple(found)


def num_whole(layout: FlatGroup, rank: int) -> int:
    """Elements of a rank's buffer; DeepSpeed makes none where its partition is all padding."""
    return sum(span.stop for span in whole_spans(layout, rank))


def nth_copy(layout: FlatGroup, rank: int, index: int) -> int:
    """How many earlier ranks hold the momentum of the parameter at an index too."""
    return rank - layout.offsets[index] // layout.partition


def split(flat: Mapping[str, Tensor], *, whole: bool) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """A rank's states that are partitioned, and those of whole parameters."""
    kept = {key: tensor for key, tensor in flat.items() if whole and key == MOMENTUM}
    return {key: tensor for key, tensor in flat.items() if key not in kept}, kept


def check(at: int, whole: Mapping[str, Tensor], layout: FlatGroup, rank: int, path: str) -> None:
    """The momentum is as long as the parameters say.

    Raises:
        CorruptSourceError: it is not.
    """
    expected = num_whole(layout, rank)
    for key, tensor in whole.items():
        if tensor.num_elements != expected:
            raise CorruptSourceError(
                f"group {at}: {key!r} has {tensor.num_elements} elements, expected {expected}: Muon keeps that of whole"
                " parameters where the optimizer is not offloaded",
                path=path,
            )


def refuse_elastic(path: str) -> None:
    """Raise UnsupportedError: an elastic checkpoint does not say which groups are Muon's, and cuts off their ends."""
    raise UnsupportedError(
        "is an elastic checkpoint with a momentum of another length than its partition",
        path=path,
        hint="save Muon's states with elastic_checkpoint false: DeepSpeed takes the padding of the partition off them",
    )


def refuse_experts(name: str, path: str) -> None:
    """Raise UnsupportedError: experts are optimized by Muon."""
    raise UnsupportedError(
        f"the momentum of Muon for experts, such as {name}, is not laid out",
        path=path,
        hint="resume at the degrees of parallelism that it was saved with, or let Adam optimize the experts",
    )
