"""Planner and scheduler agree on where the pods of a job fit."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from elastic_operator.observed.placement.pod_resources import parse_quantity
from testbed import podenv, storage
from tests.cluster.conftest import Cluster
from tests.cluster.jobs import LIGHT, Run

pytestmark = pytest.mark.cluster

PENDING_SECONDS = 5
UNSCHEDULABLE_SECONDS = 60
"""The operator's default for --unschedulable-seconds."""
NEW_RESOURCE = "autoscaled.example/gpu"
ZONE = "etj-test/zone"
_PROGRAM = """
import os, runpy, socket, sys
listener = socket.create_server(("", int(os.environ["MASTER_PORT"])))
sys.argv = ["tests/cluster/light_trainer.py", "100000", "0", "0"]
runpy.run_path(sys.argv[0], run_name="__main__")
"""
LISTENING = ["python", "-c", _PROGRAM]
"""A training that listens on the rendezvous port for as long as it runs."""


def hosts(run: Run) -> list[str]:
    return sorted(pod["spec"].get("nodeName", "") for pod in run.workers())


def places(run: Run) -> list[str]:
    """The nodes of all pods, once each has one: rank 0 of this training makes steps without the others."""
    run.cluster.wait(lambda: all(hosts(run)), what="every pod to be placed", timeout_seconds=30)
    return hosts(run)


def offer(cluster: Cluster, node: str, count: int | None) -> None:
    """Let a node offer the new resource, as a node that an autoscaler adds would; None takes it back."""
    quantities = {NEW_RESOURCE: None if count is None else str(count)}
    patch = json.dumps({"status": {"capacity": quantities, "allocatable": quantities}})
    cluster.kubectl("patch", "node", node, "--subresource=status", "--type=merge", "-p", patch)


@pytest.fixture
def nodes_that_come(testbed: Cluster) -> Iterator[tuple[str, str]]:
    names = ("gpu-1", "gpu-2")
    yield names
    for name in names:
        offer(testbed, name, None)


def test_without_any_node_the_pods_are_pending_for_an_autoscaler_and_run_once_it_has_added_nodes(
    run: Run, nodes_that_come: tuple[str, str]
) -> None:
    accelerator = {"resource": NEW_RESOURCE, "perNode": [2]}
    limits = {"min": 2, "max": 4, "autoscaling": True}
    run.submit([*LIGHT, "100000", "0", "0"], accelerator=accelerator, nodes=limits, batch={"globalSamples": 16})
    run.cluster.wait(lambda: len(run.workers()) == 2, what="two pods", timeout_seconds=PENDING_SECONDS)
    status = run.until(
        "the scheduler's words", lambda _: run.condition("Launched").get("reason") == "Unschedulable", 15
    )
    assert f"Insufficient {NEW_RESOURCE}" in run.condition("Launched")["message"]
    assert (status["attempt"], status["current"]["awaitsNodes"]) == (1, True)
    offer(run.cluster, nodes_that_come[0], 2)
    run.cluster.wait(lambda: nodes_that_come[0] in hosts(run), what="the first pod to be placed", timeout_seconds=30)
    offer(run.cluster, nodes_that_come[1], 2)
    status = run.until_phase("Running", 60)
    assert (status["attempt"], hosts(run)) == (1, list(nodes_that_come))


@pytest.mark.parametrize(("pods_per_node", "num_pods", "num_hosts"), [("One", 3, 3), ("Many", 4, 2)])
def test_pods_share_a_node_only_if_the_spec_says_so(
    run: Run, pods_per_node: str, num_pods: int, num_hosts: int
) -> None:
    """Each node has two GPUs, each pod wants one."""
    limits = {"min": num_pods, "max": num_pods, "podsPerNode": pods_per_node}
    near = {"nodeSelector": {"etj-testbed/role": "gpu"}}
    run.submit(
        [*LIGHT, "100000", "0", "0"],
        accelerator={"resource": "amd.com/gpu", "perNode": [1]},
        nodes=limits,
        batch={"globalSamples": 12},
        pod_spec=near,
    )
    status = run.until_phase("Running", 60)
    assert (status["attempt"], len(places(run))) == (1, num_pods)
    assert len(set(places(run))) >= num_hosts
    if pods_per_node == "One":
        assert len(set(places(run))) == num_pods


