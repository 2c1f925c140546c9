"""One resource as the operator understands it. Pure."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from elastic_operator.api.field_reader import NotPermittedError
from elastic_operator.api.serialization import parse_time, to_wire
from elastic_operator.api.spec import Spec, SpecError, parse_spec
from elastic_operator.api.status import Status
from elastic_operator.api.status_reader import read_status
from elastic_operator.manifests.attempt import DRAIN_REQUESTED, RETRY_REQUESTED, JobRef
from elastic_operator.manifests.forbidden_accounts import Boundary
from elastic_operator.reconcile.actions import Decision
from reshard.contract import GROUP, KIND, VERSION

_TOKEN_LENGTH = 253
"""Of the value of a request, as far as the schema lets a status keep it."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """What a pass begins with.

    Attributes:
        spec: what is wanted, or why it makes no sense.
        suspends: the resource says that nothing shall run, whatever else it says.
        deleting: the resource is on its way out; nothing is done for it any more.
        problems: fields of the stored status that do not fit, and are left out of `status` (`status_reader`).
        lost: those among them that nothing can be decided without.
        version: of the resource that this was read from; another one alone is no other record.
    """

    job: JobRef
    status: Status
    spec: Spec | SpecError
    suspends: bool = False
    deleting: bool = False
    problems: tuple[str, ...] = ()
    lost: tuple[str, ...] = ()
    version: str = dataclasses.field(default="", compare=False)

    @property
    def reference(self) -> dict[str, Any]:
        """The resource as far as a write of its status needs it."""
        meta = {"name": self.job.name, "namespace": self.job.namespace, "uid": self.job.uid}
        return {
            "apiVersion": f"{GROUP}/{VERSION}",
            "kind": KIND,
            "metadata": {**meta, "resourceVersion": self.version},
            "status": to_wire(self.status),
        }


def confined(record: Record, boundary: Boundary) -> Record:
    """Return the record, with the reason in place of its spec where the job is out of bounds."""
    if not isinstance(record.spec, Spec):
        return record
    problems = boundary.problems(record.job, record.spec)
    return dataclasses.replace(record, spec=NotPermittedError(problems)) if problems else record


def read_record(resource: Mapping[str, Any], before: Record | None = None) -> Record:
    """Record of an ElasticTrainingJob. `before`: an earlier one of the same, to keep a spec that has not changed."""
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
    )
    known = before is not None and (before.job.uid, before.job.generation) == (job.uid, job.generation)
    return Record(
        job=job,
        status=stored.status,
        spec=before.spec if known and before is not None else _spec(resource["spec"]),
        suspends=resource["spec"].get("suspend") is True,
        deleting=bool(meta.get("deletionTimestamp")),
        problems=stored.problems,
        lost=stored.lost,
        version=meta.get("resourceVersion") or "",
    )


def is_noop(before: Status, decision: Decision) -> bool:
    """Nothing is to be written, done or said."""
    return not (_does(decision) or decision.events or decision.status != before)


def is_status_only(before: Status, decision: Decision) -> bool:
    """Nothing is to be done, and what runs goes on: what is to be written and said only tells how far it is."""
    after = decision.status
    goes_on = before.launched and after.launched and not after.terminal and _step(before) <= _step(after)
    return goes_on and not _does(decision) and _course(before) == _course(after)


def is_progress_only(before: Status, decision: Decision) -> bool:
    """What is to be written says that more steps are done, and nothing else: it may as well be written later.

    All other facts may not. Some are dated when they are written, and some are gone by then, as commits are that a
    newer one has taken the place of.
    """
    after = decision.status
    if decision.events or before.progress is None or after.progress is None:
        return False
    same = dataclasses.replace(after, progress=before.progress, goodput=before.goodput, ettr_text=before.ettr_text)
    return same == before and after.progress.phase == before.progress.phase


def _does(decision: Decision) -> bool:
    return bool(decision.needs_fresh_capacity or decision.actions or decision.reshards)


def _course(status: Status) -> tuple[Any, ...]:
    """What later passes steer by."""
    asked = (status.drain_request, status.retry_request)
    return status.attempt, asked, status.drain, status.growth, status.reshard, status.pinned, status.excluded_nodes


def _step(status: Status) -> int:
    return status.progress.step if status.progress is not None else 0


def _spec(wire: Mapping[str, Any]) -> Spec | SpecError:
    try:
        return parse_spec(wire)
    except SpecError as error:
        return error
