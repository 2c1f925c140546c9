"""How tensor parallelism cut each parameter, from `universal_checkpoint_info`.

DeepSpeed describes this by regular expressions (deepspeed/checkpoint/constants.py and ds_to_universal.py, 0.19.8; they
match from the start of a name, `re.match`). Here each parameter gets one `Rule`, and a rule says which boxes of the
whole tensor a rank holds. The rest of the program knows boxes only.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from reshard.errors import CorruptSourceError, UnsupportedError
from reshard.formats.deepspeed.tensor_parallel.affine import Unrolled, check_map, maps_of
from reshard.formats.deepspeed.tensor_parallel.regex import PatternError, PatternSet
from reshard.formats.deepspeed.tensor_parallel.rules import WHOLE, Rule, Shape

_VOCABULARY = "vocabulary_parameter_patterns"
_REPLICATED = "tp_replicated_parameter_patterns"
_AVERAGED = "parameter_to_average_patterns"
_ROW = "parameter_with_row_parallelism_patterns"
_TWO_SUB = "parameter_with_2_sub_params_cat_dim_0"
_SUB = "parameter_with_sub_params"
_WIDTHS = "sub_param_shard_widths"
_UNSUPPORTED = "autotp_unsupported_parameter_patterns"
_MAPS = "affine_map"
COLUMN = "parameter_with_column_parallelism_patterns"
"""Ours: names what is cut along dim 0, in a description in which nothing is left to a default."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Patterns:
    """The parsed `universal_checkpoint_info`.

    Attributes:
        info: as saved.
        declared: there was one at all.
    """

    info: Mapping[str, Any]
    declared: bool
    _unrolled: Unrolled = dataclasses.field(default_factory=Unrolled, init=False, repr=False, compare=False)
    _sets: dict[str, tuple[PatternSet, Sequence[int]]] = dataclasses.field(
        default_factory=dict, init=False, repr=False, compare=False
    )

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
        if self.vocabulary_multiple > rows[1]:
            raise CorruptSourceError(
                f"universal_checkpoint_info: a vocabulary of {rows[1]} padded rows is no multiple of"
                f" {self.vocabulary_multiple}"
            )
        unit = self.vocabulary_multiple * tp
        return math.ceil(rows[0] / unit) * unit

    @property
    def tells_rows(self) -> bool:
        """Row-parallel parameters are declared. Megatron-DeepSpeed leaves them out when it runs at tp=1."""
        return (
            COLUMN in self.info
            or bool(self.info.get(_ROW))
            or any(
                isinstance(entry, Mapping) and entry.get("partition_dim", 0) != 0 for entry in self.info.get(_SUB) or ()
            )
        )

    def names(self, name: str) -> bool:
        """Some pattern says how a tensor is cut; otherwise that is DeepSpeed's default for parameters, dim 0."""
        listed = (_REPLICATED, _AVERAGED, COLUMN, _ROW, _TWO_SUB, _VOCABULARY)
        return any(self._find(key, name) for key in (*listed, _SUB))

    def is_vocabulary(self, name: str) -> bool:
        """A pattern calls it a vocabulary's."""
        return bool(self._find(_VOCABULARY, name))

    def _find(self, key: str, name: str) -> list[int]:
        """Positions of the entries of a list or a mapping of the description that match a name.

        Raises:
            UnsupportedError: a pattern is refused, or there is something else than patterns.
        """
        if key not in self._sets:
            self._sets[key] = self._read(key)
        patterns, entries = self._sets[key]
        try:
            return sorted({entries[at] for at in patterns.find(name)})
        except PatternError as error:
            raise UnsupportedError(f"universal_checkpoint_info: {error}") from error

    def _values(self, key: str, name: str) -> Iterator[Any]:
        """What a mapping of the description says of the patterns that match a name."""
        numbers = self._find(key, name)
        if numbers:
            values = list((maps_of(self.info) if key == _MAPS else self.info[key]).values())
            yield from (values[at] for at in numbers)

    def _read(self, key: str) -> tuple[PatternSet, Sequence[int]]:
        """The patterns of a list or a mapping, and which of its entries each is of."""
        found = maps_of(self.info) if key == _MAPS else self.info.get(key) or ()
        expected: Any = Mapping if key in (_MAPS, _WIDTHS, _UNSUPPORTED) else list | tuple
        if found and not isinstance(found, expected):
            raise UnsupportedError(f"{key} of universal_checkpoint_info is {found!r:.80}: expected patterns")
        entries: Sequence[int] = range(len(found))
        if key == _SUB:
            owned = [(at, pattern) for at, entry in enumerate(found) for pattern in _patterns_of(entry)]
            found, entries = [pattern for _, pattern in owned], [at for at, _ in owned]
        try:
            return PatternSet(found), entries
        except PatternError as error:
            raise UnsupportedError(f"universal_checkpoint_info: {error}") from error

    def rule(self, name: str, num_dims: int) -> Rule:
        """The rule for a parameter.

        Raises:
            UnsupportedError: two categories claim it, or a category that cannot be converted exactly.
        """
        found = [key for key in (_REPLICATED, _AVERAGED, COLUMN, _ROW, _TWO_SUB) if self._find(key, name)]
        subs = [self.info[_SUB][at] for at in self._find(_SUB, name)]
        if len(found) + len(subs) > 1:
            raise UnsupportedError(f"{name}: {[*found, *[_SUB] * len(subs)]} of universal_checkpoint_info all claim it")
        vocabulary = self.is_vocabulary(name)
        self._refuse_unsupported(name)
        if subs:
            return self._sub_rule(name, num_dims, subs[0])
        if not found and COLUMN in self.info:
            raise UnsupportedError(
                f"{name}: no pattern matches it", hint="add a rule to the file of patterns: none is assumed"
            )
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
        if not 0 <= dim < len(shape):
            raise UnsupportedError(f"{name}: {_SUB} cuts dim {dim} of the view {shape}")
        view = tuple(sum(size) if isinstance(size, tuple | list) else int(size) for size in shape)
        sizes, own = shape[dim], bool(entry.get("own_dims", len(shape) == num_dims))
        widths = self._declared_widths(name)
        if not isinstance(sizes, tuple | list) and not widths:
            counts = self.info.get("universal_checkpoint_version", 0.0) < 0.4
            if not own:
                raise UnsupportedError(
                    f"{name}: {_SUB} gives the view {shape} without the sizes of the parts along its dim {dim},"
                    f" the parameter has {num_dims} dims",
                    hint="say the sizes of the fused tensors as a list",
                )
            return Rule(dim=dim, num_parts=int(sizes) if counts else 1)
        parts = tuple(map(sum, widths)) if widths else tuple(int(size) for size in sizes)
        return Rule(dim=dim, parts=parts, widths=widths, view=() if own else view)

    def _declared_widths(self, name: str) -> tuple[Shape, ...]:
        """What each rank of the source holds of each fused part, `[parts][ranks]`; empty where it is not said."""
        for widths in self._values(_WIDTHS, name):
            return tuple(tuple(int(width) for width in part) for part in widths)
        return ()

    def _refuse_unsupported(self, name: str) -> None:
        for reason in self._values(_UNSUPPORTED, name):
            raise UnsupportedError(f"{name}: DeepSpeed's AutoTP says it cannot be converted: {reason!s:.200}")

    def resolve(self, name: str, shards: Sequence[Shape]) -> tuple[Rule, Shape]:
        """The rule of a parameter with shards of these shapes, one for each rank, and its whole shape.

        Raises:
            UnsupportedError: see `rule` and `Rule.resolve`; or an affine map says otherwise.
        """
        if not self.declared:
            return WHOLE.resolve(name, shards)
        rule, whole = self.rule(name, len(shards[0])).resolve(name, shards)
        for entry in self._values(_MAPS, name):
            check_map(name, entry, rule, whole, len(shards), unrolled=self._unrolled)
        return rule, whole

    def info_at(self, tp: int, source_tp: int) -> Mapping[str, Any]:
        """The description as true for a tensor-parallel degree: maps and widths of other ranks are left out."""
        rows = self.padded_rows(tp)
        padded = {} if rows is None else {"padded_vocab_size": rows}
        if tp == source_tp:
            return {**self.info, **padded}
        info = {key: value for key, value in self.info.items() if key not in ("affine_map", _WIDTHS)} | padded
        if _WIDTHS not in self.info:
            return info
        widths = {
            pattern: [[sum(part) // tp] * tp for part in parts]
            for pattern, parts in self.info[_WIDTHS].items()
            if all(sum(part) % tp == 0 for part in parts)
        }
        return {**info, _WIDTHS: widths}


def _patterns_of(entry: Any) -> Sequence[Any]:
    """The patterns of an entry about a fused parameter, which has what is asked for below."""
    if not isinstance(entry, Mapping) or not {"patterns", "shape", "partition_dim"} <= entry.keys():
        raise UnsupportedError(
            f"{_SUB} of universal_checkpoint_info has an entry without patterns, shape, partition_dim"
        )
    if not isinstance(entry["patterns"], list | tuple):
        raise UnsupportedError(f"{_SUB} of universal_checkpoint_info has the patterns {entry['patterns']!r:.80}")
    return entry["patterns"]


def parse(info: Any) -> Patterns:
    """Read `universal_checkpoint_info` as saved; None means that there was none."""
    if not isinstance(info, Mapping):
        return Patterns(info={}, declared=False)
    return Patterns(info=info, declared=True)