@pytest.fixture
def zones(testbed: Cluster) -> Iterator[dict[str, str]]:
    wanted = {"gpu-1": "a", "gpu-2": "b", "gpu-3": "b"}
    for name, zone in wanted.items():
        testbed.kubectl("label", "node", name, f"{ZONE}={zone}", "--overwrite")
    yield wanted
    for name in wanted:
        testbed.kubectl("label", "node", name, f"{ZONE}-")


@pytest.mark.parametrize(
    ("rule", "num_pods"),
    [
        pytest.param("podAntiAffinity", 2, id="one-pod-in-each-zone"),
        pytest.param("podAffinity", 2, id="all-pods-in-one-zone"),
    ],
)
def test_the_plan_counts_the_templates_rules_about_its_own_pods(
    run: Run, zones: dict[str, str], rule: str, num_pods: int
) -> None:
    selector = {"matchLabels": {"elastictraining.dev/job-name": "gpt"}}
    term = {"topologyKey": ZONE, "labelSelector": selector}
    # The first pod decides on the zone of all; the scheduler might begin in the zone of one node.
    larger = {"matchExpressions": [{"key": ZONE, "operator": "In", "values": ["b"]}]}
    affinity = {
        rule: {"requiredDuringSchedulingIgnoredDuringExecution": [term]},
        "nodeAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": [{"weight": 100, "preference": larger}]},
    }
    # The least number is the right one: the operator may not have seen the label of every node yet, and then waits.
    run.submit(
        [*LIGHT, "100000", "0", "0"],
        nodes={"min": num_pods, "max": 3},
        batch={"globalSamples": 12},
        pod_spec={"affinity": affinity},
    )
    run.until_phase("Running", 60)
    used = [zones[name] for name in places(run)]
    assert (run.status()["attempt"], len(used)) == (1, num_pods)
    assert len(set(used)) == (2 if rule == "podAntiAffinity" else 1)


@pytest.mark.soak_only
def test_a_node_that_another_pods_anti_affinity_keeps_from_the_job_is_left_out_and_the_job_trains_on_the_others(
    run: Run,
) -> None:
    """The operator counts three nodes; the anti-affinity of pods that are not the job's is known to the scheduler."""
    template = podenv.host_python({"spec": {"containers": [{"name": "wait", "command": ["sleep", "1000"]}]}})
    job_pods = {"matchLabels": {"elastictraining.dev/job-name": "gpt"}}
    term = {"labelSelector": job_pods, "topologyKey": "kubernetes.io/hostname"}
    blocker = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": "blocker", "namespace": run.namespace},
        "spec": {
            **template["spec"],
            "terminationGracePeriodSeconds": 0,
            "nodeSelector": {"kubernetes.io/hostname": "gpu-2"},
            "affinity": {"podAntiAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": [term]}},
        },
    }
    run.cluster.apply(blocker)
    run.cluster.wait(
        lambda: run.cluster.get("pod", "blocker", "-n", run.namespace)["spec"].get("nodeName"), what="the other pod"
    )
    # A training that makes no step, as any other would while one of its pods is missing.
    run.submit(["sleep", "1000"], nodes={"min": 1, "max": 3}, batch={"globalSamples": 24})
    status = run.until("the scheduler's words", lambda found: found.get("reason") == "Unschedulable")
    assert (status["attempt"], status["current"]["numNodes"]) == (1, 3)
    assert "anti-affinity" in run.condition("Launched")["message"]
    status = run.until("a smaller attempt", lambda found: found.get("attempt") == 2, UNSCHEDULABLE_SECONDS + 60)
    run.cluster.wait(lambda: hosts(run) == ["gpu-1", "gpu-3"], what="its pods to be placed", timeout_seconds=60)
    limit = status["placementLimit"]
    assert (limit["numNodes"], limit["missing"], "anti-affinity" in limit["message"]) == (2, 1, True)
    assert (status["recoveries"][0]["cause"], status["restartBudget"]["used"]) == ("Unschedulable", 0)


