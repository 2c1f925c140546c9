"""`kubectl etj plan`: a recorded cluster and a change go in, what the operator would do comes out."""

from __future__ import annotations

import copy
import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from elastic_operator.api.serialization import to_wire
from elastic_operator.api.status import Checkpoint, Status
from elastic_operator.manifests.attempt import JobRef
from elastic_operator.observed.timeouts import Timeouts
from elastic_operator.plugin.errors import Exit, PluginError
from elastic_operator.plugin.pages.forecast import Forecast, make_forecast
from elastic_operator.plugin.pages.job_report import read_spec, read_status
from elastic_operator.plugin.pages.plan_page import format_plan
from elastic_operator.plugin.pages.recovery_estimate import estimate_recovery
from elastic_operator.plugin.pages.whatif import Change, apply_change, observe, parse_lose
from elastic_operator.plugin.steer import describe_start
from elastic_operator.reconcile import next_attempt
from elastic_operator.reconcile.context import Context

GPU = "amd.com/gpu"
RECORDED: dict[str, Any] = json.loads((Path(__file__).parent / "data/recorded_recovery.json").read_text())
BIG, SMALL = "tp=1,pp=3,dp=2,zero=1", "tp=1,pp=2,dp=2,zero=1"


def situation(stage: str, *, spec: dict[str, Any] | None = None, **status: Any) -> tuple[Context, Status]:
    entry = copy.deepcopy(RECORDED[stage])
    entry["job"]["spec"] |= spec or {}
    entry["job"]["status"] |= status
    typed, problem = read_spec(entry["job"])
    assert typed is not None, problem
    world = observe(entry["nodes"], entry["pods"], "demo", "gpt", GPU)
    job = JobRef(name="gpt", namespace="demo", uid="uid")
    context = Context(job=job, spec=typed, world=world, limits=Timeouts(), now=entry["time"])
    return context, read_status(entry["job"])


def ask(stage: str, *, spec: dict[str, Any] | None = None, **change: Any) -> Forecast:
    return make_forecast(*situation(stage, spec=spec), Change(**change))


OUTCOMES = [
    # stage, change, outcome, topology then, its nodes, mode of the conversion
    ("running", {}, "Unaffected", BIG, 3, None),
    ("running", {"lose": {"gpu-3": None}}, "Reshards", SMALL, 2, "Auto"),
    ("running", {"lose": {"gpu-1": 1}}, "Reshards", SMALL, 2, "Auto"),
    ("running", {"num_gpus": 4}, "Reshards", SMALL, 2, "Auto"),
    ("running", {"num_gpus": 3}, "Reshards", "tp=1,pp=1,dp=2,zero=1", 1, "Auto"),
    ("running", {"num_gpus": 6}, "Unaffected", BIG, 3, None),
    ("running", {"num_gpus": 12}, "Unaffected", BIG, 3, None),
    ("running", {"add_nodes": 2}, "Unaffected", BIG, 3, None),
    ("running", {"lose": {"gpu-3": None}, "add_nodes": 1}, "Restarts", BIG, 3, "None"),
    ("running", {"lose": {"gpu-1": None, "gpu-2": None, "gpu-3": None}}, "Waits", "", 0, None),
    ("running", {"num_gpus": 0}, "Waits", "", 0, None),
    ("growing", {}, "Grows", BIG, 3, "Auto"),
    ("growing", {"lose": {"gpu-3": None}}, "Unaffected", SMALL, 2, None),
    ("growing", {"lose": {"gpu-1": None}}, "Restarts", SMALL, 2, "None"),
    ("growing", {"num_gpus": 2}, "Reshards", "tp=1,pp=1,dp=2,zero=1", 1, "Auto"),
    ("resharding", {}, "Starts", SMALL, 2, "Auto"),
    ("resharding", {"add_nodes": 1}, "Starts", BIG, 3, "None"),
    ("suspended", {}, "Starts", BIG, 3, "None"),
    ("suspended", {"num_gpus": 4}, "Starts", SMALL, 2, "Auto"),
]


@pytest.mark.parametrize(("stage", "change", "expected"), [(row[0], row[1], row[2:]) for row in OUTCOMES])
def test_what_a_change_leads_to(stage: str, change: dict[str, Any], expected: tuple[Any, ...]) -> None:
    plan = ask(stage, **change)
    assert (plan.outcome, plan.to, plan.to_nodes, plan.reshard.mode if plan.reshard else None) == expected
    text = format_plan(plan)
    assert text.startswith("gpt would ")
    assert "None" not in text
    assert all(line == line.rstrip() for line in text.splitlines())


