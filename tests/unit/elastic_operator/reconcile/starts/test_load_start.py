"""Starts of DCP jobs from commits of another topology: at once (mode Load), or after a conversion where that pays."""

from __future__ import annotations

import copy
import dataclasses
from typing import Any

import pytest

from elastic_operator.api.conditions import Type, find
from elastic_operator.api.serialization import to_wire
from elastic_operator.api.spec import parse_spec, spec_hash
from elastic_operator.api.status import Checkpoint, Commit, Phase, Status
from elastic_operator.api.status_reader import read_status
from elastic_operator.observed import commit_history
from elastic_operator.observed.observation import JobView, Observation, PodView
from elastic_operator.observed.timeouts import Timeouts
from elastic_operator.reconcile.actions import Create, Decision, DeleteJob, LaunchAttempt
from elastic_operator.reconcile.decide import decide
from reshard.cli.options import parse
from reshard.contract import DCP, MANIFEST_VERSIONS, CommitRef, ExitCode, TrainerPhase, VirtualLoader
from reshard.topology import Topology
from tests.unit.elastic_operator.reconcile.test_decide_phases import (
    JOB,
    NOW,
    SPEC,
    WORLD,
    kinds,
    lease,
    lost_node,
    nodes,
    resharded,
    settled,
    training,
    worker_job,
    workers,
)

# Three nodes run pp=3, two run dp=4: a conversion of a large commit pays, because each tensor is one chunk per stage.
BIG, SMALL = Topology(pp=3, dp=2, zero=3), Topology(dp=4, zero=3)
ONE_CHUNK = Topology(pp=6, dp=1, zero=3)
COMMIT = Commit(
    uri="/checkpoint/gpt/a1/step-00000010", step=10, samples=200, attempt=1, topology=BIG, num_bytes=5000, format=DCP
)
OLDER = dataclasses.replace(COMMIT, uri="/checkpoint/gpt/a1/step-00000005", step=5)
PAYING = dataclasses.replace(COMMIT, topology=ONE_CHUNK, num_bytes=10**12)
"""A commit whose conversion pays."""

DCP_SPEC: dict[str, Any] = {
    **SPEC,
    "parallelism": {
        "strategy": "Ranked",
        "topologies": [{"pipeline": 3, "data": 2}, {"data": 4}],
    },
    "batch": {"globalSamples": 24, "microSamples": 2},
    "checkpoint": {**SPEC["checkpoint"], "format": "DCP"},
}
AFTER = Observation(nodes=lost_node().nodes)


def spec(**changes: Any) -> Any:
    return parse_spec({**copy.deepcopy(DCP_SPEC), **changes})


def look(status: Status, world: Observation, *, now: float = NOW, **changes: Any) -> Decision:
    return decide(JOB, spec(**changes), status, world, limits=Timeouts(), now=now)


def running(*commits: Commit) -> Status:
    """The status of a DCP job that has run as attempt 1 on three nodes for a while."""
    before = settled()
    assert before.current is not None
    newest, *_ = commits = commits or (COMMIT, OLDER)
    checkpoint = Checkpoint(
        history=commits, uri=newest.uri, step=newest.step, topology=newest.topology, attempt=newest.attempt
    )
    current = dataclasses.replace(before.current, topology=BIG, spec_hash=spec_hash(spec()))
    return dataclasses.replace(before, checkpoint=checkpoint, current=current)


def arguments(decision: Decision) -> list[str]:
    (create,) = [action for action in decision.actions if isinstance(action, Create)]
    return list(create.manifest["spec"]["template"]["spec"]["containers"][0]["args"])


TABLE = [
    # commit, spec.reshard, start mode, reason
    pytest.param(COMMIT, {}, "Load", "ranks read 2.00 times the bytes that they need, about", id="auto-loads"),
    pytest.param(
        dataclasses.replace(COMMIT, num_bytes=0), {}, "Load", "size of the commit is not known", id="unknown-size"
    ),
    pytest.param(PAYING, {}, "Reshard", "ranks read 4.00 times", id="auto-converts-where-it-pays"),
    pytest.param(
        dataclasses.replace(PAYING, num_bytes=0), {}, "Load", "is not known", id="unknown-size-never-converts"
    ),
    pytest.param(PAYING, {"mode": "Load"}, "Load", "spec.reshard.mode is Load", id="asked-to-load"),
    pytest.param(COMMIT, {"mode": "Materialize"}, "Reshard", "mode is Materialize", id="asked-to-convert"),
    pytest.param(
        dataclasses.replace(COMMIT, format="deepspeed"), {}, "Reshard", "the commit is not DCP", id="deepspeed"
    ),
    pytest.param(
        dataclasses.replace(COMMIT, format=""), {"mode": "Load"}, "Reshard", "format of the commit is not DCP",
        id="written-by-an-older-trainer",
    ),
]  # fmt: skip


