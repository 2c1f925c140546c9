"""Frozen views of cluster objects, built from plain API objects by pure functions.

Nothing here decides. A view keeps what `signals` and `decide` need and drops the rest; times are seconds since the
epoch. The operator compares a time with its own clock only if the control plane wrote that time. The age of a heartbeat
counts from when the operator saw the Lease change (`renewed_at`), so a skewed node clock cannot end a job.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from typing import Any

from elastic_operator.api import pod_reports
from elastic_operator.api.claim_path import Start
from elastic_operator.api.serialization import parse_time
from elastic_operator.observed.containers import find_end, find_phase, find_wait, list_survivors, name_main_container
from elastic_operator.observed.health_monitors import NO_RULES, Rules, find_health_problems, is_shutdown
from elastic_operator.observed.placement.pod_resources import extended_only, parse_builtin, parse_extended, pod_requests
from elastic_operator.observed.placement.volumes import ClaimView
from elastic_operator.observed.queueing.workloads import QueueView
from reshard.contract import KIND, CommitRef, Label, LeaseKey, VirtualLoader, sentence

Key = tuple[str, str]
"""Namespace and name of a resource."""

WORKER = "worker"
RESHARD = "reshard"
WITHDRAWAL_SECONDS = 3600.0
"""Time for which the withdrawal of a cordon, taint or health report delays the next one of its kind on that node."""

CORDON, HEALTH = "cordon", "health"
"""Names of a cordon and of a health monitor's report in `NodeView.withdrawals`."""

