"""Conversions that are killed at any moment and resumed, and conversions that several workers share."""

import filecmp
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from reshard.api import Conversion, plan_conversion
from reshard.cli.main import main
from reshard.commits.commit import read_commit
from reshard.contract import ExitCode, ReshardReport
from reshard.execution import executor, journal
from reshard.execution.journal import Journal
from reshard.planning import plan
from reshard.planning.plan import Plan
from reshard.system.limits import format_bytes
from reshard.topology import Topology
from tests.randomness import SOAKING

SOURCE = Path(__file__).parent / "deepspeed-0.19.8/zero2-dp3/step-00000002"
TO = "dp=2,zero=2"
CALLS = ("pwrite", "fdatasync", "fsync", "rename", "ftruncate")
"""System calls that change the disk; a test kills a run before each of them."""

WORKER = """
import sys
from reshard.cli import main as cli
from reshard.planning import plan
plan.SMALLEST_UNIT_BYTES = 128
{prelude}
sys.exit(cli.main(sys.argv[1:]))
"""
STOP_AFTER_FIRST_CLAIM = """
import os, signal
from reshard.execution.journal import Journal
claim = Journal.claim
def claim_and_stop(journal, unit):
    claimed = claim(journal, unit)
    Journal.claim = claim
    os.kill(os.getpid(), signal.SIGSTOP)
    return claimed
Journal.claim = claim_and_stop
"""
"""Part of WORKER that stops the process when it has claimed its first unit."""


