"""Volumes that only some nodes reach restrict the nodes of a job, and what cannot be read restricts nothing."""

from __future__ import annotations

from typing import Any

import pytest

from elastic_operator.observed.capacity_count import PodRules, count_capacity
from elastic_operator.observed.node_pool import NodePool
from elastic_operator.observed.observation import NodeView, Observation
from elastic_operator.observed.placement.pod_constraints import PodConstraints, Spread
from elastic_operator.observed.placement.schedulability import matches_terms
from elastic_operator.observed.placement.volumes import (
    ClaimView,
    bound_claim,
    describe_problems,
    list_claims,
    read_claim,
    unbound_claim,
)
from tests.unit.elastic_operator.observed.test_node_pool import GPU, node, pod, usage

ZONE = "topology.kubernetes.io/zone"
HOSTNAME = "kubernetes.io/hostname"


def term(*values: str, key: str = ZONE, operator: str = "In") -> dict[str, Any]:
    return {"matchExpressions": [{"key": key, "operator": operator, "values": list(values)}]}


def claim(phase: str = "Bound", volume: str = "pv", **changes: Any) -> dict[str, Any]:
    spec = {"accessModes": ["ReadWriteMany"], "volumeName": volume, "storageClassName": "fast", **changes}
    return {"metadata": {"name": "ckpt", "uid": "u"}, "spec": spec, "status": {"phase": phase}}


def volume(*terms: dict[str, Any], **spec: Any) -> dict[str, Any]:
    affinity = {"nodeAffinity": {"required": {"nodeSelectorTerms": list(terms)}}} if terms else {}
    return {"metadata": {"name": "pv"}, "spec": {**affinity, **spec}}


def in_zone(*zones: str, name: str = "ckpt") -> ClaimView:
    return ClaimView(name=name, terms=(term(*zones),))


def zonal_nodes() -> dict[str, NodeView]:
    zones = {"n1": "a", "n2": "a", "n3": "b", "n4": "b", "n5": "c"}
    return {name: node(name, labels={ZONE: zone, HOSTNAME: name}) for name, zone in zones.items()}


def observe(*volumes: ClaimView, shared: bool, **pods_on: str) -> Observation:
    used = usage(*(pod(name, on) for name, on in pods_on.items()))
    nodes = zonal_nodes()
    return Observation(
        nodes=NodePool(GPU, nodes) if shared else nodes, used=used.by_others((), GPU), volumes=tuple(volumes)
    )


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize(
    ("claims", "usable", "text"),
    [
        pytest.param((), ["n1", "n2", "n3", "n4", "n5"], "40 free accelerators on 5 nodes", id="no-claim"),
        pytest.param(
            (ClaimView(name="ckpt"),), ["n1", "n2", "n3", "n4", "n5"], "40 free accelerators on 5 nodes", id="anywhere"
        ),
        pytest.param(
            (in_zone("a"),),
            ["n1", "n2"],
            f"16 free accelerators on 2 nodes (volume of claim ckpt is only reachable from {ZONE} a: 3 more nodes)",
            id="one-zone",
        ),
        pytest.param(
            (in_zone("a", "b"), in_zone("b", "c", name="data")),
            ["n3", "n4"],
            f"16 free accelerators on 2 nodes (volume of claim ckpt is only reachable from {ZONE} a or b, "
            f"of claim data from {ZONE} b or c: 3 more nodes)",
            id="two-claims-both-count",
        ),
        pytest.param(
            (ClaimView(name="ckpt", terms=(term("a"), term("n5", key=HOSTNAME))),),
            ["n1", "n2", "n5"],
            "24 free accelerators on 3 nodes (volume of claim ckpt is only reachable from "
            f"{ZONE} a or {HOSTNAME} n5: 2 more nodes)",
            id="either-term",
        ),
    ],
)
def test_only_nodes_that_reach_the_volumes_are_capacity_and_the_plan_says_why(
    shared: bool, claims: tuple[ClaimView, ...], usable: list[str], text: str
) -> None:
    capacity = count_capacity(observe(*claims, shared=shared), GPU, {}, ())
    assert sorted(capacity.usable(8)) == usable
    assert capacity.num_usable(8) == len(usable)
    assert str(capacity) == text


@pytest.mark.parametrize("shared", [False, True])
def test_a_node_that_could_take_no_pod_anyway_is_not_blamed_on_the_volume(shared: bool) -> None:
    world = observe(in_zone("a"), shared=shared, other="n3")
    capacity = count_capacity(world, GPU, {}, ("n4",))
    assert str(capacity).endswith(f"(volume of claim ckpt is only reachable from {ZONE} a: 1 more nodes)")


