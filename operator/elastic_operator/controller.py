"""The controller: after each event or deadline of a job it reads, decides, writes and acts."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import time
from collections.abc import Mapping
from http import HTTPStatus
from typing import Any

from elastic_operator.api.spec import Spec, SpecError
from elastic_operator.api.status import Status
from elastic_operator.client.api_errors import AnswerError, ApiError
from elastic_operator.cluster.contention.reservations import Reservations, is_contested
from elastic_operator.cluster.contention.waiting_jobs import YieldTimes, is_waiting, select_ahead
from elastic_operator.cluster.diagnostics import Diagnostics, RefusedError
from elastic_operator.cluster.reader import ClusterReader
from elastic_operator.cluster.work_queue import WorkQueue
from elastic_operator.cluster.writer import ClusterWriter, ConflictError, NameTakenError
from elastic_operator.manifests.attempt import JobRef
from elastic_operator.manifests.forbidden_accounts import OPEN, Boundary
from elastic_operator.manifests.reshard_pod import ReshardImage
from elastic_operator.metrics import definitions, exporter
from elastic_operator.metrics.counters import Sample, increments, reshard_samples
from elastic_operator.metrics.gauges import job_gauges
from elastic_operator.observed.observation import Key, Observation
from elastic_operator.observed.timeouts import Timeouts
from elastic_operator.reconcile import effective_spec
from elastic_operator.reconcile.actions import Decision, Event
from elastic_operator.reconcile.context import Context, find_capacity
from elastic_operator.reconcile.decide import decide, refuse
from elastic_operator.reconcile.failures.budgets import find_backoff
from elastic_operator.reconcile.next_attempt import find_best
from elastic_operator.reconcile.record import (
    Record,
    apply_boundary,
    is_noop,
    is_progress_only,
    is_status_only,
    read_record,
)
from elastic_operator.webhook.outbox import Outbox
from reshard.contract import LeaseKey, sentence

STORE_PASSES_SECONDS = 120.0
"""Time for which a job's passes may use the store only. A fresh read then finds deletions that the watch missed."""

MAX_CONCURRENT_PASSES = 200
"""Passes that read and write at the same time; with more, requests would time out while they wait for each other."""

PROGRESS_SECONDS_PER_JOB = 0.05
"""Minimum time between progress writes of one job, per job: all jobs together write about 20 times a second."""

MAX_NAMED_PROBLEMS = 8
"""Maximum number of unreadable status fields that an event names."""

RESERVED_RETRY_SECONDS = 1.0
"""Delay before a plan is made again that needs nodes reserved for other jobs."""

_CONFLICT_RETRY_SECONDS = 0.2

_PROGRESS = frozenset({LeaseKey.STEP, LeaseKey.SAMPLES, LeaseKey.LOSS, LeaseKey.STEP_TIME})

logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Pass:
    """Input and result of one pass.

    Attributes:
        before: the status that was read.
        spec: None if it is invalid.
        heartbeat_time: when a change of the current attempt's heartbeat was last observed.
    """

    before: Status
    decision: Decision
    spec: Spec | None = None
    heartbeat_time: float | None = None


class NodesReservedError(Exception):
    """A plan needs nodes that are reserved for pods of other jobs."""


