"""Admission may add containers before and after ours: ours is known by its name, and its end is the end of the pod."""

from __future__ import annotations

from typing import Any

import pytest

from elastic_operator.api.pod_template import MAIN_CONTAINER
from elastic_operator.observed import reshard_pods
from elastic_operator.observed.containers import name_main_container
from elastic_operator.observed.observation import JobView, PodView, pod_view
from elastic_operator.observed.signal_kinds import Kind
from elastic_operator.observed.signals import detect_pod_signals

NOW = 1_800_000_000.0
RUNS: dict[str, Any] = {"running": {"startedAt": "2026-11-01T10:00:00Z"}}


def ended(code: int, message: str = "", reason: str = "Error") -> dict[str, Any]:
    return {"terminated": {"exitCode": code, "message": message, "reason": reason}}


def pod(
    *states: tuple[str, dict[str, Any]], main: str | None = "train", phase: str = "Running", **meta: Any
) -> dict[str, Any]:
    """A pod whose containers are in this order, with their states."""
    notes = {} if main is None else {"annotations": {MAIN_CONTAINER: main}}
    return {
        "metadata": {"name": "gpt-a1-0", "uid": "u", **notes, **meta},
        "spec": {"nodeName": "n1", "containers": [{"name": name} for name, _ in states]},
        "status": {"phase": phase, "containerStatuses": [{"name": name, "state": state} for name, state in states]},
    }


ORDERS = [
    pytest.param([("proxy", ended(0)), ("train", ended(7, "mine"))], id="prepended"),
    pytest.param([("train", ended(7, "mine")), ("proxy", ended(0))], id="appended"),
    pytest.param([("a", ended(1)), ("train", ended(7, "mine")), ("b", RUNS)], id="between"),
]


@pytest.mark.parametrize("states", ORDERS)
def test_code_and_message_are_those_of_the_named_container(states: list[tuple[str, dict[str, Any]]]) -> None:
    view = pod_view(pod(*states))
    assert (view.exit_code, view.termination_message, view.exit_reason) == (7, "mine", "Error")
    item = pod(*states)
    item["status"]["containerStatuses"].reverse()
    assert pod_view(item).exit_code == 7, "the kubelet sorts the statuses in its own way"


@pytest.mark.parametrize(
    ("main", "names", "expected"),
    [
        pytest.param("train", ["proxy", "train"], "train", id="by-name"),
        pytest.param(None, ["train", "proxy"], "train", id="pod-of-an-older-operator"),
        pytest.param("gone", ["train", "proxy"], "train", id="no-container-has-the-name"),
        pytest.param("train", [], "", id="no-container"),
    ],
)
def test_the_container_is_named_by_the_pod_itself(main: str | None, names: list[str], expected: str) -> None:
    assert name_main_container(pod(*((name, RUNS) for name in names), main=main)) == expected


@pytest.mark.parametrize(
    ("states", "phase", "others", "outcome"),
    [
        pytest.param([("proxy", RUNS), ("train", RUNS)], "Running", "", "", id="both-run"),
        pytest.param([("proxy", RUNS), ("train", ended(0))], "Running", "proxy", "Succeeded", id="done"),
        pytest.param([("proxy", RUNS), ("train", ended(7))], "Running", "proxy", "Failed", id="failed"),
        pytest.param(
            [("a", RUNS), ("train", ended(7)), ("b", {"waiting": {"reason": "ErrImagePull"}})],
            "Running", "a, b", "Failed", id="two-hold-it-open",
        ),
        pytest.param([("proxy", ended(0)), ("train", RUNS)], "Running", "", "", id="the-other-ended-first"),
        pytest.param([("proxy", ended(0)), ("train", ended(7))], "Running", "", "", id="the-phase-follows"),
        pytest.param([("proxy", ended(0)), ("train", ended(7))], "Failed", "", "Failed", id="the-phase-has-followed"),
        pytest.param([("proxy", ended(1)), ("train", ended(0))], "Failed", "", "Failed", id="only-the-other-failed"),
    ],
)  # fmt: skip
def test_a_pod_has_ended_with_its_container(
    states: list[tuple[str, dict[str, Any]]], phase: str, others: str, outcome: str
) -> None:
    view = pod_view(pod(*states, phase=phase))
    assert (view.outlived_by, view.outcome) == (others, outcome)
    assert view.terminal == (phase in ("Succeeded", "Failed")), "it holds its accelerators until its phase is terminal"


def test_a_sidecar_among_the_init_containers_holds_nothing_open() -> None:
    item = pod(("train", ended(0)))
    item["status"]["initContainerStatuses"] = [{"name": "proxy", "state": RUNS}]
    assert pod_view(item).outlived_by == ""


