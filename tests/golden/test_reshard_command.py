"""The `reshard` command on real checkpoints: exit codes, reports, and what is left when a run ends in the middle."""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from reshard import api
from reshard.cli.main import main
from reshard.commits import staging
from reshard.commits.commit import Commit, CommittedFile, read_commit, write_commit
from reshard.contract import ExitCode, ReshardReport
from reshard.storage.durable import file_crc32
from reshard.topology import Topology

SOURCE = Path(__file__).parent / "deepspeed-0.19.8/zero2-dp3/step-00000002"
TO = "dp=2,zero=2"

HANGING = """
import os, sys, threading
from reshard.cli import main as cli
real, hung = os.pwrite, threading.Event()
def pwrite(*arguments):
    if os.environ["HANG"] == "1" and not hung.is_set():
        hung.set()
        print("hanging", flush=True)
        os.kill(os.getpid(), 19)
    return real(*arguments)
os.pwrite = pwrite
sys.exit(cli.main(sys.argv[1:]))
"""
"""The command, stopped (SIGSTOP) when its first byte is about to be written."""


def reports(path: Path) -> ReshardReport:
    return ReshardReport.from_json(path.read_text(encoding="utf-8"))


def hidden(folder: Path) -> list[str]:
    return [path.name for path in folder.iterdir() if path.name.startswith(".")]


