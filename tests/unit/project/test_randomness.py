"""Randomised tests draw the same examples in every run of `make test`, and others in every soak."""

import ast
import functools
import os
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

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
from tests.fuzz.targets import TARGETS
found = []
for seed in randomness.seeds(20):
    with tempfile.TemporaryDirectory() as folder:
        found.append(TARGETS["journal"](random.Random(f"journal {seed}"), pathlib.Path(folder)))
print(randomness.seeds(20), found)
"""
COUNTS = """
from hypothesis import settings
print(settings().max_examples, randomness.examples(30), randomness.examples(30, soak=70))
print("".join(randomness.some("0123456", every=3)))
"""
HYPOTHESIS, FUZZ, COUNTED = range(3)
"""Lines of what these programs print, one after another."""

UNSEEDED = {
    "Random()", "default_rng()", "SystemRandom()", "random.random", "random.choice", "random.randint", "random.shuffle",
    "random.sample", "random.randrange", "random.uniform", "random.getrandbits", "random.randbytes", "random.choices",
}  # fmt: skip
DRAWING = {name.rpartition(".")[2].removesuffix("()") for name in UNSEEDED}


def draw(hash_seed: int, **environment: str) -> tuple[str, ...]:
    """Return what a fresh process draws and counts."""
    env = {key: value for key, value in os.environ.items() if key not in ("ETJ_SOAK", "CI", "PYTEST_XDIST_TESTRUNUID")}
    env |= {"PYTHONHASHSEED": str(hash_seed), **environment}
    command = [sys.executable, "-c", DRAWS + OUTCOMES + COUNTS]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=True)
    return tuple(done.stdout.splitlines())


class Found(NamedTuple):
    """Calls that draw without a seed, and numbers of examples that are the same in a soak."""

    unseeded: set[str]
    fixed: list[str]


@functools.cache
def find_in(path: Path) -> Found:
    found = Found(set(), [])
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Call) and getattr(node.func, "attr", getattr(node.func, "id", "")) in DRAWING:
            name = ast.unparse(node.func)
            bare = {f"{name.rpartition('.')[2]}()"} if not node.args and not node.keywords else set()
            found.unseeded.update(({name} | bare) & UNSEEDED)
        if isinstance(node, ast.keyword) and node.arg == "use_true_random" and ast.unparse(node.value) == "True":
            found.unseeded.add("use_true_random")
        if isinstance(node, ast.keyword) and node.arg == "max_examples":
            count = ast.unparse(node.value)
            found.fixed.extend([count] if not count.startswith(("examples(", "randomness.examples(")) else [])
    return found


def test_every_run_draws_the_same_examples():
    drawn = draw(1)
    assert drawn == draw(2)
    assert " ".join(drawn[COUNTED:]) == "100 30 30 036"


def test_a_soak_draws_others_and_more_of_them_and_takes_every_case():
    once, again = (draw(1, ETJ_SOAK="1") for _ in range(2))
    assert [kind for kind in (HYPOTHESIS, FUZZ) if once[kind] == again[kind]] == []
    assert " ".join(once[COUNTED:]) == "1000 300 70 0123456"


def test_no_test_draws_from_a_generator_without_a_seed():
    assert [(path, found) for path in TESTS if (found := find_in(path).unseeded)] == []


def test_every_number_of_examples_grows_in_a_soak():
    assert [(path, found) for path in TESTS if path.name != "randomness.py" and (found := find_in(path).fixed)] == []


def test_draws_without_a_seed_and_fixed_numbers_are_found(tmp_path: Path) -> None:
    page = tmp_path / "module.py"
    page.write_text(
        "random.Random()\nrandom.choice(x)\nst.randoms(use_true_random=True)\nsettings(max_examples=7)\nRandom(3)"
    )
    assert find_in(page) == ({"Random()", "random.choice", "use_true_random"}, ["7"])


def test_this_run_is_seeded_unless_it_is_a_soak():
    assert settings().derandomize is not randomness.SOAKING


def test_ci_and_make_test_do_not_soak():
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    soaking = [line.partition(":")[0] for line in makefile.split("\n\n") if "ETJ_SOAK=1" in line]
    assert soaking == ["test-all"]
    assert "ETJ_SOAK" not in (ROOT / ".ci/run").read_text(encoding="utf-8")
