"""Checkpoints of `torch.distributed.checkpoint` (DCP), which load at any number of ranks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from elastic_trainer.session import Session

Save = Callable[[Mapping[str, Any], Path], object]
"""Saves a state dict to a folder; returns a future if the save goes on in the background."""


def make_save(session: Session) -> Save:
    """Return the function with which a stack saves its state dicts; collective.

    If the session saves asynchronously, this is `async_save`: the training waits for a copy of the tensors, and a
    thread writes that to the node. The copies are kept for the next save, in pinned memory where there is CUDA or ROCm;
    torch 2.11 cannot keep them. The ranks coordinate the write through a gloo group of their own, because the training
    uses the default group.
    A save that the session wants on the volume at once is synchronous.
    """
    from torch import distributed
    from torch.distributed.checkpoint import state_dict_saver

    def save_now(states: Mapping[str, Any], folder: Path) -> object:
        state_dict_saver.save(dict(states), checkpoint_id=folder)
        return None

    if not session.settings.async_saves:
        return save_now
    group = distributed.new_group(backend="gloo")
    kept = _make_stager() if _can_reuse_stagers() else None
    volume = session.settings.checkpoint_root

    def save(states: Mapping[str, Any], folder: Path) -> object:
        if folder.is_relative_to(volume):
            return save_now(states, folder)
        stager = kept or _make_stager()
        return state_dict_saver.async_save(dict(states), checkpoint_id=folder, process_group=group, async_stager=stager)

    return save


def _make_stager() -> Any:
    """Return what copies a state dict to the CPU, in memory that it keeps for the next copy."""
    import torch
    from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

    return DefaultStager(
        StagingOptions(
            use_pinned_memory=torch.cuda.is_available(),
            use_shared_memory=False,
            use_async_staging=False,
            use_non_blocking_copy=torch.accelerator.is_available(),
        )
    )


def _can_reuse_stagers() -> bool:
    """Try it: a DefaultStager of torch 2.11 raises KeyError at its second use (pytorch issue 183413)."""
    stager = _make_stager()
    stager.stage({})
    try:
        stager.stage({})
    except KeyError:
        return False
    return True


def save_dcp(model: Any, optimizer: Any, folder: Path, save: Save) -> object:
    """Write `model` and `optimizer`, the names under which a resharder looks for them; collective."""
    from torch.distributed.checkpoint.state_dict import get_state_dict

    weights, states = get_state_dict(model, optimizer)
    return save({"model": weights, "optimizer": states}, folder)


def load_dcp(model: Any, optimizer: Any, folder: Path) -> None:
    """Read what `save_dcp` has written, at this or another number of ranks; collective."""
    from torch.distributed.checkpoint import state_dict_loader
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

    weights, states = get_state_dict(model, optimizer)
    state_dict_loader.load({"model": weights, "optimizer": states}, checkpoint_id=folder)
    set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=states)
