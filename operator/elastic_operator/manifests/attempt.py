"""Builders of all objects that belong to one attempt. Pure.

All objects of attempt N of job J are named `<J>-aN`, are owned by the ElasticTrainingJob and never change once created.
The reshard Job that converts a checkpoint *into* attempt N's layout is `<J>-aN-reshard`. The checkpoint claim belongs
to the user and never gets an owner.
"""

from __future__ import annotations

import copy
import dataclasses
import itertools
import posixpath
from collections.abc import Mapping, Sequence
from typing import Any

from elastic_operator.api.pod_template import MAIN_CONTAINER
from elastic_operator.api.spec import Spec
from elastic_operator.api.status import Current, short
from elastic_operator.manifests.gang import join_gang, pod_group
from elastic_operator.manifests.placement import avoid_nodes, separate_pods, tolerate_resources
from elastic_operator.manifests.ports import rendezvous_port
from elastic_operator.manifests.reshard_pod import ReshardImage, reshard_template
from reshard.contract import GROUP, KIND, VERSION, Env, Label, TakeOver

CHECKPOINT_MOUNT = "/checkpoint"
MANAGER = "elastic-training-operator"
DRAIN_REQUESTED = f"{GROUP}/drain-requested"
"""Annotation of an ElasticTrainingJob that requests a commit, an exit and a new start."""
RETRY_REQUESTED = f"{GROUP}/retry-requested"
"""Annotation that requests that a Failed job goes on from its newest commit."""
_VOLUME = "etj-checkpoint"
_SCRATCH_VOLUME = "etj-scratch"
SCRATCH_MOUNT = "/etj-scratch"
_DEFAULT_CONTAINER = "kubectl.kubernetes.io/default-container"
_INDEX = "batch.kubernetes.io/job-completion-index"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class JobRef:
    """Identity of an ElasticTrainingJob, and the requests in its annotations.

    Attributes:
        drain_request: value of the annotation DRAIN_REQUESTED, empty for none; see `reconcile.user_requests`.
        retry_request: value of the annotation RETRY_REQUESTED, likewise.
        created_at: by the API server's clock; None if unknown.
        version: resourceVersion that this was read from; ignored in comparisons.
    """

    name: str
    namespace: str
    uid: str
    generation: int = 0
    labels: Mapping[str, str] = dataclasses.field(default_factory=dict)
    drain_request: str = ""
    retry_request: str = ""
    created_at: float | None = None
    version: str = dataclasses.field(default="", compare=False)


def attempt_name(job: str, attempt: int) -> str:
    """Return the name of all objects of one attempt."""
    return f"{job}-a{attempt}"


def reshard_name(job: str, attempt: int) -> str:
    """Return the name of the reshard Job that converts into the layout of `attempt`."""
    return f"{job}-a{attempt}-reshard"


def selector(job: str) -> str:
    """Return the label selector of all objects that were created for a job."""
    return f"{Label.JOB}={job}"


def account_of(template: Mapping[str, Any]) -> str:
    """Return the name of the ServiceAccount in a pod template, empty if there is none.

    `serviceAccount` is the older name of the same field; it counts if the newer one is empty.
    """
    pod = template.get("spec") or {}
    return str(pod.get("serviceAccountName") or pod.get("serviceAccount") or "")


def checkpoint_root(spec: Spec, template: Mapping[str, Any] | None = None) -> str:
    """Return the folder of the job's checkpoints as its pods see it: below the mount of the claim."""
    return f"{_mount(spec, template)}/{spec.checkpoint.path}".rstrip("/")


def _mount(spec: Spec, template: Mapping[str, Any] | None = None) -> str:
    pod = (template or spec.template).get("spec") or {}
    mount = _claim_mount(pod, spec.checkpoint.claim_name) or CHECKPOINT_MOUNT
    # Normalize as the trainer and `reshard` do, because commits are identified by their paths.
    return f"/{posixpath.normpath(mount).lstrip('/')}".rstrip("/")


def commit_uri(root: str, attempt: int, step: int, mark: str = "") -> str:
    """Return the folder of a commit; `mark` is a suffix, for when another job may have used the plain name."""
    return f"{root}/a{attempt}/step-{step:08d}{f'-{mark}' if mark else ''}"


