"""Cordons and taints that come and go: a training leaves a few times at most, and goes back to a clean node."""

from __future__ import annotations

import pytest

from elastic_operator.cluster.caches import date_node
from elastic_operator.observed.observation import NodeView
from tests.property.cluster_model import World

TAINT = {"key": "vendor/flaky", "value": "x", "effect": "NoSchedule"}


class FlappingWorld(World):
    """A cluster whose nodes are seen through the operator's memory of them."""

    def __init__(self, min_nodes: int) -> None:
        super().__init__()
        self.seen: dict[str, NodeView] = {}
        self.steps = 10**6
        self.spec["nodes"] = {"min": min_nodes, "max": 3}

    def _node_view(self, name: str) -> NodeView:
        self.seen[name] = date_node(super()._node_view(name), self.seen.get(name), self.now)
        return self.seen[name]

    def flap(self, kind: str, seconds: int, on: int, off: int) -> None:
        for second in range(seconds):
            is_on = second % (on + off) < on
            spec = self.nodes["n2"]["spec"]
            if kind == "cordon":
                spec["unschedulable"] = is_on
            else:
                spec["taints"] = [TAINT] if is_on else []
            self.tick()
            self.operate()


@pytest.mark.parametrize(
    ("kind", "on", "off", "most_leaves", "min_nodes"),
    [("cordon", 12, 10, 1, 1), ("taint", 12, 10, 1, 3), ("taint", 30, 25, 2, 3)],
)
def test_a_signal_that_flaps_makes_a_training_leave_a_few_times_and_return_when_it_is_over(
    kind: str, on: int, off: int, most_leaves: int, min_nodes: int
) -> None:
    world = FlappingWorld(min_nodes)
    world.flap(kind, 30, 0, 1)
    world.flap(kind, 300, on, off)
    causes = [item["cause"] for item in world.status["recoveries"]]
    assert 1 <= causes.count(f"Node{kind.capitalize()}ed") <= most_leaves
    world.flap(kind, 700, 0, 1)
    assert world.phase == "Running"
    assert world.status["current"]["numNodes"] == 3
