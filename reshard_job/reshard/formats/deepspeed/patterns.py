"""How tensor parallelism cut each parameter, from `universal_checkpoint_info`.

DeepSpeed describes this by regular expressions (deepspeed/checkpoint/constants.py and ds_to_universal.py, 0.19.8; they
match from the start of a name, `re.match`). Here each parameter gets one `Rule`, and a rule says which boxes of the
whole tensor a rank holds. The rest of the program knows boxes only.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from reshard.errors import CorruptSourceError, UnsupportedError

_VOCABULARY = "vocabulary_parameter_patterns"
_REPLICATED = "tp_replicated_parameter_patterns"
_AVERAGED = "parameter_to_average_patterns"
_ROW = "parameter_with_row_parallelism_patterns"
_TWO_SUB = "parameter_with_2_sub_params_cat_dim_0"
_SUB = "parameter_with_sub_params"


class Piece(NamedTuple):
    """A box of a rank's shard and the box of the whole tensor that it is; both `[ndim]`, of the same size."""

    local: tuple[int, ...]
    whole: tuple[int, ...]
    size: tuple[int, ...]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """How one parameter is cut over the tensor-parallel ranks.

    Attributes:
        dim: the dim that is cut, or None for a parameter that every rank holds whole.
        parts: sizes along `dim` of the tensors fused into one, each cut by itself; empty for one tensor.
        num_parts: number of equal fused tensors where `parts` is not known before the shape is.
        vocabulary: its rows are padded to a multiple of the tensor-parallel degree.
    """

    dim: int | None
    parts: tuple[int, ...] = ()
    num_parts: int = 1
    vocabulary: bool = False

    def whole_shape(self, name: str, shards: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
        """Shape `[ndim]` of the whole tensor whose shards have these shapes.

        Raises:
            UnsupportedError: cut unevenly, or the rule does not fit the shapes.
        """
        first = shards[0]
        if any(shape != first for shape in shards):
            raise UnsupportedError(
                f"{name}: tensor-parallel shards have the shapes {sorted(set(shards))}: expected equal ones",
                hint="uneven tensor-parallel splits are not converted",
            )
        if self.dim is None:
            return first
        if self.dim >= len(first):
            raise UnsupportedError(f"{name} has {len(first)} dims, universal_checkpoint_info cuts dim {self.dim}")
        size = first[self.dim] * len(shards)
        if self.parts and sum(self.parts) != size:
            raise UnsupportedError(
                f"{name}: universal_checkpoint_info names the parts {self.parts} along dim {self.dim},"
                f" the shards have {size}"
            )
        return (*first[: self.dim], size, *first[self.dim + 1 :])

    def shard_shape(self, name: str, whole: tuple[int, ...], tp: int) -> tuple[int, ...]:
        """Shape `[ndim]` of each of `tp` shards.

        Raises:
            UnsupportedError: a part is not divisible by `tp`.
        """
        if self.dim is None:
            return whole
        sizes = self._sizes(whole)
        if uneven := [size for size in sizes if size % tp]:
            raise UnsupportedError(
                f"{name}: {uneven[0]} along dim {self.dim} is not divisible by tp={tp}", hint="choose another tp"
            )
        return (*whole[: self.dim], whole[self.dim] // tp, *whole[self.dim + 1 :])

    def pieces(self, whole: tuple[int, ...], tp: int, rank: int) -> tuple[Piece, ...]:
        """What rank `rank` of `tp` holds of the whole tensor."""
        zero = (0,) * len(whole)
        if self.dim is None:
            return (Piece(zero, zero, whole),)
        pieces: list[Piece] = []
        local = start = 0
        for size in self._sizes(whole):
            width = size // tp
            pieces.append(
                Piece(
                    _with(zero, self.dim, local),
                    _with(zero, self.dim, start + rank * width),
                    _with(whole, self.dim, width),
                )
            )
            local += width
            start += size
        return tuple(pieces)

    def _sizes(self, whole: tuple[int, ...]) -> tuple[int, ...]:
        assert self.dim is not None
        return self.parts or (whole[self.dim] // self.num_parts,) * self.num_parts


WHOLE = Rule(dim=None)


def _with(values: tuple[int, ...], dim: int, value: int) -> tuple[int, ...]:
    return (*values[:dim], value, *values[dim + 1 :])


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Patterns:
    """The parsed `universal_checkpoint_info`.

    Attributes:
        info: as saved.
        declared: there was one at all.
    """

    info: Mapping[str, Any]
    declared: bool

    @property
    def vocabulary_rows(self) -> tuple[int, int] | None:
        """True and padded number of rows of the vocabulary, or None if it is not said."""
        true, padded = self.info.get("original_vocab_size"), self.info.get("padded_vocab_size")
        if not isinstance(true, int) or not isinstance(padded, int):
            return None
        if not 0 < true <= padded:
            raise CorruptSourceError(f"universal_checkpoint_info: vocabulary of {true} rows padded to {padded}")
        return true, padded

    @property
    def vocabulary_multiple(self) -> int | None:
        """The padded size is a multiple of this times tp (our own key), or None for a size that stays as it is."""
        value = self.info.get("vocab_multiple")
        return value if isinstance(value, int) and value > 0 else None

    def padded_rows(self, tp: int) -> int | None:
        """Rows of the vocabulary at another tensor-parallel degree."""
        rows = self.vocabulary_rows
        if rows is None:
            return None
        if self.vocabulary_multiple is None:
            return rows[1]
        unit = self.vocabulary_multiple * tp
        return math.ceil(rows[0] / unit) * unit

    @property
    def tells_rows(self) -> bool:
        """Row-parallel parameters are declared. Megatron-DeepSpeed leaves them out when it runs at tp=1."""
        return bool(self.info.get(_ROW)) or any(
            isinstance(entry, Mapping) and entry.get("partition_dim", 0) != 0 for entry in self.info.get(_SUB) or ()
        )

    def rule(self, name: str, num_dims: int) -> Rule:
        """The rule for a parameter.

        Raises:
            UnsupportedError: two categories claim it, or a category that cannot be converted exactly.
        """
        found = [
            key
            for key in (_REPLICATED, _AVERAGED, _ROW, _TWO_SUB)
            if any(_matches(pattern, name) for pattern in self.info.get(key) or ())
        ]
        subs = [entry for entry in self.info.get(_SUB) or () if _sub_matches(entry, name)]
        if len(found) + len(subs) > 1:
            raise UnsupportedError(f"{name}: {[*found, *[_SUB] * len(subs)]} of universal_checkpoint_info all claim it")
        vocabulary = any(_matches(pattern, name) for pattern in self.info.get(_VOCABULARY) or ())
        if subs:
            return self._sub_rule(name, num_dims, subs[0])
        if _AVERAGED in found:
            raise UnsupportedError(
                f"{name}: {_AVERAGED} of universal_checkpoint_info asks for an average over ranks",
                hint="an average is not a copy: no exact conversion exists",
            )
        if _REPLICATED in found or num_dims == 0:
            return Rule(dim=None, vocabulary=vocabulary)
        if _ROW in found:
            return Rule(dim=1, vocabulary=vocabulary)
        if _TWO_SUB in found:
            return Rule(dim=0, num_parts=2)
        return Rule(dim=0, vocabulary=vocabulary)

    def _sub_rule(self, name: str, num_dims: int, entry: Any) -> Rule:
        shape, dim = tuple(entry["shape"]), int(entry["partition_dim"])
        if len(shape) != num_dims or not 0 <= dim < num_dims:
            raise UnsupportedError(
                f"{name}: {_SUB} gives the view {shape}, the parameter has {num_dims} dims",
                hint="views that change the number of dims are not converted",
            )
        sizes = shape[dim]
        if isinstance(sizes, tuple | list):
            return Rule(dim=dim, parts=tuple(int(size) for size in sizes))
        if self.info.get("universal_checkpoint_version", 0.0) < 0.4:
            return Rule(dim=dim, num_parts=int(sizes))
        return Rule(dim=dim)


def _sub_matches(entry: Any, name: str) -> bool:
    if not isinstance(entry, Mapping) or not {"patterns", "shape", "partition_dim"} <= entry.keys():
        raise UnsupportedError(
            f"{_SUB} of universal_checkpoint_info has an entry without patterns, shape, partition_dim"
        )
    return any(_matches(pattern, name) for pattern in entry["patterns"])


def _matches(pattern: Any, name: str) -> bool:
    if not isinstance(pattern, str):
        raise UnsupportedError(f"universal_checkpoint_info: pattern {pattern!r:.80} is not a string")
    try:
        return re.match(pattern, name) is not None
    except re.error as error:
        raise UnsupportedError(f"universal_checkpoint_info: pattern {pattern!r:.80}: {error}") from error


def parse(info: Any) -> Patterns:
    """Read `universal_checkpoint_info` as saved; None means that there was none.

    Raises:
        UnsupportedError: uneven splits, which need more than these patterns.
    """
    if not isinstance(info, Mapping):
        return Patterns(info={}, declared=False)
    widths = info.get("sub_param_shard_widths") or {}
    for pattern, per_part in widths.items():
        if any(len(set(part)) > 1 for part in per_part):
            raise UnsupportedError(f"universal_checkpoint_info: {pattern} is cut into uneven widths {per_part}")
    return Patterns(info=info, declared=True)