def test_the_answer_is_what_the_operators_own_planning_decides() -> None:
    context, status = situation("running")
    change = Change(lose={"gpu-3": None})
    lost = dataclasses.replace(context, world=apply_change(context, status, change))
    planned = next_attempt.plan_next(lost, dataclasses.replace(status, current=None))
    assert planned.current is not None
    plan = make_forecast(context, status, change)
    assert plan.resume_step == planned.current.resume.step
    assert (plan.to_nodes, plan.gpus_per_node) == (planned.current.num_nodes, planned.current.gpus_per_node)
    assert planned.plan is not None
    assert [item.reason for item in plan.refused] == [item.reason for item in planned.plan.rejected]


def test_what_really_followed_the_loss_is_what_was_foreseen() -> None:
    foreseen = ask("running", lose={"gpu-3": None})
    after = read_status(RECORDED["growing"]["job"]).recoveries[0]
    assert (foreseen.to, foreseen.resume_step) == (after.to, after.commit_step)
    assert after.conversion is not None
    assert foreseen.reshard is not None
    assert foreseen.reshard.num_bytes == pytest.approx(after.conversion.bytes_read, rel=0.02)


def test_a_dcp_job_loads_its_commit_without_a_conversion() -> None:
    context, status = situation("running")
    checkpoint = dataclasses.replace(context.spec.checkpoint, format="DCP")
    context = dataclasses.replace(context, spec=dataclasses.replace(context.spec, checkpoint=checkpoint))
    history = tuple(dataclasses.replace(item, format="dcp") for item in status.checkpoint.history)
    status = dataclasses.replace(status, checkpoint=dataclasses.replace(status.checkpoint, history=history))
    plan = make_forecast(context, status, Change(lose={"gpu-3": None}))
    assert (plan.outcome, plan.to) == ("Reshards", SMALL)
    assert plan.reshard is not None
    assert (plan.reshard.mode, plan.reshard.source) == ("Load", status.checkpoint.uri)
    assert "Start mode Load: ranks read " in plan.reason
    assert plan.estimate is not None
    assert "reshard" not in plan.estimate.parts_seconds
    assert "none: the training loads another topology by itself: step " in format_plan(plan)


def test_steps_since_the_last_commit_are_counted_as_lost() -> None:
    plan = ask("growing", lose={"gpu-1": None})
    assert (plan.resume_step, plan.lost_steps) == (35, 2)
    assert "as of now 2 steps would be done again" in " ".join(format_plan(plan).split())


def test_growth_loses_nothing_and_says_when() -> None:
    plan = ask("growing")
    assert plan.lost_steps == 0
    assert "20 s" in plan.notes[0]
    assert "1.50 times as fast" in plan.reason


def test_growth_that_is_not_worth_a_restart_does_not_happen() -> None:
    slow = {"accelerator": {"resource": GPU, "perNode": [2]}, "nodes": {"min": 1, "max": 2}}
    assert ask("growing", spec=slow).outcome == "Unaffected"


def test_accelerators_of_other_jobs_are_not_counted() -> None:
    entry = copy.deepcopy(RECORDED["growing"])
    other = next(item for item in entry["pods"] if item["spec"].get("nodeName") == "gpu-1")
    stranger = copy.deepcopy(other)
    stranger["metadata"] |= {"name": "other", "labels": {}}
    stranger["spec"]["nodeName"] = "gpu-3"
    world = observe(entry["nodes"], [*entry["pods"], stranger], "demo", "gpt", GPU)
    assert world.used == {"gpu-3": 2}
    context, status = situation("growing")
    assert make_forecast(dataclasses.replace(context, world=world), status, Change()).outcome == "Unaffected"


def test_a_node_that_is_not_there_is_refused_with_those_that_are() -> None:
    with pytest.raises(PluginError, match=r"no node gpu-9 with amd\.com/gpu.*gpu-1, gpu-2, gpu-3") as caught:
        ask("running", lose={"gpu-9": None})
    assert caught.value.code == Exit.REFUSED


def test_a_finished_job_starts_nothing() -> None:
    context, status = situation("suspended", phase="Complete", message="complete after step 240")
    plan = make_forecast(context, status, Change(num_gpus=2))
    assert plan.outcome == "Finished"
    assert format_plan(plan).startswith("gpt has ended (complete after step 240)")


def test_a_suspended_job_is_planned_for_its_resume() -> None:
    assert "the job is suspended: this is what a resume would start" in ask("suspended").notes


