"""`reshard plan` on real checkpoints: what a run would do, at what cost, and whether it would be refused."""

import os
import re
from pathlib import Path

import pytest

from reshard.contract import COMMIT_FILE, ExitCode
from tests.golden.command import HERE, PIPELINE, ZERO2, ZERO3, Answer


def test_a_plan_lists_the_files_that_a_run_makes_and_writes_nothing(tmp_path: Path, say: Answer) -> None:
    target = tmp_path / "new/out"
    value = say.json("plan", PIPELINE, target, "--to", "dp=3", "--files")
    assert list(tmp_path.iterdir()) == []
    assert (value["mode"], value["from"], value["to"]) == (
        "materialize",
        "tp=2,pp=2,dp=1,zero=1",
        "tp=1,pp=1,dp=3,zero=1",
    )
    assert value["estimate"]["rates"]["read"]["measured"] and value["estimate"]["rates"]["write"]["measured"]
    assert value["estimate"]["seconds"] > 0
    report = say.json("run", PIPELINE, target, "--to", "dp=3")
    made = {path.name: path.stat().st_size for path in target.iterdir() if path.suffix == ".pt"}
    assert {item["path"]: item["bytes"] for item in value["files"]} == made
    assert (value["bytes_to_read"], value["files_to_write"]) == (report["bytes_read"], report["num_files"])


def test_room_at_the_target_is_told(tmp_path: Path, say: Answer, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("cli.commands", "commits.staging"):
        monkeypatch.setattr(f"reshard.{module}.free_bytes", lambda _folder: 10_000)
    words = ["plan", PIPELINE, tmp_path / "out", "--to", "dp=3"]
    assert say.json(*words, code=ExitCode.STORAGE_FULL)["target_free_bytes"] == 10_000
    text = say(*words, code=ExitCode.STORAGE_FULL)
    assert re.search(r"free +9\.8 KiB on the target's file system", text)
    assert re.search(r"refused +StorageFullError \(21\): .* KiB are needed, 9\.8 KiB are free", text)
    say("run", *words[1:], code=ExitCode.STORAGE_FULL)


def test_a_plan_of_a_manifest_is_what_its_run_does(tmp_path: Path, say: Answer) -> None:
    target = tmp_path / "virtual"
    words = [PIPELINE, target, "--to", "dp=3", "--mode", "virtual"]
    planned, text = say.json("plan", *words, "--files"), say("plan", *words)
    report = say.json("run", *words)
    for promised, done in (("bytes_to_read", "bytes_read"), ("bytes_to_write", "bytes_written")):
        assert planned[promised] == report[done]
    made = {path.name: path.stat().st_size for path in target.iterdir() if path.name != COMMIT_FILE}
    assert {item["path"]: item["bytes"] for item in planned["files"]} == made
    files = say.json("plan", PIPELINE, "--to", "dp=3")  # a load reads one copy of each tensor and compares none
    assert planned["bytes_to_load"] == files["bytes_to_read"] - files["bytes_to_compare"] > 0
    assert planned["estimate"]["read_seconds"] == planned["estimate"]["check_seconds"] == 0
    assert re.search(r"read +nothing but metadata\n +write +\S+ KiB in 2 files", text)
    assert "refused" not in text and not re.search(r"read +\d.* at", text)


def test_a_plan_of_a_manifest_that_nobody_can_load_is_refused(say: Answer) -> None:
    say("plan", PIPELINE, "--format", "dcp", "--mode", "virtual", code=ExitCode.UNSUPPORTED)


@pytest.mark.parametrize("mode", ["materialize", "virtual"])
def test_a_plan_says_that_its_run_would_be_refused(tmp_path: Path, say: Answer, mode: str) -> None:
    target = tmp_path / "out"
    target.mkdir()
    (target / "thesis.tex").touch()
    words = [PIPELINE, target, "--to", "dp=3", "--mode", mode]
    value = say.json("plan", *words, code=ExitCode.TARGET_FAILED)
    refused = say.json("run", *words, code=ExitCode.TARGET_FAILED)
    assert value["refused"]["message"] == refused["error"]["message"]
    assert value["refused"]["exit_code"] == value["exit_code"] == refused["exit_code"]
    assert value["bytes_to_write"] > 0  # the plan is told all the same
    assert [path.name for path in tmp_path.rglob("*")] == ["out", "thesis.tex"]


@pytest.mark.parametrize("mode", ["materialize", "virtual"])
def test_a_plan_says_that_its_run_has_been_done(tmp_path: Path, say: Answer, mode: str) -> None:
    words = [PIPELINE, tmp_path / "out", "--to", "dp=3", "--mode", mode]
    assert (value := say.json("plan", *words))["already_done"] is False and value["refused"] is None
    say("run", *words)
    assert say.json("plan", *words)["already_done"] is True
    assert "run would change nothing" in say("plan", *words)


@pytest.mark.skipif(os.geteuid() != 0, reason="becomes another user")
def test_a_plan_says_that_nothing_may_be_written_there(say: Answer) -> None:
    os.seteuid(65534)
    try:
        value = say.json("plan", PIPELINE, "/new/out", "--to", "dp=3", code=ExitCode.TARGET_FAILED)
    finally:
        os.seteuid(0)
    assert "no folder may be made here" in value["refused"]["message"]
    assert value["refused"]["path"] == "/"


@pytest.mark.parametrize("verb", ["plan", "run"])
def test_a_name_that_is_too_long_is_a_named_error(tmp_path: Path, say: Answer, verb: str) -> None:
    for target in (tmp_path / ("x" * 300), tmp_path / ("x" * 300) / "out", tmp_path / ("ä" * 120)):
        assert "bytes, " in say(verb, PIPELINE, target, "--to", "dp=3", code=ExitCode.TARGET_FAILED)
    assert "PATH" not in (found := say(verb, PIPELINE, tmp_path / "x/" / ("y/" * 2000), "--to", "dp=3", code=20))
    assert "at most" in found
    assert "no such folder" in say(verb, tmp_path / ("x" * 300), tmp_path / "out", "--to", "dp=3", code=11)
    long = tmp_path / ("r" * 300)
    text = say("run", PIPELINE, tmp_path / "out", "--to", "dp=3", "--report", long, code=ExitCode.TARGET_FAILED)
    assert "the report cannot be written" in text
    assert list(tmp_path.iterdir()) == []


def test_the_longest_name_that_is_not_refused_can_be_made(tmp_path: Path, say: Answer) -> None:
    say("run", PIPELINE, tmp_path / ("x" * 229), "--to", "dp=3", "--resume")
    say("run", PIPELINE, tmp_path / ("x" * 230), "--to", "dp=3", code=ExitCode.TARGET_FAILED)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--format", "safetensors", "--like", str(ZERO2)], "--like .* safetensors holds nothing"),
        (["--to", "dp=2", "--file-size", "1MiB"], "--file-size: .* deepspeed"),
        (["--format", "dcp", "--file-size", "1MiB"], "--file-size: .* dcp"),
        (["--to", "dp=2", "--dtype", "float16"], "--dtype float16: the format deepspeed keeps"),
        (
            ["--to", "dp=2", "--states", "momentum"],
            "--states momentum: the source does not hold momentum, it holds exp",
        ),
    ],
)
def test_options_that_do_nothing_are_refused(tmp_path: Path, say: Answer, words: list[str], message: str) -> None:
    assert re.search(message, say("plan", ZERO2, *words, code=ExitCode.USAGE))
    assert re.search(message, say("run", ZERO2, tmp_path / "out", *words, code=ExitCode.USAGE))


