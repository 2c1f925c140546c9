"""A trainer has threads, so another process makes its node's files: the same files, and its failures are told."""

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from reshard.api import Conversion
from reshard.errors import CorruptSourceError, ReshardError, UsageError
from reshard.execution import executor
from reshard.topology import Topology
from reshard.virtual import process
from reshard.virtual.conversion import prepare
from reshard.virtual.load import load_files
from reshard.virtual.manifest import decode
from reshard.virtual.process import load_files_in_process
from tests.golden.files import golden

SCRIPT = """
import sys
from pathlib import Path
from reshard.execution import executor
from reshard.virtual import process
from reshard.virtual.manifest import decode

executor.FORK_BYTES, executor.can_fork = 0, lambda: False
process.COMMAND = "import os, time; from reshard.virtual import process as p; " \\
    "p.load_files = lambda *_: (print(os.getpid(), flush=True), time.sleep(600)); p.serve(__import__('sys').argv[1:])"
commit, folder = map(Path, sys.argv[1:])
process.load_files_in_process(decode(commit), [0], folder)
"""


@pytest.fixture
def commit(tmp_path, monkeypatch):
    monkeypatch.setattr(executor, "FORK_BYTES", 0)
    monkeypatch.setattr(executor, "can_fork", lambda: False)
    folder, source = tmp_path / "virtual", tmp_path / "source"
    shutil.copytree(golden("pipeline-tp2-pp2"), source)
    prepare(Conversion(source=source, target=folder, topology=Topology.parse("tp=1,pp=1,dp=3")))
    return folder


@pytest.fixture
def target(tmp_path):
    folder = tmp_path / "files"
    folder.mkdir()
    return folder


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def lives(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().split()[2] != "Z"
    except OSError:
        return False


def test_another_process_makes_the_same_files_and_says_the_same_of_them(commit, target, tmp_path, monkeypatch):
    manifest = decode(commit)
    (tmp_path / "here").mkdir()
    expected = load_files(manifest, [0, 2], tmp_path / "here")
    monkeypatch.setattr(process, "load_files", None)  # of this process
    assert load_files_in_process(manifest, [2, 0], target) == expected
    assert contents(target) == contents(tmp_path / "here")


def test_few_bytes_are_loaded_by_this_process(commit, target, monkeypatch):
    monkeypatch.undo()
    monkeypatch.setattr(process, "_start", None)
    assert load_files_in_process(decode(commit), [0], target).num_files == len(decode(commit).ranks[0])


def test_what_fails_there_is_raised_here(commit, target, tmp_path):
    manifest = decode(commit)
    with pytest.raises(UsageError, match=r"rank 7 of .*, which has 3"):
        load_files_in_process(manifest, [7], target)
    for path in manifest.plan.index.root.iterdir():
        if path.suffix == ".pt":
            path.write_bytes(path.read_bytes()[:2000])
    with pytest.raises(CorruptSourceError, match="truncated"):
        load_files_in_process(manifest, [0], target)


def test_what_lies_in_the_trainers_folder_is_not_taken_for_modules(commit, target, tmp_path, monkeypatch):
    (tmp_path / "json.py").write_text("raise SystemExit('not this one')")
    monkeypatch.chdir(tmp_path)
    assert load_files_in_process(decode(commit), [0], target).num_files > 0


def in_the_middle(does):
    """A command whose process does something else once it has begun."""
    serve = f"p.load_files = lambda *_: {does}; p.serve(sys.argv[1:])"
    return f"import os, sys; from reshard.virtual import process as p; {serve}"


@pytest.mark.parametrize(
    ("command", "how"),
    [
        ("import os; os.kill(os.getpid(), 9)", r"signal 9 \(SIGKILL\)"),
        (in_the_middle("os.kill(os.getpid(), 9)"), r"signal 9 \(SIGKILL\)"),
        (in_the_middle("os._exit(3)"), "exit code 3"),
    ],
)
def test_a_process_that_ends_without_an_answer_is_told(commit, target, monkeypatch, command, how):
    monkeypatch.setattr(process, "COMMAND", command)
    with pytest.raises(ReshardError, match=f"was ended by {how}"):
        load_files_in_process(decode(commit), [0], target)


def test_what_the_system_refuses_there_is_an_error_with_words_here(commit, target, monkeypatch):
    monkeypatch.setattr(process, "COMMAND", in_the_middle("open('/nowhere/at/all')"))
    with pytest.raises(ReshardError, match=r"the files of this node cannot be made: .*No such file"):
        load_files_in_process(decode(commit), [0], target)


@pytest.mark.parametrize("python", ["/nowhere/python", "/bin/false", None])
def test_where_no_process_can_be_had_threads_of_this_one_do_it(commit, target, monkeypatch, caplog, python):
    monkeypatch.setattr(sys, "executable", python)
    assert load_files_in_process(decode(commit), [0], target).num_files > 0
    assert "threads of this one do it" in caplog.text


def test_paths_of_modules_that_are_no_texts_are_left_out_as_python_does(commit, target, monkeypatch):
    monkeypatch.setattr(sys, "path", [Path("/somewhere"), b"/else", *sys.path])
    assert load_files_in_process(decode(commit), [0], target).num_files > 0


def test_it_ends_with_the_trainer_that_started_it(commit, target):
    trainer = subprocess.Popen([sys.executable, "-c", SCRIPT, commit, target], stdout=subprocess.PIPE, text=True)
    try:
        child = int(trainer.stdout.readline())
        os.kill(child, 0)
    finally:
        trainer.send_signal(signal.SIGKILL)
        trainer.wait()
        trainer.stdout.close()
    until = time.monotonic() + 20
    while lives(child):
        assert time.monotonic() < until, "the process outlives its trainer"
        time.sleep(0.02)
