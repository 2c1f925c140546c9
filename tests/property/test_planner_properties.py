"""Properties of the planner for every spec and every capacity."""

from __future__ import annotations

import dataclasses
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from elastic_operator.api.spec import (
    Accelerator,
    Activations,
    Batch,
    CheckpointSpec,
    Model,
    Nodes,
    Parallelism,
    Performance,
    Spec,
    SpecError,
    Strategy,
    TopologyChoice,
    parse_spec,
)
from elastic_operator.observed.capacity import Capacity, NodeCapacity
from elastic_operator.planning.constraints import refusals
from elastic_operator.planning.plan_text import explain
from elastic_operator.planning.planner import TIE_FRACTION, plan
from reshard.topology import Topology
from tests.randomness import examples

degrees = st.sampled_from([1, 2, 3, 4, 6, 8])
degree_lists = st.lists(degrees, min_size=1, max_size=4, unique=True).map(tuple)


@st.composite
def models(draw: st.DrawFn) -> Model:
    kv_heads = draw(st.sampled_from([1, 2, 6, 8]))
    heads = kv_heads * draw(st.integers(1, 4))
    parameters = draw(st.floats(1e3, 1e12))
    experts = draw(st.sampled_from([0, 0, 8, 64]))
    return Model(
        parameters=parameters,
        layers=draw(st.integers(1, 100)),
        hidden_size=heads * draw(st.sampled_from([16, 64, 128])),
        attention_heads=heads,
        key_value_heads=kv_heads,
        vocab_size=draw(st.integers(100, 200_000)),
        sequence_length=draw(st.sampled_from([7, 64, 4096])),
        pad_vocabulary=draw(st.booleans()),
        experts=experts,
        expert_parameters=parameters * 0.8 if experts else 0.0,
        activations=draw(st.sampled_from(Activations)),
    )


@st.composite
def choices(draw: st.DrawFn) -> TopologyChoice:
    pipeline = draw(degrees)
    return TopologyChoice(
        tensor=draw(degrees),
        pipeline=pipeline,
        data=draw(st.none() | degrees),
        zero_stage=draw(st.integers(0, 1 if pipeline > 1 else 3)),
    )


@st.composite
def parallelisms(draw: st.DrawFn) -> Parallelism:
    strategy = draw(st.sampled_from(Strategy))
    most = {Strategy.AUTO: 0, Strategy.FIXED: 1, Strategy.RANKED: 3}[strategy]
    return Parallelism(
        tensor=draw(degree_lists),
        pipeline=draw(degree_lists),
        expert=draw(st.just((1,)) | degree_lists),
        context=draw(st.just((1,)) | degree_lists),
        zero_stage=draw(st.integers(0, 3)),
        strategy=strategy,
        topologies=tuple(draw(st.lists(choices(), min_size=min(1, most), max_size=most))),
    )


@st.composite
def specs(draw: st.DrawFn) -> Spec:
    least = draw(st.integers(1, 4))
    most = least + draw(st.integers(0, 8))
    micro = draw(st.sampled_from([1, 2, 5]))
    return Spec(
        accelerator=Accelerator(
            resource="amd.com/gpu",
            per_node=draw(st.lists(st.sampled_from([1, 2, 4, 6, 8]), min_size=1, max_size=3, unique=True).map(tuple)),
            memory_bytes=draw(st.none() | st.integers(2**20, 2**38)),
            performance=draw(st.none() | st.just(Performance())),
        ),
        nodes=Nodes(min=least, max=most, preferred=draw(st.none() | st.integers(least, most))),
        parallelism=draw(parallelisms()),
        batch=Batch(global_samples=micro * draw(st.integers(1, 512)), micro_samples=micro),
        model=draw(st.none() | models()),
        checkpoint=CheckpointSpec(claim_name="ckpt"),
        template={},
    )


node_lists = st.lists(st.integers(0, 9), max_size=14)


def capacity(free: list[int], quota: int | None = None) -> Capacity:
    return Capacity(
        nodes=tuple(NodeCapacity(name=f"node-{i}", free=count) for i, count in enumerate(free)), max_accelerators=quota
    )