class JobController:
    """Decides when a job resource is looked at, and looks at it: read, decide, write, act.

    Args:
        reader: reads the cluster.
        writer: writes the cluster.
        diagnostics: executes actions, and finds out why pods are missing.
        limits: timeouts from the settings.
        reshard_image: image of reshard pods; None for the image of the training.
        boundary: what jobs may not do.
        outbox: takes notifications; None to make none.

    Attributes:
        queue: runs the passes.
    """

    def __init__(
        self,
        reader: ClusterReader,
        writer: ClusterWriter,
        diagnostics: Diagnostics,
        limits: Timeouts,
        reshard_image: ReshardImage | None = None,
        *,
        boundary: Boundary = OPEN,
        outbox: Outbox | None = None,
    ) -> None:
        self._boundary = boundary
        self._outbox = outbox
        self._reader = reader
        self._writer = writer
        self._configured_limits = limits
        self._reshard_image = reshard_image
        self.queue = WorkQueue(
            self._timed_reconcile, on_error=self._handle_error, on_removed=self._forget, count=lambda: reader.num_jobs
        )
        self._nodes: dict[Key, frozenset[str]] = {}
        self._store_until: dict[Key, float] = {}
        self._annotations: dict[Key, dict[str, Mapping[str, Any]]] = {}
        self._slots = asyncio.Semaphore(MAX_CONCURRENT_PASSES)
        self._diagnostics = diagnostics
        self._reservations = Reservations()
        self._yield_times = YieldTimes()
        self._has_warned_forbidden = False
        self._reported_problems: dict[Key, str] = {}
        self._rest_until: dict[Key, float] = {}

    @property
    def _limits(self) -> Timeouts:
        limits, seconds = self._configured_limits, PROGRESS_SECONDS_PER_JOB * len(self.queue)
        return limits if seconds <= limits.progress_seconds else dataclasses.replace(limits, progress_seconds=seconds)

    def wake(self, key: Key) -> None:
        """Start a pass of a job soon."""
        self.queue.add(key)

    def wake_node(self, node: str) -> None:
        """Wake the jobs that have pods on `node`, and the jobs that wait for nodes."""
        for key, nodes in self._nodes.items():
            if node in nodes or not nodes:
                self.wake(key)

    def node_changed(self, name: str) -> None:
        """Wake the jobs with pods on a new, changed or deleted node now, and all other jobs soon."""
        self.wake_node(name)
        self.queue.add_all()

    def lease_changed(self, key: Key, lease: Mapping[str, Any]) -> None:
        """Wake a job whose Lease changed; with many jobs only if more than its progress annotations changed."""
        name, annotations = lease["metadata"]["name"], _without_progress(lease)
        known_annotations = self._annotations.setdefault(key, {})
        if known_annotations.get(name) != annotations or not self.queue.is_crowded:
            known_annotations[name] = annotations
            self.wake(key)

    async def stop(self) -> None:
        """Cancel all passes, and wait until they have ended."""
        await self.queue.stop()

    async def _timed_reconcile(self, key: Key) -> float | None:
        start = time.monotonic()
        try:
            seconds = await self.reconcile(key)
        except Exception as error:
            _count_pass("conflict" if isinstance(error, NodesReservedError | ConflictError) else "error", start)
            raise
        _count_pass("success", start)
        return seconds

    def _handle_error(self, key: Key, error: Exception) -> float | None:
        """Log the error of a pass; return the seconds until the next pass, or None to back off."""
        if isinstance(error, NodesReservedError):
            logger.debug("%s/%s: waiting: %s", *key, error)
            return RESERVED_RETRY_SECONDS
        if isinstance(error, ConflictError):
            logger.debug("%s/%s: reading again: %s", *key, error)
            return _CONFLICT_RETRY_SECONDS
        if isinstance(error, ApiError) and error.is_namespace_ending:
            self._rest_until[key] = time.monotonic() + self._limits.resync_seconds
            logger.info("%s/%s: the namespace is being deleted: nothing is created there any more", *key)
            return self._limits.resync_seconds
        if isinstance(error, RefusedError):
            if error.is_new:
                logger.warning("%s/%s: %s", *key, error)
        else:
            status = error.code if isinstance(error, AnswerError) else None
            logger.error("%s/%s: reconciliation failed (API status %s)", *key, status, exc_info=error)
        return None

    def _rests(self, key: Key) -> bool:
        """Return whether a job is left alone for a while, because its namespace is being deleted."""
        return time.monotonic() < self._rest_until.get(key, 0.0)

    def _may_use_store(self, key: Key) -> bool:
        """Return whether a pass may use the store only, which it may for some time after a fresh read.

        The time differs between jobs, so that not all jobs read the API server at once.
        """
        now = time.monotonic()
        return now < self._store_until.setdefault(key, now + STORE_PASSES_SECONDS * (1 - _stagger(key) / 2))

    def _progress_delay_seconds(self, key: Key) -> float:
        """Return how long the write of a job's progress is still delayed; 0 or less if it is due.

        After a start the progress of all jobs is due. With many jobs the first writes are spread over the period in
        which every job writes once, so that urgent writes do not wait for a thousand progress writes.
        """
        if self._limits is self._configured_limits:
            return 0.0
        return self.queue.start_time + self._limits.progress_seconds * _stagger(key) - time.monotonic()

    def _forget(self, key: Key) -> None:
        for table in (
            self._nodes,
            self._annotations,
            self._store_until,
            self._reported_problems,
            self._rest_until,
        ):
            table.pop(key, None)
        self._diagnostics.forget(key)
        self._reservations.forget(key)
        self._yield_times.forget(key)
        exporter.forget(key)
        if self._outbox is not None:
            self._outbox.forget(key)

    async def reconcile(self, key: Key) -> float | None:
        """Run one pass; return the seconds until the next one, or None if the resource was deleted."""
        seconds = await self._reconcile_from_store(key) if self._may_use_store(key) else None
        if seconds is not None:
            return seconds
        async with self._slots:
            return await self._reconcile_from_api(key)

    async def _reconcile_from_store(self, key: Key) -> float | None:
        """Run one pass without requests for the job's objects; return None if it needs a fresh read.

        The store is sufficient to see that there is nothing to do, and to write progress: the write fails if the
        resource differs from the stored one. Actions are decided from a fresh read.
        """
        stored = await self._reader.read_from_store(*key)
        if stored is None:
            return None
        if stored[0].is_managed_elsewhere or self._rests(key):
            return self._limits.resync_seconds
        record, world = apply_boundary(stored[0], self._boundary), stored[1]
        if _needs_accepted_spec(record):
            return None
        if world is not None:
            world = await self._diagnostics.diagnose(key, record.status, world)
        result = self._decide_from(key, record, world)
        before, decision = record.status, result.decision
        if is_noop(before, decision):
            _export_gauges(key, result)
            return decision.requeue_seconds
        if not is_status_only(before, decision) or effective_spec.is_revision_due(before, decision.status):
            return None
        seconds = self._progress_delay_seconds(key)
        if seconds > 0.0 and is_progress_only(before, decision):
            _export_gauges(key, result)
            return min(seconds, decision.requeue_seconds)
        with contextlib.suppress(ConflictError):
            async with self._slots:
                await self._apply(key, record.reference, result)
            return decision.requeue_seconds
        return None

    async def _reconcile_from_api(self, key: Key) -> float | None:
        """Run one pass from a fresh read; return as `reconcile`."""
        stored = self._reader.last_record(key)
        resource = await self._reader.training_job(*key)
        self._store_until.pop(key, None)
        if resource is None:
            return None if self._reader.forget_if_gone(key, stored) else 0.0
        self._reader.store_resource(resource, stored)
        record = apply_boundary(read_record(resource), self._boundary)
        if record.deleting or record.is_managed_elsewhere or self._rests(key):
            return self._limits.resync_seconds
        if record.problems:
            await self._report_unreadable_status(key, resource, record)
            if record.lost:
                return self._limits.resync_seconds
        result = await self._decide(key, await self._diagnostics.dry_run_pods(record))
        await self._apply(key, resource, result)
        return result.decision.requeue_seconds

    async def _report_unreadable_status(self, key: Key, resource: Mapping[str, Any], record: Record) -> None:
        """Post an event that names unreadable fields of the status; the next write removes them unless essential."""
        problems = record.lost or record.problems
        text = "; ".join(problems[:MAX_NAMED_PROBLEMS])
        if record.lost:
            reason = "StatusUnreadable"
            message = (
                f"essential fields of the stored status are invalid, so the operator makes no decision: {text}; "
                "running pods go on; correct the fields (kubectl edit --subresource=status), or create the job anew"
            )
        else:
            reason, message = "StatusMended", f"fields of the stored status were invalid and were left out: {text}"
        message = sentence(message, 1024)
        if self._reported_problems.get(key) != message:
            self._reported_problems[key] = message
            logger.warning("%s/%s: %s", *key, message)
            await self._writer.post_event(resource, Event(reason=reason, message=message, warning=True), time.time())

    async def _decide(self, key: Key, record: Record) -> Pass:
        if isinstance(record.spec, SpecError):
            refused = self._decide_from(key, record, None)
            spec = await self._reader.accepted_spec(*key, record.job.uid) if _needs_accepted_spec(record) else None
            if spec is None or self._boundary.problems(record.job, spec):
                return refused
            result = await self._decide(
                key, dataclasses.replace(record, spec=effective_spec.effective_spec(spec, record))
            )
            return dataclasses.replace(
                result, decision=effective_spec.merge_rejected_spec(refused.decision, result.decision)
            )
        resource, fresh = record.spec.accelerator.resource, not record.status.launched
        while True:
            world = await self._reader.observe(record, resource, fresh=fresh)
            world = await self._diagnostics.diagnose(key, record.status, world)
            result = self._decide_from(key, record, world)
            if not result.decision.needs_fresh_capacity:
                await self._reserve(key, record, world, result.decision.status)
                return result
            fresh = True

    async def _reserve(self, key: Key, record: Record, world: Observation, after: Status) -> None:
        """Reserve nodes for the pods of a new attempt.

        Raises:
            NodesReservedError: the plan needs nodes that are reserved for other jobs, or that waiting jobs ahead of
                this one would take, so the decision must be discarded.
        """
        assert isinstance(record.spec, Spec)
        resource = record.spec.accelerator.resource
        num_reserved = self._reservations.count_pods_of_others(key, resource)
        context = Context(job=record.job, spec=record.spec, world=world, limits=self._limits, now=time.time())
        if num_reserved and is_contested(record.status, after, find_capacity(context, record.status), num_reserved):
            raise NodesReservedError(f"the plan needs nodes that are reserved for {num_reserved} pods of other jobs")
        if after.attempt != record.status.attempt and is_waiting(record):
            await self._yield_to_jobs_ahead(key, record, context, after, num_reserved)
            self._yield_times.forget(key)
        self._reservations.update(key, resource, after, world)

    async def _yield_to_jobs_ahead(
        self, key: Key, record: Record, context: Context, after: Status, num_reserved: int
    ) -> None:
        """Wake the waiting jobs ahead of this one that would take the nodes of its plan.

        Raises:
            NodesReservedError: there is such a job, so the decision must be discarded.
        """
        others = [other for other in self._reader.other_jobs(record.job) if is_waiting(other)]
        if not others:
            return
        for other in select_ahead(record, others, await self._reader.priority_classes()):
            assert isinstance(other.spec, Spec)
            stored = await self._reader.read_from_store(other.job.namespace, other.job.name)
            if stored is None or stored[1] is None:
                continue
            view = Context(job=other.job, spec=other.spec, world=stored[1], limits=self._limits, now=context.now)
            best = None if find_backoff(view, other.status) is not None else find_best(view, other.status)
            num_reserved += best.num_nodes if best is not None else 0
            if best is None or not is_contested(
                record.status, after, find_capacity(context, record.status), num_reserved
            ):
                continue
            self.wake((other.job.namespace, other.job.name))
            if not self._yield_times.is_over(key):
                raise NodesReservedError(f"job {other.job.name} waits for these nodes too, and is ahead")
            return

    def _decide_from(self, key: Key, record: Record, world: Observation | None) -> Pass:
        """Decide what to do about a job from an observation; for an invalid spec, decide without one."""
        status, limits, now = record.status, self._limits, time.time()
        if self._outbox is not None:
            self._outbox.report_recorded(record.job, status)
        if isinstance(record.spec, SpecError) or world is None:
            assert isinstance(record.spec, SpecError)
            return Pass(before=status, decision=refuse(record.job, record.spec, status, limits=limits, now=now))
        self._nodes[key] = frozenset(
            pod.node for pod in world.pods if pod.node and (not pod.terminal or pod.attempt == status.attempt)
        )
        self._reservations.update(key, record.spec.accelerator.resource, status, world)
        decision = decide(
            record.job, record.spec, status, world, limits=limits, now=now, reshard_image=self._reshard_image
        )
        lease = world.leases.get(decision.status.attempt)
        heartbeat = lease.renewed_at if lease else None
        return Pass(before=status, decision=decision, spec=record.spec, heartbeat_time=heartbeat)

    async def _apply(self, key: Key, resource: Mapping[str, Any], result: Pass) -> None:
        """Write the status, then execute the actions: after a crash the next operator derives them from the status."""
        decision = result.decision
        if result.spec is not None and effective_spec.is_revision_due(result.before, decision.status):
            await self._keep_spec(resource)
        await self._write(key, resource, result)
        for event in decision.events:
            fields = {"job": "/".join(key), "attempt": decision.status.attempt, "reason": event.reason}
            logger.log(
                logging.WARNING if event.warning else logging.INFO, "%s", event.message, extra={"fields": fields}
            )
            exporter.count([Sample(definition=definitions.EVENTS, labels=(event.reason,))])
        try:
            await self._diagnostics.act_all(key, decision.status.attempt, decision.actions)
        finally:
            # After the status write the next pass repeats failed actions, but not these events.
            for event in decision.events:
                await self._writer.post_event(resource, event, time.time())

    async def _write(self, key: Key, resource: Mapping[str, Any], result: Pass) -> None:
        """Write the status, and export its gauges."""
        written = await self._writer.write_status(resource, result.decision.status)
        if written is not None:
            self._reader.store_written(written)
            _count_transition(result)
            if self._outbox is not None:
                job = JobRef(name=key[1], namespace=key[0], uid=resource["metadata"]["uid"])
                self._outbox.report(job, result.before, result.decision.status)
        _export_gauges(key, result)

    async def _keep_spec(self, resource: Mapping[str, Any]) -> None:
        """Store an accepted spec; called before the status says that it is valid, so that a crash cannot skip it."""
        try:
            await self._writer.keep_spec(read_record(resource).job, resource["spec"])
        except (ApiError, NameTakenError) as error:
            if isinstance(error, ApiError) and (error.code != HTTPStatus.FORBIDDEN or error.is_namespace_ending):
                raise
            if not self._has_warned_forbidden:
                logger.warning(
                    "accepted specs cannot be stored, so a rejected edit of a spec will stop its job's recovery: %s; "
                    "grant the operator access to controllerrevisions",
                    error,
                )
            self._has_warned_forbidden = True


