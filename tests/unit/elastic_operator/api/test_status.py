"""Status and conditions: wire form, history of commits, transitions."""

from __future__ import annotations

from pathlib import Path

import jsonschema
import yaml
from hypothesis import given
from hypothesis import strategies as st

from elastic_operator.api.conditions import Type, find, set_condition
from elastic_operator.api.serialization import Time, format_time, parse_time, to_wire
from elastic_operator.api.status import (
    MAX_COMMITS,
    MAX_RECOVERIES,
    Checkpoint,
    Commit,
    Condition,
    Current,
    Drain,
    ExcludedNode,
    Growth,
    Plan,
    Progress,
    Recovery,
    Rejected,
    ReshardStatus,
    RestartBudget,
    Resume,
    Status,
    add_change,
    edit_last_change,
)
from elastic_operator.api.status_reader import read_status
from elastic_operator.observed import commit_history
from reshard.topology import Topology

NOW = Time(1_800_000_000.5)
TOPOLOGY = Topology(tp=2, dp=2)
CRD = Path(__file__).parents[4] / "crds/elastictrainingjobs.yaml"

FULL = Status(
    phase="Running",
    attempt=3,
    observed_generation=2,
    topology=TOPOLOGY,
    conditions=(Condition(type="Running", status="True", reason="R", message="m", last_transition_time=NOW),),
    current=Current(topology=TOPOLOGY, num_nodes=2, gpus_per_node=2, resume=Resume(uri="/c", step=4), avoid=("n",)),
    drain=Drain(cause="Suspended", message="m", start_time=NOW),
    growth=Growth(topology="tp=2", num_nodes=3, since=NOW),
    pinned=TOPOLOGY,
    plan=Plan(target=TOPOLOGY, nodes=2, per_node=2, reason="r", rejected=(Rejected(topology="t", reason="r"),)),
    progress=Progress(phase="Training", step=5, samples=100, loss=1.5, time=NOW),
    checkpoint=Checkpoint(
        uri="/c", step=4, history=(Commit(uri="/c", step=4, samples=80, attempt=2, topology=TOPOLOGY),)
    ),
    reshard=ReshardStatus(job_name="j", attempt=3, seconds=0.5, retry_time=NOW),
    recoveries=(
        Recovery(cause="NodeNotReady", lost=("n",), from_="a", to="b", seconds={"total": 3.5}, detect_time=NOW),
    ),
    excluded_nodes=(ExcludedNode(name="n", reason="r", since=NOW),),
    restart_budget=RestartBudget(limit=10, used=1, window_seconds=60, times=(NOW,)),
    goodput={"ettr": 0.5},
    start_time=NOW,
)


def test_the_wire_form_is_what_the_schema_admits_and_comes_back_equal() -> None:
    wire = to_wire(FULL)
    schema = yaml.safe_load(CRD.read_text())["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]["status"]
    jsonschema.validate(wire, schema)
    assert read_status(wire).status == FULL
    assert wire["recoveries"][0]["from"] == "a"


def test_an_empty_status_is_the_default() -> None:
    assert read_status({}).status == Status()


def test_fields_of_a_newer_operator_are_ignored() -> None:
    assert read_status({"attempt": 2, "fromTheFuture": {"a": 1}}).status.attempt == 2


@given(st.integers(0, 4_000_000_000_000))
def test_times_survive_the_wire_to_the_millisecond(milliseconds: int) -> None:
    moment = parse_time(format_time(milliseconds / 1000))
    assert moment is not None
    assert abs(moment - milliseconds / 1000) < 0.0011


def test_a_condition_keeps_its_time_until_it_flips() -> None:
    first = set_condition((), Type.RUNNING, True, reason="A", message="a", now=1.0, generation=1)
    same = set_condition(first, Type.RUNNING, True, reason="B", message="b", now=2.0, generation=2)
    flipped = set_condition(same, Type.RUNNING, False, reason="C", message="c", now=3.0, generation=2)
    times = [find(item, Type.RUNNING).last_transition_time for item in (first, same, flipped)]  # type: ignore[union-attr]
    assert times == [1.0, 1.0, 3.0]
    assert find(same, Type.RUNNING).reason == "B"  # type: ignore[union-attr]


def commit(step: int, attempt: int = 1, invalid: bool = False) -> Commit:
    uri = f"/a{attempt}/step-{step:08d}"
    return Commit(uri=uri, step=step, samples=step, attempt=attempt, topology=TOPOLOGY, invalid=invalid)


@given(st.lists(st.tuples(st.integers(0, 30), st.integers(1, 5), st.booleans()), max_size=12), st.integers(1, 6))
def test_the_commit_to_resume_from_is_the_newest_valid_one_of_an_older_attempt(
    seen: list[tuple[int, int, bool]], attempt: int
) -> None:
    checkpoint = Checkpoint()
    for step, writer, damaged in seen:
        checkpoint = commit_history.add(checkpoint, commit(step, writer))
        if damaged:
            checkpoint = commit_history.invalidate(checkpoint, commit(step, writer).uri, "damaged")
    assert len(checkpoint.history) <= MAX_COMMITS
    found = commit_history.find_newest(checkpoint, below=attempt)
    usable = [item for item in checkpoint.history if not item.invalid and item.attempt < attempt]
    assert found == max(usable, key=lambda item: (item.step, item.attempt), default=None)
    resume = commit_history.choose_resume(checkpoint, attempt=attempt, topology=TOPOLOGY, root="/root")
    assert resume.uri == (found.uri if found else "")
    assert resume.reason


def test_another_topology_needs_a_reshard_into_the_attempts_own_folder() -> None:
    checkpoint = commit_history.add(Checkpoint(), commit(20))
    resume = commit_history.choose_resume(checkpoint, attempt=2, topology=Topology(dp=4), root="/root")
    assert (resume.uri, resume.source, resume.ready) == ("/root/a2/step-00000020", "/a1/step-00000020", False)


def test_pauses_are_kept_apart_from_recoveries_and_in_their_order() -> None:
    failed = Recovery(cause="PodFailed", from_attempt=1, detect_time=NOW)
    paused = Recovery(cause="Suspended", from_attempt=1, detect_time=Time(NOW + 0.2))
    grown = Recovery(cause="CapacityReturned", from_attempt=2, detect_time=Time(NOW + 0.4))
    status = add_change(add_change(Status(), failed, is_pause=False), paused, is_pause=True)
    assert edit_last_change(status, to_attempt=2).pauses[0].to_attempt == 2
    status = add_change(status, grown, is_pause=False)
    assert (status.recoveries, status.pauses) == ((failed, grown), (paused,))
    # The API server keeps whole seconds of some times: the order must not depend on them.
    assert [item.cause for item in read_status(to_wire(status)).status.changes] == [
        "PodFailed", "Suspended", "CapacityReturned",
    ]  # fmt: skip
    assert [item.cause for item in edit_last_change(status, cause="x").changes] == ["PodFailed", "Suspended", "x"]


def test_the_oldest_changes_are_dropped_whatever_they_are() -> None:
    status = Status()
    for attempt in range(1, MAX_RECOVERIES + 4):
        change = Recovery(cause="c", from_attempt=attempt, detect_time=NOW)
        status = add_change(status, change, is_pause=attempt % 3 == 0)
    assert [item.from_attempt for item in status.changes] == list(range(4, MAX_RECOVERIES + 4))
    assert [item.from_attempt for item in status.pauses] == [6, 9, 12]