@pytest.fixture(autouse=True)
def small_units(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiny checkpoints have several units too; one is flushed after the other, so that the order of calls is known."""
    monkeypatch.setattr(plan, "SMALLEST_UNIT_BYTES", 128)
    monkeypatch.setattr(executor, "FLUSHERS", 1)


def command(target: Path, *options: str) -> list[str]:
    return ["run", str(SOURCE), str(target), "--to", TO, "--threads", "1", *options]


def same_files(first: Path, second: Path) -> bool:
    names = sorted(path.name for path in first.iterdir())
    others = sorted(path.name for path in second.iterdir())
    files = [name for name in names if name != "COMMIT.json"]
    return names == others and filecmp.cmpfiles(first, second, files, shallow=False)[0] == files


@pytest.fixture
def undisturbed(tmp_path: Path) -> Path:
    target = tmp_path / "undisturbed"
    assert main(command(target)) == ExitCode.OK
    return target


def in_child(action: Callable[[], int]) -> int:
    """Status of a forked process that runs the action."""
    process = os.fork()
    if process == 0:
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, 1)
        os.dup2(null, 2)
        os._exit(action())
    return os.waitpid(process, 0)[1]


def killed_before(call: int, arguments: list[str]) -> bool:
    """Run the command, killed (SIGKILL) before the call of that number; False if it ended before."""

    def action() -> int:
        count = [0]

        def counted(real: Callable[..., object]) -> Callable[..., object]:
            def wrapper(*values: object, **named: object) -> object:
                count[0] += 1
                if count[0] > call:
                    os.kill(os.getpid(), signal.SIGKILL)
                return real(*values, **named)

            return wrapper

        for name in CALLS:
            setattr(os, name, counted(getattr(os, name)))
        return main(arguments)

    status = in_child(action)
    assert os.WIFSIGNALED(status) or os.WEXITSTATUS(status) == ExitCode.OK
    return os.WIFSIGNALED(status)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_killed_before_any_change_of_the_disk_and_resumed_the_result_is_the_same(
    tmp_path: Path, undisturbed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    call = moments = 0
    while True:
        target = tmp_path / f"target-{call}" / "step-00000002"
        monkeypatch.setattr(executor, "FLUSHERS", 1 + call % 4)
        if not killed_before(call, command(target, "--resume")):
            break
        assert not target.exists() or read_commit(target)  # nothing half is visible
        assert main(command(target, "--resume")) == ExitCode.OK
        assert same_files(target, undisturbed)
        assert [path.name for path in target.parent.iterdir()] == [target.name]
        moments += 1
        call += 1 if SOAKING else 3 if call < 20 else 11
    assert moments > (30 if SOAKING else 15)


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_resuming_does_not_convert_again_what_a_record_says_is_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tmp_path / "target"
    assert killed_before(60, command(target, "--resume"))
    (partial,) = tmp_path.glob(".target.partial-*")
    before = Journal(partial).done()
    converted: list[int] = []
    real = journal.Journal.record
    monkeypatch.setattr(Journal, "record", lambda self, record: (converted.append(record.unit), real(self, record)))
    assert main(command(target, "--resume")) == ExitCode.OK
    assert before
    assert converted
    assert not before & set(converted)


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
@pytest.mark.parametrize("damage", ["flip", "lost"])
def test_what_was_damaged_between_two_runs_is_converted_again(tmp_path: Path, undisturbed: Path, damage: str) -> None:
    target = tmp_path / "target"
    assert killed_before(60, command(target, "--resume"))
    (partial,) = tmp_path.glob(".target.partial-*")
    assert Journal(partial).done()
    for path in partial.glob("*.pt"):
        if damage == "lost":
            path.unlink()
        else:
            path.write_bytes(bytes(byte ^ 1 for byte in path.read_bytes()))
    assert main(command(target, "--resume")) == ExitCode.OK
    assert same_files(target, undisturbed)


def test_a_run_that_does_not_resume_removes_what_was_left(tmp_path: Path, undisturbed: Path) -> None:
    stale = tmp_path / ".target.partial-0123456789abcdef"
    stale.mkdir()
    (stale / "junk").write_bytes(b"x")
    target = tmp_path / "target"
    assert main(command(target)) == ExitCode.OK
    assert not stale.exists()
    assert same_files(target, undisturbed)


def test_workers_share_a_conversion_and_publish_it_once(tmp_path: Path, undisturbed: Path) -> None:
    target = tmp_path / "shared" / "step-00000002"
    workers = [worker(target, f"{number}/3") for number in range(3)]
    assert [process.wait(timeout=60) for process in workers] == [0, 0, 0]
    assert same_files(target, undisturbed)
    assert [path.name for path in target.parent.iterdir()] == [target.name]


def test_a_result_that_is_published_between_two_looks_is_no_error(tmp_path: Path, monkeypatch) -> None:
    """`glob` asks whether there is a folder and then reads it, which fails if another worker published meanwhile."""
    journal = Journal(tmp_path)

    def gone(path: Path, _pattern: str) -> Iterator[Path]:
        raise FileNotFoundError(2, "No such file or directory", str(path))
        yield

    monkeypatch.setattr(Path, "glob", gone)
    assert journal.done() == set()
    assert journal.records() == []


def test_a_worker_that_stands_still_does_not_hold_up_the_others(tmp_path: Path, undisturbed: Path) -> None:
    target = tmp_path / "shared" / "step-00000002"
    straggler = worker(target, "0/2", prelude=STOP_AFTER_FIRST_CLAIM)
    try:
        _, status = os.waitpid(straggler.pid, os.WUNTRACED)
        assert os.WIFSTOPPED(status)
        assert len(list(target.parent.glob(f".{target.name}.partial-*/.journal/*.claim"))) == 1
        assert worker(target, "1/2").wait(timeout=60) == 0
        assert same_files(target, undisturbed)
    finally:
        straggler.send_signal(signal.SIGCONT)
    assert straggler.wait(timeout=60) == 0
    assert same_files(target, undisturbed)


def worker(target: Path, share: str, *options: str, prelude: str = "") -> subprocess.Popen[bytes]:
    code = WORKER.format(prelude=prelude)
    return subprocess.Popen([sys.executable, "-c", code, *command(target, "--worker", share, *options)])


@pytest.mark.parametrize("share", ["2/2", "1", "a/b", "-1/2"])
def test_a_share_that_makes_no_sense_is_refused(tmp_path: Path, share: str) -> None:
    assert main(command(tmp_path / "target", f"--worker={share}")) == ExitCode.USAGE


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_resumed_run_says_what_had_been_done(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = tmp_path / "target"
    whole = plan_of(tmp_path)
    assert killed_before(60, command(target, "--resume"))
    (partial,) = tmp_path.glob(".target.partial-*")
    before = Journal(partial).done()
    kept_bytes = sum(whole.units[unit].num_bytes for unit in before)
    assert main(command(target, "--resume", "--json")) == ExitCode.OK
    out, err = capsys.readouterr()
    told = f"{len(before)} of {len(whole.units)} units ({format_bytes(kept_bytes)}) had been done before and are kept"
    assert f"reshard: note: --resume: {told}\n" in err
    report = json.loads(out)
    assert told in report["message"]
    assert whole.bytes_to_read - kept_bytes <= report["bytes_read"] < whole.bytes_to_read
    written = sum(path.stat().st_size for path in target.iterdir() if path.name != "COMMIT.json")
    assert 0 < report["bytes_written"] < written


def test_a_run_with_nothing_to_resume_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(command(tmp_path / "target", "--resume")) == ExitCode.OK
    out, err = capsys.readouterr()
    assert "--resume: nothing to go on with" in err
    assert "before" not in out


def plan_of(folder: Path) -> Plan:
    wanted = Conversion(source=SOURCE, target=folder / "nowhere", topology=Topology.parse(TO))
    return plan_conversion(wanted, num_threads=1)


@pytest.mark.parametrize("options", [["--resume"], ["--worker", "0/2"], []])
def test_a_run_that_fails_says_what_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], options: list[str]
) -> None:
    target, real, count = tmp_path / "target", Journal.record, [0]
    pwrite = os.pwrite

    def interrupted(descriptor: int, content: bytes, position: int) -> int:
        count[0] += 1
        if count[0] == 20:
            raise KeyboardInterrupt
        return pwrite(descriptor, content, position)

    monkeypatch.setattr(os, "pwrite", interrupted)
    assert main(command(target, *options)) == ExitCode.INTERRUPTED
    said = capsys.readouterr().err
    assert "interrupted; nothing was published" in said
    found = list(tmp_path.glob(".target.partial-*"))
    if options:
        done = len(Journal(found[0]).done())
        assert done > 0
        assert f"kept: {done} of {len(plan_of(tmp_path).units)} units" in said
        assert str(found[0]) in said
    else:
        assert not found
        assert "nothing is kept (--resume keeps what is done)" in said
    assert real is Journal.record


def test_a_worker_that_only_helped_reports_its_own_bytes(tmp_path: Path) -> None:
    target = tmp_path / "shared" / "step-00000002"
    reports = [tmp_path / f"report-{number}" for number in range(2)]
    workers = [worker(target, f"{number}/2", "--report", str(report)) for number, report in enumerate(reports)]
    assert [process.wait(timeout=60) for process in workers] == [0, 0]
    first, second = sorted(
        (ReshardReport.from_json(path.read_text(encoding="utf-8")) for path in reports),
        key=lambda report: report.bytes_written,
    )
    files = sum(path.stat().st_size for path in target.iterdir() if path.name != "COMMIT.json")
    assert 0.9 * files < second.bytes_written <= files  # who completes it speaks for all
    done = re.search(r"converted together with other workers: (\d+) of (\d+) units by this one", first.message)
    if done is not None:  # else it came when all was done
        assert (first.bytes_written > 0) == (int(done[1]) > 0)
        assert first.bytes_written < files


def test_a_worker_for_another_topology_that_comes_too_late_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, undisturbed: Path
) -> None:
    target, real = tmp_path / "target", Journal.share

    def overtaken(self: Journal, *values: int) -> Iterator[int]:
        yield from real(self, *values)
        if not target.exists():
            code = WORKER.format(prelude="")
            assert subprocess.run([sys.executable, "-c", code, *command(target)], check=False).returncode == 0

    monkeypatch.setattr(Journal, "share", overtaken)
    other = ["run", str(SOURCE), str(target), "--to", "dp=1,zero=2", "--worker", "0/1"]
    assert main(other) == ExitCode.TARGET_FAILED
    assert same_files(target, undisturbed)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["target", "undisturbed"]
