"""The few agreements that ranks need at a step boundary, over a CPU group of their own.

torch.distributed is imported only where there is more than one process.
"""

from __future__ import annotations

from typing import Any


class Collective:
    """All ranks of the attempt. With one process everything is local."""

    def __init__(self, *, rank: int, world_size: int) -> None:
        self.rank = rank
        self.world_size = world_size
        self._group: Any = None

    def connect(self) -> None:
        """Make the group; torch.distributed must be initialised. gloo, so that the GPU's queue is left alone."""
        if self.world_size > 1:
            from torch import distributed

            self._group = distributed.new_group(backend="gloo")

    def broadcast(self, value: int) -> int:
        """Rank 0's value, on every rank."""
        if self.world_size == 1:
            return value
        import torch
        from torch import distributed

        tensor = torch.tensor([value], dtype=torch.int64)
        distributed.broadcast(tensor, src=0, group=self._group)
        return int(tensor.item())

    def gather(self, value: object) -> list[Any]:
        """Every rank's value, by rank, on every rank."""
        if self.world_size == 1:
            return [value]
        from torch import distributed

        values: list[Any] = [None] * self.world_size
        distributed.all_gather_object(values, value, group=self._group)
        return values

    def close(self) -> None:
        """Give the group back, and wait for its threads; harmless where there is none.

        gloo's threads let go of the last agreement's tensors a moment after it is done. A process that is at its
        end by then dies of SIGABRT ("terminate called without an active exception": PyTorch pull request 179291),
        in place of the exit code that tells the operator how it ended.
        """
        group, self._group = self._group, None
        if group is not None:
            from torch import distributed

            distributed.destroy_process_group(group)
