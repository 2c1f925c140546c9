"""Checks that a Hugging Face script and its attempt fit together."""

from __future__ import annotations

from elastic_trainer.errors import ConfigurationError
from reshard.topology import Topology


def check_data_parallel(topology: Topology, num_ranks: int, name: str) -> None:
    """Check that the script runs with the ranks of its attempt, all of which are data parallel.

    Args:
        topology: of the attempt.
        num_ranks: number of ranks with which the framework runs.
        name: of the framework's object, for messages.

    Raises:
        ConfigurationError: the numbers differ, or the attempt has another kind of parallelism.
    """
    if num_ranks != topology.world_size:
        raise ConfigurationError(
            f"the {name} runs with {num_ranks} ranks, this attempt has {topology.world_size}: start the script with "
            "elastic_trainer.launch, torchrun or accelerate launch, which set RANK and WORLD_SIZE"
        )
    if topology.dp != topology.world_size or topology.cp * topology.ep > 1:
        raise ConfigurationError(
            f"this attempt runs at {topology}; with the {name}, only data parallelism is supported: "
            "set tensor, pipeline, expert and context of spec.parallelism to [1]"
        )


def check_zero_stage(topology: Topology, stage: int) -> None:
    """Check that the DeepSpeed configuration has the ZeRO stage of the attempt.

    Raises:
        ConfigurationError: the stages differ.
    """
    if stage != topology.zero:
        raise ConfigurationError(
            f"the DeepSpeed configuration has ZeRO stage {stage}, this attempt {topology.zero}: "
            "set spec.parallelism.zeroStage (or zero in ETJ_TOPOLOGY) to the stage of the configuration"
        )