DEFAULT_GRACE_SECONDS = 30.0
"""terminationGracePeriodSeconds of a pod that states none (core/v1)."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Taint:
    """A taint of a node; `since` is when the operator first saw it."""

    key: str
    value: str = ""
    effect: str = "NoSchedule"
    since: float | None = dataclasses.field(default=None, compare=False)

    @property
    def label(self) -> str:
        """Name of the taint in `NodeView.withdrawals`."""
        return f"taint {self.key}:{self.effect}"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class NodeView:
    """A node of the cluster.

    Attributes:
        ready: status of the Ready condition: `True`, `False` or `Unknown`.
        ready_since: when the operator saw the Ready condition change.
        allocatable: allocatable accelerators and other extended resources, by resource name.
        capacity: capacity of the same.
        builtin: allocatable cpu in millicores, memory and storage in bytes, and number of pods.
        unhealthy: problems that a health monitor reports, as far as the operator is configured to read them.
        allocatable_since: when the operator saw `allocatable` change.
        cordoned_since: when the operator first saw the node unschedulable.
        unhealthy_since: when the operator first saw a problem in `unhealthy`.
        withdrawals: what was withdrawn from the node lately (CORDON, HEALTH or the label of a taint), and when.
        lease_age_seconds: how long the node's Lease had not changed when it was last read; None if it was never read.
        lease_duration_seconds: the duration that the kubelet writes into that Lease.
        is_shutting_down: the kubelet reports that its node shuts down; the pods there have their grace periods.
    """

    name: str
    ready: str = "True"
    ready_since: float | None = None
    unschedulable: bool = False
    taints: tuple[Taint, ...] = ()
    labels: Mapping[str, str] = dataclasses.field(default_factory=dict)
    allocatable: Mapping[str, int] = dataclasses.field(default_factory=dict)
    capacity: Mapping[str, int] = dataclasses.field(default_factory=dict)
    builtin: Mapping[str, int] = dataclasses.field(default_factory=dict)
    unhealthy: tuple[str, ...] = ()
    allocatable_since: float | None = None
    cordoned_since: float | None = None
    unhealthy_since: float | None = None
    withdrawals: tuple[tuple[str, float], ...] = ()
    lease_age_seconds: float | None = None
    lease_duration_seconds: float = 40.0
    is_shutting_down: bool = False

    def count_withdrawals(self, what: str, now: float) -> int:
        """Count how often something was withdrawn within the last WITHDRAWAL_SECONDS."""
        return sum(name == what and now - at <= WITHDRAWAL_SECONDS for name, at in self.withdrawals)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PodView:
    """A pod of the job, training or reshard.

    Attributes:
        requests: accelerators requested, by resource name.
        scheduled_at: when the operator first saw that the scheduler had bound it to its node.
        failed_at: when the operator first saw that the pod had failed (`has_failed`).
        exit_code: of the container that trains or converts, once it has terminated.
        termination_message: of the same container.
        outlived_by: names of the containers that run on in the pod after that one has ended; empty if none does.
        deletion_grace_seconds: grace period of the deletion, which `deleted_at` includes.
        waiting_reason: why the container that trains or converts does not run, for instance `ErrImagePull`.
        disruption: reason of the DisruptionTarget condition.
        disrupted_at: last transition of that condition.
        grace_seconds: terminationGracePeriodSeconds of the pod.
        unhealthy_devices: devices that the kubelet reports as Unhealthy (KEP-4680).
        unschedulable: the scheduler's message if it found no node.
        deleted_at: end of the grace period after a deletion, by the operator's clock.
        cannot_start_since: when the operator first saw that it cannot start; forgotten once that is over.
        unschedulable_since: when the operator first saw that the scheduler found no node.
        tolerations: tolerations of the pod, with those that admission added.
        owner: UID of the Job that controls the pod, empty for none; labels alone prove nothing (`ownership`).
        owner_name: name of that Job.
    """

    name: str
    uid: str
    attempt: int
    role: str
    node: str | None = None
    index: int | None = None
    phase: str = "Pending"
    created_at: float | None = None
    deleted_at: float | None = None
    deletion_grace_seconds: int = 0
    requests: Mapping[str, int] = dataclasses.field(default_factory=dict)
    scheduled_at: float | None = None
    failed_at: float | None = None
    exit_code: int | None = None
    exit_reason: str = ""
    termination_message: str = ""
    outlived_by: str = ""
    waiting_reason: str = ""
    waiting_message: str = ""
    status_reason: str = ""
    disruption: str = ""
    disrupted_at: float | None = None
    grace_seconds: float = DEFAULT_GRACE_SECONDS
    unhealthy_devices: int = 0
    unschedulable: str = ""
    cannot_start_since: float | None = None
    unschedulable_since: float | None = None
    tolerations: tuple[Mapping[str, Any], ...] = ()
    owner: str = ""
    owner_name: str = ""

    @property
    def terminal(self) -> bool:
        """True if no container of the pod runs any more."""
        return self.phase in ("Succeeded", "Failed")

    @property
    def outcome(self) -> str:
        """`Succeeded` or `Failed` once the pod's work is over, even if another container holds it open; else empty."""
        if self.terminal:
            return self.phase
        if not self.outlived_by or (self.exit_code and self.deleted_at is not None):  # killed by its deletion
            return ""
        return "Failed" if self.exit_code else "Succeeded"

    @property
    def has_failed(self) -> bool:
        """True if the training container has failed; a kubelet reports its exit code before the phase of the pod."""
        return self.phase == "Failed" or self.exit_code not in (None, 0)

    @property
    def leave_by(self) -> float | None:
        """When the kubelet will kill the training container, which still runs; None if nobody asked the pod to leave.

        `deletionTimestamp` contains the grace period. The scheduler sets DisruptionTarget before it deletes a pod; a
        kubelet that shuts its node down sets it once the containers have ended (`NodeView.is_shutting_down`).
        """
        if self.phase != "Running" or self.exit_code is not None:
            return None
        if self.deleted_at is not None:
            return self.deleted_at
        if self.disruption and self.disrupted_at is not None:
            return self.disrupted_at + self.grace_seconds
        return None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class JobView:
    """A batch/v1 Job with our labels.

    Attributes:
        created_at: when the operator first saw the Job.
        num_pods: `spec.completions`.
        suspended: `spec.suspend`, which the operator never sets; a queueing system or a person does.
        owner: UID of the ElasticTrainingJob that controls the Job, empty for none.
    """

    name: str
    uid: str
    attempt: int
    role: str
    complete: bool = False
    failed: bool = False
    failed_reason: str = ""
    failed_message: str = ""
    deleting: bool = False
    suspended: bool = False
    num_pods: int = 1
    created_at: float | None = None
    finished_at: float | None = None
    owner: str = ""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LeaseView:
    """The Lease of one attempt, through which the operator and rank 0 exchange annotations.

    Attributes:
        renewed_at: when the operator saw the Lease change; None if rank 0 never wrote.
        step_seen_at: when the operator saw the number of finished steps change; None before the first step.
        owner: UID of the ElasticTrainingJob that controls the Lease, empty for none.
    """

    name: str
    attempt: int
    renewed_at: float | None = None
    step_seen_at: float | None = None
    annotations: Mapping[str, str] = dataclasses.field(default_factory=dict)
    uid: str = ""
    owner: str = ""

    def get(self, key: LeaseKey) -> str:
        """Return the value of an annotation, empty if it is missing."""
        return self.annotations.get(key, "")

    @property
    def phase(self) -> str:
        """The trainer's phase, empty if it is missing or unknown."""
        return pod_reports.parse_or_none(pod_reports.parse_phase, self.get(LeaseKey.PHASE)) or ""

    @property
    def step(self) -> int | None:
        """Number of finished optimizer steps."""
        return pod_reports.parse_or_none(pod_reports.parse_count, self.get(LeaseKey.STEP))

    @property
    def samples(self) -> int | None:
        """Number of global samples consumed."""
        return pod_reports.parse_or_none(pod_reports.parse_count, self.get(LeaseKey.SAMPLES))

    @property
    def loss(self) -> float | None:
        """Training loss of the last step; None if training has diverged."""
        return pod_reports.parse_or_none(pod_reports.parse_loss, self.get(LeaseKey.LOSS))

    @property
    def first_step_at(self) -> float | None:
        """Time at which this attempt finished its first step, by the trainer's clock."""
        return pod_reports.parse_or_none(pod_reports.parse_timestamp, self.get(LeaseKey.FIRST_STEP_TIME))

    @property
    def resume_error(self) -> str:
        """Return the reason why rank 0 could not load the commit to resume from, in one sentence; empty if it could."""
        return sentence(self.get(LeaseKey.RESUME_ERROR), pod_reports.TEXT_BYTES)

    @property
    def owner_error(self) -> str:
        """Return the reason why rank 0 may not use the checkpoint root, in one sentence; empty if it may."""
        return sentence(self.get(LeaseKey.OWNER_ERROR), 2 * pod_reports.TEXT_BYTES)

    @property
    def removed(self) -> tuple[str, ...]:
        """Released commits that rank 0 has removed; empty if the annotation is missing or malformed."""
        return pod_reports.parse_or_none(pod_reports.parse_commit_names, self.get(LeaseKey.REMOVED)) or ()

    @property
    def loader(self) -> VirtualLoader | None:
        """Loader of virtual commits that rank 0 reports; None if the annotation is missing or malformed."""
        return pod_reports.parse_or_none(VirtualLoader.from_json, self.get(LeaseKey.LOADER))

    @property
    def commit(self) -> CommitRef | None:
        """The newest commit that rank 0 published."""
        return pod_reports.parse_or_none(pod_reports.parse_commit, self.get(LeaseKey.COMMIT))

    def problems(self) -> list[tuple[str, str]]:
        """Return the path of each malformed annotation, and what was expected and found."""
        return [(f"Lease {self.name}: {path}", text) for path, text in pod_reports.find_problems(self.annotations)]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PodDiagnosis:
    """Reason, reported by another component, for which an attempt has no running pods.

    Attributes:
        reason: one of the reasons in `pod_diagnosis`.
        message: what the API server, the Job controller or the kubelet reported.
    """

    attempt: int
    reason: str
    message: str


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Observation:
    """Everything that `decide` may know about the cluster.

    Attributes:
        nodes: all nodes that offer the accelerator or run a pod of the job.
        deleted_pods: pods that had failed and were deleted a short while ago, as they were seen last.
        used: accelerators on each node that are held by pods of other owners.
        capacity_fresh: True if `used` was read in this pass; `decide` makes no plan from an older value.
        pod_diagnosis: why an attempt has no running pods; None if no component reported a reason.
        evidence_since: no age counts from before this time, in which the API server could not be reached; 0 for none.
        is_widespread: True if most nodes of the cluster seem to be lost.
        is_hold_over: True if most nodes have seemed lost for so long that silence counts again.
        removed: when the operator saw that a node was deleted, for nodes that were deleted a short while ago.
        short_since: when nodes were first seen to offer fewer accelerators than their pods hold.
        starts: other jobs of the namespace that are about to start from a folder; None if they are not known yet.
        queue: what Kueue says about the job; None if the job is in no queue, or Kueue is not installed.
        volumes: claims of the training pods; those that cannot be read are missing and restrict nothing.
    """

    nodes: Mapping[str, NodeView] = dataclasses.field(default_factory=dict)
    pods: tuple[PodView, ...] = ()
    deleted_pods: tuple[PodView, ...] = ()
    jobs: tuple[JobView, ...] = ()
    leases: Mapping[int, LeaseView] = dataclasses.field(default_factory=dict)
    used: Mapping[str, int] = dataclasses.field(default_factory=dict)
    capacity_fresh: bool = True
    pod_diagnosis: PodDiagnosis | None = None
    evidence_since: float = 0.0
    is_widespread: bool = False
    is_hold_over: bool = False
    removed: Mapping[str, float] = dataclasses.field(default_factory=dict)
    short_since: Mapping[str, float] = dataclasses.field(default_factory=dict)
    starts: frozenset[Start] | None = frozenset()
    queue: QueueView | None = None
    volumes: tuple[ClaimView, ...] = ()

    def workers(self, attempt: int) -> tuple[PodView, ...]:
        """Return the training pods of one attempt."""
        return tuple(pod for pod in self.pods if pod.role == WORKER and pod.attempt == attempt)

    def workers_ever(self, attempt: int) -> tuple[PodView, ...]:
        """Return the training pods of one attempt, and those that had failed before they were deleted lately."""
        deleted = (pod for pod in self.deleted_pods if pod.role == WORKER and pod.attempt == attempt)
        return (*self.workers(attempt), *deleted)

    def job(self, attempt: int, role: str = WORKER) -> JobView | None:
        """Return the Job of one attempt, or None."""
        return next((job for job in self.jobs if job.role == role and job.attempt == attempt), None)


