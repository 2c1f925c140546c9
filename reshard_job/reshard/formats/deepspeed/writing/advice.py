"""List settings that a run must take over from the source, because DeepSpeed neither saves nor checks them."""

from __future__ import annotations

import re
from collections import Counter

from reshard.errors import UnsupportedError
from reshard.formats.deepspeed.fields import Kind, read_offload_device
from reshard.formats.deepspeed.reading.groups import has_muon
from reshard.formats.deepspeed.writing.target import Target
from reshard.formats.deepspeed.writing.zero3 import list_sub_groups
from reshard.topology import Topology

PER_ELEMENT = {
    *("weight", "fp32", "exp_avg", "exp_avg_sq", "max_exp_avg_sq", "exp_inf", "momentum_buffer", "sum"),
    *("square_avg", "grad_avg", "acc_delta", "ax", "prev", "step_size"),
}
"""States of optimizers that compute each element of a parameter by itself (torch 2.13 and DeepSpeed 0.19.8).

An optimizer with other states may compute over whole tensors, as Adafactor does. In the ZeRO stages 1 to 3, its tensors
are a rank's flat partitions: there it keeps other states than for matrices, and computes other numbers.
"""
_SHARED = {"step", "mu_product", "eta", "mu"}
"""States of these optimizers that are one number, which follows from the step: the last two are ASGD's."""
_VERSION = re.compile(r"(\d+)\.(\d+)\.(\d+)")
_OTHER_PIPELINES = (0, 16, 0), (0, 19, 8)
"""First version with other gradients of pipelines, and first version without.

0.15.4 and 0.19.8 divide a pipeline's gradients by the number of micro-batches, once.
"""
_LOADS_BF16 = (0, 18, 0)
"""First version that loads bf16 at ZeRO-0.

0.14 to 0.16 take BF16_Optimizer, and 0.17 fails; 0.18.9 and 0.19.8 load the files.
"""


def collect_advice(target: Target, before: Topology | None) -> tuple[str, ...]:
    """List the settings of the run that loads the target, for people; empty if DeepSpeed's defaults are right.

    `before` is the source's topology, None if its files do not state all of it.
    """
    source, zero, notes = target.source, target.source.zero_config, []
    if source.settings:
        stated = "; ".join(
            f"lr {group['lr']:g}, betas {group['betas']}, eps {group['eps']:g}, weight_decay {group['weight_decay']:g}"
            for group in source.settings
        )
        notes.append(f"the optimizer's settings are those of --ds-config, as the checkpoint keeps none: {stated}")
    if target.round_robin:
        notes.append("resume with round_robin_gradients on, as the source ran: DeepSpeed loads other values without it")
    scaled = target.kind is Kind.ZERO3 and source.half_type == "float16"  # an offloaded optimizer has no loss scale
    if (target.kind is Kind.ZERO12 or scaled) and has_muon(source):
        how = "with" if read_offload_device(zero) else "without"
        notes.append(f"resume {how} offload_optimizer, as the source ran: Muon's momentum is laid out for that")
    size = int(zero.get("sub_group_size") or 0)
    if target.topology.zero == 3 and size and any(len(parts) > 1 for parts in list_sub_groups(target, 0)):
        notes.append(f"resume with zero_optimization.sub_group_size {size}, as the source ran: groups are cut by it")
    gain = 1.0 if before is None else _compute_gradient_gain(target.topology) / _compute_gradient_gain(before)
    if gain != 1:
        notes.append(
            f"DeepSpeed's gradients are {gain:g} times the source's at this cp and stage, and the moments do not scale:"
            f" multiply the loss by {1 / gain:g}, unless the script makes up for it"
        )
    if untied := _list_untied(target):
        notes.append(
            f"{', '.join(untied)}: the first stage's copy is taken, as pipeline_replicated_parameter_patterns says;"
            " those of other stages are not compared"
        )
    version = str(source.models[0, 0].value.get("ds_version"))
    if source.pipeline and _has_other_pipeline_scale(version):
        notes.append(
            f"moments of pipelines by DeepSpeed {version} have the size of its gradients, which were too large by"
            " gradient_accumulation_steps (since 0.16.0), or too small by it in all stages but the last (0.18.9): where"
            " that number, pp or the version changes, losses differ until the moments have adapted"
        )
    if target.kind in (Kind.UNFUSED, Kind.FUSED) and _is_before(version, _LOADS_BF16):
        notes.append(
            f"DeepSpeed {version} does not load these files (seen in 0.14 to 0.17): train on with 0.18 or later,"
            " or choose zero=1"
        )
    return tuple(notes)


