"""From FSDP2 to DeepSpeed without a DeepSpeed checkpoint to be like: a model description and a configuration say it."""

import json
from pathlib import Path

import pytest
import torch

from elastic_trainer.errors import ConfigurationError
from elastic_trainer.stacks.description import describe_model, write_description
from reshard.api import Conversion, convert
from reshard.formats.deepspeed.described.description import load
from reshard.topology import Topology
from tests.engine import dcp_run, reshard_run
from tests.engine.dcp_net import SIZES, Net
from tests.randomness import SOAKING

pytestmark = pytest.mark.engine
_SLOW = ("zero2 bf16", "zero3 sub-groups", "zero3 fused", "zero3 frozen", "zero1 warm")

SAVED, STEPS = 5, 3  # the rate of the DeepSpeed runs is 2e-2 from step 4
SCHEDULE = {"type": "WarmupLR", "params": {"warmup_max_lr": 2e-2, "warmup_num_steps": 4}}
FUSED = {"type": "AdamW", "params": {"lr": 1e-2, "betas": [0.9, 0.95], "weight_decay": 0.1}}
UNIVERSAL_RANK = Path(__file__).with_name("universal_rank.py")
FROZEN = ["up.bias", "norm.weight"]
CASES = {
    "zero1": ("two groups", {"topology": "dp=3,zero=1"}),
    "zero2": ("two groups", {"topology": "dp=3,zero=2"}),
    "zero3": ("two groups", {"topology": "dp=3,zero=3"}),
    "zero1 bf16": ("two groups", {"topology": "dp=3,zero=1", "bf16": True}),
    "zero2 bf16": ("two groups", {"topology": "dp=3,zero=2", "bf16": True}),
    "zero3 bf16": ("two groups", {"topology": "dp=3,zero=3", "bf16": True}),
    "zero3 sub-groups": ("two groups", {"topology": "dp=3,zero=3", "zero": {"sub_group_size": 300}}),
    "zero2 frozen": ("frozen", {"topology": "dp=3,zero=2", "frozen": FROZEN}),
    "zero3 frozen": ("frozen", {"topology": "dp=3,zero=3", "frozen": FROZEN}),
    "zero2 fused": ("one group", {"topology": "dp=3,zero=2", "configured": "fused"}),
    "zero3 fused": ("one group", {"topology": "dp=3,zero=3", "configured": "fused"}),
}
WARM = {
    "zero1 warm": {"topology": "dp=3,zero=1"},
    "zero2 warm bf16": {"topology": "dp=3,zero=2", "bf16": True},
}
if not SOAKING:  # what others show, too, in other ways
    CASES = {name: case for name, case in CASES.items() if name not in _SLOW}
    WARM = {name: case for name, case in WARM.items() if name not in _SLOW}


def configure(path: Path, case: dict) -> Path:
    """Write the configuration of the run that will load the target, as `reshard_rank` has it."""
    topology = Topology.parse(case["topology"])
    config = {
        "train_batch_size": 12,
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 4,
        "zero_optimization": {"stage": topology.zero, **case.get("zero", {})},
        "bf16": {"enabled": bool(case.get("bf16"))},
        "scheduler": SCHEDULE,
        **({"optimizer": FUSED} if case.get("configured") else {}),
    }
    path.write_text(json.dumps(config))
    return path


