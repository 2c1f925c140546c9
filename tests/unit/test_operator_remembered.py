"""What the watches tell is enough to see that nothing is to be done: jobs at rest cost no requests, however many."""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import Mapping
from typing import Any

import pytest

from elastic_operator.actions import LaunchAttempt
from elastic_operator.batching import Key
from elastic_operator.caches import Nodes, Renewals
from elastic_operator.decide import decide
from elastic_operator.inquiries import Inquiries
from elastic_operator.limits import Limits
from elastic_operator.mirror import Mirror
from elastic_operator.observe import Observer
from elastic_operator.remembered import Remembered
from elastic_operator.spec import Spec
from elastic_operator.status import Phase
from elastic_operator.wire import to_wire
from elastic_operator.worker import RECALL_SECONDS, Workers

GPU = "amd.com/gpu"
SPEC = {
    "accelerator": {"resource": GPU, "perNode": [8]},
    "nodes": {"min": 1, "max": 1},
    "batch": {"globalSamples": 64, "microSamples": 1},
    "parallelism": {"tensor": [1, 2], "pipeline": [1]},
    "checkpoint": {"claimName": "ckpt", "path": "run"},
    "template": {"spec": {"containers": [{"name": "train", "image": "train:1"}]}},
}


class Asking(Observer):
    """Knows what it is told, and counts what it would have to ask."""

    def __init__(self, remembered: Remembered, nodes: Nodes, renewals: Renewals) -> None:
        super().__init__(None, nodes, renewals, remembered, ())  # type: ignore[arg-type]
        self.asked: list[Key] = []

    async def training_job(self, namespace: str, name: str) -> dict[str, Any] | None:
        self.asked.append((namespace, name))
        return None


class Crowd:
    """Jobs of one node each that run their first attempt, as the watches tell of them."""

    def __init__(self, num_jobs: int, num_nodes: int = 0) -> None:
        self.nodes, self.renewals = Nodes(), Renewals()
        self.memory = Remembered(self.nodes, self.renewals)
        self.observer = Asking(self.memory, self.nodes, self.renewals)
        inquiries = Inquiries(None, None)  # type: ignore[arg-type]
        self.workers = Workers(self.observer, None, inquiries, Limits())  # type: ignore[arg-type]
        self.woken: list[Key] = []
        self.memory.listener = self
        for number in range(max(num_jobs, num_nodes)):
            self.tell("nodes", node(f"n{number}"))
        self.keys = [("ns", f"job-{number}") for number in range(num_jobs)]
        for number, key in enumerate(self.keys):
            self.start(key, f"n{number}")
        for mirror in self.memory.world:
            mirror.live = True
        self.woken.clear()

    def wake(self, key: Key) -> None:
        self.woken.append(key)

    def node_changed(self, name: str) -> None:
        self.woken.append(("", name))

    def heartbeat(self, key: Key, lease: Mapping[str, Any]) -> None:
        del lease
        self.woken.append(key)

    def mirror(self, plural: str) -> Mirror:
        return next(item for item in self.memory.world if item.source.path.endswith(f"/{plural}"))

    def tell(self, plural: str, item: Mapping[str, Any], change: str = "ADDED") -> None:
        self.mirror(plural).take(change, item)

    def start(self, key: Key, on: str) -> None:
        """Let a job come to rest: what it decides is taken for done."""
        meta = {"namespace": key[0], "name": key[1], "uid": f"uid-{key[1]}", "generation": 1}
        resource: dict[str, Any] = {"metadata": meta, "spec": SPEC}
        self.memory.put_record(resource)
        for _ in range(8):
            record = self.memory._records[key]
            assert record is not None and isinstance(record.spec, Spec)
            world = dataclasses.replace(self.memory.look(key, GPU), capacity_fresh=True)
            found = decide(record.job, record.spec, record.status, world, limits=Limits(), now=time.time())
            for action in found.actions:
                if isinstance(action, LaunchAttempt):
                    self.launch(action, on)
            if found.status == record.status:
                assert found.status.phase == Phase.STARTING
                return
            self.memory.put_record({**resource, "status": to_wire(found.status)})
        raise AssertionError("does not come to rest")

    def launch(self, action: LaunchAttempt, on: str) -> None:
        for manifest in action.manifests:
            made = {**manifest, "metadata": {**manifest["metadata"], "uid": manifest["metadata"]["name"]}}
            if manifest["kind"] in ("Job", "Lease"):
                self.tell(f"{manifest['kind'].lower()}s", made)
            if manifest["kind"] == "Job":
                template = manifest["spec"]["template"]
                meta = {"namespace": "ns", "name": f"{made['metadata']['name']}-0", "uid": "p", "labels": {}}
                meta["labels"] = {**template["metadata"]["labels"], "batch.kubernetes.io/job-completion-index": "0"}
                self.tell("pods", {"metadata": meta, "spec": {**template["spec"], "nodeName": on}, "status": RUNNING})


RUNNING = {"phase": "Running"}


