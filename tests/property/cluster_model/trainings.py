"""What the processes of the job do: training with commits and retention, and conversions.

An attempt makes a step per second once all its processes run, and saves every third. It goes on without the API server.
It follows `docs/protocol.md`: it publishes a save only after its Lease has answered, and removes released commits only.
"""

from __future__ import annotations

import json
import zlib
from typing import Any

from elastic_operator.api.serialization import format_time
from reshard.contract import CommitRef, Env, ExitCode, LeaseKey, Request, ReshardReport, TakeOver, TrainerPhase
from tests.property.cluster_model.cluster import UID, Cluster, Commit, Process, container_of, owner_of

SAVE_EVERY = 3
CONVERSION_SECONDS = 3.0
KEPT = 3
"""Number of its newest commits that a training never removes, even if they are released."""
FENCED_SECONDS = 15.0
EXIT_DRAINED, EXIT_REFUSED, EXIT_FENCED = 75, 76, 77


def run(cluster: Cluster) -> None:
    """Let each process act once."""
    for process in list(cluster.processes.values()):
        if process.uid not in cluster.processes or process.uid in cluster.pending_ends:
            continue
        if process.role == "reshard":
            _convert(cluster, process)
        elif process.index == 0:
            _train(cluster, process)


def _train(cluster: Cluster, rank_0: Process) -> None:
    is_answered = _renew(cluster, rank_0)
    if rank_0.refused_since is not None and cluster.now - rank_0.refused_since >= FENCED_SECONDS:
        cluster.effects["an attempt that lost its Lease exits"] += 1
        cluster.end(rank_0, EXIT_FENCED)
        return
    peers = [item for item in cluster.processes.values() if item.job_uid == rank_0.job_uid]
    is_complete = len(peers) == int(rank_0.env["PET_NNODES"])
    has_storage = all(cluster.reaches_storage(item.node) for item in peers)
    if is_complete and has_storage and rank_0.step is None:
        _restore(cluster, rank_0)
        _flush(cluster, rank_0, is_answered)
    if rank_0.uid not in cluster.processes or rank_0.step is None:
        return
    if is_complete:
        _make_step(cluster, rank_0)
        if rank_0.is_saving and has_storage:
            rank_0.is_saving = False
            rank_0.unpublished = _free_name(cluster, rank_0)
    if rank_0.unpublished and cluster.reaches_storage(rank_0.node):
        _publish(cluster, rank_0, is_answered)
    _flush(cluster, rank_0, is_answered)
    if is_complete and not rank_0.is_saving and not rank_0.unpublished:
        _leave(cluster, rank_0, peers, is_answered)


def _renew(cluster: Cluster, rank_0: Process) -> bool:
    """Renew the Lease and read it; return whether the API server has answered."""
    if not cluster.reaches_api("trainer", rank_0.node):
        return False
    lease = cluster.objects.get(("Lease", rank_0.job))
    uid = lease["metadata"]["uid"] if lease is not None else ""
    rank_0.lease_uid = rank_0.lease_uid or uid
    if lease is None or uid != rank_0.lease_uid or owner_of(lease) != rank_0.owner:
        rank_0.refused_since = cluster.now if rank_0.refused_since is None else rank_0.refused_since
        return False
    lease["spec"]["renewTime"] = format_time(cluster.now + cluster.skews[rank_0.node])
    notes = lease["metadata"].setdefault("annotations", {})
    rank_0.request = notes.get(LeaseKey.REQUEST, "")
    rank_0.released = tuple(json.loads(notes.get(LeaseKey.RELEASED) or "[]"))
    rank_0.report.setdefault(LeaseKey.PHASE, TrainerPhase.STARTING)
    return True


def _flush(cluster: Cluster, rank_0: Process, is_answered: bool) -> None:
    """Write what has changed to the Lease, if it has answered."""
    if not is_answered:
        return
    notes = cluster.objects["Lease", rank_0.job]["metadata"]["annotations"]
    before = notes.get(LeaseKey.STEP)
    if any(notes.get(key) != value for key, value in rank_0.report.items()):
        notes |= rank_0.report
        cluster.touch()
    if rank_0.owner == UID and notes.get(LeaseKey.STEP) != before:
        cluster.made_steps += 1


