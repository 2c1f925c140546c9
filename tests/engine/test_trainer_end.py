"""End of a process: no thread of the session runs while the interpreter shuts down."""

import os
import socket
import subprocess
import sys

import pytest

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


def test_the_session_leaves_no_thread_behind(tmp_path):
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
    }
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", RANK],
            env=common | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    outputs = [process.communicate(timeout=120)[0] for process in ranks]
    assert [process.returncode for process in ranks] == [0, 0]
    for output in outputs:
        before, during, after = map(int, output.split())
        assert during > before
        assert after == before
