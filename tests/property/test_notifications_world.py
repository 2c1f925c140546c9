"""Notifications of a job whose nodes and operators fail in any order: every fact is told once, and the end last."""

from __future__ import annotations

import collections
import copy
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elastic_operator.api.status import Status
from elastic_operator.api.status_reader import read_status
from elastic_operator.manifests.attempt import JobRef
from elastic_operator.reconcile.notifications.notification import (
    Notification,
    NotificationKind,
    find_notifications,
    find_recorded,
)
from tests.property.cluster_model.traces import finish, happen
from tests.property.cluster_model.world import World
from tests.property.test_metrics_world import happenings
from tests.randomness import examples

JOB = JobRef(name="gpt", namespace="team", uid="u1")


class TellingWorld(World):
    """World that keeps the notifications of every written status."""

    def __init__(self) -> None:
        super().__init__()
        self.told: list[Notification] = []
        self.ended: set[tuple[int, float | None]] = set()

    def operate(self, crash_after: int | None = None) -> None:
        before = copy.deepcopy(self.status)
        super().operate(crash_after)
        if before == self.status:
            return
        old, new = read_status(before).status, read_status(self.status).status
        self.told += find_notifications(JOB, old, new)
        self.ended |= {
            (item.from_attempt, item.first_step_time) for item in new.recoveries if item.first_step_time is not None
        }
        # Whoever takes over now finds facts that were told, and no others.
        assert {item.id for item in find_recorded(JOB, new, since=-1.0)} <= {item.id for item in self.told}


@pytest.mark.slow
@settings(max_examples=examples(20))
@given(happenings(st.one_of(st.none(), st.integers(0, 12))))
def test_every_fact_is_told_once_by_whichever_operator_writes_it(events: list[tuple[Any, ...]]) -> None:
    world = TellingWorld()
    happen(world, events)
    finish(world)
    assert max(collections.Counter(item.id for item in world.told).values()) == 1
    kinds = collections.Counter(item.kind for item in world.told)
    assert kinds[NotificationKind.COMPLETE] == 1
    assert world.told[-1].kind is NotificationKind.COMPLETE
    assert kinds[NotificationKind.RECOVERED] + kinds[NotificationKind.SCALED_UP] == len(world.ended)
    assert all(item.text.isprintable() and item.data["text"] == item.text for item in world.told)


def test_a_job_that_only_trains_tells_that_it_is_complete() -> None:
    world = TellingWorld()
    finish(world)
    assert [item.kind for item in world.told] == [NotificationKind.COMPLETE]
    assert find_notifications(JOB, Status(), Status()) == ()
