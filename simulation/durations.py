"""How long the parts of a recovery and a save take: measured figures and a model of the storage. Pure."""

from __future__ import annotations

from reshard.topology import Topology
from simulation.assumptions import Assumptions

WEIGHT_BYTES = 2
"""Bytes of a weight in bf16; every data-parallel rank reads the weights of its stage."""


def checkpoint_bytes(assumptions: Assumptions) -> float:
    """Return the size of one checkpoint."""
    return assumptions.parameters * assumptions.checkpoint_bytes_per_parameter


def save_seconds(num_gpus: int, assumptions: Assumptions) -> float:
    """Return the time for which a save stops the training: all bytes at the bandwidth of `num_gpus` GPUs."""
    return checkpoint_bytes(assumptions) / (num_gpus * assumptions.storage_bytes_per_second_per_gpu)


def load_seconds(topology: Topology, assumptions: Assumptions) -> float:
    """Return the time in which every rank reads its files: its weights, and its partition of the optimizer (ZeRO-1)."""
    weights = assumptions.parameters / (topology.tp * topology.pp)
    partition = (assumptions.checkpoint_bytes_per_parameter - WEIGHT_BYTES) / topology.dp
    return weights * (WEIGHT_BYTES + partition) / assumptions.storage_bytes_per_second_per_gpu


def start_seconds(topology: Topology, assumptions: Assumptions) -> float:
    """Return the time from the moment at which all pods run to the beginning of the first step."""
    return assumptions.framework_seconds + assumptions.collective_seconds + load_seconds(topology, assumptions)


def schedule_seconds(num_pods: int, assumptions: Assumptions) -> float:
    """Return the time until all pods of an attempt run."""
    return assumptions.pod_seconds + num_pods / assumptions.pods_per_second


def reshard_seconds(num_gpus: int, assumptions: Assumptions) -> float:
    """Return the time of a conversion in a cluster of `num_gpus` GPUs: plan, then read and write every byte once.

    Either the reshard pods or the storage is the limit; the storage carries every byte twice.
    """
    num_bytes = checkpoint_bytes(assumptions)
    pods = assumptions.reshard_pods * assumptions.reshard_bytes_per_second * assumptions.reshard_efficiency
    storage = num_gpus * assumptions.storage_bytes_per_second_per_gpu / 2
    return assumptions.reshard_plan_seconds_per_gpu * num_gpus + num_bytes / min(pods, storage)
