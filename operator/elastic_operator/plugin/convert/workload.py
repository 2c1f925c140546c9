"""The common form of a PyTorchJob, a TrainJob and a JobSet: pods of one kind, each with the same accelerators."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from elastic_operator.plugin.convert.section import ConvertError, Section

_KEPT_METADATA = ("labels", "annotations")
_OF_ONE_OBJECT = ("ownerReferences", "finalizers")
_WRITTEN_BY_KUBECTL = "kubectl.kubernetes.io/last-applied-configuration"
_OF_THE_SOURCE = ("jobset.sigs.k8s.io/", "alpha.jobset.sigs.k8s.io/", "trainer.kubeflow.org/", "training.kubeflow.org/")
"""Labels and annotations that only the controller of the source understands."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """A training that was read from another resource.

    Attributes:
        metadata: name, namespace, labels and annotations.
        template: of the pods.
        template_path: where the template is in the source, for notes.
        container: name of the container that trains by the convention of the source; empty if there is none.
        num_nodes: number of pods.
        least_nodes: smallest number of pods, if the source is elastic; else None.
        processes: training processes in each pod; None if the source leaves it open.
    """

    metadata: Mapping[str, Any]
    template: Mapping[str, Any]
    template_path: str
    container: str = ""
    num_nodes: int
    least_nodes: int | None = None
    processes: int | None = None
    suspend: bool = False
    active_deadline_seconds: int | None = None
    ttl_seconds_after_finished: int | None = None


def read_metadata(document: Section) -> dict[str, Any]:
    """Take the metadata of an object: what its author wrote, without what the cluster adds."""
    metadata = document.section("metadata")
    name = metadata.text("name")
    if not name:
        raise ConvertError("metadata.name is missing: checkpoints belong to a job by its name, so it needs one")
    leave_out_metadata(metadata)
    found: dict[str, Any] = {"name": name}
    if namespace := metadata.text("namespace"):
        found["namespace"] = namespace
    for field in _KEPT_METADATA:
        texts = metadata.section(field)
        texts.take(_WRITTEN_BY_KUBECTL)
        texts.leave_out(
            "only the controller of the source understands it",
            *(key for key in texts.names() if key.startswith(_OF_THE_SOURCE)),
        )
        values = {key: texts.text(key) for key in texts.names()}
        if values:
            found[field] = values
    return found


def leave_out_metadata(metadata: Section) -> None:
    """Note what metadata says about one object, and not about its copies."""
    metadata.leave_out("it is about the object of the source", *_OF_ONE_OBJECT)


def read_processes(value: Any, path: str) -> int | None:
    """Read a number of processes per pod, which may be `auto` or `gpu`: one for each accelerator."""
    if value is None or value in ("auto", "gpu"):
        return None
    if isinstance(value, str) and value.isdecimal():
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ConvertError(f"{path} is {value!r}: expected a number, auto or gpu; trainings on CPUs are not converted")
    return value


def merge_templates(templates: Mapping[str, Mapping[str, Any]]) -> Mapping[str, Any]:
    """Return the template that all groups of pods share.

    Args:
        templates: by the path of each.

    Raises:
        ConvertError: two of them differ.
    """
    (first_path, first), *others = templates.items()
    for path, template in others:
        if difference := _find_difference(dict(first), dict(template)):
            raise ConvertError(
                f"{first_path} and {path} differ at {difference}: all pods of an ElasticTrainingJob are made from one "
                "template; make them equal, or keep the pods that do not train in a workload of their own"
            )
    return first


def _find_difference(one: Any, other: Any, path: str = "") -> str:
    """Return the path at which two templates differ; empty if they are equal."""
    keys: list[Any] = []
    if isinstance(one, dict) and isinstance(other, dict):
        keys = list(dict.fromkeys([*one, *other]))
        if missing := next((key for key in keys if key not in one or key not in other), None):
            return f"{path}.{missing}".lstrip(".")
    elif isinstance(one, list) and isinstance(other, list) and len(one) == len(other):
        keys = list(range(len(one)))
    elif one != other:
        return path or "."
    below = (_find_difference(one[key], other[key], f"{path}.{key}".lstrip(".")) for key in keys)
    return next(filter(None, below), "")
