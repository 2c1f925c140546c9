"""Start the example pairs as the operator would, in one or several pods on this machine, and read their losses."""

import contextlib
import re
import socket
import subprocess
import sys
import time
from pathlib import Path

import psutil

from elastic_trainer.retention import find_commits
from reshard.topology import Topology
from tests.engine.rank_client import common_environment

EXAMPLES = Path(__file__).parents[2] / "examples"
OURS = (sys.executable, "-m", "elastic_trainer.launch", "--preload", "torch._dynamo")
_LOSS = re.compile(r"step (\d+) loss (\S+)")
_LIMIT_SECONDS = 300


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return str(probe.getsockname()[1])


def pod_environment(root, topology, *, port, node=0, nodes=1, **extra):
    """The variables that the operator sets in a pod, but for the Lease."""
    return {
        **{name: value for name, value in common_environment().items() if not name.startswith(("ETJ_", "PET_"))},
        "ETJ_TOPOLOGY": Topology.parse(topology).to_json(),
        "ETJ_CHECKPOINT_ROOT": str(root),
        "ETJ_HEARTBEAT_SECONDS": "0.2",
        "PET_NNODES": str(nodes),
        "PET_NODE_RANK": str(node),
        "PET_NPROC_PER_NODE": str(Topology.parse(topology).world_size // nodes),
        "PET_MASTER_ADDR": "127.0.0.1",
        "PET_MASTER_PORT": port,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
        **extra,
    }


class Pods:
    """The processes of one attempt: a launcher per pod, each with its output in a file."""

    def __init__(self, script, root, topology, *args, launcher=OURS, nodes=1, folder, **extra):
        port = free_port()
        self.launchers, self.outputs = [], []
        for node in range(nodes):
            environment = pod_environment(root, topology, port=port, node=node, nodes=nodes, **extra)
            command = [*(launcher(environment) if callable(launcher) else launcher), str(EXAMPLES / script), *args]
            self.outputs.append(Path(folder) / f"pod-{node}-{port}.log")
            with open(self.outputs[-1], "w") as stream:
                self.launchers.append(subprocess.Popen(command, env=environment, stdout=stream, stderr=stream))

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for process in self.launchers:
            with contextlib.suppress(psutil.NoSuchProcess):
                for child in psutil.Process(process.pid).children(recursive=True):
                    child.kill()
            process.kill()
            process.wait()

    @property
    def text(self):
        return "\n".join(path.read_text() for path in self.outputs)

    @property
    def losses(self):
        return {int(step): float(loss) for step, loss in _LOSS.findall(self.text)}

    def wait(self):
        """Exit codes of the launchers."""
        for process in self.launchers:
            process.wait(timeout=_LIMIT_SECONDS)
        return [process.returncode for process in self.launchers]

    def finish(self):
        assert set(self.wait()) == {0}, self.text[-3000:]
        return self.losses

    def wait_for_step(self, step):
        deadline = time.monotonic() + _LIMIT_SECONDS
        while step not in self.losses:
            assert all(process.poll() is None for process in self.launchers), self.text[-3000:]
            assert time.monotonic() < deadline, self.text[-3000:]
            time.sleep(0.05)

    def ranks(self, node=0):
        """Processes of a pod's ranks, without workers of data loaders and helpers of launchers."""
        launcher = psutil.Process(self.launchers[node].pid)
        found, forked = {}, []
        for child in launcher.children(recursive=True):
            with contextlib.suppress(psutil.Error):
                if child.cmdline() == launcher.cmdline():
                    forked += [child] if child.ppid() == launcher.pid else []
                    continue
                rank = child.environ().get("RANK")
                is_script = any(part.endswith(".py") and "examples" in part for part in child.cmdline())
                if rank is not None and is_script:
                    found.setdefault(int(rank), child)
        # The kernel shows a forked rank with the environment of its launcher, which forks them in order.
        forked.sort(key=lambda rank: rank.pid)
        return found or {node * len(forked) + local: rank for local, rank in enumerate(forked)}


def newest_commit(root):
    return max(find_commits(root))[2]
