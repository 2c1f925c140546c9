"""One attempt of the simulated job, and what its manifest says to the scheduler."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from elastic_operator.manifests.attempt import JobRef
from reshard.contract import TrainerPhase
from reshard.topology import Topology
from simulation.training import Progress, Training

JOB = JobRef(name="llm", namespace="research", uid="uid-llm")
START = 1_800_000_000.0
"""The clock of the simulation begins here, in seconds since the epoch."""

LEASE_STALE_SECONDS = 20.0
"""Age of a kubelet's Lease that is a signal: half of its duration."""


@dataclasses.dataclass(slots=True, kw_only=True)
class Attempt:
    """The training Job of one attempt and its pods.

    Attributes:
        resume_step: step of the commit from which it resumes.
        training: its progress, once it makes steps.
        halted: what it had done when a failure or a drain ended its steps; None while it runs.
        request: the operator's request on the Lease.
    """

    number: int
    uid: str
    topology: Topology
    num_nodes: int
    resume_step: int
    training: Training | None = None
    halted: Progress | None = None
    phase: TrainerPhase = TrainerPhase.STARTING
    request: str = ""
    released: str = ""
    job_exists: bool = True
    job_failed: bool = False
    lease_exists: bool = True
    beats_until: float | None = None

    @property
    def name(self) -> str:
        """Name of all objects of the attempt."""
        return f"{JOB.name}-a{self.number}"


def no_progress(attempt: Attempt) -> Progress:
    """Return what an attempt that has made no step has done."""
    return Progress(steps=attempt.resume_step, committed=None, saving_seconds=0.0, step_time=None)


def avoided_nodes(pod: Mapping[str, Any]) -> frozenset[str]:
    """Return the nodes that the operator excludes through the node affinity of a pod."""
    affinity = (pod.get("affinity") or {}).get("nodeAffinity") or {}
    terms = (affinity.get("requiredDuringSchedulingIgnoredDuringExecution") or {}).get("nodeSelectorTerms") or [{}]
    return frozenset(value for field in terms[0].get("matchFields") or () for value in field["values"])
