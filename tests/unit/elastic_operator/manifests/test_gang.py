"""PodGroups of three schedulers: one for each attempt, and pods that name it in the way of their scheduler."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from elastic_operator.api.spec import parse_spec, spec_hash
from elastic_operator.api.status import Current
from elastic_operator.client.resources import kind_of
from elastic_operator.manifests.attempt import JobRef, attempt_objects
from reshard.topology import Topology
from tests.unit.elastic_operator.reconcile.test_decide_phases import SPEC

JOB = JobRef(name="gpt", namespace="ns", uid="uid")
CURRENT = Current(topology=Topology(dp=4), num_nodes=2, gpus_per_node=2)


def objects(**spec: Any) -> list[dict[str, Any]]:
    return attempt_objects(JOB, parse_spec({**SPEC, **spec}), 3, CURRENT, 5)


@pytest.mark.parametrize(
    ("gang", "group", "spec", "path", "value"),
    [
        (
            "Kubernetes", "scheduling.k8s.io", {"schedulingPolicy": {"gang": {"minCount": 2}}},
            ("spec", "schedulingGroup"), {"podGroupName": "gpt-a3"},
        ),
        (
            "Coscheduling", "scheduling.x-k8s.io", {"minMember": 2},
            ("metadata", "labels", "scheduling.x-k8s.io/pod-group"), "gpt-a3",
        ),
        (
            "Volcano", "scheduling.volcano.sh", {"minMember": 2},
            ("metadata", "annotations", "scheduling.k8s.io/group-name"), "gpt-a3",
        ),
    ],
)  # fmt: skip
def test_the_pods_of_an_attempt_are_one_group(
    gang: str, group: str, spec: dict[str, Any], path: tuple[str, ...], value: Any
) -> None:
    *_, made, job = objects(gang=gang)
    assert (made["kind"], made["metadata"]["name"], made["spec"]) == ("PodGroup", "gpt-a3", spec)
    assert kind_of(made).group == group
    found = job["spec"]["template"]
    for key in path:
        found = found[key]
    assert found == value


def test_volcanos_pods_have_its_scheduler_unless_they_name_one() -> None:
    assert objects(gang="Volcano")[-1]["spec"]["template"]["spec"]["schedulerName"] == "volcano"
    template = {"spec": {**SPEC["template"]["spec"], "schedulerName": "mine"}}
    assert objects(gang="Volcano", template=template)[-1]["spec"]["template"]["spec"]["schedulerName"] == "mine"


def test_without_a_gang_nothing_changes_also_not_the_hash_of_a_running_attempt() -> None:
    assert "PodGroup" not in [item["kind"] for item in objects()]
    plain = parse_spec(SPEC)
    assert spec_hash(plain) != spec_hash(dataclasses.replace(plain, gang=parse_spec({**SPEC, "gang": "Volcano"}).gang))


def test_kinds_of_the_same_name_are_told_apart_by_their_group() -> None:
    groups = {kind_of({"apiVersion": version, "kind": "PodGroup"}).group for version in (
        "scheduling.k8s.io/v1alpha2", "scheduling.x-k8s.io/v1alpha1", "scheduling.volcano.sh/v1beta1",
    )}  # fmt: skip
    assert len(groups) == 3
