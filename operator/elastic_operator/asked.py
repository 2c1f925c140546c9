"""What a person has asked for by hand: commit now, exit, start again (`kubectl etj drain`).

The request is an annotation on the resource. Its value is a token that means nothing; one that differs from the token
in `status.drainRequest` is a new request. So the operator needs no right to write the resource, and a request is
answered once, whoever answers it and however often it is looked at.
"""

from __future__ import annotations

import dataclasses

from elastic_operator import running
from elastic_operator.context import Context
from elastic_operator.status import Status
from reshard.contract import TrainerPhase

CAUSE = "ManualDrain"
"""Cause of the planned change that answers a request."""

ANSWERING = (TrainerPhase.TRAINING, TrainerPhase.SAVING)
"""What a training loop is doing that will see the request and can commit."""


def take_up(context: Context, status: Status) -> Status:
    """Answer a new request: drain, or say why there is nothing to drain."""
    request = context.job.drain_request
    if not request or request == status.drain_request:
        return status
    status = dataclasses.replace(status, drain_request=request)
    if status.attempt == 0 or status.drain is not None or context.spec.suspend:
        # Nothing has ever run, as where a manifest came with the annotation in it; or what was asked for happens.
        return status
    lease = context.world.leases.get(status.attempt) if status.launched else None
    if lease is None or lease.phase not in ANSWERING:
        step = status.checkpoint.step
        text = f"no training loop runs that could commit; the newest commit is of step {step}"
        context.emit("DrainNotPossible", f"a drain was requested by hand, but {text}", warning=True)
        return status
    return running.start_drain(context, status, CAUSE, "a drain was requested by hand")
