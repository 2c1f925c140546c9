"""Whatever a pod writes, and whatever has damaged a stored status: nothing raises, and the next status is valid."""

from __future__ import annotations

import copy
import dataclasses
import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from elastic_operator.api.conditions import Type, find
from elastic_operator.api.serialization import to_wire
from elastic_operator.api.spec import parse_spec
from elastic_operator.api.status import MAX_LOSSES, LossPoint, Status
from elastic_operator.api.status_reader import read_status
from elastic_operator.manifests.attempt import JobRef
from elastic_operator.metrics.counters import increments, reshard_samples
from elastic_operator.metrics.gauges import job_gauges
from elastic_operator.observed.observation import Observation, job_view, lease_view, pod_view
from elastic_operator.observed.timeouts import Timeouts
from elastic_operator.reconcile.decide import UNSETTLED, decide
from elastic_operator.reconcile.record import read_record
from reshard.contract import CommitRef, LeaseKey, ReshardReport, TrainerPhase, VirtualLoader
from tests.randomness import examples
from tests.unit.elastic_operator.reconcile.test_decide_phases import (
    BIG,
    COMMIT,
    NOW,
    SPEC,
    WORLD,
    after_loss,
    lost_node,
    settled,
)

ROOT = Path(__file__).parents[2]
CRD = yaml.safe_load((ROOT / "crds/elastictrainingjobs.yaml").read_text(encoding="utf-8"))
MAX_BYTES = 65_536
JOB = JobRef(name="gpt", namespace="ns", uid="uid", generation=1)


