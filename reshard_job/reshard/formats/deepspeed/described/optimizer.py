"""Which states and settings the optimizer of the run to come keeps, from its configuration and model description.

Sources: `_configure_optimizer` and `_configure_basic_optimizer` in deepspeed/runtime/engine.py, deepspeed/ops/adam/ and
runtime/lr_schedules.py (0.19.8), torch.optim (2.13). Only optimizers whose states are known are made.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from reshard.errors import UnsupportedError, UsageError
from reshard.formats.deepspeed.configured import make_groups
from reshard.formats.deepspeed.described.description import ModelDescription
from reshard.formats.pt.objects import new_tensor
from reshard.tensors.layout import Index

_LIKE = "name with --like a DeepSpeed checkpoint of the same model, which has them"
_ADAM = ("exp_avg", "exp_avg_sq")
_TORCH_ADAMS = ("torch.optim.adam.Adam", "torch.optim.adamw.AdamW")
_DEEPSPEED_ADAMS = ("deepspeed.ops.adam.fused_adam.FusedAdam", "deepspeed.ops.adam.cpu_adam.DeepSpeedCPUAdam")
_SGD = "torch.optim.sgd.SGD"
_KNOWN = (*_TORCH_ADAMS, *_DEEPSPEED_ADAMS, _SGD)
_SCHEDULERS = ("LRRangeTest", "OneCycle", "WarmupLR", "WarmupDecayLR", "WarmupCosineLR")
"""DeepSpeed's own, whose whole state is the number of their last step."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Optimizer:
    """The optimizer of the run to come.

    Attributes:
        name: for people.
        order: its states in its own order, `step` among them if it counts.
        settings: of each parameter group, without `params`.
        step: the count of a group, in the form in which the optimizer keeps it; None if it counts none.
    """

    name: str
    order: tuple[str, ...]
    settings: tuple[Mapping[str, Any], ...]
    step: Any = None

    @property
    def tensors(self) -> tuple[str, ...]:
        """Names of the states that have one value per weight."""
        return tuple(state for state in self.order if state != "step")


def find_optimizer(description: ModelDescription, config: Mapping[str, Any], index: Index) -> Optimizer:
    """Find the optimizer of the run that will load the target.

    Args:
        description: of the model.
        config: DeepSpeed's configuration of that run.
        index: the source, whose step says where a configured schedule stands.

    Raises:
        UsageError: configuration and description do not go together, or lack settings.
        UnsupportedError: an optimizer or a schedule whose states are not known.
    """
    section = config.get("optimizer")
    if description.optimizer and section is not None:
        raise UsageError(
            f"names the optimizer {description.optimizer}, and the configuration has one, too: DeepSpeed would take the"
            " one that the script passes",
            path=str(description.path),
            hint="describe the model without the optimizer, or remove optimizer from the configuration",
        )
    if section is not None:
        return _make_configured(description, config, index, section)
    if not description.optimizer:
        raise UsageError(
            "names no optimizer, and the configuration has none",
            path=str(description.path),
            hint="describe the model with the optimizer that the script passes to deepspeed.initialize, or add"
            " optimizer to the configuration",
        )
    return _make_passed(description)


def make_schedule(config: Mapping[str, Any], step: int) -> dict[str, int] | None:
    """Return the state of the configured learning-rate schedule after `step` steps; None if there is none.

    Raises:
        UnsupportedError: a schedule whose state is not known.
    """
    section = config.get("scheduler")
    if section is None:
        return None
    kind = section.get("type") if isinstance(section, Mapping) else None
    if kind not in _SCHEDULERS:
        raise UnsupportedError(
            f"--ds-config has the scheduler {kind!r:.40}, whose state is not known: expected one of"
            f" {', '.join(_SCHEDULERS)}",
            hint=_LIKE,
        )
    return {"last_batch_iteration": step - 1}


def _make_configured(description: ModelDescription, config: Mapping[str, Any], index: Index, section: Any) -> Optimizer:
    """Make the optimizer that DeepSpeed builds from its configuration: one of its Adams, or torch's."""
    params = section.get("params", {}) if isinstance(section, Mapping) else {}
    is_torch = isinstance(params, Mapping) and params.get("torch_adam") is True
    states = [dict.fromkeys(("step", *_ADAM)) for _ in description.groups]
    own = [{key: _to_json(value) for key, value in group.settings.items()} for group in description.groups]
    has_rates = bool(index.groups) and all("lr" in group.options for group in index.groups)
    schedule = None if has_rates else make_schedule(config, index.step)
    try:
        settings = make_groups(
            {**config, "optimizer": {**section, "param_groups": own} if isinstance(section, Mapping) else section},
            states,
            {"lr_scheduler": schedule, "ds_config": config},
            None,
        )
    except UsageError as error:
        raise UsageError(f"--ds-config {error.message}", problems=error.problems, hint=error.hint) from error
    if any(group.get("amsgrad") for group in settings):
        raise UnsupportedError("--ds-config: amsgrad keeps a state that is not made", hint=_LIKE)
    if is_torch:  # torch's Adam has no such setting, and DeepSpeed tells its own by it
        settings = tuple({key: value for key, value in group.items() if key != "bias_correction"} for group in settings)
    name = f"{section['type']} of {'torch' if is_torch else 'DeepSpeed'}"
    return Optimizer(name=name, order=("step", *_ADAM), settings=settings, step=_make_step(is_torch=is_torch))


def _make_passed(description: ModelDescription) -> Optimizer:
    """Make the optimizer that the script passes to `deepspeed.initialize`."""
    name = description.optimizer
    if name not in _KNOWN:
        raise UnsupportedError(
            f"names the optimizer {name:.120}, whose states are not known: expected one of {', '.join(_KNOWN)}",
            path=str(description.path),
            hint=_LIKE,
        )
    settings = tuple(group.settings for group in description.groups)
    wanted = ("lr", "momentum", "weight_decay") if name == _SGD else ("lr", "betas", "eps", "weight_decay")
    problems = [
        f"group {at}: the setting {key} is missing"
        for at, group in enumerate(settings)
        for key in wanted
        if key not in group
    ]
    if problems:
        raise UsageError(f"lacks settings of {name}", path=str(description.path), problems=problems)
    if name == _SGD:
        return Optimizer(name=name, order=_find_common([bool(group["momentum"]) for group in settings], description),
                         settings=settings)  # fmt: skip
    if any(group.get("amsgrad") for group in settings):
        raise UnsupportedError("amsgrad keeps a state that is not made", path=str(description.path), hint=_LIKE)
    step = _make_step(is_torch=name in _TORCH_ADAMS)
    return Optimizer(name=name, order=("step", *_ADAM), settings=settings, step=step)


def _find_common(has_momentum: Sequence[bool], description: ModelDescription) -> tuple[str, ...]:
    if len(set(has_momentum)) > 1:
        raise UnsupportedError("has groups of SGD with and without momentum", path=str(description.path), hint=_LIKE)
    return ("momentum_buffer",) if has_momentum[0] else ()


def _make_step(*, is_torch: bool) -> Any:
    """Return a count of 0 as the optimizer keeps it: torch's in a tensor, DeepSpeed's as a number."""
    return new_tensor("float32", (), np.zeros((), "<f4").tobytes()) if is_torch else 0


def _to_json(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value
