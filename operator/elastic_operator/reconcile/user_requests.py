"""What a person has asked for by hand: commit now, exit, start again (`kubectl etj drain`), or try once more after the
job has Failed (`kubectl etj retry`).

A request is an annotation on the resource. Its value is a token that means nothing; one that differs from the token in
`status.drainRequest` or `status.retryRequest` is a new request. So the operator needs no right to write the resource,
and a request is answered once, whoever answers it and however often it is looked at.
"""

from __future__ import annotations

import dataclasses

from elastic_operator.api.status import Phase, RestartBudget, Status, edit_last_recovery
from elastic_operator.reconcile import running
from elastic_operator.reconcile.context import Context
from reshard.contract import TrainerPhase

CAUSE = "ManualDrain"
"""Cause of the planned change that answers a request."""

ANSWERING = (TrainerPhase.TRAINING, TrainerPhase.SAVING)
"""What a training loop is doing that will see the request and can commit."""


def handle_drain(context: Context, status: Status) -> Status:
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


def handle_retry(context: Context, status: Status) -> Status:
    """Take a job that has Failed up again, where a person asks for it: from its newest commit, with a fresh budget.

    The recovery that ended in Failed goes on, so that its record and the goodput hold all the time without training.
    """
    request = context.job.retry_request
    if not request or request == status.retry_request:
        return status
    status = dataclasses.replace(status, retry_request=request)
    if status.phase != Phase.FAILED:
        # Nothing has failed yet: a manifest came with the annotation in it, or the job runs, or is Complete.
        return status
    last = status.recoveries[-1] if status.recoveries else None
    if last is not None and last.first_step_time is None:
        status = edit_last_recovery(status, to="", to_attempt=0, plan_time=None)
    context.emit("RetryRequested", f"asked for by hand after {status.reason}: going on with a fresh restart budget")
    return dataclasses.replace(
        status,
        phase=Phase.PENDING,
        reason="",
        message="",
        current=None,
        reshard=None,
        pinned={},
        restart_budget=RestartBudget(),
        finish_time=None,
    )
