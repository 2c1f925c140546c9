"""The common interface of all verbs of `reshard`: errors, JSON, paths, stores, streams, names."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from reshard.commits.commit import read_commit
from reshard.contract import ExitCode
from tests.golden.command import PIPELINE, ROOT, ZERO2, Answer
from tests.golden.files import STEP


def test_paths_that_cannot_be_meant_are_told_apart(tmp_path: Path, say: Answer) -> None:
    file, empty, other = tmp_path / "file", tmp_path / "empty", tmp_path / "other"
    file.write_text("x", encoding="utf-8")
    empty.mkdir()
    other.mkdir()
    (other / "thesis.tex").write_text("mine", encoding="utf-8")
    bad = ExitCode.UNSUPPORTED
    for words in (["inspect", "{}"], ["verify", "{}"], ["plan", "{}", "--to", "dp=2"], ["explain", "{}", "x"]):
        for path, message in (
            (tmp_path / "gone", "there is no such folder"),
            (file, "is a file: expected the folder of one checkpoint"),
            (empty, "is empty"),
            (other, "holds no checkpoint that this version knows"),
            (ZERO2.parent, f"hint: name one of them, for instance {ZERO2}"),
        ):
            assert message in say(*(path if word == "{}" else word for word in words), code=bad)


@pytest.mark.parametrize(
    ("words", "code"),
    [
        (["inspect", "/nowhere"], 11),
        (["plan", str(PIPELINE), "--to", "tp=3"], 11),
        (["plan", str(PIPELINE), "--to", "tp=x"], 2),
        (["plan"], 2),
        (["frobnicate"], 2),
        (["verify", "/nowhere"], 11),
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
    assert "name one of them" in say("inspect", "memory://ckpt", code=ExitCode.UNSUPPORTED)
    assert "there is no such folder" in say("inspect", "memory://nowhere", code=ExitCode.UNSUPPORTED)
    assert "store://" in say("inspect", "store://nowhere", code=ExitCode.USAGE)


def test_urls_that_cannot_be_meant_are_told_apart(tmp_path: Path, say: Answer) -> None:
    url = f"file://{ZERO2.as_posix().replace('golden', '%67olden')}"
    assert say.json("run", url, f"file://{tmp_path}/out", "--to", "dp=2")["source"] == str(ZERO2)
    for words, message, hint in (
        (["inspect", "s3://"], "s3:// names no bucket", ""),
        (["inspect", "file://ckpt/global_step2"], "expected an absolute path after file://", "write file:///folder"),
        (["inspect", "gs://bucket/ckpt"], "gs:// needs a library that is not installed", "pip install gcsfs"),
        (["run", ZERO2, "nosuch://bucket/out", "--to", "dp=2"], "object stores are read, not written", "name a folder"),
    ):
        error = say.json(*words, code=ExitCode.USAGE)["error"]
        assert message in error["message"] and hint in error["hint"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["run", "a", "b", "--dtpye", "x"], "reshard run has no option --dtpye; did you mean --dtype?"),
        (["plan", "a", "--t=tp=2"], "reshard plan has no option --t; did you mean --threads or --to?"),
        (["inspect", "a", "--frob"], "reshard inspect has no option --frob\n"),
        (["inspect", "a", "b"], "one argument too many: 'b'"),
    ],
)
def test_what_a_verb_does_not_know_is_named_with_what_may_be_meant(words: list[str], message: str, say: Answer) -> None:
    found = say(*words, code=ExitCode.USAGE)
    assert message in found
    assert f"hint: reshard {words[0]} --help" in found


def run_command(*words: str, **options: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "reshard.cli.main", *words]
    return subprocess.run(command, capture_output=True, text=True, check=False, **options)


def test_version_and_help_go_to_stdout() -> None:
    assert re.fullmatch(r"reshard \d+\.\d+\.\d+\S*\n", run_command("--version").stdout)
    done = run_command("run", "--help")
    assert done.returncode == 0 and "examples:" in done.stdout


def test_a_reader_that_has_seen_enough_is_no_failure() -> None:
    read, write = os.pipe()
    process = subprocess.Popen(
        [sys.executable, "-m", "reshard.cli.main", "inspect", str(PIPELINE), "--json"],
        stdout=write,
        stderr=subprocess.PIPE,
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


def test_closed_streams_are_no_reason_to_fail(tmp_path: Path) -> None:
    command = f"{sys.executable} -m reshard.cli.main run {ZERO2} {tmp_path}/out --to dp=2 >&- 2>&-"
    assert subprocess.run(["sh", "-c", command], check=False).returncode == 0
    assert read_commit(tmp_path / "out").step == 2


def test_names_that_are_no_text_are_names(tmp_path: Path, say: Answer) -> None:
    source = Path(os.fsdecode(os.fsencode(tmp_path) + b"/b\xff"))
    shutil.copytree(ZERO2, source)
    say("run", source, tmp_path / "out", "--to", "dp=2", "--quiet")
