"""Damage with knowledge of the structure: the same result or an error of ours, quickly and in little memory.

The same targets run for as long as one likes by `python -m tests.fuzz --seconds N`.
"""

import random
import re
import subprocess
import sys
from pathlib import Path

import pytest

from reshard.errors import CorruptSourceError, ReshardError
from tests import randomness
from tests.fuzz import guard, mutate
from tests.fuzz.families import ALL as TARGETS
from tests.fuzz.families import FAMILIES
from tests.fuzz.targets import archives, checkpoints, pickles

EXAMPLES = {"damaged": 30, "tampered": 30, "dcp_metadata": 30, "archive_pickle": 50, "archive": 50} | dict.fromkeys(
    FAMILIES, 20
)
HERE = Path(__file__).parents[2]


@pytest.mark.parametrize("name", TARGETS)
def test_every_mutation_ends_in_the_same_result_or_in_an_error_of_ours(name, tmp_path_factory):
    folder, seen = tmp_path_factory.mktemp("fuzz"), set()
    for seed in randomness.seeds(EXAMPLES.get(name, 75)):
        case = folder / str(seed)
        case.mkdir()
        try:
            seen.add(TARGETS[name](random.Random(f"{name} {seed}"), case))
        except BaseException as error:
            error.add_note(f"repeat with: python -m tests.fuzz --target {name} --seed {seed} --cases 1")
            raise
    assert len(seen) > 1, f"all cases ended as {seen}: the mutations do not reach anything"


def test_a_seed_repeats_its_case():
    for change, data in (
        (mutate.zip_fields, archives()[0]),
        (mutate.splice, archives()[0]),
        (mutate.pickle_edit, pickles()[0][0]),
    ):
        first, second = (change(data, random.Random("a seed")) for _ in range(2))
        assert first == second != data
    assert mutate.random_pickle(random.Random(5)) == mutate.random_pickle(random.Random(5))


def test_the_long_run_says_what_it_did_and_how_to_repeat_it():
    command = [sys.executable, "-m", "tests.fuzz", "--target", "commit", "--seed", "7", "--cases", "20"]
    done = subprocess.run(command, cwd=HERE, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stderr
    assert re.search(r"commit: 20 cases \(.*CorruptSourceError", done.stdout)
    assert "0 findings, seeds 7 to 26" in done.stdout


def test_all_formats_are_among_the_golden_checkpoints():
    assert {name.partition("/")[0] for name in checkpoints()} == {"deepspeed-0.19.8", "dcp-2.13", "safetensors"}


class TestTheGuardItself:
    def test_another_exception_is_a_finding(self):
        with pytest.raises(KeyError):
            guard.outcome_of(lambda: {}["x"])

    def test_an_error_of_ours_is_an_outcome(self):
        def fail() -> None:
            raise CorruptSourceError("broken")

        assert isinstance(guard.outcome_of(fail), ReshardError)

    def test_a_case_that_does_not_end_is_a_finding(self):
        def spin() -> None:
            while True:
                pass

        with pytest.raises(guard.TooSlowError), guard.limits(seconds=0.05):
            spin()

    def test_memory_is_a_finding(self):
        with pytest.raises(AssertionError, match="bytes of memory"), guard.limits(num_bytes=-1):
            pass

    def test_an_error_that_says_nothing_or_too_much_is_a_finding(self):
        for message in ("", "x" * 200_000):
            with pytest.raises(AssertionError):
                guard.check_error(CorruptSourceError(message))

    def test_a_changed_source_is_noticed(self, tmp_path):
        (tmp_path / "f").write_bytes(b"a")
        before = guard.state_of(tmp_path)
        (tmp_path / "f").write_bytes(b"b")
        assert guard.state_of(tmp_path) != before
