"""What the operator sees: frozen views, built from plain API objects by pure functions.

Nothing here decides. A view keeps what `signals` and `decide` need and drops the rest; times are seconds since the
epoch. Times that other machines wrote are compared with our clock only where their clocks are the control plane's;
heartbeats are judged by when *we* saw them change (`renewed_at`), so that a skewed node clock cannot kill a job.
"""

from __future__ import annotations

import contextlib
import dataclasses
import re
from collections.abc import Mapping, Sequence
from typing import Any

from elastic_operator.api import pod_reports
from elastic_operator.api.serialization import parse_time
from elastic_operator.observed.health_monitors import NO_RULES, Rules, complaints
from reshard.contract import KIND, CommitRef, Label, LeaseKey, ReshardReport, VirtualLoader, sentence

Key = tuple[str, str]
"""Namespace and name of a resource."""

WORKER = "worker"
RESHARD = "reshard"
RESHARD_MODES = ("materialize", "virtual")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Taint:
    """One taint of a node."""

    key: str
    value: str = ""
    effect: str = "NoSchedule"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class NodeView:
    """A node of the cluster.

    Attributes:
        ready: status of the Ready condition: `True`, `False` or `Unknown`.
        ready_since: last transition of the Ready condition.
        allocatable: allocatable accelerators, by resource name.
        capacity: capacity of accelerators, by resource name.
        unhealthy: what a health monitor says against it, as far as the operator was told to listen.
        allocatable_since: when we saw `allocatable` change.
        lease_age_seconds: how long the node's Lease had not changed when it was last read; None where nobody looked.
        lease_duration_seconds: what the kubelet promises in that Lease.
    """

    name: str
    ready: str = "True"
    ready_since: float | None = None
    unschedulable: bool = False
    taints: tuple[Taint, ...] = ()
    labels: Mapping[str, str] = dataclasses.field(default_factory=dict)
    allocatable: Mapping[str, int] = dataclasses.field(default_factory=dict)
    capacity: Mapping[str, int] = dataclasses.field(default_factory=dict)
    unhealthy: tuple[str, ...] = ()
    allocatable_since: float | None = None
    lease_age_seconds: float | None = None
    lease_duration_seconds: float = 40.0


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PodView:
    """A pod of the job, training or reshard.

    Attributes:
        requests: accelerators requested, by resource name.
        exit_code: of the first container, once it has terminated.
        termination_message: of the first container.
        waiting_reason: why the first container does not run, for instance `ErrImagePull`.
        disruption: reason of the DisruptionTarget condition.
        unhealthy_devices: devices that the kubelet reports as Unhealthy (KEP-4680).
        unschedulable: the scheduler's message, when it found no place.
        owner: UID of the Job that controls it, empty for none; labels alone prove nothing (`ownership`).
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
    requests: Mapping[str, int] = dataclasses.field(default_factory=dict)
    exit_code: int | None = None
    exit_reason: str = ""
    termination_message: str = ""
    waiting_reason: str = ""
    waiting_message: str = ""
    status_reason: str = ""
    disruption: str = ""
    unhealthy_devices: int = 0
    unschedulable: str = ""
    owner: str = ""
    owner_name: str = ""

    @property
    def terminal(self) -> bool:
        """Nothing of it runs any more."""
        return self.phase in ("Succeeded", "Failed")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class JobView:
    """A batch/v1 Job with our labels. `owner`: UID of the ElasticTrainingJob that controls it, empty for none."""

    name: str
    uid: str
    attempt: int
    role: str
    complete: bool = False
    failed: bool = False
    failed_reason: str = ""
    failed_message: str = ""
    deleting: bool = False
    finished_at: float | None = None
    owner: str = ""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LeaseView:
    """The mailbox of one attempt.

    Attributes:
        renewed_at: when we saw it change; None if rank 0 never wrote.
        owner: UID of the ElasticTrainingJob that controls it, empty for none.
    """

    name: str
    attempt: int
    renewed_at: float | None = None
    annotations: Mapping[str, str] = dataclasses.field(default_factory=dict)
    uid: str = ""
    owner: str = ""

    def get(self, key: LeaseKey) -> str:
        """Value of an annotation, empty if it is not there."""
        return self.annotations.get(key, "")

    @property
    def phase(self) -> str:
        """The trainer's phase, empty if it says none that there is."""
        return pod_reports.value(pod_reports.phase, self.get(LeaseKey.PHASE)) or ""

    @property
    def step(self) -> int | None:
        """Steps done."""
        return pod_reports.value(pod_reports.count, self.get(LeaseKey.STEP))

    @property
    def samples(self) -> int | None:
        """Global samples consumed."""
        return pod_reports.value(pod_reports.count, self.get(LeaseKey.SAMPLES))

    @property
    def loss(self) -> float | None:
        """Loss of the last step; None where training has diverged."""
        return pod_reports.value(pod_reports.loss, self.get(LeaseKey.LOSS))

    @property
    def first_step_at(self) -> float | None:
        """When this attempt finished its first step, by the trainer's clock."""
        return pod_reports.value(pod_reports.moment, self.get(LeaseKey.FIRST_STEP_TIME))

    @property
    def step_at(self) -> float | None:
        """When the last step finished, by the trainer's clock."""
        return pod_reports.value(pod_reports.moment, self.get(LeaseKey.STEP_TIME))

    @property
    def resume_error(self) -> str:
        """Why rank 0 could not use the commit that it was told to resume from, in one sentence; empty if it could."""
        return sentence(self.get(LeaseKey.RESUME_ERROR), pod_reports.TEXT_BYTES)

    @property
    def owner_error(self) -> str:
        """Why rank 0 may not use the checkpoint root, in one sentence; empty if it may."""
        return sentence(self.get(LeaseKey.OWNER_ERROR), 2 * pod_reports.TEXT_BYTES)

    @property
    def removed(self) -> tuple[str, ...]:
        """Released commits that rank 0 has removed; none where it does not say so in due form."""
        return pod_reports.value(pod_reports.names, self.get(LeaseKey.REMOVED)) or ()

    @property
    def loader(self) -> VirtualLoader | None:
        """What rank 0 says that it can load besides files."""
        return pod_reports.value(VirtualLoader.from_json, self.get(LeaseKey.LOADER))

    @property
    def commit(self) -> CommitRef | None:
        """The newest commit that rank 0 published."""
        return pod_reports.value(pod_reports.commit, self.get(LeaseKey.COMMIT))

    def problems(self) -> list[tuple[str, str]]:
        """What rank 0 wrote that does not fit: the path of each field, and what was expected and found."""
        return [(f"Lease {self.name}: {path}", text) for path, text in pod_reports.problems(self.annotations)]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Trouble:
    """What keeps an attempt from getting its pods; see `trouble`.

    Attributes:
        reason: one word of `trouble`.
        message: of whoever says so.
    """

    attempt: int
    reason: str
    message: str


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Observation:
    """Everything that `decide` may know about the world.

    Attributes:
        nodes: all nodes that offer the accelerator or run a pod of the job.
        used: accelerators taken on each node by pods that are not this job's.
        capacity_fresh: `used` was read just now; no plan is made from an old one.
        trouble: why an attempt does not get its pods, where somebody says so.
        starts: claims of the namespace, each with a folder in it, that other jobs are about to start from; None where
            that is not known yet.
    """

    nodes: Mapping[str, NodeView] = dataclasses.field(default_factory=dict)
    pods: tuple[PodView, ...] = ()
    jobs: tuple[JobView, ...] = ()
    leases: Mapping[int, LeaseView] = dataclasses.field(default_factory=dict)
    used: Mapping[str, int] = dataclasses.field(default_factory=dict)
    capacity_fresh: bool = True
    trouble: Trouble | None = None
    starts: frozenset[tuple[str, str]] | None = frozenset()

    def workers(self, attempt: int) -> tuple[PodView, ...]:
        """Training pods of one attempt."""
        return tuple(pod for pod in self.pods if pod.role == WORKER and pod.attempt == attempt)

    def job(self, attempt: int, role: str = WORKER) -> JobView | None:
        """The Job of one attempt."""
        return next((job for job in self.jobs if job.role == role and job.attempt == attempt), None)


