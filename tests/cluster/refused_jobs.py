"""Resources that are refused, each with the beginning of what is said about it; and what they are made of."""

from __future__ import annotations

import copy
from typing import Any

JOB: dict[str, Any] = {
    "apiVersion": "elastictraining.dev/v1beta1",
    "kind": "ElasticTrainingJob",
    "metadata": {"name": "gpt"},
    "spec": {
        # Suspended: an operator that happens to run on this cluster starts nothing.
        "suspend": True,
        "accelerator": {"resource": "amd.com/gpu", "perNode": [2]},
        "nodes": {"min": 1, "max": 3},
        "batch": {"globalSamples": 20, "microSamples": 2},
        "checkpoint": {"claimName": "ckpt", "path": "gpt"},
        "template": {
            "spec": {"containers": [{"name": "train", "image": "image", "env": [{"name": "A", "value": "b"}]}]}
        },
    },
}
MODEL = {
    "parameters": 7.0e9,
    "layers": 32,
    "hiddenSize": 4096,
    "attentionHeads": 32,
    "keyValueHeads": 8,
    "vocabSize": 128256,
    "sequenceLength": 8192,
}


def with_field(path: str, value: Any, *, base: dict[str, Any] = JOB) -> dict[str, Any]:
    job = copy.deepcopy(base)
    *folders, name = path.split(".")
    here = job
    for folder in folders:
        here = here.setdefault(folder, {})
    here[name] = value
    return job


def started_with(**options: str) -> dict[str, Any]:
    start = with_field("spec.checkpoint.startFrom", "old/global_step10")
    return with_field("spec.checkpoint.startOptions", options, base=start)


def pod(**fields: Any) -> dict[str, Any]:
    """The job with other fields in its pod."""
    return with_field("spec.template.spec", {**JOB["spec"]["template"]["spec"], **fields})


def container(**fields: Any) -> dict[str, Any]:
    """The job with other fields in its training container."""
    return pod(containers=[{"name": "train", "image": "image", **fields}])


def parallelism(*, model: dict[str, Any] | None = None, **fields: Any) -> dict[str, Any]:
    """The job with other degrees, and a model if there is one."""
    job = with_field("spec.parallelism", fields)
    return job if model is None else with_field("spec.model", {**MODEL, **model}, base=job)


SIDECAR = {"name": "side", "image": "image"}
ONE_GPU = {"resources": {"limits": {"amd.com/gpu": 1}}}