def test_the_plan_counts_a_topology_spread_over_nodes_with_room_for_more(run: Run, zones: dict[str, str]) -> None:
    """Zone a has room for two pods and zone b for four, so with a skew of one only five of them fit."""
    spread = {
        "topologyKey": ZONE,
        "maxSkew": 1,
        "whenUnsatisfiable": "DoNotSchedule",
        "labelSelector": {"matchLabels": {"elastictraining.dev/job-name": "gpt"}},
    }
    run.submit(
        [*LIGHT, "100000", "0", "0"],
        accelerator={"resource": "amd.com/gpu", "perNode": [1]},
        nodes={"min": 1, "max": 6, "podsPerNode": "Many"},
        batch={"globalSamples": 60},
        pod_spec={"topologySpreadConstraints": [spread], "nodeSelector": {"etj-testbed/role": "gpu"}},
    )
    status = run.until_phase("Running", 90)
    used = sorted(zones[name] for name in places(run))
    assert (status["attempt"], used) == (1, ["a", "a", "b", "b", "b"])


@pytest.fixture
def zonal_claim(testbed: Cluster, namespace: str, checkpoints: Path, zones: dict[str, str]) -> Iterator[str]:
    """The claim `zonal`, whose volume only the nodes of zone b reach."""
    term = {"matchExpressions": [{"key": ZONE, "operator": "In", "values": ["b"]}]}
    testbed.apply(*storage.claim(namespace, "zonal", checkpoints, terms=[term]))
    yield "zonal"
    testbed.kubectl("delete", "pv", f"{namespace}-zonal", "--wait=false", check=False)


def test_an_attempt_runs_where_its_volume_is_and_the_plan_says_which_nodes_do_not_reach_it(
    run: Run, zones: dict[str, str], zonal_claim: str
) -> None:
    checkpoint = {"claimName": zonal_claim, "path": "gpt", "intervalSeconds": 1000}
    run.submit(
        [*LIGHT, "100000", "0", "0"],
        nodes={"min": 3, "max": 3},
        batch={"globalSamples": 12},
        checkpoint=checkpoint,
    )
    status = run.until_phase("Waiting", 30)
    assert f"volume of claim zonal is only reachable from {ZONE} b: 1 more nodes" in status["message"]
    run.patch(nodes={"min": 1, "max": 3})
    status = run.until_phase("Running", 60)
    assert (status["attempt"], [zones[name] for name in places(run)]) == (1, ["b", "b"])


def test_a_claim_that_does_not_exist_is_named_and_the_attempt_starts_once_it_is_there(
    run: Run, checkpoints: Path
) -> None:
    run.submit([*LIGHT, "100000", "0", "0"], checkpoint={"claimName": "later", "path": "gpt", "intervalSeconds": 1000})
    run.until("the scheduler's words", lambda _: run.condition("Launched").get("reason") == "Unschedulable", 30)
    assert 'persistentvolumeclaim "later" not found' in run.condition("Launched")["message"]
    assert "claim later does not exist" in run.status()["plan"]["reason"]
    assert "ClaimNotUsable" in run.events()
    run.cluster.apply(*storage.claim(run.namespace, "later", checkpoints))
    try:
        assert run.until_phase("Running", 90)["attempt"] == 1
    finally:
        run.cluster.kubectl("delete", "pv", f"{run.namespace}-later", "--wait=false", check=False)


