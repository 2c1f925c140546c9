"""Which notifications follow from two statuses, with which texts and IDs: tables; and their bodies."""

from __future__ import annotations

import dataclasses
import json
import re
from typing import Any

import pytest

from elastic_operator.api.conditions import Type, set_condition
from elastic_operator.api.serialization import Time, parse_time, to_wire
from elastic_operator.api.status import Conversion, Current, Phase, Progress, Recovery, Status
from elastic_operator.api.status_reader import read_status
from elastic_operator.manifests.attempt import JobRef
from elastic_operator.reconcile.notifications.formats import CONTENT_TYPES, Format, format_body
from elastic_operator.reconcile.notifications.notification import (
    MAX_ID,
    MAX_LOST,
    NotificationKind,
    find_notifications,
    find_recorded,
)
from elastic_operator.reconcile.notifications.recovery_summary import describe_recovery, summarize_recovery
from reshard.topology import Topology

JOB = JobRef(name="gpt", namespace="team", uid="u1")
BIG, SMALL = "tp=2,pp=1,dp=4", "tp=2,pp=1,dp=3"
CURRENT = Current(topology=Topology(), num_nodes=2, gpus_per_node=4)


def recovery(**changes: Any) -> Recovery:
    fields: dict[str, Any] = {
        "cause": "NodeNotReady", "message": "node x is not Ready", "lost": ("x",), "from_": BIG, "to": SMALL,
        "from_attempt": 1, "to_attempt": 2, "signal_time": Time(1000), "detect_time": Time(1006),
    }  # fmt: skip
    return Recovery(**{**fields, **changes})


OPEN = recovery()
GIGABYTES = Conversion(mode="materialize", bytes_read=1_190_000_000, bytes_written=1_200_000_000)
DONE = recovery(first_step_time=Time(1024), conversion=GIGABYTES, start_mode="Reshard")
SENTENCE = f"lost node x (NodeNotReady), back in 24 s, 0 steps lost, 1.2 GB moved; from {BIG} to {SMALL}"
LOADED = "the training loaded the commit of the other topology itself"
SAME = {"from_": BIG, "to": BIG, "first_step_time": Time(1024)}


HANG = recovery(**SAME, cause="Hang", lost=())
GROWN = recovery(cause="CapacityReturned", lost=(), planned=True, from_=SMALL, to=BIG, first_step_time=Time(1300))
AGAIN = recovery(
    from_attempt=2, lost=("y",), cause="DeviceLost", signal_time=Time(1050), from_=SMALL, to=BIG,
    first_step_time=Time(1090),
)  # fmt: skip

SENTENCES: dict[str, tuple[tuple[Recovery, ...], str]] = {
    "a node": ((DONE,), SENTENCE),
    "the same topology": (
        (recovery(**SAME, lost_steps=1),),
        "lost node x (NodeNotReady), back in 24 s, 1 step lost, 0 B moved",
    ),
    "many nodes": (
        (recovery(**SAME, lost=tuple("abcdef")),),
        "lost nodes a, b, c, d and 2 more (NodeNotReady), back in 24 s, 0 steps lost, 0 B moved",
    ),
    "a pod on a node": (
        (recovery(**SAME, cause="PodFailed", lost=(), blamed="y", lost_steps=7),),
        "failure on node y (PodFailed), back in 24 s, 7 steps lost, 0 B moved",
    ),
    "a hang": ((HANG,), "failure (Hang), back in 24 s, 0 steps lost, 0 B moved"),
    "a planned change": (
        (recovery(**SAME, cause="SpecChanged", lost=(), planned=True),),
        "planned change (SpecChanged), back in 24 s, 0 steps lost, 0 B moved",
    ),
    "growth": (
        (GROWN,),
        f"changed to a better topology, back in 5 min, 0 steps lost, 0 B moved; from {SMALL} to {BIG}",
    ),
    "a commit that the training loads itself": (
        (recovery(first_step_time=Time(8800), start_mode="Load"),),
        f"lost node x (NodeNotReady), back in 2 h 10 min, 0 steps lost, {LOADED}; from {BIG} to {SMALL}",
    ),
    "a second loss before the first step": (
        (recovery(lost_steps=4, conversion=GIGABYTES), AGAIN),
        "lost nodes x, y (NodeNotReady, DeviceLost), back in 90 s, 4 steps lost, 1.2 GB moved",
    ),
    "not beyond a pause": (
        (OPEN, recovery(from_attempt=2, cause="Suspended"), dataclasses.replace(DONE, from_attempt=3)),
        SENTENCE,
    ),
}


@pytest.mark.parametrize(("recoveries", "text"), SENTENCES.values(), ids=SENTENCES)
def test_a_recovery_is_told_in_one_sentence(recoveries: tuple[Recovery, ...], text: str) -> None:
    summary = summarize_recovery(recoveries, len(recoveries) - 1)
    assert summary is not None and describe_recovery(summary) == text


