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

from elastic_operator import accepted
from elastic_operator.actions import (
    Action,
    Create,
    DeleteJob,
    DeletePod,
    Event,
    LaunchAttempt,
    RequestDrain,
    RevokeAttempt,
)
from elastic_operator.manifests import MANAGER, JobRef
from elastic_operator.observation import WORKER, pod_view
from elastic_operator.observe import Observer
from elastic_operator.resources import (
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
from elastic_operator.status import Status
from elastic_operator.wire import format_time, to_wire
from reshard.contract import GROUP, KIND, VERSION, LeaseKey, Request

_MESSAGE_LIMIT = 1024
"""Of a core/v1 Event."""

_EVENTS_KNOWN = 4096
"""Events whose names are remembered, so that a repeated one is counted and not posted again."""


class ConflictError(Exception):
    """Somebody else has changed the object since it was read: look again."""


class Applier:
    """All writing, for one namespace and job at a time."""

    def __init__(self, client: AsyncClient, observer: Observer, fence: Callable[[], None] = lambda: None) -> None:
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
        """
        await self._create(accepted.revision(job, spec))
        if job.generation > 1:
            for name in accepted.outlived(await self._observer.revisions(job.namespace, job.name), job):
                await self._delete(REVISION, job.namespace, name)

    async def act(self, namespace: str, job: str, action: Action) -> None:
        """Do one thing.

        Raises:
            ConflictError: the world is not as the decision saw it.
        """
        match action:
            case Create(manifest=manifest):
                await self._create(manifest)
            case LaunchAttempt():
                await self._launch(namespace, job, action)
            case DeleteJob(name=name, uid=uid):
                await self._delete(JOB, namespace, name, uid=uid, cascade=CascadeType.BACKGROUND)
            case DeletePod(name=name, uid=uid, grace_seconds=seconds):
                await self._delete(POD, namespace, name, uid=uid, grace_period=seconds)
            case RevokeAttempt(name=name):
                for kind in (ROLE_BINDING, ROLE, ACCOUNT, SERVICE, LEASE):
                    await self._delete(kind, namespace, name)
            case RequestDrain(lease=lease):
                annotations = {str(LeaseKey.REQUEST): str(Request.DRAIN)}
                self._fence()
                await self._ignoring_absent(
                    self._client.patch(
                        LEASE,
                        lease,
                        {"metadata": {"annotations": annotations}},
                        namespace=namespace,
                        patch_type=PatchType.MERGE,
                        field_manager=MANAGER,
                    )
                )

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

    async def _launch(self, namespace: str, job: str, action: LaunchAttempt) -> None:
        """The last gate: whatever the decision was made from, no pod of an older attempt may run now."""
        for item in await self._observer.pods(namespace, job):
            pod = pod_view(item)
            if pod.role == WORKER and not pod.terminal and pod.node not in action.lost_nodes:
                raise ConflictError(f"pod {pod.name} of attempt {pod.attempt} is still there")
        for manifest in action.manifests:
            await self._create(manifest)

    async def _create(self, manifest: Mapping[str, Any]) -> None:
        kind = BY_KIND[manifest["kind"]]
        self._fence()
        try:
            await self._client.create(make(kind, manifest), field_manager=MANAGER)
        except ApiError as error:
            if error.status.code != HTTPStatus.CONFLICT:
                raise

    async def _delete(self, kind: Any, namespace: str, name: str, *, uid: str = "", **options: Any) -> None:
        if uid:
            try:
                found = await self._client.get(kind, name, namespace=namespace)
            except ApiError as error:
                if error.status.code == HTTPStatus.NOT_FOUND:
                    return
                raise
            if found["metadata"]["uid"] != uid:
                return
        self._fence()
        await self._ignoring_absent(self._client.delete(kind, name, namespace=namespace, **options))

    @staticmethod
    async def _ignoring_absent(call: Any) -> None:
        try:
            await call
        except ApiError as error:
            if error.status.code != HTTPStatus.NOT_FOUND:
                raise
