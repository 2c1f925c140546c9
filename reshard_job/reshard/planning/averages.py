"""Find the tensors that the target holds the mean of, and the copies that the mean is made of.

The tensor-parallel ranks of a source may each have trained a copy of a parameter by itself (the partial parameters of
Universal Checkpointing; `parameter_to_average_patterns` of DeepSpeed). Copies with equal stated checksums are a copy,
like those of any replicated parameter. The others are read, and their mean is taken element by element
(`reshard.tensors.mean`). The weights of a parameter with master weights are the masters' mean, rounded.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from reshard.errors import UnsupportedError
from reshard.planning.replicas import StatedChecksums, group_by_replica
from reshard.tensors.cast import can_cast
from reshard.tensors.intervals import Int64Array
from reshard.tensors.layout import Index, LogicalTensor, TensorKey
from reshard.tensors.mean import can_average

_NO_ROWS = np.zeros(0, dtype=np.int64)
_NAMED = 5


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Average:
    """A tensor that is the mean of its copies.

    Attributes:
        ranks: rows of the copy of each tensor-parallel rank, [ranks][rows].
        others: rank and rows of each further copy, which must equal the copy of that rank; empty if copies are not
            compared.
        master: position of the master weight in `Index.tensors`, if this is a weight that has one.
        masters: rows of each rank's master weights, [ranks][rows]; empty without `master`.
        moves_master: the plan moves the master weight, too, and records what is read of it then.
        is_rounded: each rank's weights must be its master weights, rounded.
        is_known_to_differ: checksums prove that copies differ.
    """

    ranks: tuple[Int64Array, ...]
    others: tuple[tuple[int, Int64Array], ...] = ()
    master: int | None = None
    masters: tuple[Int64Array, ...] = ()
    moves_master: bool = False
    is_rounded: bool = False
    is_known_to_differ: bool = False

    @property
    def copy_rows(self) -> Int64Array:
        """Return the rows of all copies but the first rank's."""
        return np.concatenate([_NO_ROWS, *self.ranks[1:], *(rows for _, rows in self.others)])

    def rows_read(self, number: int) -> Iterator[tuple[int, Int64Array]]:
        """Yield (tensor, rows) of all that is read for the tensor at position `number`, besides its first copy."""
        yield number, self.copy_rows
        if self.master is not None:
            yield self.master, np.concatenate([_NO_ROWS, *self.masters])


def find_averages(
    index: Index, rows: Sequence[Int64Array], chosen: Sequence[Int64Array], *, agreement: bool
) -> dict[int, Average]:
    """Find the tensors whose copies must be read and averaged, by their position in `Index.tensors`.

    Args:
        index: the source.
        rows: all rows of each tensor, [tensors][rows].
        chosen: rows of the first copy; no rows if the tensor is not needed, [tensors][rows].
        agreement: compare data that the source holds twice.

    Raises:
        UnsupportedError: the weights of ranks differ, and their master weights were not selected.
    """
    if not index.averaged:
        return {}
    finder = _Finder(index, rows, chosen, agreement=agreement)
    averages = {
        number: finder.find(number)
        for number, tensor in enumerate(index.tensors)
        if len(chosen[number]) and tensor.key in index.averaged and can_average(tensor.dtype)
    }
    return {number: average for number, average in averages.items() if average is not None}


class _Finder:
    """Looks at the declared tensors of one source."""

    def __init__(
        self, index: Index, rows: Sequence[Int64Array], chosen: Sequence[Int64Array], *, agreement: bool
    ) -> None:
        self._index, self._rows, self._chosen, self._agreement = index, rows, chosen, agreement
        self._numbers = {tensor.key: number for number, tensor in enumerate(index.tensors)}
        self._stated = StatedChecksums(index.files)

    def find(self, number: int) -> Average | None:
        """Return how a tensor is averaged; None if its copies are proved equal, or if it has one."""
        tensor = self._index.tensors[number]
        groups = group_by_replica(self._index.shards, self._rows[number])
        count = self._index.averaged[tensor.key]
        if not groups.keys() >= set(range(count)):
            return None
        ranks = tuple(groups[rank] for rank in range(count))
        is_equal = self._are_equal(tensor, ranks)
        key = TensorKey("fp32", tensor.key.name)
        has_master = tensor.key.state == "weight" and key in self._index.averaged
        master = self._find_master(tensor, key) if has_master else None
        if is_equal and (master is None or self._are_equal(self._index.tensors[master], self._masters(master, count))):
            return None
        if has_master and key not in self._numbers:
            raise UnsupportedError(
                f"{tensor.key}: its copies on the {count} tensor-parallel ranks may differ, and the master weights that"
                " are averaged are left out",
                path=str(self._index.root),
                hint="select the state fp32 too: --states weight,fp32; --format safetensors takes the weights alone",
            )
        is_different = any(self._stated.are_different(self._index.shards, tensor, ranks[0], copy) for copy in ranks[1:])
        return Average(
            ranks=ranks,
            others=tuple(self._others(tensor, groups, count)) if self._agreement else (),
            master=master,
            masters=() if master is None else self._masters(master, count),
            moves_master=master is not None and len(self._chosen[master]) > 0,
            is_rounded=self._agreement and self._index.has_rounded_weights,
            is_known_to_differ=is_different,
        )

    def _are_equal(self, tensor: LogicalTensor, copies: Sequence[Int64Array]) -> bool:
        return all(self._stated.are_equal(self._index.shards, tensor, copies[0], copy) for copy in copies[1:])

    def _find_master(self, weight: LogicalTensor, key: TensorKey) -> int | None:
        """Return the position of a weight's master weight, if the weight can be made of it."""
        number = self._numbers.get(key)
        if number is None:
            return None
        master, ranks = self._index.tensors[number], set(range(self._index.averaged[key]))
        fits = master.shape == weight.shape and can_average(master.dtype) and can_cast(master.dtype, weight.dtype)
        is_complete = group_by_replica(self._index.shards, self._rows[number]).keys() >= ranks
        return number if fits and is_complete else None

    def _masters(self, master: int, count: int) -> tuple[Int64Array, ...]:
        groups = group_by_replica(self._index.shards, self._rows[master])
        return tuple(groups[rank] for rank in range(count))

    def _others(
        self, tensor: LogicalTensor, groups: Mapping[int, Int64Array], count: int
    ) -> Iterator[tuple[int, Int64Array]]:
        """Yield the copies behind those of the ranks that are not proved equal to them: those of other stages."""
        for replica, rows in groups.items():
            rank = replica % count
            if replica >= count and not self._stated.are_equal(self._index.shards, tensor, groups[rank], rows):
                yield rank, rows


def describe_averages(index: Index, averages: Mapping[int, Average]) -> tuple[str, ...]:
    """Return the note for the user about tensors that are averaged, before their copies are read."""
    if not averages:
        return ()
    keys = [str(index.tensors[number].key) for number in averages]
    differing = [str(index.tensors[number].key) for number, average in averages.items() if average.is_known_to_differ]
    ranks = len(next(iter(averages.values())).ranks)
    known = f"; those of {name_few(differing)} do" if differing else ""
    how = f"averaged over the {ranks} tensor-parallel ranks where their copies differ, as the checkpoint declares"
    return (f"{how}: {name_few(keys)}{known}",)


def name_few(names: Sequence[str]) -> str:
    """Return the first of the names as a text, with dots if there are more."""
    return ", ".join(names[:_NAMED]) + (", ..." if len(names) > _NAMED else "")
