"""Workloads and flavors are read strictly: what has another type than Kueue's API is named, and never raises."""

from __future__ import annotations

from typing import Any

import pytest

from elastic_operator.api.spec import parse_spec
from elastic_operator.manifests.attempt import JobRef
from elastic_operator.manifests.workload import workload_spec
from elastic_operator.observed.observation import NodeView
from elastic_operator.observed.placement.schedulability import matches_node_affinity
from elastic_operator.observed.queueing.placement import Placement, add_placement, read_flavor, read_topology
from elastic_operator.observed.queueing.workloads import QueueView, select_own_workloads, workload_view
from tests.unit.elastic_operator.crowd import SPEC


def made(**changes: Any) -> dict[str, Any]:
    return {
        "metadata": {
            "name": "gpt-q3", "uid": "w", "resourceVersion": "5", "generation": 2,
            "ownerReferences": [{"uid": "job", "controller": True}],
        },
        "spec": {"queueName": "team", "podSets": [{"name": "workers", "count": 3, "minCount": 1}]},
        **changes,
    }  # fmt: skip


def test_a_new_workload_waits() -> None:
    view = workload_view(made())
    assert (view.number, view.owner, view.queue, view.asked, view.minimum) == (3, "job", "team", 3, 1)
    assert (view.is_active, view.has_quota, view.is_admitted, view.is_finished) == (True, False, False, False)


def test_an_admission_tells_count_flavors_and_what_checks_demand() -> None:
    status = {
        "admission": {
            "clusterQueue": "gpus",
            "podSetAssignments": [{"name": "workers", "count": 2, "flavors": {"cpu": "a", "amd.com/gpu": "b"}}],
        },
        "admissionChecks": [{"podSetUpdates": [{
            "name": "workers", "nodeSelector": {"zone": "z"}, "annotations": {"consume": "request"},
        }]}],
        "conditions": [
            {"type": "QuotaReserved", "status": "True"}, {"type": "Admitted", "status": "True"},
        ],
    }  # fmt: skip
    view = workload_view(made(status=status))
    assert (view.assigned, view.cluster_queue, view.flavors, view.is_admitted) == (2, "gpus", ("a", "b"), True)
    demands = QueueView(workloads=(view,), flavors={"b": Placement(node_labels={"pool": "p"})}).placement(view)
    assert demands.node_labels == {"pool": "p", "zone": "z"}
    assert demands.annotations == {"consume": "request"}


@pytest.mark.parametrize(
    ("changes", "path"),
    [
        ({"spec": {"podSets": "none"}}, "spec.podSets"),
        ({"spec": {"podSets": [{"name": "main", "count": 1}]}}, "spec.podSets"),
        ({"spec": {"podSets": [{"name": "workers", "count": -1}]}}, "spec.podSets.count"),
        ({"spec": {"podSets": [{"name": "workers", "count": True}]}}, "spec.podSets.count"),
        ({"status": {"conditions": [1]}}, "status.conditions[0]"),
        ({"status": {"conditions": [{}] * 17}}, "status.conditions"),
        ({"status": {"admission": "yes"}}, "status.admission"),
        ({"status": {"admission": {"podSetAssignments": []}}}, "status.admission.podSetAssignments"),
        ({"status": {"admissionChecks": [{"podSetUpdates": [{"name": "workers", "labels": {"a": 1}}]}]}}, "labels"),
    ],
)
def test_what_cannot_be_read_is_named(changes: dict[str, Any], path: str) -> None:
    assert path in workload_view(made(**changes)).problem


@pytest.mark.parametrize("spec", [{"nodeLabels": [1]}, {"tolerations": {}}, {"nodeLabels": {"a": "b" * 2000}}, 7])
def test_a_flavor_of_another_form_is_refused(spec: Any) -> None:
    with pytest.raises(ValueError, match="spec"):
        read_flavor({"spec": spec})


def test_only_workloads_of_the_resource_with_the_operators_names_count() -> None:
    other = made(metadata={**made()["metadata"], "name": "handmade"})
    foreign = made(metadata={**made()["metadata"], "name": "gpt-q4", "ownerReferences": []})
    views = [workload_view(item) for item in (made(), other, foreign)]
    assert [item.name for item in select_own_workloads(views, "job")] == ["gpt-q3"]


