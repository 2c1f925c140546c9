"""Cordons and taints that come and go: a training leaves a few times at most, and goes back to a clean node."""

from __future__ import annotations

import pytest

from tests.property.cluster_model.world import World


class FlappingWorld(World):
    """A cluster in which a node is cordoned or tainted again and again."""

    def __init__(self, min_nodes: int) -> None:
        super().__init__()
        self.steps = 10**6
        self.spec["nodes"] = {"min": min_nodes, "max": 3}

    def flap(self, kind: str, seconds: int, on: int, off: int) -> None:
        for second in range(seconds):
            is_on = second % (on + off) < on
            if kind == "cordon":
                self.cordon("n2", is_on)
            else:
                self.taint("n2", "NoSchedule" if is_on else "")
            self.tick(1.0)
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
