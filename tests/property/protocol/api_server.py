"""An API server as a value, the real `ClusterWriter` that writes to it, and the views that the operator reads from it.

Only objects that another process can notice are kept: Leases, the right to use them, Jobs and pods.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any, NamedTuple

from elastic_operator.client.api_errors import ApiError
from elastic_operator.client.resources import JOB, LEASE, POD, ROLE_BINDING, ResourceKind
from elastic_operator.cluster.writer import ClusterWriter, ConflictError
from elastic_operator.manifests.attempt import JobRef, attempt_name, reshard_name
from elastic_operator.observed.observation import (
    RESHARD,
    WORKER,
    JobView,
    LeaseView,
    NodeView,
    Observation,
    PodView,
    Start,
    attempt_of,
    job_view,
    lease_view,
)
from elastic_operator.observed.ownership import select_own
from elastic_operator.reconcile.actions import Action
from reshard.contract import Label
from tests.property.protocol.trainer import FORMER, Annotations

NOW = 1_800_000_000.0
LONG_AGO = NOW - 100_000.0
GPU = "amd.com/gpu"


class Job(NamedTuple):
    """A training or reshard Job. `manifest`: number of its manifest."""

    attempt: int
    role: str
    manifest: int
    is_complete: bool = False
    is_failed: bool = False


class Pod(NamedTuple):
    """The one pod of a Job."""

    attempt: int
    role: str
    node: str
    phase: str = "Running"
    is_deleted: bool = False
    exit_code: int | None = None
    message: str = ""


class Objects(NamedTuple):
    """Everything on the API server except the resource itself.

    Attributes:
        leases: attempt and annotations.
        rights: attempts that have the right to use their Lease (the RoleBinding).
    """

    leases: tuple[tuple[int, Annotations], ...] = ()
    rights: tuple[int, ...] = ()
    jobs: tuple[Job, ...] = ()
    pods: tuple[Pod, ...] = ()

    def lease(self, attempt: int) -> Annotations | None:
        """Return the annotations of an attempt's Lease if the attempt may use it."""
        return dict(self.leases).get(attempt) if attempt in self.rights else None

    def with_lease(self, attempt: int, annotations: Annotations) -> Objects:
        return self._replace(leases=tuple(sorted({**dict(self.leases), attempt: annotations}.items())))

    def job(self, attempt: int, role: str) -> Job | None:
        return next((job for job in self.jobs if (job.attempt, job.role) == (attempt, role)), None)

    def pod(self, attempt: int, role: str = WORKER) -> Pod | None:
        return next((pod for pod in self.pods if (pod.attempt, pod.role) == (attempt, role)), None)

    def with_pod(self, attempt: int, role: str, pod: Pod | None) -> Objects:
        others = [item for item in self.pods if (item.attempt, item.role) != (attempt, role)]
        return self._replace(pods=tuple(sorted([*others, *([pod] if pod is not None else [])])))


