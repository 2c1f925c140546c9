"""Start the example trainings as the operator would, on one machine."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

from reshard.topology import Topology

EXAMPLES = Path(__file__).parents[2] / "examples" / "gpt_deepspeed"


def start(
    root,
    topology,
    *args,
    script="train.py",
    launcher=("-m", "elastic_trainer.launch", "--preload", "torch._dynamo"),
    **extra,
):
    """The example as the operator would start it, on one machine."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    env = {
        **os.environ,
        "ETJ_TOPOLOGY": topology,
        "ETJ_CHECKPOINT_ROOT": str(root),
        "ETJ_HEARTBEAT_SECONDS": "0.2",
        "PET_NNODES": "1",
        "PET_NODE_RANK": "0",
        "PET_NPROC_PER_NODE": str(Topology.parse(topology).world_size),
        "PET_MASTER_ADDR": "127.0.0.1",
        "PET_MASTER_PORT": port,
        "GLOO_SOCKET_IFNAME": "lo",
        "OMP_NUM_THREADS": "1",
        **extra,
    }
    command = [sys.executable, *launcher, str(EXAMPLES / script), *args]
    return subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def run(root, topology, *args, code=0, **extra):
    process = start(root, topology, *args, **extra)
    output, _ = process.communicate(timeout=300)
    assert process.returncode == code, output[-3000:]


def losses(root, attempt=1):
    lines = (root / f"loss-a{attempt}.jsonl").read_text().splitlines()
    return {record["step"]: record["loss"] for record in map(json.loads, lines)}
