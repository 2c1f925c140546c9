"""Writes to the API server: statuses, events, and one branch per action. Every action can be repeated safely."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from http import HTTPStatus
from typing import Any

from elastic_operator.api.serialization import format_time, to_wire
from elastic_operator.api.status import Status
from elastic_operator.client.api_client import KubernetesClient
from elastic_operator.client.api_errors import ApiError
from elastic_operator.client.resources import (
    ACCOUNT,
    DISRUPTION_BUDGET,
    EVENT,
    JOB,
    LEASE,
    POD,
    REVISION,
    ROLE,
    ROLE_BINDING,
    SERVICE,
    TRAINING_JOB,
    WORKLOAD,
    ResourceKind,
    kind_of,
)
from elastic_operator.cluster.reader import ClusterReader
from elastic_operator.manifests.attempt import MANAGER, JobRef
from elastic_operator.observed import ownership
from elastic_operator.observed.commit_history import format_released
from elastic_operator.observed.observation import WORKER, JobView, PodView, controller_of
from elastic_operator.reconcile import effective_spec
from elastic_operator.reconcile.actions import (
    Action,
    Create,
    DeleteJob,
    DeletePod,
    DeleteResource,
    DeleteWorkload,
    Event,
    LaunchAttempt,
    PatchWorkload,
    ReleaseCommits,
    RequestDrain,
    RequestStop,
    RevokeAttempt,
)
from reshard.contract import GROUP, KIND, VERSION, LeaseKey, Request

_MESSAGE_LIMIT = 1024
"""Maximum length of the message of a core/v1 Event."""

_EVENTS_KNOWN = 4096
"""Number of posted Events whose names are cached, so that a repeated Event only raises the count."""


class ConflictError(Exception):
    """Another client has changed the object since it was read: read it again."""


class NameTakenError(Exception):
    """An object that the resource does not own has a name that the operator needs. The operator never adopts it."""


class PredecessorError(Exception):
    """Pods of an earlier resource of the same name may still run, or may still be created."""


class ClusterWriter:
    """Writes everything that the operator writes for jobs."""

    def __init__(
        self, client: KubernetesClient, reader: ClusterReader, fence: Callable[[], None] = lambda: None
    ) -> None:
        """Create a writer.

        Args:
            client: client for the API server.
            reader: reads what a write depends on.
            fence: called before every write; exits if this process may no longer write.
        """
        self._client = client
        self._reader = reader
        self._fence = fence
        self._events: dict[str, str] = {}

    async def write_status(self, resource: Mapping[str, Any], status: Status) -> Mapping[str, Any] | None:
        """Replace the status; return the API server's answer, or None if the status equals the one that was read.

        Raises:
            ConflictError: the resource has changed since `resource` was read.
        """
        wire = to_wire(status)
        if wire == resource.get("status"):
            return None
        # The resourceVersion in the metadata makes this a compare-and-swap.
        body = {**resource, "status": wire}
        self._fence()
        try:
            return await self._client.replace(TRAINING_JOB, body, subresource="status", fieldManager=MANAGER)
        except ApiError as error:
            if error.code in (HTTPStatus.CONFLICT, HTTPStatus.NOT_FOUND):
                raise ConflictError(str(error)) from error
            raise

    async def keep_spec(self, job: JobRef, spec: Mapping[str, Any]) -> None:
        """Store an accepted spec in a ControllerRevision, and delete the revisions of older specs.

        Raises:
            ApiError: the API server rejected the revision.
            NameTakenError: a revision of this name belongs to another resource.
        """
        await self._create(effective_spec.build_revision(job, spec))
        if job.generation > 1:
            for name, uid in effective_spec.stale_revisions(await self._reader.revisions(job.namespace, job.name), job):
                await self._delete_known(REVISION, job.namespace, name, uid)

    async def act(self, namespace: str, job: str, action: Action) -> None:
        """Execute one action.

        Raises:
            ConflictError: the cluster has changed since the decision.
            NameTakenError: an object that the job does not own has the name of an object to create.
            PredecessorError: pods of an earlier job of the same name prevent a launch.
        """
        match action:
            case Create(manifest=manifest):
                await self._create(manifest)
            case LaunchAttempt():
                await self._launch(action)
            case DeleteJob(name=name, uid=uid):
                await self._delete_known(JOB, namespace, name, uid, propagationPolicy="Background")
            case DeletePod(name=name, uid=uid, grace_seconds=seconds):
                await self._delete_known(POD, namespace, name, uid, gracePeriodSeconds=seconds)
            case DeleteResource(name=name, uid=uid, version=version):
                # In the foreground, so that the name is free only when nothing of the job is left.
                await self._delete_known(TRAINING_JOB, namespace, name, uid, version, propagationPolicy="Foreground")
            case RevokeAttempt(name=name, owner=owner, gang=gang):
                await self._delete_disruption_budget(namespace, name, owner)
                if gang:
                    kind = kind_of({"apiVersion": gang, "kind": "PodGroup"})
                    await self._delete_owned(kind, namespace, name, owner)
                for kind in (ROLE_BINDING, ROLE, ACCOUNT, SERVICE, LEASE):
                    await self._delete_owned(kind, namespace, name, owner)
            case RequestDrain(lease=lease, uid=uid):
                await self._annotate(namespace, lease, uid, LeaseKey.REQUEST, Request.DRAIN)
            case RequestStop(lease=lease, uid=uid):
                await self._annotate(namespace, lease, uid, LeaseKey.REQUEST, Request.STOP)
            case ReleaseCommits(lease=lease, uid=uid, names=names):
                await self._annotate(namespace, lease, uid, LeaseKey.RELEASED, format_released(names))
            case DeleteWorkload(name=name, uid=uid):
                await self._delete_known(WORKLOAD, namespace, name, uid)
            case PatchWorkload():
                await self._patch_workload(namespace, action)

    async def _patch_workload(self, namespace: str, action: PatchWorkload) -> None:
        """Change a Workload that nobody has changed since it was read."""
        guard = {"uid": action.uid, "resourceVersion": action.version}
        changes = {**action.changes, "metadata": {**action.changes.get("metadata", {}), **guard}}
        self._fence()
        try:
            await self._client.patch(
                WORKLOAD,
                action.name,
                changes,
                namespace=namespace,
                subresource=action.subresource,
                fieldManager=MANAGER,
            )
        except ApiError as error:
            if error.code in (HTTPStatus.CONFLICT, HTTPStatus.NOT_FOUND):
                raise ConflictError(str(error)) from error
            raise

    async def post_event(self, resource: Mapping[str, Any], event: Event, now: float) -> None:
        """Post an Event about the resource; if the same Event was posted before, only raise its count.

        Event names contain the time in nanoseconds, as client-go's do. `kubectl describe` sorts by whole seconds and
        then by name, so this keeps Events of the same second in order.
        """
        meta = resource["metadata"]
        message = event.message if len(event.message) <= _MESSAGE_LIMIT else event.message[: _MESSAGE_LIMIT - 3] + "..."
        digest = hashlib.sha256(f"{meta['uid']}/{event.reason}/{message}".encode()).hexdigest()[:12]
        moment = format_time(now)[:-5] + "Z"
        known_name = self._events.get(digest)
        name = known_name or f"{meta['name']}.{time.time_ns():x}"
        body = {
            "apiVersion": "v1",
            "kind": "Event",
            "metadata": {"name": name, "namespace": meta["namespace"]},
            "involvedObject": {
                "apiVersion": f"{GROUP}/{VERSION}",
                "kind": KIND,
                "name": meta["name"],
                "namespace": meta["namespace"],
                "uid": meta["uid"],
            },
            "type": "Warning" if event.warning else "Normal",
            "reason": event.reason,
            "message": message,
            "source": {"component": MANAGER},
            "reportingComponent": MANAGER,
            "firstTimestamp": moment,
            "lastTimestamp": moment,
            "count": 1,
        }
        self._fence()
        if known_name and await self._count_event(known_name, meta["namespace"], moment):
            return
        await self._client.create(EVENT, body)
        self._events[digest] = name
        while len(self._events) > _EVENTS_KNOWN:
            del self._events[next(iter(self._events))]

    async def _count_event(self, name: str, namespace: str, moment: str) -> bool:
        """Raise the count of an Event that was posted before; return False if it has expired."""
        try:
            old = await self._client.get(EVENT, name, namespace=namespace)
            changes = {"count": int(old.get("count") or 1) + 1, "lastTimestamp": moment}
            await self._client.patch(EVENT, name, changes, namespace=namespace)
        except ApiError as error:
            if error.code == HTTPStatus.NOT_FOUND:
                return False
            raise
        return True

    async def _launch(self, action: LaunchAttempt) -> None:
        """Create the objects of an attempt, after a last check that no pod of an older attempt can run.

        The pods are read from the API server, because the decision may have been made from an older observation.
        """
        pods, all_predecessors = await self._reader.own_pods(action.job, action.job_uids)
        for pod in pods:
            is_harmless = pod.terminal or pod.node in action.lost_nodes or pod.uid in action.stuck_pods
            if pod.role == WORKER and not is_harmless:
                raise ConflictError(f"expected no pods of older attempts, found {pod.name} of attempt {pod.attempt}")
        # A Job with the name of one to create is reported by name (NameTakenError).
        names = {manifest["metadata"]["name"] for manifest in action.manifests}
        predecessors = [item for item in all_predecessors if not (isinstance(item, JobView) and item.name in names)]
        if predecessors:
            found = _describe_predecessors(predecessors)
            raise PredecessorError(
                f"{found} of an earlier {KIND} of this name are still there: they are deleted together with it; "
                "delete them if they stay"
            )
        for manifest in action.manifests:
            if manifest["kind"] == DISRUPTION_BUDGET.kind:
                await self._create_disruption_budget(action.job, manifest)
            else:
                await self._create(manifest)

    async def _create_disruption_budget(self, job: JobRef, manifest: Mapping[str, Any]) -> None:
        """Create the PodDisruptionBudget of an attempt; if the operator may not, post an event and go on."""
        try:
            await self._create(manifest)
        except ApiError as error:
            if error.code != HTTPStatus.FORBIDDEN:
                raise
            message = (
                f"attempt {manifest['metadata']['name']} runs without a PodDisruptionBudget, so an eviction may end it "
                f"before it has committed: {error.message or error}; grant the operator get, create and delete of "
                "poddisruptionbudgets (the chart does), or set spec.recovery.podDisruptionBudget to false"
            )
            resource = {"metadata": {"name": job.name, "namespace": job.namespace, "uid": job.uid}}
            event = Event(reason="DisruptionBudgetRefused", message=message, warning=True)
            await self.post_event(resource, event, time.time())

    async def _delete_disruption_budget(self, namespace: str, name: str, owner: str) -> None:
        """Delete the PodDisruptionBudget of an attempt; an operator that may not create one has none to delete."""
        try:
            await self._delete_owned(DISRUPTION_BUDGET, namespace, name, owner)
        except ApiError as error:
            if error.code != HTTPStatus.FORBIDDEN:
                raise

    async def _annotate(self, namespace: str, lease: str, uid: str, key: LeaseKey, value: str) -> None:
        # With a UID the API server rejects the patch if another object has the name by now.
        meta = {"annotations": {str(key): str(value)}, **({"uid": uid} if uid else {})}
        self._fence()
        await self._ignore_gone(
            self._client.patch(LEASE, lease, {"metadata": meta}, namespace=namespace, fieldManager=MANAGER)
        )

    async def _create(self, manifest: Mapping[str, Any]) -> None:
        """Create an object of a resource, unless the resource already has it.

        Raises:
            ConflictError: an object of this name was deleted just now.
            NameTakenError: an object of this name exists, and the resource does not control it.
        """
        kind, meta = kind_of(manifest), manifest["metadata"]
        self._fence()
        try:
            await self._client.create(kind, manifest, is_compact=kind == REVISION, fieldManager=MANAGER)
        except ApiError as error:
            if error.code != HTTPStatus.CONFLICT:
                raise
            existing = await self._read(kind, meta["namespace"], meta["name"])
            if existing is None:
                raise ConflictError(f"{manifest['kind']} {meta['name']} was deleted while it was created") from error
            if not ownership.is_controlled_by(existing, controller_of(meta)["uid"]):
                raise NameTakenError(_name_taken_message(manifest, existing)) from error

    async def _read(self, kind: ResourceKind, namespace: str, name: str) -> Mapping[str, Any] | None:
        try:
            return await self._client.get(kind, name, namespace=namespace)
        except ApiError as error:
            if error.code == HTTPStatus.NOT_FOUND:
                return None
            raise

    async def _delete_owned(self, kind: ResourceKind, namespace: str, name: str, owner: str) -> None:
        """Delete an object if the resource with the UID `owner` controls it."""
        existing = await self._read(kind, namespace, name)
        if existing is not None and ownership.is_controlled_by(existing, owner):
            await self._delete_known(kind, namespace, name, existing["metadata"]["uid"])

    async def _delete_known(
        self, kind: ResourceKind, namespace: str, name: str, uid: str, version: str = "", **options: Any
    ) -> None:
        """Delete the object with this UID; the API server rejects the request if another object has the name by now.

        With a resourceVersion the API server also rejects the request if the object has been changed since.
        """
        self._fence()
        preconditions = {"uid": uid, **({"resourceVersion": version} if version else {})}
        await self._ignore_gone(
            self._client.delete(kind, name, namespace=namespace, preconditions=preconditions, **options)
        )

    @staticmethod
    async def _ignore_gone(call: Awaitable[object]) -> None:
        """Await a request, and ignore the error that the object no longer exists.

        Raises:
            ConflictError: another object has the name by now, or the object was changed meanwhile. The next pass reads
                which of both, and repeats what is still to be done.
        """
        try:
            await call
        except ApiError as error:
            if error.code == HTTPStatus.CONFLICT:
                raise ConflictError(str(error)) from error
            # A patch with the UID of a deleted object is "unprocessable" if another object has its name.
            if error.code not in (HTTPStatus.NOT_FOUND, HTTPStatus.UNPROCESSABLE_ENTITY):
                raise


def _describe_predecessors(predecessors: Sequence[PodView | JobView]) -> str:
    """Return how many pods and Jobs there are, with the first names of each."""
    pods = sorted(item.name for item in predecessors if isinstance(item, PodView))
    jobs = sorted(item.name for item in predecessors if isinstance(item, JobView))
    kinds = (("pods", pods), ("Jobs", jobs))
    return " and ".join(f"{len(names)} {kind} ({', '.join(names[:3])})" for kind, names in kinds if names)


def _name_taken_message(manifest: Mapping[str, Any], existing: Mapping[str, Any]) -> str:
    """Describe the object that has the name of `manifest`, and what the user can do about it."""
    meta = manifest["metadata"]
    problem = f"{manifest['kind']} {meta['namespace']}/{meta['name']} exists already and is not this job's"
    owner = controller_of(existing["metadata"])
    if owner.get("kind") == KIND and owner.get("name") == controller_of(meta).get("name"):
        return (
            f"{problem}: it belongs to an earlier {KIND} of this name (UID {owner.get('uid')}) and is removed with it "
            "by garbage collection; delete it if it stays"
        )
    return f"{problem} ({ownership.describe_owner(existing)}): delete it, or create the job under another name"
