"""One ElasticTrainingJob as the operator understands it. Pure."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from elastic_operator.api.serialization import parse_time, to_wire
from elastic_operator.api.spec import NotPermittedError, Spec, SpecError, parse_spec
from elastic_operator.api.spec_model import OPERATOR_NAME
from elastic_operator.api.status import Status
from elastic_operator.api.status_reader import read_status
from elastic_operator.manifests.attempt import DRAIN_REQUESTED, RETRY_REQUESTED, JobRef
from elastic_operator.manifests.forbidden_accounts import Boundary
from elastic_operator.reconcile.actions import Decision
from reshard.contract import GROUP, KIND, VERSION

_TOKEN_LENGTH = 253
"""Maximum length of a request token; the schema of the status allows no more."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """Input of a pass: one resource.

    Attributes:
        spec: the parsed spec, or why it is invalid.
        suspends: True if `spec.suspend` is true in the resource, even if the rest of the spec is invalid.
        deleting: True if the resource is being deleted; the operator does nothing more for it.
        is_managed_elsewhere: True if `spec.managedBy` names another controller; the operator does nothing at all then.
        problems: fields of the stored status that are invalid and left out of `status` (`status_reader`).
        lost: those of `problems` that every decision needs.
        version: resourceVersion that this was read from; ignored in comparisons.
    """

    job: JobRef
    status: Status
    spec: Spec | SpecError
    suspends: bool = False
    deleting: bool = False
    is_managed_elsewhere: bool = False
    problems: tuple[str, ...] = ()
    lost: tuple[str, ...] = ()
    version: str = dataclasses.field(default="", compare=False)

    @property
    def reference(self) -> dict[str, Any]:
        """The parts of the resource that a write of its status needs."""
        meta = {"name": self.job.name, "namespace": self.job.namespace, "uid": self.job.uid}
        return {
            "apiVersion": f"{GROUP}/{VERSION}",
            "kind": KIND,
            "metadata": {**meta, "resourceVersion": self.version},
            "status": to_wire(self.status),
        }


def apply_boundary(record: Record, boundary: Boundary) -> Record:
    """Return the record with an error in place of its spec if the job asks for what is out of bounds."""
    if not isinstance(record.spec, Spec):
        return record
    problems = boundary.problems(record.job, record.spec)
    return dataclasses.replace(record, spec=NotPermittedError(problems)) if problems else record


def read_record(resource: Mapping[str, Any], before: Record | None = None) -> Record:
    """Parse an ElasticTrainingJob; an unchanged spec is taken from `before`, an earlier record of the same resource."""
    meta = resource["metadata"]
    stored = read_status(resource.get("status") or {})
    annotations = meta.get("annotations") or {}
    job = JobRef(
        name=meta["name"],
        namespace=meta["namespace"],
        uid=meta["uid"],
        generation=meta.get("generation") or 0,
        labels=meta.get("labels") or {},
        drain_request=annotations.get(DRAIN_REQUESTED, "")[:_TOKEN_LENGTH],
        retry_request=annotations.get(RETRY_REQUESTED, "")[:_TOKEN_LENGTH],
        created_at=parse_time(meta.get("creationTimestamp")),
        version=meta.get("resourceVersion") or "",
    )
    is_same_generation = before is not None and (before.job.uid, before.job.generation) == (job.uid, job.generation)
    return Record(
        job=job,
        status=stored.status,
        spec=before.spec if is_same_generation and before is not None else _parse_spec(resource["spec"]),
        suspends=resource["spec"].get("suspend") is True,
        deleting=bool(meta.get("deletionTimestamp")),
        is_managed_elsewhere=is_managed_elsewhere(resource["spec"]),
        problems=stored.problems,
        lost=stored.lost,
        version=meta.get("resourceVersion") or "",
    )


def is_noop(before: Status, decision: Decision) -> bool:
    """Return whether a decision writes nothing, does nothing and reports nothing."""
    return not (_has_effects(decision) or decision.events or decision.status != before)


def is_status_only(before: Status, decision: Decision) -> bool:
    """Return whether a decision only reports how far a running attempt is, without any action."""
    after = decision.status
    is_running_on = before.launched and after.launched and not after.terminal and _step(before) <= _step(after)
    return is_running_on and not _has_effects(decision) and _steering_fields(before) == _steering_fields(after)


def is_progress_only(before: Status, decision: Decision) -> bool:
    """Return whether only progress changed; the write may then be deferred.

    No other change may be deferred: some facts get their time when they are written, and some are gone later, such as a
    commit that a newer one replaces.
    """
    after = decision.status
    if decision.events or before.progress is None or after.progress is None:
        return False
    with_old_progress = dataclasses.replace(
        after, progress=before.progress, losses=before.losses, goodput=before.goodput, ettr_text=before.ettr_text
    )
    return with_old_progress == before and after.progress.phase == before.progress.phase


def _has_effects(decision: Decision) -> bool:
    return bool(decision.needs_fresh_capacity or decision.actions or decision.reshards)


def _steering_fields(status: Status) -> tuple[Any, ...]:
    """Return the fields of a status that later decisions depend on."""
    requests = (status.drain_request, status.retry_request)
    pinned = (status.pinned, status.pin)
    return status.attempt, requests, status.drain, status.growth, status.reshard, pinned, status.excluded_nodes


def _step(status: Status) -> int:
    return status.progress.step if status.progress is not None else 0


def is_managed_elsewhere(spec: Mapping[str, Any]) -> bool:
    """Return whether another controller manages the resource; read apart from the spec, which may be invalid."""
    manager = spec.get("managedBy")
    return isinstance(manager, str) and manager not in ("", OPERATOR_NAME)


def _parse_spec(wire: Mapping[str, Any]) -> Spec | SpecError:
    try:
        return parse_spec(wire)
    except SpecError as error:
        return error
