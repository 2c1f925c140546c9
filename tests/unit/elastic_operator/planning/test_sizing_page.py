"""The manifest of the large example is valid, and docs/sizing.md states what follows from it."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from elastic_operator.api.spec import parse_spec
from elastic_operator.observed.capacity import Capacity, NodeCapacity
from elastic_operator.planning.memory import OPTIMIZER_BYTES, WEIGHT_BYTES
from elastic_operator.planning.planner import Candidate, plan

ROOT = Path(__file__).parents[4]
PAGE = (ROOT / "docs/sizing.md").read_text(encoding="utf-8")
CLAIM, SECRET, JOB = yaml.safe_load_all((ROOT / "examples/llama_70b/job.yaml").read_text(encoding="utf-8"))
SPEC = parse_spec(JOB["spec"])
GB, GIB, TIB = 10**9, 2**30, 2**40


def best(num_nodes: int, **changes: Any) -> Candidate:
    nodes = tuple(NodeCapacity(name=f"node-{i}", free=8) for i in range(num_nodes))
    found = plan(parse_spec({**JOB["spec"], **changes}), Capacity(nodes=nodes)).best
    assert found is not None
    return found


def commit_bytes() -> float:
    assert SPEC.model is not None
    return (WEIGHT_BYTES + OPTIMIZER_BYTES) * SPEC.model.parameters


def test_the_manifest_passes_the_schema_of_the_resource() -> None:
    crd = yaml.safe_load((ROOT / "crds/elastictrainingjobs.yaml").read_text(encoding="utf-8"))
    schema = crd["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
    jsonschema.validate(JOB, schema)


def test_the_manifest_refers_to_its_own_claim_and_secret() -> None:
    (container,) = JOB["spec"]["template"]["spec"]["containers"]
    assert SPEC.checkpoint.claim_name == CLAIM["metadata"]["name"]
    assert container["envFrom"] == [{"secretRef": {"name": SECRET["metadata"]["name"]}}]
    volumes = {item["name"] for item in JOB["spec"]["template"]["spec"]["volumes"]}
    assert {item["name"] for item in container["volumeMounts"]} == volumes


@pytest.mark.parametrize("num_nodes", range(8, 17))
def test_the_table_of_topologies_is_what_the_planner_chooses(num_nodes: int) -> None:
    found = best(num_nodes)
    topology = str(found.topology).removesuffix(",zero=1")
    assert found.memory is not None
    row = f"| {num_nodes} | {found.num_nodes} | {topology} | {found.memory.total_bytes / GIB:.1f} GiB |"
    assert row in PAGE


def test_a_global_batch_of_a_power_of_two_would_leave_nodes_idle() -> None:
    assert best(15, batch={"globalSamples": 1024, "microSamples": 1}).num_nodes == 8
    assert "With 1024, it would use 8 of 15 nodes." in PAGE


def test_the_volume_has_room_for_six_commits() -> None:
    size = commit_bytes()
    assert f"| **a commit** | **14** | **{size / GB:.0f} GB** |" in PAGE
    assert f"6 x {size / GB:.0f} GB = {6 * size / 1e12:.1f} TB" in PAGE
    assert CLAIM["spec"]["resources"]["requests"]["storage"] == "6Ti"
    assert 6 * size < 6 * TIB


@pytest.mark.parametrize("bandwidth", [10, 40, 100])
def test_the_times_follow_from_the_bandwidth(bandwidth: int) -> None:
    rows = re.findall(r"^\| (synchronous save|restore|conversion)[^|]*\|([^\n]*)\|$", PAGE, re.MULTILINE)
    column = [10, 40, 100].index(bandwidth)
    once = commit_bytes() / GB / bandwidth
    expected = {"synchronous save": f"{once:.0f} to {2 * once:.0f} s", "restore": f"{once:.0f} s"}
    expected["conversion"] = f"{2 * once:.0f} s"
    assert {name: cells.split("|")[column].strip() for name, cells in rows} == expected


def test_the_time_limits_have_room_for_two_steps_and_a_save_at_ten_gb_per_second() -> None:
    slowest = max(best(num_nodes).seconds for num_nodes in range(8, 17))
    save = 2 * commit_bytes() / (10 * GB)
    needed = 2 * round(slowest) + round(save)
    pod = JOB["spec"]["template"]["spec"]
    assert f"900 s: 2 x {slowest:.0f} s + {save:.0f} s = {needed} s" in PAGE
    assert pod["terminationGracePeriodSeconds"] == SPEC.recovery.drain_seconds == 900 > needed
    assert f"{best(16).seconds:.0f} s on 16 nodes and {slowest:.0f} s on 8 nodes" in PAGE
    slow = 2 * commit_bytes() / SPEC.reshard.timeout_seconds / GB
    assert f"7200 s: {slow:.2f} GB/s in all" in PAGE


def test_the_interval_is_that_of_young() -> None:
    mean_seconds = 3 * 3600 * 16384 / 128
    assert f"`sqrt(2 * 60 * {mean_seconds:.0f})` = {math.sqrt(2 * 60 * mean_seconds):.0f} s" in PAGE
    assert f"cost {60 / SPEC.checkpoint.interval_seconds:.1%}".replace("%", " %") in PAGE


def test_a_nodes_share_of_a_commit_fits_into_its_memory_volume() -> None:
    shares = {num_nodes: commit_bytes() / num_nodes for num_nodes in (16, 8)}
    assert f"988 GB / 16 nodes = {shares[16] / GB:.0f} GB, on 8 nodes {shares[8] / GB:.0f} GB" in PAGE
    assert f"{2 * shares[8] / GB:.0f} GB on 8 nodes" in PAGE
    volumes = {item["name"]: item for item in JOB["spec"]["template"]["spec"]["volumes"]}
    assert volumes["shm"]["emptyDir"] == {"medium": "Memory", "sizeLimit": "256Gi"}
    assert 2 * shares[8] < 256 * GIB