WAITING = Status(
    phase=Phase.WAITING, reason="NoFeasibleTopology", message="no nodes", attempt=1, queue_time=Time(1010),
    recoveries=(OPEN,),
)  # fmt: skip
COMPLETE = Status(
    phase=Phase.COMPLETE, reason="TrainingComplete", attempt=2, ettr_text="97.3%", finish_time=Time(2000),
    progress=Progress(step=40), recoveries=(DONE,),
)  # fmt: skip
FAILED = Status(
    phase=Phase.FAILED, reason="RestartBudgetExceeded", message="2 of 2 used", attempt=2, finish_time=Time(2000),
    progress=Progress(step=7), recoveries=(DONE,),
)  # fmt: skip
INVALID = Status(conditions=set_condition(
    (), Type.SPEC_VALID, False, reason="InvalidSpec", message="nodes.max is 0", now=1000.0, generation=2
))  # fmt: skip
RUNNING = Status(phase=Phase.RUNNING, attempt=2, recoveries=(DONE,))

TABLE: dict[str, tuple[Status, Status, list[tuple[str, str, float]]]] = {
    "nothing": (RUNNING, RUNNING, []),
    "progress": (RUNNING, dataclasses.replace(RUNNING, progress=Progress(step=9)), []),
    "a recovery begins": (Status(attempt=1), Status(attempt=1, recoveries=(OPEN,)), []),
    "a recovery ends": (Status(attempt=2, recoveries=(OPEN,)), RUNNING, [("Recovered", SENTENCE, 1024)]),
    "and another begins": (RUNNING, dataclasses.replace(RUNNING, recoveries=(DONE, recovery(from_attempt=2))), []),
    "the oldest record goes": (dataclasses.replace(RUNNING, recoveries=(DONE, DONE)), RUNNING, []),
    "a suspension ends": (
        Status(attempt=2, pauses=(recovery(cause="Suspended"),)),
        Status(attempt=2, pauses=(recovery(cause="Suspended", first_step_time=Time(1030)),)),
        [],
    ),
    "it grows": (
        Status(attempt=2),
        Status(attempt=2, recoveries=(recovery(cause="CapacityReturned", planned=True, lost=(), **SAME),)),
        [("ScaledUp", "changed to a better topology, back in 24 s, 0 steps lost, 0 B moved", 1024)],
    ),
    "it waits": (
        Status(attempt=1, recoveries=(OPEN,)),
        WAITING,
        [("Waiting", "waits (NoFeasibleTopology): no nodes", 1010)],
    ),
    "it still waits, in other words": (WAITING, dataclasses.replace(WAITING, message="other words"), []),
    "it waits for another reason": (
        WAITING,
        dataclasses.replace(WAITING, reason="ReshardFailed"),
        [("Waiting", "waits (ReshardFailed): no nodes", 1010)],
    ),
    "a first quota is awaited": (Status(), dataclasses.replace(WAITING, attempt=0, reason="Queued"), []),
    "quota is taken away": (
        Status(attempt=1),
        dataclasses.replace(WAITING, reason="Queued"),
        [("Waiting", "waits (Queued): no nodes", 1010)],
    ),
    "a spec is invalid": (Status(), INVALID, [("Waiting", "waits (InvalidSpec): nodes.max is 0", 1000)]),
    "an edit is refused, and the training goes on": (
        dataclasses.replace(RUNNING, current=CURRENT),
        dataclasses.replace(RUNNING, current=CURRENT, conditions=INVALID.conditions),
        [],
    ),
    "complete": (
        RUNNING,
        COMPLETE,
        [("Complete", "training is complete after step 40, in 2 attempts, effective training time 97.3%", 2000)],
    ),
    "failed": (RUNNING, FAILED, [("Failed", "failed after step 7 (RestartBudgetExceeded): 2 of 2 used", 2000)]),
    "failed while it waited": (
        WAITING,
        dataclasses.replace(FAILED, recoveries=(OPEN,)),
        [("Failed", "failed after step 7 (RestartBudgetExceeded): 2 of 2 used", 2000)],
    ),
    "a recovery ends and the training too, in one pass": (
        Status(attempt=2, recoveries=(OPEN,)),
        COMPLETE,
        [
            ("Recovered", SENTENCE, 1024),
            ("Complete", "training is complete after step 40, in 2 attempts, effective training time 97.3%", 2000),
        ],
    ),
}


@pytest.mark.parametrize(("before", "after", "told"), TABLE.values(), ids=TABLE)
def test_what_has_become_true_is_told_once(before: Status, after: Status, told: list[tuple[str, str, float]]) -> None:
    assert [(item.kind, item.text, item.time) for item in find_notifications(JOB, before, after)] == told
    assert find_notifications(JOB, after, after) == ()


