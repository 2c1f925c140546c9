"""Loaders that keep their own position: torchdata's StatefulDataLoader, `datasets.IterableDataset` and the like.

Nothing of them is imported: a stream is any iterable with `state_dict` and `load_state_dict`. Every replica reads a
share of the stream that depends on the number of replicas. So a state fits only a replica with the same number among
as many replicas. Otherwise the rule of `resume` applies.
"""

from __future__ import annotations

import dataclasses
import itertools
import logging
from collections.abc import Iterator, Mapping
from typing import Any, Literal

from elastic_trainer.errors import ConfigurationError

_log = logging.getLogger(__name__)

Rule = Literal["skip", "repeat"]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StreamStart:
    """Position at which a stream begins in this attempt.

    Attributes:
        how: `first` at a first start, `exact` with the state of the commit, else the rule: `skip` or `repeat`.
        skipped_batches: batches that this replica discards before the first one.
        message: what is repeated or skipped, in a sentence.
    """

    how: Literal["first", "exact", "skip", "repeat"]
    skipped_batches: int = 0
    message: str = ""


class Stream:
    """An endless iterator over a stateful loader; it begins again when the loader ends.

    Attributes:
        start: where it began in this attempt.
    """

    def __init__(self, loader: Any, start: StreamStart, *, epoch: int = 0) -> None:
        self.start = start
        self._loader = loader
        self._epoch = epoch
        self._batches = self._read()

    def state_dict(self) -> dict[str, Any]:
        """Return the position behind the last batch."""
        return {"epoch": self._epoch, "loader": self._loader.state_dict()}

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        return next(self._batches)

    def _read(self) -> Iterator[Any]:
        return itertools.islice(self._read_all(), self.start.skipped_batches, None)

    def _read_all(self) -> Iterator[Any]:
        yield from self._read_epoch()
        while True:
            self._epoch += 1
            is_empty = True
            for batch in self._read_epoch():
                is_empty = False
                yield batch
            if is_empty:
                raise ConfigurationError("the stream has no batch for this replica: use fewer replicas or more shards")

    def _read_epoch(self) -> Iterator[Any]:
        if hasattr(self._loader, "set_epoch"):
            self._loader.set_epoch(self._epoch)
        yield from self._loader


def resume(
    loader: Any, state: Mapping[str, Any] | None, *, samples: int, batch_samples: int, rule: Rule, what: str
) -> Stream:
    """Return the stream at the position of the training.

    Args:
        loader: the script's loader of this replica's share.
        state: what `Stream.state_dict` returned on the same replica among as many replicas; None if there is none.
        samples: global samples consumed.
        batch_samples: samples in one batch of all replicas together.
        rule: without a state, `skip` discards as many batches as every replica would have consumed, so that the counts
            are right; `repeat` begins at the start of the stream.
        what: why there is no state, for the message.

    Raises:
        ConfigurationError: the loader keeps no state.
    """
    if not (hasattr(loader, "state_dict") and hasattr(loader, "load_state_dict")):
        raise ConfigurationError(
            f"{type(loader).__name__} has no state_dict and load_state_dict: use torchdata's StatefulDataLoader, or "
            "a DataLoader of an indexable dataset with run.batches"
        )
    if state is not None:
        loader.load_state_dict(state["loader"])
        return Stream(loader, StreamStart(how="exact"), epoch=state["epoch"])
    if samples == 0:
        return Stream(loader, StreamStart(how="first"))
    if rule == "repeat":
        start = StreamStart(
            how="repeat",
            message=f"{what}: the stream begins again, and repeats up to {samples} samples",
        )
    else:
        batches = samples // batch_samples
        start = StreamStart(
            how="skip",
            skipped_batches=batches,
            message=f"{what}: this replica discards the first {batches} batches of its new share; of the samples that "
            f"the training has seen ({samples}), as many are repeated as others are skipped, and none if the "
            "replicas take samples in turn",
        )
    _log.warning("%s", start.message)
    return Stream(loader, start)