@pytest.mark.parametrize(("commit", "reshard", "mode", "reason"), TABLE)
def test_how_the_next_attempt_starts(commit: Commit, reshard: dict[str, Any], mode: str, reason: str) -> None:
    decision = look(running(commit), lost_node(), reshard=reshard)
    status = decision.status
    assert status.current is not None
    assert status.plan is not None
    assert (status.current.topology, status.current.resume.mode) == (SMALL, mode)
    assert f"Start mode {mode}: " in status.plan.reason
    assert reason in status.plan.reason
    assert status.recoveries[-1].start_mode == mode
    (planned,) = [event.message for event in decision.events if event.reason == "Planned"]
    assert reason in planned
    assert read_status(to_wire(status)).status == status
    if mode == "Load":
        assert (status.current.resume.uri, status.current.resume.source) == (commit.uri, commit.uri)
        assert status.current.resume.ready
        assert status.reshard is None
        assert "Create" not in kinds(decision), "no reshard Job"
        assert status.phase == Phase.STOPPING
    else:
        assert status.phase == Phase.RESHARDING
        assert (status.current.resume.uri, status.current.resume.source) == (
            "/checkpoint/gpt/a2/step-00000010",
            commit.uri,
        )


def test_a_loaded_attempt_is_launched_as_soon_as_the_old_pods_are_gone() -> None:
    stopping = look(running(), lost_node()).status
    decision = look(stopping, AFTER)
    (launch,) = decision.actions
    assert isinstance(launch, LaunchAttempt)
    container = launch.manifests[-1]["spec"]["template"]["spec"]["containers"][0]
    env = {item["name"]: item.get("value") for item in container["env"]}
    assert env["ETJ_RESUME"] == COMMIT.uri
    assert Topology.from_json(env["ETJ_TOPOLOGY"]) == SMALL
    assert "ETJ_SCRATCH" not in env, "there are no virtual commits, so no memory is reserved for them"
    assert [event.reason for event in decision.events] == ["Launched"]
    assert find(decision.status.conditions, Type.RESUMED).message == (  # type: ignore[union-attr]
        "step 10 of attempt 1 (tp=1,pp=3,dp=2,zero=3), loaded as tp=1,pp=1,dp=4,zero=3"
    )
    assert commit_history.find_needed(decision.status) == {COMMIT.uri}, "a direct start needs no more"


def test_the_same_topology_starts_as_it_is() -> None:
    pods = (*workers()[:2], dataclasses.replace(workers()[2], phase="Failed", exit_code=1))
    status = look(running(), dataclasses.replace(WORLD, pods=pods)).status
    assert status.current is not None
    assert (status.current.topology, status.current.resume.mode) == (BIG, "AsIs")
    assert status.plan is not None
    assert "Start mode" not in status.plan.reason


def test_a_rank_that_refuses_the_commit_makes_the_next_attempt_load_the_one_before() -> None:
    launched = look(look(running(), lost_node()).status, AFTER).status
    refused = Observation(
        nodes=AFTER.nodes, pods=workers(2, count=2), jobs=(worker_job(2),),
        leases=lease(2, PHASE=TrainerPhase.RESTORING, RESUME_ERROR="__0_0.distcp: CRC-32 differs"),
    )  # fmt: skip
    decision = look(launched, refused)
    status = decision.status
    assert status.attempt == 3
    assert status.current is not None
    assert (status.current.resume.uri, status.current.resume.mode) == (OLDER.uri, "Load")
    assert [item.uri for item in status.checkpoint.history if item.invalid] == [COMMIT.uri]
    assert status.recoveries[-1].start_mode == "Load"


OLD_TRAINER = VirtualLoader(manifests=MANIFEST_VERSIONS, memory_bytes=1 << 36)
NEW_TRAINER = dataclasses.replace(OLD_TRAINER, formats=(DCP,))


