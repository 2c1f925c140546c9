"""Hugging Face `Trainer` with DeepSpeed or FSDP2: a callback that makes its script elastic.

args = TrainingArguments(...)
elastic = ElasticCallback(args)                                    # starts the session, divides the global batch
trainer = Trainer(model=model, args=args, train_dataset=dataset)
trainer.train(resume_from_checkpoint=elastic.attach(trainer))      # resumes from the operator's commit
"""

from __future__ import annotations

import atexit
import dataclasses
import logging
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from elastic_trainer.data import random_state
from elastic_trainer.errors import ConfigurationError
from elastic_trainer.session import Session
from elastic_trainer.stacks import rank_files
from elastic_trainer.stacks.checks import check_data_parallel, check_zero_stage
from elastic_trainer.stacks.dcp import make_save, save_dcp
from elastic_trainer.stacks.process_end import destroy_process_group
from elastic_trainer.stacks.side_state import pack_files, unpack_files, warn_of_other_batch
from reshard.commits.commit import Commit, read_commit
from reshard.contract import DCP

_log = logging.getLogger(__name__)
_DATA = "huggingface"
_MODEL_FOLDER, _OPTIMIZER_FOLDER = "pytorch_model_fsdp_0", "optimizer_0"
"""Names under which accelerate looks for the DCP folders of an FSDP checkpoint."""


