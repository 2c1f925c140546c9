"""The DeepSpeed example in two pods under each launcher: which exit codes reach the pod, and what SIGTERM does."""

import json
import signal
import sys
import time
from pathlib import Path

import pytest

from elastic_trainer.mailbox import FileMailbox
from reshard.commits.commit import read_commit
from reshard.contract import LeaseKey, TrainerExit
from tests.engine.stack_run import OURS, Pods, newest_commit

pytestmark = pytest.mark.engine

BIN = Path(sys.executable).parent


def deepspeed(environment):
    """The deepspeed launcher of one pod, from the operator's variables, as docs/trainer.md shows."""
    hosts = Path(environment["ETJ_CHECKPOINT_ROOT"]) / f"hostfile-{environment['PET_NODE_RANK']}"
    hosts.write_text(
        "".join(
            f"pod-{node} slots={environment['PET_NPROC_PER_NODE']}\n" for node in range(int(environment["PET_NNODES"]))
        )
    )
    return [
        *(str(BIN / "deepspeed"), "--no_ssh", "--no_local_rank", "--hostfile", str(hosts)),
        *("--node_rank", environment["PET_NODE_RANK"]),
        *("--master_addr", environment["PET_MASTER_ADDR"], "--master_port", environment["PET_MASTER_PORT"]),
    ]


LAUNCHERS = {"ours": OURS, "torchrun": (str(BIN / "torchrun"),), "deepspeed": deepspeed}
KEEPS_CODES = {"ours": True, "torchrun": False, "deepspeed": True}


@pytest.fixture(params=LAUNCHERS)
def start(request, tmp_path):
    """Start the script in two pods of one rank each; `expected` turns a rank's exit code into the pod's."""

    def start_pods(*args, **extra):
        return Pods(
            *("deepspeed_loop/elastic.py", tmp_path, "dp=2,zero=2", *args),
            **{"launcher": LAUNCHERS[request.param], "nodes": 2, "folder": tmp_path, **extra},
        )

    start_pods.name = request.param
    start_pods.expected = lambda code: [int(code) if KEEPS_CODES[request.param] else 1] * 2
    return start_pods


@pytest.mark.soak_only  # the quickstart drains with our launcher, and grows
def test_a_drain_leaves_a_commit_and_a_resume_ends_with_zero(start, tmp_path):
    box = tmp_path / "mailbox.json"
    with start("--steps", "100000", ETJ_MAILBOX=str(box)) as pods:
        pods.wait_for_step(2)
        FileMailbox(box).exchange({LeaseKey.REQUEST: "drain"})
        assert pods.wait() == start.expected(TrainerExit.DRAINED), pods.text[-3000:]
        last, losses = max(pods.losses), pods.losses
    # The Lease says it under every launcher.
    told = json.loads(box.read_text())
    assert told[LeaseKey.PHASE] == "Drained"
    assert float(told[LeaseKey.LOSS]) == pytest.approx(losses[last], rel=1e-5)  # noted by the engine's backward
    folder = newest_commit(tmp_path)
    assert read_commit(folder).step == last
    with start("--steps", str(last + 1), ETJ_ATTEMPT="2", ETJ_RESUME=str(folder)) as pods:
        assert sorted(pods.finish()) == [last + 1]


@pytest.mark.soak_only  # with our launcher, the example is refused, too
def test_a_commit_that_cannot_be_used_is_refused(start, tmp_path):
    """What a launcher makes of an exit code, a drain shows as well."""
    box = tmp_path / "mailbox.json"
    with start("--steps", "4", ETJ_ATTEMPT="2", ETJ_RESUME=str(tmp_path / "none"), ETJ_MAILBOX=str(box)) as pods:
        assert pods.wait() == start.expected(TrainerExit.RESUME_INVALID), pods.text[-3000:]
        assert pods.losses == {}
    assert "never completed" in json.loads(box.read_text())[LeaseKey.RESUME_ERROR]


@pytest.mark.parametrize("name", [pytest.param("ours", marks=pytest.mark.soak_only), "torchrun"])
def test_sigterm_of_one_pod_leaves_a_commit_of_the_last_step(name, tmp_path):
    with Pods(
        *("deepspeed_loop/elastic.py", tmp_path, "dp=2,zero=2", "--steps", "100000"),
        launcher=LAUNCHERS[name],
        nodes=2,
        folder=tmp_path,
    ) as pods:
        pods.wait_for_step(2)
        pods.launchers[1].send_signal(signal.SIGTERM)
        codes = pods.wait()
        assert codes == ([75, 75] if name == "ours" else [1, 1]), pods.text[-3000:]
        last = max(pods.losses)
    assert read_commit(newest_commit(tmp_path)).step == last


@pytest.mark.soak_only
def test_the_deepspeed_launcher_does_not_pass_sigterm_on(tmp_path):
    with Pods(
        *("deepspeed_loop/elastic.py", tmp_path, "dp=1,zero=1", "--steps", "100000"),
        launcher=deepspeed,
        folder=tmp_path,
    ) as pods:
        pods.wait_for_step(1)
        (rank,) = pods.ranks().values()
        pods.launchers[0].send_signal(signal.SIGTERM)
        assert pods.launchers[0].wait(timeout=60) == -signal.SIGTERM
        steps = len(pods.losses)
        deadline = time.monotonic() + 60
        while len(pods.losses) <= steps + 1:
            assert rank.is_running()
            assert time.monotonic() < deadline
            time.sleep(0.1)
        parent = rank.parent()
        rank.kill()
        parent.kill()
