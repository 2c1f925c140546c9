"""One task per resource: woken by events and deadlines, it reads, decides, writes and acts. Never two for one."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import logging
import time
from collections.abc import Mapping
from http import HTTPStatus
from typing import Any

from lightkube.core.exceptions import ApiError

from elastic_operator.api.spec import Spec, SpecError
from elastic_operator.api.status import Status
from elastic_operator.cluster.diagnostics import Diagnostics, RefusedError
from elastic_operator.cluster.reader import ClusterReader
from elastic_operator.cluster.reservations import Reservations, contested
from elastic_operator.cluster.shutdown import end
from elastic_operator.cluster.writer import ClusterWriter, ConflictError, NameTakenError
from elastic_operator.manifests.forbidden_accounts import OPEN, Boundary
from elastic_operator.manifests.reshard_pod import ReshardImage
from elastic_operator.metrics import definitions, exporter
from elastic_operator.metrics.counters import Sample, increments, reshard_samples
from elastic_operator.metrics.gauges import job_gauges
from elastic_operator.observed.observation import Key, Observation
from elastic_operator.observed.timeouts import Timeouts
from elastic_operator.reconcile import effective_spec
from elastic_operator.reconcile.actions import Decision, Event
from elastic_operator.reconcile.context import Context, capacity
from elastic_operator.reconcile.decide import decide, refuse
from elastic_operator.reconcile.record import Record, confined, is_noop, is_progress_only, is_status_only, read_record
from reshard.contract import LeaseKey, sentence

DEBOUNCE_SECONDS = 0.05
"""Events come in bursts; one look answers all of them."""

CROWD_DEBOUNCE_SECONDS = 0.3

FEW_JOBS = 50
"""Up to so many, everything is looked at whenever anything happens. Beyond, what it concerns is looked at first."""

SECONDS_PER_JOB = 0.005
"""How long a change that may concern everybody waits for more, for each job: what a look at all of them costs."""

TICK_SECONDS = 5.0
"""Beyond `FEW_JOBS`, looks that are due some time are made at the same times, and so share their requests."""

RECALL_SECONDS = 120.0
"""How long passes from memory may follow each other: a resource that went away while its watch was cut shows then."""

AT_ONCE = 200
"""Passes that read and write at the same time: requests of more would time out while they wait for each other."""

PROGRESS_SECONDS_PER_JOB = 0.05
"""In a crowd each job's progress is written the more rarely the more jobs there are: about 20 writes a second."""

MOST_PROBLEMS = 8
"""So many damaged fields of a status are named."""

HELD_BACK_SECONDS = 1.0
"""After which a plan that waits for other jobs' pods to be placed is looked at again."""


_FIRST_BACKOFF_SECONDS = 0.5
_LAST_BACKOFF_SECONDS = 30.0

_PROGRESS = frozenset({LeaseKey.STEP, LeaseKey.SAMPLES, LeaseKey.LOSS, LeaseKey.STEP_TIME})

logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Pass:
    """What one pass has read and decided.

    Attributes:
        before: the status that was read.
        spec: None where it makes no sense.
        heartbeat_time: when the heartbeat of the attempt that it leads to was seen to change.
    """

    before: Status
    decision: Decision
    spec: Spec | None = None
    heartbeat_time: float | None = None


class HeldBackError(Exception):
    """A plan needs nodes that other jobs' pods are on their way to."""


