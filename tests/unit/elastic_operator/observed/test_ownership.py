"""Objects are a job's own by the UIDs of their controllers; what only looks like one is neither used nor deleted."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import dataclasses
from collections.abc import Coroutine, Iterator
from typing import Any, TypeVar

import pytest

from elastic_operator.api.conditions import Type, find
from elastic_operator.api.serialization import to_wire
from elastic_operator.api.spec import parse_spec
from elastic_operator.api.status import Current, Phase, Status
from elastic_operator.client.resources import JOB, LEASE, POD
from elastic_operator.cluster.caches import NodeCache, RenewalCache
from elastic_operator.cluster.diagnostics import Diagnostics, RefusedError
from elastic_operator.cluster.reader import ClusterReader, NodesUnknownError
from elastic_operator.cluster.store import ClusterStore
from elastic_operator.cluster.writer import ClusterWriter, ConflictError, NameTakenError, PredecessorError
from elastic_operator.manifests.attempt import JobRef, attempt_objects
from elastic_operator.observed.timeouts import Timeouts
from elastic_operator.reconcile.actions import Action, DeleteJob, DeletePod, LaunchAttempt, RequestDrain, RevokeAttempt
from elastic_operator.reconcile.decide import decide
from elastic_operator.reconcile.record import Record, read_record
from reshard.contract import Label, LeaseKey
from reshard.topology import Topology
from tests.unit.elastic_operator.api_in_memory import Api
from tests.unit.elastic_operator.crowd import GPU, SPEC, Crowd, labels, node, of_job, of_resource

NAME = "job-0"
UID = "uid-job-0"
ATTEMPT = ["poddisruptionbudgets", "rolebindings", "roles", "serviceaccounts", "services", "leases"]


_T = TypeVar("_T")


class Cluster:
    """One resource on an API server in memory, with the real reader and writer."""

    def __init__(self, uid: str = UID, created: str = "2026-11-01T10:00:00Z") -> None:
        self.api = Api()
        self.nodes, self.renewals = NodeCache(), RenewalCache()
        self.nodes.update(node("n0"), 0.0)
        store = ClusterStore(self.nodes, self.renewals)
        for informer in store.informers:
            informer.has_listed = True
        self._runner, self._closing = asyncio.Runner(), contextlib.AsyncExitStack()
        client = self.run(self._closing.enter_async_context(self.api.client()))
        self.reader = ClusterReader(client, self.nodes, self.renewals, store, ())
        self.writer = ClusterWriter(client, self.reader)
        self.diagnostics = Diagnostics(client, self.writer)
        meta = {"namespace": "ns", "name": NAME, "uid": uid, "generation": 1, "creationTimestamp": created}
        self.resource: dict[str, Any] = {"metadata": meta, "spec": SPEC, "status": {}}

    def run(self, work: Coroutine[Any, Any, _T]) -> _T:
        return self._runner.run(work)

    def close(self) -> None:
        self.run(self._closing.aclose())
        self._runner.close()

    @property
    def record(self) -> Record:
        return read_record(self.resource)

    def act(self, action: Action) -> None:
        self.run(self.writer.act("ns", NAME, action))

    def look(self) -> Any:
        return self.run(self.reader.observe(self.record, GPU, fresh=True))

    def step(self) -> list[Action]:
        """One pass: read, decide, write, act."""
        record, world = self.record, self.look()
        trouble = self.diagnostics._troubles.get(("ns", NAME))
        world = dataclasses.replace(world, pod_diagnosis=trouble)
        assert not isinstance(record.spec, Exception)
        found = decide(record.job, record.spec, record.status, world, limits=Timeouts(), now=1_800_000_000.0)
        self.resource["status"] = to_wire(found.status)
        self.events = [event.reason for event in found.events]
        for action in found.actions:
            self.run(self.diagnostics.act(("ns", NAME), found.status.attempt, action))
        return list(found.actions)

    @property
    def status(self) -> Status:
        return self.record.status

    def objects_of(self, attempt: int, owner: list[dict[str, Any]]) -> None:
        for plural in ATTEMPT:
            self.put(plural, f"{NAME}-a{attempt}", owner, attempt)

    def put(self, plural: str, name: str, owner: list[dict[str, Any]], attempt: int = 1, **rest: Any) -> dict[str, Any]:
        marks = {str(Label.JOB): NAME, str(Label.ATTEMPT): str(attempt), str(Label.ROLE): "worker"}
        meta = {"name": name, "namespace": "ns", "labels": marks, "ownerReferences": owner}
        return self.api.put(plural, {"metadata": {**meta, **rest.pop("meta", {})}, **rest})


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    made = Cluster()
    yield made
    made.close()


STRANGER = [{"kind": "Deployment", "name": "web", "uid": "uid-web", "controller": True}]
PREDECESSOR = [{"kind": "ElasticTrainingJob", "name": NAME, "uid": "uid-old", "controller": True}]
UNCONTROLLED = [{"kind": "ElasticTrainingJob", "name": NAME, "uid": UID}]


@pytest.mark.parametrize("owner", [[], STRANGER, PREDECESSOR, UNCONTROLLED])
def test_revoking_an_attempt_deletes_nothing_of_anybody_else(cluster: Cluster, owner: list[dict[str, Any]]) -> None:
    cluster.objects_of(77, owner)
    cluster.act(RevokeAttempt(name=f"{NAME}-a77", owner=UID))
    assert cluster.api.deleted == []


def test_revoking_an_attempt_deletes_what_it_owns_under_the_condition_of_its_uid(cluster: Cluster) -> None:
    cluster.objects_of(1, of_resource(NAME))
    cluster.put("services", f"{NAME}-a1", STRANGER)
    cluster.act(RevokeAttempt(name=f"{NAME}-a1", owner=UID))
    assert [plural for plural, _ in cluster.api.deleted] == [plural for plural in ATTEMPT if plural != "services"]
    assert cluster.api.unconditional == []


def test_an_operator_without_rights_on_budgets_launches_revokes_and_says_so_once(cluster: Cluster) -> None:
    cluster.api.forbidden.add("poddisruptionbudgets")
    job = JobRef(name=NAME, namespace="ns", uid=UID)
    current = Current(topology=Topology(dp=2), num_nodes=1, gpus_per_node=2)
    manifests = tuple(attempt_objects(job, parse_spec(SPEC), 5, current, 5.0))
    for _ in range(2):
        cluster.act(LaunchAttempt(attempt=5, manifests=manifests, job=job))
    assert f"{NAME}-a5" in cluster.api.names("jobs")
    (event,) = [item for (plural, _, _), item in cluster.api.objects.items() if plural == "events"]
    assert (event["reason"], event["type"]) == ("DisruptionBudgetRefused", "Warning")
    assert "poddisruptionbudgets is forbidden" in event["message"]
    cluster.act(RevokeAttempt(name=f"{NAME}-a5", owner=UID))
    assert not cluster.api.names("leases")


@pytest.mark.parametrize("owner", [[], STRANGER, PREDECESSOR], ids=["none", "stranger", "predecessor"])
def test_a_forged_lease_of_attempt_77_makes_the_operator_delete_nothing(
    cluster: Cluster, owner: list[dict[str, Any]]
) -> None:
    cluster.objects_of(77, owner)
    for _ in range(3):
        cluster.step()
    assert cluster.api.deleted == []
    assert cluster.status.attempt == 1


@pytest.mark.parametrize(
    "action",
    [
        DeleteJob(name="x", uid="earlier"),
        DeletePod(name="x", uid="earlier", grace_seconds=0),
    ],
)
def test_a_successor_of_the_same_name_is_not_deleted(cluster: Cluster, action: Action) -> None:
    for plural in ("jobs", "pods"):
        cluster.put(plural, "x", [])
    with pytest.raises(ConflictError):
        cluster.act(action)
    assert cluster.api.deleted == []
    assert cluster.api.unconditional == []


def test_a_drain_is_asked_of_the_very_lease_that_was_seen(cluster: Cluster) -> None:
    made = cluster.put("leases", f"{NAME}-a1", of_resource(NAME))
    with pytest.raises(ConflictError):
        cluster.act(RequestDrain(lease=f"{NAME}-a1", uid="earlier"))
    assert "annotations" not in made["metadata"]
    cluster.act(RequestDrain(lease=f"{NAME}-a1", uid=made["metadata"]["uid"]))
    assert made["metadata"]["annotations"] == {str(LeaseKey.REQUEST): "drain"}


@pytest.mark.parametrize("plural", [*ATTEMPT, "jobs"])
@pytest.mark.parametrize(
    ("owner", "advice"),
    [([], "it has no owner"), (STRANGER, "Deployment web"), (PREDECESSOR, "garbage collection")],
    ids=["none", "stranger", "predecessor"],
)
def test_an_object_in_the_way_is_told_and_never_taken_over(
    cluster: Cluster, plural: str, owner: list[dict[str, Any]], advice: str
) -> None:
    cluster.put(plural, f"{NAME}-a1", owner, spec={"theirs": True})
    with pytest.raises(RefusedError):
        cluster.step()
    with pytest.raises(RefusedError):
        cluster.step()
    launched = find(cluster.status.conditions, Type.LAUNCHED)
    assert launched is not None
    assert (launched.status, launched.reason) == ("False", "NameTaken")
    assert f"ns/{NAME}-a1" in launched.message
    assert advice in launched.message
    assert "delete it" in launched.message
    assert "NameTaken" in cluster.events
    assert cluster.api.objects[plural, "ns", f"{NAME}-a1"]["spec"] == {"theirs": True}
    del cluster.api.objects[plural, "ns", f"{NAME}-a1"]
    cluster.step()
    assert f"{NAME}-a1" in cluster.api.names("jobs")
    assert cluster.status.phase == Phase.STARTING


def test_a_finished_job_of_an_earlier_resource_of_the_same_name_does_not_complete_the_new_one(cluster: Cluster) -> None:
    done = {"conditions": [{"type": "Complete", "status": "True"}]}
    cluster.put("jobs", f"{NAME}-a1", PREDECESSOR, status=done)
    lease = cluster.put("leases", f"{NAME}-a1", PREDECESSOR)
    lease["metadata"]["annotations"] = {str(LeaseKey.PHASE): "Complete", str(LeaseKey.STEP): "30"}
    for _ in range(4):
        with pytest.raises(RefusedError):
            cluster.step()
        assert cluster.status.phase == Phase.STARTING
    assert cluster.api.deleted == []
    for plural in ("jobs", "leases"):
        del cluster.api.objects[plural, "ns", f"{NAME}-a1"]
    cluster.step()
    assert cluster.api.objects["jobs", "ns", f"{NAME}-a1"]["metadata"]["ownerReferences"][0]["uid"] == UID


def running_pod(cluster: Cluster, name: str, owner: list[dict[str, Any]], created: str) -> None:
    status = {"phase": "Running"}
    meta = {"creationTimestamp": created}
    cluster.put("pods", name, owner, meta=meta, spec={"nodeName": "n0", "containers": []}, status=status)


@pytest.mark.parametrize(
    ("owner", "created", "error"),
    [
        (of_job(f"{NAME}-a1", "uid-old-job"), "2026-11-01T09:59:00Z", PredecessorError),
        (of_job(f"{NAME}-a1", "uid-forged"), "2026-11-01T10:00:01Z", None),
        (of_job("another-a1", "uid-other"), "2026-11-01T09:59:00Z", None),
        ([], "2026-11-01T09:59:00Z", None),
        (of_job(f"{NAME}-a1", "uid-known"), "2026-11-01T10:00:01Z", ConflictError),
    ],
    ids=["predecessors", "forged", "of-another-job", "labels-alone", "own-whose-job-is-gone"],
)
def test_a_launch_waits_for_pods_that_a_job_of_ours_made_and_for_no_others(
    cluster: Cluster, owner: list[dict[str, Any]], created: str, error: type[Exception] | None
) -> None:
    running_pod(cluster, "p", owner, created)
    job = read_record(cluster.resource).job
    action = LaunchAttempt(attempt=2, manifests=(), job=job, job_uids=("uid-known",))
    if error is None:
        cluster.act(action)
    else:
        with pytest.raises(error, match="p"):
            cluster.act(action)


@pytest.mark.parametrize(
    ("name", "owner", "state", "error"),
    [
        (f"{NAME}-a3", PREDECESSOR, {}, PredecessorError),
        (f"{NAME}-a3", PREDECESSOR, {"status": {"conditions": [{"type": "Complete", "status": "True"}]}}, None),
        (f"{NAME}-a3", PREDECESSOR, {"status": {"conditions": [{"type": "Failed", "status": "True"}]}}, None),
        (f"{NAME}-a3", PREDECESSOR, {"meta": {"deletionTimestamp": "2026-11-01T10:00:00Z"}}, None),
        (f"{NAME}-a3-reshard", PREDECESSOR, {}, None),
        (f"{NAME}-a3", of_resource(NAME), {}, None),
        (f"{NAME}-a3", [], {}, None),
        ("another-a3", of_resource("another"), {}, None),
    ],
    ids=["training", "complete", "failed", "deleted", "conversion", "own", "without-owner", "of-another-job"],
)
def test_a_launch_waits_for_a_predecessors_job_that_may_still_make_pods(
    cluster: Cluster,
    name: str,
    owner: list[dict[str, Any]],
    state: dict[str, Any],
    error: type[Exception] | None,
) -> None:
    cluster.put("jobs", name, owner, **state)
    action = LaunchAttempt(attempt=1, manifests=(), job=read_record(cluster.resource).job, job_uids=())
    if error is None:
        cluster.act(action)
    else:
        with pytest.raises(error, match=f"{NAME}-a3"):
            cluster.act(action)


def test_a_launch_waits_for_pods_that_a_predecessors_job_has_made_since(cluster: Cluster) -> None:
    cluster.put("jobs", f"{NAME}-a3", PREDECESSOR, meta={"deletionTimestamp": "2026-11-01T10:00:00Z"})
    uid = cluster.api.objects["jobs", "ns", f"{NAME}-a3"]["metadata"]["uid"]
    running_pod(cluster, "late", of_job(f"{NAME}-a3", uid), "2026-11-01T10:00:05Z")
    action = LaunchAttempt(attempt=1, manifests=(), job=read_record(cluster.resource).job, job_uids=())
    with pytest.raises(PredecessorError, match="late"):
        cluster.act(action)


def test_a_launch_does_not_wait_for_a_pod_that_the_decision_named_as_stuck(cluster: Cluster) -> None:
    running_pod(cluster, "p", of_job(f"{NAME}-a1", "uid-known"), "2026-11-01T10:00:01Z")
    uid = cluster.api.objects["pods", "ns", "p"]["metadata"]["uid"]
    action = LaunchAttempt(attempt=2, manifests=(), job=read_record(cluster.resource).job, job_uids=("uid-known",))
    with pytest.raises(ConflictError):
        cluster.act(dataclasses.replace(action, stuck_pods=("another",)))
    cluster.act(dataclasses.replace(action, stuck_pods=(uid,)))


def forged(crowd: Crowd, **changes: Any) -> dict[str, Any]:
    meta = {"namespace": "ns", "name": "forged", "uid": "f", "labels": labels(crowd, 0), "resourceVersion": "3"}
    status = {"phase": "Failed", "containerStatuses": [{"name": "c", "state": {"terminated": {"exitCode": 1}}}]}
    return {"metadata": {**meta, **changes}, "spec": {"nodeName": "n0"}, "status": status}


@pytest.mark.parametrize(
    "owner",
    [[], STRANGER, of_job("job-0-a1", "uid-forged"), of_job("job-1-a1")],
    ids=["none", "stranger", "unknown-job", "another-jobs"],
)
def test_a_pod_that_only_has_our_labels_counts_for_nothing(owner: list[dict[str, Any]]) -> None:
    crowd = Crowd(2)
    before = crowd.store.observe(crowd.keys[0], GPU)
    crowd.tell("pods", forged(crowd, ownerReferences=owner))
    after = crowd.store.observe(crowd.keys[0], GPU)
    assert after.pods == before.pods
    crowd.settle(crowd.keys[0])
    record = crowd.store.last_record(crowd.keys[0])
    assert record is not None
    assert record.status.attempt == 1


def test_a_lease_or_job_that_only_has_our_labels_or_another_name_counts_for_nothing() -> None:
    crowd = Crowd(1)
    before = crowd.store.observe(crowd.keys[0], GPU)
    for name, owner in (
        ("job-0-a77", []), ("job-0-a1x", of_resource(NAME)), ("job-00-a2", of_resource(NAME)), ("x", of_resource(NAME)),
    ):  # fmt: skip
        for plural in ("leases", "jobs"):
            meta = {"namespace": "ns", "name": name, "labels": labels(crowd, 0), "ownerReferences": owner, "uid": name}
            crowd.tell(plural, {"metadata": {**meta, "resourceVersion": "3"}})
    after = crowd.store.observe(crowd.keys[0], GPU)
    assert (after.jobs, after.leases) == (before.jobs, before.leases)


def test_the_attempt_of_an_own_object_is_that_of_its_name_whatever_its_labels_say() -> None:
    crowd = Crowd(1)
    ((attempt, lease),) = crowd.store.observe(crowd.keys[0], GPU).leases.items()
    meta = {"namespace": "ns", "name": lease.name, "ownerReferences": of_resource(NAME), "resourceVersion": "3"}
    meta["labels"] = {**labels(crowd, 0), str(Label.ATTEMPT): "77"}
    crowd.tell("leases", {"metadata": meta}, "MODIFIED")
    assert list(crowd.store.observe(crowd.keys[0], GPU).leases) == [attempt]


def test_pods_whose_job_is_gone_are_known_by_its_remembered_uid() -> None:
    crowd = Crowd(1)
    key = crowd.keys[0]
    world = crowd.store.observe(key, GPU)
    record = crowd.store.last_record(key)
    assert record is not None and record.status.job_uids == (world.jobs[0].uid,)
    job = {"metadata": {"namespace": "ns", "name": world.jobs[0].name, "resourceVersion": "4"}}
    crowd.tell("jobs", job, "DELETED")
    after = crowd.store.observe(key, GPU)
    assert after.jobs == ()
    assert after.pods == world.pods


def test_nothing_is_decided_before_the_nodes_are_known(cluster: Cluster) -> None:
    for informer in cluster.reader._store.informers:
        informer.has_listed = False
    with pytest.raises(NodesUnknownError, match="could not be listed yet"):
        cluster.look()


POISON: list[tuple[Any, str, dict[str, Any]]] = [
    (POD, "pods", {"labels": {"batch.kubernetes.io/job-completion-index": "one"}}),
    (POD, "pods", {"labels": {str(Label.ATTEMPT): "²"}}),
    (POD, "pods", {"ownerReferences": 5}),
    (JOB, "jobs", {"ownerReferences": [5]}),
    (LEASE, "leases", {"ownerReferences": "x"}),
    (LEASE, "leases", {"labels": {str(Label.ATTEMPT): "9" * 5000}}),
]


@pytest.fixture(params=range(len(POISON)), ids=lambda number: f"{POISON[number][1]}-{number}")
def poison(request: pytest.FixtureRequest) -> Iterator[tuple[str, dict[str, Any]]]:
    _, plural, changes = POISON[request.param]
    meta = {"name": "poison", "namespace": "ns", **changes}
    meta["labels"] = {str(Label.JOB): "job-9", **changes.get("labels", {})}
    yield plural, copy.deepcopy({"metadata": meta})


def test_an_object_that_cannot_be_read_fails_nobodys_look(cluster: Cluster, poison: tuple[str, dict[str, Any]]) -> None:
    """Looks of more than a few jobs share one list; a tenant's object on it must not fail all of them."""
    cluster.put("jobs", f"{NAME}-a1", of_resource(NAME))
    cluster.api.put(*poison)

    async def look_at_many() -> list[Any]:
        records = [cluster.record]
        records += [
            dataclasses.replace(cluster.record, job=JobRef(name=f"other-{i}", namespace="ns", uid=f"o{i}"))
            for i in range(20)
        ]
        records.append(dataclasses.replace(cluster.record, job=JobRef(name="job-9", namespace="ns", uid="u9")))
        return await asyncio.gather(*(cluster.reader.observe(record, GPU, fresh=True) for record in records))

    worlds = cluster.run(look_at_many())
    assert [job.name for job in worlds[0].jobs] == [f"{NAME}-a1"]
    assert worlds[-1].pods == worlds[-1].jobs == ()


