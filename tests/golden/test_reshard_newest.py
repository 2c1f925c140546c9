"""`reshard run --newest`: which checkpoint a folder of several stands for, and that nothing is guessed."""

import json
import shutil
from pathlib import Path

import pytest

from reshard import api
from reshard.cli.locate import find_newest
from reshard.cli.main import main
from reshard.commits.commit import read_commit
from reshard.contract import ExitCode

GOLDEN = Path(__file__).parent
ZERO2 = GOLDEN / "deepspeed-0.19.8/zero2-dp3/step-00000002"
UNIVERSAL = GOLDEN / "universal-0.19.8/zero2-dp3/step-00000002"


def run(capsys: pytest.CaptureFixture[str], source: Path, target: Path, *, code: int = ExitCode.OK) -> dict:
    """The report of a run to two ranks."""
    words = ["--to", "dp=2", "--newest", "--format", "deepspeed", "--json"]
    assert main(["run", str(source), str(target), *words]) == code
    value: dict = json.loads(capsys.readouterr().out)
    return value


@pytest.fixture
def training(tmp_path: Path) -> Path:
    """Make a folder of plain DeepSpeed: two tags, of which `latest` names the older one."""
    folder = tmp_path / "run"
    for tag in ("global_step2", "global_step10"):
        shutil.copytree(ZERO2, folder / tag)
        (folder / tag / "COMMIT.json").unlink(missing_ok=True)
    (folder / "latest").write_text("global_step2\n")
    return folder


@pytest.fixture
def job(tmp_path: Path) -> Path:
    """Make a job's folder: commits of two attempts, the newest step by the older one, and a folder without a commit."""
    folder = tmp_path / "job"
    for name in ("a1/step-00000002", "a2/step-start", "a10/step-00000002"):
        api.reshard(ZERO2, folder / name, "dp=2")
    (folder / "a11/step-00000090").mkdir(parents=True)
    (folder / "loss-a1.jsonl").write_text("{}\n")
    return folder


def test_of_a_training_it_is_the_one_that_latest_names(
    tmp_path: Path, training: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    report = run(capsys, training, tmp_path / "out")
    assert report["source"] == str(training / "global_step2")
    assert (report["step"], read_commit(tmp_path / "out").step) == (2, 2)


def test_of_a_job_it_is_the_commit_of_the_latest_step_and_attempt(
    tmp_path: Path, job: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(capsys, job, tmp_path / "out")["source"] == str(job / "a10/step-00000002")


def test_a_universal_folder_becomes_one_that_deepspeed_loads_as_its_own(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    training = tmp_path / "run"
    shutil.copytree(UNIVERSAL, training / "global_step2_universal")
    (training / "latest_universal").write_text("global_step2_universal")
    assert run(capsys, training, tmp_path / "out")["source"] == str(training / "global_step2_universal")
    assert read_commit(tmp_path / "out").format == "deepspeed"


def test_one_checkpoint_stands_for_itself(tmp_path: Path, training: Path) -> None:
    assert find_newest(training / "global_step10") == training / "global_step10"


def test_what_is_not_there_is_refused_as_ever(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = run(capsys, tmp_path / "nowhere", tmp_path / "out", code=ExitCode.UNSUPPORTED)
    assert "there is no such folder" in report["message"]


def test_without_the_file_nothing_is_guessed(
    tmp_path: Path, training: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (training / "latest").unlink()
    report = run(capsys, training, tmp_path / "out", code=ExitCode.UNSUPPORTED)
    assert "holds 2 checkpoints, and is none itself" in report["message"]


@pytest.mark.parametrize("text", ["global_step11", "../run/global_step2", ""])
def test_a_file_that_names_no_checkpoint_is_refused_and_no_other_is_taken(
    tmp_path: Path, training: Path, capsys: pytest.CaptureFixture[str], text: str
) -> None:
    (training / "latest").write_text(text)
    report = run(capsys, training, tmp_path / "out", code=ExitCode.UNSUPPORTED)
    assert "there is no checkpoint of that name" in report["message"]
    assert f"for instance {training / 'global_step10'}" in report["message"]
    assert not (tmp_path / "out").exists()


def test_the_file_that_names_the_newest_may_be_a_link_to_a_file_beside_it(training: Path) -> None:
    (training / "latest").rename(training / "best")
    (training / "latest").symlink_to("best")
    assert find_newest(training) == training / "global_step2"


@pytest.mark.parametrize("to", ["../secret", "hop"])
def test_such_a_link_out_of_the_folder_is_refused_by_name_and_a_hint_does_without_it(
    training: Path, capsys: pytest.CaptureFixture[str], to: str
) -> None:
    (training.parent / "secret").write_text("the password")
    (training / "hop").symlink_to("../secret")
    (training / "latest").unlink()
    (training / "latest").symlink_to(to)
    report = run(capsys, training, training.parent / "out", code=ExitCode.UNSUPPORTED)
    assert report["error"]["path"] == str(training / "latest")
    assert "is a link that leads out of its folder" in report["error"]["message"]
    assert "copy what it links to" in report["error"]["hint"] and "password" not in str(report)
    assert main(["inspect", str(training)]) == ExitCode.UNSUPPORTED
    assert f"for instance {training / 'global_step10'}" in capsys.readouterr().err
