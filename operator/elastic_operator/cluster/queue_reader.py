"""Reads what Kueue says about a job: its Workloads, the flavors that are assigned to them, its priority."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from http import HTTPStatus
from typing import Any

from elastic_operator.api.conditions import Type, find
from elastic_operator.client.api_client import KubernetesClient
from elastic_operator.client.api_errors import AnswerError, ApiError
from elastic_operator.client.resources import FLAVOR, QUEUE_PRIORITY, ResourceKind
from elastic_operator.manifests.workload import priority_class_of, queue_of
from elastic_operator.observed.queueing.placement import Placement, read_flavor
from elastic_operator.observed.queueing.workloads import QueueView, WorkloadView, select_own_workloads
from elastic_operator.reconcile.record import Record

KNOWN_SECONDS = 60.0
"""Time for which a flavor or a priority class counts as known; administrators rarely change one."""


def is_in_queue(record: Record) -> bool:
    """Return whether a job is in a queue, or was in one and may still hold quota."""
    return bool(queue_of(record.job)) or find(record.status.conditions, Type.QUOTA_RESERVED) is not None


def refused_view(error: AnswerError) -> QueueView | None:
    """Return what is known after a list of Workloads failed: None if Kueue is not installed.

    Raises:
        AnswerError: the error is a temporary one.
    """
    if error.code == HTTPStatus.NOT_FOUND:
        return None
    if error.code != HTTPStatus.FORBIDDEN:
        raise error
    return QueueView(
        problem=(
            f"the operator may not read Workloads: {error}; grant it the rights on "
            "workloads.kueue.x-k8s.io that the chart grants"
        )
    )


class QueueReader:
    """Adds to a job's Workloads what they refer to; flavors and priority classes are shared by all jobs."""

    def __init__(self, client: KubernetesClient) -> None:
        self._client = client
        self._known: dict[tuple[str, str], tuple[Mapping[str, Any] | None, float]] = {}

    async def view(self, record: Record, workloads: Iterable[WorkloadView]) -> QueueView:
        """Return what Kueue says about a job.

        Args:
            record: the resource.
            workloads: Workloads with the label of the job; those of other owners are left out.
        """
        own = select_own_workloads(workloads, record.job.uid)
        flavors: dict[str, Placement] = {}
        problems: list[str] = []
        for name in dict.fromkeys(name for item in own if item.has_quota for name in item.flavors):
            flavor = await self._get(FLAVOR, name)
            try:
                if flavor is None:
                    raise ValueError("expected the flavor that is assigned to the job, found none")
                flavors[name] = read_flavor(flavor)
            except ValueError as error:
                problems.append(f"ResourceFlavor {name}: {error}")
        priority, refusal, class_name = None, "", priority_class_of(record.job)
        if class_name:
            found = await self._get(QUEUE_PRIORITY, class_name)
            value = found.get("value") if found is not None else None
            if isinstance(value, int) and not isinstance(value, bool):
                priority = value
            else:
                refusal = f"the job names WorkloadPriorityClass {class_name}, which does not exist: create it"
        problem = "; ".join(problems)
        return QueueView(workloads=own, flavors=flavors, priority=priority, problem=problem, refusal=refusal)

    async def _get(self, kind: ResourceKind, name: str) -> Mapping[str, Any] | None:
        """Read a cluster-scoped object, or return what was read in the last KNOWN_SECONDS; None if there is none."""
        now = time.monotonic()
        known = self._known.get((kind.plural, name))
        if known is not None and known[0] is not None and now - known[1] < KNOWN_SECONDS:
            return known[0]
        try:
            found: Mapping[str, Any] | None = await self._client.get(kind, name)
        except ApiError as error:
            if error.code != HTTPStatus.NOT_FOUND:
                raise
            found = None
        self._known[kind.plural, name] = (found, now)
        return found
