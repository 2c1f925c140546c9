"""Views of the Workloads with which a job asks Kueue for quota, and the reader that makes them from API objects."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Mapping
from typing import Any

from elastic_operator.api.serialization import parse_time
from elastic_operator.manifests.workload import HASH, PAUSED, POD_SET, REPLACEMENT_FOR
from elastic_operator.observed.queueing.placement import ANYWHERE, Placement, read_mapping, read_topology, read_update
from reshard.contract import sentence

MAX_CONDITIONS = 16
"""Maximum number of conditions of a Workload in Kueue's API; also of pod sets, checks and updates."""

MAX_PODS = 2_147_483_647
_TEXT_BYTES = 1024
_NUMBER = re.compile(r"-q([1-9][0-9]{0,8})$")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class QueueCondition:
    """A condition of a Workload; `changed` is its lastTransitionTime as it was written."""

    type: str
    status: str
    reason: str = ""
    message: str = ""
    changed: str = ""
    generation: int = 0


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class WorkloadView:
    """A Workload of kueue.x-k8s.io that the operator made for a job.

    Attributes:
        number: at the end of its name; a later Workload of the job has a higher one.
        version: resourceVersion; ignored in comparisons, so that a write by Kueue alone wakes nobody.
        owner: UID of the ElasticTrainingJob that controls it, empty for none.
        created_at: by the API server's clock.
        is_paused: the operator has set `active` to false, because the user suspends the job.
        digest: of the spec that the operator wrote last.
        replaces: namespace and name of the Workload that this one replaces once it is admitted; empty for none.
        asked: number of pods that it asks for.
        minimum: smallest number of pods that it accepts.
        assigned: number of pods that Kueue has admitted; None if none.
        flavors: names of the ResourceFlavors that Kueue has assigned, without duplicates.
        update: the domains of a topology, and what admission checks demand of the pods.
        problem: why the object cannot be used: field, expected and found; empty if it can.
    """

    name: str
    uid: str
    number: int
    version: str = dataclasses.field(default="", compare=False)
    generation: int = 0
    owner: str = ""
    created_at: float | None = None
    is_deleting: bool = False
    is_active: bool = True
    is_paused: bool = False
    digest: str = ""
    replaces: str = ""
    queue: str = ""
    priority: int | None = None
    priority_class: str = ""
    asked: int = 0
    minimum: int = 0
    assigned: int | None = None
    cluster_queue: str = ""
    flavors: tuple[str, ...] = ()
    update: Placement = ANYWHERE
    conditions: tuple[QueueCondition, ...] = ()
    problem: str = ""

    def condition(self, type_: str) -> QueueCondition | None:
        """Return the condition of one type, or None."""
        return next((item for item in self.conditions if item.type == type_), None)

    def is_true(self, type_: str) -> bool:
        """Return whether a condition is there and True."""
        condition = self.condition(type_)
        return condition is not None and condition.status == "True"

    @property
    def is_finished(self) -> bool:
        """True if it holds no quota any more and never will."""
        return self.is_true("Finished")

    @property
    def has_quota(self) -> bool:
        """True if quota is reserved for it, also while it is being evicted."""
        return not self.is_finished and self.is_true("QuotaReserved")

    @property
    def is_evicted(self) -> bool:
        """True if Kueue wants the reserved quota back."""
        return self.has_quota and self.is_true("Evicted")

    @property
    def is_admitted(self) -> bool:
        """True if the pods may run: quota is reserved, every admission check has passed, and it is not evicted."""
        return self.has_quota and not self.is_evicted and self.is_true("Admitted") and self.assigned is not None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class QueueView:
    """What Kueue says about one job.

    Attributes:
        workloads: the job's own Workloads, oldest first.
        flavors: demands of the flavors that are assigned to any of them, by name.
        priority: value of the WorkloadPriorityClass that the job names; None if it names none.
        problem: what is missing or refused, so that it is not known where the job may run; empty if nothing is.
        refusal: what is missing, so that the operator cannot ask for quota; empty if nothing is.
    """

    workloads: tuple[WorkloadView, ...] = ()
    flavors: Mapping[str, Placement] = dataclasses.field(default_factory=dict)
    priority: int | None = None
    problem: str = ""
    refusal: str = ""

    @property
    def unfinished(self) -> tuple[WorkloadView, ...]:
        """The Workloads that hold quota or wait for it, oldest first."""
        return tuple(item for item in self.workloads if not item.is_finished and not item.is_deleting)

    @property
    def current(self) -> WorkloadView | None:
        """The Workload that counts: the newest one with quota, else the oldest one that waits; None if there is none.

        While a replacement waits for more quota, or for its admission checks, the Workload that it replaces counts.
        """
        unfinished = self.unfinished
        holders = [item for item in unfinished if item.has_quota]
        admitted = [item for item in holders if item.is_admitted]
        evicted = [item for item in holders if item.is_evicted]
        return next(iter([*reversed(admitted), *reversed(evicted), *reversed(holders), *unfinished]), None)

    def placement(self, workload: WorkloadView) -> Placement:
        """Return what the admission of a Workload demands of the pods."""
        demands = ANYWHERE
        for name in workload.flavors:
            demands += self.flavors.get(name, ANYWHERE)
        return demands + workload.update


