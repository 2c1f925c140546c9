"""Which commits the operator releases for removal, and what it does where a checkpoint folder has another owner."""

from __future__ import annotations

import dataclasses
import json
from pathlib import PurePosixPath
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic_operator.api.claim_path import Start
from elastic_operator.api.conditions import Type, find
from elastic_operator.api.serialization import Time, to_wire
from elastic_operator.api.spec import SpecError, parse_spec
from elastic_operator.api.status import Checkpoint, Commit, Current, Phase, Resume, Status
from elastic_operator.api.status_reader import read_status
from elastic_operator.manifests.attempt import JobRef, checkpoint_root, reshard_job, training_job
from elastic_operator.observed import commit_history
from elastic_operator.observed.observation import JobView, LeaseView, NodeView, Observation, PodView
from elastic_operator.observed.pending_starts import Protection
from elastic_operator.observed.timeouts import Timeouts
from elastic_operator.reconcile.actions import DeleteJob, ReleaseCommits, RequestStop
from elastic_operator.reconcile.decide import decide
from reshard.contract import MAX_RELEASED, CommitRef, Env, ExitCode, LeaseKey, ReshardReport, TakeOver, TrainerPhase
from reshard.topology import Topology

NOW = 1_800_000_000.0
GPU = "amd.com/gpu"
JOB = JobRef(name="gpt", namespace="ns", uid="5a1dbeef-77", generation=1)
TOPOLOGY = Topology(dp=2)
SPEC: dict[str, Any] = {
    "accelerator": {"resource": GPU, "perNode": [2]},
    "nodes": {"min": 1, "max": 1},
    "batch": {"globalSamples": 20, "microSamples": 2},
    "checkpoint": {"claimName": "ckpt", "path": "gpt"},
    "template": {"spec": {"containers": [{"name": "train", "image": "image"}]}},
}


def commit(step: int, attempt: int = 1, *, invalid: bool = False) -> Commit:
    uri = f"/checkpoint/gpt/a{attempt}/step-{step:08d}"
    return Commit(uri=uri, step=step, samples=step, attempt=attempt, topology=TOPOLOGY, invalid=invalid)


def history(*items: Commit) -> Checkpoint:
    checkpoint = Checkpoint()
    for item in items:
        checkpoint = commit_history.add(checkpoint, item)
    return checkpoint


def left(checkpoint: Checkpoint) -> list[int]:
    return [item.step for item in checkpoint.history]


@pytest.mark.parametrize(
    ("items", "needed", "kept", "released"),
    [
        ([commit(1), commit(2), commit(3)], [], [3, 2, 1], []),
        ([commit(1), commit(2), commit(3), commit(4)], [], [4, 3, 2], ["a1/step-00000001"]),
        ([commit(1), commit(2), commit(3), commit(4)], [commit(1).uri], [4, 3, 2, 1], []),
        # Damaged ones do not push out those that can be used.
        ([commit(1), *(commit(step, invalid=True) for step in range(2, 6))], [], [5, 4, 1],
         ["a1/step-00000002", "a1/step-00000003"]),
    ],
)  # fmt: skip
def test_what_is_released(items: list[Commit], needed: list[str], kept: list[int], released: list[str]) -> None:
    found = commit_history.release(history(*items), needed=needed)
    assert left(found) == kept
    assert list(found.released) == released


@given(
    st.lists(st.tuples(st.integers(0, 40), st.integers(1, 4), st.booleans()), max_size=30),
    st.integers(0, 29),
    st.booleans(),
)
def test_the_newest_usable_commits_and_those_in_use_are_never_released(
    seen: list[tuple[int, int, bool]], used: int, read_by_others: bool
) -> None:
    checkpoint = Checkpoint()
    needed = {commit(*seen[used][:2]).uri} if used < len(seen) else set()
    ever: set[str] = set()
    for step, attempt, damaged in seen:
        before = set(checkpoint.released)
        checkpoint = commit_history.add(checkpoint, commit(step, attempt))
        if damaged:
            checkpoint = commit_history.invalidate(checkpoint, commit(step, attempt).uri, "damaged")
        checkpoint = commit_history.release(checkpoint, needed=needed, read_by_others=read_by_others)
        ever.add(commit_history.parse_commit_name(commit(step, attempt).uri))
        assert set(checkpoint.released) - before <= ever
        assert not {commit_history.parse_commit_name(item.uri) for item in checkpoint.history} & set(
            checkpoint.released
        )
        assert not {commit_history.parse_commit_name(uri) for uri in needed} & set(checkpoint.released)
        assert len(checkpoint.released) <= MAX_RELEASED
        assert not (read_by_others and checkpoint.released)


