"""The end of a training process: no thread of torch.distributed may be left."""

from __future__ import annotations

import contextlib
import sys
from datetime import timedelta

_PATIENCE = timedelta(seconds=10)


def destroy_process_group() -> None:
    """Destroy the script's process group, if there is one; for `atexit`.

    A process that ends while a gloo thread still holds a tensor dies of SIGABRT and loses its exit code. A thread puts
    back the tensors of one operation before it begins the next one, so the ranks meet once more, and wait a few seconds
    for each other. If the script has failed, other ranks may wait for this one for ever, and it must not wait for them.
    """
    from torch import distributed

    if getattr(sys, "last_type", None) is not None:
        return
    if distributed.is_available() and distributed.is_initialized():
        if distributed.get_backend() == "gloo":
            with contextlib.suppress(RuntimeError):  # another rank has ended
                distributed.monitored_barrier(timeout=_PATIENCE)
        distributed.destroy_process_group()
