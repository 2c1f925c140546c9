"""A model of the cluster with one job: what `decide` observes, what its actions do, and what failures do to it.

It plays the scheduler, the Job controller, the kubelets, the trainer and the resharder. Time moves from event to event.
"""

from __future__ import annotations

import dataclasses
import heapq
import json
from collections.abc import Callable, Mapping
from typing import Any

from elastic_operator.api.serialization import format_time
from elastic_operator.api.spec import Spec
from elastic_operator.observed.observation import (
    RESHARD,
    WORKER,
    JobView,
    LeaseView,
    Observation,
    PodView,
    attempt_of,
)
from elastic_operator.observed.pod_usage import UsageByOthers
from elastic_operator.observed.timeouts import Timeouts
from elastic_operator.planning import planner
from elastic_operator.reconcile.actions import (
    Action,
    Create,
    DeleteJob,
    DeletePod,
    LaunchAttempt,
    ReleaseCommits,
    RequestDrain,
    RevokeAttempt,
)
from reshard.contract import CommitRef, Env, LeaseKey, Request, ReshardReport, TrainerPhase
from reshard.topology import Topology
from simulation import durations
from simulation.accounting import Account
from simulation.assumptions import GPUS_PER_NODE, Assumptions
from simulation.attempt import JOB, LEASE_STALE_SECONDS, START, Attempt, avoided_nodes, no_progress
from simulation.nodes import CPU_NODE, Nodes, NodeState, Silence, node_name
from simulation.policies import RESOURCE, step_seconds
from simulation.trace import Effect, Failure
from simulation.training import Progress, Training

_UNSEEN = object()
"""Result of an event that changes nothing that the operator sees."""

_NO_USE = UsageByOthers({}, {}, 1)
"""Nobody else uses the cluster."""