def start_source(spec: Spec) -> str:
    """Return the folder from which a job without commits starts, as its pods see it; empty for none.

    It is `spec.checkpoint.startFrom`, or the job's own root, which `takeOver: Resume` takes over.
    """
    if spec.checkpoint.take_over is TakeOver.RESUME:
        return checkpoint_root(spec)
    start = spec.checkpoint.start_from
    return f"{_mount(spec)}/{start}" if start else ""


def start_field(spec: Spec) -> str:
    """Return the path of the field that `start_source` comes from; empty for none."""
    if spec.checkpoint.take_over is TakeOver.RESUME:
        return "spec.checkpoint.takeOver"
    return "spec.checkpoint.startFrom" if spec.checkpoint.start_from else ""


def start_arguments(spec: Spec) -> list[str]:
    """Return the arguments of `reshard run` for the source `start_source`."""
    # `reshard` finds the commit in a root that it takes over; a folder of others may hold one checkpoint or several.
    which = "--require-commit" if spec.checkpoint.take_over is TakeOver.RESUME else "--newest"
    options = dataclasses.asdict(spec.checkpoint.start_options)
    path_options = [(f"--{name}", f"{_mount(spec)}/{path}") for name, path in options.items() if path]
    return [which, "--format", spec.checkpoint.format.lower(), *itertools.chain(*path_options)]


def start_uri(root: str, attempt: int, mark: str = "") -> str:
    """Return the folder of the commit that is converted from `start_source`, whose step is unknown.

    The name begins with `step-`, because the trainer prunes only folders with this prefix.
    """
    return f"{root}/a{attempt}/step-start{f'-{mark}' if mark else ''}"


def attempt_objects(
    job: JobRef, spec: Spec, attempt: int, current: Current, heartbeat_seconds: float
) -> list[dict[str, Any]]:
    """Build all objects of an attempt, in the order of creation; the Job comes last."""
    user_account = account_of(spec.template)
    name = attempt_name(job.name, attempt)
    account = {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": _meta(job, name, attempt)}
    return [
        *([] if user_account else [account]),
        _role(job, name, attempt),
        _role_binding(job, name, attempt, user_account or name),
        _service(job, name, attempt, rendezvous_port(job.uid, attempt, spec.template)),
        _lease(job, name, attempt, heartbeat_seconds),
        *([_disruption_budget(job, name, attempt, current)] if spec.recovery.pod_disruption_budget else []),
        *([pod_group(spec.gang, _meta(job, name, attempt), current.num_nodes)] if spec.gang is not None else []),
        training_job(job, spec, attempt, current, heartbeat_seconds),
    ]


def training_job(job: JobRef, spec: Spec, attempt: int, current: Current, heartbeat_seconds: float) -> dict[str, Any]:
    """Build the Indexed Job of one attempt: one pod per node; failed pods are never replaced."""
    name = attempt_name(job.name, attempt)
    template = _template(spec.template, _labels(job, attempt, "worker"))
    pod = template["spec"] = tolerate_resources(template["spec"], spec.accelerator.resource)
    pod["subdomain"] = name
    pod["restartPolicy"] = "Never"
    _set_account(pod, account_of(template) or name)
    pod["automountServiceAccountToken"] = True
    _mount_claim(pod, spec.checkpoint.claim_name)
    avoid_nodes(pod, current.avoid)
    if spec.nodes.pods_per_node == "One":
        separate_pods(pod, _identity(job, attempt, "worker"))
    if spec.gang is not None:
        join_gang(template, spec.gang, name)
    if spec.may_be_virtual:
        _add_scratch(pod)
    main = pod["containers"][0]
    resources = main.setdefault("resources", {})
    for part in ("limits", "requests"):
        resources[part] = {**(resources.get(part) or {}), spec.accelerator.resource: str(current.gpus_per_node)}
    grace_seconds = int(pod.get("terminationGracePeriodSeconds", 30))
    main["env"] = _merged_env(
        main.get("env") or [],
        _training_env(job, spec, attempt, current, heartbeat_seconds=heartbeat_seconds, grace_seconds=grace_seconds),
    )
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": _meta(job, name, attempt, "worker"),
        "spec": {
            "completions": current.num_nodes,
            "parallelism": current.num_nodes,
            "completionMode": "Indexed",
            "backoffLimit": 0,
            "podReplacementPolicy": "Failed",
            "template": template,
        },
    }