class JobController:
    """All tasks, by resource."""

    def __init__(
        self,
        observer: ClusterReader,
        applier: ClusterWriter,
        inquiries: Diagnostics,
        limits: Timeouts,
        reshard_image: ReshardImage | None = None,
        *,
        boundary: Boundary = OPEN,
    ) -> None:
        self._boundary = boundary
        self._observer = observer
        self._applier = applier
        self._own_limits = limits
        self._reshard_image = reshard_image
        self._tasks: dict[Key, asyncio.Task[None]] = {}
        self._wakers: dict[Key, asyncio.Event] = {}
        self._nodes: dict[Key, frozenset[str]] = {}
        self._recall_until: dict[Key, float] = {}
        self._mail: dict[Key, dict[str, Mapping[str, Any]]] = {}
        self._waking_all: asyncio.TimerHandle | None = None
        self._slots = asyncio.Semaphore(AT_ONCE)
        self._began = time.monotonic()
        self._inquiries = inquiries
        self._promises = Reservations()
        self._told_forbidden = False
        self._told_damage: dict[Key, str] = {}

    @property
    def crowded(self) -> bool:
        """There are too many jobs to look at all of them whenever anything happens."""
        return self._num_jobs > FEW_JOBS

    @property
    def _num_jobs(self) -> int:
        return max(len(self._tasks), self._observer.num_jobs)

    @property
    def _limits(self) -> Timeouts:
        limits, seconds = self._own_limits, PROGRESS_SECONDS_PER_JOB * self._num_jobs
        return limits if seconds <= limits.progress_seconds else dataclasses.replace(limits, progress_seconds=seconds)

    def wake(self, key: Key) -> None:
        """Look at a resource soon. Makes its task at the first time."""
        if not self._tasks:
            self._began = time.monotonic()
        if key not in self._tasks:
            self._wakers[key] = asyncio.Event()
            self._tasks[key] = asyncio.create_task(self._run(key), name="/".join(key))
        self._wakers[key].set()

    def wake_node(self, node: str) -> None:
        """Look at everything that has pods on `node`, and at everything that waits for nodes."""
        for key, nodes in self._nodes.items():
            if node in nodes or not nodes:
                self.wake(key)

    def wake_all(self) -> None:
        """Look at everything: at once, or in a crowd after a while in which more may come."""
        if not self.crowded:
            self._wake_all()
        elif self._waking_all is None:
            seconds = SECONDS_PER_JOB * self._num_jobs
            self._waking_all = asyncio.get_running_loop().call_later(seconds, self._wake_all)

    def node_changed(self, name: str) -> None:
        """A node has come, gone or changed: it matters to its pods' jobs now, and to all others soon."""
        self.wake_node(name)
        self.wake_all()

    def heartbeat(self, key: Key, lease: Mapping[str, Any]) -> None:
        """The mailbox of one of a job's attempts has changed: look at the job if it says more than "one more step"."""
        name, said = lease["metadata"]["name"], _said(lease)
        boxes = self._mail.setdefault(key, {})
        if boxes.get(name) != said or not self.crowded:
            boxes[name] = said
            self.wake(key)

    def _wake_all(self) -> None:
        self._waking_all = None
        for key in list(self._tasks):
            self.wake(key)

    async def stop(self) -> None:
        """End all tasks."""
        await end(list(self._tasks.values()))

    async def _run(self, key: Key) -> None:
        backoff = _FIRST_BACKOFF_SECONDS
        while True:
            waker = self._wakers[key]
            waker.clear()
            begin = time.monotonic()
            try:
                seconds = await self._reconcile(key)
                _count_pass("success", begin)
                backoff = _FIRST_BACKOFF_SECONDS
            except HeldBackError as error:
                logger.debug("%s/%s: waiting: %s", *key, error)
                _count_pass("conflict", begin)
                seconds = HELD_BACK_SECONDS
            except ConflictError as error:
                logger.debug("%s/%s: looking again: %s", *key, error)
                _count_pass("conflict", begin)
                seconds = 0.2
            except RefusedError as error:
                if error.new:
                    logger.warning("%s/%s: %s", *key, error)
                _count_pass("error", begin)
                seconds, backoff = backoff, min(2 * backoff, _LAST_BACKOFF_SECONDS)
            except asyncio.CancelledError:
                raise
            except Exception as error:
                # The one place where anything may arrive: the resource is looked at again, later and later.
                status = error.status.code if isinstance(error, ApiError) else None
                logger.exception("%s/%s: reconciliation failed (API status %s)", *key, status)
                _count_pass("error", begin)
                seconds, backoff = backoff, min(2 * backoff, _LAST_BACKOFF_SECONDS)
            if seconds is None:
                self._forget(key)
                return
            # Not `wait_for`: Python 3.11's can lose a cancellation that comes together with the wake.
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._on_the_tick(seconds)):
                    await waker.wait()
                await asyncio.sleep(CROWD_DEBOUNCE_SECONDS if self.crowded else DEBOUNCE_SECONDS)

    def _trusts_memory(self, key: Key) -> bool:
        """For a time after a fresh look that is another one for every job: else all of them would look at once."""
        now = time.monotonic()
        return now < self._recall_until.setdefault(key, now + RECALL_SECONDS * (1 - _turn(key) / 2))

    def _untold_seconds(self, key: Key) -> float:
        """How long a job's progress is not written yet.

        After a start all of it is due. In a crowd each job waits for its turn in the time in which every job writes
        once: what is news, or has to be done about others, should not wait for a thousand writes of steps.
        """
        if self._limits is self._own_limits:
            return 0.0
        return self._began + self._limits.progress_seconds * _turn(key) - time.monotonic()

    def _on_the_tick(self, seconds: float) -> float:
        if seconds < TICK_SECONDS or not self.crowded:
            return seconds
        return seconds + -(time.monotonic() + seconds) % TICK_SECONDS

    def _forget(self, key: Key) -> None:
        for table in (self._tasks, self._wakers, self._nodes, self._mail, self._recall_until, self._told_damage):
            table.pop(key, None)
        self._inquiries.forget(key)
        self._promises.forget(key)
        exporter.forget(key)

    async def _reconcile(self, key: Key) -> float | None:
        """One pass; seconds until the next, None if the resource is gone.

        What is remembered is enough to see that there is nothing to do, and to tell how far an attempt is: the write
        fails if the job itself is not as remembered. Whatever is done is decided from a fresh look.
        """
        recalled = await self._observer.recall(*key) if self._trusts_memory(key) else None
        if recalled is not None and not _needs_accepted(confined(recalled[0], self._boundary)):
            record, world = confined(recalled[0], self._boundary), recalled[1]
            if world is not None:
                world = await self._inquiries.seen(key, record.status, world)
            found = self._judge(key, record, world)
            if is_noop(record.status, found.decision):
                _show(key, found)
                return found.decision.requeue_seconds
            if is_status_only(record.status, found.decision) and not effective_spec.is_due(
                record.status, found.decision.status
            ):
                seconds = self._untold_seconds(key)
                if seconds > 0.0 and is_progress_only(record.status, found.decision):
                    _show(key, found)
                    return min(seconds, found.decision.requeue_seconds)
                with contextlib.suppress(ConflictError):
                    async with self._slots:
                        await self._apply(key, record.reference, found)
                    return found.decision.requeue_seconds
        async with self._slots:
            return await self._look_and_act(key)

    async def _look_and_act(self, key: Key) -> float | None:
        """A pass from a fresh look."""
        known = self._observer.known(key)
        resource = await self._observer.training_job(*key)
        self._recall_until.pop(key, None)
        if resource is None:
            return None if self._observer.is_gone(key, known) else 0.0
        self._observer.read(resource, known)
        record = confined(read_record(resource), self._boundary)
        if record.deleting:
            return self._limits.resync_seconds
        if record.problems:
            await self._tell_damage(key, resource, record)
            if record.lost:
                return self._limits.resync_seconds
        found = await self._decide(key, await self._inquiries.tried(record))
        await self._apply(key, resource, found)
        return found.decision.requeue_seconds

    async def _tell_damage(self, key: Key, resource: Mapping[str, Any], record: Record) -> None:
        """Say what of the stored status cannot be read. What can be left out, the next write mends."""
        shown = record.lost or record.problems
        text = "; ".join(shown[:MOST_PROBLEMS])
        if record.lost:
            reason = "StatusUnreadable"
            message = (
                f"the stored status does not fit, and without these fields nothing is decided: {text}; what runs goes "
                "on; correct them (kubectl edit --subresource=status), or create the job anew"
            )
        else:
            reason, message = "StatusMended", f"fields of the stored status did not fit and were left out: {text}"
        message = sentence(message, 1024)
        if self._told_damage.get(key) != message:
            self._told_damage[key] = message
            logger.warning("%s/%s: %s", *key, message)
            await self._applier.post_event(resource, Event(reason=reason, message=message, warning=True), time.time())

    async def _decide(self, key: Key, record: Record) -> Pass:
        if isinstance(record.spec, SpecError):
            refused = self._judge(key, record, None)
            spec = await self._observer.accepted_spec(*key, record.job.uid) if _needs_accepted(record) else None
            if spec is None or self._boundary.problems(record.job, spec):
                return refused
            found = await self._decide(
                key, dataclasses.replace(record, spec=effective_spec.effective_spec(spec, record))
            )
            return dataclasses.replace(
                found, decision=effective_spec.merge_rejected_spec(refused.decision, found.decision)
            )
        resource, fresh = record.spec.accelerator.resource, not record.status.launched
        while True:
            world = await self._observer.look(record, resource, fresh=fresh)
            world = await self._inquiries.seen(key, record.status, world)
            found = self._judge(key, record, world)
            if not found.decision.needs_fresh_capacity:
                self._promise(key, record, world, found.decision.status)
                return found
            fresh = True

    def _promise(self, key: Key, record: Record, world: Observation, after: Status) -> None:
        """Keep others off the nodes that a new attempt is about to take; wait if it counts on those of others.

        Raises:
            HeldBackError: it does. Nothing may be done of the decision.
        """
        assert isinstance(record.spec, Spec)
        resource = record.spec.accelerator.resource
        promised = self._promises.to_others(key, resource)
        if promised:
            context = Context(job=record.job, spec=record.spec, world=world, limits=self._limits, now=time.time())
            if contested(record.status, after, capacity(context, record.status), promised):
                raise HeldBackError(f"{promised} pods of other jobs are on their way to the nodes that it needs")
        self._promises.note(key, resource, after, world)

    def _judge(self, key: Key, record: Record, world: Observation | None) -> Pass:
        """What to do about a job in a world; what to say about a spec that makes no sense, in any."""
        status, limits, now = record.status, self._limits, time.time()
        if isinstance(record.spec, SpecError) or world is None:
            assert isinstance(record.spec, SpecError)
            return Pass(before=status, decision=refuse(record.job, record.spec, status, limits=limits, now=now))
        self._nodes[key] = frozenset(pod.node for pod in world.pods if pod.node)
        self._promises.note(key, record.spec.accelerator.resource, status, world)
        decision = decide(
            record.job, record.spec, status, world, limits=limits, now=now, reshard_image=self._reshard_image
        )
        lease = world.leases.get(decision.status.attempt)
        heartbeat = lease.renewed_at if lease else None
        return Pass(before=status, decision=decision, spec=record.spec, heartbeat_time=heartbeat)

    async def _apply(self, key: Key, resource: Mapping[str, Any], found: Pass) -> None:
        """Status first: what is done next can then be derived from it by whoever comes after us."""
        decision = found.decision
        if found.spec is not None and effective_spec.is_due(found.before, decision.status):
            await self._keep_spec(resource)
        await self._write(key, resource, found)
        for event in decision.events:
            record = {"job": "/".join(key), "attempt": decision.status.attempt, "reason": event.reason}
            logger.log(
                logging.WARNING if event.warning else logging.INFO, "%s", event.message, extra={"fields": record}
            )
            exporter.count([Sample(family=definitions.EVENTS, labels=(event.reason,))])
        try:
            for action in decision.actions:
                logger.debug("%s/%s: %s", *key, json.dumps(type(action).__name__))
                await self._inquiries.act(key, decision.status.attempt, action)
        finally:
            # The status is written: the next pass does what is left to do, but would not tell of this again.
            for event in decision.events:
                await self._applier.post_event(resource, event, time.time())

    async def _write(self, key: Key, resource: Mapping[str, Any], found: Pass) -> None:
        """Write the status, and show it."""
        written = await self._applier.write_status(resource, found.decision.status)
        if written is not None:
            self._observer.wrote(written)
            _count_transition(found)
        _show(key, found)

    async def _keep_spec(self, resource: Mapping[str, Any]) -> None:
        """Before the status says that it is valid, so that a crash in between keeps it again."""
        try:
            await self._applier.keep_spec(read_record(resource).job, resource["spec"])
        except (ApiError, NameTakenError) as error:
            if isinstance(error, ApiError) and error.status.code != HTTPStatus.FORBIDDEN:
                raise
            if not self._told_forbidden:
                logger.warning("accepted specs cannot be kept, and a refused edit stops recovery: %s", error)
            self._told_forbidden = True