class ApiServer:
    """Executes actions on `Objects`, and makes observations of them."""

    def __init__(self, job: JobRef, gpus: Mapping[str, int]) -> None:
        self.job = job
        self.gpus = gpus
        self._manifests: list[Any] = []
        self._numbers: dict[str, int] = {}
        self._views: dict[Any, Any] = {}

    def manifest(self, job: Job) -> Mapping[str, Any]:
        found: Mapping[str, Any] = self._manifests[job.manifest]
        return found

    def container(self, job: Job) -> Mapping[str, Any]:
        """Return the main container of a Job."""
        found: Mapping[str, Any] = self.manifest(job)["spec"]["template"]["spec"]["containers"][0]
        return found

    def number(self, manifest: Mapping[str, Any]) -> int:
        key = repr(manifest)
        if key not in self._numbers:
            self._numbers[key] = len(self._manifests)
            self._manifests.append(copy.deepcopy(dict(manifest)))
        return self._numbers[key]

    def act(self, objects: Objects, action: Action) -> tuple[list[Objects], bool]:
        """Execute an action; return the objects after each of its requests, and whether it was executed wholly."""
        client = _Client(self, objects)
        call = ClusterWriter(client, _Reader(self, objects)).act(self.job.namespace, self.job.name, action)  # type: ignore[arg-type]
        try:
            call.send(None)
        except StopIteration:
            return client.after, True
        except ConflictError:
            return client.after, False
        raise AssertionError("the stand-in for the API server never waits")

    def observe(
        self,
        objects: Objects,
        lost: frozenset[str],
        *,
        known: tuple[str, ...],
        stale: frozenset[int],
        starts: frozenset[Start],
    ) -> Observation:
        """Return what the operator reads.

        Args:
            objects: what is there.
            lost: nodes that do not report.
            known: UIDs of Jobs that the status names.
            stale: attempts whose heartbeat has been missing for longer than its grace.
            starts: where other jobs will start.
        """
        leases = [self._lease_view(attempt, notes, stale) for attempt, notes in objects.leases if attempt != FORMER]
        world = Observation(
            nodes={name: self._node_view(name, name in lost) for name in self.gpus},
            pods=tuple(self.pod_view(pod) for pod in objects.pods),
            jobs=tuple(self._job_view(job) for job in objects.jobs),
            leases=dict(enumerate(leases)),
            starts=starts,
        )
        return select_own(world, self.job, known)

    def pod_view(self, pod: Pod) -> PodView:
        return PodView(
            name=f"{self._name(pod.attempt, pod.role)}-0",
            uid=f"pod-{pod.role}-{pod.attempt}",
            attempt=pod.attempt,
            role=pod.role,
            node=pod.node,
            index=0,
            phase=pod.phase,
            created_at=NOW,
            deleted_at=LONG_AGO if pod.is_deleted else None,
            requests={GPU: self.gpus[pod.node]} if pod.role == WORKER else {},
            exit_code=pod.exit_code,
            termination_message=pod.message,
            owner=job_uid(pod.attempt, pod.role),
            owner_name=self._name(pod.attempt, pod.role),
        )

    def _name(self, attempt: int, role: str) -> str:
        return (reshard_name if role == RESHARD else attempt_name)(self.job.name, attempt)

    def _job_view(self, job: Job) -> JobView:
        types = ["Complete"] * job.is_complete + ["Failed"] * job.is_failed
        conditions = [{"type": name, "status": "True"} for name in types]
        return job_view({**self.object_of(job), "status": {"conditions": conditions}})

    def object_of(self, job: Job) -> dict[str, Any]:
        manifest = self.manifest(job)
        return {**manifest, "metadata": {**manifest["metadata"], "uid": job_uid(job.attempt, job.role)}}

    def _lease_view(self, attempt: int, annotations: Annotations, stale: frozenset[int]) -> LeaseView:
        item = self.lease_object(attempt, annotations)
        has_renewed = bool(annotations) or attempt in stale
        item["spec"] = {"renewTime": "now"} if has_renewed else {}
        return lease_view(item, LONG_AGO if attempt in stale else NOW)

    def lease_object(self, attempt: int, annotations: Annotations) -> dict[str, Any]:
        return self._owned("Lease", attempt) | {"metadata": {
            **self._owned("Lease", attempt)["metadata"], "annotations": dict(annotations)
        }}  # fmt: skip

    def _owned(self, kind: str, attempt: int) -> dict[str, Any]:
        owner = {"kind": "ElasticTrainingJob", "name": self.job.name, "uid": self.job.uid, "controller": True}
        meta = {
            "name": attempt_name(self.job.name, attempt),
            "namespace": self.job.namespace,
            "uid": f"{kind}-{attempt}",
            "labels": {str(Label.ATTEMPT): str(attempt)},
            "ownerReferences": [owner],
        }
        return {"kind": kind, "metadata": meta}

    def _node_view(self, name: str, is_lost: bool) -> NodeView:
        return NodeView(
            name=name,
            ready="Unknown" if is_lost else "True",
            # A pod on a Ready node is never stuck here: it ends, or its node is lost.
            ready_since=NOW - 100.0 if is_lost else NOW,
            allocatable={GPU: self.gpus[name]},
            capacity={GPU: self.gpus[name]},
            lease_age_seconds=1000.0 if is_lost else 0.0,
        )


def job_uid(attempt: int, role: str) -> str:
    return f"job-{role}-{attempt}"