def select_own_workloads(views: Iterable[WorkloadView], owner: str) -> tuple[WorkloadView, ...]:
    """Return the Workloads that the resource with this UID controls and the operator has named, oldest first."""
    own = (item for item in views if item.owner == owner and item.number)
    return tuple(sorted(own, key=lambda item: item.number))


def workload_view(workload: Mapping[str, Any]) -> WorkloadView:
    """Build the view of a Workload; if a field has another type than Kueue's API has, the view names it."""
    meta = workload["metadata"]
    number = _NUMBER.search(meta["name"])
    identity = WorkloadView(
        name=meta["name"],
        uid=meta.get("uid", ""),
        number=int(number[1]) if number else 0,
        version=meta.get("resourceVersion") or "",
        generation=meta.get("generation") or 0,
        owner=_controller_uid(meta),
        created_at=parse_time(meta.get("creationTimestamp")),
        is_deleting=bool(meta.get("deletionTimestamp")),
    )
    try:
        return dataclasses.replace(identity, **_read_parts(workload))
    except ValueError as error:
        return dataclasses.replace(identity, problem=sentence(f"Workload {identity.name}: {error}", _TEXT_BYTES))


def _controller_uid(meta: Mapping[str, Any]) -> str:
    owners = meta.get("ownerReferences") or ()
    return next((str(item.get("uid")) for item in owners if item.get("controller")), "")


def _read_parts(workload: Mapping[str, Any]) -> dict[str, Any]:
    spec, status = workload.get("spec") or {}, workload.get("status") or {}
    annotations = workload["metadata"].get("annotations") or {}
    reference = read_mapping(spec.get("priorityClassRef") or {}, "spec.priorityClassRef")
    pods = next(
        (item for item in _read_list(spec.get("podSets"), "spec.podSets") if item.get("name") == POD_SET),
        None,
    )
    if pods is None:
        raise ValueError(f"spec.podSets: expected the pod set {POD_SET}, found none")
    asked = _read_count(pods.get("count"), "spec.podSets.count")
    return {
        "is_active": spec.get("active") is not False,
        "is_paused": PAUSED in annotations,
        "digest": _short(annotations.get(HASH)),
        "replaces": _short(annotations.get(REPLACEMENT_FOR)),
        "queue": _short(spec.get("queueName")),
        "priority": spec.get("priority") if isinstance(spec.get("priority"), int) else None,
        "priority_class": _short(reference.get("name")),
        "asked": asked,
        "minimum": _read_count(pods["minCount"], "spec.podSets.minCount") if "minCount" in pods else asked,
        "conditions": _read_conditions(status),
        **_read_admission(status.get("admission"), asked, _read_updates(status)),
    }


def _read_admission(admission: Any, asked: int, update: Placement) -> dict[str, Any]:
    if admission is None:
        return {"update": update}
    path = "status.admission"
    assignments = _read_list(read_mapping(admission, path).get("podSetAssignments"), f"{path}.podSetAssignments")
    mine = next((item for item in assignments if item.get("name") == POD_SET), None)
    if mine is None:
        raise ValueError(f"{path}.podSetAssignments: expected the pod set {POD_SET}, found none")
    flavors = read_mapping(mine.get("flavors") or {}, f"{path}.podSetAssignments.flavors")
    count = mine.get("count")
    return {
        "assigned": asked if count is None else _read_count(count, f"{path}.podSetAssignments.count"),
        "cluster_queue": _short(admission.get("clusterQueue")),
        "update": read_topology(mine.get("topologyAssignment"), f"{path}.topologyAssignment") + update,
        "flavors": tuple(dict.fromkeys(_short(name) for name in flavors.values()))[:MAX_CONDITIONS],
    }


def _read_updates(status: Mapping[str, Any]) -> Placement:
    demands = ANYWHERE
    for check in _read_list(status.get("admissionChecks"), "status.admissionChecks"):
        path = "status.admissionChecks.podSetUpdates"
        for update in _read_list(check.get("podSetUpdates"), path):
            if update.get("name") == POD_SET:
                demands += read_update(update, path)
    return demands


def _read_conditions(status: Mapping[str, Any]) -> tuple[QueueCondition, ...]:
    items = _read_list(status.get("conditions"), "status.conditions")
    return tuple(
        QueueCondition(
            type=_short(item.get("type")),
            status=_short(item.get("status")),
            reason=_short(item.get("reason")),
            message=sentence(str(item.get("message") or ""), _TEXT_BYTES),
            changed=_short(item.get("lastTransitionTime")),
            generation=item.get("observedGeneration") or 0,
        )
        for item in items
    )


def _read_list(value: Any, path: str) -> list[Mapping[str, Any]]:
    items = value if value is not None else []
    if not isinstance(items, list) or len(items) > MAX_CONDITIONS:
        raise ValueError(f"{path}: expected a list of at most {MAX_CONDITIONS}, found {str(value)[:80]!r}")
    return [read_mapping(item, f"{path}[{index}]") for index, item in enumerate(items)]


def _read_count(value: Any, path: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= MAX_PODS:
        raise ValueError(f"{path}: expected a whole number from 0, found {str(value)[:80]!r}")
    return value


def _short(value: Any) -> str:
    return sentence(str(value), _TEXT_BYTES) if value is not None else ""
