"""Summary fields of the status: phase, conditions and the columns of `kubectl get etj`. No decision depends on them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from elastic_operator.api.conditions import Type, set_condition, with_observed_generation
from elastic_operator.api.serialization import format_time
from elastic_operator.api.status import Current, Phase, Status, short
from elastic_operator.manifests.attempt import attempt_name, selector
from elastic_operator.observed import reshard_pods
from elastic_operator.observed.observation import RESHARD, PodDiagnosis
from elastic_operator.observed.pod_diagnosis import LAUNCH_REASONS
from elastic_operator.observed.signals import Signal, detect_pod_signals
from elastic_operator.reconcile.context import Context, describe_stuck_pods, select_stale_pods, select_stuck_pods
from elastic_operator.reconcile.failures.budgets import find_backoff
from elastic_operator.reconcile.failures.placement_limits import describe_limit
from elastic_operator.reconcile.queueing.standing import State, find_standing


def summarize_status(context: Context, status: Status) -> Status:
    """Fill every field that follows from the rest of the status."""
    phase, reason, message = _find_phase(context, status)
    diagnosis = _find_diagnosis(context, status)
    if diagnosis is not None and reason == diagnosis.reason != status.reason:
        context.emit(reason, diagnosis.message, warning=True)
    trouble = _find_reshard_trouble(context, status)
    if trouble is not None and reason == trouble.kind != status.reason:
        context.emit(reason, message, warning=True)
    current = status.current
    shown = current if current is not None and not status.terminal else None
    if status.phase == Phase.COMPLETE:
        shown = current
    return dataclasses.replace(
        _set_conditions(context, status, phase, reason, message),
        phase=phase,
        reason=reason,
        message=message[:4096],
        observed_generation=context.job.generation,
        topology=shown.topology if shown else None,
        topology_text=short(shown.topology) if shown else "",
        replicas=shown.num_nodes if shown else 0,
        nodes_text=_format_nodes(context, status),
        ettr_text=_format_percent(status.goodput.get("ettr")),
        gpus=shown.num_nodes * shown.gpus_per_node if shown else 0,
        selector=selector(context.job.name),
    )


def _format_nodes(context: Context, status: Status) -> str:
    """Return running and wanted pods: `2/3` is a job for three nodes that runs on two."""
    if status.terminal:
        return ""
    running = sum(pod.phase == "Running" for pod in context.world.workers(status.attempt)) if status.launched else 0
    return f"{running}/{context.spec.nodes.preferred or context.spec.nodes.max}"


def _format_percent(ratio: float | None) -> str:
    return "" if ratio is None else f"{ratio:.1%}"


def _find_phase(context: Context, status: Status) -> tuple[str, str, str]:
    recorded = (status.reason, status.message)
    current = status.current
    if status.terminal or (current is None and status.phase in (Phase.WAITING, Phase.SUSPENDED)):
        return status.phase, *recorded
    running = [pod for pod in select_stale_pods(context, status) if not pod.terminal]
    cause = status.changes[-1].cause if status.changes else ""
    if status.drain is not None:
        return Phase.DRAINING, status.drain.cause, status.drain.message
    if current is None:
        if running:
            return (
                Phase.STOPPING,
                cause or "Stopping",
                f"{len(running)} pods are being stopped{_name_stuck(context, status)}",
            )
        return _describe_pending(context, status, cause)
    if current.launch_time is None:
        return _describe_preparation(context, status, current, len(running), cause)
    name = attempt_name(context.job.name, status.attempt)
    if current.first_step_time is None:
        reason, why = _find_wait_reason(context, status)
        ready = sum(pod.phase == "Running" for pod in context.world.workers(status.attempt))
        progress = f"{name}: {ready} of {current.num_nodes} pods run, no step yet"
        return Phase.STARTING, reason or "Launched", f"{progress}; {why}" if why else progress
    return Phase.RUNNING, "Training", f"{name}: {short(current.topology)} on {current.num_nodes} nodes"


def _name_stuck(context: Context, status: Status) -> str:
    stuck = select_stuck_pods(context, status)
    return f", and do not end: {describe_stuck_pods(stuck)}" if stuck else ""


def _describe_pending(context: Context, status: Status, cause: str) -> tuple[str, str, str]:
    backoff = find_backoff(context, status)
    if backoff is None or backoff.retry_time is None:
        return Phase.PENDING, "Pending", "waiting for a plan"
    failures = f"{backoff.in_a_row} failures of class {backoff.failure_class} in a row, the last one {cause}"
    text = f"the next attempt is planned at {format_time(backoff.retry_time)}: {failures}"
    limit = describe_limit(context, status)
    return Phase.PENDING, "Backoff", f"{text}. {limit}" if limit else text


def _find_diagnosis(context: Context, status: Status) -> PodDiagnosis | None:
    """Return why the current attempt has no running pods, unless that is over; else None."""
    diagnosis, current = context.world.pod_diagnosis, status.current
    if diagnosis is None or current is None or diagnosis.attempt != status.attempt:
        return None
    is_launched = diagnosis.reason in LAUNCH_REASONS and current.launch_time is not None and bool(current.job_uid)
    return None if is_launched else diagnosis


def _find_wait_reason(context: Context, status: Status) -> tuple[str, str]:
    """Return why a launched attempt makes no step yet, as reason and sentence; both empty if nothing is wrong.

    A signal is reported from its first moment, before its grace period ends the attempt, so that people can act early.
    """
    diagnosis = _find_diagnosis(context, status)
    if diagnosis is not None:
        return diagnosis.reason, diagnosis.message
    for pod in context.world.workers(status.attempt):
        for signal in detect_pod_signals(pod, context.now):
            return signal.kind, signal.message
    return "", ""


def _find_reshard_trouble(context: Context, status: Status) -> Signal | None:
    """Return what keeps the current reshard Job's pods from starting, from its first moment; None if nothing does."""
    current, reshard = status.current, status.reshard
    job = context.world.job(status.attempt, RESHARD)
    if current is None or current.resume.ready or status.terminal or job is None:
        return None
    if job.complete or job.failed or job.deleting or (reshard is not None and job.uid == reshard.failed_uid):
        return None
    trouble = reshard_pods.detect_start_trouble(reshard_pods.select_reshard_pods(context.world, job), job, context.now)
    return trouble if trouble is not None and reshard_pods.is_shown(trouble) else None


