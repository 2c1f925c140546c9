"""Notes name the settings that DeepSpeed's load does not check and that the run has to set as the source did."""

import pytest

from reshard.api import plan_of
from reshard.formats import read_checkpoint
from reshard.topology import Topology
from tests.golden.files import golden


@pytest.mark.parametrize(
    ("name", "target", "text"),
    [
        ("zero2-dp3-round-robin", "dp=2,zero=1", "resume with round_robin_gradients on"),
        ("zero2-dp3-round-robin", "dp=2,zero=3", None),
        ("zero2-dp3", "dp=2,zero=1", None),
        ("zero3-dp3", "dp=2,zero=3", "resume with zero_optimization.sub_group_size 40"),
        ("zero3-dp3", "dp=64,zero=3", None),  # all of it is one sub-group there
        ("zero3-dp3", "dp=2,zero=1", None),
    ],
)
def test_settings_of_the_source_that_the_files_need(name, target, text):
    notes = plan_of(read_checkpoint(golden(name), None), Topology.parse(target)).summary()["notes"]
    found = [note for note in notes if note.startswith("resume with")]
    assert [note.partition(",")[0] for note in found] == ([] if text is None else [text])


@pytest.mark.parametrize(
    ("name", "target", "text"),
    [
        ("zero2-dp4-cp2", "dp=6,cp=2,zero=1", None),
        ("zero2-dp4-cp2", "dp=3,zero=2", "gradients are 0.5 times the source's"),
        ("zero2-dp4-cp2", "dp=4,cp=2,zero=3", "gradients are 0.5 times the source's"),
        ("zero2-dp4-cp2", "dp=4,cp=4,zero=1", "gradients are 2 times the source's"),
        ("zero2-dp3", "dp=4,cp=2,zero=3", None),
        ("zero2-dp3", "dp=4,cp=2,zero=0", "gradients are 2 times the source's"),
    ],
)
def test_gradients_of_another_size_are_told_where_a_sequence_is_spread(name, target, text):
    notes = plan_of(read_checkpoint(golden(name), None), Topology.parse(target)).summary()["notes"]
    found = [note for note in notes if "gradients" in note]
    assert found == [] if text is None else [text in note for note in found] == [True]


@pytest.mark.parametrize(
    ("version", "told"),
    [
        ("0.15.4", False), ("0.16.0", True), ("0.16.9+unknown", True), ("0.18.9", True), ("0.19.7", True),
        ("0.19.8", False), ("1.0.0", False), ("None", False), ("", False),
    ],
)  # fmt: skip
def test_pipelines_of_versions_that_scale_gradients_otherwise_are_told(version, told, monkeypatch):
    index = read_checkpoint(golden("pipeline-tp2-pp2"), None)
    monkeypatch.setitem(index.extra.source.models[0, 0].value, "ds_version", version)
    notes = plan_of(index, Topology.parse("pp=1,dp=2,zero=1")).summary()["notes"]
    assert [f"pipelines by DeepSpeed {version}" in note for note in notes if "moments of pipelines" in note] == (
        [True] if told else []
    )


def test_modules_that_are_no_pipelines_are_told_nothing_of_them(monkeypatch):
    index = read_checkpoint(golden("zero2-dp3"), None)
    monkeypatch.setitem(index.extra.source.models[0, 0].value, "ds_version", "0.16.9")
    assert not [note for note in plan_of(index, Topology.parse("dp=2,zero=2")).summary()["notes"] if "moments" in note]


@pytest.mark.parametrize(
    ("version", "target", "told"),
    [
        ("0.14.5", "dp=3,zero=0", True), ("0.17.6", "dp=3,zero=0", True), ("0.18.9", "dp=3,zero=0", False),
        ("0.14.5", "dp=3,zero=1", False),
    ],
)  # fmt: skip
def test_versions_that_take_another_optimizer_for_bf16_at_zero_0_are_told(version, target, told, monkeypatch):
    index = read_checkpoint(golden("bf16-dp2"), None)
    monkeypatch.setitem(index.extra.source.models[0, 0].value, "ds_version", version)
    notes = plan_of(index, Topology.parse(target)).summary()["notes"]
    assert [f"DeepSpeed {version}" in note for note in notes if "does not load these files" in note] == [True] * told
