"""Pods that the cluster does not let be: asked for before a launch, and told to people when it comes to it."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from elastic_operator.api.conditions import Type, find
from elastic_operator.api.spec import SpecError
from elastic_operator.api.status import Phase, Status
from elastic_operator.manifests import dry_run
from elastic_operator.observed import pod_diagnosis
from elastic_operator.observed.observation import JobView, Observation, PodDiagnosis, PodView
from elastic_operator.observed.timeouts import Timeouts
from elastic_operator.reconcile.actions import Decision
from elastic_operator.reconcile.decide import decide, refuse
from tests.unit.elastic_operator.reconcile.test_decide_phases import JOB, NOW, nodes, spec, worker_job, workers

EMPTY = Observation(nodes=nodes("n1", "n2", "n3"))
EDITED = dataclasses.replace(JOB, generation=JOB.generation + 1)
NEWER_IMAGE = {"template": {"spec": {"containers": [{"name": "train", "image": "newer"}]}}}
CONVERTS = {"reshard": {"template": {"spec": {"containers": [{"name": "convert", "image": "image"}]}}}}


def look(status: Status, world: Observation = EMPTY, *, now: float = NOW) -> Decision:
    return decide(JOB, spec(), status, world, limits=Timeouts(), now=now)


def launched(jobs: tuple[JobView, ...] = (), pods: tuple[PodView, ...] = ()) -> tuple[Status, Observation]:
    """Attempt 1 just after its launch, and the world then."""
    world = dataclasses.replace(EMPTY, jobs=jobs, pods=pods)
    return look(look(Status()).status, world).status, world


@pytest.mark.parametrize(
    ("job", "changes", "needed"),
    [
        pytest.param(JOB, {}, False, id="seen"),
        pytest.param(EDITED, {"suspend": True}, False, id="other-edit"),
        pytest.param(EDITED, NEWER_IMAGE, True, id="template-edited"),
        pytest.param(EDITED, CONVERTS, True, id="reshard-template-edited"),
    ],
)
def test_the_server_is_asked_once_for_each_edit_of_the_pods(job: Any, changes: dict[str, Any], needed: bool) -> None:
    status, _ = launched()
    assert dry_run.is_dry_run_needed(job, spec(**changes), status) is needed


def test_the_server_is_asked_before_the_first_launch_and_again_while_it_objects() -> None:
    assert dry_run.is_dry_run_needed(JOB, spec(), Status())
    objected = refuse(JOB, SpecError(["x"]), Status(), limits=Timeouts(), now=NOW).status
    assert dry_run.is_dry_run_needed(JOB, spec(), objected)


def test_resources_of_the_conversion_are_tried_and_named_by_their_field() -> None:
    resources = {"reshard": {"resources": {"requests": {"memory": "64Mib"}}}}
    found = dict(dry_run.build_dry_run_jobs(JOB, spec(**resources)))
    assert list(found) == ["spec.template", "spec.reshard.resources"]
    status, _ = launched()
    assert dry_run.is_dry_run_needed(EDITED, spec(**resources), status)
    cause = ("spec.template.spec.containers[0].resources.requests[memory]", "Invalid value")
    (text,) = dry_run.describe_refusal("spec.reshard.resources", "", [cause])
    assert text.endswith("spec.reshard.resources.requests[memory]: Invalid value")


@pytest.mark.parametrize(
    ("code", "message", "expected"),
    [
        (400, 'Job in version "v1" cannot be handled as a Job: strict decoding error: unknown field "x"', True),
        (422, "Job.batch x is invalid: spec.template: Required value", True),
        (400, 'admission webhook "policy.example" denied the request: no latest tags', True),
        (400, 'admission webhook "sidecar.example" does not support dry run', False),
        (403, "jobs.batch is forbidden: exceeded quota", False),
        (500, "etcd is away", False),
    ],
)
def test_only_answers_that_speak_of_the_pods_are_objections(code: int, message: str, expected: bool) -> None:
    assert dry_run.is_spec_at_fault(code, message) is expected


def test_both_templates_are_tried_under_names_that_no_attempt_has() -> None:
    found = dict(dry_run.build_dry_run_jobs(JOB, spec(**CONVERTS)))
    assert {path: manifest["metadata"]["name"] for path, manifest in found.items()} == {
        "spec.template": "gpt-a0",
        "spec.reshard.template": "gpt-a0-reshard",
    }


@pytest.mark.parametrize(
    ("path", "message", "causes", "expected"),
    [
        pytest.param(
            "spec.template",
            'Job in version "v1" cannot be handled as a Job: '
            'strict decoding error: unknown field "spec.template.spec.x"',
            [],
            'spec.template: the API server refuses pods like this: unknown field "spec.template.spec.x"',
            id="unknown-field",
        ),
        pytest.param(
            "spec.reshard.template",
            'Job.batch "gpt-a0-reshard" is invalid: spec.template.spec.containers[0].name: Invalid value: "A"',
            [("spec.template.spec.containers[0].name", 'Invalid value: "A"')],
            "spec.reshard.template: the API server refuses pods like this: "
            'spec.reshard.template.spec.containers[0].name: Invalid value: "A"',
            id="invalid-in-the-other-template",
        ),
        pytest.param(
            "spec.template",
            'Job in version "v1" cannot be handled as a Job: quantities must match',
            [],
            "spec.template: the API server refuses pods like this: quantities must match",
            id="not-decodable",
        ),
    ],
)
def test_objections_name_the_field_of_the_resource(
    path: str, message: str, causes: list[tuple[str, str]], expected: str
) -> None:
    assert dry_run.describe_refusal(path, message, causes) == [expected]


def test_a_refused_launch_is_a_condition_and_an_event_with_the_servers_message() -> None:
    status, world = launched()
    told = look(
        status,
        dataclasses.replace(world, pod_diagnosis=pod_diagnosis.diagnose_refused_launch(1, "quota of jobs\nexceeded")),
    )
    condition = find(told.status.conditions, Type.LAUNCHED)
    assert condition is not None
    assert (condition.status, condition.reason) == ("False", pod_diagnosis.LAUNCH_REFUSED)
    assert "quota of jobs exceeded" in condition.message
    assert (told.status.phase, told.status.reason) == (Phase.STARTING, pod_diagnosis.LAUNCH_REFUSED)
    assert [event.reason for event in told.events] == [pod_diagnosis.LAUNCH_REFUSED]
    assert "LaunchAttempt" in [type(action).__name__ for action in told.actions]
    again = look(
        told.status,
        dataclasses.replace(world, pod_diagnosis=pod_diagnosis.diagnose_refused_launch(1, "quota of jobs\nexceeded")),
    )
    assert again.events == ()


@pytest.mark.parametrize(
    "stale",
    [
        pytest.param(pod_diagnosis.diagnose_refused_launch(7, "x"), id="another-attempt"),
        pytest.param(pod_diagnosis.diagnose_refused_launch(1, "x"), id="launched-since"),
    ],
)
def test_what_is_over_is_not_told(stale: PodDiagnosis) -> None:
    status, world = launched(jobs=(worker_job(),))
    told = look(status, dataclasses.replace(world, pod_diagnosis=stale))
    assert (told.status.reason, told.events) == ("Launched", ())


def test_all_pods_that_have_begun_are_a_true_condition() -> None:
    status, _ = launched(jobs=(worker_job(),), pods=workers())
    condition = find(status.conditions, Type.LAUNCHED)
    assert condition is not None
    assert (condition.status, condition.reason) == ("True", "PodsBegan")


def test_a_pod_that_cannot_start_is_told_before_its_grace_is_over() -> None:
    pods = workers(phase="Pending", waiting_reason="ErrImagePull", waiting_message="no such image")
    status, _ = launched(jobs=(worker_job(),), pods=tuple(dataclasses.replace(pod, created_at=NOW) for pod in pods))
    assert (status.phase, status.reason) == (Phase.STARTING, "ContainerCannotStart")
    assert "ErrImagePull: no such image" in status.message


PENDING = workers(phase="Pending")


@pytest.mark.parametrize(
    ("pods", "seconds", "reason"),
    [
        pytest.param((), 2, None, id="just-launched"),
        pytest.param((), 4, pod_diagnosis.PODS_REFUSED, id="no-pods"),
        pytest.param(PENDING[:2], 4, pod_diagnosis.PODS_REFUSED, id="too-few-pods"),
        pytest.param(PENDING, 4, None, id="pods-begin"),
        pytest.param(PENDING, 21, pod_diagnosis.POD_STUCK, id="pods-do-not-begin"),
        pytest.param(workers(phase="Pending", waiting_reason="ErrImagePull"), 21, None, id="the-pod-says-why-itself"),
        pytest.param(workers(), 60, None, id="all-run"),
    ],
)
def test_events_are_read_only_where_the_pods_do_not_tell(
    pods: tuple[PodView, ...], seconds: float, reason: str | None
) -> None:
    status, world = launched(jobs=(worker_job(),), pods=pods)
    asked = pod_diagnosis.choose_event_query(status, world, NOW + seconds)
    assert (asked and asked.reason) == reason


def test_the_newest_warning_counts_and_the_names_of_pods_that_never_were_do_not() -> None:
    asked = pod_diagnosis.EventQuery(attempt=1, reason=pod_diagnosis.PODS_REFUSED, uid="j1", name="gpt-a1")
    events = [
        {"type": "Normal", "reason": "Created", "message": "x", "lastTimestamp": "2026-11-21T20:00:09Z"},
        {"type": "Warning", "reason": "FailedCreate", "message": "old", "lastTimestamp": "2026-11-21T20:00:01Z"},
        {
            "type": "Warning", "reason": "FailedCreate", "lastTimestamp": "2026-11-21T20:00:02Z",
            "message": 'pods "gpt-a1-0-b27v4" is forbidden: exceeded quota',
        },
    ]  # fmt: skip
    found = pod_diagnosis.diagnose_from_events(asked, events)
    assert found is not None
    assert found.message == ('the pods cannot be created: FailedCreate: pods "gpt-a1-*" is forbidden: exceeded quota')
    assert pod_diagnosis.diagnose_from_events(asked, events[:1]) is None
