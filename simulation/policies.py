"""Policies that are compared, as specs of an `ElasticTrainingJob` and a number of spare nodes."""

from __future__ import annotations

import dataclasses
from typing import Any

from elastic_operator.api.spec import Spec, parse_spec
from elastic_operator.observed.capacity import Capacity, NodeCapacity, Pool
from elastic_operator.planning import planner
from elastic_operator.reconcile.goodput import suggest_interval_seconds
from simulation.assumptions import GPUS_PER_NODE, Assumptions
from simulation.durations import save_seconds
from simulation.trace import failures_per_node_second

RESOURCE = "nvidia.com/gpu"
NEVER_SECONDS = 604_800
"""Largest `scaleUpStableSeconds`: the job practically never grows by itself."""

PIPELINES = tuple(range(8, 17))
"""Numbers of pipeline stages in the spec, around the 16 of Llama 3."""

DIVISIBLE_BATCH = 2016
"""A batch near that of Llama 3 with many divisors: 2^5 * 3^2 * 7."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """What the job may do when nodes are lost.

    Attributes:
        shrinks: it may run on fewer nodes, with another topology; else it waits until all nodes are there.
        grows: it restarts on more nodes as soon as they have returned.
        has_spares: the cluster has spare nodes.
        global_samples: global batch; None for that of the assumptions.
    """

    name: str
    shrinks: bool = False
    grows: bool = False
    has_spares: bool = False
    global_samples: int | None = None

    def num_spares(self, num_nodes: int, assumptions: Assumptions) -> int:
        """Return the number of spare nodes in a cluster of `num_nodes` others."""
        return max(1, round(num_nodes * assumptions.spare_fraction)) if self.has_spares else 0


POLICIES = (
    Policy(name="same size, wait for the repair"),
    Policy(name="shrink", shrinks=True),
    Policy(name="shrink and grow", shrinks=True, grows=True),
    Policy(
        name=f"shrink and grow, batch of {DIVISIBLE_BATCH:,}",
        shrinks=True,
        grows=True,
        global_samples=DIVISIBLE_BATCH,
    ),
    Policy(name="same size, spares", has_spares=True),
    Policy(name="shrink and grow, spares", shrinks=True, grows=True, has_spares=True),
)


def make_spec(policy: Policy, num_nodes: int, assumptions: Assumptions) -> Spec:
    """Build the job's spec: Llama 3 405B on `num_nodes` nodes."""
    batch = policy.global_samples or int(assumptions.global_samples)
    wire: dict[str, Any] = {
        "accelerator": {"resource": RESOURCE, "perNode": [GPUS_PER_NODE], "performance": {}},
        "nodes": {"min": 1 if policy.shrinks else num_nodes, "max": num_nodes},
        "parallelism": {"tensor": [GPUS_PER_NODE], "pipeline": list(PIPELINES)},
        "batch": {"globalSamples": batch},
        "model": {
            "parameters": assumptions.parameters,
            "layers": 126,
            "hiddenSize": 16_384,
            "attentionHeads": 128,
            "keyValueHeads": 8,
            "vocabSize": 128_256,
            "sequenceLength": 8192,
        },
        "checkpoint": {"claimName": "checkpoints", "intervalSeconds": interval_seconds(num_nodes, assumptions)},
        "reshard": {"mode": "Materialize", "parallelism": int(assumptions.reshard_pods)},
        "recovery": {} if policy.grows else {"scaleUpStableSeconds": NEVER_SECONDS},
        "template": {"spec": {"containers": [{"name": "train", "image": "train"}]}},
    }
    return parse_spec(wire)


def best_on_all_nodes(spec: Spec, num_nodes: int) -> planner.Candidate:
    """Return what the planner chooses while all nodes work.

    Raises:
        ValueError: it finds nothing.
    """
    pool = Pool(NodeCapacity(name=str(node), free=GPUS_PER_NODE) for node in range(num_nodes))
    best = planner.best(spec, Capacity(pool=pool))
    if best is None:
        raise ValueError(f"expected a topology for {num_nodes} nodes, found none: change the batch or the pipelines")
    return best


def step_seconds(candidate: planner.Candidate) -> float:
    """Return the planner's estimate of the time of a step.

    Raises:
        ValueError: there is none.
    """
    if candidate.seconds is None:
        raise ValueError("expected spec.model and spec.accelerator.performance, from which the step time follows")
    return candidate.seconds


def interval_seconds(num_nodes: int, assumptions: Assumptions) -> int:
    """Return the checkpoint interval that the operator suggests for this cluster (Daly 2006)."""
    mtbf = 1 / (failures_per_node_second() * num_nodes)
    save = save_seconds(num_nodes * GPUS_PER_NODE, assumptions)
    return max(1, round(suggest_interval_seconds(save, mtbf)))
