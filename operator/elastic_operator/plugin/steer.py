"""The verbs `drain`, `suspend`, `resume` and `retry`: each patches the resource and can wait for the result."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Mapping
from typing import Any

from elastic_operator.api.serialization import format_time
from elastic_operator.api.status import Phase, Status
from elastic_operator.manifests.attempt import DRAIN_REQUESTED, RETRY_REQUESTED
from elastic_operator.plugin.cluster import Cluster
from elastic_operator.plugin.errors import Exit, PluginError
from elastic_operator.plugin.pages.job_report import read_status
from elastic_operator.reconcile import user_requests
from elastic_operator.reconcile.failures import refused_commits
from elastic_operator.reconcile.failures.refused_commits import ASKING
from reshard.contract import TakeOver

POLL_SECONDS = 1.0


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SteerResult:
    """Result of a request.

    Attributes:
        changed: False if the job was already in the requested state.
        attempt: number of the attempt at the time of the request.
        request: token of a drain or a retry.
        commit_step: step of the newest commit; after `--wait` that of the drain.
        text: the result in one sentence.
    """

    name: str
    namespace: str
    verb: str
    changed: bool
    text: str
    phase: str
    attempt: int = 0
    request: str = ""
    commit_step: int | None = None


def send_request(cluster: Cluster, verb: str, name: str) -> SteerResult:
    """Send the request of a verb.

    Raises:
        PluginError: the request is not possible in the state of the job.
    """
    resource = cluster.job(name)
    status = read_status(resource)
    if verb == "retry":
        return _retry(cluster, resource, status)
    if status.terminal:
        raise PluginError(Exit.REFUSED, f"{name} cannot {verb}: it is {status.phase} ({status.message})")
    if verb == "drain":
        return _drain(cluster, resource, status)
    return _suspend(cluster, resource, status, suspend=verb == "suspend")


def wait_until_done(cluster: Cluster, done: SteerResult, *, timeout_seconds: float) -> SteerResult:
    """Wait until the job is in the requested state.

    Raises:
        PluginError: the timeout has passed, or the job ended in another state.
    """
    deadline = time.monotonic() + timeout_seconds
    while True:
        status = read_status(cluster.job(done.name))
        if text := describe_outcome(done, status):
            step = status.checkpoint.step if status.checkpoint.uri else None
            return dataclasses.replace(done, text=text, phase=status.phase, commit_step=step)
        if status.terminal and not _is_unseen(done, status):
            raise PluginError(Exit.REFUSED, f"{done.name} is {status.phase} now: {status.message}")
        if time.monotonic() >= deadline:
            where = f"{done.name} is {status.phase} after {timeout_seconds:.0f} s: {status.message}"
            raise PluginError(Exit.TIMEOUT, f"{done.verb} is not done yet: {where}")
        time.sleep(POLL_SECONDS)


def describe_outcome(done: SteerResult, status: Status) -> str:
    """Describe the outcome of a request; return an empty string while it is in progress.

    Raises:
        PluginError: the operator has declined the request.
    """
    commit = f"the newest commit is of step {status.checkpoint.step}" if status.checkpoint.uri else "there is no commit"
    match done.verb:
        case "suspend":
            return f"{done.name} is suspended: nothing runs, {commit}" if status.phase == Phase.SUSPENDED else ""
        case "resume" | "retry":
            running = status.phase == Phase.RUNNING and not _is_unseen(done, status)
            return f"{done.name} trains again, in attempt {status.attempt} as {status.topology_text}" if running else ""
        case _:
            return _describe_drain(done, status)


def _is_unseen(done: SteerResult, status: Status) -> bool:
    """Return whether the operator has not answered a retry yet."""
    return done.verb == "retry" and status.retry_request != done.request


def _describe_drain(done: SteerResult, status: Status) -> str:
    if status.drain_request != done.request:
        return ""
    answered = [item for item in status.changes if item.from_attempt >= done.attempt]
    if not answered and status.drain is None:
        text = f"attempt {status.attempt} had no training loop that could commit when the request arrived"
        raise PluginError(Exit.REFUSED, f"{done.name} was not drained: {text}")
    last = answered[-1] if answered else None
    if last is None or status.phase != Phase.RUNNING or status.attempt <= done.attempt:
        return ""
    if last.cause != user_requests.CAUSE:
        return f"{done.name} trains again, in attempt {status.attempt}, but after {last.cause}: {last.message}"
    return f"{done.name} trains again, in attempt {status.attempt} from the commit of step {last.commit_step}"


def _drain(cluster: Cluster, resource: Mapping[str, Any], status: Status) -> SteerResult:
    name = resource["metadata"]["name"]
    if status.drain is not None:
        text = f"{name} is being drained already ({status.drain.cause}): attempt {status.attempt} is asked to commit"
        return _result(resource, status, "drain", text, changed=False, request=status.drain_request)
    if status.phase != Phase.RUNNING:
        state = status.phase if resource.get("status") else "not seen by any operator"
        text = f"it is {state}, and only what is Running can commit; `kubectl etj status {name}` says what it waits for"
        raise PluginError(Exit.REFUSED, f"{name} cannot drain: {text}")
    request = format_time(time.time())
    cluster.patch(name, {"metadata": {"annotations": {DRAIN_REQUESTED: request}}})
    text = f"{name}: attempt {status.attempt} is asked to commit, exit and start again (--wait waits for it)"
    return _result(resource, status, "drain", text, changed=True, request=request)


def _retry(cluster: Cluster, resource: Mapping[str, Any], status: Status) -> SteerResult:
    name = resource["metadata"]["name"]
    is_converting = user_requests.can_retry_conversion(status, time.time())
    if status.phase != Phase.FAILED and not is_converting:
        state = status.phase if resource.get("status") else "not seen by any operator"
        text = f"it is {state}; only a job that has Failed, or a conversion that waits for its next try, is tried again"
        raise PluginError(Exit.REFUSED, f"{name} cannot retry: {text}")
    if status.reason in ASKING and refused_commits.find_problem(status):
        raise PluginError(Exit.REFUSED, f"{name} cannot retry: {status.message}")
    request = format_time(time.time())
    cluster.patch(name, {"metadata": {"annotations": {RETRY_REQUESTED: request}}})
    if is_converting:
        text = f"{name} may convert its checkpoint again at once, with all retries"
    else:
        text = f"{name} is tried again {describe_start(resource, status)}, with a fresh restart budget"
    text = f"{text} (--wait waits for it)"
    return _result(resource, status, "retry", text, changed=True, request=request)


def describe_start(resource: Mapping[str, Any], status: Status) -> str:
    """Describe the checkpoint from which the next attempt resumes."""
    if status.checkpoint.uri:
        return f"from the commit of step {status.checkpoint.step}"
    checkpoint = resource["spec"]["checkpoint"]
    if checkpoint.get("takeOver") == TakeOver.RESUME:
        return "from the newest commit in its path (spec.checkpoint.takeOver)"
    start = checkpoint.get("startFrom")
    return f"from {start} (spec.checkpoint.startFrom)" if start else "from nothing"


def _suspend(cluster: Cluster, resource: Mapping[str, Any], status: Status, *, suspend: bool) -> SteerResult:
    name, verb = resource["metadata"]["name"], "suspend" if suspend else "resume"
    if bool(resource["spec"].get("suspend")) == suspend:
        text = f"{name} is {'already' if suspend else 'not'} suspended (phase {status.phase}): nothing to do"
        return _result(resource, status, verb, text, changed=False)
    cluster.patch(name, {"spec": {"suspend": suspend}})
    effect = "commits, exits and gives its nodes back" if suspend else "goes on from its newest commit"
    return _result(resource, status, verb, f"{name} {effect} (--wait waits for it)", changed=True)


def _result(
    resource: Mapping[str, Any], status: Status, verb: str, text: str, *, changed: bool, request: str = ""
) -> SteerResult:
    meta = resource["metadata"]
    return SteerResult(
        name=meta["name"],
        namespace=meta["namespace"],
        verb=verb,
        changed=changed,
        text=text,
        phase=status.phase,
        attempt=status.attempt,
        request=request,
        commit_step=status.checkpoint.step if status.checkpoint.uri else None,
    )
