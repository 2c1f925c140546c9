"""Nodes that the pods of an attempt must avoid: nodes and exclusions go in, a short list of names comes out."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest

from elastic_operator.api.serialization import Time, to_wire
from elastic_operator.api.status import ExcludedNode, Status
from elastic_operator.manifests.attempt import attempt_objects
from elastic_operator.observed.observation import NodeView, Observation, Taint
from elastic_operator.reconcile.context import MAX_AVOIDED
from tests.unit.elastic_operator.reconcile.test_decide_phases import GPU, JOB, NOW, look, nodes, spec

HEALTHY = nodes("n1", "n2", "n3")
STALE = 100.0


def launched(others: dict[str, NodeView], excluded: tuple[str, ...] = (), **changes: Any) -> Status:
    """The status of a new job that is planned and launched on three healthy nodes beside others."""
    items = tuple(ExcludedNode(name=name, reason="PodFailed", since=Time(NOW), hurts=2) for name in excluded)
    status = Status(start_time=Time(NOW), excluded_nodes=items)
    status = look(status, Observation(nodes={**HEALTHY, **others}), **changes).status
    assert status.current is not None
    assert status.current.launch_time is not None
    return status


def avoided(status: Status) -> tuple[str, ...]:
    assert status.current is not None
    return status.current.avoid


@pytest.mark.parametrize(
    ("node", "expected"),
    [
        pytest.param({"lease_age_seconds": STALE}, ("x",), id="ready-with-a-stale-lease"),
        pytest.param({"unhealthy": ("XID 79",)}, ("x",), id="unhealthy-for-a-monitor"),
        pytest.param({"ready": "Unknown", "lease_age_seconds": STALE}, (), id="not-ready"),
        pytest.param({"lease_age_seconds": STALE, "unschedulable": True}, (), id="cordoned"),
        pytest.param({"lease_age_seconds": STALE, "taints": (Taint(key="dedicated"),)}, (), id="tainted"),
        pytest.param({"lease_age_seconds": STALE, "allocatable": {GPU: 1}}, (), id="too-few-devices"),
        pytest.param({"lease_age_seconds": STALE, "builtin": {"cpu": 10}}, (), id="too-small"),
        pytest.param({}, (), id="healthy"),
    ],
)
def test_only_nodes_on_which_the_scheduler_would_place_pods_are_listed(
    node: dict[str, Any], expected: tuple[str, ...]
) -> None:
    container = {"name": "train", "image": "image", "resources": {"requests": {"cpu": "1"}}}
    others = {"x": dataclasses.replace(nodes("x")["x"], **node)}
    assert avoided(launched(others, template={"spec": {"containers": [container]}})) == expected


def test_an_excluded_node_is_listed_even_if_it_is_not_ready_yet() -> None:
    assert avoided(launched(nodes("x", ready="Unknown"), excluded=("x",))) == ("x",)


def test_thousands_of_nodes_that_are_not_ready_leave_status_and_job_small() -> None:
    dark = {
        name: node for number in range(3000) for name, node in nodes(f"gpu-node-{number:04}", ready="Unknown").items()
    }
    status = launched(dark)
    assert status.current is not None
    assert len(json.dumps(to_wire(status))) < 8 * 1024
    assert len(json.dumps(attempt_objects(JOB, spec(), status.attempt, status.current, 10.0))) < 32 * 1024


def test_a_list_that_would_be_too_long_keeps_the_excluded_nodes_and_says_how_many_it_leaves_out() -> None:
    names = [f"gpu-node-{number:04}.{'x' * 200}" for number in range(3000)]
    stale = {name: node for name in names for node in nodes(name, lease_age_seconds=STALE).values()}
    items = (ExcludedNode(name=names[-1], reason="PodFailed", since=Time(NOW), hurts=2),)
    begin = Status(start_time=Time(NOW), excluded_nodes=items)
    decision = look(begin, Observation(nodes={**HEALTHY, **stale}))
    listed = avoided(decision.status)
    assert (len(listed), listed[-1]) == (MAX_AVOIDED, names[-1])
    assert set(listed[:-1]) == set(names[: MAX_AVOIDED - 1])
    assert len(json.dumps(to_wire(decision.status))) < 64 * 1024
    (told,) = [event.message for event in decision.events if event.reason == "Launched"]
    assert f"{3000 - MAX_AVOIDED} further nodes with signs of a failure could not be ruled out" in told
