"""The reports in the termination messages of reshard pods."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Sequence

from elastic_operator.api import pod_reports
from elastic_operator.api.validation import shorten
from elastic_operator.observed.observation import PodView
from reshard.contract import ReshardReport, sentence

RESHARD_MODES = ("materialize", "virtual")


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
