"""Describes what a job does now, and what it waits for. Pure."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from elastic_operator.api.conditions import Type, find
from elastic_operator.api.spec import Spec
from elastic_operator.api.status import Phase, Status
from elastic_operator.observed.capacity import NOT_OFFERED
from elastic_operator.observed.pod_diagnosis import LAUNCH_REFUSED, POD_STUCK, PODS_REFUSED
from elastic_operator.observed.signal_kinds import Kind
from elastic_operator.plugin.pages.job_source import JobSource
from elastic_operator.plugin.pages.text import format_age, format_size, pluralize
from elastic_operator.reconcile.failures.refused_commits import ASKING

SILENT_SECONDS = 15.0
"""Age of a job without status after which the page asks whether the operator is running."""


_REFUSED = "change the rule that refuses them, or edit spec.template; the cluster goes on trying by itself"
_ADVICE: Mapping[str, str] = {
    LAUNCH_REFUSED: _REFUSED,
    PODS_REFUSED: _REFUSED,
    POD_STUCK: "look at the claim, the node and its network; the kubelet goes on trying by itself",
    Kind.IMAGE: "edit spec.template: the operator plans anew at once",
    Kind.UNSCHEDULABLE: "the pods wait; `kubectl describe pod` has the scheduler's reasons: the claim, memory, taints",
}
"""Advice to the user about an attempt that does not start, by the reason of its phase."""


_RESOURCE_ADVICE = (
    "does the device plugin run, and is spec.accelerator.resource what the nodes offer (`kubectl describe nodes`)?"
)
"""Advice to the user about a job that waits for accelerators that no node offers."""


_RESHARD_ADVICE: Mapping[str, str] = {
    LAUNCH_REFUSED: _ADVICE[LAUNCH_REFUSED],
    PODS_REFUSED: "change the rule that refuses them, or edit spec.reshard; the cluster goes on trying by itself",
    POD_STUCK: _ADVICE[POD_STUCK],
    Kind.IMAGE: "edit spec.reshard.template: the conversion begins anew at once; else it is tried again by itself",
    Kind.UNSCHEDULABLE: "make room, or lower spec.reshard.resources: the conversion begins anew at once",
}
"""Advice to the user about a conversion that does not start, by the reason of its phase."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Waiting:
    """State of a job, with the reason of a wait and advice to the user."""

    doing: str
    waits_for: str = ""
    advice: str = ""


def explain_wait(source: JobSource, now: float) -> Waiting:
    """Describe the current state of one job.

    Args:
        source: the job.
        now: current time in seconds since the epoch.
    """
    status = source.status
    if source.managed_by:
        return Waiting(doing=f"{source.managed_by} manages this job (spec.managedBy), not elastic-operator")
    if not source.is_seen:
        since = None if source.created_at is None else now - source.created_at
        advice = (
            "is elastic-operator running, and does it serve this namespace?" if (since or 0) > SILENT_SECONDS else ""
        )
        return Waiting(
            doing=f"no operator has looked at the job in the {format_age(since)} since it was created",
            waits_for="the operator",
            advice=advice,
        )
    problem = source.problem or _find_objection(source)
    if problem and not status.terminal:
        left = "; what runs goes on, but is not recovered until the spec is edited" if status.launched else ""
        return Waiting(doing=f"the spec cannot be used: {problem}{left}", waits_for="an edit of the spec")
    waiting = _explain_phase(source.name, source.spec, status, now)
    is_unseen = source.generation > status.observed_generation and not status.terminal
    if is_unseen:
        return dataclasses.replace(waiting, advice="the spec was edited and the operator has not looked at it yet")
    return waiting


def _find_objection(source: JobSource) -> str:
    """Return why the operator or the API server rejects the current spec, or an empty string."""
    condition = find(source.status.conditions, Type.SPEC_VALID)
    if condition is None or condition.status == "True" or condition.observed_generation != source.generation:
        return ""
    return condition.message


