"""Actions that bring the cluster to what the status says.

The actions depend on nothing else. If the operator stops after it has written a status and before it has acted on it,
the next process therefore continues.
"""

from __future__ import annotations

from collections.abc import Iterator

from elastic_operator.api.status import Current, Phase, Status
from elastic_operator.manifests.attempt import attempt_name, attempt_objects, reshard_job
from elastic_operator.manifests.gang import API_VERSIONS
from elastic_operator.observed.commit_history import find_withheld, format_released
from elastic_operator.observed.observation import RESHARD, WORKER, JobView, PodView
from elastic_operator.reconcile import reshard_mode
from elastic_operator.reconcile.actions import (
    Action,
    Create,
    DeleteJob,
    DeletePod,
    LaunchAttempt,
    ReleaseCommits,
    RequestDrain,
    RequestStop,
    RevokeAttempt,
    split_actions,
)
from elastic_operator.reconcile.context import (
    Context,
    find_lost_nodes,
    find_protection,
    select_stuck_pods,
)
from elastic_operator.reconcile.lifetime.expiry import delete_if_expired
from elastic_operator.reconcile.lifetime.kept_logs import select_kept_attempts
from elastic_operator.reconcile.queueing.workload_actions import workload_actions
from reshard.contract import LeaseKey, Request


def actions_for_status(context: Context, status: Status) -> tuple[Action, ...]:
    """Return every action that has to be performed now, in the order of `split_actions`."""
    others, deletions, launches = split_actions(_list_actions(context, status))
    return (*others, *deletions, *launches)


def _list_actions(context: Context, status: Status) -> tuple[Action, ...]:
    deletion = delete_if_expired(context, status)
    if deletion is not None:
        return (deletion,)
    quota = workload_actions(context, status)
    if status.phase == Phase.COMPLETE:
        return (
            *_stop_attempts(context, status),
            *_stop_completed(context, status),
            *_stop_reshard(context, status),
            *_revoke_completed(context, status),
            *quota,
        )
    return (
        *_stop_attempts(context, status),
        *_stop_reshard(context, status),
        *_continue_attempt(context, status),
        *quota,
    )


def _stop_attempts(context: Context, status: Status) -> Iterator[Action]:
    """Stop every attempt except the launched current one, or the one that has completed the job."""
    keep = status.attempt if status.launched or status.phase == Phase.COMPLETE else -1
    jobs = [job for job in context.world.jobs if job.role == WORKER and job.attempt != keep]
    pods = [pod for pod in context.world.pods if pod.role == WORKER and pod.attempt != keep]
    stopping = {pod.attempt for pod in pods if not pod.terminal}
    yield from (
        RequestStop(lease=lease.name, uid=lease.uid)
        for attempt, lease in sorted(context.world.leases.items())
        if attempt in stopping and lease.get(LeaseKey.REQUEST) != Request.STOP
    )
    # Delete the Job first, because it would create new pods for deleted ones.
    # A failed attempt keeps its Job for a while, so that people can read the logs of its pods. A Job with a failed pod
    # creates no new ones: its backoffLimit is 0, even if the Job controller has not marked the Job as failed yet.
    failed_attempts = {pod.attempt for pod in pods if pod.phase == "Failed"}
    keep_logs = status.phase == Phase.FAILED
    kept_attempts = select_kept_attempts(context, status)
    superfluous = [
        job
        for job in jobs
        if job.attempt not in kept_attempts
        and not (keep_logs and (job.failed or job.complete or job.attempt in failed_attempts))
    ]
    yield from (DeleteJob(name=job.name, uid=job.uid) for job in superfluous if not job.deleting)
    yield from _delete_pods(context, status, pods)
    attempts = {job.attempt for job in superfluous} | {lease for lease in context.world.leases if lease != keep}
    job = context.job
    yield from (
        RevokeAttempt(name=attempt_name(job.name, attempt), owner=job.uid, gang=_gang(context))
        for attempt in sorted(attempts)
    )


def _stop_completed(context: Context, status: Status) -> Iterator[Action]:
    """Stop pods of the completed attempt that do not end by themselves: they hold accelerators, quota and the resource.

    Pods on lost nodes cannot end, and neither can those that another container holds open. A process elsewhere may
    still have something to do after the last commit, but no longer than `recovery.hangSeconds`. The Job controller
    stops its peers as soon as one pod is deleted.
    """
    pods = [pod for pod in context.world.workers(status.attempt) if not pod.terminal]
    if not pods:
        return
    lost = find_lost_nodes(context, status)
    since = status.finish_time if status.finish_time is not None else context.now
    has_ended = all(pod.node in lost or pod.outcome for pod in pods)
    job = context.world.job(status.attempt)
    if has_ended and job is not None and not job.deleting and any(pod.outlived_by for pod in pods):
        yield DeleteJob(name=job.name, uid=job.uid)  # it would count the deleted pods as failures
    if has_ended or context.now - since >= context.spec.recovery.hang_seconds:
        yield from _delete_pods(context, status, pods)


