"""Find the source tensor that each target tensor is made of. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence

from reshard.errors import UnsupportedError
from reshard.formats.deepspeed.logical import Param
from reshard.formats.deepspeed.rows import Rows
from reshard.formats.deepspeed.slots import Chunks, RankRange
from reshard.tensors.layout import PADDING, Index, LogicalTensor, TensorKey
from reshard.tensors.shard_table import ShardRow

_OTHER = {"weight": "fp32", "fp32": "weight"}
"""State that can be made of another state: weights are rounded master weights, and either is made of the other."""


class TargetRows(Rows):
    """Collects a target's tensors, each with its origin, and the rows of their shard table.

    Padding rows of a vocabulary that the source lacks, or has in another number, are left out and stay zero.

    Attributes:
        origins: for each of `tensors` the position of its origin in the source's tensors.
        zeros: bytes that stay zero on purpose, as (first file, one past the last file, first byte, one past the last).
    """

    def __init__(self, index: Index, aliases: Mapping[str, str]) -> None:
        super().__init__()
        self.origins: list[int] = []
        self.zeros: list[tuple[int, int, int, int]] = []
        self._index = index
        self._known = {tensor.key: at for at, tensor in enumerate(index.tensors)}
        self._twins: dict[str, set[str]] = defaultdict(set)
        for alias, name in (*aliases.items(), *index.aliases.items()):
            self._twins[name].add(alias)
            self._twins[alias].add(name)
        self._left_out: set[TensorKey] = set()
        self._problems: dict[str, None] = {}
        self._missing: list[str] = []

    def add_zeros(self, file: int, start: int, num_bytes: int, *, num_files: int = 1) -> None:
        """Mark bytes at the same offset of consecutive files as padding."""
        if num_bytes and num_files > 0:
            self.zeros.append((file, file + num_files, start, start + num_bytes))

    def _leave_out(self, row: ShardRow, item_bytes: int) -> None:
        positions, num_bytes = row.byte_ranges(row.box, item_bytes)  # consecutive bytes at each position
        for position in positions:
            self.add_zeros(row.file, position, num_bytes)

    def _leave_out_chunks(self, chunks: Sequence[tuple[RankRange, Chunks]], item_bytes: int) -> None:
        for ranks, chunk in chunks:
            count, rest = divmod(chunk.stop - chunk.start, chunk.size)
            start = ranks.byte_offset + chunk.skipped * item_bytes
            self.add_zeros(chunk.file, start, chunk.size * item_bytes, num_files=count)
            self.add_zeros(chunk.file + count, start, rest * item_bytes)

    def source_type(self, state: str, name: str) -> str | None:
        """Return the type of a tensor in the source, or None if the source does not hold it."""
        at = self._known.get(TensorKey(state, name))
        return None if at is None else self._index.tensors[at].dtype

    def require(self) -> None:
        """Refuse a source that lacks tensors of the target, or has states that only some target groups have.

        Raises:
            UnsupportedError: the message lists the tensors.
        """
        deselected = dict.fromkeys(state for state in self._missing if state in self._index.left_out)
        if deselected and deselected.keys() >= set(self._missing) and len(self._missing) == len(self._problems):
            kept = ",".join(sorted({tensor.key.state for tensor in self._index.tensors}))
            raise UnsupportedError(
                f"--states {kept} leaves out {', '.join(deselected)}, which DeepSpeed's checkpoints hold besides",
                path=str(self._index.root),
                hint="leave --states out, or choose a format for these states alone: --format safetensors or dcp",
            )
        if self._problems:
            raise UnsupportedError(
                f"the source lacks {len(self._problems)} tensors that the target needs",
                path=str(self._index.root),
                problems=list(self._problems)[:20],
                hint="give --names FILE where names differ, and --like a checkpoint of the same model; weights alone"
                " are no DeepSpeed checkpoint: load them into the model before deepspeed.initialize",
            )
        if lost := self._find_lost_states():
            raise UnsupportedError(
                f"the target has no place for {len(lost)} states of the source, and has it for other parameters",
                path=str(self._index.root),
                problems=lost[:20],
                hint="name with --like a checkpoint whose parameter groups keep the states that the source has",
            )

    def _find_lost_states(self) -> list[str]:
        """Find states of the source that the target holds for other parameters only."""
        states = {tensor.key.state for tensor in self.tensors} - _OTHER.keys()
        names, used = {tensor.key.name for tensor in self.tensors}, set(self.origins)
        return [
            f"{tensor.key} {list(tensor.shape)}"
            for at, tensor in enumerate(self._index.tensors)
            if at not in used and tensor.key.state in states and tensor.key.name in names
        ]

    def notes(self) -> tuple[str, ...]:
        """Describe for people what the target lacks of the source, and what is less exact than its type."""
        pairs = zip(self.tensors, self.origins, strict=True)
        made = [
            tensor.key.name
            for tensor, at in pairs
            if tensor.key.state == "fp32" and self._index.tensors[at].dtype != tensor.dtype
        ]
        lossy = (f"fp32: {len(made)} master weights are made of rounded weights, such as {made[0]}",) if made else ()
        return (*lossy, *self.zero_notes(), *self._left_behind())

    def zero_notes(self) -> tuple[str, ...]:
        """Describe the padding rows of the target that are zero because the source does not hold them."""
        padded = sorted({key.name.removesuffix(PADDING) for key in self._left_out if key.name.endswith(PADDING)})
        return (f"padding rows of {', '.join(padded)} are zero: the source does not hold them",) if padded else ()

    def _left_behind(self) -> tuple[str, ...]:
        used = set(self.origins)
        unused: dict[str, list[str]] = defaultdict(list)
        for at, tensor in enumerate(self._index.tensors):
            if at not in used:
                unused[tensor.key.state].append(tensor.key.name)
        return tuple(
            f"{state}: {len(names)} tensors of the source are not stored in the target, such as {names[0]}"
            for state, names in sorted(unused.items())
        )

    def _tensor(self, state: str, param: Param, is_padding: bool, dtype: str) -> int | None:
        key, shape = self._identity(state, param, is_padding)
        if key in self._ids:
            known = self.tensors[self._ids[key]]
            if (known.shape, known.dtype) != (shape, dtype):
                raise UnsupportedError(f"{key} is {known.dtype} {known.shape} and {dtype} {shape}")
            return self._ids[key]
        if key in self._left_out:
            return None
        at = self._origin(key, shape, is_padding)
        if at is None:
            self._left_out.add(key)
            return None
        self.origins.append(at)
        return self._append(LogicalTensor(key=key, shape=shape, dtype=dtype))

    def _origin(self, key: TensorKey, shape: tuple[int, ...], is_padding: bool) -> int | None:
        for candidate in self._candidates(key):
            at = self._known.get(candidate)
            if at is None:
                continue
            source_shape = self._index.tensors[at].shape
            if source_shape == shape:
                return at
            if not is_padding:
                self._problems[f"{candidate} has the shape {list(source_shape)}, expected {list(shape)}"] = None
                return None
        if not is_padding:
            self._problems[f"{key} {list(shape)} is missing"] = None
            self._missing.append(key.state)
        return None

    def _candidates(self, key: TensorKey) -> Iterator[TensorKey]:
        for state in (key.state, _OTHER.get(key.state)):
            for name in (key.name, *sorted(self._twins.get(key.name, ()))) if state else ():
                yield TensorKey(state or "", name)
