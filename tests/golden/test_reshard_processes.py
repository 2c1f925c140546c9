"""Large conversions are done by forked processes: the same result, and no failure of one that is not told."""

import filecmp
import functools
import itertools
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from reshard.cli.main import main
from reshard.contract import ExitCode
from reshard.execution.verify import read_digests, total_digest
from reshard.formats import read_checkpoint
from tests.golden.command import BF16, HERE, PIPELINE, ZERO2, ZERO3
from tests.randomness import some

CONVERSIONS = {
    "zero2": (ZERO2, "dp=2,zero=2"),
    "zero3": (ZERO3, "dp=2,zero=3"),
    "pipeline": (PIPELINE, "tp=1,pp=2,dp=3"),
    "merged": (PIPELINE, "tp=1"),
    "cut": (PIPELINE, "tp=2,dp=2"),
    "bf16": (BF16, "dp=3"),
    "dcp": (HERE / "dcp-2.13/fsdp2-flat/step-00000002", "dp=3"),
}

COMMAND = """
import os, signal, sys, time
from pathlib import Path
from reshard.execution import executor, tile, verify
from reshard.planning import plan
from reshard.storage import files
from reshard.cli.main import main

plan.SMALLEST_UNIT_BYTES = 256
executor.FORK_BYTES = verify.TASK_BYTES = tile.SMALLEST_BOX_BYTES = 0
parent = os.getpid()
def in_child(before):
    def wrap(real):
        def call(*values, **named):
            if os.getpid() != parent:
                before(*values)
            return real(*values, **named)
        return call
    return wrap
{prelude}
assert executor.can_fork()
sys.exit(main(sys.argv[1:]))
"""


