"""Each constraint refuses with one sentence that has all its factors."""

from __future__ import annotations

import dataclasses

import pytest

from elastic_operator.api.spec import Accelerator, Batch, CheckpointSpec, Model, Nodes, Spec
from elastic_operator.planning import memory
from elastic_operator.planning.constraints import refusals
from elastic_operator.planning.shape import Shape

MODEL = Model(
    parameters=7e9,
    layers=32,
    hidden_size=4096,
    attention_heads=32,
    key_value_heads=8,
    vocab_size=50257,
    sequence_length=8192,
    experts=16,
    expert_parameters=5e9,
)
SPEC = Spec(
    accelerator=Accelerator(resource="amd.com/gpu", per_node=(8,)),
    nodes=Nodes(min=1, max=64),
    batch=Batch(global_samples=512, micro_samples=2),
    checkpoint=CheckpointSpec(claim_name="ckpt"),
    template={},
    model=MODEL,
)
GOOD = Shape(num_nodes=4, per_node=8, tp=2, pp=2, dp=8)


def test_a_shape_that_can_run_is_not_refused():
    assert refusals(SPEC, GOOD) == ()


@pytest.mark.parametrize(
    ("shape", "expected"),
    [
        ({"dp": 4}, "tp(2) * pp(2) * dp(4) = 16 is not the 32 accelerators of 4 nodes * 8"),
        (
            {"tp": 16, "dp": 1},
            "tp(16) does not divide the 8 accelerators of a node: a tensor parallel group would span",
        ),
        ({"tp": 16, "dp": 1}, "tp(16) does not divide keyValueHeads(8)"),
        ({"tp": 3}, "tp(3) does not divide attentionHeads(32)"),
        ({"tp": 3}, "tp(3) does not divide hiddenSize(4096)"),
        ({"pp": 33}, "pp(33) is more than layers(32)"),
        ({"zero": 2}, "ZeRO stage 2 excludes pipelines, and pp is 2"),
        ({"ep": 3}, "ep(3) * cp(1) does not divide dp(8)"),
        ({"dp": 96, "ep": 32}, "ep(32) does not divide experts(16)"),
        ({"dp": 3}, "globalSamples(512) is not a multiple of dp(3) * microSamples(2) = 6"),
        ({"dp": 24, "cp": 4}, "globalSamples(512) is not a multiple of dp(24) / cp(4) * microSamples(2) = 12"),
        ({"dp": 96, "cp": 3}, "cp(3) does not divide sequenceLength(8192)"),
        ({"dp": 96, "cp": 3}, "tp(2) * cp(3) does not divide attentionHeads(32)"),
    ],
)
def test_a_shape_that_cannot_run_is_refused_with_its_factors(shape, expected):
    found = refusals(SPEC, dataclasses.replace(GOOD, **shape))
    assert any(expected in sentence for sentence in found), found


def test_fsdp2_permits_a_pipeline_and_counts_as_zero_3():
    dcp = dataclasses.replace(SPEC, checkpoint=dataclasses.replace(SPEC.checkpoint, format="DCP"))
    shape = dataclasses.replace(GOOD, zero=3)
    assert refusals(dcp, shape) == ()
    assert refusals(SPEC, shape) == ("ZeRO stage 3 excludes pipelines, and pp is 2",)
    sharded, replicated = (memory.estimate(MODEL, dataclasses.replace(GOOD, zero=zero), 2, 32) for zero in (3, 0))
    assert sharded.weights_bytes == pytest.approx(replicated.weights_bytes / GOOD.dp)
    assert sharded.optimizer_bytes == pytest.approx(replicated.optimizer_bytes / GOOD.dp)


def test_expert_parallelism_needs_experts():
    dense = dataclasses.replace(SPEC, model=dataclasses.replace(MODEL, experts=0, expert_parameters=0))
    assert refusals(dense, dataclasses.replace(GOOD, ep=2)) == ("ep(2) needs experts, and the model has none",)


def test_an_unpadded_vocabulary_must_be_divisible():
    unpadded = dataclasses.replace(SPEC, model=dataclasses.replace(MODEL, pad_vocabulary=False))
    assert refusals(unpadded, GOOD) == ("tp(2) does not divide vocabSize(50257), and padVocabulary is false",)


def test_too_little_memory_is_refused_with_its_parts():
    tight = dataclasses.replace(SPEC, accelerator=dataclasses.replace(SPEC.accelerator, memory_bytes=8 * 2**30))
    (sentence,) = refusals(tight, GOOD)
    assert sentence.startswith("needs ")
    for part in ("weights", "gradients", "optimizer", "activations", "7.2 of 8 GiB"):
        assert part in sentence


def test_without_a_model_only_mesh_and_batch_are_checked():
    blind = dataclasses.replace(SPEC, model=None)
    assert refusals(blind, dataclasses.replace(GOOD, num_nodes=66, pp=33)) == ()
