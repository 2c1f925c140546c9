"""The actions that bring the job's Workload to what the status says. They depend on nothing else, as all actions.

At most one change of a Workload is made in a pass, because each names the version that was read.
"""

from __future__ import annotations

import datetime
from collections.abc import Iterator, Mapping
from typing import Any

from elastic_operator.api.status import Phase, Status
from elastic_operator.manifests import workload as manifest
from elastic_operator.observed.observation import RESHARD
from elastic_operator.observed.queueing.workloads import QueueCondition, QueueView, WorkloadView
from elastic_operator.planning import planner
from elastic_operator.reconcile import running
from elastic_operator.reconcile.actions import Action, Create, DeleteWorkload, PatchWorkload
from elastic_operator.reconcile.context import Context, find_lost_nodes, select_running_pods
from elastic_operator.reconcile.queueing.standing import find_mismatch
from reshard.errors import TopologyError

_REQUEUED = ("Preempted", "NodeFailures")
"""Reasons of an eviction after which Kueue queues the Workload again at once; after others it decides when."""


def workload_actions(context: Context, status: Status) -> Iterator[Action]:
    """Generate the actions for the Workloads of a job."""
    view = context.world.queue
    if view is None or any(item.problem for item in view.workloads):
        return
    if not manifest.queue_of(context.job):
        yield from (DeleteWorkload(name=item.name, uid=item.uid) for item in view.workloads if not item.is_deleting)
        return
    if status.terminal:
        yield from _finish(context, status, view)
        return
    current = view.current
    if current is None:
        if not (context.spec.suspend or view.problem or view.refusal):
            yield _create(context, view)
        return
    yield from _remove_others(context, status, view, current)
    change = _change(context, status, view, current)
    if change is not None:
        yield change
    elif not view.refusal and wants_more(context, status, current) and len(view.unfinished) == 1:
        yield _create(context, view, replaces=current)


def _create(context: Context, view: QueueView, replaces: WorkloadView | None = None) -> Create:
    number = max((item.number for item in view.workloads), default=0) + 1
    body = manifest.workload(
        context.job, number, _spec(context, view, replaces), replaces=replaces.name if replaces is not None else ""
    )
    return Create(manifest=body)


def _spec(context: Context, view: QueueView, replaces: WorkloadView | None = None) -> dict[str, Any]:
    """Return the spec of the Workload, or of one that replaces another and therefore asks for more."""
    counts = planner.node_counts(context.spec)
    held = replaces.assigned or 0 if replaces is not None else 0
    larger = [count for count in counts if count > held] or list(counts)
    return manifest.workload_spec(
        context.job, context.spec, least=min(larger), most=max(larger), priority=view.priority
    )


def wants_more(context: Context, status: Status, workload: WorkloadView) -> bool:
    """Return whether the running attempt would change to a better topology if it had more quota."""
    current = status.current
    if (
        context.spec.suspend
        or not workload.is_admitted
        or current is None
        or current.first_step_time is None
        or status.drain is not None
        or (workload.assigned or 0) >= max(planner.node_counts(context.spec))
    ):
        return False
    try:
        better = running.find_better(context, status, current, beyond_quota=True)
    except (TopologyError, ArithmeticError):
        return False
    return better is not None and better[1].is_worth and better[0].num_nodes > (workload.assigned or 0)


def _remove_others(context: Context, status: Status, view: QueueView, current: WorkloadView) -> Iterator[Action]:
    """Delete the Workloads that were replaced, and a replacement that waits and is no longer wanted.

    Kueue admits a replacement first, and then finishes the Workload that it replaces. If the second write fails, Kueue
    leaves it to the owner of both, and the job would hold the quota of both.
    """
    is_wanted = wants_more(context, status, current)
    wanted = manifest.digest(_spec(context, view, current))
    for item in view.workloads:
        is_pending = item.number > current.number and not item.has_quota
        is_unwanted = is_pending and not (is_wanted and item.digest == wanted)
        is_replaced = item.number < current.number and current.is_admitted
        if not item.is_deleting and item.uid != current.uid and (item.is_finished or is_unwanted or is_replaced):
            yield DeleteWorkload(name=item.name, uid=item.uid)


