"""What each kind of optimizer saves besides tensors, and the same in the words of another kind.

Sources: `state_dict` and `load_state_dict` in deepspeed/runtime/zero/stage_1_and_2.py, zero/stage3.py,
bf16_optimizer.py, fp16/unfused_optimizer.py and fp16/fused_optimizer.py (0.19.8).
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from typing import Any

from reshard.errors import UnsupportedError
from reshard.formats.deepspeed.contents import DeepSpeedContents
from reshard.formats.deepspeed.unpartitioned import FLAT_MASTERS, base_optimizer
from reshard.formats.pt.objects import Global, Inert
from reshard.topology import Topology

_CLIP_GRAD = 1.0
"""DeepSpeed's default for `gradient_clipping` (runtime/constants.py, GRADIENT_CLIPPING_DEFAULT)."""

_SCALER = Global("deepspeed.runtime.fp16.loss_scaler", "LossScaler")
_FLOAT32 = ("fp32", "float32", "torch.float32")


class Kind(enum.Enum):
    """The class whose state a checkpoint holds."""

    PLAIN = "optimizer of torch"
    UNFUSED = "FP16_UnfusedOptimizer"
    FUSED = "FP16_Optimizer"
    ZERO12 = "DeepSpeedZeroOptimizer"
    BF16 = "BF16_Optimizer"
    ZERO3 = "DeepSpeedZeroOptimizer_Stage3"


def kind_of(state: Mapping[str, Any]) -> Kind:
    """The kind of a saved optimizer."""
    if "fp32_flat_groups" in state:
        return Kind.ZERO3
    if "single_partition_of_fp32_groups" in state:
        return Kind.ZERO12 if "zero_stage" in state else Kind.BF16
    if FLAT_MASTERS in state:
        return Kind.FUSED
    return Kind.UNFUSED if "fp32_groups" in state else Kind.PLAIN


def target_kind(source: DeepSpeedContents, stage: int) -> Kind:
    """The kind that DeepSpeed makes at a ZeRO stage for the source's types (engine.py, `_do_optimizer_sanity_check`).

    Raises:
        UnsupportedError: fp16 at stage 0.
    """
    found = kind_of(source.optimizer(0, 0))
    if stage == 3:
        return Kind.ZERO3
    if stage == source.topology.zero:
        return found
    if stage > 0:
        bf16 = stage == 1 and source.half_type == "bfloat16" and is_wide(source.config)
        return Kind.BF16 if bf16 and offload_device(source.zero_config) != "cpu" else Kind.ZERO12
    if source.half_type == "float16":
        raise UnsupportedError("fp16 training is not laid out for ZeRO stage 0", path=str(source.folder))
    if not source.half_type:
        return Kind.PLAIN
    groups = base_state(source, 0, 0).get("param_groups") or [{}]
    if "bias_correction" in groups[0] and not is_fused(groups[0]):
        raise UnsupportedError(
            "DeepSpeed takes another optimizer at ZeRO stage 0 than the one that the source was trained with",
            path=str(source.folder),
            hint="choose zero=1",
        )
    return Kind.FUSED if is_fused(groups[0]) else Kind.UNFUSED


def is_fused(group: Mapping[str, Any]) -> bool:
    """A parameter group of DeepSpeed's FusedAdam: it has `bias_correction`; those of its other optimizers have more."""
    return "bias_correction" in group and not group.keys() & {"amsgrad", "max_coeff"}


def base_state(source: DeepSpeedContents, mp: int, dp: int) -> Mapping[str, Any]:
    """State dict of the optimizer inside; empty for an elastic checkpoint, which keeps no parameter groups."""
    state = source.optimizer(mp, dp)
    kind = kind_of(state)
    if kind in (Kind.PLAIN, Kind.UNFUSED, Kind.FUSED):
        return base_optimizer(state)
    inner = state.get("optimizer_state_dict" if kind is Kind.ZERO3 else "base_optimizer_state")
    return inner if isinstance(inner, Mapping) else {}


def require_settings(source: DeepSpeedContents) -> None:
    """Refuse a source, or a template, that says nothing about the optimizer's parameter groups.

    Raises:
        UnsupportedError: with the reason.
    """
    if source.unread is not None:
        raise source.unread
    if not base_state(source, 0, 0).get("param_groups"):
        raise UnsupportedError(
            "is an elastic checkpoint, which keeps no settings of the optimizer (learning rate, betas, ...)",
            path=str(source.folder),
            hint="name with --like a checkpoint of the same model that was saved with elastic_checkpoint false",
        )