def node(name: str, ready: str = "True") -> dict[str, Any]:
    return {
        "metadata": {"name": name},
        "status": {
            "conditions": [{"type": "Ready", "status": ready}],
            "allocatable": {GPU: "8"},
            "capacity": {GPU: "8"},
        },
    }


def look_at_all(crowd: Crowd, times: int = 1) -> int:
    async def run() -> None:
        for _ in range(times):
            for key in crowd.keys:
                await crowd.workers._reconcile(key)

    asyncio.run(run())
    return len(crowd.observer.asked)


@pytest.mark.parametrize("num_jobs", [5, 60])
def test_jobs_at_rest_are_looked_at_without_a_request_and_without_a_walk_over_the_nodes(num_jobs: int) -> None:
    crowd = Crowd(num_jobs, num_nodes=2 * num_jobs)
    fleet = crowd.nodes.offering(GPU)
    before = fleet.walks
    assert look_at_all(crowd, times=3) == 0
    assert crowd.nodes.offering(GPU) is fleet
    assert fleet.walks - before <= 1


def test_all_jobs_share_one_view_of_the_nodes() -> None:
    crowd = Crowd(10)
    assert len({id(crowd.memory.look(key, GPU).nodes) for key in crowd.keys}) == 1


def test_what_is_to_be_done_is_decided_from_a_fresh_look() -> None:
    crowd = Crowd(10)
    pod = crowd.memory.look(crowd.keys[3], GPU).pods[0]
    meta = {"namespace": "ns", "name": pod.name, "labels": labels(crowd, 3), "uid": pod.uid}
    crowd.tell("pods", {"metadata": meta, "spec": {"nodeName": "n3"}, "status": {"phase": "Failed"}}, "MODIFIED")
    assert crowd.woken == [crowd.keys[3]]
    look_at_all(crowd)
    assert crowd.observer.asked == [crowd.keys[3]]


def labels(crowd: Crowd, number: int) -> dict[str, str]:
    return {
        "elastictraining.dev/job-name": crowd.keys[number][1],
        "elastictraining.dev/role": "worker",
        "elastictraining.dev/attempt": "1",
    }


def test_a_node_that_is_not_ready_is_worth_a_second_opinion() -> None:
    crowd = Crowd(4)
    crowd.tell("nodes", node("n2", ready="Unknown"), "MODIFIED")
    look_at_all(crowd)
    assert crowd.observer.asked == [crowd.keys[2]]


@pytest.mark.parametrize("plural", ["nodes", "jobs", "leases", "pods"])
def test_while_a_watch_is_cut_nothing_is_believed(plural: str) -> None:
    crowd = Crowd(3)
    crowd.mirror(plural).live = False
    assert look_at_all(crowd) == 3


def test_a_deleted_job_is_asked_for() -> None:
    crowd = Crowd(3)
    crowd.memory.drop_record(("ns", "job-1"))
    assert crowd.woken == [("ns", "job-1")]
    look_at_all(crowd)
    assert crowd.observer.asked == [("ns", "job-1")]


def test_an_object_that_says_nothing_new_wakes_nobody() -> None:
    crowd = Crowd(2)
    crowd.tell("nodes", node("n0"), "MODIFIED")
    pod = crowd.memory.look(crowd.keys[0], GPU).pods[0]
    item = {"metadata": {"namespace": "ns", "name": pod.name, "labels": labels(crowd, 0), "uid": pod.uid}}
    crowd.tell("pods", {**item, "status": {"phase": "Running"}, "spec": {"nodeName": "n0"}}, "MODIFIED")
    crowd.woken.clear()
    for noise in ("1", "2"):
        status = {"phase": "Running", "conditions": [{"type": "Ready", "status": "True", "lastProbeTime": noise}]}
        crowd.tell("pods", {**item, "status": status, "spec": {"nodeName": "n0"}}, "MODIFIED")
    assert crowd.woken == []


def test_a_resource_that_is_listed_again_wakes_nobody_unless_it_has_changed() -> None:
    crowd = Crowd(2)
    record = crowd.memory._records[crowd.keys[0]]
    assert record is not None
    meta = {"namespace": "ns", "name": "job-0", "uid": "uid-job-0", "generation": 1}
    resource = {"metadata": meta, "spec": SPEC, "status": to_wire(record.status)}
    crowd.memory.put_record(resource)
    assert crowd.woken == []
    crowd.memory.put_record({**resource, "metadata": {**meta, "generation": 2}})
    assert crowd.woken == [crowd.keys[0]]


def test_no_job_is_looked_at_from_memory_alone_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    crowd = Crowd(20)
    assert look_at_all(crowd) == 0
    begin = time.monotonic()
    monkeypatch.setattr(time, "monotonic", lambda: begin + 0.75 * RECALL_SECONDS)
    some = look_at_all(crowd)
    assert 0 < some < 20, "not all at the same time"
    monkeypatch.setattr(time, "monotonic", lambda: begin + RECALL_SECONDS + 1)
    crowd.observer.asked.clear()
    assert look_at_all(crowd) >= 20 - some
