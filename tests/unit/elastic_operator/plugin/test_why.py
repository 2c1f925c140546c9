"""`kubectl etj why`: the last decision and its reasons, from the recording of a real job and from hand-made states."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest

from elastic_operator.api.serialization import format_time, to_wire
from elastic_operator.plugin.pages.why import Explanation, explain, format_explanation

RECORDED: dict[str, Any] = json.loads((Path(__file__).parent / "data/recorded_recovery.json").read_text())


def explained(stage: str, **status: Any) -> Explanation:
    resource = copy.deepcopy(RECORDED[stage]["job"])
    resource["status"] |= status
    return explain(resource, RECORDED[stage]["time"])


def page(stage: str, **status: Any) -> str:
    return format_explanation(explained(stage, **status), RECORDED[stage]["time"])


DECISIONS = {
    "starting": "attempt 1 starts as tp=1,pp=3,dp=2,zero=1 on 3 nodes",
    "running": "attempt 1 runs as tp=1,pp=3,dp=2,zero=1 on 3 nodes",
    "resharding": "attempt 2 is planned as tp=1,pp=2,dp=2,zero=1 on 2 nodes",
    "growing": "attempt 2 runs as tp=1,pp=2,dp=2,zero=1 on 2 nodes",
    "draining": "attempt 2 has to commit and exit",
    "drained": "attempt 4 runs as tp=1,pp=3,dp=2,zero=1 on 3 nodes",
    "suspended": "nothing may run",
}


@pytest.mark.parametrize("stage", RECORDED)
def test_the_last_decision_is_named_with_its_time(stage: str) -> None:
    found = explained(stage)
    assert found.decision == DECISIONS[stage]
    assert found.time is not None
    assert found.time <= RECORDED[stage]["time"]
    assert "None" not in page(stage)


def field(resource: dict[str, Any], path: str) -> Any:
    value: Any = resource
    for part in path.replace("[", ".").replace("]", "").split("."):
        value = value[int(part)] if part.isdigit() else value[part]
    return value


@pytest.mark.parametrize("stage", RECORDED)
def test_every_reason_names_the_field_that_holds_it(stage: str) -> None:
    for reason in explained(stage).reasons:
        value = field(RECORDED[stage]["job"], reason.source)
        assert not isinstance(value, str) or value in reason.text


def test_a_loss_is_the_reason_of_the_attempt_after_it() -> None:
    reasons = {item.subject: item.text for item in explained("resharding").reasons}
    assert reasons["Change"] == "NodeNotReady (unplanned): node gpu-3 is Ready=Unknown"
    assert reasons["Lost"] == "gpu-3"
    assert "best of 6 that can run on 4 free accelerators" in reasons["Topology"]
    assert reasons["Checkpoint"].endswith("resharded to tp=1,pp=2,dp=2,zero=1")


def test_topologies_that_could_not_run_come_with_every_factor() -> None:
    assert "  tp=2,pp=2,dp=1,zero=1 on 3 nodes * 2 accelerators: tp(2) * pp(2) * dp(1) = 4 is not the 6" in page(
        "drained"
    )


def test_a_pause_a_pin_a_limit_and_a_damaged_commit_are_reasons() -> None:
    now = RECORDED["drained"]["time"]
    history = copy.deepcopy(RECORDED["drained"]["job"]["status"]["checkpoint"]["history"])
    history[0] |= {"invalid": True, "invalidReason": "a file is truncated"}
    text = page(
        "drained",
        failureCounts=[{"failureClass": "Crash", "total": 3, "inARow": 2, "retryTime": format_time(now + 20)}],
        pinned={"tp": 1, "pp": 2, "dp": 2, "ep": 1, "cp": 1, "zero": 1},
        pin={"tries": 1, "retryTime": format_time(now + 60)},
        placementLimit={"numNodes": 2, "missing": 1, "until": format_time(now + 90), "message": "0/3 nodes"},
        checkpoint={**RECORDED["drained"]["job"]["status"]["checkpoint"], "history": history},
    )
    for expected in (
        "Crash 2 in a row: planned again in 20s",
        "only tp=1,pp=2,dp=2,zero=1, because conversions to other topologies have failed; next try in 60s",
        "plans count on 2 nodes for 90s, as many as the scheduler placed: 0/3 nodes",
        "the commit of step 110 in attempt 4: a file is truncated",
    ):
        assert expected in " ".join(text.split())


def test_a_job_that_ended_says_why_before_anything_else() -> None:
    found = explained("drained", phase="Failed", message="11 unplanned restarts", finishTime="2026-11-21T13:31:10.000Z")
    assert found.decision == "the job is Failed"
    assert (found.reasons[0].subject, found.reasons[0].text) == ("Because", "11 unplanned restarts")


def test_a_job_that_no_operator_has_seen_has_no_decision() -> None:
    resource = copy.deepcopy(RECORDED["starting"]["job"])
    del resource["status"]
    text = format_explanation(explain(resource, RECORDED["starting"]["time"]), RECORDED["starting"]["time"])
    assert text.startswith("gpt: nothing has been decided yet.")
    assert "the operator" in text


def test_json_has_the_reasons_with_their_fields() -> None:
    value = json.loads(json.dumps(to_wire(explained("resharding"))))
    assert value["reasons"][0]["source"] == "status.recoveries[0].message"
    assert value["rejected"][0].keys() == {"topology", "reason"}
