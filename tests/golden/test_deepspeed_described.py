"""DeepSpeed files from a model description and a configuration, without a DeepSpeed checkpoint to be like."""

import dataclasses
import json
from pathlib import Path

import pytest

from reshard import api
from reshard.api import Conversion, convert, index_of, plan_conversion
from reshard.commits.commit import read_commit
from reshard.contract import ExitCode
from reshard.errors import UnsupportedError, UsageError
from reshard.execution.verify import read_digests
from reshard.formats.pt.reader import read
from reshard.topology import Topology
from tests.golden.command import BF16, HERE, Answer
from tests.golden.files import MODEL, OPTIMIZER, STEP
from tests.golden.matrix import describe

FSDP2, SGD, TITAN = (HERE / "dcp-2.13" / name / STEP for name in ("fsdp2-flat", "single-nested", "tp2-fsdp2-titan"))
LLAMA = HERE / "safetensors" / "llama"
ADAM = {"type": "AdamW", "params": {"lr": 0.5, "betas": [0.9, 0.95], "weight_decay": 0.1, "torch_adam": True}}
CONFIG = {
    "train_batch_size": 12,
    "zero_optimization": {"stage": 2},
    "optimizer": ADAM,
    "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 0.5, "warmup_num_steps": 4}},
}


@pytest.fixture
def prepare(tmp_path):
    """Return a conversion of a source with a description and a configuration, both changed as wanted."""

    def prepare(source: Path = FSDP2, *, stage: int = 2, to: str = "dp=3", target_format: str = "deepspeed",
                change=lambda model: None, **config) -> Conversion:  # fmt: skip
        model = describe(index_of(source))
        change(model)
        values = {**CONFIG, "zero_optimization": {"stage": stage}, **config}
        (tmp_path / "model.json").write_text(json.dumps(model))
        (tmp_path / "ds.json").write_text(
            json.dumps({key: value for key, value in values.items() if value is not None})
        )
        return Conversion(
            source=source, target=tmp_path / "out", topology=Topology.parse(to), target_format=target_format,
            model=tmp_path / "model.json", ds_config=tmp_path / "ds.json", keeps_stage="zero" not in to,
        )  # fmt: skip

    return prepare


def states_of(path: Path) -> dict:
    return read(path).value["optimizer_state_dict"]["base_optimizer_state"]


def test_values_and_settings_are_the_sources_and_the_rest_is_as_described(prepare):
    conversion = prepare()
    report = convert(conversion)
    commit = read_commit(conversion.target)
    assert str(commit.topology) == "tp=1,pp=1,dp=3,zero=2", "the stage is that of the configuration"
    assert (commit.step, commit.witness["tensors"] > 0, report.message.startswith("converted")) == (2, True, True)
    model = read(conversion.target / MODEL.format(0)).value
    assert model["lr_scheduler"] == {"last_batch_iteration": 1}
    assert model["global_steps"] == 2
    assert "global_samples" not in model, "DeepSpeed then multiplies the steps by the batch size"
    assert model["shared_params"] == {"head.weight": "embed.weight"}
    assert model["buffer_names"] == ["scale"]
    assert model["ds_config"]["zero_optimization"] == {"stage": 2}
    assert [list(group) for group in model["param_shapes"]] == [
        ["embed.weight", "up.weight", "down.weight"],
        ["up.bias"],
    ]
    groups = states_of(conversion.target / OPTIMIZER.format(0))["param_groups"]
    source = index_of(FSDP2)
    assert [group["lr"] for group in groups] == [group.options["lr"] for group in source.groups] != [0.5, 0.5]
    assert [group["weight_decay"] for group in groups] == [0.1, 0.0]
    first, second = read_digests(source), read_digests(index_of(conversion.target))
    moments = {name for name in first if name.startswith("exp_avg")}
    assert moments
    assert {name: second[name] for name in moments} == {name: first[name] for name in moments}


@pytest.mark.parametrize(("torch_adam", "kind"), [(True, "Tensor"), (False, "int")])
def test_steps_are_counted_as_the_optimizer_of_the_configuration_counts(prepare, torch_adam, kind):
    conversion = prepare(optimizer={**ADAM, "params": {**ADAM["params"], "torch_adam": torch_adam}})
    convert(conversion)
    state = states_of(conversion.target / OPTIMIZER.format(0))
    assert type(state["state"][0]["step"]).__name__ == kind
    assert ("bias_correction" in state["param_groups"][0]) is not torch_adam


