"""Requests and offers are counted as the scheduler counts them."""

from __future__ import annotations

from decimal import Decimal
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic_operator.observed.capacity_count import PodRules, count_capacity
from elastic_operator.observed.node_pool import NodePool
from elastic_operator.observed.observation import Observation, node_view
from elastic_operator.observed.placement.pod_resources import (
    MOST_PODS,
    count_room,
    parse_builtin,
    parse_extended,
    parse_quantity,
    pod_requests,
)
from tests.unit.elastic_operator.observed.test_node_pool import GPU, pod, usage


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("0", "0"),
        ("1", "1"),
        ("500m", "0.5"),
        ("1.5", "1.5"),
        (".5", "0.5"),
        ("2k", "2000"),
        ("16Gi", str(16 * 2**30)),
        ("1E", "1e18"),
        ("1Ei", str(2**60)),
        ("1e3", "1000"),
        ("12E2", "1200"),
        ("100n", "1e-7"),
        ("+3", "3"),
    ],
)
def test_a_quantity_is_read_as_kubernetes_reads_it(text: str, number: str) -> None:
    assert parse_quantity(text) == Decimal(number)


@pytest.mark.parametrize("text", ["", "x", "1 Gi", "1GiB", "Gi", "1e", "1e999", "9" * 40, "0x10", "1_000", "NaN", "."])
def test_what_is_no_quantity_is_left_out(text: str) -> None:
    assert parse_quantity(text) is None
    assert parse_builtin({"memory": text}) == {}


@pytest.mark.parametrize(
    ("quantity", "amount"),
    [
        pytest.param("8", 8, id="plain"),
        pytest.param(8, 8, id="number"),
        pytest.param("1k", 1000, id="thousand-as-kubernetes-writes-it"),
        pytest.param("63k", 63_000, id="thousands"),
        pytest.param("1Ki", 1024, id="binary"),
        pytest.param("1e3", 1000, id="exponent"),
        pytest.param("2000m", 2, id="whole-in-milli"),
        pytest.param("500m", None, id="half-a-device"),
        pytest.param("-1", None, id="negative"),
        pytest.param("many", None, id="no-quantity"),
    ],
)
def test_an_extended_resource_is_a_whole_number_in_any_spelling(quantity: Any, amount: int | None) -> None:
    expected = {} if amount is None else {"rdma/hca": amount}
    assert parse_extended({"rdma/hca": quantity, "cpu": "4"}) == expected


def test_a_pod_fits_on_a_node_that_offers_a_thousand_of_a_resource() -> None:
    node = {"metadata": {"name": "n1"}, "status": {"allocatable": {GPU: "8", "rdma/hca": "1k"}}}
    limits = {"resources": {"limits": {"rdma/hca": "1"}}}
    needed = pod_requests({"containers": [limits]})
    assert count_room(needed.items(), node_view(node).allocatable, {}) == (1000, "rdma/hca")


@given(st.text(max_size=24))
def test_no_text_makes_reading_a_quantity_raise(text: str) -> None:
    parse_builtin({"cpu": text, "memory": text})


def container(restart: str = "", **requests: str) -> dict[str, Any]:
    return {"resources": {"requests": requests}} | ({"restartPolicy": restart} if restart else {})


@pytest.mark.parametrize(
    ("spec", "requests"),
    [
        pytest.param({"containers": [container(cpu="1"), container(cpu="250m")]}, {"cpu": 1250}, id="sum"),
        pytest.param(
            {"containers": [{"resources": {"limits": {"memory": "1Ki"}}}]}, {"memory": 1024}, id="limit-without-request"
        ),
        pytest.param(
            {"containers": [container(cpu="1")], "initContainers": [container(cpu="3"), container(cpu="2")]},
            {"cpu": 3000},
            id="init-containers-run-one-after-another",
        ),
        pytest.param(
            {
                "containers": [container(cpu="2")],
                "initContainers": [container("Always", cpu="1"), container(cpu="2500m"), container("Always", cpu="1")],
            },
            {"cpu": 4000},
            id="sidecars-run-beside-everything",
        ),
        pytest.param(
            {"containers": [container(cpu="1")], "initContainers": [container("Always", cpu="1"), container(cpu="3")]},
            {"cpu": 4000},
            id="an-init-container-beside-a-sidecar",
        ),
        pytest.param({"containers": [container(cpu="1")], "overhead": {"cpu": "100m"}}, {"cpu": 1100}, id="overhead"),
        pytest.param(
            {"containers": [container(cpu="1")], "resources": {"requests": {"cpu": "5"}}}, {"cpu": 5000}, id="whole-pod"
        ),
        pytest.param(
            {"containers": [container(**{GPU: "2", "rdma/hca": "1"}), container(**{GPU: "1"})]},
            {GPU: 3, "rdma/hca": 1},
            id="extended",
        ),
        pytest.param(
            {"containers": [{"ports": [{"hostPort": 80, "containerPort": 8080}, {"containerPort": 9}]}]},
            {"hostPort 80/TCP": 1},
            id="host-port",
        ),
        pytest.param(
            {"hostNetwork": True, "containers": [{"ports": [{"containerPort": 53, "protocol": "UDP"}]}]},
            {"hostPort 53/UDP": 1},
            id="host-network",
        ),
    ],
)
def test_requests_of_a_pod(spec: dict[str, Any], requests: dict[str, int]) -> None:
    assert pod_requests(spec) == requests