def test_jobs_with_claims_in_the_same_zone_share_one_count() -> None:
    nodes, used = NodePool(GPU, zonal_nodes()), usage().by_others((), GPU)
    pools = {
        count_capacity(
            Observation(nodes=nodes, used=used, volumes=(in_zone("a", name=f"claim-{i}"),)), GPU, {}, ()
        ).pool
        for i in range(100)
    }
    elsewhere = count_capacity(Observation(nodes=nodes, used=used, volumes=(in_zone("b"),)), GPU, {}, ())
    assert len(pools) == 1
    assert elsewhere.usable(8) == ("n3", "n4")


def test_a_zonal_volume_leaves_the_other_zones_domains_of_a_topology_spread_empty() -> None:
    """The scheduler counts their domains too, so the zone of the volume takes `maxSkew` pods only."""
    rules = PodRules(constraints=PodConstraints(spread=(Spread(key=ZONE, max_skew=1),)))
    assert count_capacity(observe(shared=False), GPU, {}, (), rules).num_usable(8) == 5
    assert count_capacity(observe(in_zone("a"), shared=False), GPU, {}, (), rules).num_usable(8) == 1


@pytest.mark.parametrize(
    ("terms", "is_met"),
    [
        pytest.param([term("a")], True, id="in"),
        pytest.param([term("b")], False, id="not-in-the-list"),
        pytest.param([term("b", operator="NotIn")], True, id="NotIn"),
        pytest.param([term("x", key="absent", operator="NotIn")], True, id="NotIn-without-the-label"),
        pytest.param([term("b"), term("a")], True, id="one-of-two-terms"),
        pytest.param(
            [{"matchFields": [{"key": "metadata.name", "operator": "In", "values": ["n1"]}]}], True, id="name"
        ),
        pytest.param([{}], False, id="an-empty-term-matches-nothing"),
        pytest.param([], False, id="no-term-matches-nothing"),
    ],
)
def test_node_selector_terms_mean_what_they_mean_to_the_scheduler(terms: list[dict[str, Any]], is_met: bool) -> None:
    assert matches_terms(node("n1", labels={ZONE: "a"}), terms) is is_met


@pytest.mark.parametrize(
    ("found", "terms", "has_one_node"),
    [
        pytest.param(volume(), None, False, id="reachable-from-everywhere"),
        pytest.param(volume(term("a")), (term("a"),), False, id="zonal"),
        pytest.param(
            volume(term("n3", key=HOSTNAME), local={"path": "/d"}), (term("n3", key=HOSTNAME),), False, id="local"
        ),
        pytest.param(None, None, False, id="volume-not-readable"),
    ],
)
def test_a_bound_claim_reaches_as_far_as_its_volume(found: Any, terms: Any, has_one_node: bool) -> None:
    view = bound_claim(claim(), found)
    assert (view.terms, view.problem, view.is_attached_once) == (terms, "", has_one_node)


@pytest.mark.parametrize(
    ("modes", "spec", "expected"),
    [
        (["ReadWriteMany"], {}, (False, False)),
        (["ReadWriteOnce", "ReadWriteMany"], {}, (False, False)),
        (["ReadOnlyMany"], {}, (False, False)),
        (["ReadWriteOnce"], {"csi": {"driver": "d"}}, (True, False)),
        (["ReadWriteOnce"], {"local": {"path": "/d"}}, (False, False)),
        (["ReadWriteOnce"], {"hostPath": {"path": "/d"}}, (False, False)),
        (["ReadWriteOncePod"], {"hostPath": {"path": "/d"}}, (False, True)),
    ],
)
def test_access_modes_say_how_many_nodes_or_pods_may_use_a_volume(
    modes: list[str], spec: dict[str, Any], expected: tuple[bool, bool]
) -> None:
    view = bound_claim(claim(accessModes=modes), volume(**spec))
    assert (view.is_attached_once, view.has_one_pod) == expected


TOPOLOGIES = [{"matchLabelExpressions": [{"key": ZONE, "values": ["a", "b"]}]}]
WAITS = {"volumeBindingMode": "WaitForFirstConsumer", "provisioner": "csi.example"}