def test_every_refusal_has_a_reason_and_every_alternative_a_shape() -> None:
    plan = ask("running", lose={"gpu-3": None})
    assert all(item.reason for item in plan.refused)
    assert "globalSamples(20) is not a multiple" in " ".join(item.reason for item in plan.refused)
    assert {item.nodes for item in plan.alternatives} == {1, 2}
    assert (SMALL, 2) not in [(item.topology, item.nodes) for item in plan.alternatives]


@pytest.mark.parametrize(
    ("stage", "reshards", "num_bytes", "total", "basis"),
    [
        ("running", True, 15_000_000, None, "no recovery yet"),
        ("drained", False, None, 28.6, "1 loss of this job"),
        ("drained", True, None, None, "the size of the commit is not known"),
        ("drained", True, 15_180_672, 34.2, "conversion at 38.4 MB/s"),
        ("drained", True, 384_000_000_000, 10033.8, "conversion at 38.4 MB/s"),
    ],
)
def test_durations_come_from_measurements_or_are_unknown(
    stage: str, reshards: bool, num_bytes: int | None, total: float | None, basis: str
) -> None:
    found = estimate_recovery(read_status(RECORDED[stage]["job"]), stops=True, reshards=reshards, num_bytes=num_bytes)
    assert found.total_seconds == (None if total is None else pytest.approx(total, abs=20))
    assert basis in found.basis


def test_a_start_needs_no_time_to_stop_anything() -> None:
    plan = ask("suspended")
    assert plan.estimate is not None
    assert set(plan.estimate.parts_seconds) == {"launch", "schedule", "load"}
    assert plan.estimate.total_seconds == pytest.approx(27.3, abs=0.2)


@pytest.mark.parametrize(
    ("items", "expected"),
    [
        (["gpu-1"], {"gpu-1": None}),
        (["gpu-1:2", "gpu-2"], {"gpu-1": 2, "gpu-2": None}),
        (["gpu-1:2,gpu-2", "gpu-3"], {"gpu-1": 2, "gpu-2": None, "gpu-3": None}),
        ([], {}),
    ],
)
def test_what_is_lost_is_read_as_nodes_or_accelerators_of_nodes(
    items: list[str], expected: dict[str, int | None]
) -> None:
    assert parse_lose(items) == expected


@pytest.mark.parametrize("item", ["gpu-1:", "gpu-1:x", "gpu-1:0", "gpu-1:-1", ":2", "", "gpu-1,"])
def test_a_loss_that_cannot_be_read_names_what_was_expected(item: str) -> None:
    with pytest.raises(ValueError, match="expected NODE, or NODE:GPUS"):
        parse_lose([item])


def test_json_has_everything_that_the_text_has() -> None:
    value = json.loads(json.dumps(to_wire(ask("running", lose={"gpu-3": None}))))
    assert (value["outcome"], value["from"], value["to"]) == ("Reshards", BIG, SMALL)
    assert value["hit"] == ["gpu-3"]
    assert value["reshard"]["numBytes"] == 15195243
    assert value["alternatives"][0].keys() >= {"topology", "nodes", "gpusPerNode", "accumulationSteps"}
    assert value["refused"][0].keys() == {"subject", "reason"}


@pytest.mark.parametrize(
    ("start", "uri", "text"),
    [
        ("", "", "from nothing"),
        ("old", "", "from old (spec.checkpoint.startFrom)"),
        ("old", "/checkpoint/gpt/a1/step-00000005", "from the commit of step 5"),
    ],
)
def test_a_retry_says_where_it_goes_on(start: str, uri: str, text: str) -> None:
    status = Status(checkpoint=Checkpoint(uri=uri, step=5))
    assert describe_start({"spec": {"checkpoint": {"claimName": "ckpt", "startFrom": start}}}, status) == text


def test_a_new_job_is_told_what_it_starts_from() -> None:
    context, _ = situation("running")
    checkpoint = dataclasses.replace(context.spec.checkpoint, start_from="old/global_step1000")
    context = dataclasses.replace(context, spec=dataclasses.replace(context.spec, checkpoint=checkpoint))
    plan = make_forecast(context, Status(), Change())
    assert (plan.outcome, plan.resume_step) == ("Starts", None)
    assert plan.reshard is not None
    assert (plan.reshard.mode, plan.reshard.source) == ("Materialize", "/checkpoint/old/global_step1000")
    assert "from /checkpoint/old/global_step1000: the reshard Job finds its step" in format_plan(plan)
