"""Every number that the model needs, with its unit and its source. docs/goodput.md prints this list."""

from __future__ import annotations

import dataclasses
from typing import Any

GPUS_PER_NODE = 8
REFERENCE_GPUS = 16_384
DAY_SECONDS = 86_400.0

_LLAMA = "Llama Team 2024, The Llama 3 Herd of Models"
_OURS = "assumption, not measured"


def assume(default: float, unit: str, meaning: str, source: str) -> Any:
    """Declare an assumption: a field with its unit, what it means, and where its value comes from."""
    return dataclasses.field(default=default, metadata={"unit": unit, "meaning": meaning, "source": source})


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Assumptions:
    """Inputs of a simulation besides the policy; the metadata of each field says what it means."""

    days: float = assume(54, "days", "simulated time", f"{_LLAMA}, section 3.3.4")
    crash_seconds: float = assume(
        4.2, "s", "from a fault of a GPU or of the software to the failed pod", "docs/demo.md, measured on CPU"
    )
    lease_seconds: float = assume(
        25,
        "s",
        "from a silent node to the stale Lease of its kubelet",
        "docs/operations.md: half of 40 s, read every 5 s",
    )
    not_ready_seconds: float = assume(
        50, "s", "from a silent node to the condition Ready=Unknown", "Kubernetes 1.32, default of the node controller"
    )
    watchdog_seconds: float = assume(
        600, "s", "from a hanging collective to the failed pods", "PyTorch, default timeout of NCCL process groups"
    )
    reaction_seconds: float = assume(
        2.2, "s", "from an event in the cluster to the operator's decision", "docs/benchmarks.md, 2,000 nodes"
    )
    stop_seconds: float = assume(3.0, "s", "from the deletion of pods to their end", "docs/demo.md, measured on CPU")
    rack_nodes: float = assume(
        2, "nodes", "nodes behind one rack switch; its failure takes them all", f"{_LLAMA}, section 3.3.1"
    )
    switch_fraction: float = assume(
        0.5, "", "share of the network failures that are a rack switch and not the cable of one node", _OURS
    )
    reset_fraction: float = assume(
        0.5, "", "share of the hardware failures that a reset and a health check repair, without a new part", _OURS
    )
    reset_hours: float = assume(1, "h", "mean repair time with a reset (exponential)", _OURS)
    replace_hours: float = assume(24, "h", "mean repair time with a new part (exponential)", _OURS)
    network_hours: float = assume(4, "h", "mean repair time of switches and cables (exponential)", _OURS)
    maintenance_hours: float = assume(2, "h", "mean time of a node's maintenance (exponential)", _OURS)
    spare_fraction: float = assume(
        1 / 64, "of the nodes", "spare nodes of the policies with spares; they fail as other nodes do", _OURS
    )
    parameters: float = assume(405e9, "", "parameters of the model", f"{_LLAMA}, table 3")
    global_samples: float = assume(
        2048, "samples", "global batch: 16 million tokens in sequences of 8,192", f"{_LLAMA}, table 4"
    )
    checkpoint_bytes_per_parameter: float = assume(
        14, "bytes", "weights in bf16, master weights and two moments in fp32", "DeepSpeed, mixed precision with Adam"
    )
    storage_bytes_per_second_per_gpu: float = assume(
        2e12 / 24_576,
        "bytes/s",
        "share of the storage's bandwidth for each GPU of the cluster",
        f"{_LLAMA}, section 3.3.1: 2 TB/s sustained for 24,576 GPUs",
    )
    reshard_plan_seconds_per_gpu: float = assume(
        49.2 / 16_384, "s", "index, plan and proof of a conversion, for each GPU", "docs/benchmarks.md, 16,384 ranks"
    )
    reshard_pod_seconds: float = assume(
        3.0, "s", "start and end of the reshard pods", "docs/demo.md: 3.2 s less 0.2 s of conversion"
    )
    reshard_pods: float = assume(64, "pods", "spec.reshard.parallelism, its largest value", _OURS)
    reshard_bytes_per_second: float = assume(
        1.14e9 / 1.24, "bytes/s", "one reshard pod", "docs/benchmarks.md, ZeRO-1 with fsync on 2 processors"
    )
    reshard_efficiency: float = assume(
        3.45 / 4, "", "speed-up for each of several reshard pods", "docs/benchmarks.md, 4 workers"
    )
    pods_per_second: float = assume(100, "pods/s", "rate at which the scheduler binds and kubelets start pods", _OURS)
    pod_seconds: float = assume(1.4, "s", "start of one pod", "docs/demo.md, measured on CPU")
    framework_seconds: float = assume(
        17.0, "s", "Python, torch and DeepSpeed until the checkpoint is read", "docs/demo.md, measured on CPU"
    )
    collective_seconds: float = assume(
        30, "s", "initialization of all collectives", "Jiang et al. 2024, MegaScale: below 30 s on over 10,000 GPUs"
    )
    dollars_per_gpu_hour: float = assume(2.5, "$", "price of one GPU for one hour", _OURS)

    @property
    def seconds(self) -> float:
        """Simulated time."""
        return self.days * DAY_SECONDS


def describe(assumptions: Assumptions) -> list[tuple[str, str, str, str]]:
    """Return a row for each assumption: name, value with unit, meaning, source."""
    return [
        (
            field.name,
            f"{getattr(assumptions, field.name):,.4g} {field.metadata['unit']}".strip(),
            field.metadata["meaning"],
            field.metadata["source"],
        )
        for field in dataclasses.fields(assumptions)
    ]