@pytest.mark.parametrize(("loader", "mode"), [(OLD_TRAINER, "Reshard"), (NEW_TRAINER, "Load")])
def test_a_training_that_says_that_it_loads_its_own_topology_only_gets_a_conversion(
    loader: VirtualLoader, mode: str
) -> None:
    told = training(LOADER=loader.to_json())
    heard = look(running(), dataclasses.replace(WORLD, leases=told)).status
    status = look(heard, dataclasses.replace(lost_node(), leases=told)).status
    assert status.current is not None
    assert status.plan is not None
    assert status.current.resume.mode == mode
    assert ("accepts no commit of another topology" in status.plan.reason) is (mode == "Reshard")


def test_a_training_that_refuses_the_topology_for_its_age_costs_no_commit() -> None:
    """Its image was set back by an edit of the spec, so the operator could not know."""
    launched = look(look(running(), lost_node()).status, AFTER).status
    refused = Observation(
        nodes=AFTER.nodes, pods=workers(2, count=2), jobs=(worker_job(2),),
        leases=lease(
            2, PHASE=TrainerPhase.RESTORING, LOADER=OLD_TRAINER.to_json(),
            RESUME_ERROR="it is laid out for tp=1,pp=3,dp=2,zero=3, this attempt runs at dp=4: reshard it",
        ),
    )  # fmt: skip
    status = look(launched, refused).status
    assert status.current is not None
    assert (status.attempt, status.current.resume.source, status.current.resume.mode) == (3, COMMIT.uri, "Reshard")
    assert not any(item.invalid for item in status.checkpoint.history)


def test_growing_loads_the_commit_of_the_drain() -> None:
    status = running(dataclasses.replace(COMMIT, topology=SMALL))
    assert status.current is not None
    status = dataclasses.replace(status, current=dataclasses.replace(status.current, topology=SMALL, num_nodes=2))
    spread = nodes("n1", "n2", "n3", ready_since=NOW - 9999)
    ref = CommitRef(
        uri="/checkpoint/gpt/a1/step-00000012", step=12, samples=240, attempt=1, topology=SMALL.to_dict(), format=DCP
    )
    world = Observation(
        nodes=spread, pods=workers(count=2), jobs=(worker_job(),), leases=training(COMMIT=ref.to_json())
    )
    at_once = {"recovery": {"scaleUpStableSeconds": 0}}
    draining = look(status, world, **at_once).status
    assert draining.drain is not None
    ended = dataclasses.replace(
        world,
        pods=workers(count=2, phase="Failed", exit_code=75),
        leases=training(COMMIT=ref.to_json(), PHASE=TrainerPhase.DRAINED),
    )
    status = look(draining, ended, **at_once).status
    assert status.current is not None
    assert (status.current.topology, status.current.resume.mode, status.current.resume.step) == (BIG, "Load", 12)
    assert status.recoveries[-1].cause == "CapacityReturned"


def converting(**changes: Any) -> Status:
    return look(running(PAYING, OLDER), lost_node(), **changes).status


def test_a_conversion_of_a_dcp_commit_has_arguments_that_reshard_accepts() -> None:
    words = arguments(look(running(PAYING, OLDER), lost_node()))
    options = parse(words)
    assert words[:5] == ["run", COMMIT.uri, "/checkpoint/gpt/a2/step-00000010", "--to", str(SMALL)]
    assert "--require-commit" in words
    assert not {"--mode", "--loader"} & set(words), "there is no virtual DCP commit"
    assert options.verb == "run"


def test_the_result_of_a_conversion_is_a_dcp_commit_too() -> None:
    job, pod = resharded()
    decision = look(converting(), dataclasses.replace(AFTER, pods=(pod,), jobs=(job,)))
    assert kinds(decision) == ["LaunchAttempt"]
    newest = decision.status.checkpoint.history[0]
    assert (newest.writer, newest.format, newest.topology) == ("reshard", DCP, SMALL)
    assert decision.status.current.resume.mode == "Reshard"  # type: ignore[union-attr]


def failed_conversion(code: ExitCode = ExitCode.UNSUPPORTED) -> Observation:
    job, pod = resharded(ok=False, exit_code=int(code), message="because")
    return dataclasses.replace(AFTER, pods=(pod,), jobs=(job,))