def node_view(node: Mapping[str, Any], rules: Rules = NO_RULES) -> NodeView:
    """View of a core/v1 Node; `rules` name the conditions and labels of health monitors that count."""
    spec, status = node.get("spec") or {}, node.get("status") or {}
    ready: Mapping[str, Any] = next(
        (item for item in status.get("conditions") or () if item.get("type") == "Ready"), {}
    )
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
        allocatable=_extended(status.get("allocatable")),
        capacity=_extended(status.get("capacity")),
        unhealthy=complaints(node, rules),
    )


def pod_view(pod: Mapping[str, Any]) -> PodView:
    """View of a core/v1 Pod that carries our labels."""
    meta, spec, status = pod["metadata"], pod.get("spec") or {}, pod.get("status") or {}
    labels = meta.get("labels") or {}
    containers = status.get("containerStatuses") or []
    first = _first_status(spec, containers)
    state = first.get("state") or {}
    waiting = _waiting([*(status.get("initContainerStatuses") or []), *containers])
    conditions = {item.get("type"): item for item in status.get("conditions") or ()}
    scheduled = conditions.get("PodScheduled", {})
    owner = controller_of(meta, "Job")
    return PodView(
        name=meta["name"],
        uid=meta.get("uid", ""),
        attempt=attempt_of(meta),
        role=labels.get(Label.ROLE, ""),
        node=spec.get("nodeName"),
        index=_whole(labels.get("batch.kubernetes.io/job-completion-index")),
        phase=status.get("phase", "Pending"),
        created_at=parse_time(meta.get("creationTimestamp")),
        deleted_at=parse_time(meta.get("deletionTimestamp")),
        requests=pod_requests(spec),
        exit_code=(state.get("terminated") or {}).get("exitCode"),
        exit_reason=_told((state.get("terminated") or {}).get("reason") or ""),
        termination_message=((state.get("terminated") or {}).get("message") or "")[: pod_reports.MAX_MESSAGE],
        waiting_reason=_told(waiting.get("reason") or ""),
        waiting_message=_told(waiting.get("message") or ""),
        status_reason=_told(status.get("reason") or ""),
        disruption=_told(_true_reason(conditions.get("DisruptionTarget", {}))),
        unhealthy_devices=sum(
            device.get("health") == "Unhealthy"
            for item in containers
            for resource in item.get("allocatedResourcesStatus") or ()
            for device in resource.get("resources") or ()
        ),
        unschedulable=(
            _told(scheduled.get("message") or "")
            if scheduled.get("status") == "False" and scheduled.get("reason") == "Unschedulable"
            else ""
        ),
        owner=owner.get("uid", ""),
        owner_name=owner.get("name", ""),
    )


