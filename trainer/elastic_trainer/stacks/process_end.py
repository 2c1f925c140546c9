"""The end of a training process: no thread of torch.distributed may be left."""

from __future__ import annotations

import sys


def destroy_process_group() -> None:
    """Destroy the script's process group, if there is one; for `atexit`.

    A process that ends while a gloo thread still holds a tensor dies of SIGABRT and loses its exit code. If the script
    has failed, other ranks may wait for this one for ever, and it must not wait for them.
    """
    from torch import distributed

    if getattr(sys, "last_type", None) is not None:
        return
    if distributed.is_available() and distributed.is_initialized():
        distributed.destroy_process_group()
