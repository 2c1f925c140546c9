"""What a job that waits for accelerators says: who holds them."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from elastic_operator.api.conditions import Type, find
from elastic_operator.api.serialization import to_wire
from elastic_operator.api.status import Phase, Status
from elastic_operator.observed.node_pool import NodePool
from elastic_operator.observed.observation import Observation, Taint
from elastic_operator.plugin.pages.why import explain
from tests.unit.elastic_operator.observed.test_node_pool import usage
from tests.unit.elastic_operator.reconcile.test_decide_phases import GPU, SPEC, look, nodes


def holder(name: str, node: str, *, count: int = 2, namespace: str = "team", job: str = "other") -> dict[str, Any]:
    return {
        "metadata": {
            "name": name, "namespace": namespace, "labels": {"elastictraining.dev/job-name": job},
            "ownerReferences": [{"kind": "Job", "name": job, "uid": f"uid-{job}", "controller": True}],
        },
        "spec": {"nodeName": node, "containers": [{"name": "c", "resources": {"requests": {GPU: str(count)}}}]},
        "status": {"phase": "Running"},
    }  # fmt: skip


TAINTED = {"n3": dataclasses.replace(nodes("n3")["n3"], taints=(Taint(key="team", value="a"),))}
MEMBERS = {**nodes("n1", "n2"), **TAINTED}


def wait(*pods: dict[str, Any]) -> Status:
    """A new job looks for a place; `pods` hold accelerators, those of Job own are its own."""
    used = usage(*pods).by_others({"uid-own"}, GPU)
    return look(Status(), Observation(nodes=NodePool(GPU, MEMBERS), used=used)).status


HOLDS = f"Pods of others hold {GPU} on nodes that take its pods:"


@pytest.mark.parametrize(
    ("pods", "text"),
    [
        pytest.param(
            [holder("a", "n1"), holder("b", "n2")], f"{HOLDS} team/a on n1 (2), team/b on n2 (2).", id="named"
        ),
        pytest.param(
            [holder("c", "n1", count=1), holder("a", "n2"), holder("b", "n1", count=1)],
            f"{HOLDS} team/a on n2 (2), team/b on n1 (1), team/c on n1 (1).",
            id="the-largest-share-first",
        ),
        pytest.param(
            [holder("a", "n1"), holder("b", "n2"), holder("x", "n3"), holder("y", "gone")],
            f"{HOLDS} team/a on n1 (2), team/b on n2 (2).",
            id="only-where-its-pods-may-run",
        ),
    ],
)
def test_a_waiting_job_names_the_pods_that_hold_its_accelerators(pods: list[dict[str, Any]], text: str) -> None:
    status = wait(*pods)
    assert (status.phase, status.reason) == (Phase.WAITING, "NoFeasibleTopology")
    assert status.message.endswith(text)
    planned = find(status.conditions, Type.PLANNED)
    assert planned is not None
    assert planned.message == status.message
    resource = {"metadata": {"name": "gpt", "namespace": "ns"}, "spec": SPEC}
    assert text in explain({**resource, "status": to_wire(status)}, 0.0).now.doing


def test_the_list_is_short_however_many_pods_there_are() -> None:
    pods = [holder(f"{'p' * 60}-{number}", f"n{1 + number % 2}", count=1) for number in range(40)]
    message = wait(*pods).message
    assert message.endswith(", and others.")
    assert message.count(" (1)") == 5
    assert len(message) < 3_000


def test_without_pods_of_others_nothing_is_said_of_them() -> None:
    assert wait(holder("a", "n1", job="own")).phase != Phase.WAITING
    tainted = look(Status(), Observation(nodes=TAINTED, used=usage(holder("x", "n3")).by_others((), GPU))).status
    assert tainted.phase == Phase.WAITING
    assert "Pods of others" not in tainted.message
