"""The operator's own ServiceAccount is out of reach for whoever may create a job."""

from __future__ import annotations

import asyncio
import copy
from typing import Any

import pytest

from elastic_operator.api.conditions import Type, find
from elastic_operator.api.spec import Spec, SpecError, parse_spec
from elastic_operator.api.status import Current, Phase, Resume
from elastic_operator.manifests.attempt import JobRef, account_of, attempt_objects, reshard_job, training_job
from elastic_operator.manifests.forbidden_accounts import OPEN, Account, Boundary, account_of_review, account_of_user
from elastic_operator.manifests.reshard_pod import ReshardImage
from elastic_operator.reconcile.record import apply_boundary
from elastic_operator.settings import read_settings
from reshard.topology import Topology
from tests.unit.elastic_operator.crowd import SPEC, Crowd

KEY = ("ns", "job-0")
OWN = Account(namespace="ns", name="operator", uid="1")
CLOSED = Boundary(account=OWN)
SHARED = Boundary(account=OWN, allows_own_namespace=True, lease_name="leader")
TOKEN = [{"name": "t", "projected": {"sources": [{"serviceAccountToken": {"path": "token"}}]}}]
CURRENT = Current(
    topology=Topology(),
    num_nodes=1,
    gpus_per_node=8,
    resume=Resume(uri="/checkpoint/a", source="/checkpoint/b"),
)


def spec_with(pod: dict[str, Any] | None = None, reshard: dict[str, Any] | None = None) -> dict[str, Any]:
    """Return a spec with more fields in its training pod, and a pod of its own for the resharder."""
    found = copy.deepcopy(SPEC)
    found["template"]["spec"] |= pod or {}
    if reshard is not None:
        containers = [{"name": "reshard", "image": "i"}]
        found["reshard"] = {"template": {"spec": {"containers": containers, **reshard}}}
    return found


def job(name: str = "job-0", namespace: str = "ns") -> JobRef:
    return JobRef(name=name, namespace=namespace, uid="u")


def problems(boundary: Boundary, spec: dict[str, Any], **of_job: str) -> list[str]:
    return boundary.problems(job(**of_job), parse_spec(spec))


def test_a_job_in_the_operators_own_namespace_is_refused_with_a_condition_and_nothing_is_made() -> None:
    crowd = Crowd(1)
    crowd.controller._boundary = CLOSED
    crowd.store.forget(KEY)
    crowd.reader.there[KEY] = {
        "metadata": {"namespace": "ns", "name": "job-0", "uid": "uid-job-0", "resourceVersion": "7", "generation": 1},
        "spec": SPEC,
    }
    asyncio.run(crowd.controller.reconcile(KEY))
    ((_, status),) = crowd.writer.written
    condition = find(status.conditions, Type.SPEC_VALID)
    assert condition is not None
    assert (condition.status, condition.reason) == ("False", "NotPermitted")
    assert "ns is the operator's own namespace" in condition.message
    assert "allowJobsInReleaseNamespace" in condition.message
    assert (status.phase, status.reason, status.attempt) == (Phase.PENDING, "NotPermitted", 0)
    assert (crowd.writer.done, crowd.writer.told) == ([], ["job-0 NotPermitted"])


def test_a_job_that_ran_there_before_is_neither_recovered_nor_touched() -> None:
    crowd = Crowd(1)
    crowd.controller._boundary = CLOSED
    crowd.reader.kept = parse_spec(SPEC)
    crowd.reader.there[KEY] = crowd.tell_job(KEY)
    for _ in range(3):
        asyncio.run(crowd.controller.reconcile(KEY))
    assert crowd.writer.done == []
    assert crowd.writer.written
    status = crowd.writer.written[-1][1]
    assert (status.phase, status.attempt) == (Phase.STARTING, 1)
    condition = find(status.conditions, Type.SPEC_VALID)
    assert condition is not None and condition.reason == "NotPermitted"


def test_an_accepted_spec_does_not_bring_the_operators_account_back() -> None:
    crowd = Crowd(1)
    crowd.controller._boundary = SHARED
    crowd.reader.kept = parse_spec(spec_with({"serviceAccountName": "operator"}))
    crowd.reader.there[KEY] = crowd.tell_job(KEY, spec={**SPEC, "nodes": "three", "suspend": True}, generation=2)
    asyncio.run(crowd.controller.reconcile(KEY))
    assert crowd.writer.done == []


@pytest.mark.parametrize(
    "spec",
    [
        spec_with({"serviceAccountName": "operator"}),
        spec_with({"serviceAccount": "operator"}),
        spec_with({"serviceAccountName": "", "serviceAccount": "operator"}),
        spec_with(reshard={"serviceAccountName": "operator"}),
        spec_with(reshard={"serviceAccount": "operator", "volumes": TOKEN}),
    ],
)
def test_where_its_namespace_is_shared_its_account_is_still_refused_by_name(spec: dict[str, Any]) -> None:
    (said,) = problems(SHARED, spec)
    assert "operator is the operator's own ServiceAccount" in said
    assert problems(SHARED, spec, namespace="other") == []


