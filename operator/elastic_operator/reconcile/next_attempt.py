"""Plan the next attempt: choose a topology and a commit to resume from, or report why there is none."""

from __future__ import annotations

import dataclasses
import itertools

from elastic_operator.api.conditions import Type
from elastic_operator.api.serialization import Time
from elastic_operator.api.spec import Spec, Strategy, TopologyChoice, spec_hash
from elastic_operator.api.status import Current, Phase, Plan, Progress, Rejected, Status, edit_last_change, short
from elastic_operator.manifests.attempt import checkpoint_root, start_field, start_source
from elastic_operator.observed import commit_history
from elastic_operator.observed.capacity import Capacity, NodeCapacity
from elastic_operator.observed.placement.schedulability import is_schedulable
from elastic_operator.observed.placement.volumes import describe_problems
from elastic_operator.observed.pod_usage import UsageByOthers
from elastic_operator.planning import planner
from elastic_operator.planning.planner import Candidate
from elastic_operator.reconcile import reshard_mode
from elastic_operator.reconcile.context import (
    Context,
    describe_stuck_pods,
    find_avoided_nodes,
    find_capacity,
    is_forgivable,
    list_avoided_nodes,
    select_stuck_pods,
)
from elastic_operator.reconcile.failures import pinned_topology, placement_limits, refused_commits
from reshard.contract import TakeOver, sentence
from reshard.topology import Topology

MAX_REJECTED = 8

MAX_REASON = 2048

MAX_CLAIMS_TEXT = 512

MAX_HOLDERS = 5
"""Maximum number of pods of others that the message of a waiting job names."""

MAX_HOLDERS_TEXT = 1024

MOST_SIZES = 64
"""How many numbers of nodes above `spec.nodes.min` are tried for nodes that an autoscaler has to add."""


def plan_next(context: Context, status: Status) -> Status:
    """Plan attempt N+1, or wait for capacity."""
    spec = restrict_to_topology(context.spec, status.pinned)
    last_topology = status.checkpoint.topology
    result = planner.plan(spec, find_capacity(context, status), last_topology)
    if result.best is None and status.excluded_nodes:
        plan_on_excluded = planner.plan(spec, find_capacity(context, status, forgive=True), last_topology)
        if plan_on_excluded.best is not None:
            result = plan_on_excluded
            context.emit(
                "ExclusionLifted", "too few other nodes are left: excluded nodes that are Ready may be used again"
            )
            status = dataclasses.replace(
                status, excluded_nodes=tuple(item for item in status.excluded_nodes if not is_forgivable(item))
            )
    if result.best is None and (topology := status.pinned) is not None:
        status = pinned_topology.adopt_pin(context, status)
        if pinned_topology.is_retry_due(context, status) and can_run_unpinned(context, status):
            context.emit("ReshardRetry", f"no nodes for {short(status.pinned)} came: the checkpoint is converted again")
            return pinned_topology.lift_pin(status)
        if pinned_topology.is_final(status) and not _can_ever_run(spec, topology):
            return refused_commits.stop_unloadable(context, status)
    awaits_nodes = result.best is None and spec.nodes.autoscaling
    if awaits_nodes:
        result = _plan_on_new_nodes(spec, result.capacity.max_nodes, last_topology) or result
    claim_trouble = _describe_claims(context, num_pods=result.best.num_nodes if result.best else 0)
    note = f" Volumes: {claim_trouble}." if claim_trouble else ""
    plan = Plan(
        target=result.best.topology if result.best else None,
        nodes=result.best.num_nodes if result.best else 0,
        per_node=result.best.per_node if result.best else 0,
        reason=result.reason[: MAX_REASON - len(note)] + note,
        rejected=tuple(Rejected(topology=item.subject, reason=item.reason[:512]) for item in result.rejected)[
            :MAX_REJECTED
        ],
    )
    if result.best is None:
        return _wait(context, status, plan)
    if claim_trouble:
        # The pods stay Pending with the scheduler's words and start once the claim is usable, so nothing is refused.
        context.emit("ClaimNotUsable", f"attempt {status.attempt + 1}: {claim_trouble}", warning=True)
    return _adopt(context, status, plan, result.best.topology, awaits_nodes=awaits_nodes)


