"""The launcher with real, small processes."""

import os
import signal
import subprocess
import sys

import pytest

from elastic_trainer.launch import rank_environments


def test_ranks_are_numbered_over_all_nodes():
    env = {"PET_NNODES": "3", "PET_NODE_RANK": "2", "PET_MASTER_ADDR": "gpt-a1-0.gpt-a1", "PET_MASTER_PORT": "29501"}
    found = rank_environments(env, num_local=2)
    assert [(item["RANK"], item["LOCAL_RANK"], item["WORLD_SIZE"]) for item in found] == [
        ("4", "0", "6"),
        ("5", "1", "6"),
    ]
    assert {(item["MASTER_ADDR"], item["MASTER_PORT"]) for item in found} == {("gpt-a1-0.gpt-a1", "29501")}


def launch(tmp_path, code, *, num_local=2):
    script = tmp_path / "script.py"
    script.write_text("import os, sys, time\nrank = int(os.environ['RANK'])\n" + code)
    command = [sys.executable, "-m", "elastic_trainer.launch", "--nproc", str(num_local), str(script)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env={**os.environ})


@pytest.mark.parametrize(
    ("code", "exit_code"),
    [
        ("pass", 0),
        ("sys.exit(75)", 75),  # drained: all ranks end alike
        ("time.sleep(0.2 * rank); sys.exit(76)", 76),
        ("sys.exit(3) if rank == 1 else time.sleep(3600)", 3),  # the first failure ends the others
        ("os.kill(os.getpid(), 9) if rank == 0 else time.sleep(3600)", 128 + signal.SIGKILL),
    ],
)
def test_the_exit_code_is_the_first_failures(tmp_path, code, exit_code):
    process = launch(tmp_path, code)
    process.communicate(timeout=60)
    assert process.returncode == exit_code


def test_sigterm_reaches_every_rank(tmp_path):
    process = launch(tmp_path, "os.write(1, b'up\\n'); time.sleep(3600)")
    assert [process.stdout.readline(), process.stdout.readline()] == ["up\n", "up\n"]
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=60)  # returns only when nobody holds the pipe any more
    assert process.returncode == 128 + signal.SIGTERM
