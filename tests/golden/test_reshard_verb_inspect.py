"""`reshard inspect` on real checkpoints: what it says of good ones and of damaged ones, in words and in JSON."""

import math
import re
import shutil
from pathlib import Path

import pytest

from reshard import api
from reshard.commits.commit import read_commit, write_commit
from reshard.contract import ExitCode
from tests.golden.command import EVERY, HERE, ZERO2, ZERO3, Answer


@pytest.mark.parametrize("path", EVERY, ids=lambda path: path.parent.name)
def test_a_good_checkpoint_of_any_format_has_no_problems(path: Path, say: Answer) -> None:
    value = say.json("inspect", path)
    assert (value["problems"], value["exit_code"], value["commit"]) == ([], 0, {"state": "absent"})
    assert value["format"] == path.parents[1].name.partition("-")[0]
    index = api.index_of(path)
    assert sum(state["tensors"] for state in value["states"].values()) == len(value["tensors"]) == len(index.tensors)
    assert sum(tensor["boxes"] for tensor in value["tensors"]) == len(index.shards.boxes())
    assert [group["names"] for group in value["groups"]] == [list(group.names) for group in index.groups]


def test_the_size_of_the_model_is_told_whatever_holds_its_weights(say: Answer) -> None:
    shapes = {tensor["name"]: tensor["shape"] for tensor in say.json("inspect", ZERO3)["tensors"]}  # one has no master
    size = sum(math.prod(shape) for shape in shapes.values())
    assert say.json("inspect", ZERO3)["weights"] == {"tensors": 8, "elements": size} == {"tensors": 8, "elements": 152}
    assert f"weights   8 tensors, {size} elements" in say("inspect", ZERO3)


def test_a_step_that_nobody_recorded_is_not_told_as_one(say: Answer) -> None:
    assert "step      2 (24 samples)\n" in say("inspect", ZERO2)
    assert "step      0, or not recorded\n" in say("inspect", HERE / "safetensors/bloom")


def test_the_table_of_tensors_has_a_line_for_each(say: Answer) -> None:
    text = say("inspect", ZERO3, "--tensors")
    assert re.search(r"^  fp32/embed.weight +\[13, 7\] +float32 +364 B +1 +7$", text, re.MULTILINE)
    assert re.search(r"^  weight/scale +\[3\] +float32 +12 B +3 +3$", text, re.MULTILINE)
    assert "tied      head.weight = embed.weight" in text
    assert len(re.findall(r" \[\d+(?:, \d+)*\] ", text)) >= len(api.index_of(ZERO3).tensors)


def test_damage_is_listed_beside_what_is_still_known(tmp_path: Path, say: Answer) -> None:
    target = tmp_path / "out"
    say("run", ZERO2, target, "--to", "dp=2,zero=2")
    assert say.json("inspect", target)["commit"]["state"] == "intact"
    victim = max(target.glob("*.pt"))
    victim.write_bytes(victim.read_bytes()[:-5])
    (target / "notes.txt").write_text("mine", encoding="utf-8")
    value = say.json("inspect", target, code=ExitCode.SOURCE_INVALID)
    assert (value["format"], value["step"], value["topology"]["dp"]) == ("deepspeed", 2, 2)
    assert value["commit"]["state"] == "damaged"
    assert [problem["kind"] for problem in value["problems"]] == ["CorruptSourceError"] * 2
    assert all(victim.name in problem["message"] for problem in value["problems"])
    assert value["notes"] == ["notes.txt is no part of the commit"]


def test_a_commit_that_tells_another_story_than_the_files_is_a_problem(tmp_path: Path, say: Answer) -> None:
    target = tmp_path / "out"
    say("run", ZERO2, target, "--to", "dp=2,zero=2")
    commit = read_commit(target)
    digests = {**commit.digests, "fp32/gone": "0" * 8}
    write_commit(
        target, type(commit)(**{**{name: getattr(commit, name) for name in commit.__slots__}, "digests": digests})
    )
    value = say.json("inspect", target, code=ExitCode.SOURCE_INVALID)
    assert [problem["message"] for problem in value["problems"]] == [
        "fp32/gone: digest 00000000 was committed, no file holds the tensor"
    ]


def test_a_marker_that_cannot_be_read_is_a_problem(tmp_path: Path, say: Answer) -> None:
    source = tmp_path / "a1"
    shutil.copytree(ZERO2, source)
    (source / "COMMIT.json").write_text("{", encoding="utf-8")
    value = say.json("inspect", source, code=ExitCode.SOURCE_INVALID)
    assert value["commit"]["state"] == "damaged"
    assert value["states"]["fp32"]["tensors"] == 7


def test_of_many_checkpoints_the_latest_is_proposed(tmp_path: Path, say: Answer) -> None:
    for step in (9, 10):
        shutil.copytree(ZERO2, tmp_path / f"global_step{step}")
    assert f"for instance {tmp_path}/global_step10" in say("inspect", tmp_path, code=ExitCode.UNSUPPORTED)
    (tmp_path / "latest").write_text("global_step9\n", encoding="utf-8")
    text = say("inspect", tmp_path, code=ExitCode.UNSUPPORTED)
    assert "holds 2 checkpoints" in text
    assert f"for instance {tmp_path}/global_step9" in text
