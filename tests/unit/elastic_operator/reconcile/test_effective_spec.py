"""While an edit of the spec is refused, what runs is recovered by the spec that was accepted before."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from elastic_operator.api.conditions import Type, find
from elastic_operator.api.spec import Spec, SpecError, parse_spec
from elastic_operator.api.status import Current, Phase, Status
from elastic_operator.observed.observation import Observation
from elastic_operator.observed.timeouts import Timeouts
from elastic_operator.reconcile import effective_spec
from elastic_operator.reconcile.actions import Decision
from elastic_operator.reconcile.decide import refuse
from elastic_operator.reconcile.record import read_record
from tests.unit.elastic_operator.reconcile.test_decide_phases import JOB, NOW, SPEC, look, lost_node, nodes, settled

EDITED = dataclasses.replace(JOB, generation=JOB.generation + 1)
PROBLEM = SpecError(["spec.nodes: min is 4, above max 3"])

EMPTY = Observation(nodes=nodes("n1", "n2", "n3"))
PLANNED = Current(topology={}, num_nodes=1, gpus_per_node=1)


def refused(status: Status, now: float = NOW) -> Decision:
    return refuse(EDITED, PROBLEM, status, limits=Timeouts(), now=now)


def kept(revision: int, wire: dict[str, Any]) -> dict[str, Any]:
    made = effective_spec.build_revision(dataclasses.replace(JOB, generation=revision), wire)
    made["metadata"]["uid"] = f"r{revision}"
    return made


def test_a_lost_pod_is_recovered_while_the_edit_stays_refused() -> None:
    before = refused(settled()).status
    world = lost_node()
    decision = effective_spec.merge_rejected_spec(refused(before, NOW + 5), look(before, world, now=NOW + 5))
    assert decision.actions
    assert decision.status.phase != Phase.RUNNING
    told = find(decision.status.conditions, Type.SPEC_VALID)
    assert told == find(before.conditions, Type.SPEC_VALID)
    assert told is not None
    assert (told.status, told.observed_generation) == ("False", EDITED.generation)


def test_a_refusal_is_told_once_with_what_the_recovery_tells() -> None:
    first = effective_spec.merge_rejected_spec(refused(settled()), look(settled()))
    assert [event.reason for event in first.events] == ["InvalidSpec"]
    again = effective_spec.merge_rejected_spec(refused(first.status), look(first.status))
    assert again.events == ()
    assert again.status == first.status


@pytest.mark.parametrize("said", [True, False, None, "yes"])
def test_a_refused_edit_that_suspends_the_job_suspends_it(said: object) -> None:
    meta = {"name": "gpt", "namespace": "team", "uid": "u", "generation": 4}
    record = read_record({"metadata": meta, "spec": {**SPEC, "nodes": "three", "suspend": said}})
    assert isinstance(record.spec, SpecError)
    spec = effective_spec.effective_spec(parse_spec(SPEC), record)
    assert spec.suspend is (said is True)
    if said is True:
        decision = effective_spec.merge_rejected_spec(refused(settled()), look(settled(), suspend=spec.suspend))
        assert decision.status.drain is not None
        assert decision.status.drain.cause == "Suspended"


def test_a_spec_that_was_accepted_as_suspended_stays_so_while_its_edit_is_refused() -> None:
    meta = {"name": "gpt", "namespace": "team", "uid": "u", "generation": 4}
    record = read_record({"metadata": meta, "spec": {**SPEC, "nodes": "three"}})
    assert effective_spec.effective_spec(parse_spec({**SPEC, "suspend": True}), record).suspend


def test_the_newest_revision_counts_and_an_older_operators_may_not_be_understood() -> None:
    fewer = {**SPEC, "nodes": {"min": 1, "max": 1}}
    revisions = [kept(9, SPEC), kept(10, fewer), kept(2, SPEC)]
    assert effective_spec.read_newest_spec(revisions, JOB.uid) == parse_spec(fewer)
    assert effective_spec.read_newest_spec([kept(9, SPEC), kept(10, {"nodes": 3})], JOB.uid) is None
    assert effective_spec.read_newest_spec([], JOB.uid) is None


def test_the_revisions_of_a_job_of_the_same_name_that_was_deleted_do_not_count() -> None:
    gone = effective_spec.build_revision(dataclasses.replace(JOB, uid="0123456789", generation=7), SPEC)
    assert effective_spec.read_newest_spec([gone], JOB.uid) is None
    assert isinstance(effective_spec.read_newest_spec([gone, kept(2, SPEC)], JOB.uid), Spec)
    again = effective_spec.build_revision(dataclasses.replace(JOB, uid="abcdefghij", generation=7), SPEC)
    assert gone["metadata"]["name"] != again["metadata"]["name"]


def test_a_revision_belongs_to_its_job_and_replaces_those_before_it() -> None:
    job = dataclasses.replace(JOB, generation=10)
    revisions = [kept(9, SPEC), kept(10, SPEC), kept(2, SPEC)]
    meta = revisions[1]["metadata"]
    assert (meta["name"], meta["ownerReferences"][0]["uid"]) == (f"{JOB.name}-{JOB.uid}-10", JOB.uid)
    stranger = kept(3, SPEC)
    stranger["metadata"]["ownerReferences"][0]["uid"] = "another"
    outlived = effective_spec.stale_revisions([*revisions, stranger], job)
    assert outlived == [(f"{JOB.name}-{JOB.uid}-9", "r9"), (f"{JOB.name}-{JOB.uid}-2", "r2")], "only its own"


def test_a_spec_is_kept_when_it_is_accepted_and_when_an_attempt_begins() -> None:
    found = look(Status()).status
    assert effective_spec.is_revision_due(Status(), found)
    assert not effective_spec.is_revision_due(found, found)
    assert effective_spec.is_revision_due(
        found, dataclasses.replace(found, observed_generation=found.observed_generation + 1)
    )
    assert effective_spec.is_revision_due(found, dataclasses.replace(found, attempt=found.attempt + 1))
    assert effective_spec.is_revision_due(refused(found).status, found)
    assert not effective_spec.is_revision_due(found, refused(found).status)


@pytest.mark.parametrize(
    ("changes", "wanted"),
    [
        pytest.param({"phase": Phase.PENDING}, False, id="new"),
        pytest.param({"attempt": 1, "current": PLANNED}, False, id="first-not-launched"),
        pytest.param({"attempt": 1, "phase": Phase.PENDING}, True, id="waits-for-nodes-again"),
        pytest.param({"attempt": 2, "current": PLANNED}, True, id="between-attempts"),
        pytest.param({"attempt": 2, "phase": Phase.FAILED}, False, id="failed"),
    ],
)
def test_only_what_has_been_launched_goes_on_by_an_older_spec(changes: dict[str, Any], wanted: bool) -> None:
    assert effective_spec.is_accepted_spec_needed(dataclasses.replace(Status(), **changes)) is wanted


def test_what_runs_goes_on_by_an_older_spec() -> None:
    assert effective_spec.is_accepted_spec_needed(settled())


MODEL = {
    "parameters": 1.0e6, "layers": 6, "hiddenSize": 128, "attentionHeads": 4, "vocabSize": 256, "sequenceLength": 64,
}  # fmt: skip


@pytest.mark.parametrize(
    ("known", "edit", "told"),
    [
        pytest.param(
            {"global_samples": 20},
            {"batch": {"globalSamples": 40, "microSamples": 2}},
            " (spec.batch.globalSamples changed from 20 to 40)",
            id="a batch ramp",
        ),
        pytest.param(
            {"global_samples": 20, "sequence_length": 32},
            {"model": MODEL},
            " (spec.model.sequenceLength changed from 32 to 64)",
            id="longer samples",
        ),
        pytest.param({"global_samples": 20}, {"model": MODEL}, "", id="the first facts about the model"),
        pytest.param({}, {"batch": {"globalSamples": 40}}, "", id="an attempt that an older operator planned"),
    ],
)
def test_an_edit_of_facts_is_a_planned_change_that_says_what_has_changed(
    known: dict[str, int], edit: dict[str, Any], told: str
) -> None:
    status = settled()
    assert status.current is not None
    status = dataclasses.replace(status, current=dataclasses.replace(status.current, **known))
    decision = look(status, **edit)
    assert decision.status.drain is not None
    assert (decision.status.drain.cause, decision.status.drain.message) == ("SpecChanged", f"the spec was edited{told}")


def test_the_next_attempt_trains_with_the_new_facts() -> None:
    batch = {"globalSamples": 40, "microSamples": 2}
    status = look(dataclasses.replace(settled(), current=None), EMPTY, batch=batch, model=MODEL).status
    assert status.current is not None
    assert (status.attempt, status.current.global_samples, status.current.sequence_length) == (2, 40, 64)
