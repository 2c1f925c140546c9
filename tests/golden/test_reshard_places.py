"""Folders that a user names and that cannot be what they are named for: what is said of them, and by which verb."""

import contextlib
import importlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from reshard.commits.commit import read_commit
from reshard.contract import ExitCode
from tests.golden.command import PIPELINE, ZERO2, Answer

# A user who owns nothing may not read Python's library everywhere: what a verb imports later is imported now.
for module in ("command_line", "estimate", "explain", "preflight", "inspection"):
    importlib.import_module(f"reshard.cli.{module}")
importlib.import_module("reshard.virtual.conversion")

as_root = pytest.mark.skipif(os.geteuid() != 0, reason="becomes another user")


@contextlib.contextmanager
def nobody() -> Iterator[None]:
    """As a user who owns nothing."""
    os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(0)


@pytest.fixture
def closed(tmp_path: Path) -> Path:
    """A folder that nobody else may look into."""
    ours = [folder for folder in tmp_path.parents if folder.is_relative_to(tempfile.gettempdir())][:-1]
    for folder in (tmp_path, *ours):
        folder.chmod(0o755)
    (tmp_path / "closed").mkdir(0o700)
    return tmp_path / "closed"


@as_root
@pytest.mark.parametrize("words", [["inspect"], ["verify"], ["plan", "--to", "dp=2"], ["explain", "x"]])
def test_a_source_behind_a_closed_door_is_named(closed: Path, say: Answer, words: list[str]) -> None:
    verb, *more = words
    with nobody():
        found = say.json(verb, closed / "ckpt", *more, code=ExitCode.SOURCE_UNAVAILABLE)
    assert found["error"]["message"] == "cannot be read: Permission denied"
    assert found["error"]["path"] == str(closed / "ckpt")


@as_root
def test_a_target_behind_a_closed_door_is_named(closed: Path, say: Answer) -> None:
    for verb in ("plan", "run"):
        with nobody():
            found = say.json(verb, PIPELINE, closed / "out", "--to", "dp=2", code=ExitCode.TARGET_FAILED)
        assert found["error"]["message"] == "cannot be looked at: Permission denied"
        assert str(closed) in found["error"]["path"]


@as_root
def test_run_refuses_what_may_not_be_written_as_plan_foresees_it(closed: Path, say: Answer) -> None:
    closed.chmod(0o555)
    with nobody():
        planned = say.json("plan", PIPELINE, closed / "new/out", "--to", "dp=2", code=ExitCode.TARGET_FAILED)
        refused = say.json("run", PIPELINE, closed / "new/out", "--to", "dp=2", code=ExitCode.TARGET_FAILED)
    assert planned["refused"]["message"] == refused["error"]["message"]
    assert planned["refused"]["path"] == refused["error"]["path"] == str(closed)
    assert planned["estimate"]["rates"]["write"]["detail"] == "nothing was written where the target is refused"


def test_a_link_that_leads_nowhere_says_where_it_leads(tmp_path: Path, say: Answer) -> None:
    (tmp_path / "link").symlink_to("nowhere")
    (tmp_path / "loop").symlink_to("loop")
    for name, goal in (("link", "nowhere"), ("loop", "loop")):
        told = f"{tmp_path}/{name}: is a symbolic link to {goal}, which is not there"
        assert told in say("inspect", tmp_path / name, code=ExitCode.UNSUPPORTED)
        for target in (tmp_path / name, tmp_path / name / "out"):
            assert told in say("run", ZERO2, target, "--to", "dp=2", code=ExitCode.TARGET_FAILED)


@pytest.mark.parametrize("mode", ["materialize", "virtual"])
def test_an_empty_folder_is_as_good_as_none(tmp_path: Path, say: Answer, mode: str) -> None:
    (tmp_path / "out").mkdir()
    words = [PIPELINE, tmp_path / "out", "--to", "dp=2", "--mode", mode]
    assert say.json("plan", *words)["refused"] is None
    say("run", *words)
    assert read_commit(tmp_path / "out").step == 2
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_a_mounted_volume_cannot_be_the_result(say: Answer) -> None:
    found = say.json("run", PIPELINE, "/proc", "--to", "dp=2", code=ExitCode.TARGET_FAILED)
    assert "is where a volume is mounted" in found["error"]["message"]
    assert found["error"]["hint"].endswith(f"/proc/{PIPELINE.name}")


