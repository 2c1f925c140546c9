"""Reads a JobSet (jobset.x-k8s.io/v1alpha2)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from elastic_operator.plugin.convert.section import ConvertError, Section
from elastic_operator.plugin.convert.workload import Workload, merge_templates, read_metadata

KIND = ("jobset.x-k8s.io/v1alpha2", "JobSet")
_COUNTED = "the operator counts failures by class: see spec.recovery"
_CLAIMS = "volumeClaimPolicies"
_NO_ORDER = "all pods of the training start together"


def read_jobset(document: Section) -> Workload:
    """Read a JobSet all of whose pods train.

    Raises:
        ConvertError: it is no valid JobSet, or has something that cannot be converted truly.
    """
    metadata = read_metadata(document)
    spec = document.section("spec")
    jobs = spec.sections("replicatedJobs")
    if not jobs:
        raise ConvertError("spec.replicatedJobs is empty: there are no pods to convert")
    read = [read_replicated_job(job) for job in jobs]
    workload = Workload(
        metadata=metadata,
        template=merge_templates({path: template for path, template, _ in read}),
        template_path=read[0][0],
        num_nodes=sum(count for _, _, count in read),
        suspend=spec.flag("suspend"),
        ttl_seconds_after_finished=spec.whole("ttlSecondsAfterFinished"),
    )
    leave_out_policies(spec)
    return workload


def leave_out_policies(spec: Section) -> None:
    """Note what a JobSet says besides its pods; refuse what the pods cannot do without."""
    spec.refuse("it makes claims that the pods mount: make them, name them in the template, and remove it", _CLAIMS)
    spec.leave_out("the operator gives each attempt a Service of its own", "network", "coordinator")
    spec.leave_out("the job is Complete when all pods of an attempt have succeeded", "successPolicy")
    spec.leave_out(_COUNTED, "failurePolicy")
    spec.leave_out(_NO_ORDER, "startupPolicy")
    spec.leave_out("the elastic training operator manages the result", "managedBy")
    spec.finish()


def read_replicated_job(job: Section) -> tuple[str, Mapping[str, Any], int]:
    """Return the path of the pod template, the template, and the number of pods of one entry of `replicatedJobs`."""
    job.take("name")
    replicas = job.whole("replicas", 1) or 1
    job.leave_out(_NO_ORDER, "dependsOn")
    job.leave_out("an ElasticTrainingJob has one group of pods", "groupName")
    outer = job.section("template")
    outer.leave_out("it belongs to the Jobs of the source", "metadata")
    spec = outer.section("spec")
    pods = spec.whole("parallelism", 1) or 1
    completions = spec.whole("completions", 1)
    if completions not in (None, pods):
        raise ConvertError(
            f"{spec.at('completions')} is {completions}, but parallelism is {pods}: all ranks of a training run at "
            "once; make them equal"
        )
    path, template = spec.at("template"), spec.section("template").as_mapping()
    spec.take("completionMode")
    spec.leave_out(_COUNTED, "backoffLimit", "backoffLimitPerIndex", "maxFailedIndexes", "podReplacementPolicy")
    spec.leave_out("rules for exit codes are in spec.recovery.podFailurePolicy", "podFailurePolicy")
    spec.leave_out("a time limit of the whole job is spec.activeDeadlineSeconds", "activeDeadlineSeconds")
    spec.leave_out("the job is Complete when all pods of an attempt have succeeded", "successPolicy")
    spec.leave_out("a job is deleted by its own spec.ttlSecondsAfterFinished", "ttlSecondsAfterFinished")
    spec.finish()
    outer.finish()
    job.finish()
    return path, template, replicas * pods
