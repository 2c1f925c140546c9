"""Rules of the pod template about pods of the same job: as many pods as the scheduler would place."""

from __future__ import annotations

from typing import Any

import pytest

from elastic_operator.observed.capacity_count import PodRules, count_capacity
from elastic_operator.observed.observation import NodeView, Observation, Taint
from elastic_operator.observed.placement.pod_constraints import (
    NO_CONSTRAINTS,
    PodConstraints,
    Spread,
    parse_pod_constraints,
)

GPU = "amd.com/gpu"
ZONE, HOST = "topology.kubernetes.io/zone", "kubernetes.io/hostname"
OWN = {"app": "gpt", "team": "nlp"}
MINE = {"labelSelector": {"matchLabels": {"app": "gpt"}}}


def required(kind: str, **term: Any) -> dict[str, Any]:
    return {"affinity": {kind: {"requiredDuringSchedulingIgnoredDuringExecution": [{"topologyKey": ZONE, **term}]}}}


def spreading(**fields: Any) -> dict[str, Any]:
    constraint = {"topologyKey": ZONE, "maxSkew": 1, "whenUnsatisfiable": "DoNotSchedule", **MINE, **fields}
    return {"topologySpreadConstraints": [constraint]}


@pytest.mark.parametrize(
    ("pod", "constraints"),
    [
        pytest.param({}, NO_CONSTRAINTS, id="none"),
        pytest.param(required("podAffinity", **MINE), PodConstraints(together=(ZONE,)), id="together"),
        pytest.param(required("podAntiAffinity", **MINE), PodConstraints(apart=(ZONE,)), id="apart"),
        pytest.param(required("podAffinity", labelSelector={}), PodConstraints(together=(ZONE,)), id="every-pod"),
        pytest.param(required("podAffinity"), NO_CONSTRAINTS, id="no-selector-matches-no-pod"),
        pytest.param(
            required("podAffinity", labelSelector={"matchLabels": {"app": "cache"}}), NO_CONSTRAINTS, id="other-pods"
        ),
        pytest.param(
            required(
                "podAntiAffinity",
                labelSelector={"matchExpressions": [{"key": "team", "operator": "In", "values": ["nlp"]}]},
            ),
            PodConstraints(apart=(ZONE,)),
            id="expression",
        ),
        pytest.param(
            required(
                "podAntiAffinity", labelSelector={"matchExpressions": [{"key": "app", "operator": "DoesNotExist"}]}
            ),
            NO_CONSTRAINTS,
            id="expression-that-does-not-match",
        ),
        pytest.param(required("podAffinity", namespaces=["other"], **MINE), NO_CONSTRAINTS, id="other-namespace"),
        pytest.param(
            required("podAffinity", namespaceSelector={}, **MINE), PodConstraints(together=(ZONE,)), id="all-namespaces"
        ),
        pytest.param(spreading(), PodConstraints(spread=(Spread(key=ZONE, max_skew=1),)), id="spread"),
        pytest.param(spreading(whenUnsatisfiable="ScheduleAnyway"), NO_CONSTRAINTS, id="spread-if-possible"),
        pytest.param(
            spreading(minDomains=3, nodeTaintsPolicy="Honor", nodeAffinityPolicy="Ignore"),
            PodConstraints(
                spread=(Spread(key=ZONE, max_skew=1, min_domains=3, honors_affinity=False, honors_taints=True),)
            ),
            id="spread-with-options",
        ),
        pytest.param(
            {"affinity": "x", "topologySpreadConstraints": [7, {"topologyKey": 1}]}, NO_CONSTRAINTS, id="malformed"
        ),
    ],
)
def test_only_required_rules_about_the_jobs_own_pods_count(pod: dict[str, Any], constraints: PodConstraints) -> None:
    assert parse_pod_constraints(pod, OWN, "ns") == constraints


def nodes(**zones: int) -> dict[str, NodeView]:
    """Nodes with 8 accelerators: `zones` many in each zone; `none` for nodes without the label."""
    return {
        f"{zone}{i}": NodeView(
            name=f"{zone}{i}",
            ready="True",
            labels={HOST: f"{zone}{i}"} | ({} if zone == "none" else {ZONE: zone}),
            allocatable={GPU: 8},
            capacity={GPU: 8},
        )
        for zone, count in zones.items()
        for i in range(count)
    }


@pytest.mark.parametrize(
    ("constraints", "zones", "num_pods"),
    [
        (PodConstraints(together=(ZONE,)), {"a": 2, "b": 3, "none": 5}, 3),
        (PodConstraints(apart=(ZONE,)), {"a": 2, "b": 3}, 2),
        (PodConstraints(apart=(ZONE,)), {"a": 2, "none": 2}, 3),
        (PodConstraints(apart=(ZONE, HOST)), {"a": 2, "b": 3}, 2),
        (PodConstraints(spread=(Spread(key=ZONE, max_skew=1),)), {"a": 2, "b": 5}, 5),
        (PodConstraints(spread=(Spread(key=ZONE, max_skew=2),)), {"a": 2, "b": 5}, 6),
        (PodConstraints(spread=(Spread(key=ZONE, max_skew=1),)), {"a": 2, "b": 5, "none": 4}, 5),
        (PodConstraints(spread=(Spread(key=ZONE, max_skew=1, min_domains=3),)), {"a": 2, "b": 5}, 2),
        (PodConstraints(together=(ZONE,), spread=(Spread(key=HOST, max_skew=1),)), {"a": 2, "b": 3}, 3),
        (PodConstraints(together=(ZONE,)), {"none": 5}, 0),
    ],
)
def test_the_count_is_what_the_scheduler_would_place(
    constraints: PodConstraints, zones: dict[str, int], num_pods: int
) -> None:
    world = Observation(nodes=nodes(**zones))
    capacity = count_capacity(world, GPU, {}, (), PodRules(constraints=constraints))
    assert capacity.num_usable(8) == num_pods
    assert "pod affinity and topology spread" in str(capacity)


def test_a_full_zone_holds_the_others_back_unless_its_nodes_are_not_meant() -> None:
    world = Observation(nodes=nodes(a=2, b=3, c=1), used={"c0": 8})
    rules = PodRules(constraints=PodConstraints(spread=(Spread(key=ZONE, max_skew=1),)))
    assert count_capacity(world, GPU, {}, (), rules).num_usable(8) == 2, "one in a, one in b, none in c"
    assert count_capacity(world, GPU, {}, ("c0",), rules).num_usable(8) == 5, "the operator excludes the node"
    elsewhere = {"key": ZONE, "operator": "NotIn", "values": ["c"]}
    selector = {"nodeSelectorTerms": [{"matchExpressions": [elsewhere]}]}
    affinity = {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": selector}}
    assert count_capacity(world, GPU, {"spec": {"affinity": affinity}}, (), rules).num_usable(8) == 5


def test_tainted_nodes_are_a_domain_unless_the_rule_honors_taints() -> None:
    views = nodes(a=2, b=3)
    tainted = NodeView(
        name="c0", ready="True", labels={ZONE: "c"}, taints=(Taint(key="x", effect="NoSchedule"),), allocatable={GPU: 8}
    )
    world = Observation(nodes={**views, "c0": tainted})
    for honors_taints, num_pods in ((False, 2), (True, 5)):
        spread = Spread(key=ZONE, max_skew=1, honors_taints=honors_taints)
        rules = PodRules(constraints=PodConstraints(spread=(spread,)))
        assert count_capacity(world, GPU, {}, (), rules).num_usable(8) == num_pods