def test_a_passed_optimizer_is_as_the_description_says(prepare):
    def sgd(model):
        settings = {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.0, "dampening": 0, "nesterov": False}
        model |= {"optimizer": "torch.optim.sgd.SGD", "groups": [{**g, "settings": settings} for g in model["groups"]]}

    plan = plan_conversion(prepare(SGD, change=sgd, optimizer=None))
    assert any("does not say its step: the learning-rate schedule begins anew" in note for note in plan.layout.notes)
    conversion = prepare(SGD, change=sgd, optimizer=None, scheduler=None)
    plan = plan_conversion(conversion)
    assert any("load_lr_scheduler_states=False" in note for note in plan.layout.notes)
    convert(conversion)
    (state, *_) = states_of(conversion.target / OPTIMIZER.format(0))["state"].values()
    assert list(state) == ["momentum_buffer"]


def test_weights_alone_become_a_warm_start_and_are_read_again(prepare, tmp_path):
    conversion = prepare(LLAMA, stage=1, optimizer=None, bf16={"enabled": True})
    plan = plan_conversion(conversion)
    assert any("load_module_only=True" in note for note in plan.layout.notes)
    convert(conversion)
    assert sorted(path.name for path in conversion.target.iterdir()) == ["COMMIT.json", MODEL.format(0)]
    value = read(conversion.target / MODEL.format(0)).value
    assert (value["optimizer"], value["lr_scheduler"], value["global_steps"]) == (None, None, 0)
    assert {tensor.dtype for tensor in value["module"].values()} == {"float32"}, "DeepSpeed rounds when it loads"
    again = Conversion(source=conversion.target, target=tmp_path / "again", topology=Topology(),
                       target_format="safetensors", states=("weight",))  # fmt: skip
    convert(again)
    assert len(index_of(again.target).tensors) == len(index_of(LLAMA).tensors)


@pytest.mark.parametrize("source", [FSDP2, SGD, TITAN])
def test_weights_are_taken_alone_from_what_holds_more(prepare, source):
    conversion = dataclasses.replace(prepare(source, optimizer=None, scheduler=None), states=("weight",))
    report = convert(conversion)
    assert report.witness["not_witnessed"] == 0
    assert [path.name for path in conversion.target.glob("*.pt")] == [MODEL.format(0)]


def test_a_setting_that_the_source_has_otherwise_is_named(prepare):
    plan = plan_conversion(prepare(optimizer={**ADAM, "params": {**ADAM["params"], "betas": [0.9, 0.999]}}))
    assert any("betas" in note and "0.999" in note for note in plan.layout.notes)


def drop(*names):
    def change(model):
        for name in names:
            model["parameters"].pop(name)
            for group in model["groups"]:
                group["parameters"] = [other for other in group["parameters"] if other != name]
        model["groups"] = [group for group in model["groups"] if group["parameters"]]

    return change


def merge(model):
    model["groups"] = [{"parameters": [name for group in model["groups"] for name in group["parameters"]]}]


REFUSED = {
    "another model": ({"change": drop("up.bias")}, "up.bias is not described"),
    "another shape": ({"change": lambda model: model["parameters"].update({"up.bias": [7]})}, "up.bias is [6] in the"),
    "more parameters": (
        {"change": lambda model: (model["parameters"].update(x=[1]), model["groups"][0]["parameters"].append("x"))},
        "x [1] is not in the source",
    ),
    "merged groups": ({"change": merge}, "the source has 2 parameter groups for the parameters of one group"),
    "another optimizer": ({"source": SGD}, "has the states momentum_buffer, and AdamW of torch keeps"),
    "Adam of AdamW": (
        {"optimizer": {"type": "Adam", "params": {**ADAM["params"], "adam_w_mode": False}}},
        "was trained with the weight decay of AdamW",
    ),
    "fp16": ({"fp16": {"enabled": True}}, "does not say the loss scale"),
    "a schedule of torch": ({"scheduler": {"type": "LambdaLR"}}, "has the scheduler 'LambdaLR'"),
    "Lion": ({"optimizer": {"type": "Lion", "params": {"lr": 1}}}, "settings are made for Adam and AdamW only"),
    "warm start at ZeRO-3": ({"source": LLAMA, "stage": 3}, "DeepSpeed loads none at ZeRO stage 3"),
    "universal warm start": ({"source": LLAMA, "target_format": "universal"}, "holds weights alone"),
    "experts": (
        {"change": lambda model: model.update(
            parameters={"m.deepspeed_moe.experts.deepspeed_experts.0.w": [1]},
            groups=[{"parameters": ["m.deepspeed_moe.experts.deepspeed_experts.0.w"]}],
            shared={},
        )},
        "describes DeepSpeed's own experts",
    ),
    "lost masters": (
        {"source": BF16, "stage": 0, "scheduler": None}, "holds master weights beside rounded ones",
    ),
    "an unknown class": (
        {"optimizer": None, "change": lambda model: model.update(optimizer="my.Lion")},
        "names the optimizer my.Lion, whose states are not known",
    ),
}  # fmt: skip

