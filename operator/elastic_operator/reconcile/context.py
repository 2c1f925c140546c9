"""Inputs of one decision, and queries over them that several parts of a decision share. No I/O, no clock."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

from elastic_operator.api.conditions import Type, set_condition
from elastic_operator.api.spec import Spec, spec_hash
from elastic_operator.api.status import Condition, ExcludedNode, PlacementLimit, Status
from elastic_operator.manifests.attempt import JobRef, worker_labels
from elastic_operator.manifests.placement import HOSTNAME, tolerate_resources
from elastic_operator.manifests.reshard_pod import ReshardImage
from elastic_operator.manifests.workload import queue_of
from elastic_operator.observed import capacity_count, pending_starts, signals
from elastic_operator.observed.capacity import Capacity
from elastic_operator.observed.capacity_count import PodRules
from elastic_operator.observed.node_pool import NodePool
from elastic_operator.observed.observation import Observation, PodView, Taint
from elastic_operator.observed.pending_starts import Protection
from elastic_operator.observed.placement.pod_constraints import parse_pod_constraints
from elastic_operator.observed.placement.pod_resources import MOST_PODS
from elastic_operator.observed.placement.schedulability import toleration_seconds, would_take_pod
from elastic_operator.observed.queueing.placement import ANYWHERE, add_placement
from elastic_operator.observed.signal_kinds import LEAVE_NODE
from elastic_operator.observed.signals import Signal, Verdict
from elastic_operator.observed.timeouts import Timeouts
from elastic_operator.reconcile.actions import Event, ReshardOutcome


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Context:
    """Inputs of one decision.

    Attributes:
        events: filled during the decision, in order, without duplicates.
        reshards: reshard Jobs that ended, filled likewise.
        verdicts: cache of `judge`; never copied by `dataclasses.replace`, because it depends on the other inputs.
    """

    job: JobRef
    spec: Spec
    world: Observation
    limits: Timeouts
    now: float
    reshard_image: ReshardImage | None = None
    events: list[Event] = dataclasses.field(default_factory=list)
    reshards: list[ReshardOutcome] = dataclasses.field(default_factory=list)
    verdicts: dict[object, Verdict] = dataclasses.field(default_factory=dict, init=False, repr=False, compare=False)

    def emit(self, reason: str, message: str, *, warning: bool = False) -> None:
        """Add an event about the resource, once."""
        event = Event(reason=reason, message=message, warning=warning)
        if event not in self.events:
            self.events.append(event)

    def add_condition(
        self, status: Status, type_: Type, value: bool, *, reason: str, message: str
    ) -> tuple[Condition, ...]:
        """Return the conditions of a status with one added or replaced, as of now and this generation of the spec."""
        return set_condition(
            status.conditions,
            type_,
            value,
            reason=reason,
            message=message,
            now=self.now,
            generation=self.job.generation,
        )

    def judge(self, key: object, detect: Callable[[], Iterable[Signal]]) -> Verdict:
        """Apply the confirmation rule to the signals that `detect` returns, once for each key.

        Args:
            key: everything besides the attributes of this object that the signals depend on.
            detect: returns the signals.
        """
        verdict = self.verdicts.get(key)
        if verdict is None:
            verdict = self.verdicts[key] = signals.judge(detect(), self.graces, self.now)
        return verdict

    @property
    def placed_spec(self) -> Spec:
        """The spec, with the node labels and tolerations that a queueing system demands in the template."""
        view = self.world.queue
        workload = view.current if view is not None else None
        if view is None or workload is None or not queue_of(self.job):
            return self.spec
        placement = view.placement(workload)
        if placement == ANYWHERE:
            return self.spec
        return dataclasses.replace(self.spec, template=add_placement(self.spec.template, placement))

    @property
    def placed_template(self) -> Mapping[str, Any]:
        """The template of the training pods with the tolerations that every attempt adds; for capacity only."""
        template, resource = self.placed_spec.template, self.spec.accelerator.resource
        return {**template, "spec": tolerate_resources(template.get("spec") or {}, resource)}

    @property
    def graces(self) -> Mapping[str, float]:
        """Grace periods in seconds, by the names that `signal_kinds.KINDS` uses."""
        recovery = self.spec.recovery
        return {
            "suspect_seconds": recovery.suspect_seconds,
            "hang_seconds": recovery.hang_seconds,
            "device_seconds": self.limits.device_seconds,
            "device_plugin_seconds": self.limits.device_plugin_seconds,
            "planned_seconds": self.limits.planned_seconds,
            "image_seconds": self.limits.image_seconds,
            "unschedulable_seconds": self.limits.unschedulable_seconds,
            "startup_seconds": self.limits.startup_seconds,
        }


POD_STUCK_TERMINATING = "PodStuckTerminating"
"""Reason why a node is excluded: a pod of a stopped attempt does not end there, although the node is Ready."""

_NOT_LOST = LEAVE_NODE | {POD_STUCK_TERMINATING}

SHORTEST_STUCK_SECONDS = 15.0
"""A pod counts as stuck no earlier than this after its deletion was due, however short `forceDeleteSeconds` is."""


def find_lost_nodes(context: Context, status: Status) -> frozenset[str]:
    """Return the nodes that run pods of the job and are lost: nothing there can be trusted to stop.

    A node is lost if signals of the node itself confirm it, or if it was confirmed earlier and is still not Ready. A
    node that is excluded because of a stuck pod, or that was left as planned, was not confirmed lost.
    """
    world = context.world
    names = {pod.node for pod in world.pods if pod.node and not pod.terminal}
    confirmed: set[str] = set()
    for name in names:
        detect = functools.partial(signals.detect_signals_of_node, world, name, context.limits, context.now)
        confirmed.update(context.judge(("node", name), detect).lost_nodes)
    excluded = {item.name for item in status.excluded_nodes if item.until is None and item.reason not in _NOT_LOST}
    not_back = {name for name in names & excluded if name not in world.nodes or world.nodes[name].ready != "True"}
    return frozenset(confirmed | not_back)


def find_suspect_nodes(context: Context) -> frozenset[str]:
    """Return the nodes that run pods of the job and have any sign of being lost, confirmed or not."""
    names = {pod.node for pod in context.world.pods if pod.node and not pod.terminal}
    nodes = context.world.nodes
    return frozenset(
        name for name in names if signals.detect_node_signals(nodes.get(name), name, context.limits, context.now)
    )


def find_avoided_nodes(context: Context, status: Status) -> frozenset[str]:
    """Return the nodes that a new attempt must not use: excluded, with a stale Lease, or unhealthy for a monitor.

    The scheduler does not know about the last two, so the pod's node affinity must exclude these nodes.
    """
    return find_doubtful_nodes(context) | {item.name for item in status.excluded_nodes}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class AvoidList:
    """Nodes that the affinity of an attempt's pods excludes, in the order of their names.

    Attributes:
        num_left_out: number of further nodes with a sign of being lost on which the scheduler may place the pods.
    """

    names: tuple[str, ...]
    num_left_out: int = 0


MAX_AVOIDED = 128
"""Largest number of nodes that an attempt lists, so that status and Job stay small."""


def list_avoided_nodes(context: Context, status: Status, per_node: int, also: Collection[str] = ()) -> AvoidList:
    """Return the nodes that an attempt must list: those that it avoids and the scheduler would use.

    The scheduler places no pod on nodes that are not Ready, cordoned or too small anyway. If there are too many nodes,
    excluded ones come first, the newest first, then `also`, then those that run pods of the job, then the others.

    Args:
        context: inputs of the decision.
        status: status of the job.
        per_node: accelerators of a pod.
        also: further nodes to list.
    """
    excluded = [item.name for item in sorted(status.excluded_nodes, key=lambda item: -item.since)]
    nodes, pod, resource = context.world.nodes, context.placed_template["spec"], context.spec.accelerator.resource
    suspects = find_suspect_nodes(context)
    doubtful = sorted(find_doubtful_nodes(context), key=lambda name: (name not in suspects, name))
    usable = (name for name in doubtful if would_take_pod(nodes[name], pod, resource, per_node))
    names = tuple(dict.fromkeys((*excluded, *sorted(also), *usable)))
    return AvoidList(names=tuple(sorted(names[:MAX_AVOIDED])), num_left_out=max(0, len(names) - MAX_AVOIDED))


def find_doubtful_nodes(context: Context) -> frozenset[str]:
    """Return all nodes with any sign of being lost (not Ready, a stale Lease) or that a monitor calls unhealthy."""
    nodes = context.world.nodes
    node_pool = nodes if isinstance(nodes, NodePool) else NodePool(context.spec.accelerator.resource, nodes)
    return node_pool.suspects(context.limits, context.now)


def find_capacity(context: Context, status: Status, *, forgive: bool = False, beyond_quota: bool = False) -> Capacity:
    """Count the accelerators that the job may use now.

    Args:
        context: inputs of the decision.
        status: status of the job.
        forgive: True to include excluded nodes that show no sign of being lost now. A node whose exclusion has no end
            yet stays out, because the next step would avoid it again and the job would replan without end.
        beyond_quota: True to count nodes for which a queueing system has not admitted the job, too.
    """
    avoid = find_doubtful_nodes(context) if forgive else find_avoided_nodes(context, status)
    if forgive:
        avoid |= {item.name for item in status.excluded_nodes if not is_forgivable(item)}
    capacity = capacity_count.count_capacity(
        context.world, context.spec.accelerator.resource, context.placed_template, avoid, _pod_rules(context)
    )
    placed = find_placement_limit(context, status)
    if placed is not None:
        capacity = dataclasses.replace(capacity, num_placed=placed.num_nodes, overcount=placed.missing)
    limit = None if beyond_quota else _find_admitted_nodes(context, status)
    return capacity if limit is None else dataclasses.replace(capacity, max_nodes=limit)


def find_placement_limit(context: Context, status: Status) -> PlacementLimit | None:
    """Return the limit by which plans follow the scheduler's count of nodes now; None if none holds."""
    limit = status.placement_limit
    is_over = limit is None or limit.until <= context.now or limit.spec_hash != spec_hash(context.spec)
    return None if is_over else limit


