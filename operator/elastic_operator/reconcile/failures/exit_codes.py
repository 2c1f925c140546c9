"""Which pod failed first, and what `spec.recovery.podFailurePolicy` says about its exit code."""

from __future__ import annotations

from collections.abc import Collection

from elastic_operator.api.failure_policy import COUNT, PodFailurePolicy
from elastic_operator.observed.observation import PodView

TIE_SECONDS = 1.0
"""Pods that ended within this time of each other ended together: kubelets report whole seconds."""


def find_first_failed(pods: Collection[PodView]) -> tuple[PodView, ...]:
    """Return the pods that failed first, lowest index first: one rank that fails makes the others fail later.

    The times come from the clocks of the nodes, so a skewed clock can name the wrong pod.
    """
    failed = sorted((pod for pod in pods if pod.phase == "Failed"), key=lambda pod: (pod.index or 0, pod.name))
    known = [pod.finished_at for pod in failed if pod.finished_at is not None]
    if not known:
        return tuple(failed)
    first = min(known)
    return tuple(pod for pod in failed if pod.finished_at is not None and pod.finished_at - first <= TIE_SECONDS)


def choose_action(policy: PodFailurePolicy | None, failed: Collection[PodView]) -> tuple[str, str]:
    """Return the action of the first rule that applies to one of the pods, and a text that names rule and pod.

    Args:
        policy: `spec.recovery.podFailurePolicy`, None if there is none.
        failed: the pods that failed first.
    """
    for number, rule in enumerate(policy.rules if policy is not None else ()):
        for pod in failed:
            if pod.exit_code and rule.on_exit_codes.matches(pod.exit_code):
                text = f"spec.recovery.podFailurePolicy.rules[{number}] ({rule.action}) applies to exit code"
                return rule.action, f"{text} {pod.exit_code} of pod {pod.name}"
    return COUNT, ""
