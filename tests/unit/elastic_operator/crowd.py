"""Jobs of one node each that run their first attempt, as watches would tell of them, without a cluster."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from elastic_operator.api.serialization import to_wire
from elastic_operator.api.spec import Spec
from elastic_operator.api.status import Phase, Status
from elastic_operator.cluster.caches import NodeCache, RenewalCache
from elastic_operator.cluster.diagnostics import Diagnostics
from elastic_operator.cluster.informer import Informer
from elastic_operator.cluster.reader import ClusterReader
from elastic_operator.cluster.store import ClusterStore
from elastic_operator.cluster.writer import ClusterWriter, ConflictError
from elastic_operator.controller import JobController
from elastic_operator.observed.observation import Key, Observation
from elastic_operator.observed.timeouts import Timeouts
from elastic_operator.reconcile.actions import Action, Event, LaunchAttempt
from elastic_operator.reconcile.decide import decide
from elastic_operator.reconcile.record import Record

GPU = "amd.com/gpu"
SPEC = {
    "accelerator": {"resource": GPU, "perNode": [8]},
    "nodes": {"min": 1, "max": 1},
    "batch": {"globalSamples": 64, "microSamples": 1},
    "parallelism": {"tensor": [1, 2], "pipeline": [1]},
    "checkpoint": {"claimName": "ckpt", "path": "run"},
    "template": {"spec": {"containers": [{"name": "train", "image": "train:1"}]}},
}


class Asking(ClusterReader):
    """Knows what it is told, and counts what it would have to ask. Finds only what a test has put `there`."""

    def __init__(self, store: ClusterStore, nodes: NodeCache, renewals: RenewalCache) -> None:
        super().__init__(None, nodes, renewals, store, ())  # type: ignore[arg-type]
        self.asked: list[Key] = []
        self.there: dict[Key, dict[str, Any]] = {}
        self.kept: Spec | None = None
        self.num_others = 0

    @property
    def num_jobs(self) -> int:
        return max(super().num_jobs, self.num_others)

    async def training_job(self, namespace: str, name: str) -> dict[str, Any] | None:
        self.asked.append((namespace, name))
        return self.there.get((namespace, name))

    async def accepted_spec(self, namespace: str, job: str, uid: str) -> Spec | None:
        assert uid == f"uid-{job}"
        return self.kept

    async def observe(self, record: Record, resource: str, *, fresh: bool) -> Observation:
        key = (record.job.namespace, record.job.name)
        return dataclasses.replace(self._store.observe(key, resource), capacity_fresh=True)


class Writing(ClusterWriter):
    """Keeps statuses instead of writing them; refuses where the resource is said to have changed."""

    def __init__(self) -> None:
        self.written: list[tuple[Mapping[str, Any], Status]] = []
        self.told: list[str] = []
        self.done: list[Action] = []
        self.stale: set[str] = set()

    async def write_status(self, resource: Mapping[str, Any], status: Status) -> Mapping[str, Any] | None:
        if resource["metadata"]["resourceVersion"] in self.stale:
            raise ConflictError("the resource has changed")
        self.written.append((resource, status))
        meta = {**resource["metadata"], "generation": 1, "resourceVersion": "8"}
        return {"metadata": meta, "spec": SPEC, "status": to_wire(status)}

    async def act(self, namespace: str, job: str, action: Action) -> None:
        assert self.written
        self.done.append(action)

    async def post_event(self, resource: Mapping[str, Any], event: Event, now: float) -> None:
        assert self.written or event.reason.startswith("Status"), "events tell of what is written, or cannot be"
        assert now
        self.told.append(f"{resource['metadata']['name']} {event.reason}")


class Crowd:
    """Jobs of one node each that run their first attempt, as the watches tell of them."""

    def __init__(self, num_jobs: int, num_nodes: int = 0) -> None:
        self.nodes, self.renewals = NodeCache(), RenewalCache()
        self.store = ClusterStore(self.nodes, self.renewals)
        self.reader = Asking(self.store, self.nodes, self.renewals)
        self.writer = Writing()
        diagnostics = Diagnostics(None, self.writer)  # type: ignore[arg-type]
        self.controller = JobController(self.reader, self.writer, diagnostics, Timeouts())
        self.woken: list[Key] = []
        self.store.listener = self
        for number in range(max(num_jobs, num_nodes)):
            self.tell("nodes", node(f"n{number}"))
        self.keys = [("ns", f"job-{number}") for number in range(num_jobs)]
        for number, key in enumerate(self.keys):
            self.tell_job(key)
            self.settle(key, f"n{number}")
            found = self.store._records[key]
            assert found is not None and found.status.phase == Phase.STARTING
        for informer in self.store.informers:
            informer.is_live = informer.has_listed = True
        self.woken.clear()

    def wake(self, key: Key) -> None:
        self.woken.append(key)

    def node_changed(self, name: str) -> None:
        self.woken.append(("", name))

    def lease_changed(self, key: Key, lease: Mapping[str, Any]) -> None:
        del lease
        self.woken.append(key)

    def informer(self, plural: str) -> Informer:
        return next(item for item in self.store.informers if item.source.path.endswith(f"/{plural}"))

    def tell(self, plural: str, item: Mapping[str, Any], change: str = "ADDED") -> None:
        self.informer(plural).apply(change, item)

    def tell_job(
        self,
        key: Key,
        *,
        spec: Mapping[str, Any] = SPEC,
        generation: int = 1,
        version: str = "7",
        status: Status | None = None,
        listed: bool = False,
        annotations: Mapping[str, str] = MappingProxyType({}),
    ) -> dict[str, Any]:
        """Tell of the resource, with the status that is known of it or another one."""
        meta: dict[str, Any] = {"namespace": key[0], "name": key[1], "uid": f"uid-{key[1]}", "resourceVersion": version}
        known = self.store._records.get(key)
        wire = to_wire(status or (known.status if known is not None else Status()))
        meta |= {"generation": generation, "annotations": annotations}
        resource = {"metadata": meta, "spec": spec, "status": wire}
        self.store.put_record(resource, listed=listed)
        return resource

    def settle(self, key: Key, on: str = "") -> None:
        """Let a job come to rest: what it decides is taken for done."""
        for _ in range(8):
            record = self.store._records[key]
            assert record is not None and isinstance(record.spec, Spec)
            world = dataclasses.replace(self.store.observe(key, GPU), capacity_fresh=True)
            found = decide(record.job, record.spec, record.status, world, limits=Timeouts(), now=time.time())
            for action in found.actions:
                if isinstance(action, LaunchAttempt):
                    self.launch(action, on)
            if found.status == record.status:
                return
            self.tell_job(key, status=found.status)
        raise AssertionError("does not come to rest")

    def launch(self, action: LaunchAttempt, on: str) -> None:
        for manifest in action.manifests:
            made = {**manifest, "metadata": {**manifest["metadata"], "uid": manifest["metadata"]["name"]}}
            if manifest["kind"] in ("Job", "Lease"):
                self.tell(f"{manifest['kind'].lower()}s", made)
            if manifest["kind"] == "Job":
                template = manifest["spec"]["template"]
                name = made["metadata"]["name"]
                meta = {"namespace": "ns", "name": f"{name}-0", "uid": "p", "ownerReferences": of_job(name)}
                meta["labels"] = {**template["metadata"]["labels"], "batch.kubernetes.io/job-completion-index": "0"}
                self.tell("pods", {"metadata": meta, "spec": {**template["spec"], "nodeName": on}, "status": RUNNING})


RUNNING = {"phase": "Running"}


def of_job(name: str, uid: str = "") -> list[dict[str, Any]]:
    """The ownerReferences of a pod that a Job controls; the UID of a Job is its name here."""
    return [{"apiVersion": "batch/v1", "kind": "Job", "name": name, "uid": uid or name, "controller": True}]


def of_resource(name: str) -> list[dict[str, Any]]:
    """The ownerReferences of a Job or Lease of one of the jobs."""
    return [{"kind": "ElasticTrainingJob", "name": name, "uid": f"uid-{name}", "controller": True}]


def node(name: str, ready: str = "True") -> dict[str, Any]:
    return {
        "metadata": {"name": name},
        "status": {
            "conditions": [{"type": "Ready", "status": ready}],
            "allocatable": {GPU: "8"},
            "capacity": {GPU: "8"},
        },
    }


def labels(crowd: Crowd, number: int) -> dict[str, str]:
    return {
        "elastictraining.dev/job-name": crowd.keys[number][1],
        "elastictraining.dev/role": "worker",
        "elastictraining.dev/attempt": "1",
    }
