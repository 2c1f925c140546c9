"""The Workload with which a job asks Kueue for quota. Pure.

Kueue itself makes Workloads only for kinds that it knows. A Workload is public API, so the operator makes one for the
whole job: it asks for the largest number of nodes that the job can use, and accepts the smallest one.
"""

from __future__ import annotations

import copy
import hashlib
import json
from collections.abc import Mapping
from typing import Any

from elastic_operator.api.spec import Spec
from elastic_operator.manifests.attempt import JobRef, build_owned_metadata
from reshard.contract import GROUP

KUEUE = "kueue.x-k8s.io"
QUEUE_LABEL = f"{KUEUE}/queue-name"
"""Label of an ElasticTrainingJob that names its LocalQueue."""
PRIORITY_LABEL = f"{KUEUE}/priority-class"
"""Label that names its WorkloadPriorityClass."""
TIME_LIMIT_LABEL = f"{KUEUE}/max-exec-time-seconds"
"""Label with the time in seconds after which Kueue deactivates an admitted job."""
JOB_UID_LABEL = f"{KUEUE}/job-uid"
REPLACEMENT_FOR = f"{KUEUE}/workload-slice-replacement-for"
"""Annotation of a Workload: on its admission it takes over the quota of the Workload that this names."""
HASH = f"{GROUP}/workload-hash"
"""Annotation: digest of the spec that the operator wrote."""
PAUSED = f"{GROUP}/paused"
"""Annotation: the operator has deactivated the Workload, because spec.suspend is true."""
POD_SET = "workers"
INDEX_LABEL = "batch.kubernetes.io/job-completion-index"
_TOPOLOGY = {"required": f"{KUEUE}/podset-required-topology", "preferred": f"{KUEUE}/podset-preferred-topology"}
"""Annotations of the template that name a level of the topology, by the field of the request."""
_UNCONSTRAINED = f"{KUEUE}/podset-unconstrained-topology"

_OF_POD = (
    "nodeSelector", "affinity", "tolerations", "priorityClassName", "runtimeClassName", "overhead", "resources",
)  # fmt: skip
"""Fields of a pod that quota or the choice of a flavor depends on, besides its containers."""
_OF_CONTAINER = ("name", "image", "resources", "restartPolicy")
_MAX_SECONDS = 2_147_483_647


def queue_of(job: JobRef) -> str:
    """Return the name of the job's LocalQueue; empty if the job is in no queue."""
    return job.labels.get(QUEUE_LABEL, "")


def priority_class_of(job: JobRef) -> str:
    """Return the name of the job's WorkloadPriorityClass; empty for none."""
    return job.labels.get(PRIORITY_LABEL, "") if queue_of(job) else ""


def workload_name(job: str, number: int) -> str:
    """Return the name of a job's Workload."""
    return f"{job}-q{number}"


def workload_spec(job: JobRef, spec: Spec, *, least: int, most: int, priority: int | None) -> dict[str, Any]:
    """Build the spec of the Workload of a job.

    Args:
        job: the resource.
        spec: its spec.
        least: smallest number of nodes on which the job can run.
        most: largest number of nodes that it can use.
        priority: value of its WorkloadPriorityClass; None for none.
    """
    name = priority_class_of(job)
    reference = {"group": KUEUE, "kind": "WorkloadPriorityClass", "name": name}
    limit = job.labels.get(TIME_LIMIT_LABEL, "")
    seconds = int(limit) if limit.isdecimal() and 0 < int(limit) <= _MAX_SECONDS else 0
    return {
        "queueName": queue_of(job),
        **({"priorityClassRef": reference, "priority": priority} if name and priority is not None else {}),
        **({"maximumExecutionTimeSeconds": seconds} if seconds else {}),
        "podSets": [{"name": POD_SET, "count": most, "minCount": least, **_pods(spec)}],
    }


def workload(
    job: JobRef, number: int, spec: Mapping[str, Any], *, active: bool = True, replaces: str = ""
) -> dict[str, Any]:
    """Build a Workload.

    Args:
        job: the resource, which owns it.
        number: differs from that of the job's other Workloads.
        spec: its `workload_spec`.
        active: False to ask for nothing yet.
        replaces: name of the job's Workload that it replaces once it is admitted; empty for none.
    """
    meta = build_owned_metadata(job, workload_name(job.name, number))
    meta["labels"][JOB_UID_LABEL] = job.uid
    meta["annotations"] = {
        HASH: digest(spec),
        **({REPLACEMENT_FOR: f"{job.namespace}/{replaces}"} if replaces else {}),
        **({} if active else {PAUSED: "true"}),
    }
    return {
        "apiVersion": f"{KUEUE}/v1beta2",
        "kind": "Workload",
        "metadata": meta,
        "spec": {**spec, "active": active},
    }


def digest(spec: Mapping[str, Any]) -> str:
    """Return a digest of the spec of a Workload: of what each pod needs in which queue, a dash, of the whole."""
    (pods,) = spec["podSets"]
    kept = {key: value for key, value in pods.items() if key not in ("name", "count", "minCount")}
    return f"{_hash([spec['queueName'], kept])}-{_hash(spec)}"


def is_for_other_pods(text: str, job: JobRef, spec: Spec) -> bool:
    """Return whether a `digest` is that of a Workload for other pods, or for another queue, whatever their number."""
    return text.partition("-")[0] != _hash([queue_of(job), _pods(spec)])


def _hash(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()[:12]


def _pods(spec: Spec) -> dict[str, Any]:
    """Return what one pod needs: its template, and where it has to be in relation to the others."""
    notes = (spec.template.get("metadata") or {}).get("annotations") or {}
    request: dict[str, Any] = {field: notes[name] for field, name in _TOPOLOGY.items() if notes.get(name)}
    if notes.get(_UNCONSTRAINED) == "true":
        request["unconstrained"] = True
    topology = {"topologyRequest": {**request, "podIndexLabel": INDEX_LABEL}} if request else {}
    return {"template": _template(spec), **topology}


def _template(spec: Spec) -> dict[str, Any]:
    """Return the parts of the training pods' template that quota depends on, with the accelerators."""
    pod = spec.template["spec"]
    kept = {key: copy.deepcopy(pod[key]) for key in _OF_POD if key in pod}
    containers = [_container(item) for item in pod["containers"]]
    resources = containers[0].setdefault("resources", {})
    devices = {spec.accelerator.resource: str(max(spec.accelerator.per_node))}
    for part in ("limits", "requests"):
        resources[part] = {**(resources.get(part) or {}), **devices}
    first = [_container(item) for item in pod.get("initContainers") or ()]
    return {
        "spec": {
            **kept,
            "restartPolicy": "Never",
            **({"initContainers": first} if first else {}),
            "containers": containers,
        }
    }


def _container(container: Mapping[str, Any]) -> dict[str, Any]:
    return {key: copy.deepcopy(container[key]) for key in _OF_CONTAINER if container.get(key) is not None}
