"""Limit the next plans to the pods that the scheduler has placed, where that is fewer than the operator has counted.

The operator cannot know every rule of the scheduler: anti-affinity of other pods, zones of volumes, overhead of a
RuntimeClass.
"""

from __future__ import annotations

import dataclasses

from elastic_operator.api.serialization import Time, format_time
from elastic_operator.api.spec import spec_hash
from elastic_operator.api.status import Current, PlacementLimit, Status
from elastic_operator.reconcile.context import Context, find_capacity, find_placement_limit
from elastic_operator.reconcile.failures.budgets import FIRST_BACKOFF_SECONDS, LAST_BACKOFF_SECONDS, double_pause
from reshard.contract import sentence

HELD_SECONDS = 300.0
"""How long an attempt keeps its nodes if the scheduler places fewer pods than `spec.nodes.min`. kube-scheduler looks
at a pod that finds no node after at most as long (podMaxInUnschedulablePodsDuration)."""

FIRST_RETRY_SECONDS = 1800.0
"""How long a smaller attempt runs before the job may grow again; it doubles with each growth that is not placed."""

LAST_RETRY_SECONDS = 14400.0
"""Longest such time."""

_MESSAGE_BYTES = 1024


def count_placed(context: Context, status: Status) -> int:
    """Count the pods of the current attempt that have got a node."""
    return sum(bool(pod.node) for pod in context.world.workers(status.attempt))


def find_last_placed_time(context: Context, status: Status, current: Current) -> float:
    """Return when the last pod of the attempt got its node; no earlier than the operator could see it."""
    times = [pod.scheduled_at or 0.0 for pod in context.world.workers(status.attempt) if pod.node]
    return max(current.launch_time or 0.0, context.world.evidence_since, *times)


def limit_placement(
    context: Context, status: Status, current: Current, *, message: str = "", is_smaller: bool
) -> Status:
    """Let plans count on no more pods than the scheduler has placed of the current attempt.

    Args:
        context: inputs of the decision.
        status: status of the job.
        current: the attempt, of which some pods have a node and others find none.
        message: what the scheduler says.
        is_smaller: True if a smaller attempt can run meanwhile; else the job waits without pods, for a shorter time.
    """
    placed = count_placed(context, status)
    counted = find_capacity(context, dataclasses.replace(status, placement_limit=None)).num_usable(
        current.gpus_per_node
    )
    old, wanted = status.placement_limit, spec_hash(context.spec)
    tries = old.tries if old is not None and old.spec_hash == wanted else 0
    if find_placement_limit(context, status) is None:
        tries += 1
    first, last = (
        (FIRST_RETRY_SECONDS, LAST_RETRY_SECONDS) if is_smaller else (FIRST_BACKOFF_SECONDS, LAST_BACKOFF_SECONDS)
    )
    limit = PlacementLimit(
        num_nodes=placed,
        missing=max(0, counted - placed),
        until=Time(context.now + double_pause(first, last, tries)),
        tries=tries,
        spec_hash=wanted,
        message=sentence(message, _MESSAGE_BYTES),
    )
    return dataclasses.replace(status, placement_limit=limit)


def end_series(context: Context, status: Status, current: Current) -> Status:
    """Forget a limit that is over if the current attempt, all of whose pods are placed, is larger."""
    limit = status.placement_limit
    if limit is None or limit.until > context.now or current.num_nodes <= limit.num_nodes:
        return status
    return dataclasses.replace(status, placement_limit=None)


def describe_limit(context: Context, status: Status) -> str:
    """Return the sentence with the scheduler's words while plans follow its count; empty if they do not."""
    limit = find_placement_limit(context, status)
    if limit is None:
        return ""
    return f"The scheduler placed only {limit.num_nodes} pods, until {format_time(limit.until)}: {limit.message}"
