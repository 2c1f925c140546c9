"""The example pairs without a cluster: plain scripts resume, elastic ones train as before without any variable."""

import subprocess
import sys
from pathlib import Path

import pytest

from reshard.commits.commit import read_commit
from reshard.topology import Topology
from tests.engine.rank_client import common_environment
from tests.engine.stack_run import EXAMPLES, Pods, free_port

pytestmark = pytest.mark.engine


@pytest.mark.parametrize(
    "script", ["deepspeed_loop/plain.py", pytest.param("fsdp2/plain.py", marks=pytest.mark.soak_only)]
)
def test_a_plain_script_goes_on_from_its_newest_checkpoint(script, tmp_path):
    arguments = ("--steps", "4", "--save-every", "3", "--checkpoints", str(tmp_path / "checkpoints"))
    with Pods(script, tmp_path, "dp=2", *arguments, folder=tmp_path) as pods:
        quiet = pods.finish()
    with Pods(script, tmp_path, "dp=2", *arguments, folder=tmp_path) as pods:
        assert pods.finish() == pytest.approx({4: quiet[4]}, rel=2e-7)


@pytest.mark.soak_only
@pytest.mark.parametrize(
    ("script", "arguments", "topology"),
    [
        ("deepspeed_loop/elastic.py", (), Topology(dp=2, zero=2)),
        ("fsdp2/elastic.py", ("--tp", "2"), Topology(tp=2, zero=3)),
    ],
)
def test_an_elastic_script_needs_no_variable(script, arguments, topology, tmp_path):
    torchrun = [str(Path(sys.executable).with_name("torchrun")), "--nproc-per-node", "2", "--master-port", free_port()]
    own = {name: value for name, value in common_environment().items() if not name.startswith(("ETJ_", "PET_"))}
    command = [*torchrun, str(EXAMPLES / script), "--steps", "2", *arguments]
    done = subprocess.run(command, env=own, cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]
    commit = read_commit(tmp_path / "checkpoints" / "a1" / "step-00000002")
    assert (commit.topology, commit.samples) == (topology, 48)