def test_demands_are_added_to_the_template_and_leave_it_as_it_is() -> None:
    template = {"spec": {"containers": [], "nodeSelector": {"a": "b"}}}
    tolerations = ({"key": "gpu", "operator": "Exists"},)
    changed = add_placement(template, Placement(node_labels={"c": "d"}, tolerations=tolerations, labels={"x": "y"}))
    assert changed["spec"]["nodeSelector"] == {"a": "b", "c": "d"}
    assert changed["metadata"]["labels"] == {"x": "y"}
    assert template == {"spec": {"containers": [], "nodeSelector": {"a": "b"}}}


TOPOLOGY = {
    "levels": ["block", "kubernetes.io/hostname"],
    "slices": [
        {
            "domainCount": 2,
            "valuesPerLevel": [
                {"universal": "b1"}, {"individual": {"prefix": "node-", "suffix": ".lan", "roots": ["1", "2"]}},
            ],
            "podCounts": {"universal": 1},
        },
        {
            "domainCount": 1,
            "valuesPerLevel": [{"universal": "b2"}, {"universal": "other"}],
            "podCounts": {"universal": 1},
        },
    ],
}  # fmt: skip


def test_the_domains_of_a_topology_are_unpacked_and_restrict_the_nodes() -> None:
    found = read_topology(TOPOLOGY, "topologyAssignment")
    assert found.domains == (("b1", "node-1.lan"), ("b1", "node-2.lan"), ("b2", "other"))
    own = {"matchExpressions": [{"key": "pool", "operator": "Exists"}]}
    affinity = {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": [own]}}}
    pod = add_placement({"spec": {"containers": [], "affinity": affinity}}, found)["spec"]
    nodes = [
        NodeView(name="a", labels={"pool": "x", "block": "b1", "kubernetes.io/hostname": "node-2.lan"}),
        NodeView(name="b", labels={"pool": "x", "block": "b1", "kubernetes.io/hostname": "other"}),
        NodeView(name="c", labels={"block": "b2", "kubernetes.io/hostname": "other"}),
    ]
    assert [node.name for node in nodes if matches_node_affinity(node, pod)] == ["a"]


def test_one_level_is_one_requirement_however_many_domains() -> None:
    names = [f"n{number}" for number in range(200)]
    found = Placement(levels=("kubernetes.io/hostname",), domains=tuple((name,) for name in names))
    pod = add_placement({"spec": {"containers": []}}, found)["spec"]
    (term,) = pod["affinity"]["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]["nodeSelectorTerms"]
    assert term == {"matchExpressions": [{"key": "kubernetes.io/hostname", "operator": "In", "values": sorted(names)}]}


@pytest.mark.parametrize(
    "change",
    [
        {"levels": []},
        {"slices": "no"},
        {"slices": [{"domainCount": 5000}]},
        {"slices": [{"domainCount": 1, "valuesPerLevel": [{"universal": "a"}]}]},
        {"slices": [{"domainCount": 2, "valuesPerLevel": [{"universal": "a"}, {"individual": {"roots": ["b"]}}]}]},
    ],
)
def test_a_topology_of_another_form_is_refused(change: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="topologyAssignment"):
        read_topology({**TOPOLOGY, **change}, "topologyAssignment")


def test_the_annotations_of_the_template_ask_for_a_level_of_the_topology() -> None:
    job = JobRef(name="gpt", namespace="ns", uid="job", labels={"kueue.x-k8s.io/queue-name": "team"})
    notes = {"kueue.x-k8s.io/podset-required-topology": "rack"}
    template = {**SPEC["template"], "metadata": {"annotations": notes}}
    (pods,) = workload_spec(job, parse_spec({**SPEC, "template": template}), least=1, most=2, priority=None)["podSets"]
    assert pods["topologyRequest"] == {
        "required": "rack", "podIndexLabel": "batch.kubernetes.io/job-completion-index",
    }  # fmt: skip
    (plain,) = workload_spec(job, parse_spec(SPEC), least=1, most=2, priority=None)["podSets"]
    assert "topologyRequest" not in plain
