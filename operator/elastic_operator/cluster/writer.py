"""Writes the cluster. One branch per action; every one may be repeated."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Mapping
from http import HTTPStatus
from typing import Any

from lightkube import AsyncClient
from lightkube.core.exceptions import ApiError
from lightkube.types import CascadeType, PatchType

from elastic_operator.api.serialization import format_time, to_wire
from elastic_operator.api.status import Status
from elastic_operator.cluster.reader import ClusterReader
from elastic_operator.cluster.resources import (
    ACCOUNT,
    BY_KIND,
    EVENT,
    JOB,
    LEASE,
    POD,
    REVISION,
    ROLE,
    ROLE_BINDING,
    SERVICE,
    TRAINING_JOB,
    make,
)
from elastic_operator.manifests.attempt import MANAGER, JobRef
from elastic_operator.observed import ownership
from elastic_operator.observed.commit_history import released_text
from elastic_operator.observed.observation import WORKER, controller_of
from elastic_operator.reconcile import effective_spec
from elastic_operator.reconcile.actions import (
    Action,
    Create,
    DeleteJob,
    DeletePod,
    Event,
    LaunchAttempt,
    ReleaseCommits,
    RequestDrain,
    RevokeAttempt,
)
from reshard.contract import GROUP, KIND, VERSION, LeaseKey, Request

_MESSAGE_LIMIT = 1024
"""Of a core/v1 Event."""

_EVENTS_KNOWN = 4096
"""Events whose names are remembered, so that a repeated one is counted and not posted again."""


class ConflictError(Exception):
    """Somebody else has changed the object since it was read: look again."""


class NameTakenError(Exception):
    """An object that is not the resource's has a name that the operator needs. It is never taken over."""


class PredecessorError(Exception):
    """Pods of an earlier resource of the same name may still run."""


