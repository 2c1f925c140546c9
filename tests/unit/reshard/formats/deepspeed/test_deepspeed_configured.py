"""Settings of parameter groups from DeepSpeed's configuration, for elastic checkpoints."""

import math

import pytest

from reshard.errors import UnsupportedError, UsageError
from reshard.formats.deepspeed.configured import load, make_groups

PARAMS = {"lr": 0.01, "betas": [0.9, 0.95], "weight_decay": 0.1}
STATE = {"step": 1, "exp_avg": 2, "exp_avg_sq": 3}


def make(optimizer, *, scheduler=None, saved=None, groups=1, step=None, states=STATE):
    config = {"optimizer": optimizer} | ({} if scheduler is None else {"scheduler": scheduler})
    return make_groups(config, [states] * groups, {"lr_scheduler": saved}, step)


def test_settings_are_those_of_the_configuration():
    (group,) = make({"type": "AdamW", "params": {**PARAMS, "torch_adam": True}}, step=7)
    assert (group["lr"], group["betas"], group["eps"], group["weight_decay"]) == (0.01, (0.9, 0.95), 1e-8, 0.1)
    assert (group["step"], group["bias_correction"], group["decoupled_weight_decay"]) == (7, True, True)
    assert "torch_adam" not in group
    first, second = make(
        {"type": "Adam", "params": PARAMS, "param_groups": [{}, {"weight_decay": 0, "lr": 0.02}]}, groups=2
    )
    assert (first["lr"], second["lr"], second["weight_decay"]) == (0.01, 0.02, 0)
    assert "step" not in first


@pytest.mark.parametrize(
    ("scheduler", "saved", "expected"),
    [
        (None, None, 0.01),
        (None, {"_last_lr": [0.003], "last_epoch": 2}, 0.003),
        ({"type": "WarmupLR", "params": {"warmup_max_lr": 0.02, "warmup_num_steps": 4}}, 1, 0.02 * math.log(2, 4)),
        ({"type": "WarmupLR", "params": {"warmup_type": "linear", "warmup_num_steps": 8}}, 2, 0.0025),
        ({"type": "WarmupLR", "params": {"warmup_min_lr": 0.005, "warmup_num_steps": 2}}, 9, 0.01),
        ({"type": "WarmupLR", "params": {"warmup_min_lr": 0.005}}, -1, 0.005),
        ({"type": "WarmupDecayLR", "params": {"total_num_steps": 12, "warmup_num_steps": 4}}, 8, 0.0005),
    ],
)
def test_learning_rate_is_that_of_the_schedule(scheduler, saved, expected):
    state = {"last_batch_iteration": saved} if isinstance(saved, int) else saved
    (group,) = make({"type": "AdamW", "params": PARAMS}, scheduler=scheduler, saved=state)
    assert group["lr"] == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize(
    ("optimizer", "message"),
    [
        (None, "has no optimizer.type and optimizer.params"),
        ({"type": "AdamW"}, "group 0: lr is missing"),
        ({"type": "AdamW", "params": {"lr": 0.1}}, "group 0: weight_decay is missing"),
        ({"type": "AdamW", "params": {**PARAMS, "lr": "auto"}}, "lr is 'auto', expected a number"),
        ({"type": "AdamW", "params": {**PARAMS, "lr": 10**400}}, "lr is 1000.*expected a number"),
        ({"type": "AdamW", "params": {**PARAMS, "lr": float("nan")}}, "lr is nan, expected a number"),
        ({"type": "AdamW", "params": {**PARAMS, "betas": [0.9]}}, r"betas is \[0.9\], expected two numbers"),
        ({"type": "AdamW", "params": {**PARAMS, "amsgrad": 1}}, "amsgrad is 1, expected true or false"),
        ({"type": "AdamW", "params": {**PARAMS, "momentum": 0.9}}, "'momentum' is no setting of Adam"),
        ({"type": "AdamW", "params": PARAMS, "param_groups": [{}, {}]}, "one group, the checkpoint has 1"),
    ],
)
def test_configuration_that_lacks_settings_is_refused_with_what_is_missing(optimizer, message):
    with pytest.raises(UsageError, match=message):
        make(optimizer)


def test_several_groups_need_settings_of_each():
    with pytest.raises(UsageError, match="says one group, the checkpoint has 2"):
        make({"type": "AdamW", "params": PARAMS}, groups=2)


def test_other_optimizers_and_schedules_are_refused():
    with pytest.raises(UnsupportedError, match="optimizer SGD"):
        make({"type": "SGD", "params": PARAMS})
    with pytest.raises(UnsupportedError, match="states exp_avg, exp_avg_sq, max, step"):
        make({"type": "AdamW", "params": PARAMS}, states={**STATE, "max": 1})
    with pytest.raises(UnsupportedError, match="nothing says the rate at which it stood"):
        make({"type": "AdamW", "params": PARAMS}, saved={"last_batch_iteration": 3})
    with pytest.raises(UnsupportedError, match="scheduler 'OneCycle'"):
        make({"type": "AdamW", "params": PARAMS}, saved={"last_batch_iteration": 3}, scheduler={"type": "OneCycle"})
    wrong = {"type": "WarmupDecayLR", "params": {}}
    with pytest.raises(UsageError, match="total_num_steps is None"):
        make({"type": "AdamW", "params": PARAMS}, saved={"last_batch_iteration": 3}, scheduler=wrong)


@pytest.mark.parametrize("text", ["{", "[1]", '{"optimizer": {}, "optimizer": {}}', "[" * 10000])
def test_file_that_is_no_configuration_is_refused(tmp_path, text):
    path = tmp_path / "ds.json"
    path.write_text(text)
    with pytest.raises(UsageError, match=r"is no JSON|expected DeepSpeed's configuration"):
        load(path)
