"""Collective operations between the ranks at step boundaries, over a CPU process group of their own.

torch.distributed is imported only if there is more than one process.
"""

from __future__ import annotations

import contextlib
from typing import Any

_LEAVE = "elastic_trainer/leave"
"""Key of the ranks' common store; a rank that was asked to leave sets it."""


class Collective:
    """Broadcast and gather among all ranks of the attempt. With one process all operations are local."""

    def __init__(self, *, rank: int, world_size: int) -> None:
        self.rank = rank
        self.world_size = world_size
        self._group: Any = None
        self._store: Any = None

    def connect(self) -> None:
        """Create the process group; torch.distributed must be initialised.

        The backend is gloo, so that these operations do not wait in the GPU's queue.
        """
        if self.world_size > 1:
            from torch import distributed

            self._group = distributed.new_group(backend="gloo")
            with contextlib.suppress(Exception):  # not every way to initialise torch.distributed has a store
                self._store = distributed.distributed_c10d._get_default_store()

    def announce_leaving(self) -> None:
        """Tell rank 0, outside of any collective operation, that this rank was asked to leave."""
        if self._store is not None:
            self._store.set(_LEAVE, str(self.rank))

    def is_anyone_leaving(self) -> bool:
        """Return whether a rank has announced that it was asked to leave; one request to the store."""
        if self._store is None:
            return False
        try:
            return bool(self._store.check([_LEAVE]))
        except Exception:
            self._store = None  # ask it no more: the operator tells rank 0, too
            return False

    def broadcast(self, value: int) -> int:
        """Return rank 0's value on every rank."""
        if self.world_size == 1:
            return value
        import torch
        from torch import distributed

        tensor = torch.tensor([value], dtype=torch.int64)
        distributed.broadcast(tensor, src=0, group=self._group)
        return int(tensor.item())

    def gather(self, value: object) -> list[Any]:
        """Return the values of all ranks, in the order of ranks, on every rank."""
        if self.world_size == 1:
            return [value]
        from torch import distributed

        values: list[Any] = [None] * self.world_size
        distributed.all_gather_object(values, value, group=self._group)
        return values

    def close(self) -> None:
        """Destroy the process group, and wait for its threads; does nothing without a group.

        gloo's threads release the tensors of the last operation a moment after it has finished. A process that exits
        before that dies of SIGABRT ("terminate called without an active exception": PyTorch pull request 179291), and
        the operator does not get its exit code.
        """
        self._store = None
        group, self._group = self._group, None
        if group is not None:
            from torch import distributed

            distributed.destroy_process_group(group)
