"""Memory and time models against figures worked out by hand or printed in the papers they come from."""

from __future__ import annotations

import dataclasses

import pytest

from elastic_operator.api.spec import Activations, Batch, Model, Performance
from elastic_operator.planning import cost, memory
from elastic_operator.planning.shape import Shape

GPT3 = Model(
    parameters=175e9,
    layers=96,
    hidden_size=12288,
    attention_heads=96,
    key_value_heads=96,
    vocab_size=51200,
    sequence_length=2048,
    activations=Activations.NONE,
)
ZERO_PAPER = dataclasses.replace(GPT3, parameters=7.5e9)


def shape(**degrees: int) -> Shape:
    degrees = {"tp": 1, "pp": 1, "dp": 1, **degrees}
    world = degrees["tp"] * degrees["pp"] * degrees["dp"]
    return Shape(num_nodes=max(1, world // 8), per_node=min(8, world), **degrees)


@pytest.mark.parametrize(("zero", "gigabytes"), [(0, 120), (1, 31.4), (2, 16.6), (3, 1.9)])
def test_model_state_is_that_of_the_zero_paper(zero, gigabytes):
    # Rajbhandari et al. 2020, figure 1: 7.5 B parameters on 64 devices.
    held = memory.estimate(ZERO_PAPER, shape(dp=64, zero=zero), micro_samples=1, accumulation_steps=1)
    state = held.weights_bytes + held.gradients_bytes + held.optimizer_bytes
    assert state / 1e9 == pytest.approx(gigabytes, abs=0.05)


def test_activations_are_those_of_the_recomputation_paper():
    # Korthikanti et al. 2022, section 4.1: for GPT-3 5as/h is 80, and equation 1 without parallelism is sbh(34 + 80).
    kept = memory.activation_bytes_per_layer(GPT3, shape(), micro_samples=1)
    assert kept == 2048 * 12288 * (34 + 80)
    selective = dataclasses.replace(GPT3, activations=Activations.SELECTIVE)
    assert memory.activation_bytes_per_layer(selective, shape(tp=8), 1) == 2048 * 12288 * 13
    full = dataclasses.replace(GPT3, activations=Activations.FULL)
    assert memory.activation_bytes_per_layer(full, shape(tp=8), 1) == 2048 * 12288 * 2


def test_a_pipeline_keeps_as_many_micro_batches_as_it_has_stages():
    one = memory.estimate(GPT3, shape(pp=4), micro_samples=1, accumulation_steps=1).activations_bytes
    many = memory.estimate(GPT3, shape(pp=4), micro_samples=1, accumulation_steps=100).activations_bytes
    assert many == 4 * one


def test_the_largest_stage_counts_where_layers_do_not_divide():
    assert memory.largest_stage(GPT3, shape(pp=7)) == 14
    even = memory.estimate(GPT3, shape(pp=6), 1, 1).weights_bytes
    assert even == pytest.approx(2 * 175e9 / 6)


def test_experts_are_divided_by_expert_parallelism():
    sparse = dataclasses.replace(GPT3, experts=8, expert_parameters=140e9)
    whole = memory.estimate(sparse, shape(dp=8, zero=0), 1, 1).weights_bytes
    split = memory.estimate(sparse, shape(dp=8, ep=8, zero=0), 1, 1).weights_bytes
    assert whole == 2 * 175e9
    assert split == pytest.approx(2 * (35e9 + 140e9 / 8))


def test_step_flops_of_gpt3():
    # 6 N per token plus attention: PaLM, appendix B.
    per_token = 6 * 175e9 + 12 * 96 * 12288 * 2048
    assert cost.step_flops(GPT3, 1) == pytest.approx(per_token * 2048)


def estimate(shape: Shape, *, num_micro: int = 8, model: Model | None = GPT3, samples: int = 64) -> cost.Cost:
    return cost.estimate(model, Performance(), Batch(global_samples=samples), shape, num_micro)


def test_one_accelerator_only_computes():
    alone = estimate(shape(), num_micro=64)
    assert alone.total == alone.compute == pytest.approx(cost.step_flops(GPT3, 64) / 400e12)


def test_the_bubble_is_that_of_the_pipeline_formula():
    piped = estimate(shape(pp=4), num_micro=8)
    assert piped.bubble / piped.compute == pytest.approx(3 / 8)
    blind = estimate(shape(pp=4), num_micro=8, model=None)
    assert blind.bubble / blind.compute == pytest.approx(3 / 8)


def test_the_gradient_all_reduce_has_the_volume_of_a_ring():
    # 350 GB of gradients over 8 ranks in one node at 300 GB/s: 2 * 7/8 * 350 / 300 s, and 14 messages of 10 us.
    assert estimate(shape(dp=8)).data == pytest.approx(2 * 7 / 8 * 350 / 300 + 14 * 10e-6)


def test_zero_stages_communicate_more_often():
    stages = [estimate(shape(dp=8, zero=zero)).data for zero in (1, 2, 3)]
    assert stages[1] == pytest.approx(8 * stages[0])
    assert stages[2] == pytest.approx(1.5 * stages[1])


def test_every_kind_of_parallelism_but_data_costs_communication():
    assert estimate(shape(tp=8)).tensor > 0
    assert estimate(shape(pp=2)).pipeline > 0
    assert estimate(shape(dp=8, cp=2)).context > 0
    sparse = dataclasses.replace(GPT3, experts=8, expert_parameters=140e9)
    assert estimate(shape(dp=8, ep=8), model=sparse).expert > 0