def _describe_preparation(
    context: Context, status: Status, current: Current, running: int, cause: str
) -> tuple[str, str, str]:
    if not current.resume.ready:
        reshard = status.reshard
        if reshard is not None and reshard.retry_time is not None and reshard.retry_time > context.now:
            return Phase.RESHARDING, "ReshardRetry", f"retrying after: {reshard.message}"
        diagnosis = _find_diagnosis(context, status)
        if diagnosis is not None:
            return Phase.RESHARDING, diagnosis.reason, diagnosis.message
        trouble = _find_reshard_trouble(context, status)
        if trouble is not None:
            return Phase.RESHARDING, trouble.kind, trouble.message
        why = "StartFrom" if current.resume.external else "TopologyChanged"
        return Phase.RESHARDING, cause or why, current.resume.reason
    if running:
        return Phase.STOPPING, cause or "Stopping", f"{running} pods of older attempts are being stopped"
    return Phase.STARTING, cause or "Launching", f"attempt {status.attempt} is being launched"


def _set_conditions(context: Context, status: Status, phase: str, reason: str, message: str) -> Status:
    conditions = status.conditions
    generation = context.job.generation

    def put(type_: Type, value: bool, why: str, text: str) -> None:
        nonlocal conditions
        conditions = set_condition(
            conditions, type_, value, reason=why, message=text, now=context.now, generation=generation
        )

    put(Type.SPEC_VALID, True, "Valid", "the spec is valid")
    if status.current is not None:
        _put_resumed(put, status.current)
    standing = find_standing(context, status)
    if standing.state is not State.FREE:
        put(Type.QUOTA_RESERVED, standing.state is State.ADMITTED, standing.reason, standing.message)
    elif context.world.queue is None or not context.world.queue.workloads:
        conditions = tuple(item for item in conditions if item.type != Type.QUOTA_RESERVED)
    put(Type.LAUNCHED, *_describe_launch(context, status, phase, reason, message))
    for type_, wanted in (
        (Type.RUNNING, Phase.RUNNING),
        (Type.DRAINING, Phase.DRAINING),
        (Type.RESHARDING, Phase.RESHARDING),
        (Type.SUSPENDED, Phase.SUSPENDED),
        (Type.COMPLETE, Phase.COMPLETE),
        (Type.FAILED, Phase.FAILED),
    ):
        if phase == wanted:
            put(type_, True, reason or phase, message)
        else:
            put(type_, False, phase, f"the job is {phase}")
    return dataclasses.replace(status, conditions=with_observed_generation(conditions, generation))


def _describe_launch(context: Context, status: Status, phase: str, reason: str, message: str) -> tuple[bool, str, str]:
    """Return status, reason and message of the condition Launched."""
    current, name = status.current, attempt_name(context.job.name, status.attempt)
    if current is not None and current.schedule_time is not None and not status.terminal:
        return True, "PodsBegan", f"all pods of {name} have started"
    if phase == Phase.STARTING or _find_diagnosis(context, status) is not None:
        return False, reason, message
    return False, phase, f"the job is {phase}"


def _put_resumed(put: Callable[[Type, bool, str, str], None], current: Current) -> None:
    resume = current.resume
    put(Type.RESUMED, bool(resume.uri), "FromCommit" if resume.uri else "NoCommit", resume.reason)