def node_view(node: Mapping[str, Any], rules: Rules = NO_RULES) -> NodeView:
    """Build the view of a core/v1 Node; `rules` name the conditions and labels of health monitors that count."""
    spec, status = node.get("spec") or {}, node.get("status") or {}
    ready = {item.get("type"): item for item in status.get("conditions") or ()}.get("Ready", {})
    return NodeView(
        name=node["metadata"]["name"],
        ready=ready.get("status", "Unknown"),
        ready_since=parse_time(ready.get("lastTransitionTime")),
        unschedulable=bool(spec.get("unschedulable")),
        taints=tuple(
            Taint(key=item["key"], value=item.get("value") or "", effect=item.get("effect") or "")
            for item in spec.get("taints") or ()
        ),
        labels=node["metadata"].get("labels") or {},
        allocatable=parse_extended(status.get("allocatable")),
        capacity=parse_extended(status.get("capacity")),
        builtin=parse_builtin(status.get("allocatable")),
        unhealthy=find_health_problems(node, rules),
        is_shutting_down=is_shutdown(ready),
    )


def pod_view(pod: Mapping[str, Any]) -> PodView:
    """Build the view of a core/v1 Pod that carries the operator's labels."""
    meta, spec, status = pod["metadata"], pod.get("spec") or {}, pod.get("status") or {}
    labels = meta.get("labels") or {}
    containers = status.get("containerStatuses") or []
    main = name_main_container(pod)
    end = find_end(status, main)
    waiting = find_wait(status, main)
    conditions = {item.get("type"): item for item in status.get("conditions") or ()}
    scheduled = conditions.get("PodScheduled", {})
    owner = controller_of(meta, "Job")
    grace = spec.get("terminationGracePeriodSeconds")
    return PodView(
        name=meta["name"],
        uid=meta.get("uid", ""),
        attempt=attempt_of(meta),
        role=labels.get(Label.ROLE, ""),
        node=spec.get("nodeName"),
        index=_parse_whole_number(labels.get("batch.kubernetes.io/job-completion-index")),
        phase=find_phase(status, main),
        created_at=parse_time(meta.get("creationTimestamp")),
        deleted_at=parse_time(meta.get("deletionTimestamp")),
        deletion_grace_seconds=int(meta.get("deletionGracePeriodSeconds") or 0),
        requests=extended_only(pod_requests(spec)),
        scheduled_at=parse_time(scheduled.get("lastTransitionTime")) if scheduled.get("status") == "True" else None,
        exit_code=end.get("exitCode"),
        exit_reason=_shorten(end.get("reason") or ""),
        termination_message=(end.get("message") or "")[: pod_reports.MAX_MESSAGE],
        outlived_by=_shorten(", ".join(list_survivors(status, main))),
        waiting_reason=_shorten(waiting.get("reason") or ""),
        waiting_message=_shorten(waiting.get("message") or ""),
        status_reason=_shorten(status.get("reason") or ""),
        disruption=_shorten(_true_reason(conditions.get("DisruptionTarget", {}))),
        disrupted_at=parse_time(conditions.get("DisruptionTarget", {}).get("lastTransitionTime")),
        grace_seconds=DEFAULT_GRACE_SECONDS if grace is None else float(grace),
        unhealthy_devices=sum(
            device.get("health") == "Unhealthy"
            for item in containers
            for resource in item.get("allocatedResourcesStatus") or ()
            for device in resource.get("resources") or ()
        ),
        unschedulable=(
            _shorten(scheduled.get("message") or "")
            if scheduled.get("status") == "False" and scheduled.get("reason") == "Unschedulable"
            else ""
        ),
        tolerations=tuple(spec.get("tolerations") or ()),
        owner=owner.get("uid", ""),
        owner_name=owner.get("name", ""),
    )


