"""Decisions of the stacks without their frameworks: batch sizes, degrees, DeepSpeed's configuration."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from elastic_trainer import BatchPlan, ConfigurationError, Session, settings
from elastic_trainer.mailbox import NoMailbox
from elastic_trainer.stacks import deepspeed, fsdp2
from reshard.topology import Topology


def session(**environment: str) -> Session:
    return Session(settings.from_env(environment), NoMailbox())


@pytest.mark.parametrize(
    ("config", "plan"),
    [
        ({}, (2, 1)),
        ({"train_batch_size": 24, "train_micro_batch_size_per_gpu": 3}, (24, 3)),
        ({"train_batch_size": 24}, (24, 12)),
        ({"train_batch_size": 24, "gradient_accumulation_steps": 4}, (24, 3)),
        ({"train_micro_batch_size_per_gpu": 3, "gradient_accumulation_steps": 4}, (24, 3)),
        ({"train_batch_size": "auto", "train_micro_batch_size_per_gpu": 3}, (6, 3)),
    ],
)
def test_batch_sizes_are_read_as_deepspeed_reads_them(config: dict[str, Any], plan: tuple[int, int]) -> None:
    found = deepspeed._batch_plan(session(WORLD_SIZE="2"), config)
    assert (found.global_batch, found.micro_batch, found.dp) == (*plan, 2)


def test_the_operators_batch_sizes_win() -> None:
    found = deepspeed._batch_plan(
        session(WORLD_SIZE="2", ETJ_GLOBAL_BATCH="16", ETJ_MICRO_BATCH="4"),
        {"train_batch_size": 24, "train_micro_batch_size_per_gpu": 3},
    )
    assert (found.global_batch, found.micro_batch) == (16, 4)


def test_a_configuration_keeps_what_does_not_depend_on_the_attempt(tmp_path: Path) -> None:
    path = tmp_path / "ds.json"
    path.write_text(
        json.dumps({"zero_optimization": {"stage": 3, "reduce_bucket_size": 7}, "tensor_parallel": {"dtype": "bf16"}})
    )
    config = deepspeed._read_config(path)
    filled = deepspeed.fill_config(config, Topology(dp=2, tp=4, zero=1), BatchPlan(global_batch=8, micro_batch=1, dp=2))
    assert filled == {  # without train_batch_size, see fill_config
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 4,
        "zero_optimization": {"stage": 1, "reduce_bucket_size": 7},
        "tensor_parallel": {"dtype": "bf16", "autotp_size": 4},
    }
    assert deepspeed._zero_stage(config) == 3
    assert config["zero_optimization"]["stage"] == 3


@pytest.mark.parametrize("stage", ["auto", 4, -1, None, 1.5])
def test_a_zero_stage_that_is_no_number_of_a_stage_is_refused(stage: object) -> None:
    with pytest.raises(ConfigurationError, match="expected 0 to 3, found"):
        deepspeed._zero_stage({"zero_optimization": {"stage": stage}})


def test_degrees_of_which_deepspeed_would_not_know_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="needs a PipelineModule"):
        deepspeed._check_degrees(Topology(pp=2), {}, {"model": object()})
    with pytest.raises(ConfigurationError, match="needs `tensor_parallel`"):
        deepspeed._check_degrees(Topology(tp=2), {}, {"model": object()})
    pipeline = type("PipelineModule", (), {})
    deepspeed._check_degrees(Topology(tp=2, pp=2), {}, {"model": type("Gpt", (pipeline,), {})()})
    deepspeed._check_degrees(Topology(tp=2), {"tensor_parallel": {}}, {"model": object()})
    deepspeed._check_degrees(Topology(tp=2), {}, {"model": object(), "mpu": object()})


def test_the_scripts_degrees_count_if_the_environment_says_none() -> None:
    own = settings.with_degrees(settings.from_env({"WORLD_SIZE": "6"}), tp=2, zero=3)
    assert own.topology == Topology(dp=3, tp=2, zero=3)
    with pytest.raises(ConfigurationError, match="6 ranks are not a multiple of tp=4"):
        settings.with_degrees(settings.from_env({"WORLD_SIZE": "6"}), tp=4, zero=None)


def test_the_environments_topology_wins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert Session.from_env(tp=2, zero=3).topology == Topology(tp=2, zero=3)
    monkeypatch.setenv("ETJ_TOPOLOGY", "dp=2,zero=2")
    assert Session.from_env(tp=2, zero=3).topology == Topology(dp=2, zero=2)


def test_the_mesh_has_the_order_of_ranks_of_a_topology() -> None:
    assert list(fsdp2.mesh_shape(Topology(pp=2, dp=4, cp=2, tp=2))) == ["pp", "dp", "cp", "tp"]
    assert fsdp2.mesh_shape(Topology(pp=2, dp=4, cp=2, tp=2))["dp"] == 2
    assert fsdp2.mesh_shape(Topology()) == {"dp": 1, "tp": 1}
