"""No seeded defect of planner, layouts, readers, writers, execution or sources gets past the checks of a conversion.

`python -m tests.property.witness_mutants 200` also tells which defects the witness alone finds.
"""

import tempfile
from pathlib import Path

import pytest

from reshard.api import RunOptions, convert
from tests.property.witness_mutants import CASES, Case, run_mutant
from tests.randomness import seeds, some

BATCHES = 4


@pytest.mark.parametrize("batch", range(BATCHES))
def test_no_mutant_is_accepted(batch: int) -> None:
    for seed in seeds(24, soak=200)[batch::BATCHES]:
        outcome = run_mutant(seed)
        assert outcome.error is not None, f"seed {seed}: {outcome.kind} of {outcome.case} was published"


@pytest.mark.parametrize(
    "case",
    some(CASES, every=3),
    ids=lambda case: f"{case.source.parent.name} {case.topology} {case.format}",
)
def test_what_mutants_are_made_of_is_converted_and_witnessed(case: Case) -> None:
    with tempfile.TemporaryDirectory() as scratch:
        report = convert(case.conversion(Path(scratch) / "out"), RunOptions(sync=False, num_threads=1))
    assert report.witness["tensors"] > 0
    assert report.witness["not_witnessed"] == 0