class ElasticCallback:
    """Connects a Trainer to the session of its attempt, as a callback of the Trainer.

    The Trainer's own decisions when to save (`save_strategy`, `save_steps`) make commits instead of its checkpoints;
    the operator may ask for more. After a drain, `Trainer.train` ends the process with the session's exit code.

    Args:
        args: the Trainer's arguments. Their batch size per device and accumulation steps are changed so that the
            global batch is the operator's, or else the one that the arguments mean at this number of ranks.

    Raises:
        ConfigurationError: the arguments and the attempt do not fit together.
    """

    def __init__(self, args: Any) -> None:
        self.session = Session.from_env(zero=_find_stage(args))
        _check_arguments(args, self.session)
        self.session.start()
        atexit.register(destroy_process_group)
        self.plan = self.session.batch_plan(
            global_batch=args.per_device_train_batch_size * args.gradient_accumulation_steps * args.world_size,
            micro_batch=args.per_device_train_batch_size,
        )
        args.per_device_train_batch_size = self.plan.micro_batch
        args.gradient_accumulation_steps = self.plan.accumulation_steps
        if args.data_seed is None:
            args.data_seed = args.seed  # the order of the data must not depend on the random state of a rank
        if args.deepspeed:
            _fill_deepspeed_config(args)
        self._trainer: Any = None
        self._write: Callable[[Path, str], object] | None = None
        self._format = ""
        self._layout: tempfile.TemporaryDirectory[str] | None = None
        self._resume_folder: Path | None = None
        self._saved_step = -1
        self._loss: float | None = None
        self._is_stopping = False

    def attach(self, trainer: Any) -> str | None:
        """Make the Trainer save commits, and return the `resume_from_checkpoint` of `Trainer.train`.

        If the commit cannot be used, all ranks exit with code 76, see `Session.restore`.

        Returns:
            Folder in the shape of a Trainer's checkpoint that refers to the commit; None at a first start.
        """
        _check_trainer(trainer)
        self._trainer = trainer
        self._format, self._write = _choose_format(trainer, self.session)
        trainer._save_checkpoint = self._save  # called where the Trainer would save: after it has logged and evaluated
        trainer.add_callback(self)
        position = self.session.restore(self._lay_out, virtual_commits=False)
        warn_of_other_batch(position, self.plan)
        return None if self._resume_folder is None else str(self._resume_folder)

    def __getattr__(self, name: str) -> Any:
        """Return a function that ignores the event, for the other events of `transformers.TrainerCallback`.

        This class does not inherit from it, so that this module can be imported without transformers.
        """
        if name.startswith("on_"):
            return lambda *_, **__: None
        raise AttributeError(name)

    def on_train_begin(self, _args: Any, state: Any, control: Any, **_: Any) -> None:
        """Do not train if the commit holds the last step: the Trainer would do one step more."""
        if state.global_step >= state.max_steps:
            self._trainer._run_epoch = lambda **_: None
            control.should_training_stop = True

    def on_log(self, _args: Any, _state: Any, _control: Any, logs: Any = None, **_: Any) -> None:
        """Keep the last logged training loss for the next report."""
        if logs and "loss" in logs:
            self._loss = float(logs["loss"])

    def on_step_end(self, _args: Any, state: Any, control: Any, **_: Any) -> None:
        """Report the step; let the Trainer save or stop if the session says so."""
        if self._layout is not None:  # everything has been loaded
            self._layout.cleanup()
            self._layout = None
        samples = self.session.position.samples + self.plan.global_batch
        action = self.session.after_step(step=state.global_step, samples=samples, loss=self._loss)
        if action.save:
            control.should_save = True
        if action.stop:
            self._is_stopping = control.should_training_stop = True
            control.should_evaluate = False

    def on_epoch_end(self, _args: Any, _state: Any, control: Any, **_: Any) -> None:
        """Do not evaluate or save once more while the training is being drained."""
        if self._is_stopping:
            control.should_evaluate = control.should_save = False

    def on_train_end(self, _args: Any, _state: Any, _control: Any, **_: Any) -> None:
        """Report the end; after a drain the process exits with code 75, see `Session.finish`."""
        self.session.finish()

    def _save(self, _model: Any, _trial: Any = None) -> None:
        """Commit the current step; takes the place of `Trainer._save_checkpoint`."""
        trainer, write = self._trainer, self._write
        assert write is not None
        if trainer.state.global_step == self._saved_step:
            return
        trainer.store_flos()

        def write_all(folder: Path, tag: str) -> object:
            result = write(folder, tag)
            trainer._save_rng_state(str(folder / tag / rank_files.FOLDER))
            return result

        data = {"seed": trainer.args.seed, _DATA: _pack_progress(trainer)}
        self.session.save(write_all, format_=self._format, data=data)
        self._saved_step = trainer.state.global_step

    def _lay_out(self, folder: Path) -> None:
        """Make a folder in the shape of a Trainer's checkpoint, whose large parts are links into the commit."""
        commit = read_commit(folder)
        if _DATA not in commit.data:
            raise ConfigurationError(
                f"{folder}: expected a commit of a Hugging Face Trainer, found one that another script has written: "
                "start a new training from its weights instead"
            )
        scratch = self.session.settings.scratch
        self._layout = tempfile.TemporaryDirectory(prefix="etj-", dir=scratch if scratch.is_dir() else None)
        checkpoint = Path(self._layout.name) / f"checkpoint-{commit.step}"
        checkpoint.mkdir()
        unpack_files(commit.data[_DATA], checkpoint)
        source = folder.absolute()
        if self._format == DCP:
            for name in (_MODEL_FOLDER, _OPTIMIZER_FOLDER):
                (checkpoint / name).symlink_to(source)
        else:
            tag = f"global_step{commit.step}"
            (checkpoint / tag).symlink_to(source)
            (checkpoint / "latest").write_text(tag)
        self._lay_out_random_state(commit, source, checkpoint)
        self._resume_folder = checkpoint

    def _lay_out_random_state(self, commit: Commit, source: Path, checkpoint: Path) -> None:
        """Provide the file of random states that this rank's Trainer looks for: the rank's own, or a re-seeded one."""
        args, topology = self._trainer.args, self.session.topology
        name = f"rng_state_{args.process_index}.pth" if args.world_size > 1 else "rng_state.pth"
        own = source / rank_files.FOLDER / name
        if commit.topology == topology and own.is_file():
            (checkpoint / name).symlink_to(own)
            return
        seed = random_state.seed_of(seed=args.seed, step=commit.step, replica=args.process_index)
        _log.info("random number generators: the commit has no states of this rank at %s; seed %d", topology, seed)
        random_state.reseed(seed)
        self._trainer._save_rng_state(str(checkpoint))
        random_state.reseed(args.seed)


