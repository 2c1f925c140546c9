"""What Kueue does with the job's Workloads: admit them, in part if need be, evict them, and replace one by another."""

from __future__ import annotations

from typing import Any

from elastic_operator.api.serialization import format_time
from elastic_operator.manifests.workload import POD_SET, REPLACEMENT_FOR
from elastic_operator.observed.queueing.workloads import WorkloadView, workload_view
from tests.property.cluster_model.cluster import Cluster


def run(cluster: Cluster) -> None:
    """Let Kueue act once."""
    if cluster.quota is None or not cluster.is_api_up:
        return
    for item, view in _workloads(cluster):
        if not view.is_active and view.has_quota and not view.is_evicted:
            evict(cluster, item, "Deactivated")
    for item, view in _workloads(cluster):
        if view.is_active and not view.is_finished and not view.has_quota:
            _admit(cluster, item, view)
    holders = [(item, view) for item, view in _workloads(cluster) if view.is_admitted]
    if sum(view.assigned or 0 for _, view in holders) > cluster.quota:
        evict(cluster, holders[-1][0], "Preempted")


def _workloads(cluster: Cluster) -> list[tuple[dict[str, Any], WorkloadView]]:
    own = ((item, workload_view(item)) for (kind, _), item in cluster.objects.items() if kind == "Workload")
    return sorted(own, key=lambda pair: pair[1].number)


def views(cluster: Cluster) -> list[WorkloadView]:
    """Return the views of all Workloads."""
    return [view for _, view in _workloads(cluster)]


def _admit(cluster: Cluster, workload: dict[str, Any], view: WorkloadView) -> None:
    """Admit as many pods as there is quota for, if these are enough; the admission of a replacement ends the other."""
    assert cluster.quota is not None
    replaced = workload["metadata"].get("annotations", {}).get(REPLACEMENT_FOR, "").partition("/")[2]
    held = sum(item.assigned or 0 for item in views(cluster) if item.has_quota and item.name != replaced)
    count = min(view.asked, cluster.quota - held)
    if count < max(1, view.minimum):
        return
    if replaced:
        old = cluster.objects.get(("Workload", replaced))
        if old is None or not workload_view(old).is_admitted:
            return
        cluster.effects["a larger admission replaces another"] += 1
        _set(cluster, old, {"Finished": ("True", "WorkloadSliceReplaced")})
    workload["status"]["admission"] = {
        "clusterQueue": "cluster-queue",
        "podSetAssignments": [{"name": POD_SET, "count": count, "flavors": {}}],
    }
    cluster.effects["an admission is partial"] += count < view.asked
    changes = {"QuotaReserved": ("True", "QuotaReserved"), "Admitted": ("True", "Admitted")}
    _set(cluster, workload, {**changes, "Evicted": ("False", "QuotaReserved")})


def evict(cluster: Cluster, workload: dict[str, Any], reason: str) -> None:
    """Ask for the quota of a Workload back."""
    cluster.effects["Kueue asks for its quota back"] += 1
    _set(cluster, workload, {"Evicted": ("True", reason)})


def _set(cluster: Cluster, workload: dict[str, Any], changes: dict[str, tuple[str, str]]) -> None:
    conditions = {item["type"]: item for item in workload["status"].get("conditions", ())}
    for name, (value, reason) in changes.items():
        if name in conditions or value == "True":
            changed = {"status": value, "reason": reason, "message": reason}
            conditions[name] = {"type": name, "lastTransitionTime": format_time(cluster.now), **changed}
    workload["status"]["conditions"] = list(conditions.values())
    bump(cluster, workload)


def patch(cluster: Cluster, name: str, uid: str, version: str, changes: Any) -> bool:
    """Merge changes into a Workload as the API server does; return False on a conflict."""
    workload = cluster.objects.get(("Workload", name))
    meta = workload["metadata"] if workload is not None else {}
    if workload is None or (meta["uid"], meta["resourceVersion"]) != (uid, version):
        return False
    _merge(workload, changes)
    bump(cluster, workload)
    return True


def bump(cluster: Cluster, workload: dict[str, Any]) -> None:
    """Give an object a new version."""
    cluster.serial += 1
    workload["metadata"]["resourceVersion"] = str(cluster.serial)
    cluster.touch()


def _merge(target: dict[str, Any], changes: Any) -> None:
    for key, value in changes.items():
        if value is None:
            target.pop(key, None)
        elif isinstance(value, dict):
            _merge(target.setdefault(key, {}), value)
        else:
            target[key] = value
