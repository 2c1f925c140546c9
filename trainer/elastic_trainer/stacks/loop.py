"""The training loop's connection to its attempt, for scripts with a loop of their own.

The script's loop stays as it is but for its head: `for step in run.steps(num_steps)`. When the body has finished, the
iterator reports the step, saves when the script or the operator asks, and ends the process with exit code 75 after a
drain.
"""

from __future__ import annotations

import atexit
import logging
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from elastic_trainer.batch import BatchPlan
from elastic_trainer.data import loaders, random_state, stateful
from elastic_trainer.data.order import GlobalOrder, PositionedSampler, RowSampler
from elastic_trainer.errors import ConfigurationError
from elastic_trainer.session import Session
from elastic_trainer.stacks import rank_files
from elastic_trainer.stacks.process_end import destroy_process_group

_log = logging.getLogger(__name__)


class Run:
    """One attempt, as the script's loop sees it.

    Args:
        session: a session that has started.
        plan: distribution of a step's samples.
        seed: of the sample order, unless the script's sampler has one, and of `random_state.seed_of`.
    """

    def __init__(self, session: Session, plan: BatchPlan, *, seed: int = 0) -> None:
        self.session = session
        self.plan = plan
        self._seed = seed
        self._order: dict[str, Any] = {}
        self._losses: list[Any] = []
        self._is_save_requested = self._is_stop_requested = False
        self._write: Callable[[Path, str], object] | None = None
        self._save_options: dict[str, Any] = {}
        self._own_states: dict[str, Any] | None = None
        self._replica_states: dict[str, Any] | None = None
        self._stream: stateful.Stream | None = None
        self._workers: list[Any] = []
        atexit.register(self._close)

    @property
    def replica(self) -> int:
        """Number of the data parallel replica that this rank belongs to."""
        return self.session.topology.replica(self.session.settings.rank)

    def restore(
        self,
        *,
        load: Callable[[Path], None],
        save: Callable[[Path, str], object],
        format_: str,
        model: Mapping[str, Any] | None = None,
    ) -> None:
        """Load the commit that the operator chose, if any, and remember how to save.

        Args:
            load: loads a folder with the framework's own function.
            save: saves to `folder / tag` with the framework's own function; a future that it returns is awaited.
            format_: name of the format in `reshard`.
            model: see `Session.save`.
        """
        self._write = save
        self._save_options = {"format_": format_, "model": model}
        self.session.restore(load)
        if (folder := self.session.settings.resume) is not None:
            states = rank_files.read(folder, self.session.topology, self.session.settings.rank)
            self._own_states, self._replica_states = states

    def steps(self, num_steps: int, loader: Any = None) -> Iterator[Any]:
        """Yield the numbers of the steps to do, from the position of the commit on; with a loader also its batches.

        Args:
            num_steps: steps of the whole training.
            loader: DataLoader of an indexable dataset. Each step gets all samples of this replica in one batch.

        Yields:
            The number of the step, from 0, or with a loader the number and the batch.
        """
        if self._write is None:
            raise ConfigurationError("nothing is attached: call the stack's attach before the first step")
        session = self.session
        batches = self._iterate(loader, lambda order: order.step_batches) if loader is not None else None
        if session.settings.resume is not None:
            # Not before: a loader that starts its workers draws a number.
            self._restore_random_state(session.position.step)
        while (step := session.position.step) < num_steps and not self._is_stop_requested:
            yield step if batches is None else (step, next(batches))
            samples = session.position.samples + self.plan.global_batch
            action = session.after_step(step=step + 1, samples=samples, loss=self._take_loss())
            if action.save or self._is_save_requested or self._is_stop_requested or step + 1 == num_steps:
                self._save_now()
            if action.stop:
                break
        self._shut_down_workers()
        session.finish()

    def report(self, loss: Any) -> None:
        """Note the training loss of this step, or of one of its micro batches; the mean is reported.

        Args:
            loss: a tensor, which is averaged over all ranks, or a number, which is not.
        """
        self._losses.append(loss.detach() if hasattr(loss, "detach") else loss)

    def save(self) -> None:
        """Save a checkpoint when this step is done; every rank must call it at the same steps."""
        self._is_save_requested = True

    def stop(self) -> None:
        """End the training when this step is done and saved; every rank must call it at the same step."""
        self._is_stop_requested = True

    def batches(self, loader: Any) -> Iterator[Any]:
        """Return the micro batches of this replica, from the training's position on, without end.

        Args:
            loader: DataLoader of an indexable dataset. Its dataset, workers and collate function are used; its sampler
                and batch size are replaced.

        Raises:
            ConfigurationError: the dataset has no index, or the loader's order has no counterpart.
        """
        return self._iterate(loader, lambda order: order.micro_batches)

    def sampler(self, dataset: Any, *, seed: int | None = None, shuffle: bool = True) -> RowSampler:
        """Return a sampler for a DataLoader of the script's own with batches of `plan.micro_batch`."""
        order = self._take_order(len(dataset), self._seed if seed is None else seed, shuffle)
        return RowSampler(order.micro_batches, lambda: self.session.position.samples)

    def stream(self, loader: Any, *, on_resize: stateful.Rule = "skip") -> stateful.Stream:
        """Return the batches of a loader that keeps its own position; its state is part of every commit.

        Args:
            loader: iterable with `state_dict` and `load_state_dict`, which gives micro batches of this replica's share.
            on_resize: what happens at another number of replicas; see `stateful.resume`. `stream.start` says what did.
        """
        states = self._replica_states or {}
        self._stream = stateful.resume(
            loader,
            states.get("stream"),
            samples=self.session.position.samples,
            batch_samples=self.plan.micro_batch * self.plan.dp,
            rule=on_resize,
            what=f"the commit has no state of this stream for replica {self.replica} of {self.plan.dp}",
        )
        return self._stream

    def _iterate(
        self, loader: Any, choose: Callable[[GlobalOrder], Callable[[int], Iterator[list[int]]]]
    ) -> Iterator[Any]:
        seed, shuffle = loaders.order_of(loader, seed=self._seed)
        order = self._take_order(len(loader.dataset), seed, shuffle)
        sampler = PositionedSampler(choose(order), lambda: self.session.position.samples)
        iterator: Iterator[Any] = iter(loaders.rebuild(loader, sampler))
        self._workers.append(iterator)
        return iterator

    def _take_order(self, num_rows: int, seed: int, shuffle: bool) -> GlobalOrder:
        """Return the order, which every commit names; warn if the commit was saved with another one."""
        if self._write is None:
            raise ConfigurationError("the position is not known yet: call the stack's attach before you use the data")
        self._order = {"seed": seed, "shuffle": shuffle, "rows": num_rows}
        saved = {key: value for key, value in self.session.position.data.items() if key in self._order}
        if saved and saved != self._order:
            _log.warning("the data order changed from %s to %s: samples are repeated and left out", saved, self._order)
        return GlobalOrder(num_rows=num_rows, plan=self.plan, replica=self.replica, seed=seed, shuffle=shuffle)

    def _restore_random_state(self, step: int) -> None:
        if self._own_states is not None and "random" in self._own_states:
            random_state.restore(self._own_states["random"])
            return
        topology, rank = self.session.topology, self.session.settings.rank
        place = topology.coordinate(rank)
        seed = random_state.seed_of(
            seed=self._seed, step=step, replica=self.replica, stage=place.pp, part=place.dp % topology.cp
        )
        _log.info("random number generators: the commit has no states of this rank at %s; seed %d", topology, seed)
        random_state.reseed(seed)

    def _take_loss(self) -> float:
        """Return the mean of what was reported in this step, and NaN if nothing was."""
        losses, self._losses = self._losses, []
        if not losses:
            return float("nan")
        numbers = [loss for loss in losses if not hasattr(loss, "detach")]
        if numbers:
            return float(sum(numbers)) / len(numbers)
        import torch
        from torch import distributed

        total = torch.stack([loss.float().mean() for loss in losses]).mean()
        if self.session.topology.world_size > 1:
            distributed.all_reduce(total)
        return float(total) / self.session.topology.world_size

    def _save_now(self) -> None:
        self._is_save_requested = False
        rank = self.session.settings.rank

        def write(folder: Path, tag: str) -> object:
            assert self._write is not None
            result = self._write(folder, tag)
            states: dict[str, Any] = {"random": random_state.capture()}
            if self._stream is not None:
                states["stream"] = self._stream.state_dict()
            rank_files.write(folder / tag, rank, states)
            return result

        self.session.save(write, data=self._order or None, **self._save_options)

    def _shut_down_workers(self) -> None:
        """End the loaders' worker processes; otherwise the interpreter waits for those that ignore its SIGTERM."""
        for iterator in self._workers:
            if hasattr(iterator, "_shutdown_workers"):
                iterator._shutdown_workers()
        self._workers.clear()

    def _close(self) -> None:
        """End what would disturb the end of the process: workers, and threads of torch.distributed."""
        self._shut_down_workers()
        destroy_process_group()
