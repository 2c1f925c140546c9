"""Reads a TrainJob (trainer.kubeflow.org/v1alpha1) of the Kubeflow Trainer together with its runtime.

A TrainJob says little by itself: template, volumes and policy are in the runtime that it refers to.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

from elastic_operator.plugin.convert.jobset import leave_out_policies, read_replicated_job
from elastic_operator.plugin.convert.section import ConvertError, Notes, Section
from elastic_operator.plugin.convert.workload import Workload, read_metadata, read_processes

KIND = ("trainer.kubeflow.org/v1alpha1", "TrainJob")
RUNTIMES = (
    ("trainer.kubeflow.org/v1alpha1", "ClusterTrainingRuntime"),
    ("trainer.kubeflow.org/v1alpha1", "TrainingRuntime"),
)
_CONTAINER = "node"
"""Name of the replicated job and of the container that trains, by the convention of the Kubeflow Trainer."""
_INITIALIZER = "an ElasticTrainingJob has no steps before the training: put model and data on a volume, and remove it"
_PATCHED = "write what it changes into the runtime's template, and remove it"


def read_trainjob(document: Section, runtimes: Sequence[Mapping[str, Any]], notes: Notes) -> Workload:
    """Read a TrainJob.

    Args:
        document: the TrainJob.
        runtimes: the runtimes that are in the same files.
        notes: for fields of the runtime that are left out.

    Raises:
        ConvertError: the runtime is missing, or something cannot be converted truly.
    """
    metadata = read_metadata(document)
    spec = document.section("spec")
    spec.refuse(_INITIALIZER, "initializer", "datasetConfig", "modelConfig")
    spec.refuse(_PATCHED, "podTemplateOverrides", "runtimePatches")
    runtime = _find_runtime(spec.section("runtimeRef"), metadata.get("namespace"), runtimes, notes)
    trainer = spec.section("trainer")
    policy, template, path = _read_runtime(runtime)
    torch = policy.section("torch")
    elastic = torch.section("elasticPolicy")
    template = _apply_trainer(template, trainer, path)
    processes = trainer.take("numProcPerNode")
    of_runtime = torch.take("numProcPerNode")
    num_nodes = trainer.whole("numNodes", 1) or elastic.whole("maxNodes", 1) or policy.whole("numNodes", 1) or 1
    policy.take("numNodes")
    workload = Workload(
        metadata=metadata,
        template=template,
        template_path=path,
        container=_CONTAINER,
        num_nodes=num_nodes,
        least_nodes=elastic.whole("minNodes", 1),
        processes=read_processes(of_runtime if processes is None else processes, "numProcPerNode"),
        suspend=spec.flag("suspend"),
        active_deadline_seconds=spec.whole("activeDeadlineSeconds", 1),
    )
    elastic.leave_out("the operator counts failures by class: see spec.recovery", "maxRestarts")
    elastic.leave_out("the operator does not scale by metrics", "metrics")
    spec.leave_out("the elastic training operator manages the result", "managedBy")
    policy.refuse("only runtimes for torch are converted", *policy.names())
    for section in (elastic, torch, trainer, spec):
        section.finish()
    return workload


def _find_runtime(
    reference: Section, namespace: object, runtimes: Sequence[Mapping[str, Any]], notes: Notes
) -> Section:
    """Return the spec of the runtime that a TrainJob refers to; a TrainingRuntime is in the TrainJob's namespace."""
    name, kind = reference.text("name"), reference.text("kind") or "ClusterTrainingRuntime"
    reference.take("apiGroup")
    found = []
    for runtime in runtimes:
        metadata = runtime.get("metadata")
        if runtime.get("kind") != kind or not isinstance(metadata, Mapping) or metadata.get("name") != name:
            continue
        own = metadata.get("namespace")
        if kind != "TrainingRuntime" or not own or not namespace or own == namespace:
            found.append(runtime)
    where = f" of namespace {namespace}" if namespace and kind == "TrainingRuntime" else ""
    if len(found) > 1:
        raise ConvertError(
            f"spec.runtimeRef names the {kind} {name!r}{where}, which the files hold {len(found)} times: expected once"
        )
    if found:
        return Section(found[0].get("spec"), f"{kind} {name}: spec", notes)
    raise ConvertError(
        f"spec.runtimeRef names the {kind} {name!r}{where}, which is in no file: the template of the pods is in it; "
        f"save it with `kubectl get {kind.lower()} {name} -o yaml > runtime.yaml`, and give it with a second -f"
    )


def _read_runtime(runtime: Section) -> tuple[Section, Mapping[str, Any], str]:
    """Return the policy of a runtime, its pod template, and the path of the template."""
    policy = runtime.section("mlPolicy")
    runtime.leave_out("for pods that start together or not at all, see spec.gang", "podGroupPolicy")
    template = runtime.section("template")
    template.leave_out("it belongs to the JobSets of the runtime", "metadata")
    jobset = template.section("spec")
    jobs = jobset.sections("replicatedJobs")
    if len(jobs) != 1:
        raise ConvertError(
            f"{runtime.path} has {len(jobs)} replicatedJobs: expected one, whose pods train; an ElasticTrainingJob has "
            "no steps before the training"
        )
    path, pods, count = read_replicated_job(jobs[0])
    if count != 1:
        raise ConvertError(f"{path}: expected one pod, as the Trainer sets the number of nodes; found {count}")
    leave_out_policies(jobset)
    template.finish()
    runtime.finish()
    return policy, pods, path


def _apply_trainer(template: Mapping[str, Any], trainer: Section, path: str) -> Mapping[str, Any]:
    """Return the template with what `spec.trainer` sets on the container that trains."""
    result: dict[str, Any] = copy.deepcopy(dict(template))
    pod = result.get("spec")
    containers = pod.get("containers") if isinstance(pod, dict) else None
    all_containers = containers if isinstance(containers, list) else []
    named = [item for item in all_containers if isinstance(item, dict) and item.get("name") == _CONTAINER]
    if len(named) != 1:
        raise ConvertError(f"{path}.spec.containers: expected one container with the name {_CONTAINER}")
    (container,) = named
    changes = {"image": trainer.text("image"), "command": trainer.texts("command"), "args": trainer.texts("args")}
    container |= {name: value for name, value in changes.items() if value}
    if resources := trainer.take("resourcesPerNode"):
        container["resources"] = resources
    own = _read_variables(trainer.take("env"), trainer.at("env"))
    if own:
        names = [item.get("name") for item in own]
        before = _read_variables(container.get("env"), f"{path}: env of container {_CONTAINER}")
        container["env"] = [*(item for item in before if item.get("name") not in names), *own]
    return result


def _read_variables(value: Any, path: str) -> list[dict[str, Any]]:
    variables = [] if value is None else value
    if not isinstance(variables, list) or not all(isinstance(item, dict) for item in variables):
        raise ConvertError(f"{path}: expected a list of variables")
    return variables
