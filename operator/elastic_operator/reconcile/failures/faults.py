"""Find the first sign of a failure: its node, its exit code, and the rule of the job's policy that applies to it."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection

from elastic_operator.api.failure_policy import COUNT
from elastic_operator.observed.failure_classes import CLASSES, classify_failure
from elastic_operator.observed.observation import PodView
from elastic_operator.observed.signal_kinds import KINDS, Kind
from elastic_operator.observed.signals import Signal, detect_pod_signals
from elastic_operator.reconcile.context import Context
from elastic_operator.reconcile.failures import exit_codes

OF_PODS = (Kind.POD_FAILED, Kind.POD_LOST, Kind.JOB_FAILED, Kind.POD_DELETED)
"""Failures of pods, which also follow from the loss of a peer's node, often before that node is confirmed lost."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """First sign of an unplanned failure, as far as it is known.

    Attributes:
        node: node where it began, empty if that is not known.
        exit_code: exit code of the training container that failed first, None if none failed.
        action: what `spec.recovery.podFailurePolicy` says about that exit code.
        rule: sentence that names the rule and the pod, empty if no rule applies.
        failed_pods: number of pods that had failed by themselves.
    """

    node: str = ""
    exit_code: int | None = None
    action: str = COUNT
    rule: str = ""
    failed_pods: int = 0


UNKNOWN = Fault()


def find_fault(context: Context, pods: Collection[PodView], failure: Signal) -> tuple[str, Fault]:
    """Return the message of a failure and what is known about its first sign.

    Args:
        context: inputs of the decision.
        pods: training pods of the attempt.
        failure: the signal that ends the attempt.
    """
    if failure.kind in (Kind.POD_FAILED, Kind.JOB_FAILED):
        return find_pod_fault(context, pods, failure)
    if KINDS[failure.kind].takes_node or not CLASSES[classify_failure(failure.kind)].blames_node:
        return failure.message, UNKNOWN
    alike = [pod for pod in pods if any(item.kind is failure.kind for item in detect_pod_signals(pod, context.now))]
    return failure.message, Fault(node=_name_only_node(alike) if alike else failure.node)


def find_pod_fault(context: Context, pods: Collection[PodView], failure: Signal) -> tuple[str, Fault]:
    """Return the message and the first sign of a failure of pods; the arguments are those of `find_fault`."""
    failed = exit_codes.select_own_failures(pods)
    # Pods that had to stop are no node's fault, but a rule may name their exit code.
    first = exit_codes.find_first_failed(failed) or tuple(pod for pod in pods if pod.has_failed)
    if not first:
        return failure.message, UNKNOWN
    action, rule = exit_codes.choose_action(context.spec.recovery.pod_failure_policy, first, failed)
    code = first[0].exit_code
    fault = Fault(
        node=_name_only_node(first) if failed else "",
        exit_code=code if code is not None and code >= 0 else None,
        action=action,
        rule=rule,
        failed_pods=len(failed),
    )
    is_named = failure.kind is Kind.POD_FAILED
    # The phase follows the exit code.
    ended = dataclasses.replace(first[0], phase="Failed")
    message = detect_pod_signals(ended, context.now)[0].message if is_named else failure.message
    return f"{message}; {rule}" if rule else message, fault


def _name_only_node(pods: Collection[PodView]) -> str:
    """Return the node of the pods if all are on one; a failure that begins on several nodes is no node's."""
    names = {pod.node or "" for pod in pods}
    return names.pop() if len(names) == 1 else ""
