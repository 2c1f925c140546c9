"""Graces, deadlines and intervals of the operator; those of one job are in `spec.recovery`."""

from __future__ import annotations

import dataclasses
import inspect
import re
from typing import Annotated

from pydantic import Field

Seconds = Annotated[float, Field(ge=0.001, le=31_536_000, allow_inf_nan=False)]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Timeouts:
    """Graces, deadlines and intervals, in seconds.

    Attributes:
        heartbeat_seconds: how often rank 0 renews its Lease; three missed ones are a signal.
        node_lease_floor_seconds: a node's Lease is stale after half of its duration, but never before this.
        stop_grace_seconds: grace period of pods of a stopped attempt; they have nothing left to save.
        image_seconds: how long a pod may fail to start its container.
        startup_seconds: how long an attempt may take from when all pods have a node until its first step.
        unschedulable_seconds: how long a pod may find no node before the operator looks for another plan.
        device_seconds: how long a node may offer fewer accelerators than its pods hold, but not none.
        device_plugin_seconds: how long a node may offer no accelerator at all while its pods finish no step.
        planned_seconds: how long a cordon, a taint or a health monitor's report must last before jobs leave the node.
        node_stable_seconds: how long a lost node has to be Ready before it is used again.
        progress_seconds: shortest time between two status writes that change only the progress; longer beyond 200 jobs.
        resync_seconds: interval between two passes over a job if nothing happens to it.
        reshard_backoff_seconds: wait before the first retry of a reshard Job; doubles each time, up to 300.
    """

    heartbeat_seconds: Seconds = 5.0
    node_lease_floor_seconds: Seconds = 5.0
    stop_grace_seconds: Annotated[int, Field(ge=0, le=86_400)] = 2
    image_seconds: Seconds = 120.0
    startup_seconds: Seconds = 1800.0
    unschedulable_seconds: Seconds = 60.0
    device_seconds: Seconds = 10.0
    device_plugin_seconds: Seconds = 300.0
    planned_seconds: Seconds = 10.0
    node_stable_seconds: Seconds = 30.0
    progress_seconds: Seconds = 10.0
    resync_seconds: Seconds = 30.0
    reshard_backoff_seconds: Seconds = 10.0

    @property
    def heartbeat_stale_seconds(self) -> float:
        """Age of a heartbeat that counts as a signal."""
        return 3 * self.heartbeat_seconds


def describe_timeouts() -> dict[str, str]:
    """Return the description of each attribute of `Timeouts` by name, for `--help`.

    The descriptions come from the docstring; the result is empty if Python runs with `-OO`.
    """
    return dict(re.findall(r"^    (\w+): (.+?)\.?$", inspect.getdoc(Timeouts) or "", flags=re.MULTILINE))
