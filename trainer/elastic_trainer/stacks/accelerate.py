"""Hugging Face Accelerate with DeepSpeed or FSDP2, for scripts with their own loop.

accelerator = Accelerator(...)
elastic = ElasticAccelerator(accelerator, batch_size=2)            # starts the session, divides the global batch
loader = DataLoader(dataset, batch_size=elastic.batch_size, shuffle=True)
model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
step = elastic.restore()                                           # in place of accelerator.load_state
...
if accelerator.sync_gradients:
    step += 1
    elastic.after_step(loss, save=step % 100 == 0)                 # in place of accelerator.save_state
accelerator.end_training()
"""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from elastic_trainer.data import random_state
from elastic_trainer.errors import ConfigurationError
from elastic_trainer.session import Session
from elastic_trainer.stacks import rank_files
from elastic_trainer.stacks.checks import check_data_parallel, check_zero_stage
from elastic_trainer.stacks.dcp import load_dcp, make_save, save_dcp
from elastic_trainer.stacks.side_state import pack_files, unpack_files, warn_of_other_batch
from reshard.commits.commit import read_commit
from reshard.contract import DCP

_log = logging.getLogger(__name__)
_DATA = "accelerate"


class ElasticAccelerator:
    """Connects an `Accelerator` to the session of its attempt.

    After a drain, `after_step` ends the process with the session's exit code, once the step is committed.

    Args:
        accelerator: its accumulation steps are changed so that the global batch is the operator's, or else the one that
            `batch_size` and the accumulation steps mean at this number of ranks.
        batch_size: samples per device and micro step, if the operator does not set them.
        seed: selects the order of the data, and the random numbers after a change of the number of ranks.

    Raises:
        ConfigurationError: the accelerator and the attempt do not fit together.
    """

    def __init__(self, accelerator: Any, *, batch_size: int, seed: int = 0) -> None:
        plugin = getattr(accelerator.state, "deepspeed_plugin", None)
        self.session = Session.from_env(zero=int(plugin.zero_stage) if plugin is not None else 3)
        _check_accelerator(accelerator, self.session)
        self.session.start()
        self._save_states = make_save(self.session)
        self.plan = self.session.batch_plan(
            global_batch=batch_size * accelerator.gradient_accumulation_steps * accelerator.num_processes,
            micro_batch=batch_size,
        )
        self._accelerator = accelerator
        self._seed = seed
        self._is_deepspeed = accelerator.distributed_type == "DEEPSPEED"
        accelerator.gradient_accumulation_steps = self.plan.accumulation_steps
        if self._is_deepspeed:
            config = accelerator.state.deepspeed_plugin.deepspeed_config
            config["gradient_accumulation_steps"] = self.plan.accumulation_steps
        # Every epoch's order follows from the seed alone, so that it is the same in every attempt and on every rank.
        accelerator.dataloader_config.use_seedable_sampler = True
        accelerator.dataloader_config.data_seed = seed
        self._end_training = accelerator.end_training
        accelerator.end_training = self._finish

    @property
    def batch_size(self) -> int:
        """Samples per device and micro step, for the DataLoader."""
        return self.plan.micro_batch

    def restore(self) -> int:
        """Load the operator's commit into what `Accelerator.prepare` has prepared; return the steps that are done.

        If the commit cannot be used, all ranks exit with code 76, see `Session.restore`.
        """
        models, optimizers = len(self._accelerator._models), len(self._accelerator._optimizers)
        if (models, optimizers) != (1, 1):
            raise ConfigurationError(
                f"expected one prepared model and one optimizer, found {models} and {optimizers}: "
                "call restore after Accelerator.prepare"
            )
        position = self.session.restore(self._load, virtual_commits=False)
        warn_of_other_batch(position, self.plan)
        return position.step

    def after_step(self, loss: Any, *, save: bool = False) -> None:
        """Report a finished optimizer step; commit it if it is due or the operator asks for it.

        After a drain the process exits here, with code 75.

        Args:
            loss: the step's training loss, or a part of it; rank 0's is shown to the operator.
            save: the script itself wants a checkpoint of this step.
        """
        position = self.session.position
        loss = loss.detach() if hasattr(loss, "detach") else loss
        samples = position.samples + self.plan.global_batch
        action = self.session.after_step(step=position.step + 1, samples=samples, loss=float(loss))
        if save or action.save:
            self._save()
        if action.stop:
            self._accelerator.end_training()

    def _finish(self) -> None:
        """Report the end, and end the accelerator; takes the place of `Accelerator.end_training`."""
        try:
            self.session.finish()
        finally:
            self._end_training()

    def _save(self) -> None:
        accelerator = self._accelerator

        def write(folder: Path, tag: str) -> object:
            if self._is_deepspeed:
                result = accelerator._models[0].save_checkpoint(str(folder), tag=tag)
            else:
                model, optimizer = accelerator._models[0], accelerator._optimizers[0]
                result = save_dcp(model, optimizer, folder / tag, self._save_states)
            rank_files.write(folder / tag, accelerator.process_index, {"random": random_state.capture()})
            return result

        ranks = accelerator.num_processes
        data = {"seed": self._seed, _DATA: {"ranks": ranks, "files": _pack_side_state(accelerator)}}
        self.session.save(write, format_="deepspeed" if self._is_deepspeed else DCP, data=data)

    def _load(self, folder: Path) -> None:
        accelerator, commit = self._accelerator, read_commit(folder)
        if _DATA not in commit.data or commit.data.get("seed") != self._seed:
            raise ConfigurationError(
                f"{folder}: expected a commit of ElasticAccelerator with seed {self._seed}, found one of "
                f"{'seed ' + str(commit.data.get('seed')) if _DATA in commit.data else 'another script'}"
            )
        if self._is_deepspeed:
            loaded, _ = accelerator._models[0].load_checkpoint(str(folder.parent), tag=folder.name)
            if loaded is None:
                raise ConfigurationError(f"{folder}: DeepSpeed found nothing that it could load")
        else:
            load_dcp(accelerator._models[0], accelerator._optimizers[0], folder)
        notes = commit.data[_DATA]
        _unpack_side_state(accelerator, notes)
        own, _ = rank_files.read(folder, self.session.topology, accelerator.process_index)
        seed = random_state.seed_of(seed=self._seed, step=commit.step, replica=accelerator.process_index)

        def set_random_state() -> None:
            if own is None:
                _log.info("random number generators: the commit has no states of this rank; seed %d", seed)
                random_state.reseed(seed)
            else:
                random_state.restore(own["random"])

        # Not before: the loader draws random numbers when it starts, and reads ahead.
        _before_first_forward(accelerator._models[0], set_random_state)


