"""Decisions, one table per phase: a status and a world go in, a phase and actions come out."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable
from typing import Any

import pytest

from elastic_operator.api.conditions import Type, find
from elastic_operator.api.serialization import Time
from elastic_operator.api.spec import SpecError, parse_spec
from elastic_operator.api.status import Checkpoint, Commit, Current, Phase, Resume, Status
from elastic_operator.manifests.attempt import JobRef
from elastic_operator.observed.node_pool import NodePool
from elastic_operator.observed.observation import JobView, LeaseView, NodeView, Observation, PodView, Taint
from elastic_operator.observed.pod_usage import UsageByOthers
from elastic_operator.observed.timeouts import Timeouts
from elastic_operator.reconcile.actions import (
    Create,
    Decision,
    DeleteJob,
    DeletePod,
    LaunchAttempt,
    RequestDrain,
    RevokeAttempt,
)
from elastic_operator.reconcile.decide import decide, refuse
from reshard.contract import CommitRef, ExitCode, LeaseKey, Request, ReshardReport, TrainerPhase
from reshard.topology import Topology

NOW = 1_800_000_000.0
GPU = "amd.com/gpu"
JOB = JobRef(name="gpt", namespace="ns", uid="uid", generation=1)
SPEC: dict[str, Any] = {
    "accelerator": {"resource": GPU, "perNode": [2]},
    "nodes": {"min": 1, "max": 3},
    "parallelism": {"tensor": [2], "pipeline": [1, 3]},
    "batch": {"globalSamples": 20, "microSamples": 2},
    "checkpoint": {"claimName": "ckpt", "path": "gpt"},
    "template": {"spec": {"containers": [{"name": "train", "image": "image"}]}},
}
BIG = Topology(tp=2, pp=3, dp=1)
SMALL = Topology(tp=2, dp=2)
COMMIT = Commit(uri="/checkpoint/gpt/a1/step-00000010", step=10, samples=200, attempt=1, topology=BIG)
OLDER = dataclasses.replace(COMMIT, uri="/checkpoint/gpt/a1/step-00000005", step=5)


def nodes(*names: str, **changes: Any) -> dict[str, NodeView]:
    return {name: NodeView(name=name, allocatable={GPU: 2}, capacity={GPU: 2}, **changes) for name in names}


def workers(attempt: int = 1, phase: str = "Running", count: int = 3, **changes: Any) -> tuple[PodView, ...]:
    return tuple(
        PodView(
            name=f"gpt-a{attempt}-{index}", uid=f"p{attempt}{index}", attempt=attempt, role="worker",
            node=f"n{index + 1}", index=index, phase=phase, requests={GPU: 2}, created_at=NOW - 100, **changes,
        )
        for index in range(count)
    )  # fmt: skip


def lease(attempt: int = 1, age: float = 1.0, **notes: str) -> dict[int, LeaseView]:
    values = {getattr(LeaseKey, key): value for key, value in notes.items()}
    view = LeaseView(name=f"gpt-a{attempt}", attempt=attempt, renewed_at=NOW - age, annotations=values)
    return {attempt: view}


def worker_job(attempt: int = 1, **changes: Any) -> JobView:
    return JobView(name=f"gpt-a{attempt}", uid=f"j{attempt}", attempt=attempt, role="worker", **changes)


def training(**notes: str) -> dict[int, LeaseView]:
    return lease(**{"PHASE": TrainerPhase.TRAINING, "STEP": "12", **notes})


WORLD = Observation(nodes=nodes("n1", "n2", "n3"), pods=workers(), jobs=(worker_job(),), leases=training())


def spec(**changes: Any) -> Any:
    return parse_spec({**copy.deepcopy(SPEC), **changes})


def settled(world: Observation = WORLD, **changes: Any) -> Status:
    """The status of a job that has run as attempt 1 on three nodes for a while."""
    status = Status(
        attempt=1,
        current=Current(
            topology=BIG, num_nodes=3, gpus_per_node=2, launch_time=Time(NOW - 100), job_uid="j1",
            schedule_time=Time(NOW - 99), first_step_time=Time(NOW - 90), spec_hash="",
        ),
        checkpoint=Checkpoint(history=(COMMIT, OLDER), uri=COMMIT.uri, step=10, topology=BIG, attempt=1),
        start_time=Time(NOW - 100),
    )  # fmt: skip
    from elastic_operator.api.spec import spec_hash

    current = dataclasses.replace(status.current, spec_hash=spec_hash(spec()))  # type: ignore[type-var]
    return dataclasses.replace(status, current=current, **changes)


def look(status: Status, world: Observation = WORLD, *, now: float = NOW, **changes: Any) -> Decision:
    return decide(JOB, spec(**changes), status, world, limits=Timeouts(), now=now)


def kinds(decision: Decision) -> list[str]:
    return [type(action).__name__ for action in decision.actions]


def test_nothing_is_planned_on_a_node_that_a_monitor_calls_unhealthy() -> None:
    members = nodes("n1", "n2", "n3")
    sick = dataclasses.replace(members["n2"], unhealthy=("label a is b",), unhealthy_since=NOW - 11)
    decision = look(Status(), Observation(nodes={**members, "n2": sick}))
    assert decision.status.current is not None
    assert decision.status.current.num_nodes == 2
    assert decision.status.current.avoid == ("n2",)


def test_a_node_that_a_monitor_calls_unhealthy_is_drained_before_it_is_left() -> None:
    members = nodes("n1", "n2", "n3")
    sick = dataclasses.replace(members["n2"], unhealthy=("condition GpuMemWatch is True",), unhealthy_since=NOW - 11)
    decision = look(settled(), dataclasses.replace(WORLD, nodes={**members, "n2": sick}))
    assert decision.status.phase == Phase.DRAINING
    assert decision.status.drain is not None
    assert (decision.status.drain.cause, decision.status.drain.nodes) == ("NodeUnhealthy", ("n2",))
    assert kinds(decision) == ["RequestDrain"]


def test_a_new_job_is_planned_and_launched_in_one_pass() -> None:
    decision = look(Status(), Observation(nodes=nodes("n1", "n2", "n3")))
    assert decision.status.phase == Phase.STARTING
    assert decision.status.attempt == 1
    assert kinds(decision) == ["LaunchAttempt"]
    assert find(decision.status.conditions, Type.RESUMED).reason == "NoCommit"  # type: ignore[union-attr]


def test_no_plan_is_made_from_an_old_look_at_the_cluster() -> None:
    decision = look(Status(), Observation(nodes=nodes("n1"), capacity_fresh=False))
    assert decision.needs_fresh_capacity


def test_a_healthy_attempt_is_left_alone() -> None:
    decision = look(settled())
    assert decision.status.phase == Phase.RUNNING
    assert decision.actions == ()


def lost_node() -> Observation:
    world = nodes("n1", "n2") | nodes("n3", ready="Unknown", ready_since=NOW - 1, lease_age_seconds=30)
    return dataclasses.replace(WORLD, nodes=world)


def test_a_confirmed_loss_stops_fences_plans_and_reshards_in_one_pass() -> None:
    decision = look(settled(), lost_node())
    assert decision.status.phase == Phase.RESHARDING
    assert decision.status.attempt == 2
    assert decision.status.current.topology == SMALL  # type: ignore[union-attr]
    stop = ["RequestStop", "DeleteJob", "RevokeAttempt"]
    assert kinds(decision) == [*stop, "Create", *["DeletePod"] * 3], "the conversion does not wait for the deletions"
    assert decision.status.recoveries[0].lost == ("n3",)
    assert [item.name for item in decision.status.excluded_nodes] == ["n3"]
    (reshard,) = [action for action in decision.actions if isinstance(action, Create)]
    assert reshard.manifest["metadata"]["name"] == "gpt-a2-reshard"


def test_the_events_of_a_recovery_tell_its_story_in_order() -> None:
    told = [(event.reason, event.message) for event in look(settled(), lost_node()).events]
    assert [reason for reason, _ in told] == ["NodeNotReady", "Planned", "Resharding"]
    assert told[0][1] == (
        "node n3 is not Ready (Ready is Unknown: the kubelet does not report); attempt 1 is given up after step 12"
    )
    launched = look(after_loss(), prepared())
    assert [event.reason for event in launched.events] == ["Resharded", "Launched"]
    steps = Observation(
        nodes=lost_node().nodes, pods=workers(2, count=2), jobs=(worker_job(2),),
        leases=lease(2, PHASE=TrainerPhase.TRAINING, STEP="11"),
    )  # fmt: skip
    (running,) = look(launched.status, steps, now=NOW + 30).events
    assert running.reason == "Running"
    assert running.message == (
        "attempt 2 makes steps, from step 10 on; "
        f"lost node n3 (NodeNotReady), back in 31 s, 2 steps lost, 100 B moved; from {BIG} to {SMALL}"
    )


def test_the_same_shape_restarts_without_a_reshard_job() -> None:
    pods = (*workers()[:2], dataclasses.replace(workers()[2], phase="Failed", exit_code=1))
    decision = look(settled(), dataclasses.replace(WORLD, pods=pods))
    assert decision.status.current.topology == BIG  # type: ignore[union-attr]
    assert decision.status.current.resume == Resume(  # type: ignore[union-attr]
        uri=COMMIT.uri, source=COMMIT.uri, step=10, samples=200, ready=True, mode="AsIs",
        reason="step 10 of attempt 1 (tp=2,pp=3,dp=1,zero=1), as it is",
    )  # fmt: skip
    assert "Create" not in kinds(decision)
    assert decision.status.restart_budget.used == 1


def after_loss() -> Status:
    return look(settled(), lost_node()).status


def resharded(**changes: Any) -> tuple[JobView, PodView]:
    report = ReshardReport(ok=True, exit_code=0, message="done", bytes_written=100, verified=True)
    report = dataclasses.replace(report, **changes)
    ok = report.exit_code == 0
    job = JobView(name="gpt-a2-reshard", uid="r2", attempt=2, role="reshard", complete=ok, failed=not ok)
    pod = PodView(
        name="gpt-a2-reshard-x", uid="rp", attempt=2, role="reshard", phase="Succeeded" if ok else "Failed",
        termination_message=report.to_json(), exit_code=report.exit_code,
    )  # fmt: skip
    return job, pod


def prepared(pods: tuple[PodView, ...] = (), **report: Any) -> Observation:
    job, pod = resharded(**report)
    return Observation(nodes=lost_node().nodes, pods=(*pods, pod), jobs=(job,))


def test_a_finished_reshard_launches_once_the_old_pods_are_gone() -> None:
    decision = look(after_loss(), prepared())
    assert kinds(decision) == ["LaunchAttempt"]
    launch = decision.actions[0]
    assert isinstance(launch, LaunchAttempt)
    assert decision.status.checkpoint.uri == "/checkpoint/gpt/a2/step-00000010"
    assert decision.status.checkpoint.verified


def test_a_reshard_job_that_is_seen_complete_before_its_pod_waits_for_the_report() -> None:
    done = prepared()
    pods = tuple(dataclasses.replace(p, phase="Running", termination_message="") for p in done.pods)
    decision = look(after_loss(), dataclasses.replace(done, pods=pods))
    assert kinds(decision) == []
    assert not decision.status.current.resume.ready  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("index", "launched"),
    [pytest.param(0, False, id="on-a-healthy-node"), pytest.param(2, True, id="on-the-lost-node")],
)
def test_an_old_pod_holds_the_launch_up_only_where_it_can_run(index: int, launched: bool) -> None:
    decision = look(after_loss(), prepared(pods=(workers()[index],)))
    assert ("LaunchAttempt" in kinds(decision)) is launched


def test_pods_on_a_lost_node_are_force_deleted_only_after_their_time() -> None:
    gone = dataclasses.replace(workers()[2], deleted_at=NOW - 59)
    early = look(after_loss(), prepared(pods=(gone,)))
    late = look(after_loss(), prepared(pods=(gone,)), now=NOW + 2)
    assert DeletePod(name=gone.name, uid=gone.uid, grace_seconds=0) not in early.actions
    assert DeletePod(name=gone.name, uid=gone.uid, grace_seconds=0) in late.actions


@pytest.mark.parametrize(
    ("code", "check"),
    [
        pytest.param(
            ExitCode.SOURCE_INVALID,
            lambda status: status.attempt == 3 and status.current.resume.source == OLDER.uri,
            id="source-invalid-falls-back",
        ),
        pytest.param(
            ExitCode.SOURCE_CHANGED,
            lambda status: status.attempt == 3 and status.current.resume.source == OLDER.uri,
            id="source-changed-falls-back",
        ),
        pytest.param(
            ExitCode.STORAGE_FULL,
            lambda status: status.attempt == 2 and status.reshard.retry_time == NOW + 10,
            id="storage-full-is-retried",
        ),
        pytest.param(
            ExitCode.SOURCE_UNAVAILABLE,
            lambda status: status.attempt == 2 and status.reshard.retry_time == NOW + 10,
            id="a-source-that-cannot-be-read-now-is-retried",
        ),
        pytest.param(
            ExitCode.UNSUPPORTED,
            lambda status: status.phase == Phase.WAITING and status.pinned == BIG,
            id="unsupported-waits-for-the-old-topology",
        ),
    ],
)
def test_a_failed_reshard(code: ExitCode, check: Callable[[Status], bool]) -> None:
    decision = look(after_loss(), prepared(ok=False, exit_code=int(code), message="because"))
    assert check(decision.status), decision.status
    condition = find(decision.status.conditions, Type.RESHARD_FAILED)
    assert condition is not None
    assert condition.status == "True"
    assert "because" in condition.message


def mode_asked_for(decision: Decision) -> str:
    (create,) = [action for action in decision.actions if isinstance(action, Create)]
    args: list[str] = create.manifest["spec"]["template"]["spec"]["containers"][0]["args"]
    return args[args.index("--mode") + 1] if "--mode" in args else ""


def test_a_virtual_commit_that_cannot_be_loaded_is_followed_by_files_of_the_same_step() -> None:
    mode = {"mode": "Virtual"}
    first = look(settled(), lost_node(), reshard=mode)
    assert mode_asked_for(first) == "virtual"
    job, pod = resharded(mode="virtual", verified=False, bytes_written=4000)
    ready = Observation(nodes=lost_node().nodes, pods=(pod,), jobs=(job,))
    launched = look(first.status, ready, reshard=mode)
    assert kinds(launched) == ["LaunchAttempt"]
    assert launched.events[0].message.endswith("virtual, in 0.0 s: the training reads the source itself)")
    refused = Observation(
        nodes=lost_node().nodes,
        pods=workers(2, count=2),
        jobs=(worker_job(2),),
        leases=lease(2, PHASE=TrainerPhase.RESTORING, RESUME_ERROR="the source is damaged"),
    )
    again = look(launched.status, refused, reshard=mode)
    assert again.status.attempt == 3
    assert again.status.current is not None
    assert (again.status.current.resume.source, again.status.current.resume.step) == (COMMIT.uri, 10)
    assert mode_asked_for(again) == ""


def test_retain_topology_goes_on_when_the_nodes_are_back() -> None:
    waiting = look(after_loss(), prepared(ok=False, exit_code=int(ExitCode.UNSUPPORTED), message="no")).status
    world = Observation(nodes=nodes("n1", "n2", "n3", ready_since=NOW - 1000))
    decision = look(waiting, world, now=NOW + 60)
    assert decision.status.current.topology == BIG  # type: ignore[union-attr]
    assert decision.status.current.resume.uri == COMMIT.uri  # type: ignore[union-attr]


@pytest.mark.parametrize(("failures", "pause"), [(1, 20), (4, 160), (5, 300), (99, 300)])
def test_the_pause_before_a_reshard_retry_doubles_up_to_five_minutes(failures: int, pause: int) -> None:
    loss = after_loss()
    assert loss.reshard is not None
    failed_before = dataclasses.replace(loss, reshard=dataclasses.replace(loss.reshard, failures=failures))
    status = look(
        failed_before, prepared(ok=False, exit_code=ExitCode.TARGET_FAILED), reshard={"backoffLimit": 100}
    ).status
    assert status.reshard is not None
    assert status.reshard.retry_time == NOW + pause


def test_reshard_retries_end_after_the_limit() -> None:
    status, world = after_loss(), prepared(ok=False, exit_code=int(ExitCode.STORAGE_FULL), message="full")
    now = NOW
    for number in range(3):
        status = look(status, world, now=now).status
        assert status.phase == Phase.RESHARDING
        (old,) = world.jobs
        world = dataclasses.replace(world, jobs=(dataclasses.replace(old, uid=f"again-{number}"),))
        now += 100
    assert look(status, world, now=now).status.phase == Phase.WAITING


def test_a_further_loss_before_the_launch_is_the_same_recovery_under_a_new_number() -> None:
    two = lost_node().nodes | nodes("n2", ready="Unknown", ready_since=NOW, lease_age_seconds=30)
    decision = look(after_loss(), dataclasses.replace(lost_node(), nodes=two), now=NOW + 5)
    assert decision.status.attempt == 3
    assert len(decision.status.recoveries) == 1
    assert decision.status.recoveries[0].lost == ("n2", "n3")
    assert [(item.failure_class, item.total) for item in decision.status.failure_counts] == [("Node", 1)]
    assert decision.status.restart_budget.used == 0


def test_a_spent_budget_fails_the_job_and_stops_it() -> None:
    pods = tuple(dataclasses.replace(pod, phase="Failed", exit_code=1) for pod in workers())
    budget = {"restartBudget": {"limit": 0, "windowSeconds": 60}}
    decision = look(settled(), dataclasses.replace(WORLD, pods=pods), recovery=budget)
    assert (decision.status.phase, decision.status.reason) == (Phase.FAILED, "RestartBudgetExceeded")
    assert "exit code 1" in decision.status.message
    assert look(decision.status, WORLD, recovery=budget).status.phase == Phase.FAILED


@pytest.mark.parametrize(
    ("failed_pods", "job_failed", "kept"),
    [(1, True, True), (1, False, True), (0, True, True), (0, False, False)],
)
def test_a_failed_job_keeps_its_pods_for_their_logs_unless_new_ones_would_be_made(
    failed_pods: int, job_failed: bool, kept: bool
) -> None:
    status = dataclasses.replace(settled(), phase=Phase.FAILED, current=None)
    failed = workers(phase="Failed", count=failed_pods)
    world = Observation(nodes=WORLD.nodes, pods=failed, jobs=(worker_job(failed=job_failed),), leases=training())
    assert ("DeleteJob" not in kinds(look(status, world))) == kept


@pytest.mark.parametrize(
    "world",
    [
        pytest.param(
            dataclasses.replace(WORLD, jobs=(worker_job(complete=True),), pods=workers(phase="Succeeded")), id="job"
        ),
        pytest.param(
            dataclasses.replace(
                WORLD,
                pods=workers(phase="Failed", exit_code=1),
                leases=lease(PHASE=TrainerPhase.COMPLETE, STEP="40"),
                jobs=(worker_job(failed=True),),
            ),
            id="last-step-committed-however-the-processes-ended",
        ),
    ],
)
def test_completion(world: Observation) -> None:
    decision = look(settled(), world)
    assert decision.status.phase == Phase.COMPLETE
    # Its Job stays, for the logs; its PodDisruptionBudget and its rights go once no pod of it runs.
    assert decision.actions == (RevokeAttempt(name="gpt-a1", owner="uid"),)


def test_suspending_drains_then_stops_then_rests() -> None:
    first = look(settled(), suspend=True)
    assert first.status.phase == Phase.DRAINING
    assert kinds(first) == ["RequestDrain"]
    ref = CommitRef(uri="/checkpoint/gpt/a1/step-00000012", step=12, samples=240, attempt=1, topology=BIG.to_dict())
    drained = dataclasses.replace(
        WORLD, leases=training(PHASE=TrainerPhase.DRAINED, COMMIT=ref.to_json(), REQUEST=Request.DRAIN)
    )
    second = look(first.status, drained, suspend=True)
    assert second.status.phase == Phase.STOPPING
    assert second.status.checkpoint.step == 12
    assert {"DeleteJob", "RevokeAttempt"} <= set(kinds(second))
    third = look(second.status, Observation(nodes=WORLD.nodes), suspend=True)
    assert third.status.phase == Phase.SUSPENDED
    assert third.requeue_seconds == Timeouts().resync_seconds, "an edit is told"
    assert [(item.cause, item.planned) for item in third.status.pauses] == [("Suspended", True)]
    assert third.status.recoveries == (), "nothing has failed"
    fourth = look(third.status, Observation(nodes=WORLD.nodes))
    assert fourth.status.attempt == 2
    assert fourth.status.current.resume.uri == ref.uri  # type: ignore[union-attr]


def test_a_suspended_job_wakes_to_force_the_deletion_of_a_pod_that_converts_on_a_lost_node() -> None:
    status = dataclasses.replace(settled(), phase=Phase.SUSPENDED, current=None)
    pod = PodView(name="x", uid="x", attempt=2, role="reshard", node="n1", phase="Running", deleted_at=NOW - 45)
    decision = look(status, Observation(nodes=WORLD.nodes, pods=(pod,)), suspend=True)
    assert decision.status.phase == Phase.SUSPENDED
    assert decision.requeue_seconds == pytest.approx(spec().recovery.force_delete_seconds - 45)


def test_a_drain_that_takes_too_long_goes_on_with_the_last_commit() -> None:
    status = look(settled(), suspend=True).status
    later = dataclasses.replace(WORLD, leases={1: dataclasses.replace(WORLD.leases[1], renewed_at=NOW + 300)})
    decision = look(status, later, now=NOW + 301, suspend=True)
    assert decision.status.phase == Phase.STOPPING
    assert "DrainTimedOut" in [event.reason for event in decision.events]


def test_a_cordoned_node_is_drained_before_anything_stops() -> None:
    world = nodes("n1", "n2") | nodes("n3", unschedulable=True, cordoned_since=NOW - 11)
    decision = look(settled(), dataclasses.replace(WORLD, nodes=world))
    assert decision.status.phase == Phase.DRAINING
    assert [type(action) for action in decision.actions] == [RequestDrain]


def test_a_taint_that_admission_made_the_pods_tolerate_is_no_reason_to_leave() -> None:
    taint = Taint(key=GPU, effect="NoSchedule", since=NOW - 1000)
    tainted = WORLD.nodes | nodes("n3", taints=(taint,))
    left = look(settled(), dataclasses.replace(WORLD, nodes=tainted))
    assert (left.status.phase, left.status.reason) == (Phase.DRAINING, "NodeTainted")
    added = {"key": GPU, "operator": "Exists", "effect": "NoSchedule"}  # as ExtendedResourceToleration does
    pods = workers(tolerations=(added,))
    assert look(settled(), dataclasses.replace(WORLD, nodes=tainted, pods=pods)).status.phase == Phase.RUNNING


@pytest.mark.parametrize(
    ("taint", "phase"),
    [
        pytest.param(Taint(key=GPU, value="present", effect="NoSchedule"), Phase.STARTING, id="of-the-accelerator"),
        pytest.param(Taint(key=GPU, effect="NoExecute"), Phase.WAITING, id="of-another-effect"),
        pytest.param(Taint(key="nvidia.com/gpu"), Phase.WAITING, id="of-another-resource"),
    ],
)
def test_nodes_that_are_tainted_for_pods_with_their_accelerator_are_capacity(taint: Taint, phase: Phase) -> None:
    tainted = nodes("n1", "n2", "n3", taints=(taint,))
    assert look(Status(), Observation(nodes=tainted)).status.phase == phase
    pool = NodePool(GPU, tainted)
    assert look(Status(), Observation(nodes=pool, used=UsageByOthers({}, {}, 1))).status.phase == phase


def test_growing_waits_until_the_capacity_has_stayed() -> None:
    status = settled()
    current = dataclasses.replace(status.current, topology=SMALL, num_nodes=2, first_step_time=Time(NOW - 5000))  # type: ignore[type-var]
    status = dataclasses.replace(status, current=current)
    world = dataclasses.replace(WORLD, pods=workers(count=2))
    seen = look(status, world)
    assert seen.status.phase == Phase.RUNNING
    assert seen.status.growth is not None
    fresh = dataclasses.replace(world, leases={1: dataclasses.replace(world.leases[1], renewed_at=NOW + 599)})
    assert look(seen.status, fresh, now=NOW + 599).status.phase == Phase.RUNNING
    grown = look(seen.status, fresh, now=NOW + 601)
    assert (grown.status.phase, grown.status.drain.cause) == (Phase.DRAINING, "CapacityReturned")  # type: ignore[union-attr]


def test_a_zombie_of_an_older_attempt_is_always_taken_down() -> None:
    zombie = dataclasses.replace(workers()[0], name="old", uid="old", attempt=0)
    jobs = (*WORLD.jobs, worker_job(0))
    decision = look(settled(), dataclasses.replace(WORLD, pods=(*WORLD.pods, zombie), jobs=jobs))
    assert {type(action) for action in decision.actions} == {DeleteJob, DeletePod, RevokeAttempt}
    assert all("a1" not in getattr(action, "name", "") for action in decision.actions)


def test_a_bad_spec_is_reported_in_full_and_leaves_what_runs_alone() -> None:
    problems = ["spec.nodes: min is 3, above max 1", "spec.batch.globalSamples: is missing"]
    decision = refuse(JOB, SpecError(problems), settled(), limits=Timeouts(), now=NOW)
    condition = find(decision.status.conditions, Type.SPEC_VALID)
    assert condition is not None
    assert (condition.status, condition.reason) == ("False", "InvalidSpec")
    assert all(problem in condition.message for problem in problems)
    assert decision.actions == ()
    again = refuse(JOB, SpecError(problems), decision.status, limits=Timeouts(), now=NOW + 1)
    assert again.events == ()


def test_edited_nodes_that_no_longer_permit_the_attempt_are_a_planned_change() -> None:
    decision = look(settled(), nodes={"min": 1, "max": 2})
    assert (decision.status.phase, decision.status.drain.cause) == (Phase.DRAINING, "SpecChanged")  # type: ignore[union-attr]


def test_a_sick_gpu_keeps_the_next_attempt_off_its_node_before_the_scheduler_knows() -> None:
    pods = (dataclasses.replace(workers()[0], unhealthy_devices=1), *workers()[1:])
    decision = look(settled(), dataclasses.replace(WORLD, pods=pods))
    assert decision.status.recoveries[0].cause == "DeviceUnhealthy"
    assert decision.status.current.num_nodes == 2  # type: ignore[union-attr]
    assert decision.status.current.avoid == ("n1",)  # type: ignore[union-attr]


def test_a_pod_that_fails_because_its_peers_node_vanished_is_put_down_to_the_node() -> None:
    """The peer's connection breaks before the node is confirmed lost."""
    suspect = nodes("n1", "n2") | nodes("n3", ready="Unknown", ready_since=NOW)
    pods = (dataclasses.replace(workers()[0], phase="Failed", exit_code=1), *workers()[1:])
    decision = look(settled(), dataclasses.replace(WORLD, nodes=suspect, pods=pods))
    (recovery,) = decision.status.recoveries
    assert (recovery.cause, recovery.lost) == ("NodeNotReady", ("n3",))
    assert "exit code 1" in recovery.message
    assert decision.status.excluded_nodes == (), "suspicion alone excludes nobody"
    # The old pod on the suspect node holds the launch up until the loss is confirmed.
    assert decision.status.current.num_nodes == 2  # type: ignore[union-attr]
    job, pod = resharded()
    prepared_world = Observation(nodes=suspect, pods=(workers()[2], pod), jobs=(job,))
    assert "LaunchAttempt" not in kinds(look(decision.status, prepared_world, now=NOW + 5))
    assert "LaunchAttempt" in kinds(look(decision.status, prepared_world, now=NOW + 21))
