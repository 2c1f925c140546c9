"""What Kueue's word means for a job now: it may run, it waits for quota, or it has to give its quota back."""

from __future__ import annotations

import dataclasses
import enum

from elastic_operator.api.status import Status
from elastic_operator.manifests.workload import is_for_other_pods, queue_of
from elastic_operator.observed.queueing.workloads import QueueView, WorkloadView
from elastic_operator.planning import planner
from elastic_operator.reconcile.context import Context

UNADMITTED_SECONDS = 60.0
"""Time for which a running attempt goes on whose Workload is new and not admitted yet.

That happens if somebody deletes the Workload, or if the job joins a queue while it runs. Kueue admits a Workload within
a second if there is quota for it.
"""

QUEUED = "Queued"
"""Reason of the phase Waiting while Kueue has not admitted the job."""


class State(enum.StrEnum):
    FREE = "Free"
    """The job is in no queue."""
    ADMITTED = "Admitted"
    """Kueue has admitted it."""
    WAITING = "Waiting"
    """It has no quota."""
    EVICTED = "Evicted"
    """It holds quota that Kueue wants back."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    """What Kueue says about a job.

    Attributes:
        reason: one word of Kueue for the state, for instance `Preempted`.
        message: a sentence for people.
        workload: the Workload that counts; None if there is none.
    """

    state: State
    reason: str = ""
    message: str = ""
    workload: WorkloadView | None = None

    @property
    def may_run(self) -> bool:
        """True if an attempt may be planned and launched."""
        return self.state in (State.FREE, State.ADMITTED)


def find_standing(context: Context, status: Status) -> Standing:
    """Return what Kueue says about the job.

    Quota that is of no use for the next attempt is none: the operator gives it back before it plans that attempt.
    """
    view, queue = context.world.queue, queue_of(context.job)
    if view is None or not queue:
        return Standing(state=State.FREE)
    workload = view.current
    if workload is not None and workload.problem:
        return Standing(state=State.WAITING, reason="QueueProblem", message=workload.problem, workload=workload)
    if workload is None:
        return _describe_missing(context, view, queue)
    if workload.is_evicted:
        evicted = workload.condition("Evicted")
        reason, message = (evicted.reason, evicted.message) if evicted is not None else ("", "")
        text = f"Kueue has evicted the job ({reason}): {message}"
        return Standing(state=State.EVICTED, reason=reason or "Evicted", message=text, workload=workload)
    if view.problem:
        return Standing(state=State.WAITING, reason="QueueProblem", message=view.problem, workload=workload)
    if workload.is_admitted and status.current is None and (mismatch := find_mismatch(context, workload)):
        text = f"Workload {workload.name} {mismatch}: asking anew"
        return Standing(state=State.WAITING, reason="SpecChanged", message=text, workload=workload)
    if workload.is_admitted:
        text = (
            f"Workload {workload.name} is admitted by ClusterQueue {workload.cluster_queue}: {workload.assigned} of "
            f"{workload.asked} nodes"
        )
        return Standing(state=State.ADMITTED, reason="Admitted", message=text, workload=workload)
    return Standing(state=State.WAITING, **_describe_wait(workload, queue), workload=workload)


def find_mismatch(context: Context, workload: WorkloadView) -> str:
    """Return why the quota of a Workload is of no use for the next attempt, as a predicate; empty if it is of use.

    It is for other pods than those of the spec, in another queue than the label's, or for too few nodes. An edit of
    `spec.nodes` can raise the smallest number of nodes above the admitted one.
    """
    if is_for_other_pods(workload.digest, context.job, context.spec):
        return "asks for other pods, or in another queue"
    least, assigned = planner.node_counts(context.spec)[0], workload.assigned
    if assigned is not None and assigned < least:
        return f"is admitted for {assigned} node{'s' if assigned != 1 else ''}, and the job needs {least} or more"
    return ""


def must_stop(context: Context, status: Status, standing: Standing) -> bool:
    """Return whether a launched attempt has to commit and exit because of its quota."""
    if standing.state is State.EVICTED:
        return True
    workload = standing.workload
    if standing.state is not State.WAITING or workload is None or workload.created_at is None or workload.problem:
        return False
    current = status.current
    since = max(workload.created_at, (current.launch_time if current is not None else None) or 0.0)
    return not workload.has_quota and context.now - since >= UNADMITTED_SECONDS


def _describe_missing(context: Context, view: QueueView, queue: str) -> Standing:
    """Return why there is no Workload: the operator is about to create it, or cannot."""
    if problem := view.problem or view.refusal:
        return Standing(state=State.WAITING, reason="QueueProblem", message=problem)
    refusal = context.world.pod_diagnosis
    text = refusal.message if refusal is not None else f"asking for quota in LocalQueue {queue}"
    return Standing(state=State.WAITING, reason="NoWorkload", message=text)


def _describe_wait(workload: WorkloadView, queue: str) -> dict[str, str]:
    """Return why a Workload is not admitted, in the words of Kueue."""
    if not workload.is_active:
        if workload.is_paused:
            text = f"Workload {workload.name} was deactivated for the suspension of the job"
            return {"reason": "Deactivated", "message": text}
        text = f"Workload {workload.name} is deactivated"
        condition = workload.condition("Evicted") or workload.condition("QuotaReserved")
        detail = f": {condition.message}" if condition is not None and condition.message else ""
        return {"reason": "Deactivated", "message": f"{text}{detail}"}
    if workload.has_quota:
        return {"reason": "AdmissionChecks", "message": f"Workload {workload.name} waits for its admission checks"}
    condition = workload.condition("QuotaReserved")
    if condition is None or not condition.message:
        return {"reason": QUEUED, "message": f"Workload {workload.name} waits in LocalQueue {queue}"}
    return {"reason": condition.reason or QUEUED, "message": f"Workload {workload.name}: {condition.message}"}