@pytest.mark.parametrize(
    ("code", "reason", "meta", "kind"),
    [
        pytest.param(7, "Error", {}, Kind.POD_FAILED, id="failed"),
        pytest.param(137, "ContainerStatusUnknown", {}, Kind.POD_LOST, id="lost"),
        pytest.param(0, "Completed", {}, None, id="done"),
        pytest.param(143, "Error", {"deletionTimestamp": "2026-11-01T10:00:00Z"}, Kind.POD_DELETED, id="deleted"),
    ],
)
def test_the_end_of_the_container_is_a_signal_at_once(
    code: int, reason: str, meta: dict[str, Any], kind: Kind | None
) -> None:
    view = pod_view(pod(("proxy", RUNS), ("train", ended(code, reason=reason)), **meta))
    found = detect_pod_signals(view, NOW)
    assert [signal.kind for signal in found] == ([kind] if kind else [])
    if kind is Kind.POD_FAILED:
        assert found[0].message == "pod gpt-a1-0 on node n1 failed with exit code 7 (Error), while proxy goes on"


def waits(reason: str = "CrashLoopBackOff") -> dict[str, Any]:
    return {"waiting": {"reason": reason, "message": "said"}}


CREATED, INITIALIZED = waits("ContainerCreating"), waits("PodInitializing")


@pytest.mark.parametrize(
    ("train", "init", "beside", "phase", "expected"),
    [
        pytest.param(RUNS, waits(), RUNS, "Running", ("", "Running"), id="native-sidecar"),
        pytest.param(RUNS, RUNS, waits("ErrImagePull"), "Pending", ("", "Running"), id="the-kubelet-calls-it-pending"),
        pytest.param(ended(0), RUNS, waits("ErrImagePull"), "Pending", ("", "Running"), id="ours-has-ended"),
        pytest.param(CREATED, RUNS, waits("ErrImagePull"), "Pending", ("", "Pending"), id="ours-waits-for-no-peer"),
        pytest.param(INITIALIZED, waits(), CREATED, "Pending", ("CrashLoopBackOff", "Pending"), id="kept-from-start"),
        pytest.param(None, waits(), None, "Pending", ("CrashLoopBackOff", "Pending"), id="no-status-of-ours-yet"),
        pytest.param(waits(), RUNS, RUNS, "Running", ("CrashLoopBackOff", "Running"), id="ours-waits"),
    ],
)
def test_a_container_waits_for_itself_and_before_its_start_for_init_containers(
    train: dict[str, Any] | None,
    init: dict[str, Any],
    beside: dict[str, Any] | None,
    phase: str,
    expected: tuple[str, str],
) -> None:
    states = [(name, state) for name, state in (("proxy", beside), ("train", train)) if state is not None]
    item = pod(*states, phase=phase)
    item["status"]["initContainerStatuses"] = [{"name": "istio", "state": init}]
    if not states:
        item["spec"]["containers"] = [{"name": "train"}]
    view = pod_view(item)
    assert (view.waiting_reason, view.phase) == expected
    assert view.waiting_message == ("said" if view.waiting_reason else "")
    images = [signal for signal in detect_pod_signals(view, NOW) if signal.kind is Kind.IMAGE]
    assert bool(images) == bool(view.waiting_reason)


def conversion(name: str, *, code: int | None, others: str = "", phase: str = "Running") -> PodView:
    return PodView(
        name=name, uid=name, attempt=2, role="reshard", phase=phase, exit_code=code, outlived_by=others, owner="r"
    )


DONE, BAD = conversion("d", code=0, others="proxy"), conversion("b", code=11, others="proxy")
BUSY, OVER = conversion("r", code=None), conversion("f", code=11, phase="Failed")


@pytest.mark.parametrize(
    ("pods", "count", "end"),
    [
        pytest.param([BUSY], 1, "", id="it-converts"),
        pytest.param([DONE], 1, "complete", id="done"),
        pytest.param([BAD], 1, "failed", id="failed"),
        pytest.param([OVER], 1, "", id="the-job-controller-says-it"),
        pytest.param([BAD, BUSY], 2, "", id="one-of-two-failed"),
        pytest.param([BAD], 2, "", id="the-other-pod-is-not-there-yet"),
        pytest.param([BAD, OVER], 2, "failed", id="both-failed"),
        pytest.param([BAD, DONE], 2, "complete", id="one-of-two-is-enough"),
    ],
)
def test_a_reshard_job_ends_with_its_containers(pods: list[PodView], count: int, end: str) -> None:
    job = reshard_pods.judge_job(JobView(name="r", uid="r", attempt=2, role="reshard", num_pods=count), pods)
    assert (job.complete, job.failed) == (end == "complete", end == "failed")
