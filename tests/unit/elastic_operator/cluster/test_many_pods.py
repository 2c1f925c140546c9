"""An attempt of many pods ends without delay for its conversion, and although an object of the next one is refused."""

from __future__ import annotations

import asyncio

import pytest

from elastic_operator.client.api_errors import ApiError
from elastic_operator.cluster.diagnostics import CONCURRENT_DELETIONS, Diagnostics, RefusedError
from elastic_operator.manifests.attempt import JobRef
from elastic_operator.reconcile.actions import Action, Create, DeleteJob, DeletePod, LaunchAttempt

KEY = ("ns", "gpt")
FENCE = DeleteJob(name="gpt-a1", uid="j1")
CONVERT = Create(manifest={"kind": "Job", "metadata": {"name": "gpt-a2-reshard"}})
LAUNCH = LaunchAttempt(attempt=2, manifests=(), job=JobRef(name="gpt", namespace="ns", uid="uid", generation=1))
PODS = [DeletePod(name=f"gpt-a1-{index}", uid=f"u{index}", grace_seconds=2) for index in range(100)]


class SlowWriter:
    """Executes nothing, takes a moment for it, and refuses what it is told to refuse."""

    def __init__(self, refused: Action | None = None, error: Exception | None = None) -> None:
        self.done: list[Action] = []
        self.most_at_once = 0
        self._at_once = 0
        self._refused, self._error = refused, error

    async def act(self, _namespace: str, _job: str, action: Action) -> None:
        self._at_once += 1
        self.most_at_once = max(self.most_at_once, self._at_once)
        await asyncio.sleep(0)
        self._at_once -= 1
        if action is self._refused:
            assert self._error is not None
            raise self._error
        self.done.append(action)


def act(writer: SlowWriter, *actions: Action) -> None:
    diagnostics = Diagnostics(None, writer)  # type: ignore[arg-type]
    asyncio.run(diagnostics.act_all(KEY, 2, actions))


def answer(code: int) -> Exception:
    return ApiError(code, "path", {"message": "refused"})


def test_pods_are_deleted_many_at_a_time_and_after_everything_else() -> None:
    writer = SlowWriter()
    act(writer, PODS[0], FENCE, *PODS[1:], CONVERT)
    assert writer.done[:2] == [FENCE, CONVERT]
    assert sorted(action.name for action in writer.done[2:]) == sorted(pod.name for pod in PODS)  # type: ignore[union-attr]
    assert writer.most_at_once == CONCURRENT_DELETIONS


def test_pods_are_deleted_although_the_conversion_is_refused() -> None:
    """A quota may have room for it only when they are gone."""
    writer = SlowWriter(CONVERT, answer(403))
    with pytest.raises(RefusedError):
        act(writer, FENCE, CONVERT, *PODS)
    assert len(writer.done) == 1 + len(PODS)


def test_a_pod_that_cannot_be_deleted_keeps_no_other_and_is_told() -> None:
    writer = SlowWriter(PODS[0], answer(500))
    with pytest.raises(ApiError):
        act(writer, FENCE, CONVERT, *PODS)
    assert len(writer.done) == 2 + len(PODS) - 1


def test_no_pod_is_deleted_if_its_job_stays_and_would_replace_it() -> None:
    writer = SlowWriter(FENCE, answer(500))
    with pytest.raises(ApiError):
        act(writer, FENCE, CONVERT, *PODS)
    assert writer.done == []


def test_a_launch_comes_after_the_deletions_and_not_at_all_if_one_failed() -> None:
    writer = SlowWriter()
    act(writer, LAUNCH, *PODS)
    assert writer.done[-1] is LAUNCH
    writer = SlowWriter(PODS[0], answer(500))
    with pytest.raises(ApiError):
        act(writer, LAUNCH, *PODS)
    assert LAUNCH not in writer.done
