"""Rules in a pod template about the nodes of its pods. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

HOSTNAME = "kubernetes.io/hostname"


def avoid_nodes(pod: dict[str, Any], avoid: Sequence[str]) -> None:
    """Exclude nodes by node affinity, in addition to the user's requirements.

    Every term gets the exclusion, because the terms of a node selector are alternatives.
    """
    if not avoid:
        return
    fields = [{"key": "metadata.name", "operator": "NotIn", "values": [name]} for name in avoid]
    affinity = pod.setdefault("affinity", {}).setdefault("nodeAffinity", {})
    required = affinity.setdefault("requiredDuringSchedulingIgnoredDuringExecution", {})
    terms = required.get("nodeSelectorTerms") or [{}]
    required["nodeSelectorTerms"] = [
        {**term, "matchFields": [*(term.get("matchFields") or []), *fields]} for term in terms
    ]


def tolerate_resources(pod: Mapping[str, Any], accelerator: str) -> dict[str, Any]:
    """Return a pod spec that tolerates taints with an extended resource that it requests as key, and effect NoSchedule.

    Such taints keep pods without accelerators away. The admission plugin ExtendedResourceToleration adds the same
    tolerations, but only some clusters enable it.

    Args:
        pod: spec of a training pod.
        accelerator: resource of which the operator sets the request.
    """
    names = {accelerator}
    for container in (*(pod.get("initContainers") or ()), *(pod.get("containers") or ())):
        resources = container.get("resources") or {}
        names.update(resources.get("requests") or (), resources.get("limits") or ())
    added = [
        {"key": name, "operator": "Exists", "effect": "NoSchedule"}
        for name in sorted(names)
        if "/" in name and "kubernetes.io/" not in name
    ]
    own = list(pod.get("tolerations") or ())
    return {**pod, "tolerations": [*own, *(item for item in added if item not in own)]}


def separate_pods(pod: dict[str, Any], labels: Mapping[str, str]) -> None:
    """Keep two pods with these labels off the same node, in addition to the user's rules."""
    affinity = pod.setdefault("affinity", {}).setdefault("podAntiAffinity", {})
    terms = affinity.get("requiredDuringSchedulingIgnoredDuringExecution") or []
    term = {"topologyKey": HOSTNAME, "labelSelector": {"matchLabels": dict(labels)}}
    affinity["requiredDuringSchedulingIgnoredDuringExecution"] = [*terms, term]
