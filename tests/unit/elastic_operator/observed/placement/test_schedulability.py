"""Which taints a pod tolerates, and for how long."""

from __future__ import annotations

import math
from typing import Any

import pytest

from elastic_operator.observed.observation import NodeView, Taint
from elastic_operator.observed.placement.schedulability import is_schedulable, tolerates, toleration_seconds

EVICTS = Taint(key="sick", value="yes", effect="NoExecute")
SAME = {"key": "sick", "operator": "Exists"}


@pytest.mark.parametrize(
    ("tolerations", "effect", "seconds"),
    [
        pytest.param([], "NoExecute", 0.0, id="none"),
        pytest.param([SAME], "NoExecute", math.inf, id="for-ever"),
        pytest.param([{"operator": "Exists"}], "NoExecute", math.inf, id="everything"),
        pytest.param([{"key": "other", "operator": "Exists"}], "NoExecute", 0.0, id="another-key"),
        pytest.param([{"key": "sick", "value": "no"}], "NoExecute", 0.0, id="another-value"),
        pytest.param([SAME | {"tolerationSeconds": 60}], "NoExecute", 60.0, id="for-a-time"),
        pytest.param([SAME | {"tolerationSeconds": -1}], "NoExecute", 0.0, id="evicted-at-once"),
        pytest.param([SAME | {"tolerationSeconds": 60}], "NoSchedule", math.inf, id="the-time-is-for-evictions"),
        pytest.param([SAME | {"tolerationSeconds": 60}, SAME], "NoExecute", 60.0, id="the-first-that-matches"),
    ],
)
def test_how_long_a_taint_is_tolerated(tolerations: list[dict[str, Any]], effect: str, seconds: float) -> None:
    taint = Taint(key="sick", value="yes", effect=effect)
    assert toleration_seconds(tolerations, taint) == seconds
    assert tolerates(tolerations, taint) == (seconds == math.inf)


@pytest.mark.parametrize(("limit", "expected"), [({}, True), ({"tolerationSeconds": 60}, False)])
def test_a_node_from_which_pods_will_be_evicted_is_no_place_for_new_ones(limit: dict[str, int], expected: bool) -> None:
    node = NodeView(name="n1", taints=(EVICTS,))
    assert is_schedulable(node, {"tolerations": [SAME | limit]}) == expected
