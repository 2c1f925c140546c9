"""Make torch's DataLoader elastic: the same dataset, workers and collate function, with the global order of samples."""

from __future__ import annotations

import signal
from collections.abc import Callable
from typing import Any

from elastic_trainer.data.order import PositionedSampler
from elastic_trainer.errors import ConfigurationError

_KEPT = ("collate_fn", "generator", "multiprocessing_context", "num_workers", "persistent_workers", "pin_memory")
_OF_WORKERS = ("prefetch_factor", "timeout")


def order_of(loader: Any, *, seed: int) -> tuple[int, bool]:
    """Return seed and shuffle flag of a DataLoader's sampler, as `GlobalOrder` takes them.

    Args:
        loader: a `torch.utils.data.DataLoader` of an indexable dataset.
        seed: used if the sampler has none.

    Raises:
        ConfigurationError: the dataset has no index, or the sampler's order has no counterpart (weights, subsets).
    """
    from torch.utils import data

    if isinstance(loader.dataset, data.IterableDataset):
        raise ConfigurationError(
            f"{type(loader.dataset).__name__} is a stream, and has no rows to put in a global order: use a loader with "
            "state_dict and load_state_dict (torchdata's StatefulDataLoader), and pass it to run.stream"
        )
    if loader.batch_size is None:
        raise ConfigurationError(
            "the loader has a batch sampler of its own, or makes no batches: pass batch_size and let this package "
            "choose the rows"
        )
    sampler = loader.sampler
    if isinstance(sampler, data.DistributedSampler):
        return sampler.seed, sampler.shuffle
    if type(sampler) is data.RandomSampler and not sampler.replacement and sampler.num_samples == len(loader.dataset):
        return seed, True
    if type(sampler) is data.SequentialSampler:
        return seed, False
    raise ConfigurationError(
        f"a {type(sampler).__name__} has an order of its own: expected DistributedSampler, RandomSampler without "
        "replacement or SequentialSampler, or pass run.sampler(dataset) as the loader's sampler"
    )


def rebuild(loader: Any, sampler: PositionedSampler) -> Any:
    """Return a DataLoader like `loader`, whose batches `sampler` chooses.

    A worker survives the SIGTERM by which a launcher asks for a drain, so that the last steps still have data.
    """
    from torch.utils import data

    options: dict[str, Any] = {name: getattr(loader, name) for name in _KEPT}
    if loader.num_workers:
        options |= {name: getattr(loader, name) for name in _OF_WORKERS}
        options["worker_init_fn"] = _Surviving(loader.worker_init_fn)
    return data.DataLoader(loader.dataset, batch_sampler=sampler, **options)


class _Surviving:
    """A worker's start that makes it ignore the first SIGTERM; a class, because workers may be spawned.

    torchrun and the deepspeed launcher send SIGTERM to all processes of a rank.
    """

    def __init__(self, start: Callable[[int], None] | None) -> None:
        self._start = start

    def __call__(self, worker: int) -> None:
        signal.signal(signal.SIGTERM, _ignore_first)
        if self._start is not None:
            self._start(worker)


def _ignore_first(_number: int, _frame: object) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
