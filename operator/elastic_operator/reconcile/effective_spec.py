"""The spec that a job goes on with while an edit of it makes no sense. Pure.

A refused edit leaves what runs alone. What runs still loses nodes, and has to be recovered by some spec: by the one
that was accepted last. It is kept in a ControllerRevision of the job, where StatefulSets keep theirs. The data of one
cannot be changed, so every accepted spec makes a new one.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

from elastic_operator.api.conditions import Type, find
from elastic_operator.api.spec import Spec, SpecError, parse_spec
from elastic_operator.api.status import Phase, Status
from elastic_operator.manifests.attempt import JobRef, owned
from elastic_operator.observed.ownership import is_controlled_by
from elastic_operator.reconcile.actions import Decision
from elastic_operator.reconcile.record import Record


def revision(job: JobRef, spec: Mapping[str, Any]) -> dict[str, Any]:
    """The ControllerRevision that keeps a spec as it was written.

    Its name is not that of an earlier job of the same name, whose revisions may be there until they are collected.
    """
    return {
        "apiVersion": "apps/v1",
        "kind": "ControllerRevision",
        "metadata": owned(job, f"{job.name}-{job.uid[:8]}-{job.generation}"),
        "data": {"spec": dict(spec)},
        "revision": job.generation,
    }


def is_due(before: Status, after: Status) -> bool:
    """The spec has to be kept: it was found to be valid just now, or an attempt begins with it.

    Attempts begin with one that an older operator, which kept none, has found to be valid.
    """
    known = _valid(before) and before.observed_generation == after.observed_generation
    return _valid(after) and not (known and before.attempt == after.attempt)


def newest(revisions: Iterable[Mapping[str, Any]], uid: str) -> Spec | None:
    """The spec that the job with this uid had accepted last; None without one that this operator understands."""
    own = [item for item in revisions if is_controlled_by(item, uid)]
    found = max(own, key=lambda item: int(item["revision"]), default=None)
    data = (found.get("data") if found is not None else None) or {}
    try:
        return parse_spec(data["spec"])
    except (SpecError, LookupError, TypeError, ValueError, AttributeError):
        return None


def stale_revisions(revisions: Iterable[Mapping[str, Any]], job: JobRef) -> list[tuple[str, str]]:
    """Names and UIDs of the job's own that a newer one has replaced."""
    own = (item for item in revisions if is_controlled_by(item, job.uid))
    return [
        (item["metadata"]["name"], item["metadata"]["uid"]) for item in own if int(item["revision"]) < job.generation
    ]


def wanted(status: Status) -> bool:
    """Some attempt has been launched, and there is to be another one where it ends."""
    num_over = status.attempt - (status.current is not None)
    return (status.launched or num_over > 0) and not status.terminal


def effective_spec(spec: Spec, record: Record) -> Spec:
    """The accepted spec, as what runs goes on by it: not at all where the refused one says so.

    Who wants a job to stop should not have to correct it first. To go on again it has to be corrected.
    """
    suspend = spec.suspend or record.suspends or record.status.phase == Phase.SUSPENDED
    return dataclasses.replace(spec, suspend=suspend)


def merge_rejected_spec(refused: Decision, accepted: Decision) -> Decision:
    """What the accepted spec leads to, told together with what is wrong with the one that was refused."""
    invalid = find(refused.status.conditions, Type.SPEC_VALID)
    conditions = tuple(
        invalid if item.type == Type.SPEC_VALID and invalid is not None else item for item in accepted.status.conditions
    )
    return dataclasses.replace(
        accepted,
        status=dataclasses.replace(accepted.status, conditions=conditions),
        events=(*refused.events, *accepted.events),
        requeue_seconds=min(refused.requeue_seconds, accepted.requeue_seconds),
    )


def _valid(status: Status) -> bool:
    found = find(status.conditions, Type.SPEC_VALID)
    return found is not None and found.status == "True"
