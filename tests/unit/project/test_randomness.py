"""Randomised tests draw the same examples in every run of `make test`, and others in every soak."""

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import settings

from tests import randomness

ROOT = Path(__file__).parents[3]
TESTS = sorted((ROOT / "tests").rglob("*.py"))
DRAWS = """
from tests import randomness
randomness.load_profile()
from hypothesis import given, strategies as st
drawn = []
@given(number=st.integers(), chance=st.randoms(use_true_random=False))
def draw(number, chance):
    drawn.append((number, chance.random()))
draw()
print(drawn)
"""
OUTCOMES = """
import tempfile, pathlib, random
from tests import randomness
from tests.fuzz.targets import TARGETS
found = []
for seed in randomness.seeds(20):
    with tempfile.TemporaryDirectory() as folder:
        found.append(TARGETS["journal"](random.Random(f"journal {seed}"), pathlib.Path(folder)))
print(randomness.seeds(20), found)
"""
UNSEEDED = {
    "Random()", "default_rng()", "SystemRandom()", "random.random", "random.choice", "random.randint", "random.shuffle",
    "random.sample", "random.randrange", "random.uniform", "random.getrandbits", "random.randbytes", "random.choices",
}  # fmt: skip


def output_of(program: str, hash_seed: int, **environment: str) -> str:
    env = {key: value for key, value in os.environ.items() if key not in ("ETJ_SOAK", "CI", "PYTEST_XDIST_TESTRUNUID")}
    env |= {"PYTHONHASHSEED": str(hash_seed), **environment}
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, env=env, capture_output=True, text=True, check=True
    )
    return done.stdout


def calls(path: Path) -> set[str]:
    """Return the calls of a module that `UNSEEDED` may name: `f()` without arguments, and `random.f`."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Call):
            name = ast.unparse(node.func)
            found |= {name} | ({f"{name.rpartition('.')[2]}()"} if not node.args and not node.keywords else set())
            if any(one.arg == "use_true_random" and ast.unparse(one.value) == "True" for one in node.keywords):
                found.add("use_true_random")
    return found


@pytest.mark.parametrize("program", [DRAWS, OUTCOMES], ids=["hypothesis", "fuzz"])
def test_every_run_draws_the_same_examples(program):
    assert output_of(program, 1) == output_of(program, 2)


@pytest.mark.parametrize("program", [DRAWS, OUTCOMES], ids=["hypothesis", "fuzz"])
def test_a_soak_draws_others(program):
    assert output_of(program, 1, ETJ_SOAK="1") != output_of(program, 1, ETJ_SOAK="1")


def test_no_test_draws_from_a_generator_without_a_seed():
    assert [(path, found) for path in TESTS if (found := calls(path) & (UNSEEDED | {"use_true_random"}))] == []


COUNTS = """
from tests import randomness
randomness.load_profile()
from hypothesis import settings
print(settings().max_examples, randomness.examples(30), randomness.examples(30, soak=70))
print("".join(randomness.some("0123456", every=3)))
"""


def fixed_counts(path: Path) -> list[str]:
    """Return the settings of a module whose number of examples is the same in a soak."""
    keywords = (node for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))) if isinstance(node, ast.keyword))
    counts = (ast.unparse(one.value) for one in keywords if one.arg == "max_examples")
    return [text for text in counts if not text.startswith(("examples(", "randomness.examples("))]


def test_a_soak_draws_more_examples_and_takes_every_case():
    assert output_of(COUNTS, 1).split() == ["100", "30", "30", "036"]
    assert output_of(COUNTS, 1, ETJ_SOAK="1").split() == ["1000", "300", "70", "0123456"]


def test_every_number_of_examples_grows_in_a_soak():
    assert [(path, found) for path in TESTS if path.name != "randomness.py" and (found := fixed_counts(path))] == []


def test_this_run_is_seeded_unless_it_is_a_soak():
    assert settings().derandomize is not randomness.SOAKING


def test_ci_and_make_test_do_not_soak():
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    soaking = [line.partition(":")[0] for line in makefile.split("\n\n") if "ETJ_SOAK=1" in line]
    assert soaking == ["test-all"]
    assert "ETJ_SOAK" not in (ROOT / ".ci/run").read_text(encoding="utf-8")
