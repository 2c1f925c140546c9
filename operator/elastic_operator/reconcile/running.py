"""A launched attempt: is it done, is it dying, should it change?"""

from __future__ import annotations

import dataclasses

from elastic_operator.api.serialization import Time
from elastic_operator.api.spec import spec_hash
from elastic_operator.api.status import Current, Drain, Growth, Phase, Progress, Status, short
from elastic_operator.observed import signals
from elastic_operator.observed.observation import LeaseView
from elastic_operator.observed.schedulability import tolerates
from elastic_operator.observed.signals import Kind, Signal, Verdict
from elastic_operator.planning import growth, planner
from elastic_operator.reconcile import goodput, progress, recovery
from elastic_operator.reconcile.context import Context, capacity, lost_nodes, suspect_nodes
from elastic_operator.reconcile.next_attempt import pinned
from reshard.contract import TrainerPhase
from reshard.errors import TopologyError
from reshard.topology import Topology

HORIZON_SECONDS = 4 * 3600.0
"""How long a grown attempt is expected to last where no failures have been seen yet."""

RESTART_SECONDS = 60.0
"""What a planned restart is taken to cost where none has been measured yet."""


def run(context: Context, status: Status, current: Current) -> Status:
    """One look at a launched attempt."""
    lease = context.world.leases.get(status.attempt)
    if lease is not None and (refusal := lease.owner_error):
        return recovery.fail_as_not_owner(context, status, refusal)
    verdict = judge(context, status, current)
    if _complete(context, status, lease, verdict):
        step = progress.latest_step(context, status)
        context.emit("Complete", f"training is complete after step {step}, in attempt {status.attempt}")
        reported = dataclasses.replace(status.progress or Progress(), phase=TrainerPhase.COMPLETE, step=step)
        status = progress.accounted(dataclasses.replace(status, progress=reported), context.now)
        return dataclasses.replace(
            status,
            phase=Phase.COMPLETE,
            reason="TrainingComplete",
            message=f"complete after step {step}",
            drain=None,
            growth=None,
            finish_time=Time(context.now),
        )
    if status.drain is not None and lease is not None and lease.phase == TrainerPhase.DRAINED:
        context.emit("Drained", f"attempt {status.attempt} has committed step {status.checkpoint.step} and exits")
        return _change(context, status, status.drain)
    if verdict.failure is not None:
        return _fail(context, status, verdict, verdict.failure)
    if status.drain is not None:
        return _follow_drain(context, status, status.drain)
    return _consider_change(context, status, current, lease, verdict)


def judge(context: Context, status: Status, current: Current) -> Verdict:
    """What has happened to the attempt's pods, nodes, devices and Lease."""
    spec, limits = context.spec, context.limits
    tolerations = (spec.template.get("spec") or {}).get("tolerations") or ()
    nodes = (context.world.nodes.get(name) for name in {pod.node for pod in context.world.pods if pod.node})
    taints = (taint for node in nodes if node is not None for taint in node.taints)
    tolerated = [taint for taint in taints if tolerates(tolerations, taint)]
    found = signals.attempt_signals(
        context.world,
        attempt=status.attempt,
        resource=spec.accelerator.resource,
        tolerated=tolerated,
        launch_time=current.launch_time or context.now,
        job_seen=bool(current.job_uid),
        started=current.first_step_time is not None,
        limits=limits,
        now=context.now,
    )
    return signals.judge(found, context.graces, context.now)


def start_drain(context: Context, status: Status, cause: str, message: str, nodes: tuple[str, ...] = ()) -> Status:
    """Begin a planned change: drain if there is a training loop to answer, else go on at once."""
    drain = Drain(cause=cause, message=message, start_time=Time(context.now), nodes=nodes)
    lease = context.world.leases.get(status.attempt)
    if lease is None or lease.phase in ("", TrainerPhase.STARTING, TrainerPhase.RESTORING):
        return _change(context, status, drain)
    context.emit("DrainRequested", f"{message.removesuffix('.')}: attempt {status.attempt} is asked to commit and exit")
    return dataclasses.replace(status, drain=drain)


def _complete(context: Context, status: Status, lease: LeaseView | None, verdict: Verdict) -> bool:
    job = context.world.job(status.attempt)
    phase = lease.phase if lease else ""
    if job is not None and job.complete:
        return phase != TrainerPhase.DRAINED
    # The last step is done and committed; how the processes ended after that does not matter.
    pods = context.world.workers(status.attempt)
    return phase == TrainerPhase.COMPLETE and (verdict.failure is not None or all(pod.terminal for pod in pods))