@settings(deadline=None)
@given(specs(), node_lists, st.none() | st.integers(0, 60))
def test_what_is_chosen_can_run_and_fits(spec, free, quota):
    result = plan(spec, capacity(free, quota))
    for item in result.candidates:
        assert refusals(spec, item.shape) == ()
        assert item.topology.world_size == item.num_nodes * item.per_node
        assert spec.nodes.permits(item.num_nodes)
        assert sum(count >= item.per_node for count in free) >= item.num_nodes
        assert quota is None or item.topology.world_size <= quota
        replicas = item.topology.dp // item.topology.cp
        assert replicas * spec.batch.micro_samples * item.accumulation_steps == spec.batch.global_samples
        assert item.cost.total > 0
    assert (result.best is None) == (not result.candidates)
    if result.best is not None:
        assert len(result.capacity.usable(result.best.per_node)) >= result.best.num_nodes


@settings(deadline=None)
@given(specs(), node_lists, st.none() | st.builds(Topology, tp=degrees, pp=degrees))
def test_the_answer_does_not_depend_on_who_asks(spec, free, current):
    first = plan(spec, capacity(free), current)
    assert first == plan(spec, capacity(free), current)
    # The order of nodes decides which ones are taken, never what runs on them.
    assert plan(spec, capacity(free[::-1]), current).best == first.best


@settings(deadline=None)
@given(specs(), node_lists, st.integers(0, 9))
def test_another_node_never_makes_it_slower(spec, free, extra):
    spec = dataclasses.replace(
        spec,
        nodes=dataclasses.replace(spec.nodes, preferred=None),
        accelerator=dataclasses.replace(spec.accelerator, performance=Performance()),
        parallelism=dataclasses.replace(spec.parallelism, strategy=Strategy.AUTO, topologies=()),
    )
    before, after = plan(spec, capacity(free)).best, plan(spec, capacity([*free, extra])).best
    if before is not None:
        assert after is not None
        assert after.cost.total <= before.cost.total * (1 + TIE_FRACTION)


@settings(deadline=None)
@given(specs(), node_lists, st.integers(0, 9))
def test_on_unknown_hardware_another_node_never_means_fewer_accelerators(spec, free, extra):
    spec = dataclasses.replace(
        spec,
        nodes=dataclasses.replace(spec.nodes, preferred=None),
        accelerator=dataclasses.replace(spec.accelerator, performance=None),
        parallelism=dataclasses.replace(spec.parallelism, strategy=Strategy.AUTO, topologies=()),
    )
    before, after = plan(spec, capacity(free)).best, plan(spec, capacity([*free, extra])).best
    if before is not None:
        assert after is not None
        assert after.shape.world_size >= before.shape.world_size


@settings(deadline=None)
@given(specs(), node_lists)
def test_every_answer_has_sentences(spec, free):
    result = plan(spec, capacity(free))
    assert result.reason.endswith(".")
    assert result.best is not None or result.rejected
    for item in result.rejected:
        assert item.subject
        assert all(item.reasons)
    assert explain(result).startswith(result.reason)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)
SECTIONS: dict[str, Any] = {
    "accelerator": ["resource", "perNode", "memoryGiB", "performance"],
    "nodes": ["min", "max", "preferred", "allowed"],
    "parallelism": ["tensor", "pipeline", "zeroStage", "strategy", "topologies"],
    "batch": ["globalSamples", "microSamples"],
    "model": ["parameters", "layers", "attentionHeads", "keyValueHeads", "experts"],
    "checkpoint": ["claimName", "path", "format"],
    "template": ["spec"],
    "recovery": ["restartBudget", "hangSeconds"],
}
raw_specs = st.fixed_dictionaries(
    {},
    optional={
        section: json_values | st.dictionaries(st.sampled_from(fields), json_values)
        for section, fields in SECTIONS.items()
    },
)


@settings(max_examples=examples(300), deadline=None)
@given(raw_specs)
def test_any_json_is_read_or_refused_in_sentences(value):
    try:
        parse_spec(value)
    except SpecError as error:
        assert error.problems
        assert all(problem.startswith("spec.") for problem in error.problems)
