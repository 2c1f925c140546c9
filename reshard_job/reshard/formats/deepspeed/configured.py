"""Make the settings of parameter groups from a DeepSpeed configuration, for elastic checkpoints, which keep none.

Sources: `_get_base_optimizer_state` in deepspeed/runtime/zero/stage_1_and_2.py, runtime/lr_schedules.py and
ops/adam/ (0.19.8). Only what the configuration says, or what all of DeepSpeed's Adams take by default, is a setting.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from reshard.errors import UnsupportedError, UsageError
from reshard.storage.yaml_file import read_content

_ADAMS = ("adam", "adamw")
_STATES = {"step", "exp_avg", "exp_avg_sq"}
_SETTINGS = ("lr", "betas", "eps", "weight_decay", "amsgrad", "bias_correction")
_NOT_SETTINGS = ("torch_adam", "adam_w_mode", "fp32_optimizer_states", "fused", "foreach")
"""Parameters of an optimizer's constructor that are no settings of its groups, or do not change what it computes."""

_DEFAULTS: dict[str, Any] = {
    "betas": (0.9, 0.999),
    "eps": 1e-8,
    "bias_correction": True,  # of FusedAdam and DeepSpeedCPUAdam; torch's Adam takes no notice
    "amsgrad": False,
    "maximize": False,
    "foreach": None,
    "capturable": False,
    "differentiable": False,
    "fused": None,
}
_LARGEST = 1e300
COUNT = "base_optimizer_state_step"
"""Key of an elastic checkpoint for the steps that groups count; absent where they count none."""

_RATES = "expected WarmupLR or WarmupDecayLR, or a scheduler of torch"


def load(path: Path) -> Mapping[str, Any]:
    """Read a DeepSpeed configuration: JSON, without a key twice.

    Raises:
        UsageError: the file cannot be read, or is no such JSON.
    """
    try:
        value = json.loads(read_content(path), object_pairs_hook=_refuse_double_keys)
    except (ValueError, RecursionError) as error:
        raise UsageError(f"is no JSON: {error}", path=str(path)) from error
    if not isinstance(value, dict):
        raise UsageError(
            f"is {type(value).__name__}: expected DeepSpeed's configuration, a JSON object", path=str(path)
        )
    return value


def _refuse_double_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) < len(pairs):
        raise ValueError(f"a key of {[key for key, _ in pairs][:8]} occurs twice")
    return value


def make_groups(
    config: Mapping[str, Any], states: Sequence[Mapping[str, Any]], model: Mapping[str, Any], step: Any
) -> tuple[Mapping[str, Any], ...]:
    """Make the settings of every parameter group of an elastic checkpoint.

    Args:
        config: DeepSpeed's configuration of the run that saved it. `optimizer.param_groups` is reshard's own: a list
            with the settings that a group has instead of those in `optimizer.params`; needed for several groups.
        states: states of each group, as saved.
        model: content of the model file: `lr_scheduler` and `ds_config`.
        step: count of the groups, as saved; None if the groups have none.

    Raises:
        UsageError: the configuration lacks settings, or has others than numbers; the message lists every problem.
        UnsupportedError: another optimizer or scheduler.
    """
    optimizer = config.get("optimizer")
    section = optimizer if isinstance(optimizer, Mapping) else {}
    kind = section.get("type")
    if not isinstance(kind, str) or not isinstance(section.get("params", {}), Mapping):
        raise UsageError("has no optimizer.type and optimizer.params: they are not in the checkpoint")
    others = {key for group in states for key in group if key not in _STATES}
    if kind.lower() not in _ADAMS or others:
        raise UnsupportedError(
            f"optimizer {kind} with the states {', '.join(sorted(others | _STATES))}: settings are made for Adam and"
            " AdamW only",
            hint="name with --like a checkpoint of the same model that was saved with elastic_checkpoint false",
        )
    own = section.get("param_groups", [{}] if len(states) == 1 else None)
    if not isinstance(own, list) or len(own) != len(states) or not all(isinstance(group, Mapping) for group in own):
        raise UsageError(
            f"optimizer.params says one group, the checkpoint has {len(states)}",
            hint=f"add optimizer.param_groups, a list of {len(states)} objects with the settings of each group, such as"
            ' {"weight_decay": 0.0}, or name a checkpoint with --like',
        )
    merged = [{**section.get("params", {}), **group} for group in own]
    if problems := [problem for at, group in enumerate(merged) for problem in _find_problems(group, at)]:
        raise UsageError("lacks settings of the optimizer that the checkpoint does not keep", problems=problems)
    rates = _find_rates(config, model, merged)
    counted = {} if step is None else {"step": step}
    decoupled = kind.lower() == "adamw" or merged[0].get("adam_w_mode", True) is True
    return tuple(
        {
            **_DEFAULTS,
            **{key: tuple(value) if key == "betas" else value for key, value in group.items() if key in _SETTINGS},
            "lr": rate,
            "decoupled_weight_decay": decoupled,
            **counted,
        }
        for group, rate in zip(merged, rates, strict=True)
    )


