"""What people and programs read: phase, conditions and the columns of `kubectl get etj`. Derived, never decided on."""

from __future__ import annotations

import dataclasses

from elastic_operator.api.conditions import Type, generation_of, set_condition
from elastic_operator.api.status import Current, Phase, Status, short
from elastic_operator.manifests.attempt import attempt_name, selector
from elastic_operator.observed.observation import Trouble
from elastic_operator.observed.pod_diagnosis import OF_THE_LAUNCH
from elastic_operator.observed.signals import pod_signals
from elastic_operator.reconcile.context import Context, stopped_pods


def summarize_status(context: Context, status: Status) -> Status:
    """Fill everything that follows from the rest."""
    phase, reason, message = _phase(context, status)
    trouble = _trouble(context, status)
    if trouble is not None and reason == trouble.reason != status.reason:
        context.emit(reason, trouble.message, warning=True)
    current = status.current
    shown = current if current is not None and not status.terminal else None
    if status.phase == Phase.COMPLETE:
        shown = current
    return dataclasses.replace(
        _conditions(context, status, phase, reason, message),
        phase=phase,
        reason=reason,
        message=message[:4096],
        observed_generation=context.job.generation,
        topology=dict(shown.topology) if shown else {},
        topology_text=short(shown.topology) if shown else "",
        replicas=shown.num_nodes if shown else 0,
        nodes_text=_nodes_text(context, status),
        ettr_text=_percent(status.goodput.get("ettr")),
        gpus=shown.num_nodes * shown.gpus_per_node if shown else 0,
        selector=selector(context.job.name),
    )


def _nodes_text(context: Context, status: Status) -> str:
    """What runs, of what is wanted: `2/3` is a job of three nodes that goes on with two."""
    if status.terminal:
        return ""
    running = sum(pod.phase == "Running" for pod in context.world.workers(status.attempt)) if status.launched else 0
    return f"{running}/{context.spec.nodes.preferred or context.spec.nodes.max}"


def _percent(ratio: float | None) -> str:
    return "" if ratio is None else f"{ratio:.1%}"


def _phase(context: Context, status: Status) -> tuple[str, str, str]:
    kept = (status.reason, status.message)
    current = status.current
    if status.terminal or (current is None and status.phase in (Phase.WAITING, Phase.SUSPENDED)):
        return status.phase, *kept
    running = [pod for pod in stopped_pods(context, status) if not pod.terminal]
    cause = status.recoveries[-1].cause if status.recoveries else ""
    if status.drain is not None:
        return Phase.DRAINING, status.drain.cause, status.drain.message
    if current is None:
        if running:
            return Phase.STOPPING, cause or "Stopping", f"{len(running)} pods are being stopped"
        return Phase.PENDING, "Pending", "waiting for a plan"
    if current.launch_time is None:
        return _preparing(context, status, current, len(running), cause)
    name = attempt_name(context.job.name, status.attempt)
    if current.first_step_time is None:
        reason, why = _waits(context, status)
        ready = sum(pod.phase == "Running" for pod in context.world.workers(status.attempt))
        text = f"{name}: {ready} of {current.num_nodes} pods run, no step yet"
        return Phase.STARTING, reason or "Launched", f"{text}; {why}" if why else text
    return Phase.RUNNING, "Training", f"{name}: {short(current.topology)} on {current.num_nodes} nodes"


def _trouble(context: Context, status: Status) -> Trouble | None:
    """What keeps the current attempt from getting its pods, as far as it is still so."""
    found, current = context.world.trouble, status.current
    if found is None or current is None or found.attempt != status.attempt:
        return None
    launched = found.reason in OF_THE_LAUNCH and current.launch_time is not None and bool(current.job_uid)
    return None if launched else found


def _waits(context: Context, status: Status) -> tuple[str, str]:
    """Reason and sentence for what a launched attempt without a step waits for; empty where all is in order.

    What ends the attempt once it has lasted for its grace is told from its first moment on: a person need not wait.
    """
    trouble = _trouble(context, status)
    if trouble is not None:
        return trouble.reason, trouble.message
    for pod in context.world.workers(status.attempt):
        for signal in pod_signals(pod, context.now):
            return signal.kind, signal.message
    return "", ""


def _preparing(context: Context, status: Status, current: Current, running: int, cause: str) -> tuple[str, str, str]:
    if not current.resume.ready:
        known = status.reshard
        if known is not None and known.retry_time is not None and known.retry_time > context.now:
            return Phase.RESHARDING, "ReshardRetry", f"retrying after: {known.message}"
        trouble = _trouble(context, status)
        if trouble is not None:
            return Phase.RESHARDING, trouble.reason, trouble.message
        why = "StartFrom" if current.resume.external else "TopologyChanged"
        return Phase.RESHARDING, cause or why, current.resume.reason
    if running:
        return Phase.STOPPING, cause or "Stopping", f"{running} pods of older attempts are being stopped"
    return Phase.STARTING, cause or "Launching", f"attempt {status.attempt} is being launched"


def _conditions(context: Context, status: Status, phase: str, reason: str, message: str) -> Status:
    conditions = status.conditions
    generation = context.job.generation

    def put(type_: Type, value: bool, why: str, text: str) -> None:
        nonlocal conditions
        conditions = set_condition(
            conditions, type_, value, reason=why, message=text, now=context.now, generation=generation
        )

    put(Type.SPEC_VALID, True, "Valid", "the spec makes sense")
    if status.current is not None:
        _resumed(put, status.current)
    put(Type.LAUNCHED, *_launched(context, status, phase, reason, message))
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
    return dataclasses.replace(status, conditions=generation_of(conditions, generation))


def _launched(context: Context, status: Status, phase: str, reason: str, message: str) -> tuple[bool, str, str]:
    """Status, reason and message of the condition Launched."""
    current, name = status.current, attempt_name(context.job.name, status.attempt)
    if current is not None and current.schedule_time is not None and not status.terminal:
        return True, "PodsBegan", f"all pods of {name} have begun"
    if phase == Phase.STARTING or _trouble(context, status) is not None:
        return False, reason, message
    return False, phase, f"the job is {phase}"


def _resumed(put, current: Current) -> None:  # type: ignore[no-untyped-def]  # noqa: ANN001
    resume = current.resume
    put(Type.RESUMED, bool(resume.uri), "FromCommit" if resume.uri else "NoCommit", resume.reason)
