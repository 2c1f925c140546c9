"""What a run has to set as the source did, because DeepSpeed's files say nothing of it and its load does not check."""

from __future__ import annotations

import math

from reshard.formats.deepspeed import flat
from reshard.formats.deepspeed.fields import Kind, offload_device
from reshard.formats.deepspeed.groups import uses_muon
from reshard.formats.deepspeed.target import Target


def advice(target: Target) -> tuple[str, ...]:
    """Settings of the run that loads the target, for people; none where DeepSpeed's defaults do."""
    source, zero, found = target.source, target.source.zero_config, []
    if target.round_robin:
        found.append("resume with round_robin_gradients on, as the source ran: DeepSpeed loads other values without it")
    scaled = target.kind is Kind.ZERO3 and source.half_type == "float16"  # offloaded it has no loss scale
    if (target.kind is Kind.ZERO12 or scaled) and uses_muon(source):
        how = "with" if offload_device(zero) else "without"
        found.append(f"resume {how} offload_optimizer, as the source ran: Muon's momentum is laid out for that")
    size = int(zero.get("sub_group_size") or 0)
    if target.topology.zero == 3 and size and _is_cut(target, size):
        found.append(f"resume with zero_optimization.sub_group_size {size}, as the source ran: groups are cut by it")
    return tuple(found)


def _is_cut(target: Target, sub_group_size: int) -> bool:
    """A parameter group takes several sub-groups."""
    dp = target.topology.dp
    counts = [[math.prod(target.shard(name, 0)) for name in group] for stage in target.stages for group in stage.groups]
    return any(len(flat.zero3_sub_groups(group, dp, sub_group_size)) > 1 for group in counts)
