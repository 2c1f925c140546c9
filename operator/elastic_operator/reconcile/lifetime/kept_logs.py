"""Which stopped attempts keep their failed pods, so that their logs can still be read. Pure.

A pod that has ended holds no accelerator, no port and no volume; its node keeps the log of its containers as long as
the pod exists. A Job with a failed pod creates no new ones, because its backoffLimit is 0.
"""

from __future__ import annotations

from elastic_operator.api.status import Status
from elastic_operator.observed.observation import WORKER, PodView
from elastic_operator.reconcile.context import Context


def select_kept_attempts(context: Context, status: Status) -> frozenset[int]:
    """Return the newest stopped attempts that failed by themselves, `spec.failedAttemptsHistoryLimit` of them.

    An attempt that was preempted, evicted or shut down with its node is not one of them: its pods say nothing about the
    program, and as long as they are there their nodes count as taken (`capacity_count`). Neither is an attempt that the
    operator ended for a planned change.
    """
    failed = {past.from_attempt for past in status.changes if not past.planned}
    running = status.attempt if status.launched else -1
    pods: dict[int, list[PodView]] = {}
    for pod in context.world.pods:
        if pod.role == WORKER and pod.attempt != running and pod.attempt in failed:
            pods.setdefault(pod.attempt, []).append(pod)
    with_logs = [
        attempt
        for attempt, own in pods.items()
        if any(pod.phase == "Failed" and pod.deleted_at is None for pod in own)
        and not any(pod.disruption for pod in own)
    ]
    limit = context.spec.failed_attempts_history_limit
    return frozenset(sorted(with_logs, reverse=True)[:limit])
