"""Parameter groups, scalars and tied names: what writers of other formats learn from a DeepSpeed checkpoint."""

import pytest

from reshard.formats import read_checkpoint
from tests.golden.files import TARGETS, golden


@pytest.mark.parametrize("name", TARGETS)
def test_groups_name_every_optimized_parameter_once_with_settings_and_step(name):
    index = read_checkpoint(golden(name), None)
    optimized = [tensor.key.name for tensor in index.tensors if tensor.key.state == "exp_avg"]
    named = [parameter for group in index.groups for parameter in group.names]
    assert sorted(named) == sorted(parameter for parameter in optimized if not parameter.endswith("#padding"))
    assert [group.options["weight_decay"] for group in index.groups] == (
        [0.1, 0.1] if name.startswith("autoep") else [0.1, 0.0] * (len(index.groups) // 2)
    )
    for group in index.groups:
        assert group.options["betas"] == [0.9, 0.95]
        assert group.options["lr"] == pytest.approx(0.01, abs=0.011)
        assert "params" not in group.options
        # FP16_UnfusedOptimizer makes its optimizer's states by a step without gradients.
        assert group.scalars == {"step": 3.0 if name == "zero0-bf16-dp2" else 2.0}


@pytest.mark.parametrize("name", TARGETS)
def test_groups_keep_the_order_of_the_optimizer(name):
    names = read_checkpoint(golden(name), None).groups[0].names
    if name.startswith("pipeline"):
        assert names[:2] == ("tied_modules.embed.weight", "1.qkv")
    elif name.startswith("experts-pp"):
        assert names[:2] == ("tied_modules.embed.weight", "1.moe.deepspeed_moe.gate.wg.weight")
    elif name.startswith("autoep"):
        assert names[:2] == ("embed.weight", "block0.router.gate.weight")
    else:
        assert tuple(name for name in names if "moe" not in name) == ("embed.weight", "up.weight", "down.weight")


@pytest.mark.parametrize("name", TARGETS)
def test_tied_names_are_aliases(name):
    # A PipelineModule has one name for what stages share.
    expected = {} if name.startswith(("pipeline", "experts-pp", "autoep")) else {"head.weight": "embed.weight"}
    assert read_checkpoint(golden(name), None).aliases == expected