def _restore(cluster: Cluster, rank_0: Process) -> None:
    """Claim the folder and load the commit to resume from, or exit."""
    may_take = rank_0.env.get(Env.TAKE_OVER) == TakeOver.BEGIN and rank_0.owner == UID
    if cluster.root_owner not in ("", rank_0.owner) and not may_take:
        rank_0.report[LeaseKey.OWNER_ERROR] = "the folder belongs to another job"
        _exit_all(cluster, rank_0, EXIT_REFUSED)
        return
    cluster.root_owner = rank_0.owner
    resume = rank_0.env.get(Env.RESUME, "")
    if resume in cluster.damaged or (resume and (resume not in cluster.commits or cluster.refusal == "load")):
        rank_0.report[LeaseKey.RESUME_ERROR] = _refuse(cluster, resume)
        _exit_all(cluster, rank_0, EXIT_REFUSED)
        return
    topology = json.loads(rank_0.env[Env.TOPOLOGY])
    if resume and cluster.commits[resume].topology != topology:
        # The session loads a DCP commit in any topology, and refuses any other; `check_launch` never lets that happen.
        assert cluster.commits[resume].format == "dcp", "only a DCP commit is loaded in another topology"
        cluster.effects["a commit is loaded in another topology"] += 1
    if rank_0.owner == UID:
        cluster.newest_started = max(cluster.newest_started, rank_0.attempt)
    rank_0.step = cluster.commits[resume].step if resume else 0
    rank_0.report[LeaseKey.PHASE] = TrainerPhase.TRAINING


def _refuse(cluster: Cluster, uri: str) -> str:
    """Note that a commit is refused; return why. Each damaged commit is damaged in its own way."""
    cluster.refused.add(uri)
    if uri in cluster.damaged or uri not in cluster.commits:
        return f"{uri}: CRC is {zlib.crc32(uri.encode()):08x}"
    cluster.effects["a sound commit is refused"] += 1
    return f"{uri}: the class MyState is not known"


def _exit_all(cluster: Cluster, rank_0: Process, code: int) -> None:
    for peer in [item for item in cluster.processes.values() if item.job_uid == rank_0.job_uid]:
        cluster.end(peer, code)


def _make_step(cluster: Cluster, rank_0: Process) -> None:
    """Make a step unless a save, a request or the end of the training comes first; decide whether to save then."""
    assert rank_0.step is not None
    is_draining, is_over = rank_0.request == Request.DRAIN, rank_0.step >= cluster.steps
    if rank_0.is_saving or (rank_0.unpublished and (is_draining or is_over)):
        return
    if rank_0.owner == UID and rank_0.attempt < max(cluster.launched):
        cluster.effects["a replaced attempt makes a step"] += 1
    if not is_draining and not is_over:
        rank_0.step += 1
        moment = format_time(cluster.now + cluster.skews[rank_0.node])
        rank_0.report |= {
            LeaseKey.STEP: str(rank_0.step),
            LeaseKey.PHASE: TrainerPhase.TRAINING,
            LeaseKey.STEP_TIME: moment,
        }
        rank_0.report.setdefault(LeaseKey.FIRST_STEP_TIME, moment)
    is_due = rank_0.step % SAVE_EVERY == 0 or is_draining or rank_0.step >= cluster.steps
    rank_0.is_saving = is_due and rank_0.published_step != rank_0.step


def _free_name(cluster: Cluster, rank_0: Process) -> str:
    folder = f"{rank_0.env[Env.CHECKPOINT_ROOT]}/a{rank_0.attempt}/step-{rank_0.step:08d}"
    if rank_0.env.get(Env.TAKE_OVER, TakeOver.NEVER) != TakeOver.NEVER:
        folder = f"{folder}-{rank_0.owner[:8]}"
    number, name = 1, folder
    while name in cluster.commits:
        number, name = number + 1, f"{folder}.{number + 1}"
    return name


def _publish(cluster: Cluster, rank_0: Process, is_answered: bool) -> None:
    """Publish the newest save if the Lease has answered and no newer attempt has started; then remove old commits."""
    assert rank_0.step is not None
    is_newest = rank_0.attempt >= cluster.newest_started or rank_0.owner != UID
    is_allowed = is_answered and is_newest and cluster.root_owner == rank_0.owner
    if not is_allowed and not rank_0.may_publish_late:
        return
    if not is_allowed:
        cluster.effects["an attempt that is cut off publishes late"] += 1
    rank_0.may_publish_late = False
    uri, rank_0.unpublished, rank_0.published_step = rank_0.unpublished, "", rank_0.step
    ref = CommitRef(
        uri=uri,
        step=rank_0.step,
        samples=20 * rank_0.step,
        attempt=rank_0.attempt,
        topology=json.loads(rank_0.env[Env.TOPOLOGY]),
        num_bytes=cluster.commit_bytes,
        format=cluster.spec["checkpoint"].get("format", "DeepSpeed").lower(),
    )
    cluster.commits[uri] = Commit(
        step=ref.step, attempt=ref.attempt, topology=dict(ref.topology), owner=rank_0.owner, format=ref.format
    )
    rank_0.report[LeaseKey.COMMIT] = ref.to_json()
    rank_0.report[LeaseKey.REMOVED] = json.dumps(_remove_released(cluster, rank_0))


