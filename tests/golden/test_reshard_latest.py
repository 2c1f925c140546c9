"""`reshard run --latest`: the file that names a checkpoint to DeepSpeed, whoever publishes, whatever is in the way."""

import contextlib
import json
import re
from pathlib import Path

import pytest

from reshard import target
from reshard.cli.main import main
from reshard.commits import latest
from reshard.commits.staging import FINISH_FILE
from reshard.contract import ExitCode

GOLDEN = Path(__file__).parent
ZERO2 = GOLDEN / "deepspeed-0.19.8/zero2-dp3/step-00000002"
MEGATRON = GOLDEN / "megatron-0.16.1/iter_0000003"
DCP = GOLDEN / "dcp-2.13/fsdp2-flat/step-00000002"


def run(capsys: pytest.CaptureFixture[str], target: Path, *words: str, code: int = ExitCode.OK) -> dict:
    """The report of a run to two ranks."""
    assert main(["run", str(ZERO2), str(target), "--to", "dp=2", "--json", *words]) == code
    value: dict = json.loads(capsys.readouterr().out)
    return value


@pytest.mark.parametrize(("target_format", "name"), [("deepspeed", "latest"), ("universal", "latest_universal")])
def test_the_file_names_the_target_and_the_report_names_the_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], target_format: str, name: str
) -> None:
    (tmp_path / name).write_text("global_step1")
    report = run(capsys, tmp_path / "global_step2", "--format", target_format, "--latest")
    assert report["latest"] == str(tmp_path / name)
    assert (tmp_path / name).read_text() == "global_step2"
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(["global_step2", name])


def test_people_are_told_which_file_names_the_target(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", str(ZERO2), str(tmp_path / "out"), "--to", "dp=2", "--latest"]) == ExitCode.OK
    assert f"  named in {tmp_path / 'latest'}\n" in capsys.readouterr().out


def test_without_the_option_nothing_beside_the_target_is_touched(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "latest").write_text("global_step1")
    assert run(capsys, tmp_path / "out")["latest"] == ""
    assert (tmp_path / "latest").read_text() == "global_step1"


def test_a_target_that_is_there_already_is_named_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run(capsys, tmp_path / "out")
    again = run(capsys, tmp_path / "out", "--latest")
    assert again["bytes_written"] == 0
    assert again["latest"] == str(tmp_path / "latest")
    assert (tmp_path / "latest").read_text() == "out"


def test_the_worker_that_publishes_names_the_target_and_one_that_comes_late_does_not(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first = run(capsys, tmp_path / "out", "--worker", "0/2", "--latest")
    assert first["latest"] == str(tmp_path / "latest")
    (tmp_path / "latest").write_text("global_step3")  # training goes on
    assert run(capsys, tmp_path / "out", "--worker", "1/2", "--latest")["latest"] == ""
    assert (tmp_path / "latest").read_text() == "global_step3"


@pytest.mark.parametrize("words", [[], ["--resume"], ["--worker", "1/2"]])
def test_a_run_that_died_between_publishing_and_naming_is_completed_by_the_next(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, words: list[str]
) -> None:
    def die(*_arguments: object) -> None:
        raise SystemExit("as if killed")

    (tmp_path / "latest").write_text("global_step1")
    with monkeypatch.context() as patch, contextlib.suppress(SystemExit):
        patch.setattr(target, "write_latest", die)
        run(capsys, tmp_path / "out", *words, "--latest")
    assert (tmp_path / "out" / FINISH_FILE).exists()
    assert (tmp_path / "latest").read_text() == "global_step1"
    assert run(capsys, tmp_path / "out", *words, "--latest")["latest"] == str(tmp_path / "latest")
    assert (tmp_path / "latest").read_text() == "out"
    assert not (tmp_path / "out" / FINISH_FILE).exists()


@pytest.mark.parametrize(
    ("source", "words", "message"),
    [
        (ZERO2, ["--format", "dcp"], "--latest: .* of the format dcp"),
        (ZERO2, ["--format", "safetensors"], "--latest: .* of the format safetensors"),
        (DCP, ["--to", "dp=2"], "--latest: .* of the format dcp"),
        (ZERO2, ["--to", "dp=2", "--mode", "virtual"], "--latest: DeepSpeed does not load"),
    ],
)
def test_formats_without_such_a_file_are_refused_before_anything_is_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], source: Path, words: list[str], message: str
) -> None:
    assert main(["run", str(source), str(tmp_path / "out"), *words, "--latest"]) == ExitCode.USAGE
    assert re.search(message, capsys.readouterr().err)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["latest", " out", "out ", "a\nb", "a\rb", "\udce9"])
def test_names_that_deepspeed_would_not_read_back_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    run(capsys, tmp_path / name, "--latest", code=ExitCode.USAGE)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("kind", ["folder", "link"])
def test_something_else_of_the_files_name_is_left_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], kind: str
) -> None:
    if kind == "folder":
        (tmp_path / "latest").mkdir()
    else:
        (tmp_path / "latest").symlink_to("global_step1")
    value = run(capsys, tmp_path / "out", "--latest", code=ExitCode.TARGET_FAILED)
    assert value["error"]["path"] == str(tmp_path / "latest")
    assert [path.name for path in tmp_path.iterdir()] == ["latest"]


def test_a_file_that_cannot_be_written_leaves_the_target_published(tmp_path: Path) -> None:
    target = tmp_path / "gone" / "out"
    with pytest.raises(latest.TargetError, match="out itself is published") as failure:
        latest.write_latest(latest.latest_file(target, "deepspeed"), target)
    assert failure.value.exit_code == ExitCode.TARGET_FAILED


@pytest.mark.parametrize(
    ("name", "text"),
    [("iter_0000003", "3"), ("iter_0123456", "123456"), ("iter_12345678", "12345678"), ("release", "release")],
)
def test_megatron_finds_the_iteration_in_its_own_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, text: str
) -> None:
    tracker = tmp_path / "latest_checkpointed_iteration.txt"
    tracker.write_text("2")
    assert main(["run", str(MEGATRON), str(tmp_path / name), "--to", "tp=1", "--latest", "--json"]) == ExitCode.OK
    assert json.loads(capsys.readouterr().out)["latest"] == str(tracker)
    assert tracker.read_text() == text
    assert main(["inspect", str(tmp_path)]) != ExitCode.OK
    assert str(tmp_path / name) in capsys.readouterr().err


@pytest.mark.parametrize("name", ["iter_3", "iter_0000000", "iter_00000003", "step-3", "iter_000000x", "Release"])
def test_folders_that_megatron_would_not_look_for_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    assert main(["run", str(MEGATRON), str(tmp_path / name), "--to", "tp=1", "--latest"]) == ExitCode.USAGE
    assert re.search(r"Megatron-LM would not look for a folder .*\n.*iter_0000100", capsys.readouterr().err)
    assert list(tmp_path.iterdir()) == []


def test_of_several_checkpoints_the_one_that_the_file_names_is_offered(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("iter_0000003", "iter_0000009"):
        (tmp_path / name).symlink_to(MEGATRON)
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("3\n")
    assert main(["inspect", str(tmp_path)]) != ExitCode.OK
    assert f"for instance {tmp_path / 'iter_0000003'}" in capsys.readouterr().err
