"""What must hold after every pass of the operator and every second of the rest of the world."""

from __future__ import annotations

import json
from typing import Any

from elastic_operator.api.status import Phase, Status
from elastic_operator.observed.observation import attempt_of
from reshard.contract import Env, TakeOver
from tests.property.cluster_model import kueue
from tests.property.cluster_model.cluster import UID, Cluster, owner_of, role_of
from tests.property.cluster_model.control_plane import is_making_pods
from tests.property.cluster_model.operator_process import deletion_time
from tests.property.test_pod_reports import CHECKER, MAX_BYTES

STUCK_SECONDS = 59.0
"""spec.recovery.forceDeleteSeconds, less the rounding of a deletionTimestamp."""

NAMED_ENDS = {
    Phase.COMPLETE: {"TrainingComplete"},
    Phase.FAILED: {
        "RestartBudgetExceeded",
        "PodFailurePolicy",
        "CheckpointNotOwned",
        "CommitsRefused",
        "CommitUnknown",
        "DeadlineExceeded",
        "ReshardFailed",
    },
}


def check_world(cluster: Cluster) -> None:
    """Check the cluster: one attempt runs, one may publish, one Job makes pods, and no commit that counts is gone."""
    running = {
        process.attempt
        for pod, process in cluster.own_workers()
        if not (
            cluster.is_fenced_off(process.node)
            or is_given_up(cluster, pod)
            or _is_ending(cluster, pod)
            or _is_left_behind(cluster, pod)
        )
    }
    assert len(running) <= 1, f"attempts {running} run at the same time"
    publishing = {
        process.attempt
        for process in cluster.processes.values()
        if process.role == "worker" and process.owner == UID and _has_lease(cluster, process.job, process.lease_uid)
    }
    assert len(publishing) <= 1, f"attempts {publishing} may publish commits at the same time"
    making = [job["metadata"]["name"] for job in cluster.jobs() if owner_of(job) == UID and is_making_pods(job)]
    assert len(making) <= 1, f"Jobs {making} may create pods at the same time"
    missing = sorted(uri for uri in find_references(cluster) if uri not in cluster.commits)
    assert not missing, f"commits that something refers to are gone: {missing}"


def _has_lease(cluster: Cluster, name: str, uid: str) -> bool:
    lease = cluster.objects.get(("Lease", name))
    return lease is not None and uid in ("", lease["metadata"]["uid"]) and owner_of(lease) == UID


def is_given_up(cluster: Cluster, pod: dict[str, Any]) -> bool:
    """Return whether a pod does not end although it had its time, and can no longer publish anything."""
    meta, deleted_at = pod["metadata"], deletion_time(pod)
    has_had_its_time = deleted_at is not None and cluster.now - deleted_at >= STUCK_SECONDS
    return meta["uid"] in cluster.stuck and has_had_its_time and ("Lease", meta["ownerJob"]) not in cluster.objects


def _is_left_behind(cluster: Cluster, pod: dict[str, Any]) -> bool:
    """Return whether a pod was on a lost node when its successor was launched, and cannot end now that it is back."""
    meta = pod["metadata"]
    is_fenced = ("Lease", meta["ownerJob"]) not in cluster.objects
    return is_fenced and meta["uid"] in cluster.left_behind & cluster.stuck


def _is_ending(cluster: Cluster, pod: dict[str, Any]) -> bool:
    """Return whether the API server tells the kubelet to kill a pod's process at once."""
    deleted_at = deletion_time(pod)
    return deleted_at is not None and deleted_at <= cluster.now and pod["metadata"]["uid"] not in cluster.stuck


def find_references(cluster: Cluster) -> set[str]:
    """Return the commits that the status, a conversion, or an attempt that restores and is not replaced refers to."""
    status = cluster.status
    found = {item["uri"] for item in status.get("checkpoint", {}).get("history", ())}
    current = status.get("current") or {}
    resume = current.get("resume") or {}
    if resume.get("uri"):
        found.add(resume["uri"] if resume.get("ready") or current.get("launchTime") else resume["source"])
    if resume.get("external") and not resume.get("ready"):
        found.discard(resume["source"])  # a folder in which `reshard` looks for a commit
    for process in cluster.processes.values():
        is_restoring = process.role == "worker" and process.index == 0 and process.step is None
        if is_restoring and process.owner == UID and _has_lease(cluster, process.job, process.lease_uid):
            found.add(process.env.get(Env.RESUME, ""))
    for job in cluster.jobs():
        if role_of(job) == "reshard" and not job["status"].get("conditions"):
            found.add(job["spec"]["template"]["spec"]["containers"][0]["args"][1])
    return found - {"", "/checkpoint/gpt"}


