"""docs/kubectl-etj.md shows what the program prints about the recorded job, and lists its exit codes and fields."""

from __future__ import annotations

import dataclasses
import io
import json
import re
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from elastic_operator.api.serialization import to_camel_case
from elastic_operator.manifests.attempt import DRAIN_REQUESTED, JobRef
from elastic_operator.observed.timeouts import Timeouts
from elastic_operator.plugin.errors import Exit
from elastic_operator.plugin.options import make_parser
from elastic_operator.plugin.pages.forecast import Forecast, ReshardForecast, make_forecast
from elastic_operator.plugin.pages.job_report import JobReport, RecoveryReport, make_report, read_spec, read_status
from elastic_operator.plugin.pages.listing import ListEntry, format_listing, make_entry
from elastic_operator.plugin.pages.live.losses import Sample
from elastic_operator.plugin.pages.live.node_picture import find_node_states
from elastic_operator.plugin.pages.live.pace import PartProgress, RecoveryProgress, steps_per_second, track_recovery
from elastic_operator.plugin.pages.live.watch_page import Frame, render
from elastic_operator.plugin.pages.plan_page import format_plan
from elastic_operator.plugin.pages.recovery_estimate import Estimate
from elastic_operator.plugin.pages.report.story import AttemptSpan, CommitMark, Story
from elastic_operator.plugin.pages.status_page import PARTS, format_status
from elastic_operator.plugin.pages.usage import Usage, format_usage, measure_usage
from elastic_operator.plugin.pages.whatif import Change, observe, parse_lose
from elastic_operator.plugin.pages.why import Explanation, Reason, explain, format_explanation
from elastic_operator.plugin.steer import SteerResult, describe_outcome
from elastic_operator.reconcile.context import Context
from elastic_operator.reconcile.user_requests import CAUSE

ROOT = Path(__file__).parents[4]
PAGE = (ROOT / "docs/kubectl-etj.md").read_text(encoding="utf-8")
RECORDED: dict[str, Any] = json.loads((Path(__file__).parent / "data/recorded_recovery.json").read_text())

SHOWN = [
    ("list -A", "drained"),
    ("top -A", "drained"),
    ("status gpt --events 4", "drained"),
    ("status gpt --events 0", "resharding"),
    ("why gpt", "resharding"),
    ("plan gpt --lose gpu-2", "drained"),
    ("plan gpt --gpus 2", "growing"),
    ("plan gpt --lose gpu-1 gpu-2 gpu-3", "running"),
]


def printed(command: str, stage: str) -> str:
    """What the program prints where the cluster is as it was recorded."""
    entry_, options = RECORDED[stage], make_parser().parse_args(command.split())
    job, now = entry_["job"], entry_["time"]
    found = make_report(job, now, entry_["events"])
    if options.verb == "list":
        return format_listing([make_entry(found)], now, everywhere=options.all_namespaces)
    if options.verb == "top":
        return format_usage([measure_usage(job, now)], everywhere=options.all_namespaces)
    if options.verb == "status":
        return format_status(found, now, max_events=options.events)
    if options.verb == "why":
        return format_explanation(explain(job, now), now)
    spec, _ = read_spec(job)
    assert spec is not None
    world = observe(entry_["nodes"], entry_["pods"], "demo", "gpt", spec.accelerator.resource)
    ref = JobRef(name="gpt", namespace="demo", uid=job["metadata"]["uid"])
    context = Context(job=ref, spec=spec, world=world, limits=Timeouts(), now=now)
    lose = parse_lose(name for group in options.lose for name in group)
    change = Change(lose=lose, num_gpus=options.gpus, add_nodes=options.add)
    return format_plan(make_forecast(context, read_status(job), change))


@pytest.mark.parametrize(("command", "stage"), SHOWN)
def test_the_page_shows_what_is_printed(command: str, stage: str) -> None:
    assert f"```console\n$ kubectl etj {command}\n{printed(command, stage)}\n```" in PAGE


def test_the_page_shows_a_frame_of_the_live_view() -> None:
    entry_ = RECORDED["resharding"]
    status, now = read_status(entry_["job"]), entry_["time"]
    frame = Frame(
        job=make_report(entry_["job"], now, entry_["events"]),
        now=now,
        rate=steps_per_second(status),
        recovery=track_recovery(status, now),
        nodes=find_node_states(
            status, "amd.com/gpu", entry_["pods"], entry_["nodes"], entry_["pods"], job=("demo", "gpt")
        ),
    )
    out = io.StringIO()
    Console(file=out, width=110).print(render(frame, max_events=3))
    text = "\n".join(line.rstrip() for line in out.getvalue().splitlines())
    assert f"```console\n$ kubectl etj watch gpt\n{text}\n```" in PAGE


@pytest.mark.parametrize(
    ("verb", "attempt", "stage"),
    [("drain", 3, "drained"), ("suspend", 4, "suspended")],
)
def test_the_page_shows_what_a_request_led_to(verb: str, attempt: int, stage: str) -> None:
    asked = SteerResult(
        name="gpt", namespace="demo", verb=verb, changed=True, text="", phase="", attempt=attempt, request="x"
    )
    text = describe_outcome(asked, read_status(RECORDED[stage]["job"]))
    assert f"$ kubectl etj {verb} gpt --wait\n{text}\n" in PAGE


def test_the_page_lists_every_verb_and_exit_code() -> None:
    (verbs,) = [action for action in make_parser()._actions if action.dest == "verb"]
    assert set(verbs.choices or ()) == set(re.findall(r"^\| `(\w+)[^`]*` \|", PAGE, flags=re.MULTILINE)) & set(
        verbs.choices or ()
    )
    assert {int(code) for code in re.findall(r"^\| (\d) \|", PAGE, flags=re.MULTILINE)} == set(Exit)


@pytest.mark.parametrize(
    "shape",
    [
        JobReport,
        RecoveryReport,
        ListEntry,
        Forecast,
        ReshardForecast,
        Estimate,
        SteerResult,
        Explanation,
        Reason,
        RecoveryProgress,
        PartProgress,
        Story,
        AttemptSpan,
        CommitMark,
        Sample,
        Usage,
    ],
    ids=lambda s: s.__name__,
)
def test_the_page_names_every_field_of_the_json(shape: Any) -> None:
    absent = [
        to_camel_case(field.name) for field in dataclasses.fields(shape) if f"`{to_camel_case(field.name)}`" not in PAGE
    ]
    assert absent == []


def test_the_page_explains_every_part_of_a_recovery_and_the_annotation() -> None:
    assert [name for name in PARTS if f"`{name}`" not in PAGE] == []
    assert f"`{DRAIN_REQUESTED}`" in PAGE
    assert CAUSE in PAGE
