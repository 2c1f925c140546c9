"""The examples in docstrings of the trainer's public API give the results that they show."""

import os
from pathlib import Path

import pytest

import elastic_trainer
from elastic_trainer import batch, mailbox, session
from elastic_trainer.data import order, random_state
from elastic_trainer.stacks import deepspeed, fsdp2
from tests.examples import callables_without_example, run_examples


@pytest.fixture(autouse=True)
def single_process_without_cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in list(os.environ):
        if name.startswith(("ETJ_", "PET_")) or name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"):
            monkeypatch.delenv(name)


@pytest.mark.parametrize(
    "module", [batch, deepspeed, fsdp2, mailbox, order, random_state, session], ids=lambda module: module.__name__
)
def test_the_examples_are_right(module) -> None:
    run_examples(module)


def test_what_a_script_calls_has_an_example() -> None:
    data = {"Action", "Position"}  # results of Session
    errors = {"ConfigurationError", "FencedError", "TrainerError"}
    assert callables_without_example(elastic_trainer) == data | errors