# (message of the rule begins with, what breaks it)
REFUSED_AT_CREATION = [
    ("metadata.name may have at most 40", with_field("metadata.name", "a" * 41)),
    ("metadata.name must begin with a lower-case letter", with_field("metadata.name", "7b")),
    ("metadata.name must begin with a lower-case letter", with_field("metadata.name", "llama.7b")),
    ("spec.accelerator.resource must be an extended", with_field("spec.accelerator.resource", "gpu")),
    ("spec.nodes: min must not be above max", with_field("spec.nodes", {"min": 4, "max": 3})),
    ("spec.nodes.preferred must lie between", with_field("spec.nodes", {"min": 1, "max": 3, "preferred": 4})),
    ("spec.nodes.allowed: none", with_field("spec.nodes", {"min": 2, "max": 3, "allowed": [1, 4]})),
    ("spec.parallelism: strategy Fixed or Ranked needs", with_field("spec.parallelism", {"strategy": "Ranked"})),
    ("spec.parallelism: topologies is only for", with_field("spec.parallelism", {"topologies": [{"tensor": 2}]})),
    (
        "spec.parallelism: strategy Fixed takes exactly one",
        with_field("spec.parallelism", {"strategy": "Fixed", "topologies": [{"tensor": 2}, {"tensor": 1}]}),
    ),
    (
        "spec.parallelism.topologies: zeroStage 2 or 3",
        with_field("spec.parallelism", {"strategy": "Fixed", "topologies": [{"pipeline": 2, "zeroStage": 3}]}),
    ),
    (
        "spec.parallelism: zeroStage 2 or 3 cannot run with a pipeline",
        with_field("spec.parallelism", {"zeroStage": 2, "pipeline": [2, 4]}),
    ),
    ("spec.reshard.mode Load is only for", with_field("spec.reshard", {"mode": "Load"})),
    (
        "spec.reshard.mode Virtual is not for",
        with_field("spec.reshard", {"mode": "Virtual"}, base=with_field("spec.checkpoint.format", "DCP")),
    ),
    ("spec.batch.globalSamples must be a multiple", with_field("spec.batch", {"globalSamples": 20, "microSamples": 3})),
    ("spec.model: keyValueHeads must divide", with_field("spec.model", {**MODEL, "keyValueHeads": 5})),
    (
        "spec.model: expertParameters is part of",
        with_field("spec.model", {**MODEL, "experts": 8, "expertParameters": 8.0e9}),
    ),
    ("spec.model: expertParameters needs experts", with_field("spec.model", {**MODEL, "expertParameters": 1.0e9})),
    ("spec.checkpoint.path must be relative", with_field("spec.checkpoint.path", "/gpt")),
    ("spec.checkpoint.path must be relative", with_field("spec.checkpoint.path", "a/../../b")),
    ("spec.checkpoint.path may hold", with_field("spec.checkpoint.path", "gpt/")),
    ("spec.checkpoint.path may hold", with_field("spec.checkpoint.path", "a//b")),
    ("spec.checkpoint.path may hold", with_field("spec.checkpoint.path", "$(HOME)/gpt")),
    ("spec.checkpoint.path may hold", with_field("spec.checkpoint.path", "my run")),
    ("spec.checkpoint.startFrom must be relative", with_field("spec.checkpoint.startFrom", "/checkpoint/old")),
    ("spec.checkpoint.startFrom must be relative", with_field("spec.checkpoint.startFrom", "../old")),
    ("spec.checkpoint.startFrom may hold", with_field("spec.checkpoint.startFrom", "old/")),
    ("spec.checkpoint.startFrom may hold", with_field("spec.checkpoint.startFrom", "$(HOME)")),
    ("spec.checkpoint.startFrom lies where", with_field("spec.checkpoint.startFrom", "gpt")),
    (
        "spec.checkpoint: takeOver Resume goes on",
        with_field("spec.checkpoint.startFrom", "old", base=with_field("spec.checkpoint.takeOver", "Resume")),
    ),
    ("spec.checkpoint.startFrom lies where", with_field("spec.checkpoint.startFrom", "gpt/a3/step-00000005")),
    (
        "spec.checkpoint.startFrom lies where",
        with_field("spec.checkpoint", {"claimName": "ckpt", "path": "", "startFrom": "a3"}),
    ),
    ("spec.checkpoint.startOptions.patterns must be relative", started_with(patterns="/checkpoint/patterns.yaml")),
    ("spec.checkpoint.startOptions.patterns may hold", started_with(patterns="$(HOME)/patterns.yaml")),
    ("spec.checkpoint.startOptions.names must be relative", started_with(names="/names.yaml")),
    ("spec.checkpoint.startOptions.names may hold", started_with(names="my names.yaml")),
    ("spec.checkpoint.startOptions.like must be relative", started_with(like="../like")),
    ("spec.checkpoint.startOptions.like may hold", started_with(like="like/")),
    (
        "spec.checkpoint.startOptions says how to read startFrom",
        with_field("spec.checkpoint", {"claimName": "ckpt", "startOptions": {"names": "names.yaml"}}),
    ),
    *(
        ("spec.checkpoint.resumeFrom must be", with_field("spec.checkpoint.resumeFrom", word))
        for word in ("Nothing", "a2", "/checkpoint/gpt/a2/step-00000005", "a2/step-00000005\n")
    ),
    *(
        ("spec.checkpoint.allowedGlobals: expected", with_field("spec.checkpoint.allowedGlobals", ["a.B", name]))
        for name in ("Progress", "mine.*", "mine..B", "mine.B\n", "mine.Gr\u00f6\u00dfe")
    ),
    ("spec.checkpoint.claimName must be the name", with_field("spec.checkpoint.claimName", "My_Claim")),
    ("spec.accelerator.resource: the domain", with_field("spec.accelerator.resource", "kubernetes.io/gpu")),
    ("spec.accelerator.resource: the domain", with_field("spec.accelerator.resource", "node.kubernetes.io/gpu")),
    (
        "spec.nodes.preferred must be one of allowed",
        with_field("spec.nodes", {"min": 1, "max": 4, "preferred": 3, "allowed": [2, 4]}),
    ),
    ("spec.parallelism.tensor: no degree divides a number", parallelism(tensor=[3, 4])),
    ("spec.parallelism: the smallest tensor times", parallelism(tensor=[2], pipeline=[4, 8])),
    (
        "spec.batch.globalSamples is too small",
        with_field("spec.nodes", {"min": 11, "max": 12}),
    ),
    (
        "spec.parallelism.topologies: none can run",
        parallelism(strategy="Ranked", topologies=[{"tensor": 4}, {"data": 5}]),
    ),
    (
        "spec.batch.globalSamples is not a multiple of microSamples * data",
        parallelism(strategy="Fixed", topologies=[{"data": 4}]),
    ),
    (
        "spec.parallelism.topologies: data must be a multiple",
        parallelism(strategy="Fixed", topologies=[{"data": 2, "context": 4}]),
    ),
    ("spec.parallelism.tensor: no degree divides attentionHeads", parallelism(tensor=[2], model={"hiddenSize": 4095})),
    ("spec.parallelism.tensor: no degree divides attentionHeads", parallelism(tensor=[2], model={"keyValueHeads": 1})),
    (
        "spec.parallelism.tensor: no degree divides attentionHeads",
        parallelism(tensor=[2], model={"vocabSize": 101, "padVocabulary": False}),
    ),
    ("spec.parallelism.pipeline: every number", parallelism(pipeline=[3, 6], model={"layers": 2})),
    ("spec.parallelism.expert: no degree", parallelism(expert=[2, 4], model={"experts": 0})),
    ("spec.parallelism.expert: no degree", parallelism(expert=[4], model={"experts": 6})),
    ("spec.parallelism.context: no degree", parallelism(context=[3], model={})),
    ("spec.model: expertsPerToken cannot", with_field("spec.model", {**MODEL, "experts": 4, "expertsPerToken": 8})),
    ("spec.template.spec.restartPolicy must be Never", pod(restartPolicy="OnFailure")),
    ("spec.template.spec.activeDeadlineSeconds would", pod(activeDeadlineSeconds=3600)),
    ("spec.template.spec.hostNetwork needs", pod(hostNetwork=True)),
    ("spec.template.spec.nodeName would", pod(nodeName="gpu-1")),
    ("spec.template.spec.hostname and subdomain", pod(hostname="rank")),
    ("spec.template.spec.hostname and subdomain", pod(subdomain="ranks")),
    ("spec.template: only the first container", pod(containers=[SIDECAR, {**SIDECAR, "name": "b", **ONE_GPU}])),
    ("spec.template: an init container asks", pod(initContainers=[{**SIDECAR, **ONE_GPU}])),
    (
        "spec.reshard.template: a container asks",
        with_field("spec.reshard", {"template": {"spec": {"containers": [{**SIDECAR, **ONE_GPU}]}}}),
    ),
    (
        "spec.reshard.template.spec.restartPolicy must",
        with_field("spec.reshard", {"template": {"spec": {"restartPolicy": "Always", "containers": [SIDECAR]}}}),
    ),
    ("spec.managedBy must be a name with its domain", with_field("spec.managedBy", "multikueue")),
    ("spec.reshard.parallelism is not for mode", with_field("spec.reshard", {"mode": "Virtual", "parallelism": 2})),
    ("spec.reshard.resources asks for", with_field("spec.reshard", ONE_GPU)),
    (
        "spec.reshard.resources is not for a template",
        with_field(
            "spec.reshard",
            {"template": {"spec": {"containers": [SIDECAR]}}, "resources": {"requests": {"memory": "1Gi"}}},
        ),
    ),
]
# What the operator overwrites in any pod that it makes; an old resource with it does no harm.
REFUSED_AT_ADMISSION_ONLY = [
    ("spec.template: resources.limits of the first container", container(resources={"limits": {"amd.com/gpu": 8}})),
    ("spec.template: resources.limits of the first container", container(resources={"limits": {"amd.com/gpu": "1"}})),
    ("spec.template: resources.requests of the first container", container(resources={"requests": {"amd.com/gpu": 1}})),
    ("spec.template: the first container sets a variable", container(env=[{"name": "ETJ_RESUME", "value": "/mine"}])),
    ("spec.template: the first container sets a variable", container(env=[{"name": "MASTER_ADDR", "value": "a"}])),
]
# (what the API server's own words for a broken schema must name, what breaks it)
REFUSED_BY_SCHEMA = [
    ("spec.accelerator.perNode[1]: Duplicate value: 2", with_field("spec.accelerator.perNode", [2, 2])),
    ("spec.accelerator.perNode in body should have at least 1 items", with_field("spec.accelerator.perNode", [])),
    ("spec.nodes.allowed[1]: Duplicate value: 2", with_field("spec.nodes", {"min": 1, "max": 3, "allowed": [2, 2]})),
    ("spec.parallelism.tensor[1]: Duplicate value: 1", parallelism(tensor=[1, 1])),
    ('supported values: "Auto", "Fixed", "Ranked"', parallelism(strategy="Best")),
    ('supported values: "DeepSpeed"', with_field("spec.checkpoint.format", "Megatron")),
    ('supported values: "RetainTopology", "Fail"', with_field("spec.reshard", {"onFailure": "Ignore"})),
    ("spec.template.spec.containers in body should have at least 1", with_field("spec.template.spec.containers", [])),
    ("spec.template.spec: Required value", with_field("spec.template", {})),
    ("spec.template.spec.containers[0].image: Required value", pod(containers=[{"name": "train"}])),
    ("spec.template.spec.containers[0].name: Required value", pod(containers=[{"image": "image"}])),
    ("spec.nodes.max: Required value", with_field("spec.nodes", {"min": 1})),
    ("spec.checkpoint.claimName: Invalid value", with_field("spec.checkpoint.claimName", "")),
    (
        'spec.recovery.hangSeconds in body must be of type integer: "string"',
        with_field("spec.recovery", {"hangSeconds": "30m"}),
    ),
]
REFUSED_CHANGES: list[tuple[str, dict[str, Any]]] = [
    *(
        (f"spec.model.{name} cannot change", with_field("spec.model", {**MODEL, name: value}))
        for name, value in (
            ("layers", 31),
            ("hiddenSize", 8192),
            ("attentionHeads", 64),
            ("keyValueHeads", 16),
            ("vocabSize", 32000),
            ("padVocabulary", False),
            ("experts", 8),
        )
    ),
    ("spec.managedBy cannot change", with_field("spec.managedBy", "kueue.x-k8s.io/multikueue")),
    ("spec.accelerator.resource cannot change", with_field("spec.accelerator.resource", "nvidia.com/gpu")),
    ("spec.checkpoint: claimName, path and format", with_field("spec.checkpoint.claimName", "other")),
    ("spec.checkpoint: claimName, path and format", with_field("spec.checkpoint.path", "other")),
]
# (message, the job as it was created, the change)
REFUSED_WITHDRAWALS = [
    ("spec.model cannot be removed", with_field("spec.model", MODEL), JOB),
    (
        "spec.checkpoint.takeOver cannot be withdrawn",
        with_field("spec.checkpoint.takeOver", "Begin"),
        with_field("spec.checkpoint.takeOver", "Never"),
    ),
]
REFUSED_ONCE_STARTED = [
    ("spec.checkpoint.startFrom cannot change", with_field("spec.checkpoint.startFrom", "old/global_step200")),
    ("spec.checkpoint.startFrom cannot change", with_field("spec.checkpoint.startFrom", "")),
    ("spec.checkpoint.startOptions cannot change", started_with(names="names.yaml")),
]
