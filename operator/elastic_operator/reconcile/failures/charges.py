"""Charge the last recovery to budgets, or revoke the charge; fail the job if a budget is exceeded or a rule says so."""

from __future__ import annotations

import dataclasses

from elastic_operator.api.failure_policy import FAIL_JOB, IGNORE
from elastic_operator.api.status import Phase, Status, edit_last_change
from elastic_operator.reconcile.context import Context
from elastic_operator.reconcile.failures import budgets
from elastic_operator.reconcile.failures.faults import Fault


def charge_recovery(context: Context, status: Status, *, message: str, fault: Fault) -> Status:
    """Charge the budgets of the last recovery, which is unplanned; fail the job if one is exceeded, or for a rule.

    Args:
        context: inputs of the decision.
        status: status of the job.
        message: one sentence about the failure.
        fault: what is known about its first sign.
    """
    cause = status.changes[-1].cause
    if fault.action == FAIL_JOB:
        context.emit("PodFailurePolicy", f"{fault.rule}: the job fails", warning=True)
        return dataclasses.replace(
            status, phase=Phase.FAILED, reason="PodFailurePolicy", message=f"{fault.rule}. Last cause: {message}"
        )
    is_ignored = fault.action == IGNORE
    status = budgets.charge(context, status, cause, is_ignored=is_ignored)
    is_charged = not is_ignored and budgets.is_limited(context.spec.recovery, cause)
    status = edit_last_change(status, charged=is_charged)
    text = "" if is_ignored else budgets.find_exceeded(status, cause)
    if text:
        context.emit("RestartBudgetExceeded", f"{text}; the last one: {message}", warning=True)
        return dataclasses.replace(
            status, phase=Phase.FAILED, reason="RestartBudgetExceeded", message=f"{text}. Last cause: {message}"
        )
    return status


def revoke_charge(status: Status) -> Status:
    """Undo `charge_recovery` for the last recovery: its charge, its place in the series, and its pause."""
    last = status.changes[-1]
    status = budgets.revoke(status, last.cause, is_charged=last.charged)
    return edit_last_change(status, charged=False)
