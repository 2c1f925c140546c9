"""FSDP2 and tensor parallelism on a DeviceMesh, with checkpoints of torch.distributed.checkpoint (DCP).

    distributed.init_process_group()
    run, mesh = start(global_batch=512)
    ...                                        # parallelize_module(model, mesh["tp"], ...), fully_shard
    attach(run, model, optimizer, scheduler)
    for step in run.steps(num_steps):
        ...
        run.report(loss)

DCP loads a checkpoint at any degrees, so a commit of another topology needs no reshard.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from elastic_trainer.session import Session
from elastic_trainer.stacks.dcp import make_save
from elastic_trainer.stacks.loop import Run
from reshard.contract import DCP
from reshard.topology import Topology


def start(*, global_batch: int = 0, micro_batch: int = 1, tp: int = 1, seed: int = 0, keep: int = 3) -> tuple[Run, Any]:
    """Start the attempt, and make the device mesh of its topology; torch.distributed must be initialised.

    Args:
        global_batch: samples per optimizer step, if the operator sets none; by default one micro batch per replica.
        micro_batch: samples per micro batch, if the operator sets none.
        tp: tensor parallel degree, if the operator sets no topology.
        seed: see `Run`.
        keep: see `Session`.

    Returns:
        The run, and a DeviceMesh with the axes of `mesh_shape`.
    """
    from torch.distributed.device_mesh import init_device_mesh

    session = Session.from_env(keep=keep, tp=tp, zero=3)
    plan = session.batch_plan(
        global_batch=global_batch or micro_batch * session.topology.num_replicas, micro_batch=micro_batch
    )
    session.start()
    shape = mesh_shape(session.topology)
    mesh = init_device_mesh(device_type(), tuple(shape.values()), mesh_dim_names=tuple(shape))
    return Run(session, plan, seed=seed), mesh


def mesh_shape(topology: Topology) -> dict[str, int]:
    """Return the axes of the device mesh, slowest first: always dp and tp, pp and cp if their degree is above 1.

    >>> mesh_shape(Topology(dp=2, tp=4))
    {'dp': 2, 'tp': 4}
    """
    shape = {"pp": topology.pp, "dp": topology.num_replicas, "cp": topology.cp, "tp": topology.tp}
    return {name: degree for name, degree in shape.items() if degree > 1 or name in ("dp", "tp")}


def device_type() -> str:
    """Return `cuda` (also for ROCm) or another accelerator that torch sees, else `cpu`."""
    import torch

    accelerator = torch.accelerator.current_accelerator(check_available=True)
    return accelerator.type if accelerator is not None else "cpu"


def attach(run: Run, model: Any, optimizer: Any, scheduler: Any = None, **others: Any) -> None:
    """Load the commit that the operator chose, whatever its topology, and let the run save with DCP; collective.

    Args:
        run: from `start`.
        model: module with DTensor parameters, or plain ones.
        optimizer: its optimizer, or several of them.
        scheduler: a learning rate scheduler, or another object with `state_dict` and `load_state_dict`.
        **others: more of such objects, by the name under which they are saved; their state must be the same on all
            ranks, or consist of DTensors.
    """
    from torch.distributed.checkpoint import state_dict_loader

    save_states = make_save(run.session)
    states = {"train": _TrainState(model, optimizer), **others}
    if scheduler is not None:
        states["scheduler"] = scheduler

    def save(folder: Path, tag: str) -> object:
        return save_states(states, folder / tag)

    def load(folder: Path) -> None:
        state_dict_loader.load(states, checkpoint_id=folder)

    run.restore(load=load, save=save, format_=DCP)


class _TrainState:
    """Model and optimizer as DCP's `Stateful`, by the names of parameters: independent of the degrees."""

    def __init__(self, model: Any, optimizer: Any) -> None:
        from torch.distributed.checkpoint.state_dict import StateDictOptions

        self._model = model
        self._optimizer = optimizer
        # Flattened names have no numbers of parameters or groups in them.
        self._options = StateDictOptions(flatten_optimizer_state_dict=True)

    def state_dict(self) -> dict[str, Any]:
        from torch.distributed.checkpoint.state_dict import get_state_dict

        model, optimizer = get_state_dict(self._model, self._optimizer, options=self._options)
        return {"model": model, "optimizer": optimizer}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        from torch.distributed.checkpoint.state_dict import set_state_dict

        set_state_dict(
            self._model,
            self._optimizer,
            model_state_dict=state["model"],
            optim_state_dict=state["optimizer"],
            options=self._options,
        )