def _revoke_completed(context: Context, status: Status) -> Iterator[Action]:
    """Delete the objects of a completed attempt, except its Job, so that no PodDisruptionBudget stays behind."""
    pods = context.world.workers(status.attempt)
    if status.attempt in context.world.leases and all(pod.terminal for pod in pods):
        name = attempt_name(context.job.name, status.attempt)
        yield RevokeAttempt(name=name, owner=context.job.uid, gang=_gang(context))


def _gang(context: Context) -> str:
    gang = context.spec.gang
    return API_VERSIONS[gang] if gang is not None else ""


def _stop_reshard(context: Context, status: Status) -> Iterator[Action]:
    """Delete reshard Jobs that no attempt waits for; a finished Job stays, for its logs, until the next one.

    A Job whose conversion is done, and which another container keeps from its end, does not stay.
    """
    for job in context.world.jobs:
        if job.role == RESHARD and not job.deleting and _is_superseded(status, job):
            yield DeleteJob(name=job.name, uid=job.uid)
    needed = {status.attempt} if status.current is not None else set()
    orphans = [
        pod for pod in context.world.pods if pod.role == RESHARD and pod.attempt not in needed and not pod.terminal
    ]
    yield from _delete_pods(context, status, orphans)


def _is_superseded(status: Status, job: JobView) -> bool:
    if status.reshard is not None and job.uid == status.reshard.failed_uid:
        return True
    is_unfinished = not (job.complete or job.failed)
    if job.attempt == status.attempt and status.current is not None:
        return is_unfinished and status.current.resume.ready
    return is_unfinished or job.attempt < status.attempt - 1


def _delete_pods(context: Context, status: Status, pods: list[PodView]) -> Iterator[Action]:
    if not pods:
        return
    lost = find_lost_nodes(context, status)
    force_after = context.spec.recovery.force_delete_seconds
    for pod in pods:
        if pod.node in lost and not pod.terminal:
            if pod.deleted_at is None:
                yield DeletePod(name=pod.name, uid=pod.uid, grace_seconds=context.limits.stop_grace_seconds)
            elif context.now - pod.deleted_at >= force_after:
                yield DeletePod(name=pod.name, uid=pod.uid, grace_seconds=0)
        elif not pod.terminal and _may_run_too_long(pod, context.limits.stop_grace_seconds):
            yield DeletePod(name=pod.name, uid=pod.uid, grace_seconds=context.limits.stop_grace_seconds)


def _may_run_too_long(pod: PodView, grace_seconds: int) -> bool:
    """Return whether a pod is not deleted yet, or with a longer grace period, for instance by the Job controller."""
    return pod.deleted_at is None or pod.deletion_grace_seconds > grace_seconds


def _continue_attempt(context: Context, status: Status) -> Iterator[Action]:
    current = status.current
    if current is None or status.terminal:
        return
    if current.launch_time is not None:
        yield from _keep_running(context, status, current)
    elif not current.resume.ready:
        yield from _reshard(context, status, current)


def _keep_running(context: Context, status: Status, current: Current) -> Iterator[Action]:
    if not current.job_uid and context.world.job(status.attempt) is None:
        heartbeat = context.limits.heartbeat_seconds
        manifests = attempt_objects(context.job, context.placed_spec, status.attempt, current, heartbeat)
        lost = tuple(sorted(find_lost_nodes(context, status)))
        yield LaunchAttempt(
            attempt=status.attempt,
            manifests=tuple(manifests),
            job=context.job,
            lost_nodes=lost,
            stuck_pods=tuple(sorted(pod.uid for pod in select_stuck_pods(context, status))),
            job_uids=status.job_uids,
        )
    lease = context.world.leases.get(status.attempt)
    if status.drain is not None and lease is not None and lease.get(LeaseKey.REQUEST) != Request.DRAIN:
        yield RequestDrain(lease=lease.name, uid=lease.uid)
    withheld = find_withheld(status.checkpoint, find_protection(context))
    released = tuple(name for name in status.checkpoint.released if name not in withheld)
    if lease is not None and (lease.get(LeaseKey.RELEASED) or "[]") != format_released(released):
        yield ReleaseCommits(lease=lease.name, uid=lease.uid, names=released)


def _reshard(context: Context, status: Status, current: Current) -> Iterator[Action]:
    reshard = status.reshard
    if reshard is not None and reshard.retry_time is not None and context.now < reshard.retry_time:
        return
    if context.world.job(status.attempt, RESHARD) is None:
        mode = reshard_mode.conversion_request(context.spec, status, current).arguments
        manifest = reshard_job(
            context.job,
            context.placed_spec,
            status.attempt,
            current,
            context.reshard_image,
            mode=mode,
            oom_kills=reshard.oom_kills if reshard is not None else 0,
        )
        yield Create(manifest=manifest)
