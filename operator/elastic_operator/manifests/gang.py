"""PodGroups: the pods of an attempt start together or not at all. Pure.

Three schedulers have a kind of this name, each in a group of its own. An attempt has one PodGroup, because the number
of pods differs between attempts, and Kubernetes' own PodGroup and the field that names it are immutable.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from elastic_operator.api.spec import Gang

API_VERSIONS: Mapping[Gang, str] = {
    Gang.KUBERNETES: "scheduling.k8s.io/v1alpha2",
    Gang.COSCHEDULING: "scheduling.x-k8s.io/v1alpha1",
    Gang.VOLCANO: "scheduling.volcano.sh/v1beta1",
}
COSCHEDULING_LABEL = "scheduling.x-k8s.io/pod-group"
VOLCANO_ANNOTATION = "scheduling.k8s.io/group-name"
VOLCANO_SCHEDULER = "volcano"


def pod_group(gang: Gang, meta: Mapping[str, Any], num_pods: int) -> dict[str, Any]:
    """Build the PodGroup of an attempt.

    Args:
        gang: the mechanism.
        meta: metadata of the PodGroup.
        num_pods: number of pods of the attempt; none starts before all can.
    """
    if gang is Gang.KUBERNETES:
        spec: dict[str, Any] = {"schedulingPolicy": {"gang": {"minCount": num_pods}}}
    else:
        spec = {"minMember": num_pods}
    return {"apiVersion": API_VERSIONS[gang], "kind": "PodGroup", "metadata": dict(meta), "spec": spec}


def join_gang(template: dict[str, Any], gang: Gang, name: str) -> None:
    """Make the pods of a template members of the PodGroup `name`."""
    meta, pod = template.setdefault("metadata", {}), template["spec"]
    match gang:
        case Gang.KUBERNETES:
            pod["schedulingGroup"] = {"podGroupName": name}
        case Gang.COSCHEDULING:
            meta["labels"] = {**(meta.get("labels") or {}), COSCHEDULING_LABEL: name}
        case Gang.VOLCANO:
            meta["annotations"] = {**(meta.get("annotations") or {}), VOLCANO_ANNOTATION: name}
            pod.setdefault("schedulerName", VOLCANO_SCHEDULER)
