"""Jobs that are about to start from another job's folder (`spec.checkpoint.startFrom`), and what they may read. Pure.

A conversion that runs reads one of several commits, so it keeps all of them. A job that waits needs one commit, and may
wait for ever, so what it keeps is bounded.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from elastic_operator.api.claim_path import Start, find_path_problem, normalize_path
from elastic_operator.api.status import Phase, Status
from elastic_operator.observed import pod_diagnosis
from elastic_operator.observed.signal_kinds import Kind

MAX_AWAITED = 16
"""Largest number of superseded commits that stay for jobs that wait; the newest three of the job stay anyway."""

_IDLE_REASONS = frozenset({
    Kind.IMAGE, Kind.UNSCHEDULABLE, pod_diagnosis.PODS_REFUSED, pod_diagnosis.POD_STUCK, *pod_diagnosis.LAUNCH_REASONS,
})  # fmt: skip
"""Reasons of phase Resharding while no reshard pod runs."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Protection:
    """Protection of the commits in a checkpoint root from which other jobs start.

    Attributes:
        is_read: True if a conversion may run, or the starts are not known; then every commit stays.
        folders: folders, relative to the root, from which waiting jobs will start; empty text for the root itself.
        jobs: names of all these jobs, sorted.
        pinned: names of commits that the user has pinned.
    """

    is_read: bool = False
    folders: frozenset[str] = frozenset()
    jobs: tuple[str, ...] = ()
    pinned: frozenset[str] = frozenset()


def find_start(job: str, claim: str, folder: str, status: Status) -> Start | None:
    """Return what a job is about to start from; None if it needs no folder of other jobs.

    Args:
        job: name of the job.
        claim: `spec.checkpoint.claimName`.
        folder: `spec.checkpoint.startFrom`.
        status: status of the job.
    """
    current = status.current
    must_convert = current is not None and current.resume.external and not current.resume.ready
    if status.terminal or not folder or not (must_convert or status.started_from is None):
        return None
    reads_after = _find_reading_time(status) if must_convert else math.inf
    return Start(job=job, claim=claim, folder=folder, reads_after=reads_after)


def read_folder(spec: Mapping[str, Any]) -> tuple[str, str]:
    """Return claim and start folder of a spec that is invalid elsewhere; empty texts if they are invalid, too."""
    checkpoint = spec.get("checkpoint")
    values = checkpoint if isinstance(checkpoint, Mapping) else {}
    claim, folder = values.get("claimName"), values.get("startFrom")
    if not isinstance(claim, str) or not isinstance(folder, str) or find_path_problem(folder) is not None:
        return "", ""
    return claim, normalize_path(folder)


def _find_reading_time(status: Status) -> float:
    """Return from when on a reshard pod of a job that has to convert may run."""
    if status.phase == Phase.RESHARDING and status.reason in _IDLE_REASONS:
        return math.inf
    reshard = status.reshard
    if reshard is None or reshard.attempt != status.attempt or reshard.retry_time is None:
        return 0.0
    return reshard.retry_time


def find_protection(
    starts: Iterable[Start] | None, claim: str, path: str, now: float, pinned: Collection[str] = ()
) -> Protection:
    """Return what stays in a checkpoint root (claim, path inside it); everything if the starts are not known."""
    if starts is None:
        return Protection(is_read=True, pinned=frozenset(pinned))
    root = f"{path}/" if path else ""
    here = [start for start in starts if start.claim == claim and _overlaps(start.folder, root)]
    return Protection(
        is_read=any(start.reads_after <= now for start in here),
        folders=frozenset(f"{start.folder}/".removeprefix(root).strip("/") if _is_below(start.folder, root) else ""
                          for start in here),
        jobs=tuple(sorted({start.job for start in here})),
        pinned=frozenset(pinned),
    )  # fmt: skip


def _is_below(folder: str, root: str) -> bool:
    return f"{folder}/".startswith(root)


def _overlaps(folder: str, root: str) -> bool:
    return _is_below(folder, root) or root.startswith(f"{folder}/")


def find_held(protection: Protection, history: Collection[str], superseded: Sequence[str]) -> frozenset[str]:
    """Return which superseded commits must stay on storage for other jobs, or because they are pinned.

    For jobs that wait these are the commits that they name, and the newest others. A job that names an attempt's folder
    will read the newest commit in it.

    Args:
        protection: what other jobs start from.
        history: names of the commits that stay anyway.
        superseded: names of those that nothing of this job refers to, oldest first.
    """
    if protection.is_read:
        return frozenset(superseded)
    pinned = protection.pinned.intersection(superseded)
    if not protection.folders:
        return pinned
    targets = {"/".join(folder.split("/")[:2]) for folder in protection.folders}
    attempts = {name.partition("/")[0] for name in history}
    named: list[str] = []
    others: list[str] = []
    for name in reversed(superseded):
        attempt = name.partition("/")[0]
        is_named = name in targets or (attempt in targets and attempt not in attempts)
        attempts.add(attempt)
        (named if is_named else others).append(name)
    return pinned.union([*named, *others][:MAX_AWAITED])
