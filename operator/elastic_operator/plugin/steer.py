"""`drain`, `suspend`, `resume`, `retry`: one small patch of the resource each, and waiting for the answer."""

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

POLL_SECONDS = 1.0


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Steered:
    """What was asked of a job.

    Attributes:
        changed: False where it was so already.
        attempt: at the time of the request.
        request: token of a drain or a retry.
        commit_step: newest commit; after `--wait` that of the drain.
        text: the same for people.
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


def ask(cluster: Cluster, verb: str, name: str) -> Steered:
    """Send the request.

    Raises:
        PluginError: the job is in no state for it.
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


def wait(cluster: Cluster, done: Steered, *, timeout_seconds: float) -> Steered:
    """Wait until the job is where the request leads to.

    Raises:
        PluginError: it did not get there in time, or went elsewhere.
    """
    deadline = time.monotonic() + timeout_seconds
    while True:
        status = read_status(cluster.job(done.name))
        if text := reached(done, status):
            step = status.checkpoint.step if status.checkpoint.uri else None
            return dataclasses.replace(done, text=text, phase=status.phase, commit_step=step)
        if status.terminal and not _unseen(done, status):
            raise PluginError(Exit.REFUSED, f"{done.name} is {status.phase} now: {status.message}")
        if time.monotonic() >= deadline:
            where = f"{done.name} is {status.phase} after {timeout_seconds:.0f} s: {status.message}"
            raise PluginError(Exit.TIMEOUT, f"{done.verb} is not done yet: {where}")
        time.sleep(POLL_SECONDS)


def reached(done: Steered, status: Status) -> str:
    """What has come of the request; empty while it is under way.

    Raises:
        PluginError: the operator has declined it.
    """
    commit = f"the newest commit is of step {status.checkpoint.step}" if status.checkpoint.uri else "there is no commit"
    match done.verb:
        case "suspend":
            return f"{done.name} is suspended: nothing runs, {commit}" if status.phase == Phase.SUSPENDED else ""
        case "resume" | "retry":
            running = status.phase == Phase.RUNNING and not _unseen(done, status)
            return f"{done.name} trains again, in attempt {status.attempt} as {status.topology_text}" if running else ""
        case _:
            return _drained(done, status)


def _unseen(done: Steered, status: Status) -> bool:
    """The operator has not answered a retry yet."""
    return done.verb == "retry" and status.retry_request != done.request


def _drained(done: Steered, status: Status) -> str:
    if status.drain_request != done.request:
        return ""
    answered = [item for item in status.recoveries if item.from_attempt >= done.attempt]
    if not answered and status.drain is None:
        text = f"attempt {status.attempt} had no training loop that could commit when the request arrived"
        raise PluginError(Exit.REFUSED, f"{done.name} was not drained: {text}")
    last = answered[-1] if answered else None
    if last is None or status.phase != Phase.RUNNING or status.attempt <= done.attempt:
        return ""
    if last.cause != user_requests.CAUSE:
        return f"{done.name} trains again, in attempt {status.attempt}, but after {last.cause}: {last.message}"
    return f"{done.name} trains again, in attempt {status.attempt} from the commit of step {last.commit_step}"


def _drain(cluster: Cluster, resource: Mapping[str, Any], status: Status) -> Steered:
    name = resource["metadata"]["name"]
    if status.drain is not None:
        text = f"{name} is being drained already ({status.drain.cause}): attempt {status.attempt} is asked to commit"
        return _steered(resource, status, "drain", text, changed=False, request=status.drain_request)
    if status.phase != Phase.RUNNING:
        state = status.phase if resource.get("status") else "not seen by any operator"
        text = f"it is {state}, and only what is Running can commit; `kubectl etj status {name}` says what it waits for"
        raise PluginError(Exit.REFUSED, f"{name} cannot drain: {text}")
    request = format_time(time.time())
    cluster.patch(name, {"metadata": {"annotations": {DRAIN_REQUESTED: request}}})
    text = f"{name}: attempt {status.attempt} is asked to commit, exit and start again (--wait waits for it)"
    return _steered(resource, status, "drain", text, changed=True, request=request)


def _retry(cluster: Cluster, resource: Mapping[str, Any], status: Status) -> Steered:
    name = resource["metadata"]["name"]
    if status.phase != Phase.FAILED:
        state = status.phase if resource.get("status") else "not seen by any operator"
        raise PluginError(Exit.REFUSED, f"{name} cannot retry: it is {state}, and only what has Failed is tried again")
    request = format_time(time.time())
    cluster.patch(name, {"metadata": {"annotations": {RETRY_REQUESTED: request}}})
    text = f"{name} is tried again {begins(resource, status)}, with a fresh restart budget (--wait waits for it)"
    return _steered(resource, status, "retry", text, changed=True, request=request)


def begins(resource: Mapping[str, Any], status: Status) -> str:
    """What the next attempt goes on from."""
    if status.checkpoint.uri:
        return f"from the commit of step {status.checkpoint.step}"
    start = resource["spec"]["checkpoint"].get("startFrom")
    return f"from {start} (spec.checkpoint.startFrom)" if start else "from nothing"


def _suspend(cluster: Cluster, resource: Mapping[str, Any], status: Status, *, suspend: bool) -> Steered:
    name, verb = resource["metadata"]["name"], "suspend" if suspend else "resume"
    if bool(resource["spec"].get("suspend")) == suspend:
        text = f"{name} is {'suspended' if suspend else 'not suspended'} already (phase {status.phase})"
        return _steered(resource, status, verb, text, changed=False)
    cluster.patch(name, {"spec": {"suspend": suspend}})
    then = "commits, exits and gives its nodes back" if suspend else "goes on from its newest commit"
    return _steered(resource, status, verb, f"{name} {then} (--wait waits for it)", changed=True)


def _steered(
    resource: Mapping[str, Any], status: Status, verb: str, text: str, *, changed: bool, request: str = ""
) -> Steered:
    meta = resource["metadata"]
    return Steered(
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
