"""The spec that a job runs by while its edited spec is invalid. Pure.

A rejected edit leaves running pods alone. The job still loses nodes and must be recovered with some spec: the one that
was accepted last. The operator keeps it in a ControllerRevision of the job, as StatefulSets do. The data of a
ControllerRevision cannot be changed, so every accepted spec makes a new one.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Iterable, Mapping
from typing import Any

from elastic_operator.api.conditions import Type, find
from elastic_operator.api.spec import Spec, SpecError, parse_spec
from elastic_operator.api.status import Current, Phase, Status
from elastic_operator.manifests.attempt import JobRef, build_owned_metadata
from elastic_operator.observed.ownership import is_controlled_by
from elastic_operator.reconcile.actions import Decision
from elastic_operator.reconcile.record import Record


def build_revision(job: JobRef, spec: Mapping[str, Any]) -> dict[str, Any]:
    """Build the ControllerRevision that keeps a spec as it was written.

    The name contains the UID, because revisions of an earlier job of the same name may still exist. The API server
    compares the bytes of `data` at each patch of others, also of metadata, and writes JSON in its own way: sorted, with
    other numbers and escapes than Python. So the spec is a text without a character that anybody escapes differently.
    """
    text = json.dumps(spec, sort_keys=True, separators=(",", ":"))
    return {
        "apiVersion": "apps/v1",
        "kind": "ControllerRevision",
        "metadata": build_owned_metadata(job, f"{job.name}-{job.uid[:8]}-{job.generation}"),
        "data": {"spec": _ESCAPED.sub(lambda match: f"\\u{ord(match[0]):04x}", text)},
        "revision": job.generation,
    }


_ESCAPED = re.compile("[<>&\x7f]")


def is_revision_due(before: Status, after: Status) -> bool:
    """Return whether the spec must be stored in a revision: it was just accepted, or an attempt begins with it.

    The second case covers specs that an older operator, which stored no revisions, has accepted.
    """
    is_kept = _is_valid(before) and before.observed_generation == after.observed_generation
    return _is_valid(after) and not (is_kept and before.attempt == after.attempt)


def read_newest_spec(revisions: Iterable[Mapping[str, Any]], uid: str) -> Spec | None:
    """Return the spec that the job with this UID accepted last, or None if this operator cannot parse one."""
    own = [item for item in revisions if is_controlled_by(item, uid)]
    newest = max(own, key=lambda item: int(item["revision"]), default=None)
    data = (newest.get("data") if newest is not None else None) or {}
    try:
        spec = data["spec"]  # an older operator has kept it as an object
        return parse_spec(json.loads(spec) if isinstance(spec, str) else spec)
    except (SpecError, LookupError, TypeError, ValueError, AttributeError):
        return None


def stale_revisions(revisions: Iterable[Mapping[str, Any]], job: JobRef) -> list[tuple[str, str]]:
    """Return names and UIDs of the job's revisions that a newer one has replaced."""
    own = (item for item in revisions if is_controlled_by(item, job.uid))
    return [
        (item["metadata"]["name"], item["metadata"]["uid"]) for item in own if int(item["revision"]) < job.generation
    ]


def is_accepted_spec_needed(status: Status) -> bool:
    """Return whether an attempt was launched and the job will need another one when it ends."""
    num_ended = status.attempt - (status.current is not None)
    return (status.launched or num_ended > 0) and not status.terminal


def effective_spec(spec: Spec, record: Record) -> Spec:
    """Return the accepted spec with `suspend` set if the rejected spec asks for it.

    A person who wants a job to stop does not have to correct its spec first; to let it go on, the spec must be valid.
    """
    suspend = spec.suspend or record.suspends or record.status.phase == Phase.SUSPENDED
    return dataclasses.replace(spec, suspend=suspend)


def describe_edit(current: Current, spec: Spec) -> str:
    """Return a clause for an event: what was edited since an attempt was planned, as far as the status knows it."""
    length = spec.model.sequence_length if spec.model is not None else 0
    changes = [
        f"{name} changed from {before} to {after}"
        for name, before, after in (
            ("spec.batch.globalSamples", current.global_samples, spec.batch.global_samples),
            ("spec.model.sequenceLength", current.sequence_length, length),
        )
        if before and after and before != after
    ]
    return "the spec was edited" + (f" ({', '.join(changes)})" if changes else "")


def merge_rejected_spec(refused: Decision, accepted: Decision) -> Decision:
    """Merge the decision by the accepted spec with the report about the rejected spec."""
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


def _is_valid(status: Status) -> bool:
    condition = find(status.conditions, Type.SPEC_VALID)
    return condition is not None and condition.status == "True"