def is_forgivable(item: ExcludedNode) -> bool:
    """Return whether an excluded node may be used early if too few others are left.

    A node with a pending reason is not: the next step would avoid it again. A node that was left as planned is not
    either: its signal may come back.
    """
    return item.until is not None and item.reason not in LEAVE_NODE


def find_toleration_seconds(
    context: Context, taints: Iterable[Taint], pods: Iterable[PodView] = ()
) -> dict[Taint, float]:
    """Return how long the template or one of the pods tolerates each taint; inf for ever.

    Admission adds tolerations (ExtendedResourceToleration, DefaultTolerationSeconds), so those of the pods count.
    """
    written = (context.placed_spec.template.get("spec") or {}).get("tolerations") or ()
    added = [item for pod in pods for item in pod.tolerations]
    tolerations = [*written, *(item for item in added if item not in written)]
    return {taint: seconds for taint in taints if (seconds := toleration_seconds(tolerations, taint)) > 0}


def _pod_rules(context: Context) -> PodRules:
    template, nodes = context.spec.template, context.spec.nodes
    pod = template.get("spec") or {}
    constraints = parse_pod_constraints(pod, worker_labels(context.job, template), context.job.namespace)
    is_alone = nodes.pods_per_node == "One" or HOSTNAME in constraints.apart
    apart = tuple(key for key in constraints.apart if key != HOSTNAME)
    return PodRules(
        max_per_node=1 if is_alone else MOST_PODS, constraints=dataclasses.replace(constraints, apart=apart)
    )


