"""Snapshot of the operator's view of the cluster, for the status page. Pure."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from elastic_operator.api.spec import Spec, SpecError
from elastic_operator.api.status import Status
from elastic_operator.observed.observation import JobView, Key, NodeView, PodView
from elastic_operator.observed.ownership import select_own_jobs, select_own_pods
from elastic_operator.observed.timeouts import Timeouts
from elastic_operator.plugin.pages.job_source import JobSource
from elastic_operator.reconcile.record import Record

_NO_STATUS = Status()
_NO_TIMEOUTS = Timeouts()


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """Copies of tables of immutable objects, so that another thread may read them.

    Attributes:
        time: when they were copied, in seconds since the epoch.
        records: the jobs; None for a resource that could not be read.
        nodes: all nodes of the cluster.
        pods: pods with a job's label, by job; a label alone proves nothing.
        jobs: batch/v1 Jobs with a job's label, by job.
        used: accelerators that all pods hold, by resource and node; None if pods of other namespaces are not watched.
        is_live: the watches are open; if not, the snapshot may be old.
        limits: timeouts that say which node counts as silent.
    """

    time: float
    records: Mapping[Key, Record | None]
    nodes: Mapping[str, NodeView]
    pods: Mapping[Key, Sequence[PodView]] = dataclasses.field(default_factory=dict)
    jobs: Mapping[Key, Sequence[JobView]] = dataclasses.field(default_factory=dict)
    used: Mapping[str, Mapping[str, int]] | None = None
    is_live: bool = True
    limits: Timeouts = _NO_TIMEOUTS

    def own_pods(self, key: Key) -> tuple[PodView, ...]:
        """Return the pods that a job's own Jobs control."""
        record = self.records.get(key)
        if record is None:
            return ()
        own = select_own_jobs(self.jobs.get(key, ()), record.job)
        uids = {item.uid for item in own} | set(record.status.job_uids)
        return select_own_pods(self.pods.get(key, ()), key[1], uids)


def source_of(record: Record) -> JobSource:
    """Return a job as the pages of `kubectl etj` need it."""
    spec, job = record.spec, record.job
    return JobSource(
        name=job.name,
        namespace=job.namespace,
        status=record.status,
        spec=spec if isinstance(spec, Spec) else None,
        problem="; ".join(spec.problems) if isinstance(spec, SpecError) else "",
        generation=job.generation,
        created_at=job.created_at,
        version=record.version,
        managed_by="another controller" if record.is_managed_elsewhere else "",
        is_seen=record.status != _NO_STATUS,
    )
