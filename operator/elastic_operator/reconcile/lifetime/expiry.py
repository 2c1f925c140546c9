"""The deletion of a finished job after `spec.ttlSecondsAfterFinished`. Pure."""

from __future__ import annotations

from elastic_operator.api.status import Status
from elastic_operator.reconcile.actions import DeleteResource
from elastic_operator.reconcile.context import Context

EXPIRED = "TTLExpired"
"""Reason of the event that announces the deletion."""


def find_expiry(context: Context, status: Status) -> float | None:
    """Return when a finished job is deleted, in seconds since the epoch; None if it stays."""
    ttl_seconds = context.spec.ttl_seconds_after_finished
    if ttl_seconds is None or not status.terminal or status.finish_time is None:
        return None
    return status.finish_time + ttl_seconds


def delete_if_expired(context: Context, status: Status) -> DeleteResource | None:
    """Return the deletion of the resource if it is due; None before that, and while a pod of the job may still run.

    The garbage collector deletes what the resource owns. It deletes no pod by force, so the operator first stops pods
    on lost nodes by itself.
    """
    expiry = find_expiry(context, status)
    if expiry is None or context.now < expiry or any(not pod.terminal for pod in context.world.pods):
        return None
    checkpoint, ttl_seconds = context.spec.checkpoint, context.spec.ttl_seconds_after_finished
    context.emit(
        EXPIRED,
        f"spec.ttlSecondsAfterFinished {ttl_seconds} has passed since the end: the job is deleted; its checkpoints "
        f"stay in claim {checkpoint.claim_name}, folder {checkpoint.path or '/'}",
    )
    return DeleteResource(name=context.job.name, uid=context.job.uid, version=context.job.version)