@pytest.mark.parametrize(
    ("item", "storage_class", "terms", "problem"),
    [
        pytest.param(claim("Pending", ""), WAITS, None, "", id="waits-for-pods"),
        pytest.param(
            claim("Pending", ""), {**WAITS, "allowedTopologies": TOPOLOGIES}, (term("a", "b"),), "", id="allowed-zones"
        ),
        pytest.param(
            claim("Pending", ""),
            {**WAITS, "provisioner": "kubernetes.io/no-provisioner", "allowedTopologies": TOPOLOGIES},
            None,
            "",
            id="volumes-that-exist-may-be-elsewhere",
        ),
        pytest.param(
            claim("Pending", ""), {"volumeBindingMode": "Immediate"}, None, "is not bound to a volume", id="immediate"
        ),
        pytest.param(claim("Pending", ""), {}, None, "is not bound to a volume", id="no-class-is-immediate"),
        pytest.param(claim("Pending", "pv"), WAITS, None, "is not bound to a volume", id="names-its-volume"),
        pytest.param(claim("Pending", ""), None, None, "", id="class-not-readable"),
    ],
)
def test_a_claim_without_a_volume_restricts_to_where_its_class_may_make_one(
    item: dict[str, Any], storage_class: Any, terms: Any, problem: str
) -> None:
    view = unbound_claim(item, storage_class)
    assert (view.terms, view.problem) == (terms, problem)


@pytest.mark.parametrize(
    ("item", "problem", "needs"),
    [
        (None, "does not exist", ""),
        (claim("Lost"), "has lost its volume pv", ""),
        (
            {**claim(), "metadata": {"name": "ckpt", "deletionTimestamp": "2026-01-01T00:00:00Z"}},
            "is being deleted",
            "",
        ),
        (claim(), "", "volume"),
        (
            {
                **claim("Pending"),
                "metadata": {"name": "ckpt", "annotations": {"pv.kubernetes.io/bind-completed": "yes"}},
            },
            "",
            "volume",
        ),
        (claim("Pending", ""), "", "class"),
        (claim("Pending", "", storageClassName=""), "is not bound to a volume", ""),
    ],
)
def test_a_claim_that_no_pod_can_use_is_a_problem(item: Any, problem: str, needs: str) -> None:
    view, found = read_claim("ckpt", item)
    assert (found, view.problem if view else "") == (needs, problem)


@pytest.mark.parametrize(
    "item",
    [
        {"spec": [], "status": {"phase": "Bound"}},
        {"spec": {"volumeName": 7}, "status": {"phase": "Bound"}},
        {"spec": {"accessModes": "ReadWriteOnce", "volumeName": "pv"}, "status": {"phase": "Bound"}},
    ],
)
def test_a_malformed_claim_is_an_error_at_the_edge(item: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"spec|accessModes|volumeName"):
        bound_claim({"metadata": {"name": "ckpt"}, **item}, volume())


@pytest.mark.parametrize(
    "terms", [[7], [{"matchExpressions": [{"operator": "In"}]}], [{"matchExpressions": {}}], "all", [term("a")] * 999]
)
def test_malformed_terms_of_a_volume_are_an_error_at_the_edge(terms: Any) -> None:
    item = {"spec": {"nodeAffinity": {"required": {"nodeSelectorTerms": terms}}}}
    with pytest.raises(ValueError, match=r"spec\.nodeAffinity\.required"):
        bound_claim(claim(), item)


def test_claims_of_a_job_are_its_checkpoints_and_those_of_the_templates_volumes() -> None:
    volumes = [
        {"name": "a", "persistentVolumeClaim": {"claimName": "data"}},
        {"name": "b", "persistentVolumeClaim": {"claimName": "ckpt"}},
        {"name": "c", "ephemeral": {"volumeClaimTemplate": {"spec": {}}}},
        {"name": "d", "emptyDir": {}},
    ]
    assert list_claims("ckpt", {"spec": {"volumes": volumes}}) == ("ckpt", "data")
    assert list_claims("ckpt", {}) == ("ckpt",)


@pytest.mark.parametrize(
    ("view", "num_pods", "share_nodes", "text"),
    [
        (ClaimView(name="c"), 4, False, ""),
        (ClaimView(name="c", problem="does not exist"), 1, False, "claim c does not exist"),
        (ClaimView(name="c", is_attached_once=True), 1, False, ""),
        (ClaimView(name="c", is_attached_once=True), 4, True, ""),
        (ClaimView(name="c", is_attached_once=True), 4, False, "claim c is ReadWriteOnce"),
        (ClaimView(name="c", has_one_pod=True), 1, False, ""),
        (ClaimView(name="c", has_one_pod=True), 2, True, "claim c is ReadWriteOncePod"),
    ],
)
def test_what_keeps_pods_with_a_claim_from_running_is_described(
    view: ClaimView, num_pods: int, share_nodes: bool, text: str
) -> None:
    found = describe_problems((view,), num_pods=num_pods, share_nodes=share_nodes)
    assert found.startswith(text)
    assert bool(found) == bool(text)