def reshard_job(
    job: JobRef,
    spec: Spec,
    attempt: int,
    current: Current,
    image: ReshardImage | None = None,
    *,
    mode: tuple[str, ...] = (),
    oom_kills: int = 0,
) -> dict[str, Any]:
    """Build the Job that converts `current.resume.source` into `current.resume.uri`.

    Args:
        job: the resource.
        spec: its spec.
        attempt: number of the attempt that resumes from the result.
        current: plan of that attempt.
        image: the operator's image for reshard pods, if any.
        mode: arguments that permit a virtual commit, which refers to bytes instead of copying them.
        oom_kills: number of earlier tries that ran out of memory; each doubles the memory.
    """
    pods = reshard_template(spec, image, current.resume.source, oom_kills=oom_kills)
    template = _template(pods, _labels(job, attempt, "reshard"))
    pod = template["spec"]
    pod["restartPolicy"] = "Never"
    pod["automountServiceAccountToken"] = False
    _mount_claim(pod, spec.checkpoint.claim_name)
    avoid_nodes(pod, current.avoid)
    main = pod["containers"][0]
    main.setdefault("command", ["reshard"])
    main["args"] = [
        "run",
        current.resume.source,
        current.resume.uri,
        "--to",
        short(current.topology),
        "--report",
        "/dev/termination-log",
        "--attempt",
        str(attempt),
        # A plain DeepSpeed folder has no COMMIT.json; it may hold several checkpoints, or another format.
        *(start_arguments(spec) if current.resume.external else ("--require-commit",)),
        *(word for name in spec.checkpoint.allowed_globals for word in ("--allow-global", name)),
        *mode,
    ]
    owner = [{"name": str(key), "value": value} for key, value in _owner_env(job, spec).items()]
    main["env"] = _merged_env(main.get("env") or [], owner)
    count = 1 if mode else spec.reshard.parallelism
    if count > 1:
        # Workers share a journal, so each one continues what the others have done.
        main["args"] += ["--worker", f"$(JOB_COMPLETION_INDEX)/{count}"]
    elif not mode:
        # Even on the first try: unfinished work is kept for a retry only with this option.
        main["args"].append("--resume")
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": _meta(job, reshard_name(job.name, attempt), attempt, "reshard"),
        "spec": {
            **(_share_conversion(count) if count > 1 else {"backoffLimit": 0}),
            "activeDeadlineSeconds": spec.reshard.timeout_seconds,
            "template": template,
        },
    }


def worker_labels(job: JobRef, template: Mapping[str, Any]) -> dict[str, str]:
    """Return the labels of a job's training pods that are the same in all attempts."""
    labels = (template.get("metadata") or {}).get("labels") or {}
    return {**labels, **_common(job), str(Label.ROLE): "worker"}


def _set_account(pod: dict[str, Any], name: str) -> None:
    pod.pop("serviceAccount", None)
    pod["serviceAccountName"] = name


def _share_conversion(count: int) -> dict[str, Any]:
    """Build the Job fields for pods that share a conversion: one success completes it, only all failures fail it."""
    return {
        "completions": count,
        "parallelism": count,
        "completionMode": "Indexed",
        "backoffLimitPerIndex": 0,
        "maxFailedIndexes": count,
        "successPolicy": {"rules": [{"succeededCount": 1}]},
    }