def _describe_claims(context: Context, *, num_pods: int) -> str:
    """Return what keeps pods from using their claims, in at most MAX_CLAIMS_TEXT bytes; empty if nothing does."""
    share_nodes = context.spec.nodes.pods_per_node == "Many"
    problems = describe_problems(context.world.volumes, num_pods=num_pods, share_nodes=share_nodes)
    return sentence(problems, MAX_CLAIMS_TEXT) if problems else ""


def _can_ever_run(spec: Spec, topology: Topology) -> bool:
    """Return whether a pinned topology could run if all nodes that the spec permits were there."""
    for per_node in spec.accelerator.per_node:
        num_nodes = topology.world_size // per_node
        nodes = tuple(NodeCapacity(name=f"new-{i}", free=per_node) for i in range(num_nodes))
        if spec.nodes.permits(num_nodes) and planner.best(spec, Capacity(nodes=nodes), topology) is not None:
            return True
    return False


def _plan_on_new_nodes(spec: Spec, max_nodes: int | None, last_topology: Topology | None) -> planner.PlanResult | None:
    """Plan the smallest permitted number of nodes as if an autoscaler had added them; None if no number can run."""
    per_node = max(spec.accelerator.per_node)
    counts = spec.nodes.allowed or range(spec.nodes.min, min(spec.nodes.max, spec.nodes.min + MOST_SIZES) + 1)
    for num_nodes in sorted(filter(spec.nodes.permits, counts)):
        nodes = tuple(NodeCapacity(name=f"new-{i}", free=per_node) for i in range(num_nodes))
        result = planner.plan(spec, Capacity(nodes=nodes, max_nodes=max_nodes), last_topology)
        if result.best is not None:
            return dataclasses.replace(result, reason=f"{result.best}, on nodes that an autoscaler has to add.")
    return None


def find_best(context: Context, status: Status) -> Candidate | None:
    """Return what a new plan would run on the capacity that is there now; None if nothing fits."""
    spec = restrict_to_topology(context.spec, status.pinned)
    return planner.best(spec, find_capacity(context, status), status.checkpoint.topology)


def can_run_unpinned(context: Context, status: Status) -> bool:
    """Return whether some topology other than the pinned one fits the capacity that is there now."""
    return planner.best(context.spec, find_capacity(context, status), status.checkpoint.topology) is not None


def _adopt(context: Context, status: Status, plan: Plan, topology: Topology, *, awaits_nodes: bool) -> Status:
    attempt = status.attempt + 1
    resume = commit_history.choose_resume(
        status.checkpoint,
        attempt=attempt,
        topology=topology,
        root=checkpoint_root(context.spec),
        start=start_source(context.spec),
        field=start_field(context.spec),
        mark=context.job.uid[:8] if context.spec.checkpoint.take_over is not TakeOver.NEVER else "",
    )
    resume, why = reshard_mode.choose_start(context.spec, status, resume, topology)
    if why:
        plan = dataclasses.replace(plan, reason=f"{plan.reason[: MAX_REASON - len(why) - 1]} {why}")
    text = short(topology)
    context.emit("Planned", f"attempt {attempt}: {plan.reason} Start: {resume.reason}.")
    if not resume.uri:
        context.emit("StartsFromNothing", f"attempt {attempt}: {resume.reason}", warning=status.attempt > 0)
    status = dataclasses.replace(
        status,
        attempt=attempt,
        current=Current(
            topology=topology,
            num_nodes=plan.nodes,
            gpus_per_node=plan.per_node,
            resume=resume,
            avoid=list_avoided_nodes(
                context, status, plan.per_node, also=_sick_nodes(context, status, plan.per_node)
            ).names,
            spec_hash=spec_hash(context.spec),
            global_samples=context.spec.batch.global_samples,
            sequence_length=context.spec.model.sequence_length if context.spec.model is not None else 0,
            plan_time=Time(context.now),
            awaits_nodes=awaits_nodes,
        ),
        plan=plan,
        phase=Phase.PENDING,
        reason="",
        message="",
        drain=None,
        growth=None,
        queue_time=None,
        # Count from the commit; otherwise an attempt that ends before its first step would lose the same steps again.
        progress=dataclasses.replace(status.progress or Progress(), step=resume.step, samples=resume.samples),
        reshard=None if resume.ready else status.reshard,
        conditions=context.add_condition(
            status,
            Type.PLANNED,
            True,
            reason="TopologyChosen",
            message=plan.reason,
        ),
    )
    if status.changes and status.changes[-1].to_attempt == 0:
        last = status.changes[-1]
        status = edit_last_change(
            status,
            to=text,
            to_attempt=attempt,
            plan_time=Time(context.now),
            commit_step=resume.step,
            lost_steps=max(0, last.last_step - resume.step),
            start_mode=resume.mode,
            conversion=None,
        )
    return status


