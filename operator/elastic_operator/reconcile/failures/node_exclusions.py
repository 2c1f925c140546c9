"""Nodes that no attempt uses for now: lost ones, those with stuck pods, those on which the job failed twice."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection

from elastic_operator.api.serialization import Time
from elastic_operator.api.status import Drain, ExcludedNode, Recovery, Status
from elastic_operator.observed import signals
from elastic_operator.observed.failure_classes import CLASSES, classify_failure
from elastic_operator.observed.observation import NodeView, PodView
from elastic_operator.observed.signal_kinds import LEAVE_NODE, damped_seconds
from elastic_operator.reconcile.context import (
    POD_STUCK_TERMINATING,
    Context,
    find_toleration_seconds,
    select_stuck_pods,
)

OFFENCES_UNTIL_EXCLUDED = 2
"""Number of recoveries that a node causes before it is avoided for `recovery.excludeNodeSeconds`, even if Ready."""

OFFENCE_SECONDS = 3600.0
"""Time within which two failures on one node count together."""


def exclude_nodes(context: Context, status: Status, lost: Collection[str], cause: str) -> tuple[ExcludedNode, ...]:
    """Return the excluded nodes after a recovery, which is the last one in `status`.

    Args:
        context: inputs of the decision.
        status: status of the job, with the recovery.
        lost: nodes that are confirmed lost.
        cause: cause of the recovery.
    """
    new = [
        ExcludedNode(
            name=name,
            reason=cause,
            since=Time(context.now),
            # The current recovery is in the list already.
            hurts=max(1, sum(name in recovery.lost for recovery in status.changes)),
        )
        for name in sorted(lost)
    ]
    seconds = context.spec.recovery.exclude_node_seconds
    for item in new:
        if item.hurts >= OFFENCES_UNTIL_EXCLUDED:
            message = f"node {item.name} ended {item.hurts} attempts: avoided for {seconds} s"
            context.emit("NodeExcluded", message, warning=True)
    others = [item for item in status.excluded_nodes if item.name not in lost]
    last = status.changes[-1]
    if not last.blamed or last.blamed in lost:
        return (*others, *new)
    others = [item for item in others if not _is_acquitted(context, status, item)]
    num_here = len(_failures_on(context, status, last.blamed))
    if num_here >= OFFENCES_UNTIL_EXCLUDED and 2 * _count_elsewhere(context, status, last) < num_here:
        text = f"the job failed {num_here} times on node {last.blamed} within {OFFENCE_SECONDS:.0f} s, at last with"
        context.emit("NodeExcluded", f"{text} {_describe(last)}: avoided for {seconds} s", warning=True)
        others = [item for item in others if item.name != last.blamed]
        new.append(ExcludedNode(name=last.blamed, reason=cause, since=Time(context.now), hurts=num_here))
    return (*others, *new)


def exclude_left_nodes(context: Context, status: Status, drain: Drain) -> Status:
    """Exclude the nodes that an attempt has left as planned, because of a cordon, a taint or a health report."""
    if drain.cause not in LEAVE_NODE:
        return status
    known = {item.name for item in status.excluded_nodes}
    left = [
        ExcludedNode(name=name, reason=drain.cause, since=Time(context.now))
        for name in drain.nodes
        if name not in known
    ]
    return dataclasses.replace(status, excluded_nodes=(*status.excluded_nodes, *left))


def refresh_exclusions(context: Context, status: Status) -> Status:
    """Exclude nodes with stuck pods, and readmit excluded nodes.

    A node that was left as planned is readmitted once it has been clean for as long as its grace period. A lost node
    is readmitted once it has been Ready for a while, a node with a stuck pod a while after the pod has gone, a
    repeated offender after its term.
    """
    stuck = select_stuck_pods(context, status)
    status = _exclude_stuck(context, status, stuck)
    holding = {pod.node for pod in stuck}
    kept: list[ExcludedNode] = []
    for item in status.excluded_nodes:
        node = context.world.nodes.get(item.name)
        if node is None:
            continue  # A node that does not exist needs no exclusion; one created under its name later is another node.
        # A node with a stale Lease has not returned, even if its Ready condition is still True.
        is_healthy = not signals.detect_node_signals(node, item.name, context.limits, context.now)
        may_end = is_healthy and item.name not in holding
        until = _exclusion_end(context, item, node) if may_end else None
        if until is None or until > context.now:
            kept.append(dataclasses.replace(item, until=until))
        else:
            context.emit("NodeReadmitted", f"node {item.name} may be used again: {item.reason} is over")
    return dataclasses.replace(status, excluded_nodes=tuple(kept))


def _exclude_stuck(context: Context, status: Status, stuck: Collection[PodView]) -> Status:
    """Exclude the nodes on which pods of stopped attempts do not end, and report each node once."""
    excluded = {item.name: item for item in status.excluded_nodes}
    for pod in sorted(stuck, key=lambda pod: pod.name):
        node = pod.node or ""
        known = excluded.get(node)
        if known is not None and known.reason == POD_STUCK_TERMINATING and known.until is None:
            continue
        overdue = context.now - (pod.deleted_at or context.now)
        context.emit(
            POD_STUCK_TERMINATING,
            f"pod {pod.name} of attempt {pod.attempt} is still there {overdue:.0f} s after it had to end, and its node "
            f"{node} is Ready: the job does not wait for it, and avoids the node until the pod is gone",
            warning=True,
        )
        excluded[node] = ExcludedNode(
            name=node, reason=POD_STUCK_TERMINATING, since=Time(context.now), hurts=known.hurts if known else 1
        )
    return dataclasses.replace(status, excluded_nodes=tuple(excluded.values()))


def _exclusion_end(context: Context, item: ExcludedNode, node: NodeView) -> Time | None:
    """Return the end of the exclusion of a node that is healthy now; None if it has no end yet."""
    if item.reason in LEAVE_NODE:
        return _find_clean_time(context, item, node)
    if item.hurts >= OFFENCES_UNTIL_EXCLUDED:
        return Time(item.since + context.spec.recovery.exclude_node_seconds)
    is_freed = item.reason == POD_STUCK_TERMINATING and item.until is None
    since = context.now if is_freed else max(node.ready_since or item.since, item.since)
    return item.until or Time(since + context.limits.node_stable_seconds)


def _find_clean_time(context: Context, item: ExcludedNode, node: NodeView) -> Time | None:
    """Return when a node that was left as planned will have been clean for long enough; None if it is not clean.

    It has to be clean for as long as the grace period of what was withdrawn last. An operator that has not seen a
    withdrawal counts from when the node was left.
    """
    if signals.detect_planned_signals(node, find_toleration_seconds(context, node.taints), context.now):
        return None
    most = max((node.count_withdrawals(name, context.now) for name, _ in node.withdrawals), default=0)
    clean_since = max(item.since, context.world.evidence_since, *(at for _, at in node.withdrawals))
    return Time(clean_since + damped_seconds(context.limits.planned_seconds, max(0, most - 1)))


def _failures_on(context: Context, status: Status, name: str) -> list[Recovery]:
    return [
        item
        for item in status.changes
        if item.blamed == name and context.now - (item.detect_time or 0.0) <= OFFENCE_SECONDS
    ]


def _count_elsewhere(context: Context, status: Status, like: Recovery) -> int:
    """Count the same failures on other nodes, which show that the program causes them; 0 for a device's failures."""
    if not CLASSES[classify_failure(like.cause)].compares_nodes:
        return 0
    return sum(
        item.blamed not in ("", like.blamed)
        and (item.cause, item.exit_code) == (like.cause, like.exit_code)
        and context.now - (item.detect_time or 0.0) <= OFFENCE_SECONDS
        for item in status.changes
    )


def _is_acquitted(context: Context, status: Status, item: ExcludedNode) -> bool:
    """Return whether what a node is excluded for happens on other nodes as often, and report it."""
    failures = _failures_on(context, status, item.name)
    if not failures or failures[-1].cause != item.reason:
        return False  # excluded because it was lost, or long ago
    if _count_elsewhere(context, status, failures[-1]) < len(failures):
        return False
    text = f"{_describe(failures[-1])} happens on other nodes as often"
    context.emit("NodeReadmitted", f"node {item.name} may be used again: {text}")
    return True


def _describe(recovery: Recovery) -> str:
    return recovery.cause if recovery.exit_code is None else f"{recovery.cause} (exit code {recovery.exit_code})"