def test_an_object_that_cannot_be_read_cuts_no_watch(poison: tuple[str, dict[str, Any]]) -> None:
    crowd = Crowd(1)
    plural, item = poison
    item["metadata"]["resourceVersion"] = "5"
    crowd.tell(plural, item)
    assert crowd.store.is_live
    crowd.tell(plural, item, "DELETED")


def bound(name: str, on: str, status: dict[str, Any]) -> dict[str, Any]:
    container = {"name": "c", "resources": {"requests": {GPU: "8"}}}
    meta = {"name": name, "namespace": "tenant", "uid": name, "resourceVersion": "1"}
    return {"metadata": meta, "spec": {"nodeName": on, "containers": [container]}, "status": status}


@pytest.mark.parametrize(
    ("status", "counted"),
    [
        ({"phase": "Pending"}, False),
        ({}, False),
        ({"phase": "Pending", "conditions": [{"type": "PodScheduled", "status": "False"}]}, False),
        ({"phase": "Failed", "reason": "UnexpectedAdmissionError"}, False),
        ({"phase": "Failed", "conditions": [{"type": "PodScheduled", "status": "True"}]}, False),
        ({"phase": "Pending", "conditions": [{"type": "PodScheduled", "status": "True"}]}, True),
        ({"phase": "Running"}, True),
    ],
)
def test_only_a_pod_that_has_its_place_counts_as_use_of_a_node(status: dict[str, Any], counted: bool) -> None:
    crowd = Crowd(1)
    others = next(informer for informer in crowd.store.informers if informer.source.fields)
    others.apply("ADDED", bound("bound", "n0", status))
    assert dict(crowd.store.observe(crowd.keys[0], GPU).used) == ({"n0": 8} if counted else {})


