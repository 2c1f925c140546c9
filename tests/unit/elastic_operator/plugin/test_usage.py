"""`kubectl etj top`: figures of the status per job, and their total."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest

from elastic_operator.plugin.pages.usage import SORTS, Usage, format_usage, measure_usage, sort_usage

RECORDED: dict[str, Any] = json.loads((Path(__file__).parent / "data/recorded_recovery.json").read_text())


def usage(stage: str, **status: Any) -> Usage:
    resource = copy.deepcopy(RECORDED[stage]["job"])
    resource["status"] |= status
    return measure_usage(resource, RECORDED[stage]["time"])


def test_a_running_job_has_gpus_rates_and_the_age_of_its_last_step() -> None:
    found = usage("drained")
    assert (found.gpus, found.ettr, found.useful_gpus, found.failures) == (6, 0.3821, 2.29, 1)
    assert found.steps_per_second == pytest.approx(1.71, abs=0.01)
    assert found.samples_per_second == pytest.approx(34.2, abs=0.1)
    assert found.step_age_seconds == pytest.approx(2, abs=1)


@pytest.mark.parametrize("stage", ["resharding", "suspended", "starting"])
def test_a_job_that_does_not_train_has_no_rate(stage: str) -> None:
    assert usage(stage).steps_per_second is None


def test_a_job_holds_gpus_while_an_attempt_may_run() -> None:
    assert usage("suspended").gpus == 0
    assert usage("resharding").gpus == 0, "the next attempt is planned, and not launched"
    assert usage("drained", phase="Failed").gpus == 0


def test_the_table_ends_with_a_total() -> None:
    items = [usage("drained"), usage("suspended")]
    text = format_usage(items, everywhere=True)
    assert text.splitlines()[0].split("   ")[0] == "NAMESPACE"
    assert text.splitlines()[1].split()[:6] == ["demo", "gpt", "Running", "6", "2.3", "(38%)"]
    assert text.splitlines()[-1] == "Total: 2 jobs (1 Running, 1 Suspended), 6 GPUs, 2.3 of them useful"
    assert "None" not in text


def named(name: str, **fields: Any) -> Usage:
    return Usage(name=name, namespace="n", phase="Running", **fields)


@pytest.mark.parametrize(
    ("order", "expected"),
    [("gpus", "cab"), ("useful", "bca"), ("age", "bac"), ("failures", "acb")],
)
def test_the_first_line_is_what_deserves_a_look(order: str, expected: str) -> None:
    items = [
        named("a", gpus=8, step_age_seconds=5.0, failures=9),
        named("b", gpus=4, ettr=0.1, step_age_seconds=900.0),
        named("c", gpus=16, ettr=0.9, step_age_seconds=1.0, failures=2),
    ]
    assert order in SORTS
    assert "".join(item.name for item in sort_usage(items, order)) == expected


def test_a_job_without_status_has_a_line() -> None:
    resource = copy.deepcopy(RECORDED["starting"]["job"])
    del resource["status"]
    text = format_usage([measure_usage(resource, RECORDED["starting"]["time"])], everywhere=False)
    assert text.splitlines()[1].split() == ["gpt", "Unknown", "-", "-", "-", "-", "-", "0", "-", "0"]
