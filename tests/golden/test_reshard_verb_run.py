"""`reshard run` on real checkpoints: its options, its reports, and what it refuses before it writes."""

import re
import shutil
from pathlib import Path

import pytest

from reshard import api
from reshard.cli.main import main
from reshard.commits.commit import read_commit
from reshard.contract import ExitCode, ReshardReport
from tests.golden.command import BF16, HERE, PIPELINE, ROOT, ZERO2, Answer
from tests.golden.files import MODEL, PATTERNS, STEP, assemble, edit


def test_without_a_topology_the_source_keeps_its_own(tmp_path: Path, say: Answer) -> None:
    say("run", PIPELINE, tmp_path / "weights", "--format", "safetensors")
    assert say.json("run", PIPELINE, tmp_path / "weights", "--format", "safetensors")["bytes_written"] == 0
    assert "--to TOPOLOGY, --format NAME" in say("run", PIPELINE, tmp_path / "out", code=ExitCode.USAGE)


def test_names_of_a_map(tmp_path: Path, say: Answer) -> None:
    text = (ROOT / "examples/name_maps/gpt-llama.yaml").read_text(encoding="utf-8")
    sizes = "constants: {layers: 2, hidden: 8, heads: 4, kv_heads: 2, head: hidden // heads, ffn: 6}"
    names = tmp_path / "names.yaml"
    names.write_text(re.sub(r"constants: .*", sizes, text), encoding="utf-8")
    weights = tmp_path / "weights"
    arguments = ["run", PIPELINE, weights, "--format", "safetensors", "--names", names]
    say(*arguments)
    assert read_commit(weights).options["names"].startswith("names.yaml ")
    found, source = assemble(api.index_of(weights)), assemble(api.index_of(PIPELINE))
    assert (found["weight/model.layers.1.self_attn.k_proj.weight"] == source["weight/2.qkv"][8:12]).all()
    assert (found["weight/model.layers.0.mlp.up_proj.weight"] == source["weight/1.gate_up"][6:]).all()
    value = say.json("verify", PIPELINE, weights, "--names", names)
    assert value["tensors"] == 2 * len(found)  # weights and master weights of the source
    assert "already converted" in say(*arguments)
    explained = say("explain", PIPELINE, "weight/model.layers.0.mlp.up_proj.weight", "--names", names)
    assert "[6, 8] float32" in explained
    names.write_text(names.read_text(encoding="utf-8") + "\n# changed\n", encoding="utf-8")
    assert "not the result of this conversion" in say(*arguments, code=ExitCode.TARGET_FAILED)
    assert "cannot be read" in say(*arguments[:-1], tmp_path / "absent.yaml", code=ExitCode.USAGE)


def test_patterns_for_a_checkpoint_that_does_not_say_how_it_is_cut(tmp_path: Path, say: Answer) -> None:
    source = Path(shutil.copytree(PIPELINE, tmp_path / "ckpt" / STEP))
    for path in source.glob(MODEL.format(0).replace("00", "*")):
        edit(source, path.name, lambda value: value.pop("universal_checkpoint_info"))
    patterns = tmp_path / "patterns.yaml"
    patterns.write_text(PATTERNS, encoding="utf-8")
    out = tmp_path / "out"
    say("run", source, out, "--to", "dp=3", code=ExitCode.UNSUPPORTED)
    say("run", source, out, "--to", "dp=3", "--patterns", patterns)
    assert say.json("verify", PIPELINE, out)["not_compared"] == []
    assert say.json("inspect", source, "--patterns", patterns)["problems"] == []
    say("plan", source, "--to", "dp=3", "--patterns", patterns)
    say("explain", source, "2.qkv", "--to", "dp=3", "--patterns", patterns)
    say("verify", source, out, "--patterns", patterns)
    safetensors = HERE / "safetensors/llama"
    assert "are for DeepSpeed's checkpoints" in say("inspect", safetensors, "--patterns", patterns, code=ExitCode.USAGE)