@contextlib.contextmanager
def stopped_run(*arguments: str) -> Iterator[subprocess.Popen[str]]:
    """A run that stands still in the middle, with its hidden folder there."""
    command = [sys.executable, "-c", HANGING, "run", *arguments]
    process = subprocess.Popen(
        command, env={**os.environ, "HANG": "1"}, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "hanging\n"
        while Path(f"/proc/{process.pid}/stat").read_text(encoding="ascii").rsplit(")", 1)[1].split()[0] != "T":
            time.sleep(0.01)
        yield process
    finally:
        process.kill()
        process.communicate()


def commit_of(folder: Path, **changes: object) -> Commit:
    """Give a copy of the golden checkpoint its commit marker."""
    files = [
        CommittedFile(path=path.name, num_bytes=path.stat().st_size, crc32=file_crc32(path))
        for path in sorted(folder.iterdir())
    ]
    values = {"step": 2, "samples": 24, "attempt": 1, "writer": "trainer", "format": "deepspeed", "files": files}
    commit = Commit(**{**values, "topology": Topology(dp=3, zero=2), **changes})
    write_commit(folder, commit)
    return commit


def test_a_conversion_reports_and_commits_what_it_did(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target, report = tmp_path / "a2/step-00000002", tmp_path / "report"
    arguments = ["run", str(SOURCE), str(target), "--to", TO, "--attempt", "2", "--report", str(report), "--json"]
    assert main(arguments) == ExitCode.OK
    found, commit = reports(report), read_commit(target)
    assert json.loads(capsys.readouterr().out) == json.loads(found.to_json())
    assert found.ok and found.verified and found.digest
    assert found.num_files == len(commit.files) == 3
    assert 0 < found.bytes_written <= commit.num_bytes
    assert (commit.attempt, commit.writer, commit.step, commit.topology) == (2, "reshard", 2, Topology(dp=2, zero=2))
    assert [file.crc32 for file in commit.files] == [file_crc32(target / file.path) for file in commit.files]
    assert hidden(target.parent) == []


def test_a_conversion_that_is_done_is_done_again_at_once(tmp_path: Path) -> None:
    target, report = tmp_path / "out", tmp_path / "report"
    arguments = ["run", str(SOURCE), str(target), "--to", TO, "--report", str(report)]
    assert main(arguments) == ExitCode.OK
    first, before = reports(report), sorted((path, path.stat().st_mtime_ns) for path in target.iterdir())
    assert main(arguments) == ExitCode.OK
    again = reports(report)
    assert again.ok and again.bytes_written == 0
    assert (again.digest, again.step, again.num_files) == (first.digest, first.step, first.num_files)
    assert sorted((path, path.stat().st_mtime_ns) for path in target.iterdir()) == before


def test_a_folder_that_is_something_else_is_never_overwritten(tmp_path: Path) -> None:
    target, report = tmp_path / "out", tmp_path / "report"
    target.mkdir()
    (target / "thesis.tex").write_text("mine", encoding="utf-8")
    assert main(["run", str(SOURCE), str(target), "--to", TO, "--report", str(report)]) == ExitCode.TARGET_FAILED
    assert not reports(report).ok
    assert [path.name for path in target.iterdir()] == ["thesis.tex"]


@pytest.mark.parametrize(
    ("to", "options", "code"),
    [
        ("dp=0", [], ExitCode.USAGE),
        ("dp=2,zero=2", ["--memory", "much"], ExitCode.USAGE),
        ("dp=2,zero=2", ["--require-commit"], ExitCode.SOURCE_UNAVAILABLE),
        ("tp=2,dp=1,zero=2", [], ExitCode.UNSUPPORTED),
    ],
)
def test_refusals_leave_a_report_with_their_exit_code(tmp_path: Path, to: str, options: list[str], code: int) -> None:
    report = tmp_path / "report"
    arguments = ["run", str(SOURCE), str(tmp_path / "out"), "--to", to, "--report", str(report), *options]
    assert main(arguments) == code
    assert reports(report).exit_code == code
    assert [path.name for path in tmp_path.iterdir()] == ["report"]


def test_a_full_volume_is_known_before_a_byte_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(staging, "free_bytes", lambda _folder: 10_000)
    report = tmp_path / "report"
    code = main(["run", str(SOURCE), str(tmp_path / "out"), "--to", TO, "--report", str(report)])
    assert code == ExitCode.STORAGE_FULL
    assert "KiB are needed, 9.8 KiB are free" in reports(report).message
    assert [path.name for path in tmp_path.iterdir()] == ["report"]


def test_a_volume_that_fills_up_on_the_way_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real, written = os.pwrite, [0]

    def pwrite(descriptor: int, content: bytes, position: int) -> int:
        written[0] += len(content)
        if written[0] > 2000:
            raise OSError(28, "No space left on device")
        return real(descriptor, content, position)

    monkeypatch.setattr(os, "pwrite", pwrite)
    assert main(["run", str(SOURCE), str(tmp_path / "out"), "--to", TO]) == ExitCode.STORAGE_FULL
    assert list(tmp_path.iterdir()) == []


def test_a_killed_run_leaves_no_result_and_the_next_run_succeeds(tmp_path: Path) -> None:
    target = tmp_path / "out"
    with stopped_run(str(SOURCE), str(target), "--to", TO) as process:
        process.kill()
        process.wait()
        assert not target.exists()
        assert len(hidden(tmp_path)) == 1
    assert main(["run", str(SOURCE), str(target), "--to", TO]) == ExitCode.OK
    assert main(["verify", str(SOURCE), str(target)]) == ExitCode.OK
    assert hidden(tmp_path) == []


def test_a_terminated_run_cleans_up_and_says_so(tmp_path: Path) -> None:
    target, report = tmp_path / "out", tmp_path / "report"
    with stopped_run(str(SOURCE), str(target), "--to", TO, "--report", str(report)) as process:
        process.terminate()
        process.send_signal(signal.SIGCONT)
        _, errors = process.communicate()
        assert process.returncode == ExitCode.INTERRUPTED
    assert "interrupted; nothing was published" in errors
    assert reports(report).exit_code == ExitCode.INTERRUPTED
    assert [path.name for path in tmp_path.iterdir()] == ["report"]


def test_an_interrupt_while_a_thread_starts_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    start, started = threading.Thread.start, list[threading.Thread]()

    def interrupted(thread: threading.Thread) -> None:
        started.append(thread)
        start(thread)
        raise KeyboardInterrupt  # as where a signal arrives then: the pool does not know this thread

    monkeypatch.setattr(threading.Thread, "start", interrupted)
    assert main(["run", str(SOURCE), str(tmp_path / "out"), "--to", TO]) == ExitCode.INTERRUPTED
    for thread in started:
        thread.join(timeout=20)
    assert list(tmp_path.iterdir()) == []


def test_two_runs_of_one_conversion_do_not_hurt_each_other(tmp_path: Path) -> None:
    target = tmp_path / "out"
    with stopped_run(str(SOURCE), str(target), "--to", TO) as process:
        assert main(["run", str(SOURCE), str(target), "--to", TO]) == ExitCode.OK
        assert len(hidden(tmp_path)) == 1
        process.send_signal(signal.SIGCONT)
        told, errors = process.communicate()
        assert process.returncode == ExitCode.OK, errors
        assert "converted by another run, which was faster" in told
    assert main(["verify", str(SOURCE), str(target)]) == ExitCode.OK
    assert hidden(tmp_path) == []


def test_a_source_that_is_not_what_was_committed_is_refused(tmp_path: Path) -> None:
    source = tmp_path / "a1"
    shutil.copytree(SOURCE, source)
    commit = commit_of(source)
    assert main(["verify", str(source)]) == ExitCode.OK
    victim = source / commit.files[-1].path
    victim.write_bytes(victim.read_bytes()[:-1])
    report = tmp_path / "report"
    assert main(["run", str(source), str(tmp_path / "out"), "--to", TO, "--report", str(report)]) == 10
    assert commit.files[-1].path in reports(report).message


def test_one_flipped_bit_of_any_tensor_is_found(tmp_path: Path) -> None:
    index = api.index_of(SOURCE)
    row = index.shards.row(len(index.shards) - 1, 1)
    source = tmp_path / "a1"
    shutil.copytree(SOURCE, source)
    victim = source / index.files[row.file].path
    content = bytearray(victim.read_bytes())
    content[row.byte_offset] ^= 1
    victim.write_bytes(content)
    assert main(["run", str(source), str(tmp_path / "out"), "--to", TO]) == ExitCode.SOURCE_INVALID
    assert not (tmp_path / "out").exists()
    assert main(["verify", str(source)]) == ExitCode.SOURCE_INVALID


def test_the_digest_of_a_run_is_that_of_verify(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", str(SOURCE), str(tmp_path / "out"), "--to", TO, "--json"]) == ExitCode.OK
    run = json.loads(capsys.readouterr().out)
    assert main(["verify", str(SOURCE), str(tmp_path / "out"), "--json"]) == ExitCode.OK
    verify = json.loads(capsys.readouterr().out)
    assert (verify["digest"], verify["tensors"]) == (run["digest"], run["num_tensors"])


def test_rereading_finds_what_the_disk_spoiled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real, spoiled = os.pwrite, []

    def pwrite(descriptor: int, content: memoryview, position: int) -> int:
        if not spoiled and len(content) >= 64:
            spoiled.append(position)
            content = memoryview(bytes([content[0] ^ 1]) + bytes(content[1:]))
        return real(descriptor, content, position)

    monkeypatch.setattr(os, "pwrite", pwrite)
    code = main(["run", str(SOURCE), str(tmp_path / "out"), "--to", TO, "--reread"])
    assert spoiled
    assert code == ExitCode.VERIFICATION_FAILED
    assert list(tmp_path.iterdir()) == []


def test_rereading_accepts_what_is_well(tmp_path: Path) -> None:
    assert main(["run", str(SOURCE), str(tmp_path / "out"), "--to", TO, "--reread"]) == ExitCode.OK


SLOW_START = """
import builtins, sys, time
real = builtins.__import__
def slowly(name, *rest, **more):
    if name == "reshard.cli.command_line":
        print("importing", flush=True)
        time.sleep(30)
    return real(name, *rest, **more)
builtins.__import__ = slowly
from reshard.cli import main as cli
sys.exit(cli.main(sys.argv[1:]))
"""
"""The command, with an import that takes long."""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_while_it_starts_is_quiet(tmp_path: Path, number: int) -> None:
    command = [sys.executable, "-c", SLOW_START, "run", str(SOURCE), str(tmp_path / "out"), "--to", TO]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "importing\n"
    process.send_signal(number)
    _, errors = process.communicate(timeout=20)
    assert process.returncode == ExitCode.INTERRUPTED
    assert errors == "reshard: interrupted before anything was done\n"
    assert list(tmp_path.iterdir()) == []