def test_a_released_commit_is_never_taken_up_again() -> None:
    checkpoint = commit_history.release(history(*map(commit, range(1, 5))), needed=())
    assert commit_history.add(checkpoint, commit(1)) == checkpoint


def test_the_second_of_two_commits_of_one_step_is_the_newer_one() -> None:
    second = dataclasses.replace(commit(7), uri=commit(7).uri + ".2")
    assert history(commit(7), second).uri == second.uri


@pytest.mark.parametrize("text", ["", "{", "{}", "3", "[" * 9000, "[1]", json.dumps(["x" * 99999]), "null"])
def test_an_answer_about_removed_commits_that_makes_no_sense_is_none(text: str) -> None:
    assert LeaseView(name="l", attempt=1, annotations={LeaseKey.REMOVED: text}).removed == ()


def running(checkpoint: Checkpoint, **resume: Any) -> Status:
    return Status(
        phase=Phase.RUNNING,
        attempt=2,
        checkpoint=checkpoint,
        start_time=Time(NOW - 500),
        current=Current(
            topology=TOPOLOGY, num_nodes=1, gpus_per_node=2, resume=Resume(**resume), launch_time=Time(NOW - 100),
            plan_time=Time(NOW - 101), job_uid="j2", schedule_time=Time(NOW - 90), first_step_time=Time(NOW - 80),
        ),
    )  # fmt: skip


def world(**notes: str) -> Observation:
    annotations = {LeaseKey.PHASE: TrainerPhase.TRAINING, LeaseKey.STEP: "12", **notes}
    pod = PodView(
        name="gpt-a2-0", uid="p", attempt=2, role="worker", node="n1", index=0, phase="Running", requests={GPU: 2},
        created_at=NOW - 100,
    )  # fmt: skip
    return Observation(
        nodes={"n1": NodeView(name="n1", ready="True", allocatable={GPU: 2}, capacity={GPU: 2})},
        pods=(pod,),
        jobs=(JobView(name="gpt-a2", uid="j2", attempt=2, role="worker"),),
        leases={2: LeaseView(name="gpt-a2", attempt=2, renewed_at=NOW - 1, annotations=annotations)},
    )


def look(status: Status, seen: Observation, **checkpoint: Any) -> Any:
    spec = parse_spec({**SPEC, "checkpoint": {**SPEC["checkpoint"], **checkpoint}})
    return decide(JOB, spec, status, seen, limits=Timeouts(), now=NOW)


def hashed(status: Status) -> Status:
    from elastic_operator.api.spec import spec_hash

    assert status.current is not None
    current = dataclasses.replace(status.current, spec_hash=spec_hash(parse_spec(SPEC)))
    return dataclasses.replace(status, current=current)


def test_a_damaged_entry_of_the_stored_history_does_not_lose_what_is_released() -> None:
    checkpoint = commit_history.release(history(*map(commit, range(1, 6))), needed=())
    wire = to_wire(hashed(running(checkpoint)))
    wire["checkpoint"]["history"][0]["samples"] = "many"
    found = read_status(wire).status.checkpoint
    assert (found.step, left(found)) == (4, [4, 3])
    assert found.released == checkpoint.released


def test_a_new_commit_releases_the_oldest_on_the_lease_and_the_answer_ends_it() -> None:
    status = hashed(running(history(*map(commit, (1, 2, 3))), uri=commit(3).uri, source=commit(3).uri, step=3))
    ref = CommitRef(
        uri="/checkpoint/gpt/a2/step-00000012", step=12, samples=12, attempt=2, topology=TOPOLOGY.to_dict(), num_bytes=1
    )
    decision = look(status, world(**{LeaseKey.COMMIT: ref.to_json()}))
    assert decision.status.checkpoint.released == ("a1/step-00000001",)
    assert decision.actions == (ReleaseCommits(lease="gpt-a2", names=("a1/step-00000001",)),)
    told = {LeaseKey.COMMIT: ref.to_json(), LeaseKey.RELEASED: '["a1/step-00000001"]'}
    again = look(decision.status, world(**told))
    assert again.actions == ()
    done = look(decision.status, world(**told, **{LeaseKey.REMOVED: '["a1/step-00000001"]'}))
    assert done.status.checkpoint.released == ()
    assert done.actions == (ReleaseCommits(lease="gpt-a2", names=()),)