def test_a_limited_rate_and_no_progress(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["run", str(ZERO2), str(tmp_path / "out"), "--to", "dp=2,zero=2", "--quiet", "--limit-rate", "100MiB"]
    assert main(words) == ExitCode.OK
    assert capsys.readouterr().err == ""


def test_what_is_left_behind_is_noted_on_the_way(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["run", str(ZERO2), str(tmp_path / "out"), "--format", "safetensors"]
    assert main(words) == ExitCode.OK
    found = capsys.readouterr()
    assert "reshard: note: " in found.err and "exp_avg" in found.err
    assert "note" not in found.out


def test_a_target_never_touches_its_source(tmp_path: Path, say: Answer) -> None:
    source = tmp_path / "ckpt" / "a1"
    shutil.copytree(ZERO2, source)
    before = sorted((path, path.stat().st_mtime_ns) for path in tmp_path.rglob("*"))
    to = ["--to", "dp=2,zero=2"]
    assert "the same folder" in say("run", source, source, *to, code=ExitCode.USAGE)
    assert "the same folder" in say("run", source, source / "../a1", *to, code=ExitCode.USAGE)
    assert "inside the source" in say("run", source, source / "out", *to, code=ExitCode.USAGE)
    assert "holds the source" in say("run", source, source.parent, *to, code=ExitCode.USAGE)
    link = tmp_path / "link"
    link.symlink_to(source, target_is_directory=True)
    assert "the same folder" in say("run", source, link, *to, code=ExitCode.USAGE)
    link.unlink()
    file = ZERO2 / "mp_rank_00_model_states.pt"
    assert "is a file" in say("run", source, file / "out", *to, code=ExitCode.TARGET_FAILED)
    assert sorted((path, path.stat().st_mtime_ns) for path in tmp_path.rglob("*")) == before


def test_a_command_line_that_cannot_be_parsed_leaves_its_report(tmp_path: Path, say: Answer) -> None:
    report = tmp_path / "report"
    say("run", PIPELINE, tmp_path / "out", "--to", "dp=2", "--fast", "--report", report, code=ExitCode.USAGE)
    found = ReshardReport.from_json(report.read_text(encoding="utf-8"))
    assert (found.ok, found.exit_code) == (False, ExitCode.USAGE)
    assert "--fast" in found.message


def test_a_report_that_cannot_be_written_is_said(tmp_path: Path, say: Answer) -> None:
    words = ["run", PIPELINE, tmp_path / "out", "--to", "dp=2", "--report", tmp_path / "no/such/folder"]
    assert "the report cannot be written" in say(*words, code=ExitCode.TARGET_FAILED)
    assert not (tmp_path / "out").exists()


def committed(folder: Path, *words: object) -> Path:
    """A checkpoint with a commit, made from a golden one."""
    assert main(["run", str(ZERO2), str(folder), "--to", "dp=2", *(str(word) for word in words)]) == ExitCode.OK
    return folder


def test_a_source_that_is_not_what_its_commit_says_is_not_converted(tmp_path: Path, say: Answer) -> None:
    source = committed(tmp_path / "source", "--format", "safetensors")  # a format without checksums of its own
    say("verify", source)
    path = source / "model.safetensors"
    content = bytearray(path.read_bytes())
    content[-5] ^= 1
    path.write_bytes(content)
    found = say("run", source, tmp_path / "out", "--format", "dcp", "--to", "dp=1", code=ExitCode.SOURCE_INVALID)
    assert "was committed" in found
    assert sorted(item.name for item in tmp_path.iterdir()) == ["source"]


def test_another_checkpoint_under_the_same_name_is_another_conversion(tmp_path: Path, say: Answer) -> None:
    source, target = tmp_path / "source" / STEP, tmp_path / "target"
    shutil.copytree(ZERO2, source)
    say("run", source, target, "--to", "dp=2")
    assert "already converted" in say("run", source, target, "--to", "dp=2")
    say("run", source, target, "--to", "dp=2", "--format", "dcp", code=ExitCode.TARGET_FAILED)
    shutil.rmtree(source)
    shutil.copytree(BF16, source)
    found = say("run", source, target, "--to", "dp=2", code=ExitCode.TARGET_FAILED)
    assert "is not the result of this conversion" in found


@pytest.mark.parametrize("to", ["dp=2", "dp=2,zero=2"])
def test_a_run_whose_source_was_removed_when_it_was_done_is_done(tmp_path: Path, say: Answer, to: str) -> None:
    source, target = tmp_path / "source", tmp_path / "target"
    shutil.copytree(ZERO2, source)
    say("run", source, target, "--to", to)
    shutil.rmtree(source)
    assert "already converted and committed; the source is gone" in say("run", source, target, "--to", to)
    for other in (["dp=3"], ["dp=2,zero=1"], [to, "--states", "fp32"], [to, "--format", "dcp"]):
        assert "there is no such folder" in say("run", source, target, "--to", *other, code=ExitCode.UNSUPPORTED)
    max(target.glob("*.pt")).unlink()
    assert "there is no such folder" in say("run", source, target, "--to", to, code=ExitCode.UNSUPPORTED)


def test_a_damaged_result_is_not_taken_for_done_when_it_is_read_again(tmp_path: Path, say: Answer) -> None:
    target = committed(tmp_path / "target")
    path = next(target.glob("*optim_states.pt"))
    content = bytearray(path.read_bytes())
    content[-200] ^= 1
    path.write_bytes(content)
    say("run", ZERO2, target, "--to", "dp=2", "--reread", code=ExitCode.TARGET_FAILED)


@pytest.mark.parametrize(
    ("words", "code"),
    [
        (["s3://bucket/out"], ExitCode.USAGE),
        ([""], ExitCode.USAGE),
        (["out", "--threads", "-3"], ExitCode.USAGE),
        (["out", "--threads", "100000"], ExitCode.USAGE),
        (["out", "--report", "nowhere/report.json"], ExitCode.TARGET_FAILED),
        (["dangling"], ExitCode.TARGET_FAILED),
    ],
)
def test_what_cannot_be_done_is_said_before_a_byte_is_moved(
    tmp_path: Path, say: Answer, monkeypatch: pytest.MonkeyPatch, words: list[str], code: int
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("dangling").symlink_to("nothing")
    say("run", ZERO2, *words, "--to", "dp=2", code=code)
    assert [item.name for item in tmp_path.iterdir()] == ["dangling"]


def test_a_report_never_replaces_a_file_of_a_checkpoint(tmp_path: Path, say: Answer) -> None:
    source = shutil.copytree(ZERO2, tmp_path / "source")
    path = next(source.glob("mp_rank_*"))
    before = path.read_bytes()
    say("run", source, tmp_path / "out", "--to", "dp=2", "--report", path, code=ExitCode.USAGE)
    assert path.read_bytes() == before