def job_view(job: Mapping[str, Any]) -> JobView:
    """Build the view of a batch/v1 Job that carries the operator's labels."""
    meta = job["metadata"]
    conditions = {
        item["type"]: item for item in (job.get("status") or {}).get("conditions") or () if item.get("status") == "True"
    }
    # FailureTarget comes first: the Job has failed, its pods are being removed.
    failed = conditions.get("Failed") or conditions.get("FailureTarget")
    finished = conditions.get("Complete") or failed
    return JobView(
        name=meta["name"],
        uid=meta.get("uid", ""),
        attempt=attempt_of(meta),
        role=(meta.get("labels") or {}).get(Label.ROLE, ""),
        complete="Complete" in conditions,
        failed=failed is not None,
        failed_reason=_shorten((failed or {}).get("reason") or ""),
        failed_message=_shorten((failed or {}).get("message") or ""),
        deleting=bool(meta.get("deletionTimestamp")),
        suspended=bool((job.get("spec") or {}).get("suspend")),
        num_pods=int((job.get("spec") or {}).get("completions") or 1),
        finished_at=parse_time((finished or {}).get("lastTransitionTime")),
        owner=controller_of(meta, KIND).get("uid", ""),
    )


def lease_view(lease: Mapping[str, Any], renewed_at: float | None, step_seen_at: float | None = None) -> LeaseView:
    """Build the view of an attempt's Lease; the times are when the caller saw its renewTime and its step change."""
    meta = lease["metadata"]
    return LeaseView(
        name=meta["name"],
        attempt=attempt_of(meta),
        renewed_at=renewed_at if (lease.get("spec") or {}).get("renewTime") else None,
        step_seen_at=step_seen_at,
        annotations=meta.get("annotations") or {},
        uid=meta.get("uid", ""),
        owner=controller_of(meta, KIND).get("uid", ""),
    )


def controller_of(meta: Mapping[str, Any], kind: str = "") -> Mapping[str, Any]:
    """Return the controller's ownerReference, or an empty mapping if there is none or it has another kind."""
    owners = meta.get("ownerReferences") or ()
    controller: Mapping[str, Any] = next((item for item in owners if item.get("controller")), {})
    return controller if not kind or controller.get("kind") == kind else {}


def attempt_of(meta: Mapping[str, Any]) -> int:
    """Return the attempt number in the labels of an object, 0 if there is none."""
    return _parse_whole_number((meta.get("labels") or {}).get(Label.ATTEMPT)) or 0


def _shorten(text: str) -> str:
    """Return one short line of a text that images and users can influence."""
    return sentence(text, pod_reports.TEXT_BYTES)


def _parse_whole_number(text: str | None) -> int | None:
    """Return the number in a label, or None unless the label is 1 to 9 decimal ASCII digits."""
    return int(text) if text and _WHOLE.fullmatch(text) else None


_WHOLE = re.compile(r"[0-9]{1,9}")


def _true_reason(condition: Mapping[str, Any]) -> str:
    return condition.get("reason") or "Unknown" if condition.get("status") == "True" else ""
