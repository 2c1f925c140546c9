"""Every verb of the `reshard` command on real checkpoints: what it says, in words and in JSON, and how it fails."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from reshard import api
from reshard.cli import main
from reshard.commit import read_commit, write_commit
from reshard.contract import ExitCode, ReshardReport
from reshard.explain import explain
from tests.golden.files import MODEL, STEP, assemble, edit

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
DEEPSPEED = HERE / "deepspeed-0.19.8"
PIPELINE, ZERO2, ZERO3, BF16 = (
    DEEPSPEED / name / STEP for name in ("pipeline-tp2-pp2", "zero2-dp3", "zero3-dp3", "bf16-dp2")
)
EVERY = sorted(path for path in HERE.glob("*/*/step-*") if path.is_dir())


class Answer:
    """What a command said."""

    def __init__(self, capsys: pytest.CaptureFixture[str]) -> None:
        self._capsys = capsys

    def __call__(self, *words: object, code: int = 0) -> str:
        """Text of a command that ends with `code`: stdout, or stderr if it fails."""
        assert main([str(word) for word in words]) == code
        found = self._capsys.readouterr()
        return found.err if code and not found.out else found.out

    def json(self, *words: object, code: int = 0) -> dict:
        """Its JSON."""
        assert main([*(str(word) for word in words), "--json"]) == code
        value = json.loads(self._capsys.readouterr().out)
        assert value["ok"] is (code == 0)
        return value


@pytest.fixture
def say(capsys: pytest.CaptureFixture[str]) -> Answer:
    return Answer(capsys)


# --- inspect ---


@pytest.mark.parametrize("path", EVERY, ids=lambda path: path.parent.name)
def test_a_good_checkpoint_of_any_format_has_no_problems(path: Path, say: Answer) -> None:
    value = say.json("inspect", path)
    assert (value["problems"], value["exit_code"], value["commit"]) == ([], 0, {"state": "absent"})
    assert value["format"] == path.parents[1].name.partition("-")[0]
    index = api.index_of(path)
    assert sum(state["tensors"] for state in value["states"].values()) == len(value["tensors"]) == len(index.tensors)
    assert sum(tensor["boxes"] for tensor in value["tensors"]) == len(index.shards)
    assert [group["names"] for group in value["groups"]] == [list(group.names) for group in index.groups]


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
    digests = {**commit.digests, "fp32/gone": "0" * 16}
    write_commit(
        target, type(commit)(**{**{name: getattr(commit, name) for name in commit.__slots__}, "digests": digests})
    )
    value = say.json("inspect", target, code=ExitCode.SOURCE_INVALID)
    assert [problem["message"] for problem in value["problems"]] == ["fp32/gone was committed and is not there"]


def test_a_marker_that_cannot_be_read_is_a_problem(tmp_path: Path, say: Answer) -> None:
    source = tmp_path / "a1"
    shutil.copytree(ZERO2, source)
    (source / "COMMIT.json").write_text("{", encoding="utf-8")
    value = say.json("inspect", source, code=ExitCode.SOURCE_INVALID)
    assert value["commit"]["state"] == "damaged"
    assert value["states"]["fp32"]["tensors"] == 7


# --- plan ---


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
    for module in ("verbs", "staging"):
        monkeypatch.setattr(f"reshard.{module}.free_bytes", lambda _folder: 10_000)
    words = ["plan", PIPELINE, tmp_path / "out", "--to", "dp=3"]
    assert say.json(*words, code=ExitCode.STORAGE_FULL)["target_free_bytes"] == 10_000
    text = say(*words, code=ExitCode.STORAGE_FULL)
    assert re.search(r"free +9\.8 KiB on the target's file system", text)
    assert re.search(r"refused +StorageFullError \(21\): .* bytes are needed, 10000 bytes are free", text)
    say("run", *words[1:], code=ExitCode.STORAGE_FULL)


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
    assert value["bytes_to_read"] > 0  # the plan is told all the same
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
    assert "no such folder" in say(verb, tmp_path / ("x" * 300), tmp_path / "out", "--to", "dp=3", code=10)
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


# --- run ---


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
    patterns.write_text(
        r"""
