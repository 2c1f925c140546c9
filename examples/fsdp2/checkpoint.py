"""Checkpoints of plain.py with torch.distributed.checkpoint; elastic.py does not need this module."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler


class Checkpoints:
    """Folders `step-N` below a root; the newest complete one is loaded at the start.

    Attributes:
        step: steps done.
    """

    def __init__(self, root: str, model: nn.Module, optimizer: Optimizer, scheduler: LRScheduler) -> None:
        self._root = Path(root)
        self._parts = (model, optimizer, scheduler)
        complete = sorted(path.parent for path in self._root.glob("step-*/.metadata"))
        if complete:
            load({"train": self}, checkpoint_id=complete[-1])
        self.step = scheduler.last_epoch

    def save(self, step: int) -> None:
        save({"train": self}, checkpoint_id=self._root / f"step-{step:08d}")

    def state_dict(self) -> dict[str, Any]:
        model, optimizer, scheduler = self._parts
        model_state, optimizer_state = get_state_dict(model, optimizer)
        return {"model": model_state, "optimizer": optimizer_state, "scheduler": scheduler.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        model, optimizer, scheduler = self._parts
        set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
        scheduler.load_state_dict(state["scheduler"])