def test_settings_that_come_from_elsewhere_are_noted(say: Answer) -> None:
    notes = say.json("plan", ZERO2, "--to", "dp=2", "--like", ZERO3)["notes"]
    assert any(f"are those of {ZERO3}" in note for note in notes)
    assert not any("are those of" in note for note in say.json("plan", ZERO2, "--to", "dp=2")["notes"])


def test_what_was_not_measured_is_assumed_and_said_so(say: Answer) -> None:
    text = say("plan", PIPELINE, "--to", "dp=3")
    assert "assumed: name the target to have its storage measured" in text
    rates = say.json("plan", PIPELINE, "--to", "dp=3", "--no-measure")["estimate"]["rates"]
    assert not rates["read"]["measured"] and not rates["write"]["measured"]


def test_what_the_target_leaves_behind_is_noted(say: Answer) -> None:
    assert any("exp_avg" in note for note in say.json("plan", ZERO2, "--format", "safetensors")["notes"])


def test_a_stage_that_nobody_asked_for_stays(tmp_path: Path, say: Answer) -> None:
    assert say.json("plan", ZERO3, "--to", "dp=2", "--no-measure")["to"].endswith("zero=3")
    assert say.json("plan", ZERO3, "--to", "dp=2,zero=1", "--no-measure")["to"].endswith("zero=1")


def test_a_partitioned_pipeline_is_planned_only_for_frameworks_that_run_it(say: Answer) -> None:
    fsdp = HERE / "dcp-2.13/fsdp2-flat/step-00000002"
    value = say.json("plan", fsdp, "--to", "pp=2,dp=2,zero=3")
    assert value["to"] == "tp=1,pp=2,dp=2,zero=3"
    for words in ([ZERO2], [PIPELINE], [ZERO2, "--format", "universal"], [fsdp, "--format", "megatron"]):
        text = say("plan", *words, "--to", "pp=2,zero=3", code=ExitCode.USAGE)
        assert "zero=3 with pp=2: DeepSpeed refuses ZeRO-2 and ZeRO-3 with a pipeline" in text