@pytest.mark.parametrize("after", [RUNNING, WAITING, COMPLETE, FAILED, INVALID])
def test_whoever_reads_the_stored_status_finds_the_same_facts_with_the_same_ids(after: Status) -> None:
    told = find_notifications(JOB, Status(), after)
    stored = read_status(json.loads(json.dumps(to_wire(after)))).status
    assert find_recorded(JOB, stored, since=0.0) == told
    assert find_recorded(JOB, stored, since=5000.0) == ()
    assert len({item.id for item in told}) == len(told)


def test_ids_differ_between_jobs_of_one_name_and_between_two_failures_of_one_job() -> None:
    (first,) = find_notifications(JOB, RUNNING, FAILED)
    (other,) = find_notifications(dataclasses.replace(JOB, uid="u2"), RUNNING, FAILED)
    (again,) = find_notifications(JOB, RUNNING, dataclasses.replace(FAILED, finish_time=Time(2060)))
    assert len({first.id, other.id, again.id}) == 3


def test_texts_of_pods_and_lists_of_nodes_are_bounded() -> None:
    nodes = tuple(f"n{number}" for number in range(5000))
    long = dataclasses.replace(DONE, lost=nodes, message="x\n\x1b" * 5000)
    failed = dataclasses.replace(FAILED, message="y\n" * 2000, recoveries=(long,))
    first, second = find_notifications(JOB, Status(), failed)
    assert (len(first.data["lostNodes"]), first.data["numLostNodes"]) == (MAX_LOST, 5000)
    for item in (first, second):
        assert max(len(format_body(item, format_, source="s")) for format_ in Format) < 4096
        assert item.text.isprintable()


def test_an_id_fits_into_a_header_whatever_the_status_says() -> None:
    (item,) = find_notifications(JOB, Status(), dataclasses.replace(WAITING, reason="a\r\nX-Evil: ü" + "b" * 900))
    assert re.fullmatch(r"u1-waiting-a__X-Evil:__b+", item.id)
    assert len(item.id) == MAX_ID
    assert item.text.isprintable()
    assert len(item.text) < 3000


def test_a_cloudevent_has_what_the_specification_demands() -> None:
    (item,) = find_notifications(JOB, Status(), RUNNING)
    event = json.loads(format_body(item, Format.CLOUDEVENTS, source="cluster-a", num_left_out=2))
    data = event.pop("data")
    assert event == {
        "specversion": "1.0", "id": "u1-recovered-1", "source": "cluster-a",
        "type": "dev.elastictraining.job.recovered", "subject": "team/gpt", "time": "1970-01-01T00:17:04.000Z",
        "datacontenttype": "application/json",
    }  # fmt: skip
    assert parse_time(event["time"]) == 1024
    assert data == {
        "job": {"namespace": "team", "name": "gpt", "uid": "u1"}, "text": SENTENCE, "attempt": 2,
        "cause": "NodeNotReady", "causes": ["NodeNotReady"], "message": "node x is not Ready", "planned": False,
        "lostNodes": ["x"], "numLostNodes": 1, "seconds": 24.0, "lostSteps": 0, "bytesRead": 1_190_000_000,
        "bytesWritten": 1_200_000_000, "topologyBefore": BIG, "topologyAfter": SMALL, "numLeftOut": 2,
    }  # fmt: skip
    assert CONTENT_TYPES[Format.CLOUDEVENTS].startswith("application/cloudevents+json")


def test_a_slack_message_cannot_mention_anybody() -> None:
    hostile = dataclasses.replace(FAILED, message="<!channel> & <https://evil|click>", recoveries=())
    (item,) = find_notifications(JOB, Status(), hostile)
    body = json.loads(format_body(item, Format.SLACK, source="cluster-a", num_left_out=3))
    assert list(body) == ["text"]
    assert body["text"] == (
        "*team/gpt* Failed: failed after step 7 (RestartBudgetExceeded): &lt;!channel&gt; &amp; "
        "&lt;https://evil|click&gt; (3 earlier notifications of this job were left out) [cluster-a]"
    )


def test_a_message_mentions_nobody_in_mattermost_either() -> None:
    hostile = dataclasses.replace(FAILED, message="@all @channel [log in](https://evil)", recoveries=())
    (item,) = find_notifications(JOB, Status(), hostile)
    text = json.loads(format_body(item, Format.SLACK, source="me@cluster"))["text"]
    assert not re.search(r"@\w|\]\(", text)
    assert "all" in text and "log in" in text


def test_kinds_are_words_that_an_option_can_list() -> None:
    assert all(re.fullmatch("[A-Z][A-Za-z]+", kind) for kind in NotificationKind)