def test_an_unfinished_result_is_no_source(tmp_path: Path, say: Answer) -> None:
    # Its files have their names and sizes, and zeros where nothing was written yet: safetensors could not tell.
    command = [sys.executable, "-m", "reshard.cli.main", "run", PIPELINE, tmp_path / "out", "--format", "safetensors"]
    process = subprocess.Popen([*command, "--limit-rate", "100", "--quiet"])
    while not (left := list(tmp_path.glob(".out.partial-*/*.safetensors"))):
        assert process.poll() is None
        time.sleep(0.01)
    process.kill()
    process.wait()
    folder = left[0].parent
    for words in (["inspect", folder], ["verify", folder], ["run", folder, tmp_path / "x", "--format", "dcp"]):
        assert "is the unfinished result of a run" in say(*words, code=ExitCode.UNSUPPORTED)
    assert f"{folder.name} in it is unfinished" in say("inspect", tmp_path, code=ExitCode.UNSUPPORTED)


def test_a_commit_that_is_not_there_may_be_there_again_later(tmp_path: Path, say: Answer) -> None:
    """The operator knows that the folder was committed, and tries again."""
    words = ["run", tmp_path / "gone", tmp_path / "out", "--to", "dp=2"]
    assert "no such folder" in say(*words, "--require-commit", code=ExitCode.SOURCE_UNAVAILABLE)
    assert "no such folder" in say(*words, code=ExitCode.UNSUPPORTED)


def test_a_template_that_is_not_there_is_named(tmp_path: Path, say: Answer) -> None:
    found = say("plan", ZERO2, "--to", "dp=2", "--like", tmp_path / "gone", code=ExitCode.UNSUPPORTED)
    assert f"{tmp_path}/gone: there is no such folder" in found


def test_a_virtual_commit_that_has_lost_its_source_says_so(tmp_path: Path, say: Answer) -> None:
    source, target = tmp_path / "source", tmp_path / "virtual"
    shutil.copytree(ZERO2, source)
    say("run", source, target, "--to", "dp=2", "--mode", "virtual")
    source.rename(tmp_path / "elsewhere")
    for words in (["inspect", target], ["verify", target], ["run", target, tmp_path / "out", "--to", "dp=3"]):
        error = say.json(*words, code=ExitCode.SOURCE_UNAVAILABLE)["error"]
        assert error["path"] == str(target)
        assert error["message"] == f"is a virtual commit whose bytes are in {source}, which is not there"


def test_what_is_in_the_way_is_told(tmp_path: Path, say: Answer) -> None:
    target = tmp_path / "out"
    say("run", PIPELINE, target, "--to", "dp=2")

    def told() -> str:
        return say("run", PIPELINE, target, "--to", "dp=3", code=ExitCode.TARGET_FAILED)

    assert f"it holds step 2 as deepspeed tp=1,pp=1,dp=2,zero=1, from {PIPELINE}, made at 20" in told()
    next(target.glob("*.pt")).unlink()
    assert "this conversion: 1 of 7 files is damaged" in told()
    (target / "COMMIT.json").unlink()
    assert "this conversion: it has no COMMIT.json" in told()


@pytest.fixture
def trainers_folder(tmp_path: Path) -> Path:
    """As Hugging Face's Trainer saves with DeepSpeed: weights, and the state of the training beside them."""
    folder = tmp_path / "checkpoint-2"
    shutil.copytree(Path(__file__).parent / "safetensors" / "llama", folder)
    shutil.copytree(ZERO2, folder / "global_step2")
    (folder / "latest").write_text("global_step2")
    return folder


@pytest.mark.parametrize("verb", ["plan", "run"])
def test_weights_are_not_taken_for_the_training_that_lies_beside_them(
    trainers_folder: Path, tmp_path: Path, say: Answer, verb: str
) -> None:
    out = tmp_path / "out" / "step"
    found = say.json(verb, trainers_folder, out, "--to", "dp=2", code=ExitCode.UNSUPPORTED)["error"]
    assert "holds weights, and the state of the training in a folder beside them" in found["message"]
    assert f"name that folder, {trainers_folder / 'global_step2'}" in found["hint"]
    assert "--format safetensors" in found["hint"]
    say.json(verb, trainers_folder, out, "--format", "safetensors")
    say.json(verb, trainers_folder / "global_step2", tmp_path / "other" / "step", "--to", "dp=2")


def test_what_lies_beside_weights_is_told(trainers_folder: Path, say: Answer) -> None:
    notes = say.json("inspect", trainers_folder)["notes"]
    assert "global_step2 in it holds the state of the training: these are the weights alone" in notes
    shutil.rmtree(trainers_folder / "global_step2")
    assert say.json("inspect", trainers_folder)["notes"] == notes[:-1]


@as_root
def test_a_folder_beside_weights_that_may_not_be_read_is_left_alone(closed: Path, say: Answer) -> None:
    folder = closed.parent / "weights"
    shutil.copytree(Path(__file__).parent / "safetensors" / "llama", folder)
    (folder / "lost+found").mkdir(0o700)
    with nobody():
        assert say.json("inspect", folder)["format"] == "safetensors"
        say.json("plan", folder, "--format", "dcp")