def _training_env(
    job: JobRef, spec: Spec, attempt: int, current: Current, *, heartbeat_seconds: float, grace_seconds: int
) -> list[dict[str, Any]]:
    name = attempt_name(job.name, attempt)
    master = f"{name}-0.{name}"
    port = str(rendezvous_port(job.uid, attempt, spec.template))
    values: dict[str, str] = {
        **_owner_env(job, spec),
        Env.ATTEMPT: str(attempt),
        Env.TOPOLOGY: current.topology.to_json(),
        Env.WORLD_SIZE: str(current.num_nodes * current.gpus_per_node),
        Env.GLOBAL_BATCH: str(spec.batch.global_samples),
        Env.MICRO_BATCH: str(spec.batch.micro_samples),
        Env.CHECKPOINT_INTERVAL_SECONDS: str(spec.checkpoint.interval_seconds),
        Env.RESUME: current.resume.uri,
        Env.GRACE_SECONDS: str(grace_seconds),
        Env.LEASE: name,
        Env.HEARTBEAT_SECONDS: f"{heartbeat_seconds:g}",
        "PET_NNODES": str(current.num_nodes),
        "PET_NPROC_PER_NODE": str(current.gpus_per_node),
        "PET_MASTER_ADDR": master,
        "PET_MASTER_PORT": port,
        "MASTER_ADDR": master,
        "MASTER_PORT": port,
    }
    rank = {"fieldRef": {"fieldPath": f"metadata.annotations['{_INDEX}']"}}
    return [
        *({"name": str(key), "value": value} for key, value in values.items()),
        {"name": "PET_NODE_RANK", "valueFrom": rank},
    ]


def _owner_env(job: JobRef, spec: Spec) -> dict[str, str]:
    """Return the environment variables that tell a pod which checkpoint root it may write to."""
    return {
        Env.JOB: job.name,
        Env.NAMESPACE: job.namespace,
        Env.JOB_UID: job.uid,
        Env.TAKE_OVER: spec.checkpoint.take_over.value,
        Env.CHECKPOINT_ROOT: checkpoint_root(spec),
    }


def _template(template: Mapping[str, Any], labels: Mapping[str, str]) -> dict[str, Any]:
    result: dict[str, Any] = copy.deepcopy(dict(template))
    meta = result.setdefault("metadata", {}) or {}
    meta["labels"] = {**(meta.get("labels") or {}), **labels}
    main = result["spec"]["containers"][0]["name"]
    meta["annotations"] = {_DEFAULT_CONTAINER: main, **(meta.get("annotations") or {}), MAIN_CONTAINER: main}
    result["metadata"] = meta
    return result


def _add_scratch(pod: dict[str, Any]) -> None:
    """Mount memory for files that ranks read through a virtual commit, unless the user sets a folder."""
    main = pod["containers"][0]
    if any(item["name"] == Env.SCRATCH for item in main.get("env") or ()):
        return
    pod["volumes"] = [*(pod.get("volumes") or []), {"name": _SCRATCH_VOLUME, "emptyDir": {"medium": "Memory"}}]
    main["volumeMounts"] = [*(main.get("volumeMounts") or []), {"name": _SCRATCH_VOLUME, "mountPath": SCRATCH_MOUNT}]
    main["env"] = [*(main.get("env") or []), {"name": str(Env.SCRATCH), "value": SCRATCH_MOUNT}]


def _mount_claim(pod: dict[str, Any], claim: str) -> None:
    if _claim_mount(pod, claim):
        return
    volume = next((item["name"] for item in pod.get("volumes") or () if _is_claim(item, claim)), None)
    if volume is None:
        volume = _VOLUME
        pod["volumes"] = [
            *(pod.get("volumes") or []),
            {"name": volume, "persistentVolumeClaim": {"claimName": claim}},
        ]
    main = pod["containers"][0]
    main["volumeMounts"] = [*(main.get("volumeMounts") or []), {"name": volume, "mountPath": CHECKPOINT_MOUNT}]


def _claim_mount(pod: Mapping[str, Any], claim: str) -> str | None:
    volumes = {item.get("name") for item in pod.get("volumes") or () if _is_claim(item, claim)}
    mounts = pod["containers"][0].get("volumeMounts") or ()
    return next((item["mountPath"] for item in mounts if item.get("name") in volumes), None)


def _is_claim(volume: Mapping[str, Any], claim: str) -> bool:
    return (volume.get("persistentVolumeClaim") or {}).get("claimName") == claim


