"""The random traces of `test_decide_world` find defects that are planted into the operator or the trainings."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest

from elastic_operator.reconcile import decide as decide_module
from elastic_operator.reconcile import launch
from elastic_operator.reconcile.failures import refused_commits
from tests.property.cluster_model import operator_process, trainings
from tests.property.cluster_model.cluster import Cluster, Process
from tests.property.cluster_model.operator_process import OperatorProcess
from tests.property.cluster_model.traces import QUEUE_FAULTS, REFUSALS, draw_trace, play
from tests.property.test_decide_world import SIZES
from tests.randomness import SOAKING

NUM_TRACES = 240


def keep_the_lease_of_a_stopped_attempt(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(operator_process, "_OBJECTS", ())


def launch_beside_running_pods(patch: pytest.MonkeyPatch) -> None:
    def create_at_once(operator: OperatorProcess, action: Any, count: Callable[[], None]) -> None:
        for manifest in action.manifests:
            count()
            operator._create(dict(manifest))

    patch.setattr(launch, "select_running_pods", lambda context, status: ())
    patch.setattr(OperatorProcess, "_launch", create_at_once)


def remove_commits_without_being_told(patch: pytest.MonkeyPatch) -> None:
    """Keep only the newest commit of an attempt's own choice, as trainings once did."""

    def prune(cluster: Cluster, rank_0: Process) -> list[str]:
        old = [uri for uri, item in cluster.commits.items() if item.step < rank_0.published_step]
        for uri in old:
            del cluster.commits[uri]
        return []

    patch.setattr(trainings, "_remove_released", prune)


def forget_to_look_again(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(decide_module, "_next_deadline", lambda context, status: context.now + 1e9)


def begin_from_nothing_when_no_commit_is_left(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(refused_commits, "find_problem", lambda status: "")


def obey_the_user_at_every_recovery(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(refused_commits, "is_choice_open", lambda status: status.resume_choice is not None)


@pytest.mark.parametrize(
    ("plant", "first_seed", "message"),
    [
        (keep_the_lease_of_a_stopped_attempt, 0, "may publish commits at the same time"),
        (
            launch_beside_running_pods,
            140,
            "is launched while",
        ),  # seed 147 is the first to find it
        (remove_commits_without_being_told, 0, "are gone"),
        (forget_to_look_again, 0, "the job does not end"),
    ],
)
def test_random_traces_find_a_planted_defect(
    plant: Callable[[pytest.MonkeyPatch], None], first_seed: int, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(monkeypatch)
    with pytest.raises(AssertionError, match=message):
        for seed in range(0 if SOAKING else first_seed, NUM_TRACES):
            play(draw_trace(random.Random(seed), {**SIZES, "quota": (None, 2, 3)}, QUEUE_FAULTS))


@pytest.mark.parametrize(
    ("plant", "first_seed"),
    [(begin_from_nothing_when_no_commit_is_left, 10), (obey_the_user_at_every_recovery, 5)],
)
def test_random_refusals_find_a_planted_defect(
    plant: Callable[[pytest.MonkeyPatch], None], first_seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(monkeypatch)
    with pytest.raises(AssertionError, match="begins from nothing, and the user did not give up"):
        for seed in range(0 if SOAKING else first_seed, NUM_TRACES):
            play(draw_trace(random.Random(seed), SIZES, REFUSALS))
