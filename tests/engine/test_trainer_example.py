"""The example under real DeepSpeed on CPU: equal losses at every topology, resume, drain, damaged commits."""

import functools
import json
import signal
import sys
import time
from pathlib import Path

import pytest

from elastic_trainer.mailbox import FileMailbox
from elastic_trainer.retention import find_commits
from reshard.commits.commit import read_commit
from reshard.contract import CommitRef, LeaseKey, Request
from reshard.topology import Topology
from tests.engine.example_run import losses, run, start
from tests.randomness import some

pytestmark = pytest.mark.engine

LAYOUTS = ("tp=1", "tp=2", "pp=2", "dp=2", "tp=2,dp=2", "pp=3")


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Four steps at a topology, with a commit after the second; each topology runs once."""

    @functools.cache
    def train(topology):
        root = tmp_path_factory.mktemp("run")
        run(root, topology, "--steps", "4", "--save-every", "2")
        return root

    return train


@pytest.mark.parametrize("topology", some(LAYOUTS[1:], every=2))
def test_the_loss_is_the_same_at_every_topology(trained, topology):
    reference = losses(trained(LAYOUTS[0]))
    assert sorted(reference) == [1, 2, 3, 4]
    assert losses(trained(topology)) == pytest.approx(reference, rel=2e-6)


def test_a_commit_says_what_a_resharder_needs(trained):
    root = trained("tp=2,dp=2")
    commit = read_commit(root / "a1" / "step-00000002")
    assert (commit.format, commit.step, commit.samples, commit.writer) == ("deepspeed", 2, 40, "trainer")
    assert commit.topology == Topology(tp=2, dp=2)
    assert commit.model["pipeline"]["num_layers"] == 9
    assert commit.model["pipeline"]["tied"] == {"embed": [0, 8]}
    assert commit.model["pipeline"]["parts"] == [0, 9]
    names = {file.path for file in commit.files}
    assert {"mp_rank_00_model_states.pt", "zero_pp_rank_1_mp_rank_01_optim_states.pt"} <= names


def test_resuming_equals_not_having_stopped(trained):
    root = trained("tp=2")
    reference = losses(root)
    run(root, "tp=2", "--steps", "4", ETJ_ATTEMPT="2", ETJ_RESUME=str(root / "a1" / "step-00000002"))
    resumed = losses(root, attempt=2)
    assert sorted(resumed) == [3, 4]
    assert resumed == pytest.approx({step: reference[step] for step in (3, 4)}, rel=1e-7)


def test_a_damaged_commit_ends_with_76_and_says_why(trained, tmp_path):
    folder = trained("dp=2") / "a1" / "step-00000002"
    path = folder / "zero_pp_rank_1_mp_rank_00_optim_states.pt"
    content = path.read_bytes()
    try:
        path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
        box = tmp_path / "mailbox.json"
        run(
            *(tmp_path, "dp=2", "--steps", "4"),
            code=76,
            ETJ_ATTEMPT="2",
            ETJ_RESUME=str(folder),
            ETJ_MAILBOX=str(box),
        )
    finally:
        path.write_bytes(content)
    assert path.name in json.loads(box.read_text())[LeaseKey.RESUME_ERROR]
    assert not (tmp_path / "loss-a2.jsonl").exists()


def wait_for(box, key, process):
    while key not in (found := json.loads(box.read_text()) if box.exists() else {}):
        assert process.poll() is None, process.stdout.read()[-3000:]
        time.sleep(0.1)
    return found[key]


@pytest.mark.soak_only  # as under our launcher in `test_launchers`
def test_a_drain_request_leaves_a_commit_and_exit_code_75(tmp_path):
    box = tmp_path / "mailbox.json"
    process = start(tmp_path, "dp=2", "--steps", "100000", ETJ_MAILBOX=str(box))
    wait_for(box, LeaseKey.FIRST_STEP_TIME, process)
    FileMailbox(box).exchange({LeaseKey.REQUEST: "drain"})
    output, _ = process.communicate(timeout=300)
    assert process.returncode == 75, output[-3000:]
    found = json.loads(box.read_text())
    commit = CommitRef.from_json(found[LeaseKey.COMMIT])
    assert found[LeaseKey.PHASE] == "Drained"
    assert read_commit(commit.uri).step == commit.step == max(losses(tmp_path))


def test_sigterm_leaves_a_commit_of_the_last_step_and_exit_code_75(tmp_path):
    box = tmp_path / "mailbox.json"
    process = start(tmp_path, "dp=2", "--steps", "100000", ETJ_MAILBOX=str(box))
    wait_for(box, LeaseKey.FIRST_STEP_TIME, process)
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=300)
    assert process.returncode == 75, output[-3000:]
    commit = CommitRef.from_json(json.loads(box.read_text())[LeaseKey.COMMIT])
    assert read_commit(commit.uri).step == commit.step == max(losses(tmp_path))


@pytest.mark.soak_only
def test_sigterm_ends_all_ranks_of_an_attempt_that_is_over_without_a_commit(tmp_path):
    box = tmp_path / "mailbox.json"
    process = start(tmp_path, "dp=2", "--steps", "100000", ETJ_MAILBOX=str(box))
    wait_for(box, LeaseKey.FIRST_STEP_TIME, process)
    FileMailbox(box).exchange({LeaseKey.REQUEST: Request.STOP})
    process.send_signal(signal.SIGTERM)
    # End of file on the pipe: every rank that inherited it is gone.
    process.communicate(timeout=60)
    assert process.returncode == 128 + signal.SIGTERM
    assert find_commits(tmp_path) == []


@pytest.mark.soak_only
def test_torchrun_starts_it_from_the_same_environment(tmp_path):
    torchrun = str(Path(sys.executable).with_name("torchrun"))
    process = start(tmp_path, "dp=2", "--steps", "1", launcher=(torchrun,), PET_RDZV_BACKEND="static")
    output, _ = process.communicate(timeout=300)
    assert process.returncode == 0, output[-3000:]
    assert sorted(losses(tmp_path)) == [1]
