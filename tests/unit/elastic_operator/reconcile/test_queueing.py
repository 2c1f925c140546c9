"""A job in a queue of Kueue: it waits for quota, stays within it, gives it back, and asks for more."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from elastic_operator.api.conditions import Type, find
from elastic_operator.api.serialization import Time
from elastic_operator.api.status import Phase, Status
from elastic_operator.manifests.workload import digest, workload, workload_spec
from elastic_operator.observed.observation import Observation
from elastic_operator.observed.queueing.placement import Placement
from elastic_operator.observed.queueing.workloads import QueueView, WorkloadView, workload_view
from elastic_operator.observed.timeouts import Timeouts
from elastic_operator.reconcile import goodput
from elastic_operator.reconcile.actions import Create, Decision, DeleteWorkload, LaunchAttempt, PatchWorkload
from elastic_operator.reconcile.decide import decide
from elastic_operator.reconcile.queueing.standing import UNADMITTED_SECONDS
from reshard.contract import CommitRef, TrainerPhase
from tests.unit.elastic_operator.reconcile.test_decide_phases import (
    BIG,
    JOB,
    NOW,
    WORLD,
    lost_node,
    nodes,
    settled,
    spec,
    training,
    worker_job,
    workers,
)

QUEUED = dataclasses.replace(JOB, labels={"kueue.x-k8s.io/queue-name": "team", "kueue.x-k8s.io/priority-class": "low"})
CREATED = "2027-01-15T07:58:20Z"
"""100 s before NOW."""
FULL = "couldn't assign flavors to pod set workers: insufficient unused quota for amd.com/gpu in flavor gpu-nodes"
EMPTY = Observation(nodes=nodes("n1", "n2", "n3"))


def conditions(**values: str) -> list[dict[str, Any]]:
    """Conditions by type: status, reason and message with slashes between."""
    found = []
    for type_, text in values.items():
        status, reason, message = [*text.split("/", 2), "", ""][:3]
        found.append({
            "type": type_, "status": status, "reason": reason or type_, "message": message,
            "lastTransitionTime": CREATED, "observedGeneration": 1,
        })  # fmt: skip
    return found


def held(number: int = 1, *, count: int | None = None, replaces: str = "", **values: str) -> WorkloadView:
    """A Workload as the operator makes it, with these conditions; admitted for `count` nodes."""
    least, most = (count or 2) + 1 if replaces else 1, 3
    made = workload(
        QUEUED, number, workload_spec(QUEUED, spec(), least=least, most=most, priority=10), replaces=replaces
    )
    made["metadata"] |= {"uid": f"w{number}", "resourceVersion": "7", "generation": 1, "creationTimestamp": CREATED}
    made["status"] = {"conditions": conditions(**values)}
    if count is not None and not replaces:
        assignment = {"name": "workers", "count": count, "flavors": {"amd.com/gpu": "gpu-nodes", "cpu": "gpu-nodes"}}
        made["status"]["admission"] = {"clusterQueue": "gpus", "podSetAssignments": [assignment]}
    return workload_view(made)


def admitted(count: int = 3, number: int = 1, **values: str) -> WorkloadView:
    return held(number, count=count, QuotaReserved="True", Admitted="True", **values)


def evicted(count: int = 3) -> WorkloadView:
    why = "True/Preempted/Preempted to accommodate a workload (UID: x)"
    return admitted(count, Evicted=why, Preempted="True/InClusterQueue")


PENDING = held(QuotaReserved=f"False/Pending/{FULL}")
RELEASED = held(
    QuotaReserved="False/Pending/Preempted to accommodate", Admitted="False/NoReservation", Evicted="True/Preempted",
    Requeued="True/Preempted",
)  # fmt: skip


def in_queue(world: Observation, *views: WorkloadView, **changes: Any) -> Observation:
    flavors = {"gpu-nodes": Placement()}
    view = QueueView(workloads=views, **{"flavors": flavors, "priority": 10, **changes})
    return dataclasses.replace(world, queue=view)


def look(status: Status, world: Observation, *, now: float = NOW, **changes: Any) -> Decision:
    return decide(QUEUED, spec(**changes), status, world, limits=Timeouts(), now=now)


def idle(**changes: Any) -> Status:
    return dataclasses.replace(settled(), current=None, **changes)


def kinds(decision: Decision) -> list[str]:
    return [type(action).__name__ for action in decision.actions]


def only(decision: Decision, kind: type) -> Any:
    (action,) = [item for item in decision.actions if isinstance(item, kind)]
    return action


def test_a_new_job_asks_for_quota_and_starts_nothing() -> None:
    decision = look(Status(), in_queue(EMPTY))
    assert kinds(decision) == ["Create"]
    manifest = only(decision, Create).manifest
    assert (manifest["apiVersion"], manifest["kind"]) == ("kueue.x-k8s.io/v1beta2", "Workload")
    assert manifest["metadata"]["name"] == "gpt-q1"
    assert manifest["metadata"]["ownerReferences"][0]["uid"] == "uid"
    asked = manifest["spec"]
    assert (asked["queueName"], asked["priority"], asked["active"]) == ("team", 10, True)
    (pods,) = asked["podSets"]
    assert (pods["count"], pods["minCount"]) == (3, 1)
    assert pods["template"]["spec"]["containers"][0]["resources"]["requests"] == {"amd.com/gpu": "2"}
    assert (decision.status.phase, decision.status.reason, decision.status.attempt) == (Phase.WAITING, "Queued", 0)


def test_a_cluster_without_kueue_runs_the_job_at_once() -> None:
    assert kinds(look(Status(), EMPTY)) == ["LaunchAttempt"]


def test_two_hours_in_the_queue_give_one_job_and_cost_no_budget() -> None:
    status, passes = Status(), 0
    for second in range(0, 7200, 10):
        decision = look(status, in_queue(EMPTY, PENDING), now=NOW + second)
        assert decision.actions == ()
        passes += decision.status != status
        status = decision.status
    assert passes == 1
    assert (status.phase, status.message) == (Phase.WAITING, f"Workload gpt-q1: {FULL}")
    waiting = find(status.conditions, Type.QUOTA_RESERVED)
    assert waiting is not None
    assert (waiting.status, waiting.reason) == ("False", "Pending")
    launched = look(status, in_queue(EMPTY, admitted()), now=NOW + 7200)
    assert kinds(launched) == ["LaunchAttempt"]
    assert (launched.status.attempt, launched.status.restart_budget.used, launched.status.recoveries) == (1, 0, ())
    assert find(launched.status.conditions, Type.QUOTA_RESERVED).status == "True"  # type: ignore[union-attr]


def test_the_plan_stays_within_the_admitted_number_of_nodes() -> None:
    decision = look(Status(), in_queue(EMPTY, admitted(2)))
    assert decision.status.current is not None
    assert decision.status.current.num_nodes == 2


def test_flavors_restrict_the_nodes_and_add_tolerations() -> None:
    flavor = Placement(node_labels={"pool": "a"}, tolerations=({"key": "gpu", "operator": "Exists"},))
    members = nodes("n1", "n2", labels={"pool": "a"}) | nodes("n3")
    world = in_queue(Observation(nodes=members), admitted(3), flavors={"gpu-nodes": flavor})
    decision = look(Status(), world)
    assert decision.status.current is not None
    assert decision.status.current.num_nodes == 2
    pod = only(decision, LaunchAttempt).manifests[-1]["spec"]["template"]["spec"]
    assert pod["nodeSelector"] == {"pool": "a"}
    of_accelerator = {"key": "amd.com/gpu", "operator": "Exists", "effect": "NoSchedule"}
    assert pod["tolerations"] == [{"key": "gpu", "operator": "Exists"}, of_accelerator]


def test_what_a_flavor_demands_is_no_edit_of_the_spec() -> None:
    flavor = Placement(node_labels={"pool": "a"})
    world = dataclasses.replace(WORLD, nodes=nodes("n1", "n2", "n3", labels={"pool": "a"}))
    decision = look(settled(), in_queue(world, admitted(PodsReady="True"), flavors={"gpu-nodes": flavor}))
    assert decision.status.phase == Phase.RUNNING
    assert decision.actions == ()


@pytest.mark.parametrize("what", ["ResourceFlavor gpu-nodes: none", "the operator may not read Workloads"])
def test_without_knowing_what_kueue_says_nothing_is_started_and_nothing_is_stopped(what: str) -> None:
    waiting = look(Status(), in_queue(EMPTY, problem=what))
    assert (waiting.status.phase, waiting.status.message, waiting.actions) == (Phase.WAITING, what, ())
    assert look(settled(), in_queue(WORLD, admitted(PodsReady="True"), problem=what)).status.phase == Phase.RUNNING


def test_an_eviction_drains_and_the_quota_stays_until_the_pods_are_gone() -> None:
    decision = look(settled(), in_queue(WORLD, evicted()))
    assert (decision.status.phase, decision.status.reason) == (Phase.DRAINING, goodput.EVICTED)
    assert "Preempted to accommodate a workload" in decision.status.message
    assert kinds(decision) == ["RequestDrain"]


def after_drain() -> tuple[Status, Observation]:
    """The status of an evicted attempt that has drained, and the world in which its pods end."""
    draining = look(settled(), in_queue(WORLD, evicted())).status
    commit = CommitRef(uri="/checkpoint/gpt/a1/step-00000012", step=12, samples=240, attempt=1, topology=BIG.to_dict())
    world = dataclasses.replace(WORLD, leases=training(PHASE=TrainerPhase.DRAINED, COMMIT=commit.to_json()))
    return draining, world


def test_an_evicted_job_loses_no_step_and_no_budget_and_then_releases_its_quota() -> None:
    draining, world = after_drain()
    stopping = look(draining, in_queue(world, evicted()))
    assert stopping.status.phase == Phase.STOPPING
    assert "PatchWorkload" not in kinds(stopping)
    (change,) = stopping.status.pauses
    assert stopping.status.recoveries == ()
    assert (change.cause, change.planned, change.last_step) == (goodput.EVICTED, True, 12)
    assert stopping.status.restart_budget.used == 0
    assert stopping.status.failure_counts == ()
    gone = look(stopping.status, in_queue(EMPTY, evicted()), now=NOW + 5)
    assert gone.status.phase == Phase.WAITING
    patch = only(gone, PatchWorkload)
    assert (patch.name, patch.uid, patch.version, patch.subresource) == ("gpt-q1", "w1", "7", "status")
    written = patch.changes["status"]
    assert written["admission"] is None
    found = {item["type"]: (item["status"], item["reason"]) for item in written["conditions"]}
    assert found == {
        "QuotaReserved": ("False", "Pending"), "Admitted": ("False", "NoReservation"),
        "Requeued": ("True", "Preempted"), "Evicted": ("True", "Preempted"), "Preempted": ("True", "InClusterQueue"),
    }  # fmt: skip


def test_an_evicted_job_waits_and_goes_on_with_what_it_is_admitted_for_again() -> None:
    draining, world = after_drain()
    status = look(draining, in_queue(world, evicted())).status
    status = look(status, in_queue(EMPTY, evicted()), now=NOW + 5).status
    waiting = look(status, in_queue(EMPTY, RELEASED), now=NOW + 6)
    assert waiting.actions == ()
    assert waiting.status.phase == Phase.WAITING
    again = look(waiting.status, in_queue(EMPTY, admitted(2)), now=NOW + 3600).status
    assert again.attempt == 2
    assert again.current is not None
    assert (again.current.num_nodes, again.current.resume.step) == (2, 12)
    (change,) = again.pauses
    assert again.recoveries == ()
    assert (change.cause, change.stop_time, change.lost_steps) == (goodput.EVICTED, Time(NOW + 5), 0)


def test_the_quota_is_not_released_while_a_pod_runs_except_on_a_lost_node() -> None:
    draining, world = after_drain()
    status = look(draining, in_queue(world, evicted())).status
    left = workers()[2:]
    running = dataclasses.replace(EMPTY, pods=left)
    assert "PatchWorkload" not in kinds(look(status, in_queue(running, evicted())))
    lost = dataclasses.replace(lost_node(), pods=left, jobs=(), leases={})
    assert "PatchWorkload" in kinds(look(status, in_queue(lost, evicted())))


def test_a_recovery_keeps_the_quota() -> None:
    decision = look(settled(), in_queue(lost_node(), admitted()))
    assert decision.status.attempt == 2
    assert not any(isinstance(action, PatchWorkload | DeleteWorkload) for action in decision.actions)


def test_an_attempt_that_is_planned_but_not_launched_is_given_up_on_an_eviction() -> None:
    converting = look(settled(), in_queue(lost_node(), admitted()))
    assert converting.status.phase == Phase.RESHARDING
    gone = dataclasses.replace(lost_node(), pods=(), jobs=(), leases={})
    status = look(converting.status, in_queue(gone, evicted())).status
    assert status.current is None
    assert [item.cause for item in status.changes] == ["NodeNotReady", goodput.EVICTED]
    assert [item.cause for item in status.recoveries] == ["NodeNotReady"]
    assert status.restart_budget.used == 0


def test_a_suspended_job_deactivates_its_workload_and_activates_it_again() -> None:
    suspended = only(look(settled(), in_queue(WORLD, admitted()), suspend=True), PatchWorkload)
    assert suspended.changes["spec"] == {"active": False}
    paused = dataclasses.replace(PENDING, is_active=False, is_paused=True)
    still = look(idle(phase=Phase.SUSPENDED), in_queue(EMPTY, paused), suspend=True)
    assert still.actions == ()
    resumed = look(still.status, in_queue(EMPTY, paused))
    assert resumed.status.phase == Phase.WAITING
    assert only(resumed, PatchWorkload).changes["spec"] == {"active": True}


@pytest.mark.parametrize(
    ("suspend", "is_active", "is_paused", "wanted"),
    [
        pytest.param(True, True, True, False, id="activated by hand during a suspension, in which it uses no quota"),
        pytest.param(True, False, False, None, id="deactivated by somebody else before the suspension"),
        pytest.param(False, False, False, None, id="deactivated by somebody else, and resumed"),
        pytest.param(False, True, True, True, id="activated by hand and then resumed, so the note is removed"),
    ],
)
def test_a_suspension_undoes_only_what_it_has_done(
    suspend: bool, is_active: bool, is_paused: bool, wanted: bool | None
) -> None:
    view = dataclasses.replace(PENDING, is_active=is_active, is_paused=is_paused)
    phase = Phase.SUSPENDED if suspend else Phase.WAITING
    patches = [
        action.changes["spec"]["active"]
        for action in look(idle(phase=phase), in_queue(EMPTY, view), suspend=suspend).actions
        if isinstance(action, PatchWorkload)
    ]
    assert patches == ([] if wanted is None else [wanted])


def test_a_workload_that_somebody_else_deactivates_stays_so() -> None:
    decision = look(Status(), in_queue(EMPTY, dataclasses.replace(PENDING, is_active=False)))
    assert decision.actions == ()
    assert "is deactivated" in decision.status.message


@pytest.mark.parametrize(("phase", "reason"), [(Phase.COMPLETE, "Succeeded"), (Phase.FAILED, "Failed")])
def test_a_job_that_has_ended_gives_its_quota_back_for_good(phase: Phase, reason: str) -> None:
    status = idle(phase=phase, message="over")
    patch = only(look(status, in_queue(EMPTY, admitted())), PatchWorkload)
    found = {item["type"]: (item["status"], item["reason"]) for item in patch.changes["status"]["conditions"]}
    assert found["Finished"] == ("True", reason)
    finished = held(count=3, Finished="True/Succeeded", QuotaReserved="True", Admitted="True")
    assert not any(isinstance(item, PatchWorkload) for item in look(status, in_queue(EMPTY, finished)).actions)


def test_a_retry_asks_for_quota_anew() -> None:
    status = idle(phase=Phase.FAILED)
    job = dataclasses.replace(QUEUED, retry_request="1")
    world = in_queue(EMPTY, held(Finished="True/Failed"))
    decision = decide(job, spec(), status, world, limits=Timeouts(), now=NOW)
    assert only(decision, Create).manifest["metadata"]["name"] == "gpt-q2"


def small() -> tuple[Status, Observation]:
    """A job that trains on two of three free nodes."""
    status = settled()
    assert status.current is not None
    current = dataclasses.replace(status.current, topology=dataclasses.replace(BIG, pp=1, dp=2), num_nodes=2)
    return dataclasses.replace(status, current=current), dataclasses.replace(WORLD, pods=workers(count=2))


def test_a_job_that_would_gain_from_more_quota_asks_for_it_by_a_replacement() -> None:
    status, world = small()
    decision = look(status, in_queue(world, admitted(2, PodsReady="True")))
    manifest = only(decision, Create).manifest
    assert manifest["metadata"]["name"] == "gpt-q2"
    assert manifest["metadata"]["annotations"]["kueue.x-k8s.io/workload-slice-replacement-for"] == "ns/gpt-q1"
    (pods,) = manifest["spec"]["podSets"]
    assert (pods["count"], pods["minCount"]) == (3, 3)
    assert decision.status.phase == Phase.RUNNING
    assert decision.status.growth is None


def test_one_replacement_waits_until_it_is_admitted_or_no_longer_wanted() -> None:
    status, world = small()
    asked = held(2, replaces="gpt-q1", count=2, QuotaReserved="False/Pending/no")
    both = (admitted(2, PodsReady="True"), asked)
    assert look(status, in_queue(world, *both)).actions == ()
    taken = dataclasses.replace(world, used={"n3": 2})
    assert only(look(status, in_queue(taken, *both)), DeleteWorkload) == DeleteWorkload(name="gpt-q2", uid="w2")


def test_an_admitted_replacement_lets_the_job_grow_and_the_old_workload_is_removed() -> None:
    status, world = small()
    old = held(count=2, QuotaReserved="True", Admitted="True", Finished="True/WorkloadSliceReplaced")
    decision = look(status, in_queue(world, old, admitted(3, 2, PodsReady="True")))
    assert only(decision, DeleteWorkload).name == "gpt-q1"
    assert decision.status.growth is not None
    assert decision.status.growth.num_nodes == 3


def test_an_edited_spec_is_asked_for_once_no_quota_is_held() -> None:
    decision = look(Status(), in_queue(EMPTY, PENDING), nodes={"min": 1, "max": 2})
    changes = only(decision, PatchWorkload).changes
    assert changes["spec"]["podSets"][0]["count"] <= 2
    assert changes["metadata"]["annotations"]["elastictraining.dev/workload-hash"] == digest(
        {key: value for key, value in changes["spec"].items() if value is not None}
    )


def test_other_pods_need_other_quota_so_the_old_one_is_given_back() -> None:
    template = {"spec": {"containers": [
        {"name": "train", "image": "image", "resources": {"requests": {"cpu": "4"}}},
    ]}}  # fmt: skip
    status = idle()
    patch = only(look(status, in_queue(EMPTY, admitted()), template=template), PatchWorkload)
    assert patch.changes["status"]["admission"] is None


def test_quota_for_fewer_nodes_than_the_job_can_use_now_is_given_back() -> None:
    more = {"min": 2, "max": 3}
    status, world = small()
    assert status.current is not None
    alone = dataclasses.replace(status, current=dataclasses.replace(status.current, num_nodes=1))
    draining = look(alone, in_queue(dataclasses.replace(world, pods=workers(count=1)), admitted(1)), nodes=more)
    assert draining.status.phase == Phase.DRAINING
    waiting = look(idle(), in_queue(EMPTY, admitted(1)), nodes=more)
    assert (waiting.status.phase, waiting.status.reason) == (Phase.WAITING, "Queued")
    assert waiting.status.message == (
        "Workload gpt-q1 is admitted for 1 node, and the job needs 2 or more: asking anew"
    )
    patch = only(waiting, PatchWorkload)
    assert patch.changes["status"]["admission"] is None
    asked = only(look(waiting.status, in_queue(EMPTY, RELEASED), nodes=more), PatchWorkload).changes["spec"]
    assert [(item["count"], item["minCount"]) for item in asked["podSets"]] == [(3, 2)]


def test_a_workload_that_was_replaced_holds_its_quota_no_longer_than_its_successor_has_some() -> None:
    status, world = small()
    asked = held(2, replaces="gpt-q1", count=2)
    assignment = {"assigned": 3, "cluster_queue": "gpus", "conditions": admitted(3).conditions}
    both = (admitted(2, PodsReady="True"), dataclasses.replace(asked, **assignment))
    decision = look(status, in_queue(world, *both))
    assert only(decision, DeleteWorkload) == DeleteWorkload(name="gpt-q1", uid="w1")
    reserved = dataclasses.replace(both[1], conditions=held(QuotaReserved="True").conditions)
    still = look(status, in_queue(world, both[0], reserved))
    assert not any(isinstance(action, DeleteWorkload) for action in still.actions)


def test_an_eviction_is_answered_also_while_a_replacement_waits_for_its_admission_checks() -> None:
    reserved = dataclasses.replace(admitted(3, 2), conditions=held(QuotaReserved="True").conditions)
    draining = look(settled(), in_queue(WORLD, evicted(2), reserved))
    assert draining.status.phase == Phase.DRAINING
    waiting = look(idle(), in_queue(EMPTY, evicted(2), reserved))
    assert only(waiting, PatchWorkload).name == "gpt-q1"
    released = dataclasses.replace(RELEASED, number=1)
    checked = look(waiting.status, in_queue(EMPTY, released, admitted(3, 2)))
    assert only(checked, DeleteWorkload).name == "gpt-q1"
    assert checked.status.attempt == 2


def test_a_running_job_without_quota_has_a_minute_to_be_admitted() -> None:
    pending = dataclasses.replace(PENDING, created_at=NOW - 10)
    assert look(settled(), in_queue(WORLD, pending)).status.phase == Phase.RUNNING
    assert kinds(look(settled(), in_queue(WORLD))) == ["Create"]
    late = dataclasses.replace(PENDING, created_at=NOW - UNADMITTED_SECONDS)
    assert look(settled(), in_queue(WORLD, late)).status.phase == Phase.DRAINING


def test_a_job_that_leaves_its_queue_gives_its_quota_back_and_runs_on() -> None:
    decision = decide(JOB, spec(), settled(), in_queue(WORLD, admitted()), limits=Timeouts(), now=NOW)
    assert kinds(decision) == ["DeleteWorkload"]
    assert decision.status.phase == Phase.RUNNING


def test_kueue_learns_that_the_pods_have_started() -> None:
    patch = only(look(settled(), in_queue(WORLD, admitted())), PatchWorkload)
    found = {item["type"]: item["status"] for item in patch.changes["status"]["conditions"]}
    assert found["PodsReady"] == "True"


def test_a_workload_has_no_part_of_the_pods_that_quota_does_not_depend_on() -> None:
    template = {"spec": {
        "nodeSelector": {"pool": "a"}, "volumes": [{"name": "data", "emptyDir": {}}],
        "containers": [{"name": "train", "image": "image", "env": [{"name": "A", "value": "b"}]}],
    }}  # fmt: skip
    asked = workload_spec(QUEUED, spec(template=template), least=1, most=3, priority=None)
    assert "priorityClassRef" not in asked
    pod = asked["podSets"][0]["template"]["spec"]
    assert pod["nodeSelector"] == {"pool": "a"}
    assert "volumes" not in pod
    assert "env" not in pod["containers"][0]


def test_jobs_are_never_suspended_by_a_label_of_their_own() -> None:
    decision = look(Status(), in_queue(EMPTY, admitted()))
    for manifest in only(decision, LaunchAttempt).manifests:
        assert not any("kueue" in key for key in manifest["metadata"]["labels"])
    assert worker_job().suspended is False


def test_an_eviction_is_answered_also_while_a_flavor_or_a_priority_class_is_missing() -> None:
    for missing in ({"problem": "ResourceFlavor gpu-nodes: none"}, {"refusal": "no class low", "priority": None}):
        assert look(settled(), in_queue(WORLD, evicted(), **missing)).status.phase == Phase.DRAINING


def test_a_missing_priority_class_keeps_a_job_from_asking_but_not_from_recovering() -> None:
    missing: dict[str, Any] = {"refusal": "the job names WorkloadPriorityClass low", "priority": None}
    waiting = look(Status(), in_queue(EMPTY, **missing))
    assert (waiting.status.message, waiting.actions) == (missing["refusal"], ())
    recovering = look(settled(), in_queue(lost_node(), admitted(PodsReady="True"), **missing))
    assert recovering.status.attempt == 2
    status, world = small()
    assert look(status, in_queue(world, admitted(2, PodsReady="True"), **missing)).actions == ()
    assert look(Status(), in_queue(EMPTY, PENDING, **missing)).actions == ()