def nullable(schema: Any) -> Any:
    if isinstance(schema, list):
        return [nullable(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    found = {key: nullable(item) for key, item in schema.items() if not key.startswith("x-")}
    if found.pop("nullable", False) is True:
        found["type"] = [found["type"], "null"]
    return found


SCHEMA = nullable(CRD["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]["status"])
CHECKER = jsonschema.Draft202012Validator(SCHEMA, format_checker=jsonschema.FormatChecker())
INT64 = 2**63


def check(status: Status) -> dict[str, Any]:
    """The status as the API server would get it."""
    wire = to_wire(status)
    text = json.dumps(wire, allow_nan=False)
    CHECKER.validate(json.loads(text))
    assert len(text.encode()) < MAX_BYTES, f"{len(text)} bytes"
    for number in numbers(wire):
        assert not isinstance(number, int) or -INT64 <= number < INT64
    assert read_status(json.loads(text)).problems == (), "the next pass can read it"
    return wire


def numbers(value: Any) -> Any:
    if isinstance(value, dict):
        for item in value.values():
            yield from numbers(item)
    elif isinstance(value, list):
        for item in value:
            yield from numbers(item)
    elif isinstance(value, int | float):
        yield value


NASTY = [
    "", "{}", "[]", "null", "5", '"5"', "\u00b2", "1e400", "-1", "NaN", "nan", "inf", "9" * 5000, "0" * 5000,
    "1_0", " 5", "5\n",
    "\x1b[31m", "\ud7ff\U0001f600" * 700, "x" * 200_000, "[" * 5000, '{"ok": "false"}', "true", "0001-01-01T00:00:00Z",
    "9999-12-31T23:59:59-23:59", "2026-11-01T10:00:00Z", "Complete", "Training", "Drained", "/etc/passwd",
]  # fmt: skip
VALUES: st.SearchStrategy[Any] = st.one_of(
    st.none(), st.booleans(), st.integers(), st.integers(min_value=10**17, max_value=10**30), st.floats(),
    st.sampled_from(NASTY), st.text(max_size=40), st.just({}), st.just([]), st.just({"tp": "2"}),
    st.just({"tp": 10**30}), st.just([10**30]), st.dictionaries(st.text(max_size=4), st.integers(), max_size=3),
)  # fmt: skip
GOOD = CommitRef(uri="/checkpoint/gpt/a1/step-00000012", step=12, samples=240, attempt=1, topology=BIG.to_dict())
LOADER = VirtualLoader(manifests=(1, 2), memory_bytes=5)
REPORT = ReshardReport(
    ok=True, exit_code=0, message="done", source=COMMIT.uri, target="/checkpoint/gpt/a2/step-00000010", verified=True
)


def objects(good: Any) -> st.SearchStrategy[str]:
    """JSON of an object with some of its fields changed to anything, or without one of them."""

    def made(changed: dict[str, Any], gone: set[str]) -> str:
        return json.dumps({key: value for key, value in {**fields, **changed}.items() if key not in gone})

    fields = {field.name: getattr(good, field.name) for field in dataclasses.fields(good)}
    changes = st.dictionaries(st.sampled_from(sorted(fields)), VALUES, max_size=4)
    absent = st.sets(st.sampled_from(sorted(fields)), max_size=1)
    return st.builds(made, changes, absent)


ANY_TEXT = st.one_of(st.sampled_from(NASTY), st.text(max_size=100), VALUES.map(json.dumps))
COMMITS = st.one_of(
    objects(GOOD),
    st.sampled_from(
        [
            "/etc/passwd",
            "/checkpoint/gpt/a1/../a2/step-1",
            "/checkpoint/gpt/a2/step-1",
            "/checkpoint/gpt/a1/step-",
            "/checkpoint/gpt/a1",
        ]
    ).map(lambda uri: dataclasses.replace(GOOD, uri=uri).to_json()),
)
ANNOTATIONS = st.fixed_dictionaries(
    {},
    optional={
        **{str(key): ANY_TEXT for key in LeaseKey},
        str(LeaseKey.PHASE): st.one_of(ANY_TEXT, st.sampled_from(list(TrainerPhase)).map(str)),
        str(LeaseKey.STEP): st.one_of(ANY_TEXT, st.integers(0, 10**18).map(str)),
        str(LeaseKey.COMMIT): st.one_of(ANY_TEXT, COMMITS),
        str(LeaseKey.LOADER): st.one_of(ANY_TEXT, objects(LOADER)),
    },
)
MESSAGES = st.one_of(ANY_TEXT, objects(REPORT))


def with_lease(world: Observation, attempt: int, notes: dict[str, str]) -> Observation:
    meta = {"name": f"gpt-a{attempt}", "namespace": "ns", "annotations": notes}
    meta["labels"] = {"elastictraining.dev/attempt": str(attempt)}
    view = lease_view({"metadata": meta, "spec": {"renewTime": "2026-11-01T10:00:00Z"}}, NOW)
    return dataclasses.replace(world, leases={attempt: view})


def reshard_pod(attempt: int, message: str, code: int) -> dict[str, Any]:
    state = {"terminated": {"exitCode": code, "message": message, "reason": "Error" if code else "Completed"}}
    meta = {"name": f"gpt-a{attempt}-reshard-x", "uid": "r", "creationTimestamp": "2026-11-01T10:00:00Z"}
    meta["labels"] = {"elastictraining.dev/attempt": str(attempt), "elastictraining.dev/role": "reshard"}  # type: ignore[assignment]
    status = {"phase": "Failed" if code else "Succeeded", "containerStatuses": [{"name": "reshard", "state": state}]}
    return {"metadata": meta, "spec": {"containers": [{"name": "reshard"}]}, "status": status}


def reshard_world(attempt: int, message: str, code: int, seen: Observation | None = None) -> Observation:
    condition = {"type": "Failed" if code else "Complete", "status": "True", "message": message[:300]}
    meta = {"name": f"gpt-a{attempt}-reshard", "uid": f"rj{attempt}", "labels": {"elastictraining.dev/role": "reshard"}}
    meta["labels"]["elastictraining.dev/attempt"] = str(attempt)  # type: ignore[index]
    job = job_view({"metadata": meta, "status": {"conditions": [condition]}})
    return dataclasses.replace(
        seen or lost_node(), pods=(pod_view(reshard_pod(attempt, message, code)),), jobs=(job,), leases={}
    )


def go(status: Status, world: Observation, now: float = NOW, **changes: Any) -> Status:
    """One pass; its status, as the next one reads it."""
    spec = parse_spec({**copy.deepcopy(SPEC), **changes})
    found = decide(JOB, spec, status, world, limits=Timeouts(), now=now)
    assert UNSETTLED not in [event.reason for event in found.events]
    wire = check(found.status)
    for sample in (*increments(status, found.status), *(one for end in found.reshards for one in reshard_samples(end))):
        assert sample.value >= 0
    job_gauges(spec, found.status, heartbeat_time=None, now=now)
    return read_status(json.loads(json.dumps(wire))).status


FULL_CURVE = tuple(
    LossPoint(attempt=1, step=10**14 + i, samples=10**15 + i, loss=-1.2345678e-101) for i in range(MAX_LOSSES)
)
EXTERNAL = {"checkpoint": {"claimName": "ckpt", "path": "gpt", "startFrom": "old/run"}}


@pytest.mark.slow
@settings(
    max_examples=examples(30, soak=600),
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
@given(st.lists(st.tuples(ANNOTATIONS, MESSAGES, st.sampled_from([0, 1, 10, 21])), min_size=1, max_size=3))
def test_whatever_pods_write_the_next_status_is_valid_and_below_64_kib(
    writings: list[tuple[dict[str, str], str, int]],
) -> None:
    status, now = settled(losses=FULL_CURVE), NOW
    for notes, message, code in writings:
        status = go(status, with_lease(WORLD, 1, notes), now)
        status = go(status, with_lease(lost_node(), 1, notes), now + 1)
        for attempt in range(2, status.attempt + 1):
            status = go(status, reshard_world(attempt, message, code), now + 2)
        status = go(status, with_lease(WORLD, status.attempt, notes), now + 3)
        now += 60
        go(after_loss(), reshard_world(2, message, code), now)
        external = go(Status(), dataclasses.replace(WORLD, pods=(), jobs=(), leases={}), now, **EXTERNAL)
        go(external, reshard_world(1, message, code, WORLD), now + 1, **EXTERNAL)


@pytest.mark.parametrize("text", [item for item in NASTY if item and item not in ("Complete", "Training", "Drained")])
@pytest.mark.parametrize("key", [LeaseKey.PHASE, LeaseKey.STEP, LeaseKey.SAMPLES, LeaseKey.COMMIT, LeaseKey.LOADER])
def test_an_annotation_that_does_not_fit_is_told_by_its_path_and_not_believed(key: LeaseKey, text: str) -> None:
    before = settled()
    if key in (LeaseKey.STEP, LeaseKey.SAMPLES) and text == "5":
        return
    after = go(before, with_lease(WORLD, 1, {str(key): text}))
    told = find(after.conditions, Type.REPORTS_VALID)
    assert told is not None and told.status == "False"
    assert f"Lease gpt-a1: annotation {key}:" in told.message
    assert told.message.isprintable()
    assert after.checkpoint == before.checkpoint
    assert after.loader is None
    good = go(after, with_lease(WORLD, 1, {str(LeaseKey.PHASE): "Training", str(LeaseKey.STEP): "13"}))
    mended = find(good.conditions, Type.REPORTS_VALID)
    assert mended is not None and mended.status == "True"


@pytest.mark.parametrize(
    ("changes", "path"),
    [
        ({"topology": {}}, "topology"),
        ({"topology": {"tp": "2"}}, "topology.tp"),
        ({"topology": {"tp": True}}, "topology.tp"),
        ({"topology": {"dp": 3, "ep": 2}}, "topology"),
        ({"topology": {"x": 1}}, "topology"),
        ({"samples": None}, "samples"),
        ({"step": "5"}, "step"),
        ({"step": 5.0}, "step"),
        ({"step": 10**16}, "step"),
        ({"step": -1}, "step"),
        ({"num_bytes": 1e400}, "Infinity"),
        ({"attempt": 2}, "attempt"),
        ({"attempt": True}, "attempt"),
        ({"uri": "/etc/passwd"}, "uri"),
        ({"uri": "/checkpoint/gpt/a1/../../../etc/step-1"}, "uri"),
        ({"uri": "/checkpoint/gpt/a2/step-00000012"}, "uri"),
        ({"uri": "/checkpoint/gpt/a1/step-1/../step-2"}, "uri"),
        ({"uri": "/checkpoint/gptx/a1/step-00000012"}, "uri"),
        ({"uri": "/checkpoint/gpt/a1/step-1\x1b[31m"}, "uri"),
        ({"uri": "/checkpoint/gpt/a1/step-" + "1" * 5000}, "uri"),
        ({"uri": ["/checkpoint/gpt/a1/step-1"]}, "uri"),
    ],
)
def test_a_commit_that_does_not_fit_is_told_by_its_field_and_not_believed(changes: dict[str, Any], path: str) -> None:
    text = json.dumps({**dataclasses.asdict(GOOD), **changes})
    after = go(settled(), with_lease(WORLD, 1, {str(LeaseKey.PHASE): "Training", str(LeaseKey.COMMIT): text}))
    told = find(after.conditions, Type.REPORTS_VALID)
    assert told is not None and told.status == "False"
    assert f"annotation {LeaseKey.COMMIT}: " in told.message
    assert path in told.message
    assert after.checkpoint == settled().checkpoint
    believed = go(settled(), with_lease(WORLD, 1, {str(LeaseKey.COMMIT): GOOD.to_json()}))
    assert believed.checkpoint.uri == GOOD.uri
    assert find(believed.conditions, Type.REPORTS_VALID) is None


@pytest.mark.parametrize(
    "changes",
    [{"ok": "false"}, {"ok": 1}, {"exit_code": "0"}, {"ok": False}, {"mode": "magic"}, {"bytes_written": -1},
     {"seconds": "1"}, {"seconds": -1.0}, {"target": "/etc/passwd"},
     {"target": "/checkpoint/gpt/a1/step-00000010"}, {"step": None}],
)  # fmt: skip
def test_a_report_that_does_not_fit_is_told_and_verifies_nothing(changes: dict[str, Any]) -> None:
    text = json.dumps({**dataclasses.asdict(REPORT), **changes})
    status = go(after_loss(), reshard_world(2, text, 0))
    assert not status.checkpoint.verified
    believed = go(after_loss(), reshard_world(2, REPORT.to_json(), 0))
    assert believed.checkpoint.verified


@pytest.mark.parametrize("source", ["/etc", "/checkpoint/old/runs", "/checkpoint/old/run/../../x", ""])
def test_a_start_that_names_another_source_is_not_believed(source: str) -> None:
    first = go(Status(), dataclasses.replace(WORLD, pods=(), jobs=(), leases={}), **EXTERNAL)
    assert first.current is not None
    report = dataclasses.replace(REPORT, source=source, target=first.current.resume.uri)
    assert go(first, reshard_world(1, report.to_json(), 0, WORLD), **EXTERNAL).started_from is None
    honest = dataclasses.replace(report, source="/checkpoint/old/run/global_step5")
    started = go(first, reshard_world(1, honest.to_json(), 0, WORLD), **EXTERNAL).started_from
    assert started is not None and started.source == honest.source


def test_a_long_resume_error_is_cut_to_a_sentence() -> None:
    notes = {str(LeaseKey.RESUME_ERROR): "bad \x1b[31m" * 20_000}
    status = dataclasses.replace(settled(), current=dataclasses.replace(settled().current, first_step_time=None))  # type: ignore[type-var]
    for _ in range(12):
        status = go(status, with_lease(WORLD, status.attempt, notes))
    assert all(len(item.message) <= 1024 and item.message.isprintable() for item in status.recoveries)


@pytest.mark.parametrize(
    ("path", "value", "lost"),
    [
        (("attempt",), "two", True),
        (("attempt",), -1, True),
        (("current", "topology"), {}, True),
        (("current", "numNodes"), None, True),
        (("current", "launchTime"), "soon", True),
        (("checkpoint",), 5, True),
        (("checkpoint", "history"), [{"uri": "/x", "step": "5"}], True),
        (("checkpoint", "history", 1, "topology"), {}, False),
        (("checkpoint", "history", 0, "samples"), None, False),
        (("progress",), {"step": "\u00b2"}, False),
        (("recoveries",), [{"message": 5}, "x"], False),
        (("recoveries",), [{"cause": "x", "message": "y" * 300_000}] * 40, None),
        (("goodput",), {"ettr": "much"}, False),
        (("growth",), {"topology": "t"}, False),
        (("conditions",), [{"type": "Failed"}], False),
        (("jobUids",), {"a": 1}, False),
        (("restartBudget",), {"used": 1, "times": ["x"]}, False),
    ],
)
def test_a_damaged_status_raises_in_no_pass_and_is_mended_or_named(
    path: tuple[Any, ...], value: Any, lost: Any
) -> None:
    wire = to_wire(go(settled(), WORLD))
    at: Any = wire
    for part in path[:-1]:
        at = at[part]
    at[path[-1]] = value
    stored = read_status(wire)
    assert bool(stored.lost) is bool(lost)
    if lost is not None:
        assert stored.problems, "told by its path"
        assert stored.problems[0].startswith(f"status.{path[0]}")
    if not lost:
        go(stored.status, WORLD)


JSON_VALUES = st.recursive(
    VALUES,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)


@pytest.mark.slow
@settings(max_examples=examples(30, soak=600), deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.data())
def test_any_damage_to_a_stored_status_is_read_without_an_exception(data: st.DataObject) -> None:
    wire = json.loads(json.dumps(to_wire(go(after_loss(), WORLD))))
    for _ in range(data.draw(st.integers(1, 4))):
        at: Any = wire
        while True:
            keys = list(at) if isinstance(at, dict) else list(range(len(at)))
            if not keys:
                break
            key = data.draw(st.sampled_from(keys))
            if isinstance(at[key], dict | list) and at[key] and data.draw(st.booleans()):
                at = at[key]
                continue
            at[key] = copy.deepcopy(data.draw(JSON_VALUES))  # what is drawn may be shared, and is changed here
            break
    meta = {"name": "gpt", "namespace": "ns", "uid": "uid", "generation": 1}
    record = read_record({"metadata": meta, "spec": SPEC, "status": wire})
    if not record.lost:
        go(go(record.status, WORLD), lost_node(), NOW + 5)
