"""Requests and offers are counted as the scheduler counts them."""

from __future__ import annotations

from decimal import Decimal
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic_operator.observed.capacity_count import count_capacity
from elastic_operator.observed.node_pool import NodePool
from elastic_operator.observed.observation import Observation, node_view
from elastic_operator.observed.pod_resources import find_shortage, parse_builtin, parse_quantity, pod_requests
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
    ],
)
def test_requests_of_a_pod(spec: dict[str, Any], requests: dict[str, int]) -> None:
    assert pod_requests(spec) == requests


@pytest.mark.parametrize(
    ("needed", "lacking"),
    [
        ({"memory": 60}, ""),
        ({"memory": 61}, "memory"),
        ({"rdma/hca": 1}, "rdma/hca"),
        ({"hugepages-2Mi": 1}, "hugepages-2Mi"),
        ({"ephemeral-storage": 10**15}, ""),
    ],
)
def test_a_pod_fits_where_every_resource_suffices(needed: dict[str, int], lacking: str) -> None:
    assert find_shortage(needed.items(), {"memory": 100}, {"memory": 40}) == lacking


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
