"""The page has the assumptions of the program, and the command refuses what it does not know."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import pytest

from simulation import report
from simulation.__main__ import SEED, SIZES, read_assumptions
from simulation.assumptions import Assumptions, describe
from simulation.policies import POLICIES
from simulation.run import Result, simulate
from tests.pages import ROOT, rows, section

PAGE = (ROOT / "docs/goodput.md").read_text(encoding="utf-8")
SMALL = Assumptions(days=10, parameters=8e9, global_samples=256)


@pytest.fixture(name="results", scope="module")
def _results() -> list[Result]:
    return [simulate(policy, 128, SMALL, seed=1) for policy in POLICIES[:3]]


def between_marks(name: str) -> str:
    return PAGE.split(f"<!-- {name}:begin -->\n")[1].split(f"<!-- {name}:end -->")[0]


def test_the_assumptions_of_the_page_are_those_of_the_program() -> None:
    assert between_marks("assumptions") == report.assumptions_table(Assumptions())


def test_every_assumption_says_what_it_means_and_where_it_comes_from() -> None:
    assert all(meaning and source for _, _, meaning, source in describe(Assumptions()))


def test_the_page_has_every_policy_at_every_size() -> None:
    shown = [(size, policy) for size, policy, *_ in rows(between_marks("simulation"))]
    assert shown == [(f"{size:,}", policy.name) for size in SIZES for policy in POLICIES]
    assert "not a measurement" in section(PAGE, "Simulation")


@pytest.mark.slow
def test_the_page_has_the_results_that_the_simulation_computes_now() -> None:
    # Only the smallest size: the others take minutes, and the same decisions and the same planner make them.
    computed = [simulate(policy, SIZES[0], Assumptions(), seed=SEED) for policy in POLICIES]
    shown = [line for line in between_marks("simulation").splitlines() if line.startswith(f"| {SIZES[0]:,} |")]
    assert shown == report.results_table(computed, Assumptions()).splitlines()[2:], "run: make simulate"


def test_the_page_gets_the_tables_and_the_picture(results: list[Result], tmp_path: Path) -> None:
    page, picture = tmp_path / "page.md", tmp_path / "picture.svg"
    marks = "<!-- {0}:begin -->\nold\n<!-- {0}:end -->\n"
    page.write_text(f"a\n{marks.format('simulation')}b\n{marks.format('assumptions')}c\n")
    report.publish(results, SMALL, page=page, picture=picture)
    first = (page.read_text(), picture.read_text())
    assert re.findall(r"^\w+$", first[0], flags=re.MULTILINE) == ["a", "b", "c"]
    assert len(rows(first[0].split("b\n")[0])) == len(results)
    assert "waiting for nodes" in first[1]
    assert len(first[1]) < 100_000
    report.publish(results, SMALL, page=page, picture=picture)
    assert (page.read_text(), picture.read_text()) == first


def test_the_table_has_the_price_of_the_lost_hours(results: list[Result]) -> None:
    (row, *_) = rows(report.results_table(results, dataclasses.replace(SMALL, dollars_per_gpu_hour=1e6)))
    assert float(row[-2]) == pytest.approx(results[0].lost_gpu_hours, abs=0.01)


def test_assumptions_are_changed_by_name() -> None:
    assert read_assumptions(["days=2", "rack_nodes=4"]) == Assumptions(days=2, rack_nodes=4)
    with pytest.raises(SystemExit, match="expected one of days, crash_seconds"):
        read_assumptions(["weeks=2"])
    with pytest.raises(SystemExit, match="expected NAME=NUMBER"):
        read_assumptions(["days"])
