"""The examples in docstrings of the resharder's public API give the results that they show."""

import shutil
from pathlib import Path

import pytest

from reshard import api, formats, topology
from reshard.formats.pt import trust
from tests.examples import callables_without_example, run_examples

ZERO2 = Path(__file__).parents[2] / "golden/deepspeed-0.19.8/zero2-dp3/step-00000002"


@pytest.fixture(autouse=True)
def folder_with_a_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copytree(ZERO2, tmp_path / "ckpt/global_step2")
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("module", [api, formats, topology, trust], ids=lambda module: module.__name__)
def test_the_examples_are_right(module) -> None:
    run_examples(module)


def test_what_a_program_calls_has_an_example() -> None:
    options = {"Conversion", "Hooks", "RunOptions"}  # the examples of plan_conversion and convert show them
    assert callables_without_example(api) == options
