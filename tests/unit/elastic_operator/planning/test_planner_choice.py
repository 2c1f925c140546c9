"""What the planner chooses: capacity in, topology out."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from elastic_operator.api.spec import Spec, parse_spec
from elastic_operator.observed.capacity import Capacity, NodeCapacity
from elastic_operator.planning import planner
from elastic_operator.planning.plan_text import explain
from elastic_operator.planning.planner import PlanResult, plan
from reshard.topology import Topology

SMALL_MODEL = {
    "parameters": 1.2e6,
    "layers": 6,
    "hiddenSize": 128,
    "attentionHeads": 4,
    "keyValueHeads": 2,
    "vocabSize": 512,
    "sequenceLength": 64,
}
CPU = {"teraflops": 0.02, "intraNodeGBps": 1, "interNodeGBps": 1, "latencyMicroseconds": 100}


def make_spec(
    *,
    per_node: tuple[int, ...] = (2,),
    nodes: dict[str, Any] | None = None,
    global_samples: int = 20,
    micro_samples: int = 2,
    performance: dict[str, float] | None = CPU,
    memory_gib: float | None = None,
    model: dict[str, Any] | None = SMALL_MODEL,
    **parallelism: Any,
) -> Spec:
    value: dict[str, Any] = {
        "accelerator": {"resource": "amd.com/gpu", "perNode": list(per_node), "memoryGiB": memory_gib},
        "nodes": nodes or {"min": 1, "max": 3},
        "parallelism": parallelism or {"tensor": [1, 2], "pipeline": [1, 2, 3]},
        "batch": {"globalSamples": global_samples, "microSamples": micro_samples},
        "checkpoint": {"claimName": "ckpt"},
        "template": {"spec": {"containers": [{"name": "train", "image": "image"}]}},
    }
    if performance is not None:
        value["accelerator"]["performance"] = performance
    if model is not None:
        value["model"] = model
    return parse_spec(value)


def capacity(*free: int, quota: int | None = None) -> Capacity:
    nodes = tuple(NodeCapacity(name=f"node-{i}", free=count) for i, count in enumerate(free))
    return Capacity(nodes=nodes, max_accelerators=quota)


def choice(result: PlanResult) -> str | None:
    return None if result.best is None else f"{result.best.topology} {result.best.num_nodes}x{result.best.per_node}"


@pytest.mark.parametrize(
    ("free", "expected"),
    [
        ((2, 2, 2), "tp=1,pp=3,dp=2,zero=1 3x2"),
        ((2, 2), "tp=2,pp=1,dp=2,zero=1 2x2"),
        ((2, 2, 1), "tp=2,pp=1,dp=2,zero=1 2x2"),
        ((2,), "tp=1,pp=1,dp=2,zero=1 1x2"),
        ((1, 1, 1), None),
        ((), None),
    ],
)
def test_a_small_job_changes_tensor_and_pipeline_parallelism_with_the_nodes(free, expected):
    assert choice(plan(make_spec(), capacity(*free))) == expected


def test_tp_and_pp_change_when_the_lost_node_comes_back():
    grown = plan(make_spec(), capacity(2, 2, 2), current=Topology(tp=2, pp=1, dp=2))
    assert choice(grown) == "tp=1,pp=3,dp=2,zero=1 3x2"


def test_a_smaller_number_of_nodes_is_used_where_the_larger_cannot_run():
    # 7 nodes * 8 = 56 accelerators have a factor 7 that neither batch nor degrees can take.
    spec = make_spec(
        per_node=(8,), nodes={"min": 1, "max": 8}, global_samples=512, tensor=[1], pipeline=[1], performance=None
    )
    result = plan(spec, capacity(*[8] * 7))
    assert choice(result) == "tp=1,pp=1,dp=32,zero=1 4x8"
    assert any("7 nodes" in item.subject for item in result.rejected)


def test_allowed_restricts_the_number_of_nodes():
    spec = make_spec(nodes={"min": 1, "max": 3, "allowed": [1, 3]})
    assert choice(plan(spec, capacity(2, 2))) == "tp=1,pp=1,dp=2,zero=1 1x2"


def test_preferred_wins_over_a_faster_number_of_nodes():
    spec = make_spec(nodes={"min": 1, "max": 3, "preferred": 2})
    assert choice(plan(spec, capacity(2, 2, 2))) == "tp=2,pp=1,dp=2,zero=1 2x2"
    assert choice(plan(spec, capacity(2))) == "tp=1,pp=1,dp=2,zero=1 1x2"


def test_unknown_hardware_is_used_in_full_and_known_hardware_only_if_it_is_faster():
    # Gigabit Ethernet: a second node costs more than it gives.
    slow = {"teraflops": 100, "interNodeGBps": 0.1}
    parallelism = {"tensor": [1], "pipeline": [1]}
    for performance, num_nodes in ((None, 2), (slow, 1)):
        spec = make_spec(global_samples=16, performance=performance, **parallelism)
        best = plan(spec, capacity(2, 2)).best
        assert best is not None
        assert best.num_nodes == num_nodes


def test_fewer_accelerators_per_node_are_used_when_one_of_them_is_gone():
    spec = make_spec(
        per_node=(8, 4),
        nodes={"min": 2, "max": 2},
        global_samples=512,
        tensor=[1, 2, 4],
        pipeline=[1],
        performance=None,
    )
    assert choice(plan(spec, capacity(8, 8))) == "tp=1,pp=1,dp=16,zero=1 2x8"
    assert choice(plan(spec, capacity(8, 7))) == "tp=1,pp=1,dp=8,zero=1 2x4"


def test_a_quota_caps_the_job():
    assert choice(plan(make_spec(), capacity(2, 2, 2, quota=5))) == "tp=2,pp=1,dp=2,zero=1 2x2"


def test_below_min_nothing_runs_and_the_reason_has_all_figures():
    result = plan(make_spec(nodes={"min": 2, "max": 3}), capacity(2))
    assert result.best is None
    assert result.candidates == ()
    assert result.reason == (
        "Nothing can run on 2 free accelerators on 1 nodes: 2 accelerators per node: 1 nodes can give 2 accelerators "
        "each (2 free accelerators on 1 nodes), and the spec permits from 2 to 3."
    )


def test_ranked_takes_the_first_that_can_run():
    ranked = {"strategy": "Ranked", "topologies": [{"tensor": 2, "pipeline": 3}, {"tensor": 1, "pipeline": 2}]}
    assert choice(plan(make_spec(**ranked), capacity(2, 2, 2))) == "tp=2,pp=3,dp=1,zero=1 3x2"
    assert choice(plan(make_spec(**ranked), capacity(2, 2))) == "tp=1,pp=2,dp=2,zero=1 2x2"


def test_fixed_runs_one_topology_or_none():
    fixed = {"strategy": "Fixed", "topologies": [{"tensor": 1, "pipeline": 3, "data": 2}]}
    assert choice(plan(make_spec(**fixed), capacity(2, 2, 2))) == "tp=1,pp=3,dp=2,zero=1 3x2"
    assert choice(plan(make_spec(**fixed), capacity(2, 2))) is None


def test_a_tie_keeps_the_current_tensor_and_pipeline_degrees():
    # Within 2 % of each other on two nodes: pipeline of two, and tensor parallelism of two.
    for current in (Topology(tp=2, pp=1, dp=2), Topology(tp=1, pp=2, dp=2)):
        best = plan(make_spec(), capacity(2, 2), current=current).best
        assert best is not None
        assert (best.topology.tp, best.topology.pp) == (current.tp, current.pp)


def test_without_a_model_the_batch_alone_decides():
    result = plan(make_spec(model=None, tensor=[1], pipeline=[1]), capacity(2, 2, 2))
    # 20 samples in passes of 2: dp may be 1, 2, 5 or 10.
    assert choice(result) == "tp=1,pp=1,dp=2,zero=1 1x2"
    assert result.best is not None
    assert result.best.seconds is None


def test_a_large_model_is_split_until_it_fits():
    llama_70b = {
        "parameters": 70.6e9,
        "layers": 80,
        "hiddenSize": 8192,
        "attentionHeads": 64,
        "keyValueHeads": 8,
        "vocabSize": 128256,
        "sequenceLength": 8192,
        "activationCheckpointing": "Full",
    }
    spec = make_spec(
        per_node=(8,),
        nodes={"min": 1, "max": 16},
        model=llama_70b,
        global_samples=512,
        micro_samples=1,
        memory_gib=80,
        performance={},
        tensor=[1, 2, 4, 8],
        pipeline=[1, 2, 4, 8],
    )
    best = plan(spec, capacity(*[8] * 16)).best
    assert best is not None
    assert best.memory is not None
    assert best.topology.tp * best.topology.pp >= 8
    assert best.memory.total_bytes < 0.9 * 80 * 2**30
    nothing = plan(spec, capacity(8))
    assert nothing.best is None
    assert "GiB per accelerator" in nothing.reason


def test_usable_nodes_are_those_that_have_enough_in_the_order_given():
    result = plan(make_spec(), capacity(1, 2, 2))
    assert result.capacity.usable(result.best.per_node) == ("node-1", "node-2")


def test_explain_shows_candidates_and_refusals():
    text = explain(plan(make_spec(), capacity(2, 2, 2)), max_candidates=3, max_rejected=1)
    assert "*  tp=1,pp=3,dp=2,zero=1" in text
    assert "... 5 more can run too" in text
    assert "... 3 more cannot run either" in text
    assert "globalSamples(20) is not a multiple of dp(6) * microSamples(2) = 12" in text


def test_explain_without_any_candidate_still_says_why():
    text = explain(plan(make_spec(), capacity(1)))
    assert text.startswith("Nothing can run on 1 free accelerators")


def test_the_example_in_the_documentation_is_what_the_planner_prints():
    page = (Path(__file__).parents[4] / "docs/planner.md").read_text(encoding="utf-8")
    example = re.search(r"```yaml\n(.*?)```", page, re.DOTALL)
    printed = re.search(r"<!-- plan:begin -->\n```text\n(.*?)\n```\n<!-- plan:end -->", page, re.DOTALL)
    assert example is not None
    assert printed is not None
    spec = parse_spec(yaml.safe_load(example[1])["spec"])
    assert explain(plan(spec, capacity(2, 2, 2))) == printed[1]
    assert choice(plan(spec, capacity(2, 2))) == "tp=2,pp=1,dp=2,zero=1 2x2"


def test_a_spec_with_too_many_shapes_is_answered_and_says_so():
    spec = make_spec(
        per_node=(8, 4, 2, 1),
        nodes={"min": 1, "max": 5000},
        global_samples=720720,
        micro_samples=1,
        model=None,
        tensor=[1, 2, 4, 8],
        pipeline=list(range(1, 33)),
        context=[1, 2, 4],
    )
    result = plan(spec, capacity(*[8] * 5000))
    assert result.best is not None
    assert result.rejected[0].subject == "shapes beyond the limit"


def test_the_best_is_what_the_plan_finds_and_sought_again_only_where_it_may_differ(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sought: list[Capacity] = []

    def counted(spec: Spec, given: Capacity, current: Topology | None = None) -> PlanResult:
        sought.append(given)
        return plan(spec, given, current)

    monkeypatch.setattr(planner, "plan", counted)
    monkeypatch.setattr(planner, "_CACHE", {})
    spec, running = make_spec(), Topology(tp=1, pp=1, dp=2)
    for free in [(2, 2), (2, 2), (2, 1, 2), (2, 2, 2), (2, 2, 2, 2), (2,), ()]:
        for current in (None, running, running):
            assert planner.best(spec, capacity(*free), current) == plan(spec, capacity(*free), current).best
    # On 2, 3, 1 and 0 usable nodes, each with and without a current topology; 4 are no more than the permitted 3.
    assert len(sought) == 8
    planner.best(make_spec(), capacity(2, 2), running)
    assert len(sought) == 8, "an equal spec"
    planner.best(make_spec(global_samples=40), capacity(2, 2), running)
    assert len(sought) == 9