def _turn(key: Key) -> float:
    """A job's place among all jobs, 0 to 1, so that not all do something at once."""
    return hash(key) % 1024 / 1024


def _needs_accepted(record: Record) -> bool:
    """What runs goes on by the spec that was accepted before."""
    return isinstance(record.spec, SpecError) and effective_spec.wanted(record.status)


def _said(lease: Mapping[str, Any]) -> Mapping[str, Any]:
    """What rank 0 and the operator say in a Lease, but for progress."""
    notes: Mapping[str, Any] = lease["metadata"].get("annotations") or {}
    return {key: value for key, value in notes.items() if key not in _PROGRESS}


def _count_pass(result: str, begin: float) -> None:
    seconds = time.monotonic() - begin
    exporter.count([Sample(family=definitions.RECONCILE_SECONDS, labels=(result,), value=seconds)])


def _count_transition(found: Pass) -> None:
    """Count what has been written, once it has been: an update that lost its race is made, and counted, again."""
    exporter.count([Sample(family=definitions.STATUS_WRITES), *increments(found.before, found.decision.status)])
    for outcome in found.decision.reshards:
        exporter.count(reshard_samples(outcome))


def _show(key: Key, found: Pass) -> None:
    status = found.decision.status
    gauges = job_gauges(found.spec, status, heartbeat_time=found.heartbeat_time, now=time.time())
    exporter.show(key, status.phase, gauges)