def job_view(job: Mapping[str, Any]) -> JobView:
    """View of a batch/v1 Job that carries our labels."""
    meta = job["metadata"]
    conditions = {
        item["type"]: item for item in (job.get("status") or {}).get("conditions") or () if item.get("status") == "True"
    }
    # FailureTarget comes first: the Job has failed, its pods are being removed.
    failed = conditions.get("Failed") or conditions.get("FailureTarget")
    done = conditions.get("Complete") or failed
    return JobView(
        name=meta["name"],
        uid=meta.get("uid", ""),
        attempt=attempt_of(meta),
        role=(meta.get("labels") or {}).get(Label.ROLE, ""),
        complete="Complete" in conditions,
        failed=failed is not None,
        failed_reason=_told((failed or {}).get("reason") or ""),
        failed_message=_told((failed or {}).get("message") or ""),
        deleting=bool(meta.get("deletionTimestamp")),
        finished_at=parse_time((done or {}).get("lastTransitionTime")),
        owner=controller_of(meta, KIND).get("uid", ""),
    )


def lease_view(lease: Mapping[str, Any], renewed_at: float | None) -> LeaseView:
    """View of a coordination.k8s.io/v1 Lease; `renewed_at` is when the caller saw its renewTime change."""
    meta = lease["metadata"]
    return LeaseView(
        name=meta["name"],
        attempt=attempt_of(meta),
        renewed_at=renewed_at if (lease.get("spec") or {}).get("renewTime") else None,
        annotations=meta.get("annotations") or {},
        uid=meta.get("uid", ""),
        owner=controller_of(meta, KIND).get("uid", ""),
    )


def controller_of(meta: Mapping[str, Any], kind: str = "") -> Mapping[str, Any]:
    """The ownerReference of an object's controller, empty if it has none, or none of this kind."""
    owners = meta.get("ownerReferences") or ()
    found: Mapping[str, Any] = next((item for item in owners if item.get("controller")), {})
    return found if not kind or found.get("kind") == kind else {}


def attempt_of(meta: Mapping[str, Any]) -> int:
    """Attempt number in the labels of an object, 0 if there is none."""
    return _whole((meta.get("labels") or {}).get(Label.ATTEMPT)) or 0