def _merged_env(user: Sequence[Mapping[str, Any]], ours: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    # The operator's variables come first, so that the user's can refer to them by $(NAME).
    names = {item["name"] for item in ours}
    return [*map(dict, ours), *(dict(item) for item in user if item["name"] not in names)]


def _role(job: JobRef, name: str, attempt: int) -> dict[str, Any]:
    rule = {
        "apiGroups": ["coordination.k8s.io"],
        "resources": ["leases"],
        "resourceNames": [name],
        "verbs": ["get", "patch"],
    }
    return {
        "apiVersion": "rbac.authorization.k8s.io/v1",
        "kind": "Role",
        "metadata": _meta(job, name, attempt),
        "rules": [rule],
    }


def _role_binding(job: JobRef, name: str, attempt: int, account: str) -> dict[str, Any]:
    return {
        "apiVersion": "rbac.authorization.k8s.io/v1",
        "kind": "RoleBinding",
        "metadata": _meta(job, name, attempt),
        "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": name},
        "subjects": [{"kind": "ServiceAccount", "name": account, "namespace": job.namespace}],
    }


def _service(job: JobRef, name: str, attempt: int, port: int) -> dict[str, Any]:
    # Rendezvous starts before any pod is Ready, so addresses must be published immediately.
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": _meta(job, name, attempt),
        "spec": {
            "clusterIP": "None",
            "publishNotReadyAddresses": True,
            "selector": _identity(job, attempt, "worker"),
            "ports": [{"name": "rendezvous", "port": port}],
        },
    }


def _lease(job: JobRef, name: str, attempt: int, heartbeat_seconds: float) -> dict[str, Any]:
    return {
        "apiVersion": "coordination.k8s.io/v1",
        "kind": "Lease",
        "metadata": _meta(job, name, attempt),
        "spec": {"leaseDurationSeconds": max(1, round(3 * heartbeat_seconds))},
    }


def _disruption_budget(job: JobRef, name: str, attempt: int, current: Current) -> dict[str, Any]:
    """Build the PodDisruptionBudget with which the API server refuses evictions while the attempt runs.

    It states `minAvailable` as a number, because Kubernetes computes `maxUnavailable` only for pods of controllers with
    a scale subresource, which Jobs do not have.
    """
    return {
        "apiVersion": "policy/v1",
        "kind": "PodDisruptionBudget",
        "metadata": _meta(job, name, attempt),
        "spec": {
            "minAvailable": current.num_nodes,
            "selector": {"matchLabels": _identity(job, attempt, "worker")},
            # A pod that does not work has nothing to commit, so nothing is lost with it.
            "unhealthyPodEvictionPolicy": "AlwaysAllow",
        },
    }


def build_owned_metadata(job: JobRef, name: str) -> dict[str, Any]:
    """Build the metadata of an object that the job owns and that belongs to no attempt."""
    return _owned(job, name, _common(job))


def _meta(job: JobRef, name: str, attempt: int, role: str = "") -> dict[str, Any]:
    return _owned(job, name, _labels(job, attempt, role))


def _owned(job: JobRef, name: str, labels: Mapping[str, str]) -> dict[str, Any]:
    owner = {
        "apiVersion": f"{GROUP}/{VERSION}",
        "kind": KIND,
        "name": job.name,
        "uid": job.uid,
        "controller": True,
        "blockOwnerDeletion": True,
    }
    return {"name": name, "namespace": job.namespace, "labels": dict(labels), "ownerReferences": [owner]}


def _identity(job: JobRef, attempt: int, role: str) -> dict[str, str]:
    labels = {str(Label.JOB): job.name, str(Label.ATTEMPT): str(attempt)}
    return {**labels, str(Label.ROLE): role} if role else labels


def _labels(job: JobRef, attempt: int, role: str) -> dict[str, str]:
    return {**_common(job), **_identity(job, attempt, role)}


def _common(job: JobRef) -> dict[str, str]:
    return {
        "app.kubernetes.io/name": "elastic-training-job",
        "app.kubernetes.io/instance": job.name,
        "app.kubernetes.io/managed-by": MANAGER,
        str(Label.JOB): job.name,
    }