class ClusterWriter:
    """All writing, for one namespace and job at a time."""

    def __init__(self, client: AsyncClient, observer: ClusterReader, fence: Callable[[], None] = lambda: None) -> None:
        """`fence` is called before every write, and does not return to a process that may not write any more."""
        self._client = client
        self._observer = observer
        self._fence = fence
        self._events: dict[str, str] = {}

    async def write_status(self, resource: Mapping[str, Any], status: Status) -> Mapping[str, Any] | None:
        """Replace the status; the resource with it, None if it does not differ from what was read.

        Raises:
            ConflictError: the resource has changed since `resource` was read.
        """
        wire = to_wire(status)
        if wire == resource.get("status"):
            return None
        # The resourceVersion inside of the metadata makes this a compare-and-swap.
        body = make(TRAINING_JOB.Status, {**resource, "status": wire})
        self._fence()
        try:
            return dict(await self._client.replace(body, field_manager=MANAGER))
        except ApiError as error:
            if error.status.code in (HTTPStatus.CONFLICT, HTTPStatus.NOT_FOUND):
                raise ConflictError(str(error)) from error
            raise

    async def keep_spec(self, job: JobRef, spec: Mapping[str, Any]) -> None:
        """Keep an accepted spec, in the place of those before it.

        Raises:
            ApiError: it cannot be kept.
            NameTakenError: likewise.
        """
        await self._create(effective_spec.revision(job, spec))
        if job.generation > 1:
            for name, uid in effective_spec.stale_revisions(
                await self._observer.revisions(job.namespace, job.name), job
            ):
                await self._delete_known(REVISION, job.namespace, name, uid)

    async def act(self, namespace: str, job: str, action: Action) -> None:
        """Do one thing.

        Raises:
            ConflictError: the world is not as the decision saw it.
            NameTakenError: an object that is not the job's is in the way of one to create.
            PredecessorError: pods of an earlier job of the same name are in the way of a launch.
        """
        match action:
            case Create(manifest=manifest):
                await self._create(manifest)
            case LaunchAttempt():
                await self._launch(action)
            case DeleteJob(name=name, uid=uid):
                await self._delete_known(JOB, namespace, name, uid, propagationPolicy=CascadeType.BACKGROUND.value)
            case DeletePod(name=name, uid=uid, grace_seconds=seconds):
                await self._delete_known(POD, namespace, name, uid, gracePeriodSeconds=seconds)
            case RevokeAttempt(name=name, owner=owner):
                for kind in (ROLE_BINDING, ROLE, ACCOUNT, SERVICE, LEASE):
                    await self._delete_owned(kind, namespace, name, owner)
            case RequestDrain(lease=lease, uid=uid):
                await self._annotate(namespace, lease, uid, LeaseKey.REQUEST, Request.DRAIN)
            case ReleaseCommits(lease=lease, uid=uid, names=names):
                await self._annotate(namespace, lease, uid, LeaseKey.RELEASED, released_text(names))

    async def post_event(self, resource: Mapping[str, Any], event: Event, now: float) -> None:
        """Post an Event about the resource; the same text again only raises the count.

        Names grow with time, as client-go's do: `kubectl describe` sorts by whole seconds, and would otherwise tell
        what happened within one of them in any order.
        """
        meta = resource["metadata"]
        message = event.message if len(event.message) <= _MESSAGE_LIMIT else event.message[: _MESSAGE_LIMIT - 3] + "..."
        digest = hashlib.sha256(f"{meta['uid']}/{event.reason}/{message}".encode()).hexdigest()[:12]
        moment = format_time(now)[:-5] + "Z"
        known = self._events.get(digest)
        name = known or f"{meta['name']}.{time.time_ns():x}"
        body = make(
            EVENT,
            {
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
            },
        )
        self._fence()
        if known and await self._count_event(known, meta["namespace"], moment):
            return
        await self._client.create(body)
        self._events[digest] = name
        while len(self._events) > _EVENTS_KNOWN:
            del self._events[next(iter(self._events))]

    async def _count_event(self, name: str, namespace: str, moment: str) -> bool:
        """Raise the count of an event that was posted before; False if it has expired since."""
        try:
            old = await self._client.get(EVENT, name, namespace=namespace)
            again = {"count": int(old.get("count") or 1) + 1, "lastTimestamp": moment}
            await self._client.patch(EVENT, name, again, namespace=namespace, patch_type=PatchType.MERGE)
        except ApiError as error:
            if error.status.code == HTTPStatus.NOT_FOUND:
                return False
            raise
        return True

    async def _launch(self, action: LaunchAttempt) -> None:
        """The last gate: whatever the decision was made from, no pod of an older attempt may run now."""
        pods, left = await self._observer.own_pods(action.job, action.job_uids)
        for pod in pods:
            if pod.role == WORKER and not pod.terminal and pod.node not in action.lost_nodes:
                raise ConflictError(f"pod {pod.name} of attempt {pod.attempt} is still there")
        if left:
            names = ", ".join(sorted(pod.name for pod in left)[:3])
            raise PredecessorError(
                f"{len(left)} pods of an earlier {KIND} of this name are still there ({names}): they go with it; "
                "delete them if they do not"
            )
        for manifest in action.manifests:
            await self._create(manifest)

    async def _annotate(self, namespace: str, lease: str, uid: str, key: LeaseKey, value: str) -> None:
        # The UID inside of a patch makes it one of this very object.
        meta = {"annotations": {str(key): str(value)}, **({"uid": uid} if uid else {})}
        self._fence()
        await self._unless_gone(
            self._client.patch(
                LEASE,
                lease,
                {"metadata": meta},
                namespace=namespace,
                patch_type=PatchType.MERGE,
                field_manager=MANAGER,
            )
        )

    async def _create(self, manifest: Mapping[str, Any]) -> None:
        """Create an object of a resource, unless it is there already.

        Raises:
            NameTakenError: another one is, which the resource does not control.
        """
        kind, meta = BY_KIND[manifest["kind"]], manifest["metadata"]
        self._fence()
        try:
            await self._client.create(make(kind, manifest), field_manager=MANAGER)
        except ApiError as error:
            if error.status.code != HTTPStatus.CONFLICT:
                raise
            found = await self._read(kind, meta["namespace"], meta["name"])
            if found is None:
                raise ConflictError(f"{manifest['kind']} {meta['name']} was there a moment ago") from error
            if not ownership.is_controlled_by(found, controller_of(meta)["uid"]):
                raise NameTakenError(_taken(manifest, found)) from error

    async def _read(self, kind: Any, namespace: str, name: str) -> Mapping[str, Any] | None:
        try:
            found: Mapping[str, Any] = await self._client.get(kind, name, namespace=namespace)
        except ApiError as error:
            if error.status.code == HTTPStatus.NOT_FOUND:
                return None
            raise
        return found

    async def _delete_owned(self, kind: Any, namespace: str, name: str, owner: str) -> None:
        """Delete an object if the resource with the UID `owner` controls it; one of somebody else's stays."""
        found = await self._read(kind, namespace, name)
        if found is not None and ownership.is_controlled_by(found, owner):
            await self._delete_known(kind, namespace, name, found["metadata"]["uid"])

    async def _delete_known(self, kind: Any, namespace: str, name: str, uid: str, **options: Any) -> None:
        """Delete the object with this UID. The API server refuses where another one has its name by now."""
        http = self._client._client
        request = http.prepare_request("delete", res=kind, name=name, namespace=namespace)
        # `delete` has no argument for preconditions.
        request.data = {"apiVersion": "v1", "kind": "DeleteOptions", "preconditions": {"uid": uid}, **options}
        self._fence()
        await self._unless_gone(self._answered(request))

    async def _answered(self, request: Any) -> None:
        http: Any = self._client._client
        http.handle_response("delete", await http.send(http.build_adapter_request(request)), request)

    @staticmethod
    async def _unless_gone(call: Any) -> None:
        """Wait for an answer; that the very object is not there any more is as good."""
        try:
            await call
        except ApiError as error:
            # A patch with the UID of an object that is gone is "unprocessable" where another one has its name.
            gone = (HTTPStatus.NOT_FOUND, HTTPStatus.CONFLICT, HTTPStatus.UNPROCESSABLE_ENTITY)
            if error.status.code not in gone:
                raise


def _taken(manifest: Mapping[str, Any], found: Mapping[str, Any]) -> str:
    """What is in the way of an object, and what to do about it."""
    meta = manifest["metadata"]
    what = f"{manifest['kind']} {meta['namespace']}/{meta['name']} exists already and is not this job's"
    owner = controller_of(found["metadata"])
    if owner.get("kind") == KIND and owner.get("name") == controller_of(meta).get("name"):
        return (
            f"{what}: it belongs to an earlier {KIND} of this name (UID {owner.get('uid')}) and is removed with it by "
            "garbage collection; delete it if it stays"
        )
    return f"{what} ({ownership.owner_text(found)}): delete it, or create the job under another name"