def is_placed(pod: Mapping[str, Any]) -> bool:
    """True if a pod has its place on a node: the scheduler has bound it, or the kubelet has admitted it.

    Whoever creates a pod may write any `spec.nodeName` into it. Both the binding and the kubelet set the condition
    PodScheduled; a pod without it holds nothing yet, and one that the kubelet refuses never will.
    """
    spec, status = pod.get("spec") or {}, pod.get("status") or {}
    if not spec.get("nodeName") or status.get("phase") in ("Succeeded", "Failed"):
        return False
    scheduled = any(
        item.get("type") == "PodScheduled" and item.get("status") == "True" for item in status.get("conditions") or ()
    )
    return scheduled or status.get("phase") == "Running"


def pod_requests(spec: Mapping[str, Any]) -> dict[str, int]:
    """Extended resources that a pod holds: the larger of all containers together and of any one init container."""
    total: dict[str, int] = {}
    for container in spec.get("containers") or ():
        for name, count in _container_requests(container).items():
            total[name] = total.get(name, 0) + count
    for container in spec.get("initContainers") or ():
        for name, count in _container_requests(container).items():
            total[name] = max(total.get(name, 0), count)
    return total


def report_of(pods: Sequence[PodView]) -> ReshardReport | None:
    """What the reshard pods of one attempt left in their termination messages.

    Of pods that shared a conversion, the one that completed it knows the whole; of failures, the newest counts.
    """
    found: list[ReshardReport] = []
    for pod in sorted(pods, key=lambda pod: pod.created_at or 0.0, reverse=True):
        if pod.termination_message:
            with contextlib.suppress(ValueError):
                found.append(_report(pod))
    return max(found, key=lambda report: (report.ok, report.bytes_written if report.ok else 0), default=None)


def report_problems(pods: Sequence[PodView]) -> list[tuple[str, str]]:
    """Termination messages of reshard pods that are no reports, where a report is due."""
    found: list[tuple[str, str]] = []
    for pod in pods:
        if pod.termination_message:
            try:
                _report(pod)
            except ValueError as error:
                found.append((f"Pod {pod.name}: termination message", sentence(str(error), pod_reports.TEXT_BYTES)))
    return found


def _report(pod: PodView) -> ReshardReport:
    """The report of a reshard pod, its texts in one line each.

    Raises:
        ValueError: it is none.
    """
    found = ReshardReport.from_json(pod.termination_message)
    if found.mode not in RESHARD_MODES:
        raise ValueError(f"mode: expected one of {', '.join(RESHARD_MODES)}, found {pod_reports.brief(found.mode)}")
    if found.ok != (found.exit_code == 0):
        raise ValueError(f"ok: expected what exitCode {found.exit_code} says, found {found.ok}")
    return dataclasses.replace(
        found,
        message=sentence(found.message, pod_reports.TEXT_BYTES),
        mode_reason=sentence(found.mode_reason, pod_reports.TEXT_BYTES),
    )


def _told(text: str) -> str:
    """What somebody says of a pod, short enough to be repeated: images and users have a part in it."""
    return sentence(text, pod_reports.TEXT_BYTES)


def _whole(text: str | None) -> int | None:
    """The number in a label, None if it is none: decimal ASCII digits that fit 32 bits."""
    return int(text) if text and _WHOLE.fullmatch(text) else None


_QUANTITY = re.compile(r"[0-9]{1,18}")
_WHOLE = re.compile(r"[0-9]{1,9}")


def _container_requests(container: Mapping[str, Any]) -> dict[str, int]:
    resources = container.get("resources") or {}
    return _extended({**(resources.get("limits") or {}), **(resources.get("requests") or {})})


def _extended(quantities: Mapping[str, Any] | None) -> dict[str, int]:
    # Extended resources are whole numbers under a domain name; cpu, memory, storage and hugepages are not.
    return {
        name: int(text) for name, text in (quantities or {}).items() if "/" in name and _QUANTITY.fullmatch(str(text))
    }


def _first_status(spec: Mapping[str, Any], statuses: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
    names = [container.get("name") for container in spec.get("containers") or ()]
    return next((item for item in statuses if names and item.get("name") == names[0]), statuses[0] if statuses else {})


def _waiting(statuses: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
    states = [(item.get("state") or {}).get("waiting") for item in statuses]
    return next((state for state in states if state and state.get("reason") not in _ORDINARY_WAITS), {})


_ORDINARY_WAITS = ("ContainerCreating", "PodInitializing", None)


def _true_reason(condition: Mapping[str, Any]) -> str:
    return condition.get("reason") or "Unknown" if condition.get("status") == "True" else ""