class Cluster:
    """The world around the operator. `now` moves with `advance`; `observe` and `act` are the operator's side."""

    def __init__(self, spec: Spec, *, num_nodes: int, num_spares: int, assumptions: Assumptions) -> None:
        self.now = START
        self.nodes = Nodes(num_nodes + num_spares)
        self.account = Account(start=START)
        self._spec = spec
        self._num_gpus = num_nodes * GPUS_PER_NODE
        self._assumptions = assumptions
        self._attempt: Attempt | None = None
        self._reshard: JobView | None = None
        self._pods: dict[str, PodView] = {}
        self._pod_tuple: tuple[PodView, ...] | None = None
        self._steps: dict[str, int] = {}  # steps in each commit that exists
        self._events: list[tuple[float, int, Callable[[], object]]] = []
        self._serial = 0

    # -- time -----------------------------------------------------------------------------------------------------

    def add_failure(self, failure: Failure) -> None:
        """Let a failure happen at its time."""
        self._at(START + failure.time, lambda: self._fail(failure))

    @property
    def next_event(self) -> float | None:
        """Time of the next event, None if there is none."""
        return self._events[0][0] if self._events else None

    def advance(self) -> bool:
        """Move to the next event and let it happen; return whether the operator can see a change."""
        self.now, _, happen = heapq.heappop(self._events)
        return happen() is not _UNSEEN

    @property
    def is_ending(self) -> bool:
        """True while deleted pods have not ended; their end is an event."""
        return any(
            pod.deleted_at is not None and not self.nodes.is_silent(pod.node or "") for pod in self._pods.values()
        )

    def signal_deadlines(self, limits: Timeouts) -> list[float]:
        """Return when a silence becomes a signal, or a signal has lasted for its grace, without any event."""
        grace = self._spec.recovery.suspect_seconds
        names = {pod.node for pod in self._pods.values() if pod.node and not pod.terminal}
        silent = [self.nodes[name].silent_since for name in names if self.nodes.is_silent(name)]
        stale = [since + LEASE_STALE_SECONDS + grace for since in silent if since is not None]
        if self._attempt is not None and self._attempt.beats_until is not None:
            heard = self._attempt.beats_until + limits.heartbeat_stale_seconds
            stale += [heard + 0.1, heard + grace]
        cordoned = (self.nodes[name].cordoned_since for name in names if name != CPU_NODE)
        return [*stale, *(since + limits.planned_seconds for since in cordoned if since is not None)]

    def _at(self, time: float, happen: Callable[[], object]) -> None:
        self._serial += 1
        heapq.heappush(self._events, (time, self._serial, happen))

    def _after(self, seconds: float, happen: Callable[[], object]) -> None:
        self._at(self.now + seconds, happen)

    # -- what the operator sees -----------------------------------------------------------------------------------

    def observe(self) -> Observation:
        """Return what the operator sees now."""
        if self._pod_tuple is None:
            self._pod_tuple = tuple(self._pods.values())
        attempt = self._attempt
        jobs = [self._reshard] if self._reshard is not None else []
        if attempt is not None and attempt.job_exists:
            jobs.append(
                JobView(
                    name=attempt.name,
                    uid=attempt.uid,
                    attempt=attempt.number,
                    role=WORKER,
                    failed=attempt.job_failed,
                    failed_reason="BackoffLimitExceeded" if attempt.job_failed else "",
                    owner=JOB.uid,
                )
            )
        return Observation(
            nodes=self.nodes.pool(self.now),
            pods=self._pod_tuple,
            jobs=tuple(jobs),
            leases={attempt.number: self._lease(attempt)} if attempt is not None and attempt.lease_exists else {},
            used=_NO_USE,
        )

    def _lease(self, attempt: Attempt) -> LeaseView:
        notes: dict[str, str] = {LeaseKey.PHASE: attempt.phase}
        if attempt.request:
            notes[LeaseKey.REQUEST] = attempt.request
        if attempt.released:
            notes |= {LeaseKey.RELEASED: attempt.released, LeaseKey.REMOVED: attempt.released}
        done = self._progress(attempt)
        if done is not None and attempt.training is not None and done.steps > attempt.resume_step:
            first = attempt.training.begin + attempt.training.step_seconds
            notes |= {
                LeaseKey.STEP: str(done.steps),
                LeaseKey.SAMPLES: str(done.steps * self._spec.batch.global_samples),
                LeaseKey.FIRST_STEP_TIME: format_time(first),
                LeaseKey.STEP_TIME: format_time(done.step_time or first),
            }
        if done is not None and done.committed is not None:
            notes[LeaseKey.COMMIT] = self._commit(attempt, done.committed).to_json()
        return LeaseView(
            name=attempt.name,
            attempt=attempt.number,
            renewed_at=self.now if attempt.beats_until is None else attempt.beats_until,
            annotations=notes,
            uid=f"{attempt.uid}-lease",
            owner=JOB.uid,
        )

    def _commit(self, attempt: Attempt, step: int) -> CommitRef:
        uri = f"/checkpoint/a{attempt.number}/step-{step:08d}"
        self._steps[uri] = step
        samples = step * self._spec.batch.global_samples
        return CommitRef(
            uri=uri, step=step, samples=samples, attempt=attempt.number, topology=attempt.topology.to_dict()
        )

    def _progress(self, attempt: Attempt) -> Progress | None:
        if attempt.halted is not None or attempt.training is None:
            return attempt.halted
        return attempt.training.progress(self.now)

    # -- what the operator does -----------------------------------------------------------------------------------

    def act(self, action: Action) -> None:
        """Do what the operator asks for."""
        match action:
            case LaunchAttempt(manifests=manifests):
                self._launch(manifests[-1])
            case Create(manifest=manifest):
                self._start_reshard(manifest)
            case DeleteJob(uid=uid):
                self._delete_job(uid)
            case DeletePod(name=name, grace_seconds=seconds):
                self._delete_pods([name], at_once=seconds == 0)
            case RevokeAttempt(name=name):
                if self._attempt is not None and self._attempt.name == name:
                    self._attempt.lease_exists = False
            case RequestDrain():
                self._drain()
            case ReleaseCommits(names=names):
                if self._attempt is not None:
                    self._attempt.released = json.dumps(list(names), separators=(",", ":"))

    def _launch(self, manifest: Mapping[str, Any]) -> None:
        pod_spec = manifest["spec"]["template"]["spec"]
        env = {item["name"]: item.get("value", "") for item in pod_spec["containers"][0]["env"]}
        count = manifest["spec"]["completions"]
        self._serial += 1
        self._attempt = attempt = Attempt(
            number=attempt_of(manifest["metadata"]),
            uid=f"uid-{self._serial}",
            topology=Topology.from_dict(json.loads(env[Env.TOPOLOGY])),
            num_nodes=count,
            resume_step=self._steps[env[Env.RESUME]] if env[Env.RESUME] else 0,
        )
        self._steps = {env[Env.RESUME]: attempt.resume_step} if env[Env.RESUME] else {}
        nodes: list[str | None] = [*self.nodes.choose(count, avoided_nodes(pod_spec))]
        nodes += [None] * (count - len(nodes))
        for index, node in enumerate(nodes):
            name = f"{attempt.name}-{index}"
            self._pods[name] = PodView(
                name=name,
                uid=f"{attempt.uid}-{index}",
                attempt=attempt.number,
                role=WORKER,
                node=node,
                index=index,
                created_at=self.now,
                requests={RESOURCE: GPUS_PER_NODE},
                unschedulable="" if node else "no node is free",
                owner=attempt.uid,
                owner_name=attempt.name,
            )
        self._pod_tuple = None
        self._after(durations.schedule_seconds(count, self._assumptions), lambda: self._start_pods(attempt))

    def _start_pods(self, attempt: Attempt) -> None:
        if not self._is_alive(attempt):
            return
        refused = ""
        for pod in self._workers(attempt):
            if pod.node and not self.nodes.is_silent(pod.node):
                self._pods[pod.name] = dataclasses.replace(pod, phase="Running")
                if self.nodes[pod.node].healthy_gpus < GPUS_PER_NODE:
                    refused = pod.name  # the kubelet refuses a pod that wants more GPUs than it has
        self._pod_tuple = None
        if refused:
            self._fail_pod(attempt, refused)
        elif all(pod.phase == "Running" for pod in self._workers(attempt)):
            seconds = durations.start_seconds(attempt.topology, self._assumptions)
            self._after(seconds, lambda: self._begin_training(attempt))

    def _begin_training(self, attempt: Attempt) -> object:
        if not self._is_alive(attempt) or attempt.halted is not None:
            return _UNSEEN
        shape = planner.shape_of(attempt.topology, num_nodes=attempt.num_nodes, per_node=GPUS_PER_NODE)
        seconds = step_seconds(planner.evaluate(self._spec, shape))
        attempt.training = Training(
            begin=self.now,
            first=attempt.resume_step,
            step_seconds=seconds,
            interval_seconds=self._spec.checkpoint.interval_seconds,
            save_seconds=durations.save_seconds(attempt.num_nodes * GPUS_PER_NODE, self._assumptions),
        )
        attempt.phase = TrainerPhase.TRAINING
        self.account.begin(self.now, attempt.resume_step, seconds)
        self._after(seconds, lambda: None)  # the operator sees the first step when it is done
        return _UNSEEN

    def _drain(self) -> None:
        attempt = self._attempt
        if attempt is None or attempt.request or not attempt.lease_exists:
            return
        attempt.request = Request.DRAIN
        if attempt.training is not None and attempt.halted is None:
            end, done = attempt.training.drain(self.now)
            self._at(end, lambda: self._finish_drain(attempt, done))

    def _finish_drain(self, attempt: Attempt, done: Progress) -> None:
        if not self._is_alive(attempt) or attempt.halted is not None:
            return
        self._halt(attempt, done)
        attempt.phase = TrainerPhase.DRAINED
        attempt.job_failed = True
        for pod in self._workers(attempt):
            self._pods[pod.name] = dataclasses.replace(pod, phase="Failed", exit_code=75)
        self._pod_tuple = None

    def _start_reshard(self, manifest: Mapping[str, Any]) -> None:
        source, target = manifest["spec"]["template"]["spec"]["containers"][0]["args"][1:3]
        self._serial += 1
        name, attempt = manifest["metadata"]["name"], attempt_of(manifest["metadata"])
        uid = f"uid-{self._serial}"
        self._reshard = JobView(name=name, uid=uid, attempt=attempt, role=RESHARD, owner=JOB.uid)
        # One pod stands for all that share the conversion.
        self._pods[name] = PodView(
            name=name,
            uid=f"{uid}-0",
            attempt=attempt,
            role=RESHARD,
            node=CPU_NODE,
            phase="Running",
            created_at=self.now,
            owner=uid,
            owner_name=name,
        )
        self._pod_tuple = None
        seconds = durations.reshard_seconds(self._num_gpus, self._assumptions)
        report = ReshardReport(
            ok=True,
            exit_code=0,
            message="converted",
            source=source,
            target=target,
            step=self._steps[source],
            bytes_read=int(durations.checkpoint_bytes(self._assumptions)),
            bytes_written=int(durations.checkpoint_bytes(self._assumptions)),
            seconds=seconds,
            verified=True,
        )
        self._after(seconds + self._assumptions.reshard_pod_seconds, lambda: self._finish_reshard(name, uid, report))

    def _finish_reshard(self, name: str, uid: str, report: ReshardReport) -> None:
        if self._reshard is None or self._reshard.uid != uid:
            return
        self._steps[report.target] = report.step
        self._reshard = dataclasses.replace(self._reshard, complete=True)
        self._pods[name] = dataclasses.replace(
            self._pods[name], phase="Succeeded", exit_code=0, termination_message=report.to_json()
        )
        self._pod_tuple = None

    def _delete_job(self, uid: str) -> None:
        if self._reshard is not None and self._reshard.uid == uid:
            self._pods.pop(self._reshard.name, None)
            self._pod_tuple = None
            self._reshard = None
        attempt = self._attempt
        if attempt is not None and attempt.uid == uid and attempt.job_exists:
            attempt.job_exists = False
            self._stop_training(attempt)
            self._delete_pods([pod.name for pod in self._workers(attempt)])

    def _delete_pods(self, names: list[str], *, at_once: bool = False) -> None:
        ending = []
        for name in names:
            pod = self._pods.get(name)
            if pod is None:
                continue
            if at_once or pod.terminal or pod.node is None:
                del self._pods[name]
            elif pod.deleted_at is None:
                self._pods[name] = dataclasses.replace(pod, deleted_at=self.now)
                ending.append(name)
            self._pod_tuple = None
        if ending:
            self._after(self._assumptions.stop_seconds, lambda: self._remove_pods(ending))

    def _remove_pods(self, names: list[str]) -> None:
        """Remove deleted pods; a kubelet that is silent confirms nothing."""
        for name in names:
            pod = self._pods.get(name)
            if pod is not None and pod.deleted_at is not None and not self.nodes.is_silent(pod.node or CPU_NODE):
                del self._pods[name]
        self._pod_tuple = None

    # -- failures and repairs -------------------------------------------------------------------------------------

    def _fail(self, failure: Failure) -> object:
        names = [name for name in map(node_name, failure.nodes) if not self.nodes[name].is_impaired]
        if not names:
            return _UNSEEN  # what is broken already does not fail again
        attempt = self._attempt
        pods = self._workers(attempt) if attempt is not None and self._is_alive(attempt) else []
        if failure.effect in (Effect.CRASH, Effect.HANG):
            self._fail_processes(failure, pods)
            return _UNSEEN
        is_hit = any(pod.node in names and pod.phase == "Running" for pod in pods)
        self.account.count(failure.effect, is_hit=is_hit)
        for name in names:
            self._break_node(name, failure.effect)
            self._after(failure.repair_seconds, lambda name=name: self._repair(name))  # type: ignore[misc]
        if failure.effect is Effect.PLANNED:
            return None
        if attempt is None or not is_hit:
            return _UNSEEN if failure.effect is not Effect.DEVICE else None
        self._stop_training(attempt)
        if failure.effect is Effect.DEVICE:
            victim = next(pod for pod in pods if pod.node in names)
            self._after(self._assumptions.crash_seconds, lambda: self._fail_pod(attempt, victim.name))
        elif any(pod.index == 0 and pod.node in names for pod in pods):
            attempt.beats_until = self.now
        return _UNSEEN

    def _fail_processes(self, failure: Failure, pods: list[PodView]) -> None:
        running = [pod for pod in pods if pod.phase == "Running"]
        self.account.count(failure.effect, is_hit=bool(running))
        attempt = self._attempt
        if attempt is None or not running:
            return
        victim = running[failure.nodes[0] % len(running)].name
        is_hang = failure.effect is Effect.HANG
        seconds = self._assumptions.watchdog_seconds if is_hang else self._assumptions.crash_seconds
        self._stop_training(attempt)
        self._after(seconds, lambda: self._fail_pod(attempt, victim))

    def _break_node(self, name: str, effect: Effect) -> None:
        state = self.nodes[name]
        if effect is Effect.PLANNED:
            self.nodes.change(name, dataclasses.replace(state, cordoned_since=self.now), self.now)
        elif effect is Effect.DEVICE:
            # The device plugin notices it when the process fails.
            self.nodes.change(name, dataclasses.replace(state, healthy_gpus=GPUS_PER_NODE - 1), self.now)
        else:
            since = self.now
            self.nodes.change(name, dataclasses.replace(state, silent_since=since), since)
            self._after(self._assumptions.lease_seconds, lambda: self._notice(name, since, Silence.LEASE_STALE))
            self._after(self._assumptions.not_ready_seconds, lambda: self._notice(name, since, Silence.NOT_READY))

    def _notice(self, name: str, since: float, silence: Silence) -> None:
        state = self.nodes[name]
        if state.silent_since == since:
            changed = self.now if silence is Silence.NOT_READY else state.changed
            self.nodes.change(name, dataclasses.replace(state, silence=silence, changed=changed), self.now)

    def _repair(self, name: str) -> None:
        was_silent = self.nodes.is_silent(name)
        changed = self.now if self.nodes[name].silence is Silence.NOT_READY else self.nodes[name].changed
        self.nodes.change(name, NodeState(changed=changed), self.now)
        if was_silent:  # it has restarted: what ran there has ended
            for pod in [pod for pod in self._pods.values() if pod.node == name and not pod.terminal]:
                if pod.deleted_at is not None:
                    del self._pods[pod.name]
                    self._pod_tuple = None
                elif self._attempt is not None:
                    self._fail_pod(self._attempt, pod.name)

    def _fail_pod(self, attempt: Attempt, name: str) -> None:
        """Let one pod fail; the Job controller then fails the Job and deletes its other pods."""
        pod = self._pods.get(name)
        if not self._is_alive(attempt) or pod is None or pod.terminal or pod.deleted_at is not None:
            return
        attempt.job_failed = True
        self._pods[name] = dataclasses.replace(pod, phase="Failed", exit_code=1)
        self._delete_pods([other.name for other in self._workers(attempt) if other.name != name])

    def _stop_training(self, attempt: Attempt) -> None:
        """End the steps of an attempt; what it has not committed is lost."""
        if attempt.halted is None:
            self._halt(attempt, self._progress(attempt) or no_progress(attempt))

    def _halt(self, attempt: Attempt, done: Progress) -> None:
        attempt.halted = done
        if attempt.training is not None:
            committed = done.committed if done.committed is not None else attempt.resume_step
            self.account.end(self.now, committed, done.saving_seconds)

    def finish(self) -> None:
        """End the simulation: what runs has lost nothing."""
        attempt = self._attempt
        if attempt is not None and attempt.halted is None and attempt.training is not None:
            done = attempt.training.progress(self.now)
            self.account.end(self.now, done.steps, done.saving_seconds)
        self.account.close(self.now)

    def _is_alive(self, attempt: Attempt) -> bool:
        return attempt is self._attempt and attempt.job_exists and not attempt.job_failed

    def _workers(self, attempt: Attempt) -> list[PodView]:
        return [pod for pod in self._pods.values() if pod.role == WORKER and pod.attempt == attempt.number]