def test_a_conversion_that_fails_for_good_is_left_out_in_mode_auto() -> None:
    decision = look(converting(), failed_conversion())
    status = decision.status
    assert status.attempt == 2
    assert status.pinned is None
    assert status.current is not None
    assert (status.current.resume.uri, status.current.resume.mode, status.current.resume.ready) == (
        COMMIT.uri, "Load", True,
    )  # fmt: skip
    assert status.recoveries[-1].start_mode == "Load"
    assert kinds(decision)[-1] == "LaunchAttempt"
    assert DeleteJob(name="gpt-a2-reshard", uid="r2") in decision.actions
    assert [event.reason for event in decision.events] == ["ReshardFailed", "LoadsCommit", "Launched"]


def test_a_conversion_that_was_asked_for_and_fails_keeps_the_old_topology() -> None:
    mode = {"reshard": {"mode": "Materialize"}}
    status = look(converting(**mode), failed_conversion(), **mode).status
    assert (status.phase, status.pinned) == (Phase.WAITING, ONE_CHUNK)


def test_a_damaged_source_of_a_conversion_falls_back_to_the_commit_before() -> None:
    status = look(converting(), failed_conversion(ExitCode.SOURCE_INVALID)).status
    assert status.current is not None
    assert (status.attempt, status.current.resume.uri, status.current.resume.mode) == (3, OLDER.uri, "Load")


def test_a_conversion_that_finds_no_room_is_left_out() -> None:
    status = converting()
    job = JobView(name="gpt-a2-reshard", uid="r2", attempt=2, role="reshard", created_at=NOW)
    pod = PodView(
        name="gpt-a2-reshard-x", uid="rp", attempt=2, role="reshard", phase="Pending", created_at=NOW,
        unschedulable="0/3 nodes are available: 3 Insufficient cpu.", unschedulable_since=NOW,
    )  # fmt: skip
    world = dataclasses.replace(AFTER, pods=(pod,), jobs=(job,))
    decision = look(status, world, now=NOW + Timeouts().unschedulable_seconds + 1)
    assert decision.status.current.resume.mode == "Load"  # type: ignore[union-attr]
    assert DeleteJob(name="gpt-a2-reshard", uid="r2") in decision.actions


def test_an_edit_to_load_ends_a_conversion_that_waits() -> None:
    job = JobView(name="gpt-a2-reshard", uid="r2", attempt=2, role="reshard")
    world = dataclasses.replace(AFTER, jobs=(job,))
    assert look(converting(), world).status.phase == Phase.RESHARDING
    decision = look(converting(), world, reshard={"mode": "Load"})
    assert decision.status.current.resume.mode == "Load"  # type: ignore[union-attr]
    assert {"DeleteJob", "LaunchAttempt"} <= set(kinds(decision))


def test_a_converted_commit_that_could_not_be_loaded_is_not_made_again() -> None:
    bad = Commit(
        uri="/checkpoint/gpt/a2/step-00000010", step=10, samples=200, attempt=2, topology=SMALL, writer="reshard",
        format=DCP, invalid=True,
    )  # fmt: skip
    status = look(running(PAYING, bad, OLDER), lost_node()).status
    assert status.current is not None
    assert (status.current.resume.uri, status.current.resume.mode) == (COMMIT.uri, "Load")
    assert "could not be loaded" in status.plan.reason  # type: ignore[union-attr]


@pytest.mark.parametrize("mode", ["Auto", "Load"])
def test_a_start_from_a_checkpoint_of_others_is_copied_as_dcp(mode: str) -> None:
    start = {"checkpoint": {**DCP_SPEC["checkpoint"], "startFrom": "titan/step-1000"}, "reshard": {"mode": mode}}
    world = Observation(nodes=nodes("n1", "n2", "n3"))
    decision = look(Status(), world, **start)
    words = arguments(decision)
    assert decision.status.current.resume.mode == "Reshard"  # type: ignore[union-attr]
    assert words[words.index("--format") + 1] == "dcp"
    parse(words)
    job, pod = resharded(source="/checkpoint/titan/step-1000", step=1000)
    job = dataclasses.replace(job, name="gpt-a1-reshard", attempt=1)
    done = dataclasses.replace(world, jobs=(job,), pods=(dataclasses.replace(pod, attempt=1),))
    started = look(decision.status, done, **start).status
    assert started.started_from is not None
    assert started.started_from.step == 1000
    assert started.checkpoint.history[0].format == DCP
