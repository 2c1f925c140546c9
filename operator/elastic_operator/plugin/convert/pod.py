"""Makes the pod template of an ElasticTrainingJob from that of another workload."""

from __future__ import annotations

import copy
import dataclasses
import re
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

from pydantic import ConfigDict, ValidationError

from elastic_operator.api.admission_rules import SET_BY_THE_OPERATOR
from elastic_operator.api.pod_template import TrainingPodTemplate
from elastic_operator.api.schema_types import OPEN, CheckedAs, to_camel_case, without_nulls
from elastic_operator.api.serialization import adapter_of
from elastic_operator.api.validation import find_problems, shorten
from elastic_operator.plugin.convert.launcher import remove_launch_options
from elastic_operator.plugin.convert.section import ConvertError, Notes, Section
from elastic_operator.plugin.convert.workload import Workload, leave_out_metadata

_SET_FOR_RANKS = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "NODE_RANK")
"""Variables that the launcher sets for each rank; the number of ranks changes between attempts."""

_ACCELERATOR = re.compile(r"gpu|tpu|npu|gaudi|neuron|mig-|dcu|mlu")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Pods:
    """Requirements of the resource on a pod template."""

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(alias_generator=to_camel_case)

    template: Annotated[Mapping[str, Any], CheckedAs(TrainingPodTemplate), OPEN]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TrainingPod:
    """The pod of the result, and what was found in it.

    Attributes:
        template: PodTemplateSpec; the first container trains.
        resource: kind of its accelerators.
        num_accelerators: number of accelerators.
        claims: PersistentVolumeClaims that the training container mounts.
    """

    template: dict[str, Any]
    resource: str
    num_accelerators: int
    claims: tuple[str, ...]


def make_training_pod(workload: Workload, resource: str, notes: Notes) -> TrainingPod:
    """Make the pod template, without what the operator sets by itself.

    Args:
        workload: what was read.
        resource: kind of accelerators that the user named; empty to find it.
        notes: for what is left out.

    Raises:
        ConvertError: it is unclear which container trains or on which accelerators, or the template has something
            that cannot be converted truly.
    """
    path = workload.template_path
    template = _read_template(workload.template, path)
    pod: dict[str, Any] = template["spec"]
    containers: list[dict[str, Any]] = pod["containers"]
    training = _find_training_container(containers, workload.container, f"{path}.spec.containers")
    if training is not containers[0]:
        pod["containers"] = [training, *(item for item in containers if item is not training)]
        notes.decide("spec.template", f"the container {training.get('name')} comes first, because the first one trains")
    place = f"{path}.spec.containers[{containers.index(training)}]"
    resource = resource or _find_resource(training, place)
    count = _take_accelerators(training, resource, place)
    pod = _clean_pod(pod, f"{path}.spec", notes)
    _clean_environment(training, place, notes)
    _clean_command(training, workload.processes, count, place, notes)
    found: dict[str, Any] = {}
    metadata = Section(template.get("metadata") or {}, f"{path}.metadata", notes)
    leave_out_metadata(metadata)
    kept = {name: metadata.section(name).as_mapping() for name in ("labels", "annotations")}
    if kept := {name: value for name, value in kept.items() if value}:
        found["metadata"] = kept
    return TrainingPod(
        template={**found, "spec": pod}, resource=resource, num_accelerators=count, claims=_find_claims(pod, training)
    )


def _read_template(value: Mapping[str, Any], path: str) -> dict[str, Any]:
    """Copy a pod template without nulls, and check the types of the fields that are used here."""
    template: dict[str, Any] = copy.deepcopy(dict(without_nulls(value)))
    adapter = adapter_of(_Pods)
    try:
        adapter.validate_python({"template": template})
    except ValidationError as error:
        problem = next(find_problems(adapter, error))
        found = f"is {shorten(problem.value)}: expected {problem.expected}" if problem.expected else "is missing"
        raise ConvertError(f"{problem.path(path.removesuffix('.template'))} {found}") from None
    if not template["spec"]["containers"]:
        raise ConvertError(f"{path}.spec.containers is empty: expected the container that trains")
    return template


def _find_training_container(containers: list[dict[str, Any]], name: str, path: str) -> dict[str, Any]:
    named = [item for item in containers if item.get("name") == name]
    candidates = named or ([item for item in containers if _requested(item)] if len(containers) > 1 else containers)
    if len(candidates) != 1:
        names = ", ".join(str(item.get("name")) for item in containers)
        raise ConvertError(f"{path}: expected one container that asks for accelerators, among {names}")
    return candidates[0]


