"""Read what each kind of optimizer saves besides tensors, and convert it to the fields of another kind.

Sources: `state_dict` and `load_state_dict` in deepspeed/runtime/zero/stage_1_and_2.py, zero/stage3.py,
bf16_optimizer.py, fp16/unfused_optimizer.py and fp16/fused_optimizer.py (0.19.8).
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from typing import Any

from reshard.errors import UnsupportedError
from reshard.formats.deepspeed.contents import DeepSpeedContents
from reshard.formats.deepspeed.unpartitioned import FLAT_MASTERS, unwrap_optimizer
from reshard.formats.pt.objects import Global, Inert
from reshard.topology import Topology

_CLIP_GRAD = 1.0
"""DeepSpeed's default for `gradient_clipping` (runtime/constants.py, GRADIENT_CLIPPING_DEFAULT)."""

_SCALER = Global("deepspeed.runtime.fp16.loss_scaler", "LossScaler")
_FLOAT32 = ("fp32", "float32", "torch.float32")


class Kind(enum.Enum):
    """Class of the optimizer whose state a checkpoint holds."""

    PLAIN = "optimizer of torch"
    UNFUSED = "FP16_UnfusedOptimizer"
    FUSED = "FP16_Optimizer"
    ZERO12 = "DeepSpeedZeroOptimizer"
    BF16 = "BF16_Optimizer"
    ZERO3 = "DeepSpeedZeroOptimizer_Stage3"


def detect_kind(state: Mapping[str, Any]) -> Kind:
    """Return the kind of a saved optimizer."""
    if "fp32_flat_groups" in state:
        return Kind.ZERO3
    if "single_partition_of_fp32_groups" in state:
        return Kind.ZERO12 if "zero_stage" in state else Kind.BF16
    if FLAT_MASTERS in state:
        return Kind.FUSED
    return Kind.UNFUSED if "fp32_groups" in state else Kind.PLAIN


def choose_kind(source: DeepSpeedContents, stage: int) -> Kind:
    """Return the kind that DeepSpeed makes at a ZeRO stage for the source's types.

    Source: engine.py, `_do_optimizer_sanity_check`.

    Raises:
        UnsupportedError: the source was trained in fp16 and the stage is 0, or DeepSpeed would take another optimizer.
    """
    if stage == 3:
        return Kind.ZERO3
    if stage == source.topology.zero:
        return detect_kind(source.optimizer(0, 0))
    if stage > 0:
        bf16 = stage == 1 and source.half_type == "bfloat16" and has_fp32_gradients(source.config)
        return Kind.BF16 if bf16 and read_offload_device(source.zero_config) != "cpu" else Kind.ZERO12
    if source.half_type == "float16":
        raise UnsupportedError("fp16 training is not laid out for ZeRO stage 0", path=str(source.folder))
    if not source.half_type:
        return Kind.PLAIN
    groups = read_base_state(source, 0, 0).get("param_groups") or [{}]
    if "bias_correction" in groups[0] and not is_fused(groups[0]):
        raise UnsupportedError(
            "DeepSpeed takes another optimizer at ZeRO stage 0 than the one that the source was trained with",
            path=str(source.folder),
            hint="choose zero=1",
        )
    return Kind.FUSED if is_fused(groups[0]) else Kind.UNFUSED


def is_fused(group: Mapping[str, Any]) -> bool:
    """Return whether a parameter group is one of DeepSpeed's FusedAdam.

    It has `bias_correction`; the groups of DeepSpeed's other optimizers have further keys.
    """
    return "bias_correction" in group and not group.keys() & {"amsgrad", "max_coeff"}


def read_base_state(source: DeepSpeedContents, mp: int, dp: int) -> Mapping[str, Any]:
    """Return the state dict of the inner optimizer; empty for an elastic checkpoint, which has no parameter groups."""
    state = source.optimizer(mp, dp)
    kind = detect_kind(state)
    if kind in (Kind.PLAIN, Kind.UNFUSED, Kind.FUSED):
        return unwrap_optimizer(state)
    inner = state.get("optimizer_state_dict" if kind is Kind.ZERO3 else "base_optimizer_state")
    return inner if isinstance(inner, Mapping) else {}


def require_settings(source: DeepSpeedContents) -> None:
    """Refuse a source, or a template, that lacks the settings of the optimizer's parameter groups.

    Raises:
        UnsupportedError: the message gives the reason.
    """
    if source.unread is not None:
        raise source.unread
    if not source.settings and not read_base_state(source, 0, 0).get("param_groups"):
        raise UnsupportedError(
            "is an elastic checkpoint, which keeps no settings of the optimizer (learning rate, betas, ...)",
            path=str(source.folder),
            hint="say them with --ds-config FILE, DeepSpeed's configuration of the run that saved it, or name with"
            " --like a checkpoint of the same model that was saved with elastic_checkpoint false",
        )


def read_scaling(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return the loss scaling of a state; DeepSpeed's initial values where the state has none."""
    return {
        "loss_scaler": state.get("loss_scaler", Inert("new", _SCALER, (), {"cur_scale": 1.0, "dynamic": False})),
        "dynamic_loss_scale": state.get("dynamic_loss_scale", False),
        "overflow": state.get("overflow", False),
    }


def read_clipping(state: Mapping[str, Any], config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the gradient clipping of a state; the configured value where the state has none."""
    return {"clip_grad": state.get("clip_grad", config.get("gradient_clipping", _CLIP_GRAD))}


def refuse_small_gradients(source: DeepSpeedContents, target: Topology) -> None:
    """Refuse to move the moments of training with a loss scale from or to ZeRO-0.

    At ZeRO-0 DeepSpeed divides gradients by the loss scale but does not multiply the loss by it: engine.py, `backward`,
    does that only for a `ZeROOptimizer` (0.19.8; seen in its moments). Gradients and moments are too small there.

    Raises:
        UnsupportedError: the source trains with a loss scale, and either it or the target is at stage 0.
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


def has_fp32_gradients(config: Mapping[str, Any]) -> bool:
    """Return whether gradients are accumulated in fp32; DeepSpeed then takes BF16_Optimizer at stage 1."""
    types = config.get("data_types")
    return isinstance(types, Mapping) and types.get("grad_accum_dtype") in _FLOAT32


def read_offload_device(zero_config: Mapping[str, Any]) -> str | None:
    """Return the device to which the optimizer's states are offloaded, `cpu` or `nvme`; None without offloading."""
    if zero_config.get("cpu_offload") is True:  # the older name of the setting
        return "cpu"
    offload = zero_config.get("offload_optimizer")
    device = offload.get("device") if isinstance(offload, Mapping) else None
    return device if device in ("cpu", "nvme") else None


def convert_fields(kind: Kind, source: DeepSpeedContents, mp: int, dp: int) -> dict[str, Any]:
    """Return the fields of a kind in DeepSpeed's order, with the source's values; None where the writer fills them."""
    state = source.optimizer(mp, dp)
    if kind is detect_kind(state):
        return {key: value for key, value in state.items() if key != "base_optimizer_state_step"}
    scaling, clip = read_scaling(state), read_clipping(state, source.config)
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