def _remove_released(cluster: Cluster, rank_0: Process) -> list[str]:
    """Remove the released commits, as this process has last read them; return those that no longer exist."""
    root = rank_0.env[Env.CHECKPOINT_ROOT]
    own = [uri for uri, commit in cluster.commits.items() if commit.owner == rank_0.owner and uri.startswith(root)]
    newest = sorted(own, key=lambda uri: (cluster.commits[uri].attempt, cluster.commits[uri].step))[-KEPT:]
    kept = {*newest, rank_0.env.get(Env.RESUME, "")}
    for name in rank_0.released:
        uri = f"{root}/{name}"
        if uri in own and uri not in kept:
            del cluster.commits[uri]
            cluster.effects["a released commit is removed"] += 1
    return [name for name in rank_0.released if f"{root}/{name}" not in cluster.commits]


def _leave(cluster: Cluster, rank_0: Process, peers: list[Process], is_answered: bool) -> None:
    """Exit after the last step, or on request; the Lease is told before."""
    assert rank_0.step is not None
    if rank_0.step >= cluster.steps:
        phase, code = TrainerPhase.COMPLETE, 0
    elif rank_0.request == Request.DRAIN and rank_0.published_step == rank_0.step:
        phase, code = TrainerPhase.DRAINED, EXIT_DRAINED
    else:
        return
    if is_answered:
        rank_0.report[LeaseKey.PHASE] = phase
        _flush(cluster, rank_0, is_answered)
        for peer in peers:
            cluster.end(peer, code)


def _convert(cluster: Cluster, process: Process) -> None:
    pod = cluster.pods.get(process.pod)
    if pod is None or not cluster.reaches_storage(process.node):
        return
    if cluster.now - process.start_time < CONVERSION_SECONDS:
        return
    source, target = container_of(pod)["args"][1:3]
    take_over = cluster.spec["checkpoint"]["takeOver"]
    if take_over == TakeOver.RESUME and source == "/checkpoint/gpt":
        source = _take_over(cluster)
        if not source:
            nothing = ReshardReport(ok=True, exit_code=0, message="no commit", source="/checkpoint/gpt")
            _report(cluster, process, nothing)
            return
    if cluster.root_owner not in ("", UID) and take_over != TakeOver.BEGIN:
        _report(cluster, process, ReshardReport(ok=False, exit_code=ExitCode.NOT_OWNER, message="not the owner"))
        return
    assert source in cluster.commits, f"a reshard Job reads a commit that exists: {source}"
    is_own = cluster.commits[source].owner == UID
    if source in cluster.damaged or (is_own and cluster.refusal == "read"):
        message = _refuse(cluster, source)
        _report(cluster, process, ReshardReport(ok=False, exit_code=ExitCode.SOURCE_INVALID, message=message))
        return
    if is_own and cluster.refusal == "convert":
        cluster.effects["a sound commit is not converted"] += 1
        _report(cluster, process, ReshardReport(ok=False, exit_code=ExitCode.UNSUPPORTED, message="not supported"))
        return
    step, topology = cluster.commits[source].step, _parse_topology(container_of(pod)["args"][4])
    cluster.root_owner = UID
    format_ = cluster.spec["checkpoint"].get("format", "DeepSpeed").lower()
    is_copy = source == cluster.external or cluster.commits[source].is_copy_of_start
    cluster.commits[target] = Commit(
        step=step, attempt=process.attempt, topology=topology, format=format_, is_copy_of_start=is_copy
    )
    cluster.effects["a commit is converted"] += 1
    report = ReshardReport(ok=True, exit_code=0, message="done", source=source, target=target, step=step, verified=True)
    _report(cluster, process, report)


def _take_over(cluster: Cluster) -> str:
    """Take the folder over as `reshard` does; return the commit that is chosen once, empty if there is none."""
    cluster.root_owner = UID
    if cluster.taken is None:
        others = [uri for uri, commit in cluster.commits.items() if commit.owner != UID and "/gpt/" in uri]
        cluster.taken = max(others, key=lambda uri: cluster.commits[uri].step, default="")
        cluster.effects["a job goes on from the commit of its predecessor"] += bool(cluster.taken)
    return cluster.taken


def _parse_topology(text: str) -> dict[str, int]:
    words: dict[str, Any] = dict(part.split("=") for part in text.split(","))
    return {**dict.fromkeys(("tp", "pp", "dp", "ep", "cp", "zero"), 1), **{key: int(words[key]) for key in words}}


def _report(cluster: Cluster, process: Process, report: ReshardReport) -> None:
    cluster.end(process, report.exit_code, report.to_json())