def _explain_phase(name: str, spec: Spec | None, status: Status, now: float) -> Waiting:
    match status.phase:
        case Phase.RUNNING:
            return _running(spec, status, now)
        case Phase.STARTING:
            resume = status.current.resume if status.current else None
            step = resume.step if resume and resume.uri else 0
            advice = _ADVICE.get(status.reason, "")
            return Waiting(
                doing=status.message, waits_for=f"all pods to run and step {step + 1} to be done", advice=advice
            )
        case Phase.DRAINING:
            return _draining(spec, status, now)
        case Phase.STOPPING:
            force = f"; pods on lost nodes are removed after {spec.recovery.force_delete_seconds} s" if spec else ""
            return Waiting(doing=status.message, waits_for=f"these pods to be gone{force}")
        case Phase.RESHARDING:
            return _resharding(status, now)
        case Phase.WAITING if status.reason == "Queued":
            return Waiting(doing=status.message, waits_for="quota; it goes on by itself as soon as Kueue admits it")
        case Phase.WAITING:
            return Waiting(
                doing=status.message,
                waits_for="nodes or accelerators; it goes on by itself as soon as a topology fits",
                advice=_RESOURCE_ADVICE
                if NOT_OFFERED in status.message
                else f"`kubectl etj plan {name} --add 1` shows what more nodes would change",
            )
        case Phase.SUSPENDED:
            return Waiting(doing="nothing runs", waits_for=f"`kubectl etj resume {name}`")
        case Phase.COMPLETE:
            return Waiting(doing=status.message)
        case Phase.FAILED if f"kubectl etj retry {name}" in status.message or status.reason in ASKING:
            return Waiting(doing=status.message)  # the message itself says what to correct
        case Phase.FAILED:
            advice = (
                f"`kubectl etj logs {name}`; after the fix `kubectl etj retry {name}` goes on from its newest commit"
            )
            return Waiting(doing=status.message, advice=advice)
        case Phase.PENDING if status.reason == "Backoff":
            advice = f"`kubectl etj logs {name}` shows why; a corrected spec.template ends the wait"
            return Waiting(doing=status.message, waits_for="the end of the pause after failures", advice=advice)
        case _:
            return Waiting(doing=status.message or "waiting for a plan", waits_for="the operator")


def _running(spec: Spec | None, status: Status, now: float) -> Waiting:
    progress = status.progress
    loss = "" if progress is None or progress.loss is None else f", loss {progress.loss:.4g}"
    newest = next((item for item in status.checkpoint.history if not item.invalid), None)
    # The operator writes commits at once, but progress only every ten seconds.
    committed = newest.step if newest is not None and newest.attempt == status.attempt else 0
    doing = f"training: step {max(progress.step if progress else 0, committed)}{loss}"
    if newest is not None:
        doing += f"; newest commit: step {newest.step}" + (
            f", {format_size(newest.num_bytes)}" if newest.num_bytes else ""
        )
    else:
        doing += "; no commit yet"
    growth = status.growth
    if growth is None or spec is None or status.current is None:
        return Waiting(doing=doing)
    since = max(growth.since, status.current.first_step_time or growth.since)
    left = since + spec.recovery.scale_up_stable_seconds - now
    better = f"{growth.topology} on {pluralize(growth.num_nodes, 'node')}"
    when = f"in {format_age(left)} if they stay" if left > 0 else "now"
    return Waiting(doing=doing, waits_for=f"more nodes have come: the job grows to {better} {when}")


def _draining(spec: Spec | None, status: Status, now: float) -> Waiting:
    drain = status.drain
    if drain is None or spec is None:
        return Waiting(doing=status.message, waits_for="its commit")
    left = drain.start_time + spec.recovery.drain_seconds - now
    until = f"; without it the job goes on from step {status.checkpoint.step} in {format_age(left)}"
    doing = f"attempt {status.attempt} is asked to commit and exit, because {drain.message.removesuffix('.')}"
    return Waiting(doing=doing, waits_for="its commit" + until)


def _resharding(status: Status, now: float) -> Waiting:
    job = status.reshard
    if job is not None and job.retry_time is not None and job.retry_time > now:
        return Waiting(doing=status.message, waits_for=f"the next try, in {format_age(job.retry_time - now)}")
    if status.reason in _RESHARD_ADVICE and job is not None:
        advice = _RESHARD_ADVICE[status.reason]
        return Waiting(doing=status.message, waits_for=f"a pod of Job {job.job_name}", advice=advice)
    resume = status.current.resume if status.current else None
    doing = f"converting the checkpoint: {resume.reason}" if resume else status.message
    return Waiting(doing=doing, waits_for=f"Job {job.job_name}" if job else "the reshard Job")
