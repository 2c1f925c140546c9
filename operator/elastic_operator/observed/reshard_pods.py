"""Reports of the pods of a reshard Job, and the reason why none of them converts. Pure."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Collection, Sequence

from elastic_operator.api import pod_reports
from elastic_operator.api.validation import shorten
from elastic_operator.observed.failure_classes import is_infrastructure
from elastic_operator.observed.observation import RESHARD, JobView, Observation, PodView
from elastic_operator.observed.signal_kinds import Kind
from elastic_operator.observed.signals import Signal, detect_pod_signals
from reshard.contract import ReshardReport, sentence

OUT_OF_MEMORY = "OutOfMemory"
"""Reason of a failed conversion whose pod was killed because of its memory."""

UNPLACED_SECONDS = 600.0
"""Time after which the Job of a reshard pod without a node is replaced, so that its deadline does not end it."""

_PULL_REASONS = ("ErrImagePull", "ImagePullBackOff")
"""Reasons of a waiting container whose registry may answer again."""

RESHARD_MODES = ("materialize", "virtual")

_SHOWN = (Kind.IMAGE, Kind.UNSCHEDULABLE)


def select_reshard_pods(world: Observation, job: JobView) -> tuple[PodView, ...]:
    """Return the pods of one reshard Job; those of an earlier Job of its name may still be there."""
    pods = (pod for pod in world.pods if pod.role == RESHARD and pod.attempt == job.attempt)
    return tuple(pod for pod in pods if pod.owner in ("", job.uid))


def judge_job(job: JobView, pods: Collection[PodView]) -> JobView:
    """Return a reshard Job as complete or failed if its containers say so, while others run on in its pods.

    Such a Job does not end before its deadline. One success completes it; it has failed if all its pods have.
    """
    held_open = [pod for pod in pods if pod.outlived_by]
    if not held_open or job.complete or job.failed:
        return job
    if any(pod.outcome == "Succeeded" for pod in held_open):
        return dataclasses.replace(job, complete=True)
    if len(pods) < job.num_pods or any(pod.outcome != "Failed" for pod in pods):
        return job
    message = f"the container of {held_open[0].name} failed, while {held_open[0].outlived_by} goes on"
    return dataclasses.replace(job, failed=True, failed_reason="ContainerFailed", failed_message=message)


def detect_start_trouble(pods: Collection[PodView], job: JobView, now: float) -> Signal | None:
    """Return why no pod of an unfinished reshard Job converts; None if one does, or if all have ended.

    Pods that share a conversion do not need each other, so one that works is enough.
    """
    live = [pod for pod in pods if not pod.terminal and pod.deleted_at is None]
    if any(pod.phase in ("Running", "Succeeded") for pod in pods) or (pods and not live):
        return None
    signals = [signal for pod in live for signal in detect_pod_signals(pod, now) if signal.kind in _SHOWN]
    if signals:
        return min(signals, key=lambda signal: (_SHOWN.index(signal.kind), signal.since, signal.pod))
    since = now if job.created_at is None else job.created_at
    subject = f"the container of {live[0].name}" if live else f"no pod of Job {job.name}"
    verb = "has not started" if live else "exists"
    message = f"{subject} {verb} {now - since:.0f} s after the Job was created"
    return Signal(kind=Kind.STARTUP_TIMEOUT, since=since, message=message)


def is_shown(signal: Signal) -> bool:
    """Return whether people are told of the signal before its grace period ends."""
    return signal.kind in _SHOWN


def is_waiting_for_room(signal: Signal, pods: Collection[PodView]) -> bool:
    """Return whether the pods only lack a node or a quota, so that waiting may help."""
    return signal.kind is Kind.UNSCHEDULABLE or not pods


def is_pull_failure(signal: Signal, pods: Collection[PodView]) -> bool:
    """Return whether the signal is about an image that the kubelet could not pull, so that a later try may succeed."""
    return signal.kind is Kind.IMAGE and any(
        pod.name == signal.pod and pod.waiting_reason in _PULL_REASONS for pod in pods
    )


def find_interruption(pods: Collection[PodView], job: JobView, now: float) -> Signal | None:
    """Return how the infrastructure ended a failed Job; None if its program or its deadline did.

    The Job controller counts a pod as failed as soon as it is deleted, so its container may still run. Pods that failed
    by themselves stay as long as their Job.
    """
    if job.failed_reason == "DeadlineExceeded":
        return None
    ended = [dataclasses.replace(pod, phase="Failed") for pod in pods if pod.outcome == "Failed" or pod.disruption]
    if not ended and all(pod.deleted_at is not None and not pod.terminal for pod in pods):
        message = f"the pods of Job {job.name} are gone: they were preempted, evicted or deleted"
        return Signal(kind=Kind.POD_DELETED, since=now, message=message)
    signals = [signal for pod in ended for signal in detect_pod_signals(pod, now) if is_infrastructure(signal.kind)]
    return min(signals, key=lambda signal: list(Kind).index(signal.kind), default=None)


def find_killed_pod(pods: Collection[PodView]) -> PodView | None:
    """Return a pod whose container was killed because of its memory, or None."""
    return next((pod for pod in pods if pod.exit_reason == "OOMKilled"), None)


def describe_failed_pods(pods: Collection[PodView], now: float) -> tuple[str, str] | None:
    """Return reason and sentence about pods that failed without a report; None if none of them says more."""
    killed = find_killed_pod(pods)
    if killed is not None:
        return OUT_OF_MEMORY, f"pod {killed.name} on node {killed.node} ran out of memory (OOMKilled)"
    failed = (pod for pod in pods if pod.outcome == "Failed" or pod.disruption)
    signals = sorted(
        (signal for pod in failed for signal in detect_pod_signals(pod, now)),
        key=lambda signal: list(Kind).index(signal.kind),
    )
    if not signals:
        return None
    return "NoReport", signals[0].message


def report_of(pods: Sequence[PodView]) -> ReshardReport | None:
    """Return the report in the termination messages of one attempt's reshard pods, or None.

    If several pods shared a conversion, the report of the pod that completed it counts. If all failed, the newest
    report counts.
    """
    reports: list[ReshardReport] = []
    for pod in sorted(pods, key=lambda pod: pod.created_at or 0.0, reverse=True):
        if pod.termination_message:
            with contextlib.suppress(ValueError):
                reports.append(_parse_report(pod))
    return max(reports, key=lambda report: (report.ok, report.bytes_written if report.ok else 0), default=None)


def report_problems(pods: Sequence[PodView]) -> list[tuple[str, str]]:
    """Return the reshard pods whose termination message is not a valid report, and why."""
    problems: list[tuple[str, str]] = []
    for pod in pods:
        if pod.termination_message:
            try:
                _parse_report(pod)
            except ValueError as error:
                problems.append((f"Pod {pod.name}: termination message", sentence(str(error), pod_reports.TEXT_BYTES)))
    return problems


def _parse_report(pod: PodView) -> ReshardReport:
    """Parse the report of a reshard pod, with each text in one line.

    Raises:
        ValueError: the termination message is not a valid report.
    """
    report = ReshardReport.from_json(pod.termination_message)
    if report.mode not in RESHARD_MODES:
        raise ValueError(f"mode: expected one of {', '.join(RESHARD_MODES)}, found {shorten(report.mode)}")
    if report.ok != (report.exit_code == 0):
        raise ValueError(f"ok: expected {report.exit_code == 0} with exitCode {report.exit_code}, found {report.ok}")
    return dataclasses.replace(
        report,
        message=sentence(report.message, pod_reports.TEXT_BYTES),
        mode_reason=sentence(report.mode_reason, pod_reports.TEXT_BYTES),
    )
