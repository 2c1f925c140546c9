"""`kubectl etj plan`: what the operator would do after a change, computed by the operator's own planning code. Pure."""

from __future__ import annotations

import dataclasses

from elastic_operator.api.spec_model import LOAD
from elastic_operator.api.status import Current, Phase, StartMode, Status, short
from elastic_operator.planning import planner
from elastic_operator.plugin.pages.recovery_estimate import Estimate, estimate_recovery
from elastic_operator.plugin.pages.whatif import Change, apply_change
from elastic_operator.reconcile import next_attempt, running
from elastic_operator.reconcile.context import Context, find_capacity


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Alternative:
    """A topology that could also run, but that the planner ranks below the chosen one."""

    topology: str
    nodes: int
    gpus_per_node: int
    accumulation_steps: int
    step_seconds: float | None = None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Refused:
    """A topology that cannot run, with the reason."""

    subject: str
    reason: str


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ReshardForecast:
    """The conversion of the checkpoint.

    Attributes:
        mode: `None` (the checkpoint needs no conversion, or there is none), `Load` (the training loads a commit of
            another topology by itself), else `spec.reshard.mode`.
        last_mode: the mode that `Auto` chose for the last conversion.
        source: commit that is read.
        num_bytes: size of the commit; None if it is unknown.
    """

    mode: str
    reason: str
    last_mode: str = ""
    source: str = ""
    num_bytes: int | None = None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Forecast:
    """Forecast of the operator's actions after a change.

    Attributes:
        outcome: `Unaffected` (the attempt goes on), `Grows` (the attempt goes on until a better one replaces it),
            `Restarts` (same topology), `Reshards` (another topology), `Starts` (no attempt runs now), `Waits` (no
            topology can run), `Finished` (the job has ended).
        reason: why, in one sentence.
        hit: nodes of the running attempt that the change removes or shrinks.
        from_: topology before the change.
        to: topology after the change.
        use_nodes: nodes that can run the new attempt; the scheduler chooses among them.
        resume_step: step of the commit to resume from; None for a start from step 0 or from `checkpoint.startFrom`.
        lost_steps: steps that would be repeated if the change happened now.
        free: accelerators that the job could use after the change.
        alternatives: other topologies that could run, best first.
        refused: topologies that cannot run.
    """

    name: str
    namespace: str
    outcome: str
    reason: str
    notes: tuple[str, ...] = ()
    hit: tuple[str, ...] = ()
    free: str = ""
    from_: str = ""
    to: str = ""
    from_nodes: int = 0
    to_nodes: int = 0
    gpus_per_node: int = 0
    use_nodes: tuple[str, ...] = ()
    resume_step: int | None = None
    lost_steps: int = 0
    reshard: ReshardForecast | None = None
    estimate: Estimate | None = None
    alternatives: tuple[Alternative, ...] = ()
    refused: tuple[Refused, ...] = ()


def make_forecast(context: Context, status: Status, change: Change) -> Forecast:
    """Compute what the operator would do with a job after a change.

    Args:
        context: the job and the current observation; Jobs and Leases may be missing.
        status: status of the job.
        change: the change of nodes and accelerators.

    Raises:
        PluginError: the change names an unknown node.
    """
    after = dataclasses.replace(context, world=apply_change(context, status, change), events=[])
    base = Forecast(
        name=context.job.name,
        namespace=context.job.namespace,
        outcome="Finished",
        reason=status.message,
        from_=status.topology_text,
        from_nodes=status.replicas,
        free=str(find_capacity(after, status)),
    )
    if status.terminal:
        return base
    current = status.current if status.launched else None
    hit = _hit(context, after, status) if current else ()
    if current is not None and not hit:
        return _undisturbed(base, after, status, current)
    return dataclasses.replace(_next_attempt(base, after, status), hit=hit)


def _hit(before: Context, after: Context, status: Status) -> tuple[str, ...]:
    """Return the nodes of the running attempt that are missing, or have fewer accelerators than its pods use."""
    resource = before.spec.accelerator.resource
    gpus_in_use: dict[str, int] = {}
    for pod in before.world.pods:
        if pod.role == "worker" and pod.attempt == status.attempt and pod.node and not pod.terminal:
            gpus_in_use[pod.node] = gpus_in_use.get(pod.node, 0) + pod.requests.get(resource, 0)
    nodes = after.world.nodes
    return tuple(
        sorted(n for n, gpus in gpus_in_use.items() if n not in nodes or nodes[n].allocatable.get(resource, 0) < gpus)
    )


