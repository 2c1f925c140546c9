"""A closed or full output stream does not change the result of a conversion."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from reshard.api import index_of
from reshard.commits.commit import read_commit
from reshard.contract import ExitCode
from tests.golden.command import PIPELINE, ZERO2, Answer

RESHARD = (sys.executable, "-m", "reshard.cli.main")


def shell(command: str, **environment: str) -> subprocess.CompletedProcess[bytes]:
    """A command line of a shell, with `reshard` as `$RESHARD`."""
    known = {**os.environ, "RESHARD": " ".join(RESHARD), **environment}
    return subprocess.run(["bash", "-c", command], capture_output=True, env=known, check=False)


@pytest.mark.parametrize("log", ["2> /dev/full", "2>&1 >/dev/null | true; exit ${PIPESTATUS[0]}", "2>&-"])
def test_a_log_that_nobody_takes_does_not_end_a_conversion(tmp_path: Path, log: str) -> None:
    # To safetensors, which leaves the optimizer behind and says so.
    done = shell(f"$RESHARD run {PIPELINE} {tmp_path}/out --format safetensors {log}")
    assert done.returncode == 0, done.stderr
    assert read_commit(tmp_path / "out").format == "safetensors"


@pytest.mark.parametrize("options", ["", "--json"])
def test_data_that_cannot_be_written_is_an_error_without_a_traceback(options: str) -> None:
    done = shell(f"$RESHARD inspect {ZERO2} {options} > /dev/full")
    assert done.returncode == ExitCode.TARGET_FAILED
    assert done.stderr == b"reshard: standard output: cannot be written: No space left on device\n"


def test_a_report_that_cannot_be_printed_does_not_hide_that_the_result_is_there(tmp_path: Path) -> None:
    done = shell(f"$RESHARD run {ZERO2} {tmp_path}/out --to dp=2 > /dev/full")
    assert done.returncode == ExitCode.TARGET_FAILED
    assert done.stderr.endswith(b"No space left on device; the conversion itself is done\n")
    assert read_commit(tmp_path / "out").step == 2


@pytest.mark.parametrize(
    ("encoding", "told"),
    [("utf-8", "é\N{SNOWMAN}".encode()), ("latin-1", b"\xe9\\u2603"), ("ascii", b"\\xe9\\u2603")],
)
def test_names_are_told_in_whatever_encoding_there_is(tmp_path: Path, encoding: str, told: bytes) -> None:
    folder = tmp_path / "é\N{SNOWMAN}"
    folder.mkdir()
    (folder / "tag").symlink_to(ZERO2)
    done = shell(f'$RESHARD inspect "{folder}/tag"; $RESHARD inspect "{folder}/gone"', PYTHONIOENCODING=encoding)
    assert told + b"/tag\n" in done.stdout
    assert told + b"/gone: there is no such folder\n" in done.stderr


def test_names_that_are_no_text_are_told_as_escapes(tmp_path: Path) -> None:
    for target in (b"/\xff", b"/2\xff"):
        source = ZERO2 if target == b"/\xff" else tmp_path / os.fsdecode(b"\xff")
        done = subprocess.run(
            [*RESHARD, "run", source, os.fsencode(tmp_path) + target, "--to", "dp=2"], capture_output=True, check=True
        )
        assert done.stdout.startswith(os.fsencode(tmp_path) + target[:-1] + b"\\xff: converted")
    second = tmp_path / os.fsdecode(b"2\xff")
    assert read_commit(second).source == f"{tmp_path}/\\xff"
    assert index_of(second).step == 2


def test_names_in_a_checkpoint_do_not_command_the_terminal(tmp_path: Path, say: Answer) -> None:
    name = "a\x1b[31m\x9b\ré"
    header = json.dumps({name: {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}).encode()
    content = len(header).to_bytes(8, "little") + header + bytes(4)
    (tmp_path / "model.safetensors").write_bytes(content)
    told = say("inspect", tmp_path, "--tensors") + say("explain", tmp_path, "nothing", code=ExitCode.USAGE)
    assert told.count(r"weight/a\x1b[31m\x9b\x0dé") == 2 and not {"\x1b", "\x9b", "\r"} & set(told)
    assert say.json("inspect", tmp_path)["tensors"][0]["name"] == name
    (tmp_path / "model.safetensors").write_bytes(content[:-1])
    assert "\x1b" not in say("verify", tmp_path, code=ExitCode.SOURCE_INVALID)


@pytest.mark.parametrize(("ignored", "code"), [(False, 130), (True, 0)])
def test_a_closed_terminal_undoes_a_run_unless_nohup_says_otherwise(tmp_path: Path, ignored: bool, code: int) -> None:
    command = [*RESHARD, "run", str(PIPELINE), str(tmp_path / "out"), "--to", "dp=2", "--limit-rate", "8KiB"]
    process = subprocess.Popen(["nohup", *command] if ignored else command, stderr=subprocess.PIPE)
    while not list(tmp_path.iterdir()):
        assert process.poll() is None
        time.sleep(0.01)
    process.send_signal(signal.SIGHUP)
    _, told = process.communicate(timeout=60)
    assert process.returncode == code, told
    assert [path.name for path in tmp_path.iterdir()] == (["out"] if ignored else [])