def _change(context: Context, status: Status, view: QueueView, current: WorkloadView) -> PatchWorkload | None:
    """Return the next change of the Workload that counts; None if it is as it should be."""
    # Others deactivate Workloads, too: a suspension changes only an active one, and its end only what it has changed.
    must_change = current.is_active if context.spec.suspend else current.is_paused
    if must_change:
        return _set_active(current, active=not context.spec.suspend)
    is_idle = not status.launched and not _has_running_pods(context, status)
    wanted = _spec(context, view)
    digest = manifest.digest(wanted)
    if current.has_quota and is_idle:
        evicted = current.condition("Evicted")
        if current.is_evicted and evicted is not None:
            return _release(context, current, evicted.reason, evicted.message, requeue=evicted.reason in _REQUEUED)
        if status.current is None and (mismatch := find_mismatch(context, current)):
            return _release(context, current, "Preempted", f"the Workload {mismatch}", requeue=True)
    if not current.has_quota and current.digest != digest and not view.refusal:
        notes = {manifest.HASH: digest, manifest.REPLACEMENT_FOR: None}
        removed = dict.fromkeys(("priorityClassRef", "priority", "maximumExecutionTimeSeconds"))
        return _patch(current, {"metadata": {"annotations": notes}, "spec": {**removed, **wanted}})
    priority = (manifest.priority_class_of(context.job), view.priority)
    if priority[0] and priority[1] is not None and priority != (current.priority_class, current.priority):
        return _patch(current, {"spec": {key: wanted[key] for key in ("priorityClassRef", "priority")}})
    if _are_pods_ready(context, status, current):
        ready = {"PodsReady": ("True", "Started", "all pods of the attempt have started")}
        return _patch_status(context, current, ready)
    return None


def _set_active(workload: WorkloadView, *, active: bool) -> PatchWorkload:
    notes = {manifest.PAUSED: None if active else "true"}
    return _patch(workload, {"metadata": {"annotations": notes}, "spec": {"active": active}})


def _are_pods_ready(context: Context, status: Status, workload: WorkloadView) -> bool:
    """Return whether all pods have started and Kueue, which may wait for that, does not know it yet."""
    current = status.current
    has_started = current is not None and current.schedule_time is not None
    return workload.is_admitted and has_started and not workload.is_true("PodsReady")


def _has_running_pods(context: Context, status: Status) -> bool:
    """Return whether a pod, or a Job that could create one, still uses the quota."""
    lost = find_lost_nodes(context, status)
    converting = (pod for pod in context.world.pods if pod.role == RESHARD and not pod.terminal)
    is_converting = status.current is None and any(pod.node not in lost for pod in converting)
    may_create = any(not (job.complete or job.failed or job.deleting) for job in context.world.jobs)
    return is_converting or may_create or bool(select_running_pods(context, status))


def _finish(context: Context, status: Status, view: QueueView) -> Iterator[Action]:
    """Give the quota back for good, once the pods of a job that has ended have ended too."""
    if any(not pod.terminal for pod in context.world.workers(status.attempt)) or _has_running_pods(context, status):
        return
    reason = "Succeeded" if status.phase == Phase.COMPLETE else "Failed"
    for item in view.unfinished:
        yield _patch_status(context, item, {"Finished": ("True", reason, status.message or reason)})


def _release(context: Context, workload: WorkloadView, reason: str, message: str, *, requeue: bool) -> PatchWorkload:
    """Give the quota back, as Kueue itself does for the kinds that it knows (jobframework/reconciler.go, step 6)."""
    changes = {
        "QuotaReserved": ("False", "Pending", message),
        "Admitted": ("False", "NoReservation", "The workload has no reservation"),
        "Requeued": ("True" if requeue else "False", reason, message),
    }
    if workload.condition("PodsReady") is not None:
        changes["PodsReady"] = ("False", "WaitForStart", "the pods have stopped")
    return _patch_status(context, workload, changes, admission=None)


def _patch_status(
    context: Context, workload: WorkloadView, changes: Mapping[str, tuple[str, str, str]], **fields: Any
) -> PatchWorkload:
    """Return a patch that sets conditions, by type: status, reason and message; a merge replaces the whole list."""
    now = datetime.datetime.fromtimestamp(context.now, tz=datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    kept = {item.type: _condition(item) for item in workload.conditions}
    for type_, (value, reason, message) in changes.items():
        old = workload.condition(type_)
        changed = old.changed if old is not None and old.status == value and old.changed else now
        kept[type_] = {
            "type": type_,
            "status": value,
            "reason": reason or type_,
            "message": message,
            "lastTransitionTime": changed,
            "observedGeneration": workload.generation,
        }
    return _patch(workload, {"status": {**fields, "conditions": list(kept.values())}}, subresource="status")


def _condition(condition: QueueCondition) -> dict[str, Any]:
    return {
        "type": condition.type,
        "status": condition.status,
        "reason": condition.reason,
        "message": condition.message,
        "lastTransitionTime": condition.changed,
        "observedGeneration": condition.generation,
    }


def _patch(workload: WorkloadView, changes: Mapping[str, Any], subresource: str = "") -> PatchWorkload:
    return PatchWorkload(
        name=workload.name, uid=workload.uid, version=workload.version, changes=changes, subresource=subresource
    )