def check_launch(cluster: Cluster, job: dict[str, Any]) -> None:
    """Check a training Job that is about to be created."""
    attempt = attempt_of(job["metadata"])
    assert not cluster.launched or attempt >= cluster.launched[-1], "no older attempt is launched again"
    lost = {process.uid for _, process in cluster.own_workers() if cluster.is_fenced_off(process.node)}
    cluster.left_behind |= lost
    cluster.effects["an attempt is launched beside processes of a lost node"] += bool(lost)
    others = [(pod, process) for pod, process in cluster.own_workers() if not cluster.is_fenced_off(process.node)]
    unexpected = [pod["metadata"]["name"] for pod, _ in others if not is_given_up(cluster, pod)]
    cluster.effects["an attempt is launched beside a pod that does not end"] += bool(others)
    assert not unexpected, f"attempt {attempt} is launched while {unexpected} can run"
    terms = job["spec"]["template"]["spec"].get("affinity", {}).get("nodeAffinity", {})
    assert all(process.node in str(terms) for _, process in others), "where one does not end, none begins"
    assert not any(owner_of(item) not in (UID, "") for item in cluster.jobs()) or not _predecessor_runs(cluster)
    env = {item["name"]: item.get("value", "") for item in job["spec"]["template"]["spec"]["containers"][0]["env"]}
    resume = env[Env.RESUME]
    _check_start(cluster, attempt, resume)
    assert resume or not cluster.external, "a job that starts from a checkpoint never begins from nothing"
    if cluster.spec["checkpoint"]["takeOver"] == TakeOver.RESUME:
        assert resume or cluster.taken == "", "a job that takes a folder with commits over never begins from nothing"
    if resume:
        assert resume != cluster.external, "others' files are copied before they are used"
        assert resume in cluster.commits, "an attempt resumes from a commit that exists"
        commit = cluster.commits[resume]
        assert commit.attempt <= attempt
        is_loadable = commit.format == "dcp" and cluster.spec["reshard"].get("mode") != "Materialize"
        assert commit.topology == json.loads(env[Env.TOPOLOGY]) or is_loadable, "in its own topology, or as DCP"
    if cluster.quota is not None:
        admitted = [item.assigned or 0 for item in kueue.views(cluster) if item.has_quota]
        assert int(env["PET_NNODES"]) <= max(admitted, default=0), "an attempt stays within its quota"
    cluster.launched.append(attempt)


def _check_start(cluster: Cluster, attempt: int, resume: str) -> None:
    """Check that no attempt begins anew, or passes over a commit that nobody refused, unless the user said so."""
    commit = cluster.commits.get(resume)
    is_beginning = commit is None or resume.rpartition("/")[2].startswith("step-start")
    if is_beginning or (commit is not None and commit.is_copy_of_start):
        said = cluster.begun_over | (set() if commit is None else cluster.passed_over)
        lost = sorted(cluster.acknowledged - said)
        assert not lost, f"attempt {attempt} begins from {resume or 'nothing'}, and the user did not give up {lost}"
    newer = {uri for uri in cluster.acknowledged & cluster.commits.keys()
             if commit is None or cluster.commits[uri].step > commit.step}  # fmt: skip
    passed = sorted(newer - cluster.refused - cluster.passed_over)
    assert not passed, f"attempt {attempt} begins from {resume or 'nothing'} and passes over {passed}"


def _predecessor_runs(cluster: Cluster) -> bool:
    """Return whether a pod of an earlier resource of the same name runs where its kubelet answers."""
    return any(
        process.role == "worker" and process.owner != UID and process.pod in cluster.pods
        for process in cluster.processes.values()
    )


def check_progress(cluster: Cluster, before: Status, after: Status, launched: int) -> None:
    """Check that attempts and acknowledged steps never go back, and that no replaced attempt commits.

    Args:
        cluster: the cluster after a pass.
        before: status before the pass.
        after: status after it.
        launched: newest attempt that was launched before the pass, 0 for none.
    """
    assert after.attempt >= before.attempt, "attempts never go back"
    cluster.acknowledged |= {item.uri for item in after.checkpoint.history if item.writer != "reshard"}
    if not (cluster.damaged or cluster.refused or cluster.passed_over):
        steps = (before.checkpoint.step, after.checkpoint.step)
        assert steps[0] <= steps[1], f"the newest acknowledged step goes back from {steps[0]} to {steps[1]}"
    known = {item.uri for item in before.checkpoint.history}
    for commit in after.checkpoint.history:
        is_new = commit.uri not in known
        assert not is_new or commit.attempt >= launched, "a replaced attempt has committed"
    if after.pinned is not None and before.pinned is None:
        newest = next(item for item in after.checkpoint.history if not item.invalid)
        assert after.pinned == newest.topology, "the pinned topology is that of the newest commit"
        cluster.effects["the topology is pinned"] += 1
    if len(after.excluded_nodes) > len(before.excluded_nodes):
        cluster.effects["a node is avoided"] += 1


def check_status(wire: dict[str, Any], *, is_thorough: bool) -> None:
    """Check that a status is small and, if thorough, that the API server would accept it."""
    size = len(json.dumps(wire, allow_nan=False).encode())
    assert size < MAX_BYTES, f"the status has {size} bytes"
    if is_thorough:
        CHECKER.validate(wire)


def check_end(cluster: Cluster) -> str:
    """Check that a job has ended in a named condition; return its name."""
    phase, reason = cluster.status.get("phase"), cluster.status.get("reason")
    text = f"{phase} {reason}: {cluster.status.get('message')}"
    assert reason in NAMED_ENDS.get(phase, set()), f"the trace ends in {text}"  # type: ignore[arg-type]
    conditions = {item["type"]: item["status"] for item in cluster.status["conditions"]}
    assert conditions.get(phase) == "True", f"the condition {phase} says so"  # type: ignore[call-overload]
    return str(reason)