def scale_schedule(
    fresh: Mapping[str, Any], saved: Mapping[str, Any], *, ranks_then: int, ranks_now: int
) -> dict[str, Any]:
    """Return the state of a learning rate schedule for another number of ranks.

    Accelerate steps a schedule once per rank and optimizer step, and scripts multiply its lengths by the number of
    ranks accordingly. The lengths therefore stay those of the new schedule, and the position is scaled.

    Args:
        fresh: state of the schedule as the script has just created it.
        saved: state of the schedule in the commit.
        ranks_then: number of ranks that have written the commit.
        ranks_now: number of ranks of this attempt.

    >>> scale_schedule({"T_max": 30, "last_epoch": 0}, {"T_max": 20, "last_epoch": 8}, ranks_then=2, ranks_now=3)
    {'T_max': 30, 'last_epoch': 12}
    """
    state = dict(fresh)
    if "last_epoch" in saved:
        state["last_epoch"] = saved["last_epoch"] * ranks_now // ranks_then
        if "_step_count" in saved:  # one more than last_epoch, because the constructor steps
            state["_step_count"] = saved["_step_count"] - saved["last_epoch"] + state["last_epoch"]
    if "_last_lr" in saved:
        state["_last_lr"] = saved["_last_lr"]
    if "_schedulers" in saved:
        state["_schedulers"] = [
            scale_schedule(new, old, ranks_then=ranks_then, ranks_now=ranks_now)
            for new, old in zip(fresh["_schedulers"], saved["_schedulers"], strict=True)
        ]
    return state


def _check_accelerator(accelerator: Any, session: Session) -> None:
    topology = session.topology
    check_data_parallel(topology, accelerator.num_processes, "Accelerator")
    if accelerator.split_batches or accelerator.dispatch_batches:
        raise ConfigurationError(
            "split_batches and dispatch_batches of DataLoaderConfiguration change what a batch is: "
            "expected False, the loader's batch size is that of one device"
        )
    if accelerator.distributed_type == "DEEPSPEED":
        check_zero_stage(topology, accelerator.state.deepspeed_plugin.zero_stage)
    elif not accelerator.is_fsdp2:
        raise ConfigurationError(
            f"the Accelerator runs with {accelerator.distributed_type}: expected DeepSpeed (deepspeed_plugin) or FSDP2 "
            "(fsdp_plugin with fsdp_version=2); accelerate shards with FSDP only on GPUs"
        )


def _pack_side_state(accelerator: Any) -> dict[str, str]:
    """Pack schedules, loss scale, and the objects of `Accelerator.register_for_checkpointing`."""
    import torch

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for number, scheduler in enumerate(_own_schedulers(accelerator)):
            torch.save(scheduler.state_dict(), folder / f"scheduler-{number}.pt")
        for number, thing in enumerate(accelerator._custom_objects):
            torch.save(thing.state_dict(), folder / f"object-{number}.pt")
        if accelerator.scaler is not None:
            torch.save(accelerator.scaler.state_dict(), folder / "scaler.pt")
        return pack_files(folder)


def _unpack_side_state(accelerator: Any, notes: Mapping[str, Any]) -> None:
    import torch

    ranks_then, ranks_now = notes["ranks"], accelerator.num_processes
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        unpack_files(notes["files"], folder)
        for number, scheduler in enumerate(_own_schedulers(accelerator)):
            state = torch.load(folder / f"scheduler-{number}.pt", weights_only=True)
            if scheduler.step_with_optimizer and ranks_then != ranks_now:
                fresh = scheduler.state_dict()
                state = scale_schedule(fresh, state, ranks_then=ranks_then, ranks_now=ranks_now)
            scheduler.load_state_dict(state)
        for number, thing in enumerate(accelerator._custom_objects):
            thing.load_state_dict(torch.load(folder / f"object-{number}.pt", weights_only=True))
        if accelerator.scaler is not None:
            accelerator.scaler.load_state_dict(torch.load(folder / "scaler.pt", weights_only=True))


def _own_schedulers(accelerator: Any) -> list[Any]:
    """Return the prepared schedules but those that DeepSpeed steps and saves itself."""
    return [item for item in accelerator._schedulers if type(item).__name__ != "DeepSpeedSchedulerWrapper"]


def _before_first_forward(model: Any, act: Callable[[], None]) -> None:
    """Call `act` once, before the next forward pass."""

    def hook(*_: Any) -> None:
        handle.remove()
        act()

    handle = model.register_forward_pre_hook(hook)