def _find_admitted_nodes(context: Context, status: Status) -> int | None:
    """Return the number of nodes for which Kueue has admitted the job; None if the job is in no queue.

    An attempt that runs on although its Workload is gone keeps its number of nodes.
    """
    view = context.world.queue
    if view is None or not queue_of(context.job):
        return None
    workload = view.current
    if workload is not None and workload.assigned is not None:
        return workload.assigned
    return status.current.num_nodes if status.current is not None else 0


def select_stale_pods(context: Context, status: Status) -> tuple[PodView, ...]:
    """Return the training pods that must not run: all except those of the launched current attempt."""
    keep = status.attempt if status.launched else -1
    return tuple(pod for pod in context.world.pods if pod.role == "worker" and pod.attempt != keep)


def select_running_pods(context: Context, status: Status) -> tuple[PodView, ...]:
    """Return the pods of stopped attempts that still run, as far as that can be known and changed.

    A pod on a lost node, or one that does not end, would hold the next attempt and its quota for ever.
    """
    lost, stuck = find_lost_nodes(context, status), select_stuck_pods(context, status)
    stale = select_stale_pods(context, status)
    return tuple(pod for pod in stale if not pod.terminal and pod.node not in lost and pod not in stuck)


def select_stuck_pods(context: Context, status: Status) -> tuple[PodView, ...]:
    """Return the pods of stopped attempts that do not end, although the kubelets of their nodes answer.

    A pod is stuck if it is still there `recovery.forceDeleteSeconds` after its deletion was due, for instance because
    one of its processes waits for a device in uninterruptible sleep. If its node was not Ready in between, the time
    counts from when the node was Ready again.
    """
    bound = max(float(context.spec.recovery.force_delete_seconds), SHORTEST_STUCK_SECONDS)
    overdue: list[PodView] = []
    for pod in select_stale_pods(context, status):
        if pod.node and not pod.terminal and pod.deleted_at is not None:
            node = context.world.nodes.get(pod.node)
            since = max(pod.deleted_at, (node.ready_since if node is not None else None) or 0.0)
            if context.now - since >= bound:
                overdue.append(pod)
    if not overdue:
        return ()
    lost = find_lost_nodes(context, status)
    return tuple(pod for pod in overdue if pod.node not in lost)


def describe_stuck_pods(pods: Iterable[PodView]) -> str:
    """Return a clause that names stuck pods and their nodes."""
    return ", ".join(sorted(f"pod {pod.name} on node {pod.node}" for pod in pods))


def find_protection(context: Context) -> Protection:
    """Return what must stay in this job's checkpoint folder: other jobs start from there, or the user has pinned it."""
    own = context.spec.checkpoint
    return pending_starts.find_protection(context.world.starts, own.claim_name, own.path, context.now, own.pinned)
