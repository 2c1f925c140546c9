"""Correct the record of the last recovery when later evidence shows where or why its failure began."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection

from elastic_operator.api.failure_policy import FAIL_JOB, IGNORE
from elastic_operator.api.status import Recovery, Status, edit_last_change
from elastic_operator.observed.signal_kinds import Kind
from elastic_operator.observed.signals import Signal, detect_node_signals
from elastic_operator.reconcile.context import Context, find_lost_nodes
from elastic_operator.reconcile.failures import charges, node_exclusions
from elastic_operator.reconcile.failures.faults import OF_PODS, UNKNOWN, Fault, find_pod_fault
from reshard.contract import sentence

PEER_SECONDS = 10.0
"""Time after a failure in which failures of peers are still evidence of where it began, and rules apply to them."""

NODE_SECONDS = 60.0
"""Time after a failure in which a sign of a node's loss shows that the node was the cause: a kubelet's Lease is stale
after 20 s, a node NotReady after 50 s."""

MESSAGE_BYTES = 1024
"""Maximum size of a message in a recovery; a status holds ten recoveries and has to stay small."""


def reassess(context: Context, status: Status) -> Status:
    """Correct cause, blame and charge of the last recovery, if its failure is recent and there is new evidence."""
    last = status.changes[-1] if status.changes else None
    if last is None or last.planned:
        return status
    age = context.now - (last.detect_time or 0.0)
    if age <= NODE_SECONDS and last.launch_time is None and (nodes := _find_suspect_nodes(context, last)):
        return _blame_nodes(context, status, last, nodes)
    if age <= PEER_SECONDS and last.cause in (Kind.POD_FAILED, Kind.JOB_FAILED):
        return _blame_pods(context, status, last)
    return status


def change_cause(context: Context, status: Status, *, cause: str, message: str, lost: Collection[str]) -> Status:
    """Put the last recovery, an unplanned one, down to the loss of nodes: its charge and its blame are revoked.

    Args:
        context: inputs of the decision.
        status: status of the job.
        cause: the new cause, for instance a `signals.Kind`.
        message: one sentence for people.
        lost: nodes that are lost, or about to be.
    """
    status = charges.revoke_charge(_readmit(status, status.changes[-1]))
    text = sentence(message, MESSAGE_BYTES)
    names = tuple(sorted({*status.changes[-1].lost, *lost}))
    status = edit_last_change(status, cause=cause, message=text, lost=names, blamed="", exit_code=None)
    return charges.charge_recovery(context, status, message=message, fault=UNKNOWN)


def _find_suspect_nodes(context: Context, last: Recovery) -> frozenset[str]:
    """Return the nodes with a sign of being lost on which pods of the ended attempt have not ended."""
    if last.lost or last.cause not in (*OF_PODS, Kind.HEARTBEAT_STALE):
        return frozenset()
    names = {pod.node for pod in context.world.workers(last.from_attempt) if pod.node and not pod.terminal}
    nodes = context.world.nodes
    return frozenset(name for name in names if detect_node_signals(nodes.get(name), name, context.limits, context.now))


def _blame_nodes(context: Context, status: Status, last: Recovery, nodes: Collection[str]) -> Status:
    message = f"lost, or about to be: {', '.join(sorted(nodes))}; {last.message}"
    text = f"{message.removesuffix('.')}: the failure of attempt {last.from_attempt} is put down to that"
    context.emit(Kind.NODE_NOT_READY, text, warning=True)
    status = change_cause(context, status, cause=Kind.NODE_NOT_READY, message=message, lost=nodes)
    lost = find_lost_nodes(context, status)
    return dataclasses.replace(
        status, excluded_nodes=node_exclusions.exclude_nodes(context, status, lost, Kind.NODE_NOT_READY)
    )


def _blame_pods(context: Context, status: Status, last: Recovery) -> Status:
    """Find the first failed pod anew if more pods have failed by themselves since; those that are gone are no news."""
    failure = Signal(kind=Kind(last.cause), since=context.now, message=last.message)
    message, fault = find_pod_fault(context, context.world.workers_ever(last.from_attempt), failure)
    if fault.failed_pods <= last.failed_pods:
        return status
    status = edit_last_change(status, failed_pods=fault.failed_pods)
    if (fault.node, fault.exit_code) != (last.blamed, last.exit_code):
        text = sentence(message, MESSAGE_BYTES)
        status = edit_last_change(_readmit(status, last), message=text, blamed=fault.node, exit_code=fault.exit_code)
        excluded = node_exclusions.exclude_nodes(context, status, last.lost, last.cause)
        status = dataclasses.replace(status, excluded_nodes=excluded)
    return _apply_rule(context, status, message, fault)


def _apply_rule(context: Context, status: Status, message: str, fault: Fault) -> Status:
    if fault.action == FAIL_JOB:
        status = dataclasses.replace(charges.revoke_charge(status), current=None, drain=None, growth=None)
        return charges.charge_recovery(context, status, message=message, fault=fault)
    if fault.action == IGNORE and status.changes[-1].charged:
        return charges.charge_recovery(context, charges.revoke_charge(status), message=message, fault=fault)
    return status


def _readmit(status: Status, last: Recovery) -> Status:
    """End the exclusion of the node that a recovery has blamed."""
    kept = (item for item in status.excluded_nodes if (item.name, item.since) != (last.blamed, last.detect_time))
    return dataclasses.replace(status, excluded_nodes=tuple(kept))
