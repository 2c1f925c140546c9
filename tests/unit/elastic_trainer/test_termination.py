"""SIGTERM at a training process: a request to leave while there is something to commit, else the end of the process."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time

import pytest

from elastic_trainer.mailbox import FileMailbox
from reshard.contract import LeaseKey, Request

TRAINING = """
import os, pathlib, sys, time
from elastic_trainer import Session

session = Session.from_env()
session.start()
position = session.restore(lambda folder: None)
print("started", flush=True)
begin = sys.argv[1]
if begin == "never":
    time.sleep(3600)
if begin == "fork" and os.fork() == 0:
    time.sleep(3600)
for step in range(position.step + 1, 100000):
    time.sleep(0.02)
    action = session.after_step(step=step, samples=step, loss=1.0)
    if step == 1:
        print("training", flush=True)
        if begin == "hang":
            time.sleep(3600)
    if action.save:
        print("saving", flush=True)
        if begin == "slow-save":
            time.sleep(3600)
        session.save(lambda folder, tag: [(folder / tag).mkdir(), (folder / tag / "data").write_text(str(step))])
    if action.stop:
        break
session.finish()
"""


@pytest.fixture
def train(tmp_path):
    """Start a training of one process; it is killed at the end."""
    with contextlib.ExitStack() as stack:

        def start(begin="", *launcher):
            script = tmp_path / "train.py"
            script.write_text(TRAINING)
            environment = {
                **os.environ, "ETJ_CHECKPOINT_ROOT": str(tmp_path / "ckpt"), "ETJ_HEARTBEAT_SECONDS": "3600",
                "ETJ_MAILBOX": str(tmp_path / "mailbox.json"),
            }  # fmt: skip
            command = [sys.executable, *launcher, str(script), begin]
            process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
            stack.enter_context(process)
            stack.callback(process.kill)
            return process

        yield start


def until(process, word):
    for line in process.stdout:
        if line.strip() == word:
            return
    raise AssertionError(f"the process ended before {word!r}")


def commits(tmp_path):
    return [json.loads(path.read_text())["step"] for path in sorted((tmp_path / "ckpt").glob("a1/step-*/COMMIT.json"))]


def notes(tmp_path):
    return json.loads((tmp_path / "mailbox.json").read_text())


@pytest.mark.parametrize("launcher", [(), ("-m", "elastic_trainer.launch")], ids=["alone", "launched"])
def test_sigterm_commits_the_last_finished_step_and_ends_as_drained(train, tmp_path, launcher):
    process = train("", *launcher)
    until(process, "training")
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=60) == 75
    (step,) = commits(tmp_path)
    assert notes(tmp_path)[LeaseKey.PHASE] == "Drained"
    assert notes(tmp_path)[LeaseKey.STEP] == str(step), "no step after the commit"


@pytest.mark.parametrize("begin", ["never", "hang", "slow-save"])
def test_a_second_sigterm_or_one_with_nothing_to_commit_ends_the_process_at_once(train, tmp_path, begin):
    process = train(begin)
    until(process, "started" if begin == "never" else "training")
    began = time.monotonic()
    process.send_signal(signal.SIGTERM)
    if begin != "never":
        if begin == "slow-save":
            until(process, "saving")
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(timeout=0.5)
        process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=60) == 128 + signal.SIGTERM
    assert time.monotonic() - began < 5
    assert commits(tmp_path) == []


def test_an_attempt_that_the_operator_has_ended_stops_at_the_first_sigterm(train, tmp_path):
    process = train("hang")
    until(process, "training")
    FileMailbox(tmp_path / "mailbox.json").exchange({LeaseKey.REQUEST: Request.STOP})
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=5) == 128 + signal.SIGTERM


def test_the_end_of_a_forked_process_is_no_request_to_leave(train, tmp_path):
    process = train("fork")
    until(process, "training")
    children = subprocess.run(["pgrep", "-P", str(process.pid)], capture_output=True, text=True, check=True)
    (child,) = map(int, children.stdout.split())
    os.kill(child, signal.SIGTERM)
    time.sleep(0.5)
    assert process.poll() is None
    assert commits(tmp_path) == []


def test_the_launcher_ends_ranks_that_would_take_one_sigterm_for_a_request(tmp_path):
    code = """
import os, signal, sys, time
if os.environ["RANK"] == "0":
    while not os.path.exists("ready"):
        time.sleep(0.01)
    sys.exit(3)
got = []
signal.signal(signal.SIGTERM, lambda *_: got.append(1) or (len(got) == 2 and (open("insisted", "w"), os._exit(0))))
open("ready", "w")
while True:
    time.sleep(0.01)
"""
    (tmp_path / "script.py").write_text(code)
    command = [sys.executable, "-m", "elastic_trainer.launch", "--nproc", "2", str(tmp_path / "script.py")]
    assert subprocess.run(command, check=False, timeout=60, cwd=tmp_path).returncode == 3
    assert (tmp_path / "insisted").exists(), "SIGKILL came before a second SIGTERM"