@pytest.mark.parametrize(
    ("needed", "room", "scarcest"),
    [
        ({"memory": 60}, 1, "memory"),
        ({"memory": 20, "rdma/hca": 4}, 0, "rdma/hca"),
        ({"memory": 20, "cpu": 5}, 3, "memory"),
        ({"memory": 61}, 0, "memory"),
        ({"hugepages-2Mi": 1}, 0, "hugepages-2Mi"),
        ({"ephemeral-storage": 10**15}, MOST_PODS, ""),
        ({"hostPort 8080/TCP": 1}, 1, "hostPort 8080/TCP"),
        ({"hostPort 22/TCP": 1}, 0, "hostPort 22/TCP"),
    ],
)
def test_as_many_pods_fit_as_the_scarcest_resource_admits(needed: dict[str, int], room: int, scarcest: str) -> None:
    offered, used = {"memory": 100, "cpu": 20}, {"memory": 40, "hostPort 22/TCP": 1}
    assert count_room(needed.items(), offered, used) == (room, scarcest)


def node(name: str, memory: str = "64Gi", pods: int = 110) -> dict[str, Any]:
    amounts = {"cpu": "16", "memory": memory, "pods": str(pods), GPU: "8"}
    ready = {"type": "Ready", "status": "True"}
    return {"metadata": {"name": name}, "status": {"allocatable": amounts, "capacity": amounts, "conditions": [ready]}}


def holding(name: str, on: str, memory: str, job: str = "") -> dict[str, Any]:
    item = pod(name, on, job=job, count=0)
    item["spec"]["containers"][0]["resources"]["requests"] = {"memory": memory}
    return item


TEMPLATE = {"spec": {"containers": [container(memory="40Gi", **{GPU: "8"})]}}


@pytest.mark.parametrize("shared", [False, True])
def test_a_node_without_the_memory_for_a_pod_is_no_capacity_and_the_plan_says_why(shared: bool) -> None:
    views = {name: node_view(node(name, pods=1 if name == "n4" else 110)) for name in ("n1", "n2", "n3", "n4")}
    mine = holding("mine", "n3", "30Gi", job="gpt")
    counted = usage(holding("other", "n2", "30Gi"), mine, holding("small", "n4", "1Gi"))
    nodes: Any = NodePool(GPU, views) if shared else views
    owner = mine["metadata"]["ownerReferences"][0]["uid"]
    world = Observation(nodes=nodes, used=counted.by_others({owner}, GPU))
    capacity = count_capacity(world, GPU, TEMPLATE, ())
    assert sorted(capacity.usable(8)) == ["n1", "n3"], "what the job itself holds is free for its next attempt"
    assert str(capacity) == "16 free accelerators on 2 nodes (too little memory on 1 more, too few pods on 1 more)"


def listening(name: str, on: str, port: int) -> dict[str, Any]:
    item = holding(name, on, "1Gi")
    item["spec"]["containers"][0]["ports"] = [{"hostPort": port, "containerPort": port}]
    return item


@pytest.mark.parametrize("shared", [False, True])
def test_a_node_whose_port_is_taken_is_no_capacity(shared: bool) -> None:
    views = {name: node_view(node(name)) for name in ("n1", "n2")}
    counted = usage(listening("other", "n2", 9100), listening("elsewhere", "n1", 9200)).by_others((), GPU)
    world = Observation(nodes=NodePool(GPU, views) if shared else views, used=counted)
    ports = [{"containerPort": 9100}]
    template = {"spec": {"hostNetwork": True, "containers": [{**container(**{GPU: "8"}), "ports": ports}]}}
    capacity = count_capacity(world, GPU, template, ())
    assert capacity.usable(8) == ("n1",)
    assert str(capacity) == "8 free accelerators on 1 nodes (hostPort 9100/TCP taken on 1 more)"


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize(
    ("max_per_node", "memory", "num_pods"),
    [(1, "1Gi", 2), (MOST_PODS, "1Gi", 8), (MOST_PODS, "30Gi", 3), (MOST_PODS, "64Gi", 1)],
)
def test_pods_of_one_job_share_a_node_only_if_the_spec_says_so_and_every_resource_suffices(
    shared: bool, max_per_node: int, memory: str, num_pods: int
) -> None:
    views = {name: node_view(node(name)) for name in ("n1", "n2")}
    counted = usage(holding("other", "n2", "10Gi")).by_others((), GPU)
    world = Observation(nodes=NodePool(GPU, views) if shared else views, used=counted)
    template = {"spec": {"containers": [container(memory=memory, **{GPU: "2"})]}}
    capacity = count_capacity(world, GPU, template, (), PodRules(max_per_node=max_per_node))
    assert capacity.num_usable(2) == num_pods