def _undisturbed(base: Forecast, after: Context, status: Status, current: Current) -> Forecast:
    grown = running.consider_growth(after, dataclasses.replace(status, growth=None), current)
    result = planner.plan(
        next_attempt.restrict_to_topology(after.spec, status.pinned),
        find_capacity(after, status),
        status.checkpoint.topology,
    )
    if grown.growth is None and grown.drain is None:
        reason = "the running attempt loses nothing, and nothing better fits"
        return dataclasses.replace(
            base,
            outcome="Unaffected",
            reason=reason,
            to=base.from_,
            to_nodes=base.from_nodes,
            gpus_per_node=current.gpus_per_node,
            alternatives=_alternatives(result, base.from_, base.from_nodes),
            refused=_refused(result),
        )
    wait = after.spec.recovery.scale_up_stable_seconds
    why = next((event.message for event in after.events if event.reason == "CapacityReturned"), "")
    then = _next_attempt(base, after, status)
    note = f"it happens once the nodes have been there for {wait} s: the attempt commits first, so no step is lost"
    return dataclasses.replace(then, outcome="Grows", reason=why or then.reason, notes=(note,), lost_steps=0)


def _next_attempt(base: Forecast, after: Context, status: Status) -> Forecast:
    """Forecast the next attempt, as `plan_next` plans it when the current one has stopped."""
    idle = dataclasses.replace(status, current=None, drain=None, growth=None, phase=Phase.PENDING)
    planned = next_attempt.plan_next(after, idle)
    usable = find_capacity(after, planned)
    result = planner.plan(
        next_attempt.restrict_to_topology(after.spec, planned.pinned), usable, status.checkpoint.topology
    )
    notes = tuple(event.message for event in after.events if event.reason == "ExclusionLifted")
    if status.phase == Phase.SUSPENDED:
        notes += ("the job is suspended: this is what a resume would start",)
    common = dataclasses.replace(base, notes=notes, refused=_refused(result), free=str(usable))
    new = planned.current
    if new is None:
        return dataclasses.replace(common, outcome="Waits", reason=planned.message)
    to = short(new.topology)
    outcome = "Starts" if not status.launched else "Restarts" if to == base.from_ else "Reshards"
    step = status.progress.step if status.progress else 0
    reshard = _reshard(after, status, new)
    return dataclasses.replace(
        common,
        outcome=outcome,
        reason=planned.plan.reason if planned.plan else "",
        to=to,
        to_nodes=new.num_nodes,
        gpus_per_node=new.gpus_per_node,
        use_nodes=tuple(name for name in usable.usable(new.gpus_per_node) if name not in new.avoid),
        resume_step=new.resume.step if new.resume.uri and not new.resume.external else None,
        lost_steps=0 if new.resume.external else max(0, step - new.resume.step),
        reshard=reshard,
        alternatives=_alternatives(result, to, new.num_nodes),
        estimate=estimate_recovery(
            status, stops=status.launched, reshards=not new.resume.ready, num_bytes=reshard.num_bytes
        ),
    )


def _reshard(context: Context, status: Status, new: Current) -> ReshardForecast:
    resume = new.resume
    commit = next((item for item in status.checkpoint.history if item.uri == resume.source), None)
    num_bytes = commit.num_bytes if commit and commit.num_bytes else None
    if resume.mode == StartMode.LOAD:
        return ReshardForecast(mode=LOAD, reason=resume.reason, source=resume.uri, num_bytes=num_bytes)
    if resume.ready:
        return ReshardForecast(mode="None", reason=resume.reason, source=resume.uri)
    return ReshardForecast(
        mode="Materialize" if resume.external else context.spec.reshard.mode,
        reason=resume.reason,
        last_mode=_last_mode(status),
        source=resume.source,
        num_bytes=num_bytes,
    )


def _last_mode(status: Status) -> str:
    modes = [item.conversion.mode for item in status.recoveries if item.conversion is not None]
    return modes[-1] if modes else status.reshard.mode if status.reshard else ""


def _alternatives(result: planner.PlanResult, topology: str, num_nodes: int) -> tuple[Alternative, ...]:
    """Return the topologies that can run, without the given one."""
    return tuple(
        Alternative(
            topology=str(item.topology),
            nodes=item.num_nodes,
            gpus_per_node=item.per_node,
            accumulation_steps=item.accumulation_steps,
            step_seconds=item.seconds,
        )
        for item in result.candidates
        if (str(item.topology), item.num_nodes) != (topology, num_nodes)
    )


def _refused(result: planner.PlanResult) -> tuple[Refused, ...]:
    return tuple(Refused(subject=item.subject, reason=item.reason) for item in result.rejected)