def _check_arguments(args: Any, session: Session) -> None:
    check_data_parallel(session.topology, args.world_size, "Trainer")
    if args.auto_find_batch_size:
        raise ConfigurationError("auto_find_batch_size changes the global batch: set it to False")
    if args.load_best_model_at_end:
        raise ConfigurationError(
            "load_best_model_at_end needs checkpoints in output_dir, which commits replace: choose the best commit "
            "after the training instead"
        )


def _check_trainer(trainer: Any) -> None:
    """Check that the methods that are replaced are there; otherwise the Trainer would never commit."""
    missing = [name for name in ("_save_checkpoint", "_save_rng_state", "_run_epoch") if not hasattr(trainer, name)]
    if missing:
        import transformers

        raise ConfigurationError(
            f"transformers {transformers.__version__} has no Trainer.{', Trainer.'.join(missing)}: expected 5.24, with "
            "which this adapter is tested"
        )


def _find_stage(args: Any) -> int:
    """Return the ZeRO stage of the arguments; FSDP2 partitions what stage 3 does."""
    plugin = args.deepspeed_plugin
    return int(plugin.zero_stage) if plugin is not None else 3


def _fill_deepspeed_config(args: Any) -> None:
    """Fill the `auto` values of the DeepSpeed configuration from the new batch sizes, as TrainingArguments does."""
    from accelerate.utils import DeepSpeedPlugin
    from transformers.integrations.deepspeed import HfTrainerDeepSpeedConfig

    args.hf_deepspeed_config = HfTrainerDeepSpeedConfig(args.deepspeed)
    args.hf_deepspeed_config.trainer_config_process(args)
    args.deepspeed_plugin = DeepSpeedPlugin(hf_ds_config=args.hf_deepspeed_config)


def _choose_format(trainer: Any, session: Session) -> tuple[str, Callable[[Path, str], object]]:
    """Return the name of the commits' format, and the function that writes weights and optimizer."""
    state = trainer.accelerator.state
    if trainer.is_deepspeed_enabled:
        check_zero_stage(session.topology, state.deepspeed_plugin.zero_stage)
        return "deepspeed", lambda folder, tag: trainer.model_wrapped.save_checkpoint(str(folder), tag=tag)
    if not trainer.is_fsdp_enabled or not trainer.accelerator.is_fsdp2:
        raise ConfigurationError(
            f"the Trainer runs with {state.distributed_type}: expected DeepSpeed (TrainingArguments(deepspeed=...)) or "
            "FSDP2 (TrainingArguments(fsdp=True, fsdp_config={'version': 2})); accelerate shards with FSDP only on GPUs"
        )
    if "SHARDED" not in str(state.fsdp_plugin.state_dict_type):
        raise ConfigurationError(
            f"fsdp_config has state_dict_type {state.fsdp_plugin.state_dict_type}: set it to 'SHARDED_STATE_DICT', "
            "which loads at any number of ranks"
        )
    save = make_save(session)
    return DCP, lambda folder, tag: save_dcp(trainer.model_wrapped, trainer.optimizer, folder / tag, save)


def _pack_progress(trainer: Any) -> dict[str, str]:
    """Pack the small files of a Trainer's checkpoint: progress, schedule, loss scale."""
    import torch

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        state = dataclasses.replace(trainer.state, stateful_callbacks=_export_callbacks(trainer))
        state.save_to_json(str(folder / "trainer_state.json"))
        if not (trainer.is_deepspeed_enabled and type(trainer.lr_scheduler).__name__ == "DeepSpeedSchedulerWrapper"):
            torch.save(trainer.lr_scheduler.state_dict(), folder / "scheduler.pt")
        if getattr(trainer.accelerator, "scaler", None) is not None:
            torch.save(trainer.accelerator.scaler.state_dict(), folder / "scaler.pt")
        return pack_files(folder)


def _export_callbacks(trainer: Any) -> dict[str, Any]:
    """Return the states of the callbacks; not that of the Trainer's control, which may say that this attempt stops."""
    from transformers.trainer_callback import ExportableState

    states: dict[str, Any] = {}
    for callback in trainer.callback_handler.callbacks:
        if isinstance(callback, ExportableState):
            states.setdefault(type(callback).__name__, []).append(callback.state())
    return states