def _fail(context: Context, status: Status, verdict: Verdict, failure: Signal) -> Status:
    lost = set(verdict.lost_nodes) | lost_nodes(context, status)
    suspected = suspect_nodes(context)
    step = progress.latest_step(context, status)
    status = dataclasses.replace(status, progress=dataclasses.replace(status.progress or Progress(), step=step))
    # Pods fail when a peer's node vanishes, often before the node is confirmed lost: that is the cause, not they.
    entailed = bool(suspected) and failure.kind in (Kind.POD_FAILED, Kind.JOB_FAILED, Kind.POD_DELETED)
    names = ", ".join(sorted(suspected))
    return recovery.recover(
        context,
        status,
        cause=Kind.NODE_NOT_READY if entailed else failure.kind,
        message=f"lost, or about to be: {names}; {failure.message}" if entailed else failure.message,
        since=failure.since,
        lost=lost,
        suspected=suspected,
    )


def _change(context: Context, status: Status, drain: Drain) -> Status:
    step = progress.latest_step(context, status)
    status = dataclasses.replace(status, progress=dataclasses.replace(status.progress or Progress(), step=step))
    return recovery.recover(
        context, status, cause=drain.cause, message=drain.message, since=drain.start_time, planned=True
    )


def _follow_drain(context: Context, status: Status, drain: Drain) -> Status:
    limit = context.spec.recovery.drain_seconds
    if context.now - drain.start_time < limit:
        return status
    text = f"attempt {status.attempt} did not drain within {limit} s: going on with the commit of step"
    context.emit("DrainTimedOut", f"{text} {status.checkpoint.step}", warning=True)
    return _change(context, status, drain)


def _consider_change(
    context: Context, status: Status, current: Current, lease: LeaseView | None, verdict: Verdict
) -> Status:
    if verdict.planned:
        nodes = tuple(sorted({signal.node for signal in verdict.planned}))
        first = verdict.planned[0]
        return start_drain(context, status, first.kind, first.message, nodes)
    if not allowed(context, current) or current.spec_hash != spec_hash(context.spec):
        return start_drain(context, status, "SpecChanged", "the spec was edited")
    if current.first_step_time is None or lease is None or lease.phase != TrainerPhase.TRAINING:
        return status
    return consider_growth(context, status, current)


def allowed(context: Context, current: Current) -> bool:
    """The spec still permits this number of nodes."""
    return context.spec.nodes.permits(current.num_nodes)


def consider_growth(context: Context, status: Status, current: Current) -> Status:
    """Notice that a better topology has room, and begin the change once it has had it for long enough."""
    spec = pinned(context.spec, status.pinned)
    try:
        topology = Topology.from_dict(current.topology)
        shape = planner.shape_of(topology, num_nodes=current.num_nodes, per_node=current.gpus_per_node)
        running = planner.evaluate(spec, shape)
    except (TopologyError, ArithmeticError):
        return status
    best = planner.best(spec, capacity(context, status), topology)
    if best is None or (best.topology == topology and best.num_nodes == current.num_nodes):
        return dataclasses.replace(status, growth=None)
    verdict = growth.worth_growing(
        running, best, restart_seconds=_restart_seconds(status), horizon_seconds=HORIZON_SECONDS
    )
    if not verdict.worth:
        return dataclasses.replace(status, growth=None)
    text, seen = short(best.topology.to_dict()), status.growth
    if seen is None or (seen.topology, seen.num_nodes) != (text, best.num_nodes):
        seen = Growth(topology=text, num_nodes=best.num_nodes, since=Time(context.now))
        wait = spec.recovery.scale_up_stable_seconds
        context.emit("CapacityReturned", f"{verdict.reason} If it stays for {wait} s, the job grows.")
    status = dataclasses.replace(status, growth=seen)
    # What is at hand is not counted as settled before the attempt itself has run for as long.
    settled = max(seen.since, current.first_step_time or context.now)
    if context.now - settled < spec.recovery.scale_up_stable_seconds:
        return status
    return start_drain(context, status, "CapacityReturned", verdict.reason)


def _restart_seconds(status: Status) -> float:
    measured = [
        past.seconds["total"]
        for past in status.recoveries
        if "total" in past.seconds and past.cause != goodput.SUSPENDED
    ]
    return max(measured, default=RESTART_SECONDS)
