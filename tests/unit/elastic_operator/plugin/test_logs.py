"""Whose log `kubectl etj logs` shows: pods go in, one of them or a reason comes out."""

from __future__ import annotations

import pytest

from elastic_operator.api.status import Phase, Recovery, Status
from elastic_operator.observed.observation import PodView
from elastic_operator.plugin.errors import Exit, PluginError
from elastic_operator.plugin.pages.log_choice import LogQuery, choose_pod, explain_missing_log
from tests.unit.elastic_operator.reconcile.failures.test_sidecars import waiting_beside

GPU = "amd.com/gpu"


def pod(attempt: int, index: int, phase: str = "Running", code: int | None = None, role: str = "worker") -> PodView:
    return PodView(
        name=f"gpt-a{attempt}-{index}", uid=f"{attempt}{index}", attempt=attempt, role=role, index=index, phase=phase,
        exit_code=code, requests={GPU: 2}, node=f"n{index}",
    )  # fmt: skip


RUNNING = [pod(2, 1), pod(2, 0), pod(2, 2)]
RESHARD = pod(2, 0, "Succeeded", 0, role="reshard")
OLD = [pod(1, 0, "Failed", 143), pod(1, 1, "Failed", 7), pod(1, 2, "Failed", 1)]

CHOICES = [
    # pods, wanted, name of the pod
    (RUNNING, LogQuery(), "gpt-a2-0"),
    ([*OLD, *RUNNING], LogQuery(), "gpt-a2-0"),
    ([*OLD, *RUNNING], LogQuery(attempt=1), "gpt-a1-1"),
    (OLD, LogQuery(), "gpt-a1-1"),
    ([pod(1, 0), pod(1, 1, "Failed", 7)], LogQuery(), "gpt-a1-1"),
    ([pod(1, 0, "Failed", 137), pod(1, 1, "Failed", 143)], LogQuery(), "gpt-a1-0"),
    ([pod(1, 0, "Failed"), pod(1, 1, "Failed", 1)], LogQuery(), "gpt-a1-1"),
    ([pod(2, 0, "Succeeded", 0), pod(2, 1, "Succeeded", 0)], LogQuery(), "gpt-a2-0"),
    (RUNNING, LogQuery(index=2), "gpt-a2-2"),
    (RUNNING, LogQuery(rank=0), "gpt-a2-0"),
    (RUNNING, LogQuery(rank=3), "gpt-a2-1"),
    (RUNNING, LogQuery(rank=5), "gpt-a2-2"),
    ([*OLD, *RUNNING], LogQuery(attempt=1, index=0), "gpt-a1-0"),
    ([*RUNNING, RESHARD], LogQuery(reshard=True), "gpt-a2-0"),
]


@pytest.mark.parametrize(("pods", "wanted", "name"), CHOICES)
def test_the_pod_that_matters(pods: list[PodView], wanted: LogQuery, name: str) -> None:
    found = choose_pod("gpt", Status(attempt=2, phase=Phase.RUNNING), pods, wanted, GPU)
    assert found.name == name
    assert found.role == ("reshard" if wanted.reshard else "worker")


ENDED = Recovery(cause="PodFailed", message="pod gpt-a1-0 failed with exit code 7")
REFUSALS = [
    (Status(attempt=2, phase=Phase.RUNNING), RUNNING, LogQuery(attempt=1),
     "only pods that failed by themselves stay.*; .*2"),
    (Status(attempt=2, phase=Phase.RUNNING), RUNNING, LogQuery(attempt=3), "has had 2 attempts, there is no attempt 3"),
    (Status(attempt=2, phase=Phase.RUNNING), RUNNING, LogQuery(index=7), "no pod 7; it has 0, 1, 2"),
    (Status(attempt=2, phase=Phase.RUNNING), RUNNING, LogQuery(rank=6), "no pod 3; it has 0, 1, 2"),
    (Status(attempt=2, phase=Phase.RUNNING), RUNNING, LogQuery(reshard=True), "no reshard pods of attempt 2"),
    (Status(attempt=2), [RESHARD], LogQuery(reshard=True, attempt=1), "there are some of attempt 2"),
    (Status(), [], LogQuery(), "has not started anything yet: `kubectl etj status gpt` says why"),
    (Status(attempt=2, phase=Phase.SUSPENDED), [], LogQuery(), "is suspended: its pods are gone"),
    (Status(attempt=1, phase=Phase.STOPPING, recoveries=(ENDED,)), [], LogQuery(), "because pod gpt-a1-0 failed with"),
]  # fmt: skip


@pytest.mark.parametrize(("status", "pods", "wanted", "reason"), REFUSALS)
def test_where_there_is_no_log_the_reason_is_told(
    status: Status, pods: list[PodView], wanted: LogQuery, reason: str
) -> None:
    with pytest.raises(PluginError, match=reason) as caught:
        choose_pod("gpt", status, pods, wanted, GPU)
    assert caught.value.code == Exit.REFUSED


@pytest.mark.parametrize(
    ("view", "reason"),
    [
        (PodView(name="p", uid="u", attempt=1, role="worker", unschedulable="0/4 nodes"), "no node yet: 0/4 nodes"),
        (
            PodView(name="p", uid="u", attempt=1, role="worker", waiting_reason="ErrImagePull", waiting_message="no x"),
            "cannot start: ErrImagePull: no x",
        ),
        (PodView(name="p", uid="u", attempt=1, role="worker", node="n1"), "is being started on n1"),
        (pod(1, 0), ""),
        (pod(1, 0, "Failed", 7), ""),
        (waiting_beside(), ""),
    ],
)
def test_a_pod_that_has_not_started_says_what_it_waits_for(view: PodView, reason: str) -> None:
    found = explain_missing_log(view)
    assert reason in found
    assert bool(found) == bool(reason)
