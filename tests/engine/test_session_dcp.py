"""DCP commits through the session: real FSDP2 runs save on some ranks and go on, by torch alone, on others."""

import json
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from elastic_operator.api.spec import parse_spec
from elastic_operator.api.status import Current, Resume
from elastic_operator.manifests.attempt import JobRef, reshard_job
from reshard.commits.commit import check_files, read_commit
from reshard.topology import Topology
from tests.engine.rank_client import run_script

pytestmark = pytest.mark.engine

RANK = Path(__file__).with_name("session_dcp_rank.py")
SAVED_AT, LAST = 3, 6
LIMIT_SECONDS = 240


def train(root, topology, *, attempt=1, resume="", steps=LAST):
    """Run an attempt to its end; return the losses of its steps, the folder of its commit, and its first step."""
    world_size = Topology.parse(topology).world_size
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    root.mkdir(exist_ok=True)
    results = root / f"results-{attempt}.json"
    common = {
        "ETJ_TOPOLOGY": topology,
        "ETJ_ATTEMPT": str(attempt),
        "ETJ_CHECKPOINT_ROOT": str(root),
        "ETJ_MAILBOX": str(root / f"mailbox-{attempt}.json"),
        "ETJ_RESUME": str(resume),
        "LOCAL_WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
        "WORLD_SIZE": str(world_size),
    }
    own = [common | {"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(world_size)]
    logs = [root / f"log-{attempt}-{rank}" for rank in range(world_size)]
    run_script(RANK, [json.dumps({"steps": steps, "results": str(results)})], own, logs, LIMIT_SECONDS)
    return json.loads(results.read_text())


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A run of 2 ranks that has committed step 3."""
    return Path(train(tmp_path_factory.mktemp("two"), "dp=2,zero=3", steps=SAVED_AT)["folder"])


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """Losses of a run of 2 ranks without an interruption."""
    return train(tmp_path_factory.mktemp("whole"), "dp=2,zero=3")["losses"]


def test_the_commit_holds_every_file_with_its_checksum(saved):
    commit = read_commit(saved)
    assert (commit.format, commit.step, commit.topology) == ("dcp", SAVED_AT, Topology(dp=2, zero=3))
    assert [file.path for file in commit.files] == [".metadata", "__0_0.distcp", "__1_0.distcp"]
    assert {file.path for file in commit.files} == {item.name for item in saved.iterdir()} - {"COMMIT.json"}
    check_files(saved, commit, crc=True)


@pytest.mark.parametrize("topology", ["dp=1,zero=3", "dp=3,zero=3", "tp=2,dp=1,zero=3"])
def test_training_goes_on_in_another_topology_with_the_losses_of_an_undisturbed_run(
    tmp_path, saved, undisturbed, topology
):
    after = train(tmp_path, topology, attempt=2, resume=saved)
    assert after["first"] == SAVED_AT
    assert after["losses"] == pytest.approx(undisturbed[SAVED_AT:], rel=1e-4)
    assert read_commit(Path(after["folder"])).topology == Topology.parse(topology)


def test_the_reshard_job_of_the_operator_makes_a_commit_that_is_loaded_as_it_is(tmp_path, saved, undisturbed):
    topology = Topology(dp=3, zero=3)
    target = tmp_path / "a2" / saved.name
    spec = parse_spec(
        {
            "accelerator": {"resource": "amd.com/gpu", "perNode": [1]},
            "nodes": {"min": 1, "max": 3},
            "batch": {"globalSamples": 12},
            "checkpoint": {"claimName": "ckpt", "format": "DCP"},
            "template": {"spec": {"containers": [{"name": "train", "image": "image"}]}},
        }
    )
    current = Current(
        topology=topology,
        num_nodes=3,
        gpus_per_node=1,
        resume=Resume(uri=str(target), source=str(saved), step=SAVED_AT, ready=False),
    )
    manifest = reshard_job(JobRef(name="gpt", namespace="ns", uid="u"), spec, 2, current)
    words = manifest["spec"]["template"]["spec"]["containers"][0]["args"]
    words[words.index("--report") + 1] = str(tmp_path / "report")
    subprocess.run([sys.executable, "-m", "reshard.cli", *words], check=True, timeout=LIMIT_SECONDS)
    commit = read_commit(target)
    assert (commit.format, commit.topology, commit.step) == ("dcp", topology, SAVED_AT)
    assert [file.path for file in commit.files if file.path.endswith(".distcp")] == [
        f"__{rank}_0.distcp" for rank in range(3)
    ]
    after = train(tmp_path, str(topology), attempt=2, resume=target)
    assert after["losses"] == pytest.approx(undisturbed[SAVED_AT:], rel=1e-4)
