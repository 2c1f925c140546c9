"""What the operator remembers of nodes, and how it judges clocks that are not its own."""

from __future__ import annotations

from typing import Any

import pytest

from elastic_operator.api.serialization import format_time
from elastic_operator.cluster.caches import NodeCache, RenewalCache

NOW = 1_800_000_000.0


def node(name: str = "n1", gpus: int = 2) -> dict[str, Any]:
    return {
        "metadata": {"name": name},
        "status": {
            "conditions": [{"type": "Ready", "status": "True", "lastTransitionTime": format_time(NOW - 100)}],
            "allocatable": {"cpu": "4", "amd.com/gpu": str(gpus)},
            "capacity": {"amd.com/gpu": "2"},
        },
    }


def lease(renewed: float) -> dict[str, Any]:
    return {"metadata": {"name": "n1"}, "spec": {"renewTime": format_time(renewed), "leaseDurationSeconds": 4}}


@pytest.mark.parametrize("skew", [0.0, 300.0, -300.0])
def test_the_age_of_a_node_lease_does_not_depend_on_the_nodes_clock(skew: float) -> None:
    nodes = NodeCache()
    nodes.update(node(), NOW)
    for second in range(0, 20, 5):
        nodes.renew(lease(NOW + second - 0.5 * (second > 0) - skew), NOW + second)
    nodes.renew(lease(NOW + 14.5 - skew), NOW + 40)
    nodes.mark_polled(NOW + 40)
    assert nodes.views()["n1"].lease_age_seconds == pytest.approx(25, abs=1)


def test_time_in_which_nobody_looked_is_no_evidence_against_a_node() -> None:
    nodes = NodeCache()
    nodes.update(node(), NOW)
    nodes.renew(lease(NOW), NOW)
    nodes.mark_polled(NOW)
    nodes.update(node(gpus=1), NOW + 60)
    assert nodes.views()["n1"].lease_age_seconds == 0


def test_an_unchanged_node_is_no_news_and_fewer_devices_are() -> None:
    nodes = NodeCache()
    assert nodes.update(node(), NOW)
    assert not nodes.update(node(), NOW + 5)
    assert nodes.update(node(gpus=1), NOW + 9)
    assert nodes.views()["n1"].allocatable_since == NOW + 9


def test_views_follow_every_change_and_keep_what_offers_a_resource_apart() -> None:
    nodes = NodeCache()
    nodes.update(node("n1"), NOW)
    nodes.update(node("n2"), NOW)
    assert set(nodes.pool("amd.com/gpu")) == {"n1", "n2"}
    assert not nodes.pool("nvidia.com/gpu")
    assert nodes.views() is nodes.views(), "made once"
    nodes.remove("n1")
    assert set(nodes.views()) == set(nodes.pool("amd.com/gpu")) == {"n2"}
    nodes.renew({**lease(NOW - 7), "metadata": {"name": "n2"}}, NOW - 7)
    nodes.mark_polled(NOW)
    assert nodes.views()["n2"].lease_age_seconds == nodes.pool("amd.com/gpu")["n2"].lease_age_seconds == 7


def test_a_heartbeat_counts_from_when_it_was_seen_to_change() -> None:
    renewals = RenewalCache()
    assert renewals.first_seen("a", "1", NOW) == NOW
    assert renewals.first_seen("a", "1", NOW + 5) == NOW
    assert renewals.first_seen("a", "2", NOW + 6) == NOW + 6
