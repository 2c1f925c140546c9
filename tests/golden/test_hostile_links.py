"""Links that lead out of a checkpoint, and names that look like patterns: neither reaches what is not its own."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from reshard.api import Conversion, RunOptions, convert, index_of, plan_of
from reshard.cli.locate import find_newest
from reshard.cli.main import main
from reshard.commits.commit import read_commit
from reshard.commits.staging import FINISH_FILE, Sharing, hold_finish_lock, is_unfinished, staging, unfinished_folder
from reshard.contract import ExitCode
from reshard.errors import NotACheckpointError, ReshardError, TargetError, UnsupportedError
from reshard.execution.executor import execute
from reshard.formats import read_checkpoint
from reshard.topology import Topology
from tests.fuzz.guard import outcome_of
from tests.fuzz.targets import GOLDEN, STEP

UNIVERSAL = GOLDEN / f"universal-0.19.8/zero2-dp3/{STEP}"


def moved_aside(path: Path, aside: Path) -> None:
    """A link to what was there."""
    path.rename(aside)
    path.symlink_to(aside)


def parameter(folder: Path) -> Path:
    return next(path for path in sorted((folder / "zero").iterdir()) if path.is_dir())


@pytest.mark.parametrize("what", ["zero", "parameter", "atom", "model"])
def test_a_link_in_a_universal_checkpoint_is_not_followed(what, tmp_path):
    folder = Path(shutil.copytree(UNIVERSAL, tmp_path / "s"))
    victim = {
        "zero": folder / "zero",
        "parameter": parameter(folder),
        "atom": parameter(folder) / "fp32.pt",
        "model": folder / "mp_rank_00_model_states.pt",
    }[what]
    moved_aside(victim, tmp_path / "aside")
    error = outcome_of(lambda: index_of(folder))
    assert isinstance(error, UnsupportedError)
    assert "symbolic link" in str(error) and victim.name in str(error)


def test_a_folder_that_becomes_a_link_after_planning_is_not_followed(tmp_path):
    folder = Path(shutil.copytree(UNIVERSAL, tmp_path / "s"))
    plan = plan_of(read_checkpoint(folder, None), Topology(dp=2, zero=1), target_format="universal", num_threads=1)
    moved_aside(parameter(folder), tmp_path / "aside")
    (tmp_path / "out").mkdir()
    error = outcome_of(lambda: execute(plan, tmp_path / "out", sync=False))
    assert isinstance(error, UnsupportedError) and "lies behind one" in str(error)


@pytest.mark.parametrize("name", ["dcp-2.13/fsdp2-flat", "megatron-0.16.1/iter_0000003"])
@pytest.mark.parametrize("to", ["a file", "a device", "a pipe"])
def test_a_linked_metadata_file_is_not_followed(name, to, tmp_path):
    source = GOLDEN / name
    folder = Path(shutil.copytree(source / STEP if (source / STEP).is_dir() else source, tmp_path / "s"))
    moved_aside(folder / ".metadata", tmp_path / "aside")
    if to != "a file":
        (tmp_path / "aside").unlink()
    if to == "a device":
        (tmp_path / "aside").symlink_to("/dev/zero")
    elif to == "a pipe":
        os.mkfifo(tmp_path / "aside")
    error = outcome_of(lambda: index_of(folder))
    assert isinstance(error, UnsupportedError if to == "a file" else ReshardError)
    assert to != "a file" or ".metadata: is a symbolic link" in str(error)


def test_the_folder_of_a_checkpoint_may_be_a_link(tmp_path):
    (tmp_path / "latest").symlink_to(UNIVERSAL)
    wanted = Conversion(source=tmp_path / "latest", target=tmp_path / "out", topology=Topology(dp=2, zero=1))
    convert(wanted, RunOptions(num_threads=1, sync=False))
    assert read_commit(tmp_path / "out").step == 2


def test_a_file_that_names_the_newest_checkpoint_is_not_read_through_a_link(tmp_path):
    (tmp_path / "secret").write_text("the password")
    (tmp_path / "ckpt").mkdir()
    (tmp_path / "ckpt/latest").symlink_to("../secret")
    with pytest.raises(NotACheckpointError) as caught:
        find_newest(tmp_path / "ckpt")
    assert "password" not in str(caught.value)


@pytest.mark.parametrize("what", ["a link", "a link to nothing", "a file"])
@pytest.mark.parametrize("sharing", [Sharing.RESUMABLE, Sharing.TOGETHER])
def test_nothing_is_written_through_a_link_with_the_name_of_an_unfinished_result(what, sharing, tmp_path):
    (tmp_path / "elsewhere").mkdir()
    place = unfinished_folder(tmp_path / "out", "0123abcd")
    if what == "a file":
        place.write_text("")
    else:
        place.symlink_to("elsewhere" if what == "a link" else "nothing")
    with pytest.raises(TargetError) as caught, staging(tmp_path / "out", "0123abcd", 0, sharing) as folder:
        (folder / "x").write_text("")
    assert caught.value.path == str(place) and what.split()[1] in caught.value.message
    assert not any((tmp_path / "elsewhere").iterdir())
    assert not (tmp_path / "nothing").exists()


@pytest.mark.parametrize("option", ["--resume", "--worker=0/1"])
def test_the_command_publishes_no_link_to_another_folder(option, tmp_path, capsys):
    source = GOLDEN / f"deepspeed-0.19.8/zero2-dp3/{STEP}"
    (tmp_path / "elsewhere").mkdir()
    wanted = Conversion(source=source, target=tmp_path / "out", topology=Topology(dp=2, zero=2))
    place = unfinished_folder(wanted.target, plan_of(index_of(source), wanted.topology).fingerprint)
    place.symlink_to("elsewhere")
    assert main(["run", str(source), str(wanted.target), "--to", "dp=2", option]) == ExitCode.TARGET_FAILED
    assert f"{place}: is a link" in capsys.readouterr().err
    assert not any((tmp_path / "elsewhere").iterdir()) and not wanted.target.exists()


def test_the_lock_of_an_unfinished_result_is_not_followed_where_it_is_a_link(tmp_path):
    (tmp_path / FINISH_FILE).symlink_to("nothing")
    with pytest.raises(TargetError, match="cannot be opened"), hold_finish_lock(tmp_path):
        pass
    assert not (tmp_path / "nothing").exists()


def test_links_with_the_name_of_an_unfinished_result_are_left_alone(tmp_path):
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere/x").write_text("")
    place = unfinished_folder(tmp_path / "out", "0123abcd")
    place.symlink_to("elsewhere")
    with staging(tmp_path / "out", "f" * 16, 0, Sharing.ALONE):
        pass
    assert (tmp_path / "elsewhere/x").exists() and place.is_symlink()


NAMES = ["*", "?", "[a-z]*", "**", "a[b]", ".*", "{a,b}", "*.partial-*"]


@pytest.mark.parametrize("name", NAMES)
def test_a_target_whose_name_is_a_pattern_removes_no_other_targets_unfinished_result(name, tmp_path):
    others = [
        unfinished_folder(tmp_path / other, "0123abcd") for other in ("b", "other", "ab", "a.partial-0", name + "x")
    ]
    own = unfinished_folder(tmp_path / name, "0123abcd")
    for folder in (*others, own):
        folder.mkdir()
    with staging(tmp_path / name, "f" * 16, 0, Sharing.ALONE) as folder:
        assert is_unfinished(folder)
    assert all(other.is_dir() for other in others)
    assert not own.exists() and not folder.exists()


def test_the_command_leaves_the_unfinished_result_of_another_target_alone(tmp_path):
    other = unfinished_folder(tmp_path / "other", "0123abcd")
    other.mkdir()
    source = GOLDEN / f"deepspeed-0.19.8/zero2-dp3/{STEP}"
    command = [sys.executable, "-m", "reshard.cli.main", "run", source, tmp_path / "*", "--to", "dp=2", "--no-sync"]
    subprocess.run(command, check=True, capture_output=True)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["*", other.name]
