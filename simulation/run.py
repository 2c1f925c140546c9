"""One simulation: the real `decide` and planner, a policy, a size of the cluster, and a trace of failures."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

from elastic_operator.api.spec import Spec
from elastic_operator.api.status import Phase, Status
from elastic_operator.observed.observation import Observation
from elastic_operator.observed.timeouts import Timeouts
from elastic_operator.reconcile.actions import Decision, DeleteJob, DeletePod, RevokeAttempt
from elastic_operator.reconcile.decide import UNSETTLED, decide
from simulation.accounting import Account
from simulation.assumptions import GPUS_PER_NODE, Assumptions
from simulation.attempt import JOB, START
from simulation.cluster import Cluster
from simulation.policies import Policy, best_on_all_nodes, make_spec, step_seconds
from simulation.trace import Failure, make_trace

TRAINED = "trained"
"""The use of GPU-hours that is not lost."""

_STOPS = (DeleteJob, DeletePod, RevokeAttempt)
"""Actions after which the operator can go on at once if no pod has to end first."""

_MIN_PAUSE_SECONDS = 0.05


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """What one simulated job did.

    Attributes:
        num_gpus: without spares.
        seconds: simulated time.
        global_samples: samples of one step.
        full_rate: samples per second on all nodes without any pause, with the batch of the assumptions.
        decisions: calls of `decide`.
    """

    policy: Policy
    num_gpus: int
    num_spare_gpus: int
    seconds: float
    account: Account
    global_samples: int
    full_rate: float
    decisions: int
    status: Status

    @property
    def ettr(self) -> float:
        """Effective training time ratio: time of steps that were not repeated over wall time."""
        return self.account.productive_seconds / self.seconds

    @property
    def progress(self) -> float:
        """Samples trained, as a share of those of an undisturbed job on all nodes that never saves."""
        return self.account.steps * self.global_samples / (self.full_rate * self.seconds)

    def gpu_hours(self) -> dict[str, float]:
        """Return the GPU-hours of the cluster by use; they add up to all that were paid for."""
        account, hour = self.account, self.num_gpus / 3600.0
        trained = self.progress * self.seconds * hour
        return {
            TRAINED: trained,
            "fewer GPUs": account.productive_seconds * hour - trained,
            "repeated steps": account.lost_seconds * hour,
            "saves": account.saving_seconds * hour,
            "recovery": account.down_seconds * hour,
            "waiting for nodes": account.waiting_seconds * hour,
            "spares": self.num_spare_gpus * self.seconds / 3600.0,
        }

    @property
    def lost_gpu_hours(self) -> float:
        """GPU-hours that were paid for and trained nothing new."""
        return sum(hours for use, hours in self.gpu_hours().items() if use != TRAINED)


def simulate(
    policy: Policy,
    num_gpus: int,
    assumptions: Assumptions,
    *,
    seed: int,
    failures: Sequence[Failure] | None = None,
    follow_requeues: bool = False,
) -> Result:
    """Run one job through the failures of its cluster: `failures`, or those that the seed gives.

    `decide` depends on its inputs alone. While nothing in the cluster changes, it decides the same again, except at a
    few deadlines that its status states. So a pass runs after each event and at each deadline, and the other polls of
    the operator are left out; `follow_requeues` runs them too, for comparison.

    Raises:
        RuntimeError: the job failed, or a decision did not settle.
    """
    num_nodes = num_gpus // GPUS_PER_NODE
    num_spares = policy.num_spares(num_nodes, assumptions)
    spec = make_spec(policy, num_nodes, assumptions)
    cluster = Cluster(spec, num_nodes=num_nodes, num_spares=num_spares, assumptions=assumptions)
    if failures is None:
        failures = make_trace(assumptions, num_nodes=num_nodes, num_spares=num_spares, seed=seed)
    for failure in failures:
        cluster.add_failure(failure)
    status, decisions = _operate(cluster, spec, assumptions, follow_requeues=follow_requeues)
    cluster.finish()
    reference = make_spec(Policy(name="reference"), num_nodes, assumptions)
    best = best_on_all_nodes(reference, num_nodes)
    return Result(
        policy=policy,
        num_gpus=num_gpus,
        num_spare_gpus=num_spares * GPUS_PER_NODE,
        seconds=assumptions.seconds,
        account=cluster.account,
        global_samples=spec.batch.global_samples,
        full_rate=reference.batch.global_samples / step_seconds(best),
        decisions=decisions,
        status=status,
    )


def _operate(cluster: Cluster, spec: Spec, assumptions: Assumptions, *, follow_requeues: bool) -> tuple[Status, int]:
    """Decide and act until the end of the simulated time; return the last status and the number of passes."""
    limits, end = Timeouts(), START + assumptions.seconds
    status, passes, next_pass = Status(), 0, START
    while True:
        event = cluster.next_event
        if event is not None and event <= min(next_pass, end):
            if cluster.advance() or follow_requeues:
                next_pass = min(next_pass, event + assumptions.reaction_seconds)
            continue
        if next_pass >= end:
            cluster.now = end
            return status, passes
        cluster.now = next_pass
        observed = cluster.observe()
        decision = decide(JOB, spec, status, observed, limits=limits, now=cluster.now)
        passes += 1
        _check(decision)
        for action in decision.actions:
            cluster.act(action)
        cluster.account.wait(cluster.now, is_waiting=decision.status.phase == Phase.WAITING)
        if follow_requeues:
            pause = assumptions.reaction_seconds if decision.actions else decision.requeue_seconds
        elif any(isinstance(action, _STOPS) for action in decision.actions) and not cluster.is_ending:
            pause = assumptions.reaction_seconds
        else:
            pause = _next_deadline(spec, decision.status, observed, limits, cluster) - cluster.now
        status = decision.status
        next_pass = cluster.now + max(_MIN_PAUSE_SECONDS, pause)


def _check(decision: Decision) -> None:
    problems = [event.message for event in decision.events if event.reason == UNSETTLED]
    if problems or decision.needs_fresh_capacity or decision.status.phase in (Phase.FAILED, Phase.COMPLETE):
        raise RuntimeError(
            f"expected a job that goes on, found {decision.status.phase}: {decision.status.message} {problems}"
        )


def _next_deadline(spec: Spec, status: Status, observed: Observation, limits: Timeouts, cluster: Cluster) -> float:
    """Return when `decide` may decide otherwise although nothing has happened."""
    recovery, current = spec.recovery, status.current
    moments = cluster.signal_deadlines(limits)
    moments += [item.until for item in status.excluded_nodes if item.until is not None]
    moments += [item.retry_time for item in status.failure_counts if item.retry_time is not None]
    moments += [pod.deleted_at + recovery.force_delete_seconds for pod in observed.pods if pod.deleted_at is not None]
    if status.drain is not None:
        moments.append(status.drain.start_time + recovery.drain_seconds)
    if current is not None and current.launch_time is not None:
        if current.first_step_time is None:
            moments.append(current.launch_time + limits.startup_seconds)
            moments.append(current.launch_time + limits.unschedulable_seconds)
        if status.growth is not None:
            since = max(status.growth.since, current.first_step_time or 0.0)
            moments.append(since + recovery.scale_up_stable_seconds)
    return min((moment for moment in moments if moment > cluster.now), default=math.inf)
