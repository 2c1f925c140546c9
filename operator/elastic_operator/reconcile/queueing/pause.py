"""Stop a job that has no quota, and wait until Kueue admits it: no attempt, no Job, and no budget is charged."""

from __future__ import annotations

import dataclasses

from elastic_operator.api.serialization import Time
from elastic_operator.api.status import Phase, Status, edit_last_change
from elastic_operator.reconcile import goodput, recovery, running
from elastic_operator.reconcile.context import Context, select_running_pods
from elastic_operator.reconcile.queueing.standing import QUEUED, Standing, must_stop


def pause_without_quota(context: Context, status: Status, standing: Standing) -> Status:
    """Take one step of a job that may not run: drain the attempt, then wait."""
    current = status.current
    if current is not None and current.launch_time is not None:
        if status.drain is None and must_stop(context, status, standing):
            return running.start_drain(context, status, goodput.EVICTED, standing.message)
        return running.run(context, status, current)
    status = dataclasses.replace(
        status, current=None, drain=None, growth=None, queue_time=status.queue_time or Time(context.now)
    )
    status = recovery.record_pause(context, status, goodput.EVICTED, standing.message)
    if select_running_pods(context, status):
        return status if status.phase != Phase.WAITING else dataclasses.replace(status, phase=Phase.STOPPING)
    last = status.changes[-1] if status.changes else None
    if last is not None and last.cause in goodput.PAUSES and last.stop_time is None:
        status = edit_last_change(status, stop_time=Time(context.now))
    if (status.phase, status.reason) != (Phase.WAITING, QUEUED):
        context.emit(QUEUED, standing.message)
    return dataclasses.replace(status, phase=Phase.WAITING, reason=QUEUED, message=standing.message)