def test_nothing_is_released_while_another_job_is_about_to_start_from_here() -> None:
    status = hashed(running(history(*map(commit, range(1, 6)))))
    seen = dataclasses.replace(world(), starts=frozenset({Start(job="next", claim="ckpt", folder="gpt")}))
    assert look(status, seen).status.checkpoint.released == ()
    assert len(look(status, world()).status.checkpoint.released) == 2


def test_names_that_were_released_before_are_not_handed_out_while_another_job_starts_from_here() -> None:
    status = hashed(running(commit_history.release(history(*map(commit, range(1, 6))), needed=())))
    waiting = Start(job="next", claim="ckpt", folder="gpt/a1/step-00000001")
    for starts in (frozenset({waiting}), None):
        seen = dataclasses.replace(world(), starts=starts)
        assert look(status, seen).actions == ()
        told = dataclasses.replace(world(**{LeaseKey.RELEASED: '["a1/step-00000001"]'}), starts=starts)
        assert look(status, told).actions == (ReleaseCommits(lease="gpt-a2", names=()),)


def test_a_job_whose_folder_belongs_to_another_fails_with_a_condition_and_stops() -> None:
    refusal = "/checkpoint/gpt: belongs to job ns/gpt (UID 1), expected job ns/gpt (UID 2)"
    decision = look(hashed(running(Checkpoint())), world(**{LeaseKey.OWNER_ERROR: refusal}))
    assert (decision.status.phase, decision.status.reason) == (Phase.FAILED, "CheckpointNotOwned")
    condition = find(decision.status.conditions, Type.CHECKPOINT_OWNED)
    assert condition is not None
    assert (condition.status, condition.reason) == ("False", "OwnedByAnotherJob")
    assert refusal in condition.message
    assert "kubectl etj retry gpt" in condition.message
    assert [type(action) for action in decision.actions][:2] == [RequestStop, DeleteJob]
    assert not decision.status.restart_budget.used


def test_a_job_that_trains_withdraws_what_was_said_of_another_owner_of_its_folder() -> None:
    status = hashed(running(Checkpoint()))
    assert status.current is not None
    refused = look(status, world(**{LeaseKey.OWNER_ERROR: "belongs to job ns/x (UID 1)"})).status
    before = dataclasses.replace(status, current=dataclasses.replace(status.current, first_step_time=None))
    assert find(look(before, world()).status.conditions, Type.CHECKPOINT_OWNED) is None
    before = dataclasses.replace(before, conditions=refused.conditions)
    condition = find(look(before, world()).status.conditions, Type.CHECKPOINT_OWNED)
    assert condition is not None
    assert (condition.status, condition.reason) == ("True", "Claimed")
    assert condition.message == "attempt 2 writes to /checkpoint/gpt"


def test_a_conversion_into_a_folder_of_another_job_fails_the_job() -> None:
    status = hashed(running(history(commit(3))))
    assert status.current is not None
    resume = Resume(uri="/checkpoint/gpt/a2/step-00000003", source=commit(3).uri, step=3, ready=False)
    waiting = dataclasses.replace(status, current=dataclasses.replace(status.current, resume=resume, launch_time=None))
    report = ReshardReport(ok=False, exit_code=int(ExitCode.NOT_OWNER), message="belongs to job ns/x (UID 1)")
    pod = PodView(
        name="r", uid="r", attempt=2, role="reshard", node="n1", phase="Failed", termination_message=report.to_json()
    )
    job = JobView(name="gpt-a2-reshard", uid="r2", attempt=2, role="reshard", failed=True, failed_reason="Backoff")
    seen = dataclasses.replace(world(), pods=(pod,), jobs=(job,), leases={})
    decision = look(waiting, seen)
    assert (decision.status.phase, decision.status.reason) == (Phase.FAILED, "CheckpointNotOwned")


def environment(manifest: dict[str, Any]) -> dict[str, str]:
    return {
        item["name"]: item.get("value", "") for item in manifest["spec"]["template"]["spec"]["containers"][0]["env"]
    }