def scaling_of(state: Mapping[str, Any]) -> dict[str, Any]:
    """Loss scaling as a state has it, else as DeepSpeed starts."""
    return {
        "loss_scaler": state.get("loss_scaler", Inert("new", _SCALER, (), {"cur_scale": 1.0, "dynamic": False})),
        "dynamic_loss_scale": state.get("dynamic_loss_scale", False),
        "overflow": state.get("overflow", False),
    }


def clipping_of(state: Mapping[str, Any], config: Mapping[str, Any]) -> dict[str, Any]:
    """Gradient clipping as a state has it, else as it is configured."""
    return {"clip_grad": state.get("clip_grad", config.get("gradient_clipping", _CLIP_GRAD))}


def refuse_small_gradients(source: DeepSpeedContents, target: Topology) -> None:
    """Moments that go on at ZeRO-0 alone, or cannot go there.

    There DeepSpeed divides gradients by a loss scale that it has not multiplied the loss by: engine.py, `backward`,
    does so for a `ZeROOptimizer` alone (0.19.8; seen in its moments).

    Raises:
        UnsupportedError: training with a loss scale, from or to stage 0.
    """
    scale = source.optimizer(0, 0).get("cur_scale", 1) if source.topology.zero == 0 else 1
    if target.zero > 0 and scale != 1:
        raise UnsupportedError(
            f"{target}: DeepSpeed's gradients are too small by the loss scale, {scale!r:.20}, at ZeRO stage 0, and the"
            " moments with them",
            path=str(source.folder),
            hint="choose zero=0, or start from the weights alone",
        )
    if target.zero == 0 < source.topology.zero and source.half_type == "float16":
        raise UnsupportedError("fp16 training is not laid out for ZeRO stage 0", path=str(source.folder))


def is_wide(config: Mapping[str, Any]) -> bool:
    """Gradients are gathered in fp32, for which DeepSpeed takes BF16_Optimizer at stage 1."""
    types = config.get("data_types")
    return isinstance(types, Mapping) and types.get("grad_accum_dtype") in _FLOAT32


def offload_device(zero_config: Mapping[str, Any]) -> str | None:
    """Where the optimizer's states are kept instead of in the accelerator, `cpu` or `nvme`."""
    if zero_config.get("cpu_offload") is True:  # what it was called before
        return "cpu"
    offload = zero_config.get("offload_optimizer")
    device = offload.get("device") if isinstance(offload, Mapping) else None
    return device if device in ("cpu", "nvme") else None


def fields_for(kind: Kind, source: DeepSpeedContents, mp: int, dp: int) -> dict[str, Any]:
    """Fields in DeepSpeed's order for a kind, with the source's values; None where the layout decides."""
    state = source.optimizer(mp, dp)
    if kind is kind_of(state):
        return {key: value for key, value in state.items() if key != "base_optimizer_state_step"}
    scaling, clip = scaling_of(state), clipping_of(state, source.config)
    version = {"ds_version": source.models[0, 0].value.get("ds_version")}
    flat = {"base_optimizer_state": None, "single_partition_of_fp32_groups": None}
    layout = {"group_paddings": None, "param_alignment_paddings": None, "partition_count": None}
    if kind is Kind.ZERO3:
        return {"zero_stage": None, **scaling, "partition_count": None, "optimizer_state_dict": None,
                "fp32_flat_groups": None}  # fmt: skip
    if kind is Kind.ZERO12:
        return {**scaling, **clip, **flat, "zero_stage": None, **layout, **version, "param_slice_mappings": None}
    if kind is Kind.BF16:
        del layout["param_alignment_paddings"]
        return {**clip, **flat, **layout, **version, "param_slice_mappings": None}
    if kind is Kind.UNFUSED:
        return {"dynamic_loss_scale": False, "cur_scale": 1.0, "cur_iter": source.step, "optimizer_state_dict": None,
                "fp32_groups": None}  # fmt: skip
    if kind is Kind.FUSED:  # bf16, without scaling of gradients
        return {"optimizer_state_dict": None, FLAT_MASTERS: None, **clip}
    return {"state": None, "param_groups": None}
