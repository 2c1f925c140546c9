"""What follows from the nodes alone is found once, however many jobs ask; and it is what each would find by itself."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic_operator.observed.capacity import Pool
from elastic_operator.observed.capacity_count import count_capacity
from elastic_operator.observed.node_pool import NodePool
from elastic_operator.observed.observation import NodeView, Observation, PodView, Taint
from elastic_operator.observed.placement.volumes import ClaimView
from elastic_operator.observed.pod_usage import PodUsage
from elastic_operator.observed.timeouts import Timeouts
from tests.unit.elastic_operator.counting_nodes import CountingNodes
from tests.unit.elastic_operator.crowd import of_job

GPU = "amd.com/gpu"
NOW = 1_800_000_000.0


def node(name: str, **changes: Any) -> NodeView:
    return NodeView(**{"name": name, "allocatable": {GPU: 8}, "capacity": {GPU: 8}, **changes})


def pod(name: str, on: str, job: str = "", count: int = 8, phase: str = "Running") -> dict[str, Any]:
    labels = {"elastictraining.dev/job-name": job} if job else {}
    container = {"name": "c", "resources": {"requests": {GPU: str(count)}}}
    return {
        "metadata": {"name": name, "namespace": "ns", "labels": labels, "ownerReferences": of_job(f"{job}-a1", job)},
        "spec": {"nodeName": on, "containers": [container]},
        "status": {"phase": phase},
    }


def usage(*pods: dict[str, Any]) -> PodUsage:
    found = PodUsage()
    for item in pods:
        found.put(item)
    return found


NODES = st.lists(
    st.builds(
        lambda ready, offered, cordoned, tainted, label: {
            "ready": "True" if ready else "Unknown",
            "allocatable": {GPU: offered},
            "unschedulable": cordoned,
            "taints": (Taint(key="team", value="a"),) if tainted else (),
            "labels": {"pool": label},
        },
        st.integers(0, 5).map(bool),
        st.integers(0, 8),
        st.integers(0, 5).map(lambda number: not number),
        st.booleans(),
        st.sampled_from("ab"),
    ),
    max_size=6,
)
PODS = st.lists(st.tuples(st.integers(0, 6), st.sampled_from(["", "gpt", "other"]), st.integers(0, 8)), max_size=8)
TEMPLATES = st.sampled_from(
    [{}, {"spec": {"tolerations": [{"operator": "Exists"}]}}, {"spec": {"nodeSelector": {"pool": "a"}}}]
)


CLAIMS = st.sampled_from(
    [
        (),
        tuple(
            ClaimView(name=name, terms=({"matchExpressions": [{"key": "pool", "operator": "In", "values": values}]},))
            for name, values in {"ckpt": ["b"], "data": ["a", "b"]}.items()
        ),
    ]
)


@given(
    nodes=NODES,
    pods=PODS,
    template=TEMPLATES,
    avoid=st.sets(st.integers(0, 6)),
    sick=st.sets(st.integers(0, 6)),
    claims=CLAIMS,
)
def test_a_shared_count_is_what_the_job_alone_would_count(
    *,
    nodes: list[dict[str, Any]],
    pods: list[tuple[int, str, int]],
    template: dict[str, Any],
    avoid: set[int],
    sick: set[int],
    claims: tuple[ClaimView, ...],
) -> None:
    views = {f"n{i}": node(f"n{i}", **fields) for i, fields in enumerate(nodes)}
    used = usage(*(pod(f"p{i}", f"n{on}", job, count) for i, (on, job, count) in enumerate(pods)))
    mine = tuple(
        PodView(name=f"p{i}", uid=str(i), attempt=1, role="worker", node=f"n{on}", unhealthy_devices=int(on in sick))
        for i, (on, job, _) in enumerate(pods)
        if job == "gpt"
    )
    others = used.by_others({"gpt"}, GPU)
    shared = Observation(nodes=NodePool(GPU, views), pods=mine, used=others, volumes=claims)
    alone = dataclasses.replace(shared, nodes=views, used=dict(others))
    names = frozenset(f"n{i}" for i in avoid)
    one, other = (count_capacity(world, GPU, template, names) for world in (shared, alone))
    assert one.sorted_nodes() == other.sorted_nodes()
    assert str(one) == str(other)
    for count in range(1, 9):
        assert one.num_usable(count) == other.num_usable(count) == len(one.usable(count))


def test_a_thousand_jobs_walk_over_the_nodes_as_often_as_one() -> None:
    nodes = CountingNodes({f"n{i}": node(f"n{i}") for i in range(50)})
    node_pool = NodePool(GPU, nodes)
    used = usage(*(pod(f"p{i}", f"n{i}", f"job-{i}") for i in range(20)))
    pools: set[Pool] = set()
    for _ in range(2):
        for i in range(1000):
            world = Observation(nodes=node_pool, used=used.by_others({f"job-{i}"}, GPU))
            capacity = count_capacity(world, GPU, {}, node_pool.suspects(Timeouts(), NOW))
            pools.add(capacity.pool)
            assert capacity.num_usable(8) == 30 + (i < 20), "what a job holds itself is free for it"
    assert (nodes.walks, len(pools)) == (2, 1), "once for the suspects, once for the free accelerators"
    used.put(pod("p0", "n0", "job-0", phase="Succeeded"))
    again = count_capacity(Observation(nodes=node_pool, used=used.by_others({"job-999"}, GPU)), GPU, {}, ())
    assert again.num_usable(8) == 31
    assert (nodes.walks, again.pool in pools) == (2, False), "a change of the usage needs no walk over the nodes"


def test_pods_of_ever_other_kinds_do_not_fill_the_memory() -> None:
    node_pool = NodePool(GPU, {"n0": node("n0")})
    used = PodUsage().by_others({"gpt"}, GPU)
    for i in range(100):
        node_pool.pool({"nodeSelector": {"rack": str(i)}}, used)
    assert len(node_pool._offers) == len(node_pool._pools) == 16


@pytest.mark.parametrize("ours_first", [True, False])
def test_a_pod_that_becomes_a_jobs_is_held_whichever_watch_tells_first(ours_first: bool) -> None:
    found = usage(pod("p", "n0"))
    events: list[Callable[[], None]] = [
        lambda: found.put(pod("p", "n0", "gpt")),
        lambda: found.drop(("ns", "p"), ours=False),
    ]
    for event in events if ours_first else reversed(events):
        event()
    assert found.totals(GPU) == {"n0": 8}
    assert not found.by_others({"gpt"}, GPU)
    found.drop(("ns", "p"), ours=True)
    assert found.totals(GPU) == {}


def test_what_is_held_follows_every_change_of_a_pod() -> None:
    found = usage(pod("p", "n0"), pod("q", "n0", "gpt", 4))
    assert dict(found.by_others({"gpt"}, GPU)) == {"n0": 8}
    assert dict(found.by_others({"other"}, GPU)) == {"n0": 12}
    found.put(pod("p", "n1"))
    assert dict(found.by_others({"gpt"}, GPU)) == {"n1": 8}
    found.put(pod("p", "n1", phase="Failed"))
    found.put(pod("q", "n0", "gpt", 4, phase="Succeeded"))
    assert found.totals(GPU) == {}


SUPPLIES = {
    "nobody offers them": ([], {}, (), "no node offers amd.com/gpu"),
    "all are there": ([node("a"), node("b")], {}, (), ""),
    "of each kind": (
        [
            node("lost", ready="Unknown"),
            node("excluded"),
            node("cordoned", unschedulable=True),
            node("tainted", taints=(Taint(key="team", value="a"),)),
            node("full"),
            node("sick", allocatable={GPU: 0}),
            node("small", builtin={"cpu": 100}),
            node("free"),
        ],
        {"spec": {"containers": [{"resources": {"requests": {"cpu": "2"}}}]}},
        ("lost", "excluded", "gone"),
        (
            "of 8 nodes that offer amd.com/gpu: 2 lost, suspect or excluded, "
            "2 not Ready, cordoned, tainted or not selected by the template, "
            "2 without a healthy accelerator that is free"
        ),
    ),
}


@pytest.mark.parametrize("pooled", [True, False])
@pytest.mark.parametrize("case", SUPPLIES)
def test_a_plan_that_lacks_nodes_says_what_becomes_of_the_others(case: str, pooled: bool) -> None:
    nodes, template, avoid, expected = SUPPLIES[case]
    others = {} if pooled else {"without": NodeView(name="without", builtin={"cpu": 64000})}
    table = {item.name: item for item in nodes} | others
    used = usage(pod("train", "full"), pod("old", "lost")).by_others({"gpt"}, GPU)
    world = Observation(nodes=NodePool(GPU, table) if pooled else table, used=used)
    assert count_capacity(world, GPU, template, avoid).describe_supply() == expected