def _stagger(key: Key) -> float:
    """Return a fraction from 0 to 1 that is fixed for a job, to spread the work of all jobs over time."""
    return hash(key) % 1024 / 1024


def _needs_accepted_spec(record: Record) -> bool:
    """Return whether the spec is invalid while an attempt runs, which then goes on with the last accepted spec."""
    return isinstance(record.spec, SpecError) and effective_spec.is_accepted_spec_needed(record.status)


def _without_progress(lease: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the annotations of a Lease without those that report progress."""
    notes: Mapping[str, Any] = lease["metadata"].get("annotations") or {}
    return {key: value for key, value in notes.items() if key not in _PROGRESS}


def _count_pass(result: str, start: float) -> None:
    seconds = time.monotonic() - start
    exporter.count([Sample(definition=definitions.RECONCILE_SECONDS, labels=(result,), value=seconds)])


def _count_transition(result: Pass) -> None:
    """Count a transition after its status was written; a write with a conflict is repeated, and counted then."""
    exporter.count([Sample(definition=definitions.STATUS_WRITES), *increments(result.before, result.decision.status)])
    for outcome in result.decision.reshards:
        exporter.count(reshard_samples(outcome))


def _export_gauges(key: Key, result: Pass) -> None:
    status = result.decision.status
    gauges = job_gauges(result.spec, status, heartbeat_time=result.heartbeat_time, now=time.time())
    exporter.show(key, status.phase, gauges)