@pytest.fixture(scope="module")
def root(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("described")


@pytest.fixture(scope="module")
def sources(root) -> dict[str, list[float]]:
    """Losses of the FSDP2 runs that went on without a stop, from the step at which they saved."""
    (root / "weights").mkdir()
    run = {"model": "deepspeed", "dp": 2, "lr": 2e-2, "steps": SAVED + STEPS, "save_at": SAVED}
    two = {"name": "two groups", "save": str(root / "two groups"), "describe": str(root / "two groups.json"),
           "weights": str(root / "weights" / "pytorch_model.bin")}  # fmt: skip
    one = {"name": "one group", "save": str(root / "one group"), "describe": str(root / "one group.json")}
    frozen = {"name": "frozen", "save": str(root / "frozen"), "describe": str(root / "frozen.json"), "frozen": FROZEN}
    found = dcp_run.launch([{**run, **two}, {**run, **one, "single_group": True}, {**run, **frozen}])
    return {name: losses[SAVED:] for name, losses in found.items()}


@pytest.fixture(scope="module")
def resumed(root, sources) -> dict[str, list[float]]:
    """Losses of the DeepSpeed runs that loaded what was converted."""
    runs = []
    for name, (source, case) in (CASES | {name: ("weights", case) for name, case in WARM.items()}).items():
        target = root / name.replace(" ", "-")
        described = source if name in CASES else "two groups"
        convert(
            Conversion(
                source=root / source,
                target=target,
                topology=Topology.parse(case["topology"]),
                target_format="deepspeed",
                model=root / f"{described}.json",
                ds_config=configure(root / f"{name}.config.json", case),
            )
        )
        run = {"model": "flat", **case, "name": name, "steps": STEPS, "load": str(target), "foreign": True}
        runs.append({**run, "module_only": True, "fresh": name} if name in WARM else run)
        if name in WARM:
            whole = {"name": f"{name} expected", "weights": str(root / "weights" / "pytorch_model.bin"), "fresh": name}
            runs.append({"model": "flat", **case, "steps": STEPS, **whole})
    lost = next(run for run in runs if run["name"] == "zero1 bf16")
    runs.append({**lost, "name": "lost moments", "spoil": True})
    return reshard_run.launch(runs)


@pytest.mark.parametrize("name", CASES)
def test_losses_are_those_of_the_run_that_never_stopped(name, sources, resumed):
    close = 5e-3 if "bf16" in name else 1e-5
    assert resumed[name] == pytest.approx(sources[CASES[name][0]], abs=close)


@pytest.mark.parametrize("name", WARM)
def test_a_warm_start_is_one_from_weights_that_the_model_had(name, resumed):
    assert resumed[name] == resumed[f"{name} expected"]


def test_a_universal_folder_goes_on_in_another_stage(root, sources):
    case = {"topology": "dp=2,zero=2"}
    target = root / "universal"
    convert(
        Conversion(
            source=root / "two groups",
            target=target,
            topology=Topology(dp=2, zero=2),
            target_format="universal",
            model=root / "two groups.json",
            ds_config=configure(root / "universal.config.json", case),
        )
    )
    run = {"model": "flat", **case, "name": "universal", "steps": STEPS, "load": str(target), "foreign": True}
    found = reshard_run.launch([run], UNIVERSAL_RANK)
    assert found["universal"] == pytest.approx(sources["two groups"], abs=1e-5)


def test_lost_moments_would_be_noticed_in_bf16_too(sources, resumed):
    """A control of the tolerance."""
    assert resumed["lost moments"] != pytest.approx(sources["two groups"], abs=1e-2)


def test_a_description_has_the_order_ties_and_what_is_frozen(tmp_path):
    model = Net(*SIZES["tiny"])
    model.up.bias.requires_grad_(False)
    vectors = [parameter for parameter in model.parameters() if parameter.ndim == 1]
    groups = [{"params": [model.embed.weight, model.down.weight, model.up.weight]}, {"params": vectors, "lr": 0.5}]
    write_description(tmp_path / "model.json", model, torch.optim.SGD(groups, lr=torch.tensor(0.25)))
    read = load(tmp_path / "model.json")
    assert list(read.params.items()) == [(name, tuple(value.shape)) for name, value in model.named_parameters()]
    assert (read.shared, read.frozen, set(read.buffers)) == ({"head.weight": "embed.weight"}, {"up.bias"}, {"scale"})
    assert read.optimizer == "torch.optim.sgd.SGD"
    assert read.groups[0].names == ("embed.weight", "down.weight", "up.weight")
    assert [group.settings["lr"] for group in read.groups] == [0.25], "a group that is all frozen is none for DeepSpeed"
    assert describe_model(model.to("meta"))["parameters"] == describe_model(model)["parameters"]


def test_what_cannot_be_described_is_refused():
    class Extra(torch.nn.Linear):
        def get_extra_state(self):
            return 1

    with pytest.raises(ConfigurationError, match="_extra_state"):
        describe_model(Extra(2, 2))
    with pytest.raises(ConfigurationError, match="not the model's"):
        describe_model(torch.nn.Linear(2, 2), list(torch.optim.SGD(torch.nn.Linear(2, 2).parameters()).param_groups))


def test_the_sources_differ_from_each_other(sources):
    """Else a checkpoint of the wrong run would do."""
    assert abs(sources["two groups"][-1] - sources["one group"][-1]) > 1e-4
