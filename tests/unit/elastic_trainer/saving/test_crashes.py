"""kill -9 of the trainer, of its copy process, or of both, in every phase of an asynchronous save.

Afterwards the commit before is there, undamaged; the next attempt resumes from the newest commit; and the node's memory
is free again.
"""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from elastic_trainer.retention import find_commits
from reshard.commits.commit import check_files, read_commit
from reshard.contract import LeaseKey
from tests.randomness import some

pytestmark = pytest.mark.slow

TRAINING = Path(__file__).with_name("training.py")
LARGE = 128 << 20
"""Copying takes long enough to be seen; the file is sparse on the node."""

SMALL = 100_000


class Training:
    """A training process and its copy process."""

    def __init__(self, root, *, attempt=1, resume="", steps=3, num_bytes=SMALL, **env):
        self.root, self.attempt = root, attempt
        self.staging, self.hold = root / "node", root / "hold"
        self.staging.mkdir(exist_ok=True)
        self.log = root / f"log-{attempt}"
        environment = {
            **os.environ,
            "ETJ_ATTEMPT": str(attempt),
            "ETJ_RESUME": str(resume),
            "ETJ_CHECKPOINT_ROOT": str(root / "ckpt"),
            "ETJ_HEARTBEAT_SECONDS": "0.1",
            "ETJ_MAILBOX": str(root / f"mailbox-{attempt}.json"),
            "ETJ_STAGING": str(self.staging),
            "ETJ_STAGING_BYTES": str(1 << 30),
            "HOLD": str(self.hold),
            **env,
        }
        with open(self.log, "wb") as stream:
            command = [sys.executable, str(TRAINING), str(steps), str(num_bytes)]
            self.process = subprocess.Popen(command, env=environment, stdout=stream, stderr=stream)

    @property
    def copier(self):
        (child,) = psutil.Process(self.process.pid).children()
        return child

    @property
    def output(self):
        return self.log.read_text()

    def wait_for(self, what, seconds=60):
        deadline = time.monotonic() + seconds
        while not (what() if callable(what) else what in self.output):
            assert self.process.poll() is None, self.output
            assert time.monotonic() < deadline, self.output
            time.sleep(0.001)

    def kill(self):
        self.process.kill()
        self.process.wait()

    def end(self, code=0):
        assert self.process.wait(60) == code, self.output
        return self.output

    def folder(self, step):
        return self.root / "ckpt" / f"a{self.attempt}" / f"step-{step:08d}"

    def is_published(self, step):
        return (self.folder(step) / "COMMIT.json").exists()

    def stage(self, step):
        """Go on until the training stands still while it stages this step; the ones before are published."""
        self.wait_for(f"writing {step}")

    def copy(self, step):
        """Go on until a part of a file has been copied, and stop the copy process there."""
        self.wait_for(f"step {step}")
        large, copier = self.folder(step) / "large", self.copier
        self.wait_for(lambda: large.exists() and large.stat().st_size)
        copier.send_signal(signal.SIGSTOP)
        assert large.stat().st_size < LARGE

    def finish_copy(self, step):
        """Go on until the node has reported the save; rank 0 is stopped before it can publish it."""
        self.wait_for(f"staged {step}")
        self.process.send_signal(signal.SIGSTOP)
        self.wait_for(lambda: list(self.staging.glob("*/*/*.done")))
        assert not self.is_published(step)


PHASES = {"staging": Training.stage, "copying": Training.copy, "copied": Training.finish_copy}


def steps_of(root):
    """Steps of all commits, after checking every byte of them."""
    found = sorted(find_commits(root / "ckpt"))
    for _, _, folder in found:
        check_files(folder, read_commit(folder), crc=True)
        assert (folder / "part" / "small").read_text() == f"step {read_commit(folder).step}"
    return [step for _, step, _ in found]


@pytest.fixture
def start(tmp_path):
    """Start a training that reaches a phase of its save of step 2."""
    started = []

    def start(phase, **options):
        if phase == "staging":
            (tmp_path / "hold").write_text("2")
        training = Training(tmp_path, num_bytes=LARGE, **options)
        started.append(training)
        PHASES[phase](training, 2)
        assert steps_of(tmp_path) == [1]
        return training

    yield start
    for training in started:
        training.kill()


@pytest.mark.parametrize(
    ("phase", "victims"), some([(phase, victims) for victims in ("trainer", "both") for phase in PHASES], every=2)
)
def test_a_killed_training_leaves_the_commit_before_and_resumes_from_it(start, tmp_path, phase, victims):
    training = start(phase)
    copier = training.copier
    if victims == "both":
        copier.kill()
    training.kill()
    copier.wait(10)  # the kernel ends it with the trainer
    assert steps_of(tmp_path) == [1]
    node = tmp_path / "node" / f"elastic-trainer-{os.getuid()}"
    assert len(list(node.iterdir())) == 2  # what was staged, and its lock
    folder = training.folder(1)
    training.hold.unlink(missing_ok=True)
    following = Training(tmp_path, attempt=2, resume=folder, steps=3)
    assert f"load {folder}" in following.end()
    assert steps_of(tmp_path) == [1, 2, 3]
    assert list(node.iterdir()) == []


@pytest.mark.parametrize("phase", PHASES)
def test_a_killed_copy_process_is_started_again_and_loses_no_save(start, tmp_path, phase):
    training = start(phase)
    training.copier.kill()
    training.hold.unlink(missing_ok=True)
    training.process.send_signal(signal.SIGCONT)
    output = training.end()
    assert steps_of(tmp_path) == [1, 2, 3]
    # The order of step 3 may reach the process before it has died: then that step is copied again.
    assert bool(re.search("copy process of step .*2 ended with .*: it copies again", output)) == (phase != "copied")
    assert "synchronous, because" not in output


def test_a_copy_process_that_dies_again_and_again_is_a_failed_save_and_the_next_one_is_synchronous(start, tmp_path):
    training = start("staging")
    training.hold.unlink()
    while "the asynchronous save of step 2 failed" not in training.output:
        for process in psutil.Process(training.process.pid).children():
            process.kill()
        time.sleep(0.01)
    output = training.end()
    assert "its copy process ended 3 times, the last time with exit code -9" in output
    assert "step 3: synchronous, because the save before failed" in output
    assert steps_of(tmp_path) == [1, 3]
    assert not training.folder(2).exists()


def test_every_save_is_published_and_the_node_is_left_empty(tmp_path):
    training = Training(tmp_path)
    output = training.end()
    assert steps_of(tmp_path) == [1, 2, 3]
    commit = read_commit(training.folder(3))
    assert [(file.path, file.num_bytes) for file in commit.files] == [("large", SMALL), ("part/small", 6)]
    assert (commit.samples, commit.data) == (24, {"seed": 7})
    assert (training.folder(3).parent / "latest").read_text() == "step-00000003"
    assert list((tmp_path / "node").glob("*/*")) == []
    assert list(training.folder(3).parent.glob(".saves/*")) == []
    told = json.loads((tmp_path / "mailbox-1.json").read_text())[LeaseKey.SAVE]
    assert told.startswith("step 3: asynchronous; waited ")
    assert "asynchronous" in output
