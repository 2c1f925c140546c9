"""Pin the topology of the newest commit after its conversion has failed, and lift the pin when another try may help."""

from __future__ import annotations

import dataclasses

from elastic_operator.api.serialization import Time, format_time
from elastic_operator.api.spec import reshard_hash, spec_hash
from elastic_operator.api.status import Pin, Status, short
from elastic_operator.reconcile.context import Context
from elastic_operator.reconcile.failures.budgets import double_pause
from reshard.topology import Topology

FIRST_RETRY_SECONDS = 600.0
"""Pause before a waiting job converts its commit again; it doubles with each conversion that fails."""

LAST_RETRY_SECONDS = 3600.0
"""Longest such pause."""


def pin_topology(context: Context, status: Status, topology: Topology | None, *, is_final: bool = False) -> Status:
    """Permit only `topology`, which needs no conversion; lift the pin if it is None.

    Args:
        context: inputs of the decision.
        status: status of the job.
        topology: topology of the newest commit.
        is_final: True if the conversion would fail in the same way again.
    """
    if topology is None:
        return dataclasses.replace(status, pinned=None, pin=None)
    tries = (status.pin.tries if status.pin is not None else 0) + 1
    pause = double_pause(FIRST_RETRY_SECONDS, LAST_RETRY_SECONDS, tries)
    retry_time = None if is_final else Time(context.now + pause)
    return dataclasses.replace(
        status, pinned=topology, pin=Pin(spec_hash=_hash(context), tries=tries, retry_time=retry_time)
    )


def adopt_pin(context: Context, status: Status) -> Status:
    """Begin the first pause for a topology that an older operator pinned without one."""
    return status if status.pin is not None else pin_topology(context, status, status.pinned)


def is_retry_due(context: Context, status: Status) -> bool:
    """Return whether a job that waits for nodes for the pinned topology may convert its commit again."""
    pin = status.pin
    return (
        status.pinned is not None and pin is not None and pin.retry_time is not None and pin.retry_time <= context.now
    )


def is_final(status: Status) -> bool:
    """Return whether another conversion would fail in the same way."""
    return status.pinned is not None and status.pin is not None and status.pin.retry_time is None


def lift_pin(status: Status) -> Status:
    """Permit every topology again. The number of tries stays, so that the next pause is longer."""
    return dataclasses.replace(status, pinned=None)


def lift_pin_after_edit(context: Context, status: Status) -> Status:
    """Permit every topology again if the spec of attempts or conversions was edited after the pin."""
    if status.pinned is None or status.pin is None or status.pin.spec_hash == _hash(context):
        return status
    context.emit("SpecChanged", "the spec was edited: the checkpoint may be converted again")
    return dataclasses.replace(status, pinned=None, pin=None)


def describe_pin(context: Context, status: Status) -> str:
    """Return the sentence that says what a job with a pinned topology waits for."""
    pin = status.pin
    if pin is not None and pin.retry_time is not None:
        again = f"The conversion is tried again at {format_time(pin.retry_time)}, or at once after"
    else:
        again = "The conversion is tried again after"
    return (
        f"resharding failed; waiting for nodes for {short(status.pinned)}, the topology of the commit. The commit is "
        f"intact. {again} an edit of spec.checkpoint.allowedGlobals, spec.reshard or spec.template, or "
        f"kubectl etj retry {context.job.name}."
    )


def _hash(context: Context) -> str:
    return f"{spec_hash(context.spec)}-{reshard_hash(context.spec)}"
