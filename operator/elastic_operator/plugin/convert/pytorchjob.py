"""Reads a PyTorchJob (kubeflow.org/v1) of the Kubeflow Training Operator."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from elastic_operator.plugin.convert.section import ConvertError, Section
from elastic_operator.plugin.convert.workload import Workload, merge_templates, read_metadata, read_processes

KIND = ("kubeflow.org/v1", "PyTorchJob")
_CONTAINER = "pytorch"
"""Name of the container that trains, by the convention of the Training Operator."""


def read_pytorchjob(document: Section) -> Workload:
    """Read a PyTorchJob.

    Raises:
        ConvertError: it is no valid PyTorchJob, or has something that cannot be converted truly.
    """
    metadata = read_metadata(document)
    spec = document.section("spec")
    policy = spec.section("runPolicy")
    elastic = spec.section("elasticPolicy") if "elasticPolicy" in spec else None
    templates, counts = _read_replicas(spec.section("pytorchReplicaSpecs"))
    if not templates:
        raise ConvertError("spec.pytorchReplicaSpecs has neither Master nor Worker: there are no pods to convert")
    num_nodes, least_nodes = sum(counts.values()), None
    processes = read_processes(spec.take("nprocPerNode"), "spec.nprocPerNode")
    if elastic is not None:
        if "Master" in counts:
            raise ConvertError("spec.elasticPolicy counts workers alone: remove Master, and add its pod to Worker")
        processes = processes or read_processes(elastic.take("nProcPerNode"), "spec.elasticPolicy.nProcPerNode")
        least_nodes = elastic.whole("minReplicas", 1) or num_nodes
        num_nodes = elastic.whole("maxReplicas", 1) or num_nodes
        elastic.leave_out("the operator forms the group of ranks", *_RENDEZVOUS)
        elastic.leave_out("the operator counts failures by class: see spec.recovery", "maxRestarts")
        elastic.leave_out("the operator does not scale by metrics", "metrics")
        elastic.finish()
    workload = Workload(
        metadata=metadata,
        template=merge_templates(templates),
        template_path=next(iter(templates)),
        container=_CONTAINER,
        num_nodes=num_nodes,
        least_nodes=least_nodes,
        processes=processes,
        suspend=policy.flag("suspend"),
        active_deadline_seconds=policy.whole("activeDeadlineSeconds", 1),
        ttl_seconds_after_finished=policy.whole("ttlSecondsAfterFinished"),
    )
    policy.leave_out("the operator counts failures by class: see spec.recovery", "backoffLimit")
    policy.leave_out("see spec.failedAttemptsHistoryLimit for the pods that stay", "cleanPodPolicy")
    policy.leave_out("for pods that start together or not at all, see spec.gang", "schedulingPolicy")
    policy.leave_out("the elastic training operator manages the result", "managedBy")
    policy.finish()
    spec.finish()
    return workload


_RENDEZVOUS = ("rdzvBackend", "rdzvPort", "rdzvHost", "rdzvId", "rdzvConf", "standalone")


def _read_replicas(replicas: Section) -> tuple[dict[str, Mapping[str, Any]], dict[str, int]]:
    """Return the templates by their paths, and the numbers of pods by role."""
    templates: dict[str, Mapping[str, Any]] = {}
    counts: dict[str, int] = {}
    for role in ("Master", "Worker"):
        if role not in replicas:
            continue
        group = replicas.section(role)
        count = group.whole("replicas")
        counts[role] = 1 if count is None else count
        if role == "Master" and counts[role] > 1:
            raise ConvertError(f"{group.at('replicas')} is {counts[role]}: a PyTorchJob has one master")
        if counts[role]:
            templates[group.at("template")] = group.section("template").as_mapping()
        else:
            del counts[role]
        group.take("template")
        group.leave_out("the operator restarts all ranks together", "restartPolicy")
        group.finish()
    replicas.refuse("expected Master and Worker alone", *replicas.names())
    return templates, counts