version: 1
vocabulary: {rows: 13, padded_rows: 16}
rules:
  - {pattern: 'tied_modules\.embed\.weight', kind: shard-v, vocabulary: true}
  - {pattern: '.*norm', kind: replicate}
  - {pattern: '\d+\.qkv', kind: shard-nc, dim: 0, parts: [8, 4, 4]}
  - {pattern: '\d+\.gate_up', kind: shard-nc, dim: 0, parts: 2}
  - {pattern: '\d+\.(out|down)', kind: shard-h}
""",
        encoding="utf-8",
    )
    out = tmp_path / "out"
    say("run", source, out, "--to", "dp=3", code=ExitCode.UNSUPPORTED)
    say("run", source, out, "--to", "dp=3", "--patterns", patterns)
    assert say.json("verify", PIPELINE, out)["not_compared"] == []
    assert say.json("inspect", source, "--patterns", patterns)["problems"] == []
    say("plan", source, "--to", "dp=3", "--patterns", patterns)
    say("explain", source, "2.qkv", "--to", "dp=3", "--patterns", patterns)
    say("verify", source, out, "--patterns", patterns)
    safetensors = HERE / "safetensors/llama"
    assert "are for native DeepSpeed" in say("inspect", safetensors, "--patterns", patterns, code=ExitCode.USAGE)


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


def test_verification_tells_its_progress(monkeypatch: pytest.MonkeyPatch, say: Answer) -> None:
    moved, expected = [], []
    monkeypatch.setattr("reshard.verbs.ProgressLine.expect", lambda _self, num_bytes: expected.append(num_bytes))
    monkeypatch.setattr("reshard.verbs.ProgressLine.__call__", lambda _self, num_bytes: moved.append(num_bytes))
    say("verify", ZERO2, ZERO3, "--states", "fp32")
    assert [sum(moved)] == expected == [2 * 596]


# --- paths ---


def test_paths_that_cannot_be_meant_are_told_apart(tmp_path: Path, say: Answer) -> None:
    file, empty, other = tmp_path / "file", tmp_path / "empty", tmp_path / "other"
    file.write_text("x", encoding="utf-8")
    empty.mkdir()
    other.mkdir()
    (other / "thesis.tex").write_text("mine", encoding="utf-8")
    bad = ExitCode.SOURCE_INVALID
    for words in (["inspect", "{}"], ["verify", "{}"], ["plan", "{}", "--to", "dp=2"], ["explain", "{}", "x"]):
        for path, message in (
            (tmp_path / "gone", "there is no such folder"),
            (file, "is a file: expected the folder of one checkpoint"),
            (empty, "is empty"),
            (other, "holds no checkpoint that this version knows"),
            (ZERO2.parent, f"hint: name one of them, for instance {ZERO2}"),
        ):
            assert message in say(*(path if word == "{}" else word for word in words), code=bad)


def test_of_many_checkpoints_the_latest_is_proposed(tmp_path: Path, say: Answer) -> None:
    for step in (9, 10):
        shutil.copytree(ZERO2, tmp_path / f"global_step{step}")
    assert f"for instance {tmp_path}/global_step10" in say("inspect", tmp_path, code=ExitCode.SOURCE_INVALID)
    (tmp_path / "latest").write_text("global_step9\n", encoding="utf-8")
    text = say("inspect", tmp_path, code=ExitCode.SOURCE_INVALID)
    assert "holds 2 checkpoints" in text
    assert f"for instance {tmp_path}/global_step9" in text


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


# --- verify ---


@pytest.mark.parametrize("source", [PIPELINE, ZERO2, ZERO3, BF16], ids=lambda path: path.parent.name)
@pytest.mark.parametrize(
    "words",
    [["dcp"], ["universal", "--to", "zero=1"], ["safetensors"], ["safetensors", "--dtype", "bfloat16"]],
    ids="-".join,
)
def test_what_another_format_holds_agrees(source: Path, words: list[str], tmp_path: Path, say: Answer) -> None:
    target = tmp_path / "out"
    say("run", source, target, "--format", *words)
    value = say.json("verify", source, target)
    names = {tensor.key.name for tensor in api.index_of(source).tensors if "#" not in tensor.key.name}
    compared = 7 if source != PIPELINE else len(names)
    assert value["tensors"] >= compared
    assert value["different"] == []
    assert all("only in the" in note or "other types" in note for note in value["not_compared"])
    back = say.json("verify", target, source)
    assert len(back["not_compared"]) == len(value["not_compared"])


def test_one_wrong_element_in_another_format_is_found(tmp_path: Path, say: Answer) -> None:
    for name, words in (("same", []), ("rounded", ["--dtype", "bfloat16"])):
        target = tmp_path / name
        say("run", ZERO3, target, "--format", "safetensors", *words)
        index = api.index_of(target)
        (target / "COMMIT.json").unlink()
        number = next(at for at, tensor in enumerate(index.tensors) if tensor.key.name == "down.bias")
        row = index.shards.row(int(np.flatnonzero(index.shards.tensor == number)[0]), 1)
        victim = target / index.files[row.file].path
        content = bytearray(victim.read_bytes())
        content[row.byte_offset + 2] ^= 1
        victim.write_bytes(content)
        text = say("verify", ZERO3, target, code=ExitCode.VERIFICATION_FAILED)
        assert text.count("\n  - ") == 1
        assert "fp32/down.bias and weight/down.bias" in text
        assert "hint: verify each of the two alone" in text


def test_a_missing_tensor_is_no_agreement(tmp_path: Path, say: Answer) -> None:
    value = say.json("verify", ZERO2, ZERO3, "--states", "weight,fp32")
    assert value["states"] == ["fp32", "weight"]
    text = say("verify", ZERO2, BF16, "--states", "exp_avg", code=ExitCode.VERIFICATION_FAILED)
    assert "exp_avg/down.bias" in text
    nothing = say("verify", PIPELINE, HERE / "safetensors/llama", code=ExitCode.VERIFICATION_FAILED)
    assert "differ" in nothing or "no tensor in common" in nothing
    nothing = say("verify", ZERO3, HERE / "safetensors/llama", "--states", "fp32", code=ExitCode.VERIFICATION_FAILED)
    assert "no tensor in common" in nothing
    assert "no checkpoint holds momentum" in say("verify", ZERO2, ZERO3, "--states", "momentum", code=2)


def test_states_of_one_checkpoint(say: Answer) -> None:
    every, some = say.json("verify", ZERO2), say.json("verify", ZERO2, "--states", "fp32")
    assert (every["tensors"], some["tensors"], some["committed"]) == (29, 7, False)


# --- explain ---


def test_explained_bytes_are_the_tensors(say: Answer) -> None:
    """Read each box from where `explain` says that it lies; together they are the tensor."""
    wanted = assemble(api.index_of(PIPELINE))
    for found in say.json("explain", PIPELINE, "fp32/*", "--to", "dp=3")["tensors"]:
        whole = np.zeros(found["shape"], dtype=np.uint32)
        for box in (box for box in found["boxes"] if box["used"]):
            flat = np.frombuffer((PIPELINE / box["file"]).read_bytes()[box["start"] : box["stop"]], dtype=np.uint32)
            view = np.lib.stride_tricks.as_strided(flat, box["size"], [4 * stride for stride in box["strides"]])
            low = box["offset"]
            whole[tuple(slice(a, a + size) for a, size in zip(low, box["size"], strict=True))] = view
        assert (whole == wanted[f"fp32/{found['name']}"].view(np.uint32)).all()


def test_a_picture_is_written_and_too_large_ones_are_refused(tmp_path: Path, say: Answer) -> None:
    picture = tmp_path / "boxes.svg"
    say("explain", PIPELINE, "2.qkv", "--to", "dp=3", "--svg", picture)
    assert picture.read_text(encoding="utf-8").startswith("<svg ")
    assert "at most 12" in say("explain", PIPELINE, "*", "--svg", picture, code=ExitCode.USAGE)
    words = ["explain", PIPELINE, "2.qkv", "--svg", tmp_path / "no/such/folder.svg"]
    assert "cannot be written" in say(*words, code=ExitCode.TARGET_FAILED)


def test_a_name_that_is_not_there(say: Answer) -> None:
    text = say("explain", PIPELINE, "2.qvk", code=ExitCode.USAGE)
    assert "there is for instance 2.qkv" in text


def test_every_golden_checkpoint_can_be_explained() -> None:
    for path in EVERY:
        index = api.index_of(path)
        found = explain(index, range(len(index.tensors)))
        assert sum(len(item.places) for item in found) == len(index.shards)


# --- the interface ---


@pytest.mark.parametrize(
    ("words", "code"),
    [
        (["inspect", "/nowhere"], 10),
        (["plan", str(PIPELINE), "--to", "tp=3"], 11),
        (["plan", str(PIPELINE), "--to", "tp=x"], 2),
        (["plan"], 2),
        (["frobnicate"], 2),
        (["verify", "/nowhere"], 10),
        (["explain", str(PIPELINE), "nothing"], 2),
        (["run", str(PIPELINE), "/dev/null/out", "--to", "dp=2"], 20),
        (["run", str(PIPELINE), "/tmp/never", "--to", "dp=2", "--memory", "lots"], 2),
    ],
)
def test_failures_are_json_too(words: list[str], code: int, say: Answer) -> None:
    value = say.json(*words, code=code)
    assert value["exit_code"] == value["error"]["exit_code"] == code
    assert set(value["error"]) == {"kind", "exit_code", "message", "path", "problems", "hint"}
    assert value["error"]["message"]


def test_the_fields_of_the_page_are_there(tmp_path: Path, say: Answer) -> None:
    page = (ROOT / "docs/reshard.md").read_text(encoding="utf-8").split("## JSON")[1].split("\n## ")[0]
    rows = dict(re.findall(r"^\| (\w+) \| (.*) \|$", page, flags=re.MULTILINE))
    out = tmp_path / "out"
    found = {
        "inspect": say.json("inspect", PIPELINE),
        "plan": say.json("plan", PIPELINE, tmp_path / "planned", "--to", "dp=3", "--files"),
        "run": say.json("run", PIPELINE, out, "--to", "dp=3"),
        "verify": {**say.json("verify", out), **say.json("verify", PIPELINE, out)},
        "explain": say.json("explain", PIPELINE, "2.qkv", "--to", "dp=3"),
    }
    for verb, value in found.items():
        told = set(re.findall(r"`(\w+)`", re.sub(r"\([^()]*\)|, each with.*", "", rows[verb])))
        assert told | {"ok"} == set(value), verb
    (tensor, *_) = found["explain"]["tensors"]
    assert set(re.findall(r"`(\w+)`", rows["explain"].split("each with")[1])) == set(tensor)


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


def test_every_verb_reads_a_store(tmp_path: Path, say: Answer) -> None:
    store = pytest.importorskip("fsspec").filesystem("memory")
    for path in ZERO2.iterdir():
        store.pipe(f"/ckpt/global_step2/{path.name}", path.read_bytes())
    source = "memory://ckpt/global_step2"
    assert say.json("inspect", source)["states"]["fp32"]["tensors"] == 7
    assert say.json("plan", source, tmp_path / "out", "--to", "dp=2,zero=2")["estimate"]["rates"]["read"]["measured"]
    say("run", source, tmp_path / "out", "--to", "dp=2,zero=2")
    say("verify", source, tmp_path / "out")
    say("explain", source, "fp32/*", "--to", "dp=2,zero=2")
    assert "name one of them" in say("inspect", "memory://ckpt", code=ExitCode.SOURCE_INVALID)
    assert "there is no such folder" in say("inspect", "memory://nowhere", code=ExitCode.SOURCE_INVALID)
    assert "store://" in say("inspect", "store://nowhere", code=ExitCode.USAGE)


def run_command(*words: str, **options: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "reshard.cli", *words]
    return subprocess.run(command, capture_output=True, text=True, check=False, **options)


def test_version_and_help_go_to_stdout() -> None:
    assert re.fullmatch(r"reshard \d+\.\d+\.\d+\S*\n", run_command("--version").stdout)
    done = run_command("run", "--help")
    assert done.returncode == 0 and "examples:" in done.stdout


def test_a_reader_that_has_seen_enough_is_no_failure() -> None:
    read, write = os.pipe()
    process = subprocess.Popen(
        [sys.executable, "-m", "reshard.cli", "inspect", str(PIPELINE), "--json"], stdout=write, stderr=subprocess.PIPE
    )
    os.close(write)
    os.close(read)
    _, errors = process.communicate()
    assert (process.returncode, errors) == (0, b"")


def test_virtual_mode_writes_a_manifest_that_every_verb_understands(tmp_path: Path, say: Answer) -> None:
    target = tmp_path / "virtual" / STEP
    assert say.json("plan", PIPELINE, "--to", "dp=2", "--mode", "virtual", "--no-measure")["mode"] == "virtual"
    assert say.json("run", PIPELINE, target, "--to", "dp=2", "--mode", "virtual")["mode"] == "virtual"
    assert not list(target.glob("*.pt"))
    assert "is a virtual commit for tp=1,pp=1,dp=2" in say.json("inspect", target)["notes"][0]
    say.json("verify", target, PIPELINE)
    say.json("run", target, tmp_path / "real", "--to", "dp=3")
    say.json("verify", tmp_path / "real", PIPELINE)
    say("run", PIPELINE, tmp_path / "no", "--to", "dp=2", "--mode", "virtual", "--resume", code=ExitCode.USAGE)


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


def test_a_damaged_result_is_not_taken_for_done_when_it_is_read_again(tmp_path: Path, say: Answer) -> None:
    target = committed(tmp_path / "target")
    path = next(target.glob("*optim_states.pt"))
    content = bytearray(path.read_bytes())
    content[-200] ^= 1
    path.write_bytes(content)
    say("run", ZERO2, target, "--to", "dp=2", "--reread", code=ExitCode.TARGET_FAILED)


def test_a_stage_that_nobody_asked_for_stays(tmp_path: Path, say: Answer) -> None:
    assert say.json("plan", ZERO3, "--to", "dp=2", "--no-measure")["to"].endswith("zero=3")
    assert say.json("plan", ZERO3, "--to", "dp=2,zero=1", "--no-measure")["to"].endswith("zero=1")


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


def test_closed_streams_are_no_reason_to_fail(tmp_path: Path) -> None:
    command = f"{sys.executable} -m reshard.cli run {ZERO2} {tmp_path}/out --to dp=2 >&- 2>&-"
    assert subprocess.run(["sh", "-c", command], check=False).returncode == 0
    assert read_commit(tmp_path / "out").step == 2


def test_names_that_are_no_text_are_names(tmp_path: Path, say: Answer) -> None:
    source = Path(os.fsdecode(os.fsencode(tmp_path) + b"/b\xff"))
    shutil.copytree(ZERO2, source)
    say("run", source, tmp_path / "out", "--to", "dp=2", "--quiet")