def started(*words: object, prelude: str = "") -> subprocess.Popen[str]:
    """The command in a process that forks for the smallest checkpoint too; `prelude` plants a fault."""
    environment = {**os.environ, "OPENBLAS_NUM_THREADS": "1"}
    return subprocess.Popen(
        [sys.executable, "-c", COMMAND.format(prelude=prelude), *(str(word) for word in words)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
        start_new_session=True,
    )


def run(*words: object, code: ExitCode = ExitCode.OK, prelude: str = "") -> str:
    """Run `reshard` in a process, check its exit code, and return all that it printed."""
    process = started(*words, prelude=prelude)
    out, error = process.communicate(timeout=120)
    assert process.returncode == code, error
    return out + error


def same_files(first: Path, second: Path) -> bool:
    names = sorted(str(path.relative_to(first)) for path in first.rglob("*") if path.is_file())
    others = sorted(str(path.relative_to(second)) for path in second.rglob("*") if path.is_file())
    files = [name for name in names if name != "COMMIT.json"]
    return names == others and filecmp.cmpfiles(first, second, files, shallow=False)[0] == files


@pytest.fixture
def target(tmp_path: Path) -> Iterator[Path]:
    yield tmp_path / "out" / "step-00000002"
    assert not children(tmp_path), "a process was left behind"


def children(folder: Path) -> list[int]:
    """Processes of conversions into a folder."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = path.read_bytes()
        except OSError:
            continue
        if str(folder).encode() in words and b"FORK_BYTES" in words:
            found.append(int(path.parent.name))
    return found


@pytest.mark.parametrize(("name", "num_processes"), some(itertools.product(CONVERSIONS, [1, 3]), every=3))
def test_processes_make_the_same_files_as_threads(name: str, num_processes: int, target: Path, tmp_path: Path) -> None:
    source, to = CONVERSIONS[name]
    assert main(["run", str(source), str(tmp_path / "threads"), "--to", to, "--quiet"]) == ExitCode.OK
    run("run", source, target, "--to", to, "--threads", num_processes)
    assert same_files(target, tmp_path / "threads")
    digests = [json.loads((path / "COMMIT.json").read_text())["digests"] for path in (target, tmp_path / "threads")]
    assert digests[0] == digests[1]


KILL = """
count = int({call})
def kill(*_):
    global count
    count -= 1
    if count < 0:
        os.kill(os.getpid(), signal.SIGKILL)
os.pwrite = in_child(kill)(os.pwrite)
"""


@pytest.mark.parametrize("call", some([0, 1, 7, 20], every=2))
def test_a_process_that_is_killed_is_named_and_what_others_did_is_kept(call: int, target: Path, tmp_path: Path) -> None:
    words = ("run", ZERO2, target, "--to", "dp=2,zero=2", "--threads", 2, "--resume")
    said = run(*words, code=ExitCode.INTERNAL, prelude=KILL.format(call=call))
    assert "a process of the conversion was ended by signal 9 (SIGKILL)" in said
    assert "kept: " in said
    assert not target.exists()
    run(*words)
    run("run", ZERO2, tmp_path / "undisturbed", "--to", "dp=2,zero=2")
    assert same_files(target, tmp_path / "undisturbed")
    assert [path.name for path in target.parent.iterdir()] == [target.name]


@pytest.mark.parametrize(
    ("when", "code", "told"),
    [
        ("before", ExitCode.SOURCE_INVALID, "ends at byte"),
        (
            "after",
            ExitCode.SOURCE_UNAVAILABLE,
            "a file of the source became shorter, or could not be read, while it was converted",
        ),
    ],
)
def test_a_source_that_is_cut_while_it_is_read_has_a_name(
    when: str, code: ExitCode, told: str, target: Path, tmp_path: Path
) -> None:
    """Cut before it is mapped, reading tells; after, whoever looks at it is ended by SIGBUS."""
    source = tmp_path / "source"
    shutil.copytree(ZERO2, source)
    before = "cut(self); found = real(self, *rest)"
    after = "found = real(self, *rest); cut(self)"
    prelude = f"""
real = files.LocalFile.view
def cut(file):
    os.truncate(os.readlink(f"/proc/self/fd/{{file._descriptor}}"), 0)
def view(self, *rest):
    {before if when == "before" else after}
    return found
files.LocalFile.view = view
"""
    words = ("run", source, target, "--to", "dp=2,zero=2", "--threads", 1)
    said = run(*words, code=code, prelude=prelude)
    assert told in said
    assert not list(target.parent.iterdir())


def test_a_full_disk_is_told_as_without_processes(target: Path) -> None:
    prelude = """
def full(*_):
    raise OSError(28, "No space left on device")
os.pwrite = in_child(full)(os.pwrite)
"""
    said = run("run", ZERO3, target, "--to", "dp=2,zero=3", code=ExitCode.STORAGE_FULL, prelude=prelude)
    assert "no space left while writing" in said
    assert not list(target.parent.iterdir())


def test_a_bug_in_a_process_is_told_with_its_place(target: Path) -> None:
    prelude = """
def fail(*_):
    raise ZeroDivisionError("planted")
os.pwrite = in_child(fail)(os.pwrite)
"""
    said = run("run", ZERO3, target, "--to", "dp=2,zero=3", code=ExitCode.INTERNAL, prelude=prelude)
    assert "ZeroDivisionError: planted" in said
    assert "target_writer.py" in said
    assert not list(target.parent.iterdir())


@pytest.mark.parametrize("name", some(CONVERSIONS, every=3))
def test_processes_verify_what_one_does(name: str, tmp_path: Path) -> None:
    source, _ = CONVERSIONS[name]
    said = json.loads(run("verify", source, "--json", "--quiet"))
    assert main(["verify", str(source), str(source)]) == ExitCode.OK
    assert said["digest"] == total_digest(read_digests(read_checkpoint(source, None)))


def test_damage_is_found_by_processes_that_verify(tmp_path: Path) -> None:
    source = tmp_path / "source"
    shutil.copytree(ZERO2, source)
    path = source / "zero_pp_rank_0_mp_rank_00_optim_states.pt"
    content = bytearray(path.read_bytes())
    content[len(content) // 3] ^= 1
    path.write_bytes(content)
    run("verify", source, code=ExitCode.SOURCE_INVALID)


SLOW = """
def wait(*_):
    Path({mark!r}).touch()
    time.sleep(600)
os.pwrite = in_child(wait)(os.pwrite)
"""


def waiting(target: Path, mark: Path, *options: str) -> subprocess.Popen[str]:
    """A conversion whose processes hang in their first write."""
    words = ("run", ZERO2, target, "--to", "dp=2,zero=2", "--threads", 2, *options)
    process = started(*words, prelude=SLOW.format(mark=str(mark)))
    until(mark.exists)
    return process


def has_taken_all_signals(process: int) -> bool:
    """Return True if no signal is pending that a process does not block, or if the process is gone."""
    try:
        status = Path(f"/proc/{process}/status").read_text(encoding="ascii")
    except FileNotFoundError:
        return True
    masks = {
        name: int(mask, 16) for name, mask in re.findall(r"^(SigPnd|ShdPnd|SigBlk):\s*(\w+)$", status, re.MULTILINE)
    }
    return not (masks["SigPnd"] | masks["ShdPnd"]) & ~masks["SigBlk"]


def until(found: Callable[[], object], seconds: float = 30) -> None:
    end = time.monotonic() + seconds
    while not found():
        assert time.monotonic() < end
        time.sleep(0.01)


@pytest.mark.parametrize(
    ("number", "to_all"),
    some(itertools.product([signal.SIGINT, signal.SIGTERM, signal.SIGHUP], [False, True]), every=3),
)
def test_an_interrupted_conversion_leaves_no_process_and_no_file(
    number: signal.Signals, to_all: bool, target: Path, tmp_path: Path
) -> None:
    process = waiting(target, tmp_path / "mark")
    (os.killpg if to_all else os.kill)(process.pid, number)
    _, error = process.communicate(timeout=60)
    assert process.returncode == ExitCode.INTERRUPTED, error
    assert not list(target.parent.iterdir())


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_that_processes_hear_before_the_command_is_an_interrupt(
    number: signal.Signals, target: Path, tmp_path: Path
) -> None:
    """As where a batch system ends every process of a job, one after the other."""
    process = waiting(target, tmp_path / "mark")
    for child in set(children(tmp_path)) - {process.pid}:
        os.kill(child, number)
    for child in set(children(tmp_path)) - {process.pid}:
        until(functools.partial(has_taken_all_signals, child))
    assert len(children(tmp_path)) == 4  # the command, the witness and two workers
    process.send_signal(number)
    _, error = process.communicate(timeout=60)
    assert process.returncode == ExitCode.INTERRUPTED, error
    assert not list(target.parent.iterdir())


def test_processes_that_cannot_be_had_are_done_without(target: Path, tmp_path: Path) -> None:
    assert main(["run", str(ZERO2), str(tmp_path / "threads"), "--to", "dp=2,zero=2", "--quiet"]) == ExitCode.OK
    prelude = "import resource; resource.setrlimit(resource.RLIMIT_NOFILE, (40, 40))"
    run("run", ZERO2, target, "--to", "dp=2,zero=2", "--threads", 32, prelude=prelude)
    assert same_files(target, tmp_path / "threads")


def test_the_last_process_that_can_be_had_leaves_its_room_to_a_thread_of_the_command(
    target: Path, tmp_path: Path
) -> None:
    prelude = f"""
real, forked = os.fork, []
def fork():
    if len(forked) == 3:  # the witness and two workers
        raise BlockingIOError(11, "Resource temporarily unavailable")
    forked.append(real())
    return forked[-1]
os.fork = fork
def note(*_):
    Path({str(tmp_path)!r}, f"pid-{{os.getpid()}}").touch()
os.pwrite = in_child(note)(os.pwrite)
"""
    run("run", ZERO2, target, "--to", "dp=2,zero=2", "--threads", 3, prelude=prelude)
    assert len(list(tmp_path.glob("pid-*"))) == 1


def test_where_no_process_can_be_started_what_to_allow_is_told(target: Path) -> None:
    prelude = """
def fork():
    raise BlockingIOError(11, "Resource temporarily unavailable")
os.fork = fork
"""
    said = run("run", ZERO2, target, "--to", "dp=2,zero=2", code=ExitCode.INTERNAL, prelude=prelude)
    assert "no process can be started: [Errno 11] Resource temporarily unavailable" in said
    assert "ulimit -u" in said
    assert not list(target.parent.iterdir())


def test_a_process_that_is_killed_in_the_middle_of_its_answer_is_named(target: Path) -> None:
    prelude = """
from multiprocessing.connection import Connection
def half(connection, content):
    os.write(connection.fileno(), content[:len(content) // 2])
    os.kill(os.getpid(), signal.SIGKILL)
Connection._send = in_child(half)(Connection._send)
"""
    said = run("run", ZERO2, target, "--to", "dp=2,zero=2", code=ExitCode.INTERNAL, prelude=prelude)
    assert "a process of the conversion was ended by signal 9 (SIGKILL)" in said
    assert not list(target.parent.iterdir())


def test_workers_with_processes_do_every_unit_once(target: Path, tmp_path: Path) -> None:
    """A worker that waits for others leaves the records of its own processes meanwhile: the others wait for those."""
    prelude = f"""
from reshard.execution.executor import Mover
from reshard.execution.journal import Journal
def slow(mover, unit, *_):
    time.sleep(0.1 * (1 + unit % 2))
Mover._do_unit = in_child(slow)(Mover._do_unit)
real = Journal.record
def record(journal, unit_record):
    with open({str(tmp_path / "done")!r}, "a") as done:
        done.write(f"{{unit_record.unit}}\\n")
    real(journal, unit_record)
Journal.record = record
"""
    words = ("run", PIPELINE, target, "--to", "tp=1,pp=2,dp=3", "--threads", 2, "--quiet", "--worker")
    workers = [started(*words, f"{at}/2", prelude=prelude) for at in range(2)]
    for worker in workers:
        _, error = worker.communicate(timeout=60)
        assert worker.returncode == ExitCode.OK, error
    done = [int(line) for line in (tmp_path / "done").read_text().split()]
    assert sorted(done) == list(range(len(done)))


def test_the_processes_of_a_killed_command_end_with_it(target: Path, tmp_path: Path) -> None:
    process = waiting(target, tmp_path / "mark", "--resume")
    assert len(children(tmp_path)) == 4  # the command, the witness and two workers
    process.kill()
    process.communicate(timeout=60)
    until(lambda: not children(tmp_path))
    run("run", ZERO2, target, "--to", "dp=2,zero=2", "--threads", 2, "--resume")
    assert target.exists()