def test_an_operator_with_the_default_account_shares_it_with_no_pod() -> None:
    default = Boundary(account=Account(namespace="ns", name="default"), allows_own_namespace=True)
    # Training pods get an account of their attempt; reshard pods without a name get `default`.
    assert [item.partition(":")[0] for item in problems(default, SPEC)] == [
        "spec.reshard.template.spec.serviceAccountName"
    ]
    assert problems(default, spec_with(reshard={"serviceAccountName": "mine"})) == []


@pytest.mark.parametrize(("account", "lease", "refused"), [
    ("job-0-a1", "l", True), ("job-0-a17", "l", True), ("o", "job-0-a2", True), ("job-0-a", "l", False),
    ("job-0-a1-reshard", "l", False), ("job-00-a1", "l", False), ("x-job-0-a1", "l", False),
])  # fmt: skip
def test_no_attempt_is_called_like_the_operators_account_or_lease(account: str, lease: str, refused: bool) -> None:
    shared = Boundary(account=Account(namespace="ns", name=account), allows_own_namespace=True, lease_name=lease)
    assert bool(problems(shared, SPEC)) == refused


def test_jobs_elsewhere_and_operators_without_an_account_are_not_concerned() -> None:
    assert problems(CLOSED, spec_with({"serviceAccountName": "operator"}), namespace="team") == []
    assert problems(OPEN, SPEC) == []
    assert problems(SHARED, SPEC) == []
    assert problems(SHARED, spec_with({"serviceAccountName": "mine"}, {"serviceAccountName": "mine"})) == []


@pytest.mark.parametrize(
    ("pod", "account"),
    [
        ({}, "job-0-a3"),
        ({"serviceAccountName": "mine"}, "mine"),
        ({"serviceAccount": "mine"}, "mine"),
        ({"serviceAccountName": "", "serviceAccount": ""}, "job-0-a3"),
        ({"serviceAccountName": None}, "job-0-a3"),
        ({"serviceAccountName": "mine", "serviceAccount": "other"}, "mine"),
    ],
)
def test_the_pod_runs_under_the_account_that_is_bound_to_the_lease(pod: dict[str, Any], account: str) -> None:
    spec = parse_spec(spec_with(pod))
    objects = {item["kind"]: item for item in attempt_objects(job(), spec, 3, CURRENT, 5)}
    made = objects["Job"]["spec"]["template"]["spec"]
    assert (made["serviceAccountName"], made.get("serviceAccount")) == (account, None)
    assert [item["name"] for item in objects["RoleBinding"]["subjects"]] == [account]
    assert ("ServiceAccount" in objects) == (account == "job-0-a3")


@pytest.mark.parametrize("image", [None, ReshardImage(name="reshard:1")])
@pytest.mark.parametrize(
    "pod", [{}, {"serviceAccountName": "operator"}, {"serviceAccount": "operator", "volumes": TOKEN}]
)
def test_a_reshard_pod_takes_no_account_over_from_the_training_pod(
    pod: dict[str, Any], image: ReshardImage | None
) -> None:
    made = reshard_job(job(), parse_spec(spec_with(pod)), 3, CURRENT, image)["spec"]["template"]
    assert account_of(made) == ""
    assert made["spec"]["automountServiceAccountToken"] is False


def test_the_templates_that_are_checked_are_those_that_are_built() -> None:
    spec = parse_spec(spec_with({"serviceAccount": "a"}, {"serviceAccount": "b"}))
    assert isinstance(spec, Spec)
    assert account_of(training_job(job(), spec, 1, CURRENT, 5)["spec"]["template"]) == "a"
    assert account_of(reshard_job(job(), spec, 1, CURRENT)["spec"]["template"]) == "b"


def test_who_the_operator_is_comes_from_the_api_server() -> None:
    answer = {"status": {"userInfo": {"username": "system:serviceaccount:ns:operator", "uid": "7"}}}
    assert account_of_review(answer) == Account(namespace="ns", name="operator", uid="7")
    assert account_of_review({"status": {"userInfo": {"username": "jane"}}}) is None
    assert account_of_review({}) is None
    assert account_of_user("system:serviceaccount:ns") is None


def test_the_pod_says_who_it_is_where_the_api_server_may_not_be_asked() -> None:
    pod = read_settings(["run"], {"POD_NAMESPACE": "ns", "POD_SERVICE_ACCOUNT": "operator"})
    assert (pod.pod_account, pod.allow_own_namespace) == (Account(namespace="ns", name="operator"), False)
    laptop = read_settings(["run", "--allow-jobs-in-own-namespace"], {"POD_NAMESPACE": "ns"})
    assert (laptop.pod_account, laptop.allow_own_namespace) == (None, True)


def test_a_spec_that_makes_no_sense_keeps_its_own_reason() -> None:
    crowd = Crowd(1)
    record = crowd.store.last_record(KEY)
    assert record is not None
    broken = apply_boundary(record, Boundary(account=OWN))
    assert isinstance(broken.spec, SpecError) and broken.spec.reason == "NotPermitted"
    assert SpecError(["x"]).reason == "InvalidSpec"