def _requested(container: Mapping[str, Any]) -> dict[str, Any]:
    """Return the extended resources of a container."""
    resources = container.get("resources") or {}
    merged = {**(resources.get("requests") or {}), **(resources.get("limits") or {})}
    return {
        name: value
        for name, value in merged.items()
        if "/" in name and not name.partition("/")[0].endswith("kubernetes.io")
    }


def _find_resource(container: Mapping[str, Any], path: str) -> str:
    extended = _requested(container)
    found = [name for name in extended if _ACCELERATOR.search(name)]
    if len(found) == 1:
        return found[0]
    if not extended:
        raise ConvertError(
            f"{path}.resources asks for no accelerators: an ElasticTrainingJob trains on accelerators of a device "
            "plugin, for instance amd.com/gpu"
        )
    raise ConvertError(f"{path}.resources asks for {', '.join(extended)}: name the accelerator with --accelerator")


def _take_accelerators(container: dict[str, Any], resource: str, path: str) -> int:
    """Remove the accelerators from the container's resources, and return their number."""
    value = _requested(container).get(resource)
    count = int(value) if isinstance(value, str) and value.isdecimal() else value
    if isinstance(count, bool) or not isinstance(count, int) or count < 1:
        shown = "none" if value is None else repr(value)
        raise ConvertError(f"{path}.resources: expected a whole number of {resource} from 1 on, found {shown}")
    for part in ("requests", "limits"):
        quantities = container["resources"].get(part) or {}
        quantities.pop(resource, None)
        if not quantities:
            container["resources"].pop(part, None)
    if not container["resources"]:
        del container["resources"]
    return count


def _clean_pod(pod: Mapping[str, Any], path: str, notes: Notes) -> dict[str, Any]:
    section = Section(pod, path, notes)
    section.refuse("it would put all pods on one node; use nodeSelector or affinity", "nodeName")
    if section.take("restartPolicy") not in (None, "Never"):
        notes.leave_out(section.at("restartPolicy"), "the operator restarts all ranks together")
    section.leave_out("the operator sets it, so that the ranks find each other", "hostname", "subdomain")
    section.leave_out("a time limit of the whole job is spec.activeDeadlineSeconds", "activeDeadlineSeconds")
    return dict(section.as_mapping())


def _clean_environment(container: dict[str, Any], path: str, notes: Notes) -> None:
    kept = []
    for item in container.get("env") or ():
        name = item.get("name")
        if name in (*SET_BY_THE_OPERATOR, *_SET_FOR_RANKS) or str(name).startswith("PET_"):
            notes.leave_out(f"{path}.env {name}", "it depends on the attempt, and operator and launcher set it")
        else:
            kept.append(item)
    container.pop("env", None)
    if kept:
        container["env"] = kept


def _clean_command(container: dict[str, Any], processes: int | None, count: int, path: str, notes: Notes) -> None:
    section = Section(container, path, notes)
    command, args = section.texts("command") or [], section.texts("args") or []
    cleaned = remove_launch_options(command, args, path)
    processes = cleaned.processes or processes
    if processes not in (None, count):
        raise ConvertError(
            f"{path}: starts {processes} processes for {count} accelerators: the operator starts one for each; make "
            "both numbers equal"
        )
    for option in cleaned.removed:
        notes.leave_out(f"{path} {option}", "the operator sets it for every attempt")
    for name, tokens in (("command", cleaned.command), ("args", cleaned.args)):
        container.pop(name, None)
        if tokens:
            container[name] = list(tokens)
    if not cleaned.starts_ranks:
        notes.decide(
            "spec.template",
            "the command starts neither torchrun nor elastic_trainer.launch, as far as can be seen; the operator sets "
            "PET_* variables and no RANK: start the script with one of them",
        )


def _find_claims(pod: Mapping[str, Any], container: Mapping[str, Any]) -> tuple[str, ...]:
    mounted = {item["name"] for item in container.get("volumeMounts") or ()}
    volumes = [item for item in pod.get("volumes") or () if item["name"] in mounted]
    names = [(item.get("persistentVolumeClaim") or {}).get("claimName") for item in volumes]
    return tuple(dict.fromkeys(name for name in names if name))
