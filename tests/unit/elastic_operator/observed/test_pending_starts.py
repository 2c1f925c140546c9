"""Which jobs are about to start from a folder, and which commits stay for them."""

from __future__ import annotations

import math
from typing import Any

import pytest

from elastic_operator.api.claim_path import Start
from elastic_operator.api.status import Current, Phase, ReshardStatus, Resume, StartedFrom, Status
from elastic_operator.observed.pending_starts import (
    MAX_AWAITED,
    Protection,
    find_held,
    find_protection,
    find_start,
    read_folder,
)
from reshard.topology import Topology

NOW = 1_800_000_000.0
CONVERTED = StartedFrom(source="/checkpoint/gpt", step=3, samples=3)


def converting(*, ready: bool = False) -> Current:
    resume = Resume(uri="/checkpoint/b/a2/step-start", source="/checkpoint/gpt", external=True, ready=ready)
    return Current(topology=Topology(dp=2), num_nodes=1, gpus_per_node=2, resume=resume)


def reshard(attempt: int = 2, retry_time: float | None = None) -> ReshardStatus:
    return ReshardStatus(attempt=attempt, retry_time=retry_time)


@pytest.mark.parametrize(
    ("status", "reads_after"),
    [
        (Status(), math.inf),
        (Status(phase=Phase.SUSPENDED), math.inf),
        (Status(phase=Phase.WAITING, reason="Unschedulable"), math.inf),
        (Status(current=converting(), attempt=2), 0.0),
        (Status(current=converting(), attempt=2, phase=Phase.RESHARDING, reason="StartFrom"), 0.0),
        (Status(current=converting(), attempt=2, phase=Phase.RESHARDING, reason="Unschedulable"), math.inf),
        (Status(current=converting(), attempt=2, phase=Phase.RESHARDING, reason="PodsRefused"), math.inf),
        (Status(current=converting(), attempt=2, phase=Phase.RESHARDING, reason="ContainerCannotStart"), math.inf),
        # The reason is of the phase before.
        (Status(current=converting(), attempt=2, phase=Phase.WAITING, reason="Unschedulable"), 0.0),
        (Status(current=converting(), attempt=2, reshard=reshard(retry_time=NOW)), NOW),
        (Status(current=converting(), attempt=2, reshard=reshard(attempt=1, retry_time=NOW)), 0.0),
        (Status(current=converting(), attempt=2, started_from=CONVERTED), 0.0),
        (Status(current=converting(ready=True), attempt=2, started_from=CONVERTED), None),
        (Status(started_from=CONVERTED), None),
        (Status(phase=Phase.FAILED), None),
    ],
)
def test_a_job_reads_from_when_its_reshard_pod_may_run_until_it_has_started(
    status: Status, reads_after: float | None
) -> None:
    found = find_start("b", "ckpt", "gpt", status)
    assert (found.reads_after if found is not None else None) == reads_after
    assert find_start("b", "ckpt", "", status) is None


@pytest.mark.parametrize(
    ("checkpoint", "found"),
    [
        ({"claimName": "ckpt", "startFrom": "./gpt/a1"}, ("ckpt", "gpt/a1")),
        ({"claimName": "ckpt", "startFrom": "gpt"}, ("ckpt", "gpt")),
        ({"claimName": "ckpt", "startFrom": "../gpt"}, ("", "")),
        ({"claimName": "ckpt", "startFrom": 5}, ("", "")),
        ({"startFrom": "gpt"}, ("", "")),
        ({"claimName": "ckpt"}, ("", "")),
        (5, ("", "")),
        (None, ("", "")),
    ],
)
def test_the_folder_of_an_invalid_spec_is_read_if_it_is_valid_by_itself(
    checkpoint: Any, found: tuple[str, str]
) -> None:
    assert read_folder({"checkpoint": checkpoint}) == found


@pytest.mark.parametrize(
    ("folder", "root", "folders"),
    [
        ("gpt", "gpt", {""}),
        ("gpt/a1/step-00000005", "gpt", {"a1/step-00000005"}),
        ("gpt/a1", "gpt", {"a1"}),
        ("runs", "runs/gpt", {""}),
        ("a1/step-00000005", "", {"a1/step-00000005"}),
        ("gpt2", "gpt", set()),
        ("gp", "gpt", set()),
    ],
)
def test_a_start_protects_the_part_of_the_folder_that_it_names(folder: str, root: str, folders: set[str]) -> None:
    start = Start(job="b", claim="ckpt", folder=folder)
    found = find_protection([start], "ckpt", root, NOW)
    assert found == Protection(folders=frozenset(folders), jobs=("b",) if folders else ())
    assert find_protection([start], "other", root, NOW) == Protection()


@pytest.mark.parametrize(
    ("reads_after", "is_read"), [(0.0, True), (NOW, True), (NOW + 1, False), (math.inf, False)]
)  # fmt: skip
def test_a_conversion_that_may_run_protects_everything(reads_after: float, is_read: bool) -> None:
    waiting = Start(job="a", claim="ckpt", folder="gpt")
    reading = Start(job="b", claim="ckpt", folder="gpt/a1", reads_after=reads_after)
    found = find_protection([reading, waiting], "ckpt", "gpt", NOW)
    assert (found.is_read, found.jobs) == (is_read, ("a", "b"))


def test_everything_is_protected_while_the_starts_are_not_known() -> None:
    assert find_protection(None, "ckpt", "gpt", NOW) == Protection(is_read=True)


def names(attempt: int, *steps: int) -> list[str]:
    return [f"a{attempt}/step-{step:08d}" for step in steps]


OLD = [*names(1, *range(1, 21)), *names(2, *range(21, 41))]
NEWEST = names(3, 41, 42, 43)


@pytest.mark.parametrize(
    ("protection", "held"),
    [
        (Protection(), []),
        (Protection(is_read=True), OLD),
        (Protection(folders=frozenset({""})), OLD[-MAX_AWAITED:]),
        (Protection(folders=frozenset({"a1/step-00000003"})), [OLD[2], *OLD[-MAX_AWAITED + 1 :]]),
        (Protection(folders=frozenset({"a1/step-00000003/sub"})), [OLD[2], *OLD[-MAX_AWAITED + 1 :]]),
        # The newest commit of an attempt's folder is read.
        (Protection(folders=frozenset({"a1"})), [OLD[19], *OLD[-MAX_AWAITED + 1 :]]),
        (Protection(folders=frozenset({"a3"})), OLD[-MAX_AWAITED:]),
        # However many are named: the newest stay.
        (Protection(folders=frozenset(OLD)), OLD[-MAX_AWAITED:]),
    ],
)
def test_what_stays_for_jobs_that_wait_is_bounded_and_holds_what_they_name(
    protection: Protection, held: list[str]
) -> None:
    assert find_held(protection, NEWEST, OLD) == set(held)
