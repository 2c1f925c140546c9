"""Every right of the operator's account, with the reason for it. The chart grants these and no others.

`tests/unit/elastic_operator/test_rights.py` compares this table with the chart, and `tests/cluster/test_rights.py`
with the requests that a real operator makes of a real API server.
"""

from __future__ import annotations

from typing import NamedTuple

GROUP = "elastictraining.dev"
RBAC = "rbac.authorization.k8s.io"
COORDINATION = "coordination.k8s.io"
KUEUE = "kueue.x-k8s.io"


class Right(NamedTuple):
    """One verb on one resource."""

    group: str
    resource: str
    verb: str


ASKED_BY_NOBODY = "not asked for itself: "
"""Begins the reason of what the API server demands of whoever asks for something else."""

_WHOSE = "whose it is, where its name is taken or before it is deleted"
_PART_OF_AN_ATTEMPT = {
    "get": _WHOSE,
    "create": "an attempt is launched",
    "delete": "a stopped attempt is fenced",
}

JOBS: dict[tuple[str, str], dict[str, str]] = {
    (GROUP, "elastictrainingjobs"): {
        "get": "a fresh look before anything is done",
        "list": "which jobs there are",
        "watch": "what changes in them",
        "delete": "a finished job whose spec.ttlSecondsAfterFinished has passed",
    },
    (GROUP, "elastictrainingjobs/status"): {"update": "the status is written"},
    (GROUP, "elastictrainingjobs/finalizers"): {
        "update": f"{ASKED_BY_NOBODY}owned objects block the owner's deletion (OwnerReferencesPermissionEnforcement)"
    },
    ("apps", "controllerrevisions"): {
        "get": "whose it is, where its name is taken",
        "list": "the spec that was accepted last",
        "create": "an accepted spec is kept",
        "delete": "a newer one has taken its place",
    },
    ("batch", "jobs"): {
        "get": "whose it is, where its name is taken",
        "list": "a fresh look",
        "watch": "how Jobs end",
        "create": "training and reshard Jobs, and dry runs of them",
        "delete": "an attempt is stopped",
    },
    ("", "services"): _PART_OF_AN_ATTEMPT,
    ("", "serviceaccounts"): _PART_OF_AN_ATTEMPT,
    ("policy", "poddisruptionbudgets"): _PART_OF_AN_ATTEMPT,
    (RBAC, "roles"): _PART_OF_AN_ATTEMPT,
    (RBAC, "rolebindings"): _PART_OF_AN_ATTEMPT,
    (KUEUE, "workloads"): {
        "get": "whose it is, where its name is taken",
        "list": "what Kueue says about a job",
        "watch": "when Kueue admits or evicts a job",
        "create": "a job asks for quota",
        "patch": "a job is suspended, or asks for something else",
        "delete": "a replaced one, or one of a job that has left its queue",
    },
    (KUEUE, "workloads/status"): {"patch": "quota is given back, a job has ended, its pods have started"},
    (COORDINATION, "leases"): {
        "get": f"{_WHOSE}; handed on to the attempt's pods",
        "list": "a fresh look",
        "watch": "heartbeats",
        "create": "an attempt is launched",
        "patch": "a drain is requested, commits are released; handed on to the attempt's pods",
        "delete": "a stopped attempt is fenced",
    },
    ("", "pods"): {
        "list": "a fresh look, and which accelerators are in use",
        "watch": "how pods fare",
        "delete": "a pod of a stopped attempt",
    },
    ("", "persistentvolumeclaims"): {"get": "whether a job's claim is bound, and to which volume"},
    ("", "events"): {
        "get": "how often an event has been told",
        "list": "why pods are missing",
        "create": "what is done is told",
        "patch": "an event is told again",
    },
}
"""In the namespaces of the jobs: all, or those of `watchNamespaces`."""

GANG: dict[tuple[str, str], dict[str, str]] = {
    (group, "podgroups"): _PART_OF_AN_ATTEMPT
    for group in ("scheduling.k8s.io", "scheduling.x-k8s.io", "scheduling.volcano.sh")
}
"""In the namespaces of the jobs too, with `rbac.podGroups`."""

CLUSTER: dict[tuple[str, str], dict[str, str]] = {
    ("", "nodes"): {"list": "which nodes there are", "watch": "how they fare"},
    ("scheduling.k8s.io", "priorityclasses"): {"list": "which of the waiting jobs takes nodes first"},
    ("", "persistentvolumes"): {"get": "from which nodes a job's volume can be reached"},
    ("storage.k8s.io", "storageclasses"): {"get": "where the volume of a claim that is not bound yet may be made"},
    ("apiextensions.k8s.io", "customresourcedefinitions"): {
        "list": "whether the kind is there",
        "watch": "when it comes, goes or changes",
    },
    (KUEUE, "resourceflavors"): {"get": "which nodes an admitted job may use"},
    (KUEUE, "workloadpriorityclasses"): {"get": "what the priority of a job is worth"},
}
"""Everywhere."""

SERVED: dict[tuple[str, str], dict[str, str]] = {
    ("", "pods"): {"list": "which accelerators are in use by pods of namespaces that are not served"},
    ("", "namespaces"): {"list": "whether the served ones are there", "watch": "when they come or go"},
}
"""Everywhere too, where `watchNamespaces` names some."""

NODES: dict[tuple[str, str], dict[str, str]] = {(COORDINATION, "leases"): {"list": "heartbeats of the kubelets"}}
"""In kube-node-lease, where `watchNamespaces` names some."""

LEADER: dict[tuple[str, str], dict[str, str]] = {
    (COORDINATION, "leases"): {
        "create": "the first leader",
        "get": "who leads",
        "update": "the leader goes on, or another takes over",
        "delete": f"{ASKED_BY_NOBODY}the Lease has an owner (OwnerReferencesPermissionEnforcement)",
    }
}
"""In the release's namespace; but for `create` the one Lease of that name only."""


def rights(*tables: dict[tuple[str, str], dict[str, str]]) -> set[Right]:
    """Return the rights of these tables."""
    return {Right(*resource, verb) for table in tables for resource, verbs in table.items() for verb in verbs}


def asked(*tables: dict[tuple[str, str], dict[str, str]]) -> set[Right]:
    """Return those that a request is made with."""
    return {
        Right(*resource, verb)
        for table in tables
        for resource, verbs in table.items()
        for verb, why in verbs.items()
        if not why.startswith(ASKED_BY_NOBODY)
    }
