"""End of a process: no thread of the session runs while the interpreter shuts down, and SIGTERM loses no step."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys

import pytest

from reshard.commits.root_owner import claim_root

pytestmark = pytest.mark.engine

RANK = """
import os
import torch.distributed as distributed
from elastic_trainer import Session

def num_threads():
    return len(os.listdir("/proc/self/task"))

session = Session.from_env()
distributed.init_process_group("gloo")
before = num_threads()
session.start()
during = num_threads()
session.finish()
print(before, during, num_threads())
"""


@pytest.fixture
def start_ranks(tmp_path):
    """Start two ranks of a script; they are killed at the end."""
    with contextlib.ExitStack() as stack:

        def start(script, **extra):
            with socket.socket() as probe:
                probe.bind(("127.0.0.1", 0))
                port = str(probe.getsockname()[1])
            common = {
                **os.environ,
                "ETJ_TOPOLOGY": "dp=2",
                "ETJ_CHECKPOINT_ROOT": str(tmp_path),
                "ETJ_MAILBOX": str(tmp_path / "mailbox.json"),
                "GLOO_SOCKET_IFNAME": "lo",
                "LOCAL_WORLD_SIZE": "2",
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": port,
                "OMP_NUM_THREADS": "1",
                "WORLD_SIZE": "2",
                **extra,
            }
            ranks = []
            for rank in range(2):
                environment = common | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
                command = [sys.executable, "-c", script]
                process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)
                stack.enter_context(process)
                stack.callback(process.kill)
                ranks.append(process)
            return ranks

        yield start


def test_the_session_leaves_no_thread_behind(start_ranks):
    ranks = start_ranks(RANK)
    outputs = [process.communicate(timeout=120)[0] for process in ranks]
    assert [process.returncode for process in ranks] == [0, 0]
    for output in outputs:
        before, during, after = map(int, output.split())
        assert during > before
        assert after == before


REFUSING = """
import os
import torch.distributed as distributed
from elastic_trainer import Session

def num_threads():
    return len(os.listdir("/proc/self/task"))

session = Session.from_env()
distributed.init_process_group("gloo")
before = num_threads()
try:
    session.start()
    session.restore(print)
finally:
    print(before, num_threads())
"""


@pytest.mark.parametrize("case", ["resume-refused", "folder-of-another-job"])
def test_a_session_that_refuses_leaves_no_thread_behind_and_keeps_its_exit_code(start_ranks, tmp_path, case):
    if case == "resume-refused":
        ranks = start_ranks(REFUSING, ETJ_RESUME=str(tmp_path / "a1" / "step-00000001"))
    else:
        claim_root(tmp_path, uid="another", job="research/other")
        ranks = start_ranks(REFUSING, ETJ_JOB_UID="this-one")
    outputs = [process.communicate(timeout=120)[0] for process in ranks]
    assert [process.returncode for process in ranks] == [76 if case == "resume-refused" else 77] * 2
    for output in outputs:
        before, after = map(int, output.split()[-2:])
        assert after == before


LEAVING = """
import sys, time
import torch
import torch.distributed as distributed
from elastic_trainer import Session

session = Session.from_env()
distributed.init_process_group("gloo")
session.start()
for step in range(1, 100000):
    time.sleep(0.05)
    distributed.all_reduce(torch.zeros(1))
    action = session.after_step(step=step, samples=step, loss=1.0)
    if step == 3:
        print("training", flush=True)
    if action.save:
        rank = session.settings.rank
        session.save(lambda folder, tag: ((folder / tag).mkdir(exist_ok=True), (folder / tag / f"{rank}").touch()))
    if action.stop:
        print(step, flush=True)
        break
try:
    session.finish()
finally:
    distributed.destroy_process_group()
"""


@pytest.mark.parametrize("asked", [0, 1], ids=["rank-0", "another-rank"])
def test_all_ranks_commit_and_leave_at_the_step_after_one_of_them_got_sigterm(start_ranks, tmp_path, asked):
    ranks = start_ranks(LEAVING)
    for process in ranks:
        assert process.stdout.readline() == "training\n"
    ranks[asked].send_signal(signal.SIGTERM)
    outputs = [process.communicate(timeout=60)[0] for process in ranks]
    assert [process.returncode for process in ranks] == [75, 75]
    (step,) = {int(output) for output in outputs}
    (commit,) = tmp_path.glob("a1/step-*/COMMIT.json")
    assert json.loads(commit.read_text())["step"] == step