def _is_number(value: Any) -> bool:
    """Return whether a value is a finite number that a float can hold."""
    return type(value) in (int, float) and -_LARGEST < value < _LARGEST


def _find_problems(group: Mapping[str, Any], at: int) -> list[str]:
    """List what is wrong with the settings of a group."""
    where = f"group {at}"
    problems = [f"{where}: {key} is missing" for key in ("lr", "weight_decay") if key not in group]
    problems += [
        f"{where}: {key} is {group[key]!r:.40}, expected a number"
        for key in ("lr", "weight_decay", "eps")
        if key in group and not _is_number(group[key])
    ]
    betas = group.get("betas", [0.9, 0.999])
    if not isinstance(betas, list) or len(betas) != 2 or not all(map(_is_number, betas)):
        problems.append(f"{where}: betas is {betas!r:.40}, expected two numbers")
    problems += [
        f"{where}: {key} is {group[key]!r:.40}, expected true or false"
        for key in ("amsgrad", "bias_correction")
        if key in group and type(group[key]) is not bool
    ]
    unknown = sorted(group.keys() - {*_SETTINGS, *_NOT_SETTINGS}, key=str)
    return problems + [f"{where}: {key!r:.40} is no setting of Adam" for key in unknown]


def _find_rates(
    config: Mapping[str, Any], model: Mapping[str, Any], groups: Sequence[Mapping[str, Any]]
) -> list[float]:
    """Return the learning rate of every group when the checkpoint was saved.

    Raises:
        UnsupportedError: it follows from a schedule that is not known here.
    """
    state = model.get("lr_scheduler")
    if state is None:
        return [float(group["lr"]) for group in groups]
    last = state.get("_last_lr") if isinstance(state, Mapping) else None
    if isinstance(last, list) and len(last) == len(groups) and all(map(_is_number, last)):
        return [float(rate) for rate in last]
    done = state.get("last_batch_iteration") if isinstance(state, Mapping) else None
    saved = model.get("ds_config")
    section = config.get("scheduler") or (saved.get("scheduler") if isinstance(saved, Mapping) else None)
    if not isinstance(section, Mapping) or type(done) is not int or not _is_number(done):
        raise UnsupportedError(
            f"has a learning-rate schedule, and nothing says the rate at which it stood: {_RATES} in the configuration",
            hint="name with --like a checkpoint of the same model that was saved with elastic_checkpoint false",
        )
    params = section.get("params", {})
    if section.get("type") not in ("WarmupLR", "WarmupDecayLR") or not isinstance(params, Mapping):
        raise UnsupportedError(
            f"the learning rate follows from the scheduler {section.get('type')!r:.40}: {_RATES}",
            hint="name with --like a checkpoint of the same model that was saved with elastic_checkpoint false",
        )
    decays = section["type"] == "WarmupDecayLR"
    return [_compute_warmup(params, done, float(group["lr"]), decays=decays) for group in groups]


def _compute_warmup(params: Mapping[str, Any], done: int, rate: float, *, decays: bool) -> float:
    """Return the learning rate of DeepSpeed's WarmupLR or WarmupDecayLR after `done` + 1 steps.

    Raises:
        UsageError: a parameter is no number.
    """
    numbers: dict[str, Any] = {"warmup_min_lr": 0.0, "warmup_max_lr": rate, "warmup_num_steps": 1000}
    if decays:
        numbers |= {"warmup_max_lr": 0.001, "total_num_steps": None}
    numbers |= {key: value for key, value in params.items() if key in numbers}
    if wrong := [key for key, value in numbers.items() if not _is_number(value)]:
        raise UsageError(f"scheduler.params.{wrong[0]} is {numbers[wrong[0]]!r:.40}, expected a number")
    low, high, total = numbers["warmup_min_lr"], numbers["warmup_max_lr"], numbers.get("total_num_steps", 0)
    steps = max(2, numbers["warmup_num_steps"])
    if done < 0:
        return float(low)
    gain = 1.0
    if done < steps:
        linear = params.get("warmup_type", "log") == "linear"
        gain = done / steps if linear else math.log(done + 1) / math.log(steps)
    elif decays:
        gain = max(0.0, (total - done) / max(1.0, total - steps))
    return float(low + (high - low) * gain)
