"""Workloads and flavors are read strictly: what has another type than Kueue's API is named, and never raises."""

from __future__ import annotations

from typing import Any

import pytest

from elastic_operator.observed.queueing.placement import Placement, add_placement, read_flavor
from elastic_operator.observed.queueing.workloads import QueueView, select_own_workloads, workload_view


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