MISUSED = {
    "another stage": ({"to": "dp=3,zero=3"}, "--to says zero=3, and zero_optimization.stage of the configuration is 2"),
    "no optimizer": ({"optimizer": None}, "names no optimizer, and the configuration has none"),
    "two optimizers": (
        {"change": lambda model: model.update(optimizer="torch.optim.adamw.AdamW")},
        "DeepSpeed would take the one that the script passes",
    ),
    "a class without settings": (
        {"optimizer": None, "change": lambda model: model.update(optimizer="torch.optim.adamw.AdamW")},
        "group 1: the setting betas is missing",
    ),
    "auto": ({"bf16": {"enabled": "auto"}}, "bf16.enabled is 'auto', expected true or false"),
    "no rate": ({"optimizer": {"type": "AdamW", "params": {"weight_decay": 0.1}}}, "group 0: lr is missing"),
    "auto sub-groups": (
        {"zero_optimization": {"stage": 3, "sub_group_size": "auto"}}, "sub_group_size is 'auto', expected a number",
    ),
    "a wrong stage": ({"zero_optimization": {"stage": "auto"}}, "zero_optimization.stage is 'auto'"),
}  # fmt: skip


@pytest.mark.parametrize(("options", "said"), REFUSED.values(), ids=REFUSED)
def test_what_would_be_a_guess_is_refused(prepare, options, said):
    with pytest.raises(UnsupportedError) as caught:
        plan_conversion(prepare(**options))
    assert said in str(caught.value)


@pytest.mark.parametrize(("options", "said"), MISUSED.values(), ids=MISUSED)
def test_what_contradicts_itself_is_refused(prepare, options, said):
    with pytest.raises(UsageError) as caught:
        plan_conversion(prepare(**options))
    assert said in str(caught.value)


def test_a_source_that_does_not_say_its_step_is_refused(prepare, monkeypatch):
    index = api.index_of(FSDP2)
    groups = tuple(dataclasses.replace(group, scalars={}) for group in index.groups)
    conversion = prepare()
    monkeypatch.setattr(api, "index_of", lambda *_, **__: dataclasses.replace(index, step=0, groups=groups))
    with pytest.raises(UnsupportedError, match="does not say how many steps"):
        plan_conversion(conversion)


def test_other_formats_take_no_description(prepare):
    with pytest.raises(UsageError, match="a model description is for DeepSpeed's formats, not for safetensors"):
        plan_conversion(prepare(target_format="safetensors"))


def test_the_command_converts_and_wants_both_files(prepare, tmp_path, capsys):
    conversion, say = prepare(), Answer(capsys)
    both = ("--model", conversion.model, "--ds-config", conversion.ds_config)
    words = ("run", FSDP2, tmp_path / "made", "--format", "deepspeed", "--to", "dp=2")
    assert "expected together with --ds-config" in say(*words, *both[:2], code=ExitCode.USAGE)
    assert "without --like" in say(*words, *both, "--like", FSDP2, code=ExitCode.USAGE)
    assert say.json(*words, *both)["witness"]["not_witnessed"] == 0
    assert read_commit(tmp_path / "made").topology.zero == 2
    assert "docs/model-description.md" in say(*words[:2], tmp_path / "other", *words[3:], code=ExitCode.UNSUPPORTED)
