"""Import DeepSpeed without what this example never uses: a restart waits for every second of it, in every rank.

Two things at DeepSpeed's start cost more than the rest together (0.19.8, CPU):

* a shared-memory all-reduce for CPUs is compiled, a minute in a fresh container; gloo does as well;
* the Muon optimizer is imported to compare types with it, and its decorators pull in torch's whole compiler.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable
from typing import Any

os.environ.setdefault("DS_ACCELERATOR", "cpu")

import deepspeed
import torch

__all__ = ["deepspeed"]


def _leave_as_it_is(*_arguments: Any, **_options: Any) -> Callable[[Any], Any]:
    return lambda function: function


def _import_without_compiling(module: str) -> None:
    compiler, torch.compile = torch.compile, _leave_as_it_is  # type: ignore[assignment]
    try:
        importlib.import_module(module)
    finally:
        torch.compile = compiler


deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
_import_without_compiling("deepspeed.runtime.zero.muon.muon_optimizer")
