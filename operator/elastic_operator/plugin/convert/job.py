"""Makes an ElasticTrainingJob from a workload of another kind, and checks it as the operator would."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence
from typing import Any

from elastic_operator.api.spec import SpecError, parse_spec
from elastic_operator.plugin.convert import jobset, pytorchjob, trainjob
from elastic_operator.plugin.convert.pod import TrainingPod, make_training_pod
from elastic_operator.plugin.convert.section import ConvertError, Notes, Section
from elastic_operator.plugin.convert.workload import Workload
from reshard.contract import GROUP, KIND, VERSION

_NAME = re.compile(r"[a-z]([-a-z0-9]{0,38}[a-z0-9])?")
KINDS = (pytorchjob.KIND, trainjob.KIND, jobset.KIND)
"""API version and name of the kinds that are converted."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Choices:
    """Options for values of the result that the source does not hold.

    Attributes:
        claim: PersistentVolumeClaim for checkpoints; empty for the only one that the training mounts.
        path: folder inside the claim; empty for the name of the job.
        checkpoint_format: DeepSpeed or DCP.
        global_samples: samples per optimizer step; None if it is not known.
        micro_samples: samples per forward pass of a replica.
        least_nodes: smallest number of nodes; None for that of the source.
        accelerator: kind of accelerators; empty to find it.
    """

    claim: str = ""
    path: str = ""
    checkpoint_format: str = "DeepSpeed"
    global_samples: int | None = None
    micro_samples: int | None = None
    least_nodes: int | None = None
    accelerator: str = ""


def convert(objects: Sequence[Mapping[str, Any]], choices: Choices) -> tuple[dict[str, Any], Notes]:
    """Convert the one workload among these objects.

    Args:
        objects: what is in the files: the workload, for a TrainJob its runtime, and anything else.
        choices: what the source does not hold.

    Returns:
        the ElasticTrainingJob, and what its author has to know.

    Raises:
        ConvertError: there is not one workload, or it cannot be converted truly.
    """
    notes = Notes()
    workload = _read(objects, notes)
    pod = make_training_pod(workload, choices.accelerator, notes)
    name = workload.metadata["name"]
    if not _NAME.fullmatch(name):
        raise ConvertError(
            f"metadata.name is {name!r}: expected at most 40 lower-case letters, digits and '-', beginning with a "
            "letter; rename it in the file"
        )
    spec = _make_spec(workload, pod, choices, notes)
    try:
        parse_spec(spec)
    except SpecError as error:
        raise ConvertError(f"the result would be no valid ElasticTrainingJob: {error}") from None
    _add_decisions(spec, choices, notes)
    job = {
        "apiVersion": f"{GROUP}/{VERSION}",
        "kind": KIND,
        "metadata": dict(workload.metadata),
        "spec": spec,
    }
    return job, notes


def _read(objects: Sequence[Mapping[str, Any]], notes: Notes) -> Workload:
    by_kind = [((item.get("apiVersion"), item.get("kind")), item) for item in objects]
    found = [(kind, item) for kind, item in by_kind if kind in KINDS]
    if len(found) != 1:
        known = ", ".join(f"{kind} ({version})" for version, kind in KINDS)
        there = ", ".join(f"{kind} ({version})" for (version, kind), _ in by_kind) or "nothing"
        raise ConvertError(f"expected one of {known} in the files, found {there}")
    ((kind, item),) = found
    for (version, other), value in by_kind:
        if value is not item and (version, other) not in trainjob.RUNTIMES:
            notes.leave_out(f"{other} ({version})", "it stays as it is: apply it as before, if the training needs it")
    document = Section(item, "", notes)
    for name in ("apiVersion", "kind", "status"):
        document.take(name)
    if kind == pytorchjob.KIND:
        workload = pytorchjob.read_pytorchjob(document)
    elif kind == jobset.KIND:
        workload = jobset.read_jobset(document)
    else:
        runtimes = [value for other, value in by_kind if other in trainjob.RUNTIMES]
        workload = trainjob.read_trainjob(document, runtimes, notes)
    document.finish()
    return workload


def _make_spec(workload: Workload, pod: TrainingPod, choices: Choices, notes: Notes) -> dict[str, Any]:
    if choices.global_samples is None:
        raise ConvertError(
            f"a {KIND} says how many samples an optimizer step has on all GPUs together, which the source does not: "
            "give --global-samples"
        )
    least = choices.least_nodes or workload.least_nodes or workload.num_nodes
    spec: dict[str, Any] = {}
    if workload.suspend:
        spec["suspend"] = True
        notes.decide("spec.suspend", "true, as in the source: the job starts after `kubectl etj resume`")
    times = {
        "activeDeadlineSeconds": workload.active_deadline_seconds,
        "ttlSecondsAfterFinished": workload.ttl_seconds_after_finished,
    }
    spec |= {name: seconds for name, seconds in times.items() if seconds is not None}
    return spec | {
        "accelerator": {"resource": pod.resource, "perNode": [pod.num_accelerators]},
        "nodes": {"min": least, "max": workload.num_nodes, "podsPerNode": "Many"},
        "parallelism": {"tensor": [1], "pipeline": [1]},
        "batch": {"globalSamples": choices.global_samples, "microSamples": choices.micro_samples or 1},
        "checkpoint": {
            "claimName": choices.claim or _only_claim(pod),
            "path": choices.path or workload.metadata["name"],
            "format": choices.checkpoint_format,
        },
        "template": pod.template,
    }


def _only_claim(pod: TrainingPod) -> str:
    if len(pod.claims) != 1:
        mounted = ", ".join(pod.claims) or "none"
        raise ConvertError(
            f"the training mounts {mounted} as PersistentVolumeClaim: name the one for checkpoints with --claim; it "
            "must be ReadWriteMany"
        )
    return pod.claims[0]


def _add_decisions(spec: Mapping[str, Any], choices: Choices, notes: Notes) -> None:
    nodes, checkpoint = spec["nodes"], spec["checkpoint"]
    notes.decide(
        "the training script",
        "it must save, restore and stop by elastic_trainer, and the image must hold it: see docs/trainer.md",
    )
    notes.decide(
        "spec.checkpoint",
        f"claim {checkpoint['claimName']}, folder {checkpoint['path']}, format {checkpoint['format']}; every pod "
        "mounts the claim, so it must be ReadWriteMany",
    )
    if nodes["min"] == nodes["max"]:
        notes.decide(
            "spec.nodes",
            f"min is {nodes['min']}, so that the job waits while a node is missing; lower it (--min-nodes) to train on "
            "fewer",
        )
    notes.decide(
        "spec.nodes.podsPerNode",
        "Many, as in the source: pods may share a node, and min and max count pods; remove it if a pod fills its node",
    )
    notes.decide(
        "spec.parallelism",
        "data parallelism alone; list the degrees of tensor and pipeline parallelism that the script can run, and add "
        "spec.model",
    )
    if choices.micro_samples is None:
        notes.decide("spec.batch.microSamples", "1, as the source does not say it (--micro-samples)")