def refuse_flat_states(target: Target, *, is_flat: bool) -> None:
    """Refuse states of flat partitions for an optimizer that gets parameters in their own shape.

    Args:
        target: with all its tensors.
        is_flat: the source keeps states in flat partitions.

    Raises:
        UnsupportedError: the message names the first state.
    """
    if not is_flat or target.kind not in (Kind.PLAIN, Kind.UNFUSED):
        return
    numbers = ", ".join(sorted(_find_unknown_numbers(target)))
    for tensor in target.rows.tensors:
        if len(tensor.shape) > 1 and (numbers or tensor.key.state not in PER_ELEMENT):
            state = numbers or f"{tensor.key} {list(tensor.shape)}"
            raise UnsupportedError(
                f"{state}: the source has this state for a flat partition, and it is not known whether the optimizer"
                " keeps it for a matrix",
                path=str(target.source.folder),
                hint="Adafactor, for instance, keeps rows and columns of a matrix: choose ZeRO stage 1, 2 or 3",
            )


def note_partitioned_states(target: Target, before: Topology) -> tuple[str, ...]:
    """Return a note about states that may depend on how parameters are cut into partitions, if that changes."""
    states = sorted(
        ({tensor.key.state for tensor in target.rows.tensors} - PER_ELEMENT) | _find_unknown_numbers(target)
    )
    if not states or before == target.topology or before.zero == target.topology.zero == 0:
        return ()
    note = (
        f"{', '.join(states)}: states of an optimizer that may compute over whole tensors. At ZeRO stages 1 to 3 it"
        " computes over the partition of a rank, so training goes on with other numbers where partitions change"
    )
    return (note,)


def _find_unknown_numbers(target: Target) -> set[str]:
    """Find the states that are one number for a group, and that an optimizer may compute over whole tensors (`RMS`)."""
    groups = () if target.weights_alone else range(len(target.extra.model.groups))
    return {state for group in groups for state in target.group_template(group, 0).scalars} - _SHARED


def _list_untied(target: Target) -> list[str]:
    """List the parameters that several stages of the source hold and only the first one uses."""
    model = target.extra.model
    held = Counter(name for stage in model.stages for group in stage.groups for name in group)
    return sorted(name for name, count in held.items() if count > 1 and model.patterns.takes_first_stage(name))


def _is_before(version: str, other: tuple[int, ...]) -> bool:
    match = _VERSION.match(version)
    return match is not None and tuple(map(int, match.groups())) < other


def _has_other_pipeline_scale(version: str) -> bool:
    """Return whether a version scales gradients of pipelines otherwise than 0.19.8.

    Seen in moments of 0.16.9 and 0.18.9, and in the sources of 0.16.0 to 0.18.0 and 0.19.0 (engine.py, `backward`).
    """
    first, fixed = _OTHER_PIPELINES
    return _is_before(version, fixed) and not _is_before(version, first)


def _compute_gradient_gain(topology: Topology) -> int:
    """Return the factor between gradients and their mean over all ranks.

    The gradients of the ranks of one sequence are summed, except in ZeRO-3.

    Source: engine.py, zero/stage_1_and_2.py (`dp_world_size / sequence_parallel_size`), zero/stage3.py (its
    reduce-scatter, the default, divides by all ranks); DeepSpeed 0.19.8, and seen in its moments.
    """
    return 1 if topology.zero == 3 else topology.cp
