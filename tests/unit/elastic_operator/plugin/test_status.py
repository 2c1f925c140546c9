"""`kubectl etj status` and `list`, from the recording of a real job: lost a node, grew back, drained, suspended."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest

from elastic_operator.api.serialization import format_time, to_wire
from elastic_operator.observed.capacity import Capacity, Supply
from elastic_operator.plugin.pages.job_report import JobReport, make_report
from elastic_operator.plugin.pages.listing import format_listing, make_entry
from elastic_operator.plugin.pages.status_page import format_status

RECORDED: dict[str, Any] = json.loads((Path(__file__).parent / "data/recorded_recovery.json").read_text())
STAGES = list(RECORDED)


def recorded(stage: str, **status: Any) -> tuple[JobReport, float]:
    entry_ = copy.deepcopy(RECORDED[stage])
    entry_["job"]["status"] |= status
    return make_report(entry_["job"], entry_["time"], entry_["events"]), entry_["time"]


def page(stage: str, **status: Any) -> str:
    return format_status(*recorded(stage, **status))


def lines(stage: str, after: str, count: int) -> list[str]:
    found = page(stage).splitlines()
    start = next(i for i, line in enumerate(found) if after in line)
    return [" ".join(line.split()) for line in found[start : start + count]]


@pytest.mark.parametrize("stage", STAGES)
def test_no_page_has_a_field_without_a_value_or_a_line_that_does_not_fit(stage: str) -> None:
    text = page(stage)
    assert "None" not in text
    head = text.split("Events")[0]
    assert max(len(line) for line in head.splitlines()) <= 120
    assert all(line == line.rstrip() for line in text.splitlines())


def test_a_loss_is_told_with_cause_topologies_steps_bytes_and_seconds() -> None:
    assert lines("drained", "1. 2026", 12) == [
        "1. 2026-11-21 13:28:21Z NodeNotReady (unplanned), lost gpu-3: training again after 33.4 s",
        "why node gpu-3 is Ready=Unknown",
        "topology tp=1,pp=3,dp=2,zero=1 on 6 GPUs (attempt 1) -> tp=1,pp=2,dp=2,zero=1 on 4 GPUs (attempt 2)",
        "steps stopped after step 15, went on from the commit of step 15: nothing lost",
        "moved 15.1 MB read, 15.2 MB written in 0.4 s (materialize, verified)",
        "timeline 1.3 s +1.3 loss confirmed",
        "1.3 s +0.0 old pods gone",
        "1.3 s +0.0 next attempt planned",
        "6.0 s +4.8 checkpoint resharded",
        "6.0 s +0.0 attempt launched",
        "8.2 s +2.1 all pods run",
        "33.4 s +25.2 first step done",
    ]


def test_recoveries_come_newest_last() -> None:
    causes = [item.cause for item in recorded("suspended")[0].recoveries]
    assert causes == ["NodeNotReady", "CapacityReturned", "ManualDrain"], "the suspension is none"


def test_the_parts_of_a_recovery_add_up_to_the_time_without_training() -> None:
    for item in recorded("suspended")[0].recoveries[:3]:
        assert item.start_time is not None
        assert item.end_time is not None
        assert item.total_seconds == pytest.approx(item.end_time - item.start_time, abs=0.01)


def test_a_drain_that_needs_no_conversion_says_that_nothing_was_moved() -> None:
    assert "moved nothing: the checkpoint is used as it is" in lines("drained", "ManualDrain (planned)", 6)


def test_an_open_recovery_counts_on() -> None:
    (head, *_) = lines("resharding", "1. 2026", 1)
    assert head.endswith("no training for 1.5 s so far")
    assert "... not over yet" in lines("resharding", "1. 2026", 9)


NOW = {
    "starting": ("0 of 3 pods run, no step yet", "all pods to run and step 1 to be done"),
    "running": ("training: step 15, loss 4.476; newest commit: step 15, 15.2 MB", ""),
    "resharding": ("converting the checkpoint: step 15 of attempt 1", "Job gpt-a2-reshard"),
    "growing": ("training: step 37", "the job grows to tp=1,pp=3,dp=2,zero=1 on 3 nodes in 19s if they stay"),
    "draining": ("attempt 2 is asked to commit and exit, because tp=1,pp=3", "goes on from step 75 in 4m59s"),
    "drained": ("training: step 110", ""),
    "suspended": ("nothing runs", "`kubectl etj resume gpt`"),
}


NO_NODES = Supply(resource="amd.com/gpu", num_nodes=0)


@pytest.mark.parametrize("stage", STAGES)
def test_what_happens_now_and_what_it_waits_for(stage: str) -> None:
    now = recorded(stage)[0].now
    doing, waits_for = NOW[stage]
    assert doing in now.doing
    assert waits_for in now.waits_for
    assert bool(waits_for) == bool(now.waits_for)


def test_a_failed_job_says_where_to_look() -> None:
    job, now = recorded("drained", phase="Failed", message="11 unplanned restarts within 3600 s")
    assert job.now.doing == "11 unplanned restarts within 3600 s"
    assert "kubectl etj logs gpt" in job.now.advice
    assert "hint: `kubectl etj logs gpt`" in format_status(job, now)


def test_a_waiting_job_tells_every_factor_and_how_to_ask_for_more() -> None:
    job, _ = recorded("suspended", phase="Waiting", message="Nothing can run on 0 free accelerators on 0 nodes")
    assert job.now.doing.startswith("Nothing can run on 0 free accelerators")
    assert "goes on by itself" in job.now.waits_for
    assert "kubectl etj plan gpt --add 1" in job.now.advice


def test_a_job_whose_accelerators_no_node_offers_is_not_sent_to_add_nodes() -> None:
    message = f"Nothing can run on 0 free accelerators on 0 nodes ({Capacity(supply=NO_NODES).describe_supply()})"
    job, _ = recorded("suspended", phase="Waiting", message=message)
    assert "does the device plugin run" in job.now.advice
    assert "--add" not in job.now.advice


def test_a_job_that_pauses_after_failures_says_where_to_look() -> None:
    job, _ = recorded("suspended", phase="Pending", reason="Backoff", message="attempt 4 starts in 20 s")
    assert job.now.advice == "`kubectl etj logs gpt` shows why; a corrected spec.template ends the wait"


def test_a_job_of_another_controller_says_whose_it_is() -> None:
    job = copy.deepcopy(RECORDED[STAGES[0]]["job"])
    job["spec"]["managedBy"] = "kueue.x-k8s.io/multikueue"
    assert "kueue.x-k8s.io/multikueue manages this job" in make_report(job, 0.0).now.doing


@pytest.mark.parametrize(("seconds", "advice"), [(3, ""), (60, "is elastic-operator running")])
def test_a_job_that_no_operator_has_seen_says_so(seconds: float, advice: str) -> None:
    resource = copy.deepcopy(RECORDED["starting"]["job"])
    del resource["status"]
    created = recorded("starting")[0].create_time
    assert created is not None
    job = make_report(resource, created + seconds)
    assert (job.phase, job.now.waits_for) == ("Unknown", "the operator")
    assert job.now.advice.startswith(advice)
    assert bool(job.now.advice) == bool(advice)


def test_an_edit_that_the_operator_has_not_seen_is_pointed_out() -> None:
    resource = copy.deepcopy(RECORDED["running"]["job"])
    resource["metadata"]["generation"] += 1
    assert "has not looked at it yet" in make_report(resource, RECORDED["running"]["time"]).now.advice


def test_a_spec_that_makes_no_sense_is_told_by_its_problems() -> None:
    resource = copy.deepcopy(RECORDED["running"]["job"])
    resource["spec"]["nodes"] = {"min": 3, "max": 1}
    job = make_report(resource, RECORDED["running"]["time"])
    assert job.now.doing.startswith("the spec cannot be used: ")
    assert "nodes" in job.now.doing


def test_events_are_in_order_and_the_older_ones_are_counted() -> None:
    job, now = recorded("drained")
    times = [item.time or 0.0 for item in job.events]
    assert times == sorted(times)
    text = format_status(job, now, max_events=2)
    assert f"{len(job.events) - 2} older ones left out" in text
    assert text.splitlines()[-1].split()[1] == job.events[-1].reason
    assert "Events" not in format_status(job, now, max_events=0)


def test_json_names_what_the_page_shows() -> None:
    value = json.loads(json.dumps(to_wire(recorded("drained")[0])))
    first = value["recoveries"][0]
    assert (value["phase"], value["attempt"], value["topology"]) == ("Running", 4, "tp=1,pp=3,dp=2,zero=1")
    assert (first["from"], first["to"]) == ("tp=1,pp=3,dp=2,zero=1", "tp=1,pp=2,dp=2,zero=1")
    assert [part["name"] for part in first["parts"]] == [
        "detect", "stop", "plan", "reshard", "launch", "schedule", "load"
    ]  # fmt: skip
    assert first["conversion"]["bytesWritten"] == 15180672
    assert first["startTime"].startswith("2026-11-21T13:28:21.")
    assert value["now"]["doing"].startswith("training")


def test_the_list_has_one_line_a_job_and_a_namespace_where_all_are_asked_for() -> None:
    job, now = recorded("drained")
    header, line = format_listing([make_entry(job)], now, everywhere=True).splitlines()
    assert header.split()[:3] == ["NAMESPACE", "NAME", "PHASE"]
    assert line.split() == [
        "demo", "gpt", "Running", "4", "tp=1,pp=3,dp=2,zero=1", "3", "6", "110", "110", "3", "38%", "4m4s"
    ]  # fmt: skip
    assert format_listing([make_entry(job)], now, everywhere=False).split()[0] == "NAME"


def test_the_list_shows_what_is_unknown_as_a_dash() -> None:
    resource = copy.deepcopy(RECORDED["starting"]["job"])
    del resource["status"]
    line = format_listing(
        [make_entry(make_report(resource, RECORDED["starting"]["time"]))],
        RECORDED["starting"]["time"],
        everywhere=False,
    )
    assert line.splitlines()[1].split() == ["gpt", "Unknown", "-", "-", "-", "-", "-", "-", "0", "-", "1s"]


@pytest.mark.parametrize(
    ("reason", "hint"),
    [("PodsRefused", "change the rule that refuses them"), ("ContainerCannotStart", "edit spec.template"), ("", "")],
)
def test_an_attempt_that_does_not_start_comes_with_what_to_do(reason: str, hint: str) -> None:
    resource = copy.deepcopy(RECORDED["starting"]["job"])
    resource["status"] |= {"phase": "Starting", "reason": reason, "message": "0 of 3 pods run; quota"}
    now = make_report(resource, RECORDED["starting"]["time"]).now
    assert now.doing == "0 of 3 pods run; quota"
    assert now.advice.startswith(hint)
    assert bool(now.advice) == bool(hint)


@pytest.mark.parametrize(
    ("reason", "hint"),
    [
        ("Unschedulable", "lower spec.reshard.resources"),
        ("ContainerCannotStart", "edit spec.reshard.template"),
        ("", ""),
    ],
)
def test_a_conversion_that_does_not_start_comes_with_the_words_of_who_stops_it_and_what_to_do(
    reason: str, hint: str
) -> None:
    words = "pod gpt-a2-reshard-x finds no node: no room"
    job = {"jobName": "gpt-a2-reshard", "attempt": 2}
    waiting = recorded("drained", phase="Resharding", reason=reason, message=words, reshard=job)[0].now
    assert hint in waiting.advice
    assert (waiting.doing == words) is bool(reason)
    assert "gpt-a2-reshard" in waiting.waits_for


def test_what_the_operator_heard_against_the_spec_is_told_with_what_it_means_for_what_runs() -> None:
    resource = copy.deepcopy(RECORDED["running"]["job"])
    (valid,) = [item for item in resource["status"]["conditions"] if item["type"] == "SpecValid"]
    valid |= {"status": "False", "message": "no such field", "observedGeneration": resource["metadata"]["generation"]}
    now = make_report(resource, RECORDED["running"]["time"]).now
    left = "what runs goes on, but is not recovered until the spec is edited"
    assert now.doing == f"the spec cannot be used: no such field; {left}"
    assert now.waits_for == "an edit of the spec"


def test_a_failed_job_comes_with_how_to_try_again() -> None:
    resource = copy.deepcopy(RECORDED["running"]["job"])
    resource["status"] |= {"phase": "Failed", "reason": "RestartBudgetExceeded", "message": "too many"}
    assert "`kubectl etj retry gpt`" in make_report(resource, RECORDED["running"]["time"]).now.advice


def test_failures_are_counted_by_class_with_the_pause_before_the_next_attempt() -> None:
    resource, now = copy.deepcopy(RECORDED["running"]["job"]), RECORDED["running"]["time"]
    resource["status"] |= {
        "phase": "Pending",
        "reason": "Backoff",
        "message": "the next attempt is planned later",
        "failureCounts": [
            {"failureClass": "Crash", "total": 4, "inARow": 3, "retryTime": format_time(now + 20)},
            {"failureClass": "Image", "total": 1, "inARow": 1, "limit": 10, "used": 1, "windowSeconds": 3600},
            {"failureClass": "Node", "total": 2},
        ],
    }
    report = make_report(resource, now)
    (line,) = [line for line in format_status(report, now).splitlines() if line.startswith("Failures:")]
    assert line.split(maxsplit=1)[1] == (
        "Crash 4 (3 in a row; the next attempt is planned in 20s), Image 1 (1 of 10 used in 60m), Node 2"
    )
    assert report.now.waits_for == "the end of the pause after failures"
