"""Cases in which DeepSpeed 0.19.8 is wrong or fails and that no other test is about; docs/conversions.md lists all."""

import re
import shutil
from pathlib import Path

import pytest

from reshard.api import Conversion, RunOptions, convert, index_of, plan_conversion
from reshard.commits.commit import read_commit
from reshard.errors import TargetError, UnsupportedError
from reshard.execution.verify import read_digests
from reshard.planning.plan import Plan
from reshard.topology import Topology
from tests.golden.files import STEP, golden
from tests.golden.matrix import PAGE
from tests.golden.universal_files import converted

ROOT = PAGE.parents[1]


def plan(source: Path, **more) -> Plan:
    return plan_conversion(Conversion(source=source, target=Path("never"), topology=Topology(dp=2), **more))


@pytest.mark.parametrize("source", [golden("pipeline-tp2-pp2"), converted("pipeline-tp2-pp2")])
def test_names_of_a_pipeline_are_no_plain_models(source):
    """Every parameter that is missing is named before anything is written; --names is what helps."""
    with pytest.raises(UnsupportedError, match="tensors that the target needs") as refused:
        plan(source, target_format="deepspeed", like=golden("zero2-dp3"))
    assert "fp32/embed.weight [13, 7] is missing" in refused.value.problems
    assert "--names" in str(refused.value.hint)


@pytest.mark.parametrize("target_format", ["deepspeed", "universal"])
def test_weights_alone_are_no_checkpoint_with_an_optimizer(target_format):
    """Weights without the optimizer go to a format that has none; half a checkpoint is refused."""
    with pytest.raises(UnsupportedError, match=r"--states weight leaves out exp_avg, exp_avg_sq") as refused:
        plan(golden("zero2-dp3"), target_format=target_format, states=("weight",))
    assert "leave --states out" in refused.value.hint
    assert "lacks" not in str(refused.value)  # it is not the source's fault


@pytest.mark.parametrize("target_format", ["dcp", "safetensors"])
def test_weights_alone_are_taken_along_alone(tmp_path, target_format):
    wanted = Conversion(
        source=golden("zero2-dp3"),
        target=tmp_path / "out",
        topology=Topology(dp=2),
        target_format=target_format,
        states=("weight",),
    )
    convert(wanted, RunOptions(reread=True, sync=False))
    assert {tensor.key.state for tensor in index_of(wanted.target).tensors} == {"weight"}


@pytest.mark.parametrize("stage", [1, 2])
def test_what_another_run_left_in_the_folder_gets_into_no_universal_checkpoint(tmp_path, stage):
    """DeepSpeed's converter merges the `tmp/` of a former run at another degree, and tensors become too long."""
    target = tmp_path / STEP
    (target / "tmp").mkdir(parents=True)
    shutil.copy(golden("zero3-dp3") / "zero_pp_rank_2_mp_rank_00_optim_states.pt", target / "tmp")
    wanted = Conversion(
        source=golden("zero2-dp3"), target=target, topology=Topology(zero=stage), target_format="universal"
    )
    with pytest.raises(TargetError, match="is not the result of this conversion"):
        convert(wanted, RunOptions(sync=False))
    assert [path.name for path in target.iterdir()] == ["tmp"]


def test_every_test_that_the_page_names_is_there():
    names = set(re.findall(r"`(test_\w+\.py)`", PAGE.read_text(encoding="utf-8")))
    assert len(names) > 20
    assert names <= {path.name for tier in ("engine", "golden") for path in (ROOT / "tests" / tier).glob("test_*.py")}


def test_a_plain_model_becomes_a_pipeline_with_a_map_and_a_checkpoint_of_it(tmp_path):
    """The refusal of pp > 1 advises: names of layers by --names, everything else by --like."""
    rules = {
        "embed": "from: tied_modules.embed.weight, to: embed.weight",
        "layers": 'from: "{layer}.{w:attention_norm|ffn_norm|qkv|out|gate_up|down}", to: "blocks.{layer-1}.{w}"',
        "norm": 'from: "3.norm", to: norm.norm',
    }
    there, back = tmp_path / "there.yaml", tmp_path / "back.yaml"
    there.write_text("version: 1\nrules:\n" + "".join(f"  - {{{rule}}}\n" for rule in rules.values()))
    back.write_text(
        "version: 1\nrules:\n  - {from: embed.weight, to: tied_modules.embed.weight}\n"
        '  - {from: "blocks.{layer}.{w:word}", to: "{layer+1}.{w}"}\n  - {from: norm.norm, to: 3.norm}\n'
    )
    pipeline, flat = golden("pipeline-tp2-pp2"), tmp_path / "flat"
    convert(
        Conversion(source=pipeline, target=flat, topology=Topology(), target_format="dcp", names=there),
        RunOptions(sync=False),
    )
    wanted = Conversion(
        source=flat,
        target=tmp_path / STEP,
        topology=Topology(pp=2, dp=2),
        target_format="deepspeed",
        names=back,
        like=golden("pipeline-dp2"),
    )
    convert(wanted, RunOptions(reread=True, sync=False))
    found, expected = read_commit(wanted.target).digests, read_digests(index_of(pipeline))
    compared = {key for key in found if not key.endswith("#padding")}
    assert {key: found[key] for key in compared} == {key: expected[key] for key in compared}
    assert len(compared) == 56