def _sick_nodes(context: Context, status: Status, per_node: int) -> frozenset[str]:
    """Return the nodes whose devices fail under the job's pods, as far as they cannot take a new pod.

    The scheduler learns of a failed device a second after the pod's status shows it, and would use that node again.
    """
    names = {pod.node for pod in context.world.pods if pod.unhealthy_devices and not pod.terminal and pod.node}
    return frozenset(names - set(find_capacity(context, status).usable(per_node))) if names else frozenset()


def _wait(context: Context, status: Status, plan: Plan) -> Status:
    reason = "ReshardFailed" if status.pinned else "NoFeasibleTopology"
    message = plan.reason
    if status.pinned:
        message = f"{pinned_topology.describe_pin(context, status)} {message}"
    if limit := placement_limits.describe_limit(context, status):
        message = f"{message} {limit}"
    stuck = select_stuck_pods(context, status)
    if stuck:
        message = f"{message} Left out until the pod is gone: {describe_stuck_pods(stuck)}, which does not end."
    if holders := describe_holders(context, status):
        message = f"{message} {holders}"
    if status.phase != Phase.WAITING or status.reason != reason:
        context.emit(reason, message, warning=True)
    return dataclasses.replace(
        status,
        phase=Phase.WAITING,
        reason=reason,
        message=message,
        plan=plan,
        conditions=context.add_condition(
            status,
            Type.PLANNED,
            False,
            reason=reason,
            message=message,
        ),
    )


def describe_holders(context: Context, status: Status) -> str:
    """Return a sentence that names pods of others with accelerators on nodes that the job may use; empty without any.

    Pods of other namespaces are named as the operator sees them: it plans with what they hold.
    """
    used, nodes, pod = context.world.used, context.world.nodes, context.placed_template["spec"]
    if not isinstance(used, UsageByOthers):
        return ""
    avoid = find_avoided_nodes(context, status)
    holders = (
        item
        for item in used.holders()
        if item.node in nodes and item.node not in avoid and is_schedulable(nodes[item.node], pod)
    )
    named = tuple(itertools.islice(holders, MAX_HOLDERS))
    if not named:
        return ""
    text = sentence(
        ", ".join(f"{'/'.join(item.pod)} on {item.node} ({item.count})" for item in named), MAX_HOLDERS_TEXT
    )
    more = ", and others" if next(holders, None) is not None else ""
    return f"Pods of others hold {context.spec.accelerator.resource} on nodes that take its pods: {text}{more}."


def restrict_to_topology(spec: Spec, topology: Topology | None) -> Spec:
    """Return `spec` restricted to `topology`; unchanged if there is none."""
    if topology is None:
        return spec
    choice = TopologyChoice(
        tensor=topology.tp,
        pipeline=topology.pp,
        data=topology.dp,
        expert=topology.ep,
        context=topology.cp,
        zero_stage=topology.zero,
    )
    parallelism = dataclasses.replace(spec.parallelism, strategy=Strategy.FIXED, topologies=(choice,))
    return dataclasses.replace(spec, parallelism=parallelism)