@pytest.fixture
def most_memory(testbed: Cluster, namespace: str) -> Iterator[str]:
    """Hold most of the memory of gpu-1 with another pod; return a quantity that the other nodes can give."""
    memory = testbed.get("node", "gpu-1")["status"]["allocatable"]["memory"]
    amount = parse_quantity(memory)
    assert amount is not None
    share = str(int(amount * 3 / 5))
    container = {"name": "hold", "command": ["sleep", "1000"], "resources": {"requests": {"memory": share}}}
    template = podenv.host_python({"spec": {"containers": [container]}})
    holder = {"nodeSelector": {"kubernetes.io/hostname": "gpu-1"}, "terminationGracePeriodSeconds": 0}
    testbed.apply(
        {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {"name": "hold", "namespace": namespace},
            "spec": {**template["spec"], **holder},
        }
    )
    testbed.wait(
        lambda: testbed.get("pod", "hold", "-n", namespace).get("status", {}).get("phase") == "Running",
        what="the other pod to run",
        timeout_seconds=60,
    )
    yield share
    testbed.kubectl("delete", "pod", "hold", "-n", namespace, "--ignore-not-found")


def test_a_node_whose_memory_another_pod_holds_is_not_planned_and_the_plan_says_so(run: Run, most_memory: str) -> None:
    run.submit(
        [*LIGHT, "100000", "0", "0"],
        nodes={"min": 1, "max": 3},
        batch={"globalSamples": 12},
        pod={"resources": {"requests": {"cpu": "10m", "memory": most_memory}}},
    )
    status = run.until_phase("Running", 60)
    assert (status["attempt"], places(run)) == (1, ["gpu-2", "gpu-3"])
    assert "too little memory on 1 more" in status["plan"]["reason"]


def on_one_node(run: Run, name: str, ports: list[dict[str, Any]] | None = None) -> None:
    """Submit a job on the node's network, with one of the two GPUs of node gpu-1."""
    run.submit(
        LISTENING,
        accelerator={"resource": "amd.com/gpu", "perNode": [1]},
        pod={"ports": ports} if ports else {},
        pod_spec={
            "hostNetwork": True,
            "dnsPolicy": "ClusterFirstWithHostNet",
            "nodeSelector": {"kubernetes.io/hostname": "gpu-1"},
        },
        name=name,
        checkpoint={"claimName": "ckpt", "path": name, "intervalSeconds": 1000},
    )


def test_two_jobs_on_the_network_of_one_node_have_different_rendezvous_ports(run: Run) -> None:
    on_one_node(run, "gpt")
    on_one_node(run, "other")
    run.until_phase("Running", 60)
    run.cluster.wait(
        lambda: run.cluster.get("etj", "other", "-n", run.namespace).get("status", {}).get("phase") == "Running",
        what="the other job to run",
        timeout_seconds=60,
    )
    ports = {
        item["value"]
        for pod in run.workers()
        for item in pod["spec"]["containers"][0]["env"]
        if item["name"] == "PET_MASTER_PORT"
    }
    assert (places(run), len(ports)) == (["gpu-1", "gpu-1"], 2)


def test_a_port_of_the_node_that_another_job_uses_keeps_a_job_waiting_and_it_says_so(run: Run) -> None:
    on_one_node(run, "other", [{"containerPort": 9100}])
    run.cluster.wait(
        lambda: run.cluster.get("etj", "other", "-n", run.namespace).get("status", {}).get("phase") == "Running",
        what="the other job to run",
        timeout_seconds=60,
    )
    on_one_node(run, "gpt", [{"containerPort": 9100}])
    status = run.until_phase("Waiting", 30)
    assert "hostPort 9100/TCP taken on 1 more" in status["message"]
    run.cluster.kubectl("delete", "etj", "other", "-n", run.namespace)
    run.until_phase("Running", 60)