def test_pods_bound_to_a_node_by_name_in_a_loop_do_not_disturb_the_job_that_runs_there() -> None:
    crowd = Crowd(1)
    key = crowd.keys[0]
    others = next(informer for informer in crowd.store.informers if informer.source.fields)
    for number in range(20):
        pod = bound(f"loop-{number}", "n0", {"phase": "Pending"})
        others.apply("ADDED", pod)
        record = crowd.store.last_record(key)
        assert record is not None and not isinstance(record.spec, Exception)
        world = dataclasses.replace(crowd.store.observe(key, GPU), capacity_fresh=True)
        now = (record.status.start_time or 0.0) + 15.0 * number
        found = decide(record.job, record.spec, record.status, world, limits=Timeouts(), now=now)
        crowd.tell_job(key, status=found.status)
        others.apply("DELETED", pod)
    record = crowd.store.last_record(key)
    assert record is not None
    assert (record.status.attempt, record.status.restart_budget.used) == (1, 0)


def test_a_pod_with_our_label_and_no_job_of_ours_is_use_by_others() -> None:
    crowd = Crowd(2)
    item = bound("taker", "n1", {"phase": "Running"})
    item["metadata"]["labels"] = labels(crowd, 0)
    crowd.tell("pods", item)
    assert crowd.store.observe(crowd.keys[0], GPU).used["n1"] == 16, "not its own, which it could plan with"


def test_a_name_that_is_taken_is_told_by_its_kind_and_owner(cluster: Cluster) -> None:
    cluster.put("services", f"{NAME}-a1", STRANGER)
    record = cluster.record
    assert not isinstance(record.spec, Exception)
    found = decide(record.job, record.spec, record.status, cluster.look(), limits=Timeouts(), now=1_800_000_000.0)
    (action,) = found.actions
    with pytest.raises(NameTakenError, match=r"Service ns/job-0-a1 exists already.*Deployment web, UID uid-web"):
        cluster.act(action)
