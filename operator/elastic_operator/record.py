"""One resource as the operator understands it. Pure."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from elastic_operator.actions import Decision
from elastic_operator.manifests import DRAIN_REQUESTED, RETRY_REQUESTED, JobRef
from elastic_operator.spec import Spec, SpecError, parse_spec
from elastic_operator.status import Status
from elastic_operator.wire import from_wire


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """What a pass begins with.

    Attributes:
        spec: what is wanted, or why it makes no sense.
        deleting: the resource is on its way out; nothing is done for it any more.
    """

    job: JobRef
    status: Status
    spec: Spec | SpecError
    deleting: bool = False


def read_record(resource: Mapping[str, Any], before: Record | None = None) -> Record:
    """Record of an ElasticTrainingJob. `before`: an earlier one of the same, to keep a spec that has not changed.

    Raises:
        TypeError: the status lacks a field that has to be there.
    """
    meta = resource["metadata"]
    job = JobRef(
        name=meta["name"],
        namespace=meta["namespace"],
        uid=meta["uid"],
        generation=meta.get("generation") or 0,
        labels=meta.get("labels") or {},
        drain_request=(meta.get("annotations") or {}).get(DRAIN_REQUESTED, ""),
        retry_request=(meta.get("annotations") or {}).get(RETRY_REQUESTED, ""),
    )
    known = before is not None and (before.job.uid, before.job.generation) == (job.uid, job.generation)
    return Record(
        job=job,
        status=from_wire(Status, resource.get("status") or {}),
        spec=before.spec if known and before is not None else _spec(resource["spec"]),
        deleting=bool(meta.get("deletionTimestamp")),
    )


def is_quiet(before: Status, decision: Decision) -> bool:
    """Nothing is to be written, done or said."""
    return not (
        decision.needs_fresh_capacity
        or decision.actions
        or decision.events
        or decision.reshards
        or decision.status != before
    )


def _spec(wire: Mapping[str, Any]) -> Spec | SpecError:
    try:
        return parse_spec(wire)
    except SpecError as error:
        return error
