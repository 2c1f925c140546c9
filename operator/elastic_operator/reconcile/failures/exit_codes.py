"""Find the pod that failed first, and apply `spec.recovery.podFailurePolicy` to exit codes."""

from __future__ import annotations

import collections
import signal
from collections.abc import Collection

from elastic_operator.api.failure_policy import COUNT, FAIL_JOB, PodFailurePolicy
from elastic_operator.observed.observation import PodView
from reshard.contract import TrainerExit

TIE_SECONDS = 2.0
"""Failures that the operator first saw within this time of each other count as simultaneous: kubelets look for ended
containers once a second."""

_BY_SIGNAL = 128
"""A container that died of a signal has this exit code, plus the number of the signal (1 to 64)."""

_TERMINATED = _BY_SIGNAL + signal.SIGTERM
_ABORTED = _BY_SIGNAL + signal.SIGABRT

_OF_STOPPED_PODS = (
    None,
    1,
    _BY_SIGNAL + signal.SIGINT,
    _BY_SIGNAL + signal.SIGKILL,
    _TERMINATED,
    *TrainerExit,
)
"""Exit codes with which a pod ends because it has to; torchrun ends with 1 after SIGTERM."""


def select_own_failures(pods: Collection[PodView]) -> tuple[PodView, ...]:
    """Return the pods that failed by themselves, lowest index first: not because someone asked them to stop."""
    failed = sorted((pod for pod in pods if pod.has_failed), key=lambda pod: (pod.index or 0, pod.name))
    return tuple(pod for pod in failed if pod.exit_code not in _OF_STOPPED_PODS or not _had_to_stop(pod))


def find_first_failed(failed: Collection[PodView]) -> tuple[PodView, ...]:
    """Return the pods with which a failure began: one rank that fails makes the others fail later.

    The order is that in which the operator saw the failures, because the clocks of nodes differ. Among simultaneous
    failures, those of pods that died of a signal came first, then those whose exit code differs from that of most pods.

    Args:
        failed: result of `select_own_failures`.
    """
    begin = min((pod.failed_at or 0.0 for pod in failed), default=0.0)
    tied = tuple(pod for pod in failed if (pod.failed_at or 0.0) - begin <= TIE_SECONDS)
    killed = tuple(pod for pod in tied if _has_died_of_signal(pod))
    if killed and len(killed) < len(tied):
        return killed
    return _select_different(tied) or tied


def choose_action(
    policy: PodFailurePolicy | None, first: Collection[PodView], failed: Collection[PodView]
) -> tuple[str, str]:
    """Return the action that the policy demands, and a text that names rule and pod.

    `FailJob` applies to every pod that failed by itself. A rule about all codes but some (`NotIn`) applies only to the
    pods that failed first, because those that fail as a consequence have other codes.

    Args:
        policy: `spec.recovery.podFailurePolicy`, None if there is none.
        first: the pods that failed first.
        failed: all pods that failed by themselves.
    """
    rules = tuple(enumerate(policy.rules if policy is not None else ()))
    for pod in (*first, *failed):
        for number, rule in rules:
            if pod.exit_code and rule.on_exit_codes.matches(pod.exit_code):
                is_meant = rule.on_exit_codes.operator == "In" or pod in first
                if rule.action == FAIL_JOB and is_meant:
                    return _describe(number, rule.action, pod)
                break  # as in a Job, the first rule that applies to a pod decides about it
    for number, rule in rules:
        for pod in first:
            if pod.exit_code and rule.on_exit_codes.matches(pod.exit_code):
                return _describe(number, rule.action, pod)
    return COUNT, ""


def _describe(number: int, action: str, pod: PodView) -> tuple[str, str]:
    text = f"spec.recovery.podFailurePolicy.rules[{number}] ({action}) applies to exit code"
    return action, f"{text} {pod.exit_code} of pod {pod.name}"


def _had_to_stop(pod: PodView) -> bool:
    """Return whether somebody asked the pod to stop before it was seen to have failed."""
    if pod.deleted_at is None:
        return bool(pod.disruption)
    asked = pod.deleted_at - pod.deletion_grace_seconds
    return pod.failed_at is None or asked <= pod.failed_at


def _has_died_of_signal(pod: PodView) -> bool:
    """Return whether the program was ended by a signal that is not a consequence of another rank's failure.

    A launcher sends SIGTERM to the ranks beside a failed one. The watchdog of torch.distributed aborts ranks whose peer
    is gone.
    """
    code = pod.exit_code or 0
    return _BY_SIGNAL < code <= _BY_SIGNAL + 64 and code not in (_TERMINATED, _ABORTED)


def _select_different(tied: Collection[PodView]) -> tuple[PodView, ...]:
    """Return the pods without the exit code that more than half of all have; none if no code has that many."""
    counts = collections.Counter(pod.exit_code for pod in tied)
    (common, count), *_ = counts.most_common(1) or [(None, 0)]
    if 2 * count <= len(tied):
        return ()
    different = tuple(pod for pod in tied if pod.exit_code != common)
    return different if any(pod.exit_code != _TERMINATED for pod in different) else ()
