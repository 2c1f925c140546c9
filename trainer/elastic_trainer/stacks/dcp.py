"""Model and optimizer in one DCP folder (`torch.distributed.checkpoint`), which loads at any number of ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any


def save_dcp(model: Any, optimizer: Any, folder: Path) -> None:
    """Write `model` and `optimizer`, the names under which a resharder looks for them; collective."""
    from torch.distributed.checkpoint import state_dict_saver
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict

    weights, states = get_state_dict(model, optimizer, options=StateDictOptions(cpu_offload=True))
    state_dict_saver.save({"model": weights, "optimizer": states}, checkpoint_id=folder)


def load_dcp(model: Any, optimizer: Any, folder: Path) -> None:
    """Read what `save_dcp` has written, at this or another number of ranks; collective."""
    from torch.distributed.checkpoint import state_dict_loader
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

    weights, states = get_state_dict(model, optimizer)
    state_dict_loader.load({"model": weights, "optimizer": states}, checkpoint_id=folder)
    set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=states)
