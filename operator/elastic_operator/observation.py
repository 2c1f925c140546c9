"""What the operator sees: frozen views, built from plain API objects by pure functions.

Nothing here decides. A view keeps what `signals` and `decide` need and drops the rest; times are seconds since the
epoch. Times that other machines wrote are compared with our clock only where their clocks are the control plane's;
heartbeats are judged by when *we* saw them change (`renewed_at`), so that a skewed node clock cannot kill a job.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from elastic_operator.monitors import NO_RULES, Rules, complaints
from elastic_operator.wire import parse_time
from reshard.contract import CommitRef, Label, LeaseKey, ReshardReport, VirtualLoader

WORKER = "worker"
RESHARD = "reshard"


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

    @property
    def terminal(self) -> bool:
        """Nothing of it runs any more."""
        return self.phase in ("Succeeded", "Failed")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class JobView:
    """A batch/v1 Job of ours."""

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


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LeaseView:
    """The mailbox of one attempt.

    Attributes:
        renewed_at: when we saw it change; None if rank 0 never wrote.
    """

    name: str
    attempt: int
    renewed_at: float | None = None
    annotations: Mapping[str, str] = dataclasses.field(default_factory=dict)

    def get(self, key: LeaseKey) -> str:
        """Value of an annotation, empty if it is not there."""
        return self.annotations.get(key, "")

    @property
    def phase(self) -> str:
        """The trainer's phase."""
        return self.get(LeaseKey.PHASE)

    @property
    def step(self) -> int | None:
        """Steps done."""
        text = self.get(LeaseKey.STEP)
        return int(text) if text.isdigit() else None

    @property
    def first_step_at(self) -> float | None:
        """When this attempt finished its first step, by the trainer's clock."""
        return parse_time(self.get(LeaseKey.FIRST_STEP_TIME))

    @property
    def step_at(self) -> float | None:
        """When the last step finished, by the trainer's clock."""
        return parse_time(self.get(LeaseKey.STEP_TIME))

    @property
    def loader(self) -> VirtualLoader | None:
        """What rank 0 says that it can load besides files."""
        text = self.get(LeaseKey.LOADER)
        if not text:
            return None
        try:
            return VirtualLoader.from_json(text)
        except ValueError:
            return None

    @property
    def commit(self) -> CommitRef | None:
        """The newest commit that rank 0 published."""
        text = self.get(LeaseKey.COMMIT)
        if not text:
            return None
        try:
            return CommitRef.from_json(text)
        except ValueError:
            return None


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
    """

    nodes: Mapping[str, NodeView] = dataclasses.field(default_factory=dict)
    pods: tuple[PodView, ...] = ()
    jobs: tuple[JobView, ...] = ()
    leases: Mapping[int, LeaseView] = dataclasses.field(default_factory=dict)
    used: Mapping[str, int] = dataclasses.field(default_factory=dict)
    capacity_fresh: bool = True
    trouble: Trouble | None = None

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
    index = labels.get("batch.kubernetes.io/job-completion-index")
    return PodView(
        name=meta["name"],
        uid=meta.get("uid", ""),
        attempt=attempt_of(meta),
        role=labels.get(Label.ROLE, ""),
        node=spec.get("nodeName"),
        index=int(index) if index is not None else None,
        phase=status.get("phase", "Pending"),
        created_at=parse_time(meta.get("creationTimestamp")),
        deleted_at=parse_time(meta.get("deletionTimestamp")),
        requests=pod_requests(spec),
        exit_code=(state.get("terminated") or {}).get("exitCode"),
        exit_reason=(state.get("terminated") or {}).get("reason") or "",
        termination_message=(state.get("terminated") or {}).get("message") or "",
        waiting_reason=waiting.get("reason") or "",
        waiting_message=waiting.get("message") or "",
        status_reason=status.get("reason") or "",
        disruption=_true_reason(conditions.get("DisruptionTarget", {})),
        unhealthy_devices=sum(
            device.get("health") == "Unhealthy"
            for item in containers
            for resource in item.get("allocatedResourcesStatus") or ()
            for device in resource.get("resources") or ()
        ),
        unschedulable=(
            scheduled.get("message", "")
            if scheduled.get("status") == "False" and scheduled.get("reason") == "Unschedulable"
            else ""
        ),
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
        failed_reason=(failed or {}).get("reason") or "",
        failed_message=(failed or {}).get("message") or "",
        deleting=bool(meta.get("deletionTimestamp")),
        finished_at=parse_time((done or {}).get("lastTransitionTime")),
    )


def lease_view(lease: Mapping[str, Any], renewed_at: float | None) -> LeaseView:
    """View of a coordination.k8s.io/v1 Lease; `renewed_at` is when the caller saw its renewTime change."""
    meta = lease["metadata"]
    return LeaseView(
        name=meta["name"],
        attempt=attempt_of(meta),
        renewed_at=renewed_at if (lease.get("spec") or {}).get("renewTime") else None,
        annotations=meta.get("annotations") or {},
    )


def attempt_of(meta: Mapping[str, Any]) -> int:
    """Attempt number in the labels of an object, 0 if there is none."""
    text = (meta.get("labels") or {}).get(Label.ATTEMPT, "")
    return int(text) if text.isdigit() else 0


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
                found.append(ReshardReport.from_json(pod.termination_message))
    return max(found, key=lambda report: (report.ok, report.bytes_written if report.ok else 0), default=None)


def _container_requests(container: Mapping[str, Any]) -> dict[str, int]:
    resources = container.get("resources") or {}
    return _extended({**(resources.get("limits") or {}), **(resources.get("requests") or {})})


def _extended(quantities: Mapping[str, Any] | None) -> dict[str, int]:
    # Extended resources are whole numbers under a domain name; cpu, memory, storage and hugepages are not.
    return {name: int(text) for name, text in (quantities or {}).items() if "/" in name and str(text).isdigit()}


def _first_status(spec: Mapping[str, Any], statuses: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
    names = [container.get("name") for container in spec.get("containers") or ()]
    return next((item for item in statuses if names and item.get("name") == names[0]), statuses[0] if statuses else {})


def _waiting(statuses: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
    states = [(item.get("state") or {}).get("waiting") for item in statuses]
    return next((state for state in states if state and state.get("reason") not in _ORDINARY_WAITS), {})


_ORDINARY_WAITS = ("ContainerCreating", "PodInitializing", None)


def _true_reason(condition: Mapping[str, Any]) -> str:
    return condition.get("reason") or "Unknown" if condition.get("status") == "True" else ""