@pytest.mark.parametrize(
    ("mount", "path", "root"),
    [
        ("/checkpoint", "gpt", "/checkpoint/gpt"),
        ("/checkpoint", "./gpt", "/checkpoint/gpt"),
        ("/checkpoint", "a/./b", "/checkpoint/a/b"),
        ("/data//ckpt/", "gpt", "/data/ckpt/gpt"),
        ("/data/./.ckpt", ".", "/data/.ckpt"),
        ("/", "gpt", "/gpt"),
    ],
)
def test_the_checkpoint_root_is_written_as_the_trainer_writes_it(mount: str, path: str, root: str) -> None:
    container = {"name": "train", "image": "i", "volumeMounts": [{"name": "c", "mountPath": mount}]}
    volumes = [{"name": "c", "persistentVolumeClaim": {"claimName": "ckpt"}}]
    template = {"spec": {"containers": [container], "volumes": volumes}}
    spec = parse_spec({**SPEC, "checkpoint": {"claimName": "ckpt", "path": path}, "template": template})
    assert checkpoint_root(spec) == root
    assert str(PurePosixPath(root)) == root


def test_a_start_from_the_jobs_own_attempts_is_refused_however_it_is_written() -> None:
    checkpoint = {"claimName": "ckpt", "path": "gpt", "startFrom": "./gpt/a1/step-00000001"}
    with pytest.raises(SpecError, match="writes its own attempts"):
        parse_spec({**SPEC, "checkpoint": checkpoint})


@pytest.mark.parametrize("take_over", list(TakeOver))
def test_training_and_reshard_pods_know_whose_folder_they_may_write(take_over: TakeOver) -> None:
    spec = parse_spec({**SPEC, "checkpoint": {**SPEC["checkpoint"], "takeOver": take_over}})
    current = Current(topology=TOPOLOGY, num_nodes=1, gpus_per_node=2, resume=Resume(uri="/c", source="/s"))
    for manifest in (training_job(JOB, spec, 2, current, 5.0), reshard_job(JOB, spec, 2, current)):
        found = environment(manifest)
        assert (found[Env.JOB_UID], found[Env.CHECKPOINT_ROOT]) == (JOB.uid, "/checkpoint/gpt")
        assert found[Env.TAKE_OVER] == take_over


def test_a_job_that_takes_a_folder_over_converts_into_names_that_the_former_owner_cannot_have_used() -> None:
    resume = commit_history.choose_resume(
        history(commit(3)), attempt=2, topology=Topology(dp=4), root="/checkpoint/gpt", mark=JOB.uid[:8]
    )
    assert resume.uri == "/checkpoint/gpt/a2/step-00000003-5a1dbeef"
    assert commit_history.parse_commit_name(resume.uri) == "a2/step-00000003-5a1dbeef"


def test_a_pinned_commit_is_not_released_until_the_pin_is_removed() -> None:
    pin = frozenset({"a1/step-00000001"})
    items = history(*map(commit, range(1, 7)))
    found = commit_history.release(items, needed=(), pinned=pin)
    assert (list(found.withheld), list(found.released)) == (
        ["a1/step-00000001"],
        ["a1/step-00000002", "a1/step-00000003"],
    )
    assert "a1/step-00000001" in commit_history.release(found, needed=()).released


def test_a_pin_withdraws_a_release_that_the_training_has_not_carried_out() -> None:
    released = commit_history.release(history(*map(commit, range(1, 5))), needed=())
    assert list(released.released) == ["a1/step-00000001"]
    withheld = commit_history.find_withheld(released, Protection(pinned=frozenset({"a1/step-00000001"})))
    assert withheld == {"a1/step-00000001"}


@pytest.mark.parametrize(
    ("pins", "reason"),
    [
        ([], None),
        (["a1/step-00000004"], None),  # it is in the history, which needs no pin
        (["a1/step-00000001"], "Pinned"),
        (["a7/step-00000001"], "PinUnknown"),
    ],
)
def test_a_condition_says_what_is_pinned(pins: list[str], reason: str | None) -> None:
    status = hashed(running(history(*map(commit, range(1, 5)))))
    decision = look(status, world(), pinned=pins)
    found = decision.status
    assert "a1/step-00000001" in (found.checkpoint.withheld if reason == "Pinned" else found.checkpoint.released)
    assert ReleaseCommits(lease="gpt-a2", names=found.checkpoint.released) in decision.actions or reason == "Pinned"
    condition = find(found.conditions, Type.COMMITS_RELEASED)
    assert (condition.reason if condition is not None else None) == reason
    assert condition is None or all(name in condition.message for name in pins)


@pytest.mark.parametrize(
    "name", ["step-00000001", "/checkpoint/gpt/a1/step-00000001", "a1/step-1/..", "a1/COMMIT", "a1/step-1\n"]
)
def test_a_pin_that_names_no_commit_is_refused(name: str) -> None:
    with pytest.raises(SpecError, match="pinned"):
        parse_spec({**SPEC, "checkpoint": {**SPEC["checkpoint"], "pinned": [name]}})