class _Reader:
    """Stands for `ClusterReader`: reads the pods from the API server at once."""

    def __init__(self, server: ApiServer, objects: Objects) -> None:
        self._server, self._objects = server, objects

    async def own_pods(self, job: JobRef, known: Any) -> tuple[tuple[PodView, ...], list[PodView | JobView]]:
        return tuple(self._server.pod_view(pod) for pod in self._objects.pods), []


class _Client:
    """Stands for `KubernetesClient`. `after`: the objects after each request that has changed them."""

    def __init__(self, server: ApiServer, objects: Objects) -> None:
        self._server = server
        self._objects = objects
        self.after: list[Objects] = []

    def _keep(self, objects: Objects) -> None:
        if objects != self._objects:
            self._objects = objects
            self.after.append(objects)

    async def create(self, kind: ResourceKind, manifest: Mapping[str, Any], **options: Any) -> None:
        now, meta = self._objects, manifest["metadata"]
        attempt = attempt_of(meta)
        if self._find(kind, meta["name"]) is not None:
            raise ApiError(409, meta["name"], {})
        if kind == LEASE:
            self._keep(now.with_lease(attempt, ()))
        elif kind == ROLE_BINDING:
            self._keep(now._replace(rights=tuple(sorted({*now.rights, attempt}))))
        elif kind == JOB:
            job = Job(attempt, meta["labels"][Label.ROLE], self._server.number(manifest))
            self._keep(now._replace(jobs=tuple(sorted([*now.jobs, job]))))

    async def get(self, kind: ResourceKind, name: str, namespace: str = "") -> Mapping[str, Any]:
        found = self._find(kind, name)
        if found is None:
            raise ApiError(404, name, {})
        return found

    async def delete(
        self, kind: ResourceKind, name: str, namespace: str, preconditions: Mapping[str, str], **options: Any
    ) -> None:
        found = self._find(kind, name)
        if found is None:
            raise ApiError(404, name, {})
        if found["metadata"]["uid"] != preconditions["uid"]:
            raise ApiError(409, name, {})
        now, attempt = self._objects, found["attempt"]
        if kind == LEASE:
            self._keep(now._replace(leases=tuple(item for item in now.leases if item[0] != attempt)))
        elif kind == ROLE_BINDING:
            self._keep(now._replace(rights=tuple(item for item in now.rights if item != attempt)))
        elif kind == JOB:
            self._keep(now._replace(jobs=tuple(j for j in now.jobs if (j.attempt, j.role) != (attempt, found["role"]))))
        elif kind == POD:
            pod = now.pod(attempt, found["role"])
            assert pod is not None
            is_forced = options.get("gracePeriodSeconds") == 0
            self._keep(now.with_pod(attempt, found["role"], None if is_forced else pod._replace(is_deleted=True)))

    async def patch(
        self, kind: ResourceKind, name: str, changes: Mapping[str, Any], namespace: str, **options: Any
    ) -> None:
        found = self._find(kind, name)
        if found is None:
            raise ApiError(404, name, {})
        if found["metadata"]["uid"] != changes["metadata"].get("uid", found["metadata"]["uid"]):
            raise ApiError(422, name, {})
        attempt = found["attempt"]
        merged = dict(dict(self._objects.leases)[attempt])
        merged.update(changes["metadata"]["annotations"])
        self._keep(self._objects.with_lease(attempt, tuple(sorted(merged.items()))))

    def _find(self, kind: ResourceKind, name: str) -> dict[str, Any] | None:
        """Return an object with its attempt and role beside its manifest."""
        now, server = self._objects, self._server
        if kind == LEASE:
            for attempt, notes in now.leases:
                if attempt_name(server.job.name, attempt) == name:
                    return server.lease_object(attempt, notes) | {"attempt": attempt}
        elif kind == ROLE_BINDING:
            for attempt in now.rights:
                if attempt_name(server.job.name, attempt) == name:
                    return server._owned("RoleBinding", attempt) | {"attempt": attempt}
        elif kind == JOB:
            for job in now.jobs:
                if server.manifest(job)["metadata"]["name"] == name:
                    return server.object_of(job) | {"attempt": job.attempt, "role": job.role}
        elif kind == POD:
            for pod in now.pods:
                view = server.pod_view(pod)
                if view.name == name:
                    return {"metadata": {"uid": view.uid}, "attempt": pod.attempt, "role": pod.role}
        return None
