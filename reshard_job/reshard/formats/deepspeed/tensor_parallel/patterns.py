"""Find how tensor parallelism cut each parameter, from the patterns of `universal_checkpoint_info`.

DeepSpeed describes the cuts by regular expressions that match from the start of a name (`re.match`;
deepspeed/checkpoint/constants.py and ds_to_universal.py, 0.19.8). Here each parameter gets one `Rule`, which says which
boxes of the whole tensor a rank holds. The rest of the program knows only boxes.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from reshard.errors import UnsupportedError
from reshard.formats.deepspeed.tensor_parallel.affine import Unrolled, check_map, read_maps
from reshard.formats.deepspeed.tensor_parallel.regex import PatternError, PatternSet
from reshard.formats.deepspeed.tensor_parallel.rules import WHOLE, Rule, Shape

_VOCABULARY = "vocabulary_parameter_patterns"
_REPLICATED = "tp_replicated_parameter_patterns"
_STAGES = "pipeline_replicated_parameter_patterns"
_ROW = "parameter_with_row_parallelism_patterns"
_TWO_SUB = "parameter_with_2_sub_params_cat_dim_0"
_SUB = "parameter_with_sub_params"
_WIDTHS = "sub_param_shard_widths"
_UNSUPPORTED = "autotp_unsupported_parameter_patterns"
_MAPS = "affine_map"
AVERAGED = "parameter_to_average_patterns"
"""Key for parameters of which every tensor-parallel rank trains a copy by itself: the paper's partial parameters."""

COLUMN = "parameter_with_column_parallelism_patterns"
"""Key of pattern files for parameters that are cut along dim 0; a description with this key has no default rule."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Patterns:
    """The parsed `universal_checkpoint_info`.

    Attributes:
        info: as saved.
        declared: the checkpoint has one.
    """

    info: Mapping[str, Any]
    declared: bool
    _unrolled: Unrolled = dataclasses.field(default_factory=Unrolled, init=False, repr=False, compare=False)
    _sets: dict[str, tuple[PatternSet, Sequence[int]]] = dataclasses.field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    @property
    def vocabulary_rows(self) -> tuple[int, int] | None:
        """Return the true and the padded number of rows of the vocabulary, or None if they are not stated."""
        true, padded = self.info.get("original_vocab_size"), self.info.get("padded_vocab_size")
        if not isinstance(true, int) or not isinstance(padded, int):
            return None
        if not 0 < true <= padded:
            raise UnsupportedError(f"universal_checkpoint_info: vocabulary of {true} rows padded to {padded}")
        return true, padded

    @property
    def vocabulary_multiple(self) -> int | None:
        """Return the number whose multiple times tp is the padded size; None if the padded size is fixed.

        The key is reshard's own.
        """
        value = self.info.get("vocab_multiple")
        return value if isinstance(value, int) and value > 0 else None

    def padded_rows(self, tp: int) -> int | None:
        """Return the padded rows of the vocabulary at a tensor-parallel degree, or None if they are not stated."""
        rows = self.vocabulary_rows
        if rows is None:
            return None
        if self.vocabulary_multiple is None:
            return rows[1]
        if self.vocabulary_multiple > rows[1]:
            raise UnsupportedError(
                f"universal_checkpoint_info: a vocabulary of {rows[1]} padded rows is no multiple of"
                f" {self.vocabulary_multiple}"
            )
        unit = self.vocabulary_multiple * tp
        return math.ceil(rows[0] / unit) * unit

    @property
    def tells_rows(self) -> bool:
        """Return whether row-parallel parameters are declared; Megatron-DeepSpeed leaves them out at tp=1."""
        return (
            COLUMN in self.info
            or bool(self.info.get(_ROW))
            or any(
                isinstance(entry, Mapping) and entry.get("partition_dim", 0) != 0 for entry in self.info.get(_SUB) or ()
            )
        )

    def names(self, name: str) -> bool:
        """Return whether a pattern says how a tensor is cut; DeepSpeed cuts other parameters along dim 0."""
        listed = (_REPLICATED, AVERAGED, COLUMN, _ROW, _TWO_SUB, _VOCABULARY)
        return any(self._find(key, name) for key in (*listed, _SUB))

    def is_vocabulary(self, name: str) -> bool:
        """Return whether a pattern declares that a tensor belongs to the vocabulary."""
        return bool(self._find(_VOCABULARY, name))

    def takes_first_stage(self, name: str) -> bool:
        """Return whether only the copy of the first stage counts of a parameter that several stages hold.

        DeepSpeed's converter takes that one of all parameters with such a pattern. Of a tied module, DeepSpeed keeps
        one weight equal on all stages: the vocabulary, whose copies are compared. Others (the learned positions of
        Megatron-DeepSpeed) are used on the first stage, and keep their first values on the last one. Copies of partial
        parameters are compared between stages before the mean of the ranks is taken.
        """
        is_named = bool(self._find(_STAGES, name))
        return is_named and not self.is_vocabulary(name) and not self._find(AVERAGED, name)

    def _find(self, key: str, name: str) -> list[int]:
        """Return the positions of the entries under a key of the description whose patterns match a name.

        Raises:
            UnsupportedError: a pattern is refused, or the entries are no patterns.
        """
        if key not in self._sets:
            self._sets[key] = self._read(key)
        patterns, entries = self._sets[key]
        try:
            return sorted({entries[at] for at in patterns.find(name)})
        except PatternError as error:
            raise UnsupportedError(f"universal_checkpoint_info: {error}") from error

    def _values(self, key: str, name: str) -> Iterator[Any]:
        """Yield the values of those patterns under a key of the description that match a name."""
        numbers = self._find(key, name)
        if numbers:
            values = list((read_maps(self.info) if key == _MAPS else self.info[key]).values())
            yield from (values[at] for at in numbers)

    def _read(self, key: str) -> tuple[PatternSet, Sequence[int]]:
        """Read the patterns under a key of the description; return them and the entry that each belongs to."""
        patterns = read_maps(self.info) if key == _MAPS else self.info.get(key) or ()
        expected: Any = Mapping if key in (_MAPS, _WIDTHS, _UNSUPPORTED) else list | tuple
        if patterns and not isinstance(patterns, expected):
            raise UnsupportedError(f"{key} of universal_checkpoint_info is {patterns!r:.80}: expected patterns")
        entries: Sequence[int] = range(len(patterns))
        if key == _SUB:
            owned = [(at, pattern) for at, entry in enumerate(patterns) for pattern in _patterns_of(entry)]
            patterns, entries = [pattern for _, pattern in owned], [at for at, _ in owned]
        try:
            return PatternSet(patterns), entries
        except PatternError as error:
            raise UnsupportedError(f"universal_checkpoint_info: {error}") from error

    def rule(self, name: str, num_dims: int) -> Rule:
        """Return the rule for a parameter.

        Raises:
            UnsupportedError: several categories match it, or it cannot be converted exactly.
        """
        categories = [key for key in (_REPLICATED, AVERAGED, COLUMN, _ROW, _TWO_SUB) if self._find(key, name)]
        subs = [self.info[_SUB][at] for at in self._find(_SUB, name)]
        if categories[:2] == [_REPLICATED, AVERAGED]:
            categories.remove(AVERAGED)  # DeepSpeed looks for copies first, and then they must be equal
        if len(categories) + len(subs) > 1:
            claims = [*categories, *[_SUB] * len(subs)]
            raise UnsupportedError(f"{name}: {claims} of universal_checkpoint_info all claim it")
        vocabulary = self.is_vocabulary(name)
        self._refuse_unsupported(name)
        if subs:
            return self._sub_rule(name, num_dims, subs[0])
        if not categories and COLUMN in self.info:
            raise UnsupportedError(
                f"{name}: no pattern matches it", hint="add a rule to the file of patterns: none is assumed"
            )
        if AVERAGED in categories:
            is_mapped = bool(self._find(_MAPS, name))  # DeepSpeed follows a map, which has no mean
            return Rule(dim=None, vocabulary=vocabulary, averaged=not is_mapped)
        if _REPLICATED in categories or num_dims == 0:
            return Rule(dim=None, vocabulary=vocabulary)
        if _ROW in categories:
            return Rule(dim=1, vocabulary=vocabulary)
        if _TWO_SUB in categories:
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
        """Return the size that each rank holds of each fused tensor, `[parts][ranks]`; empty if it is not stated."""
        for widths in self._values(_WIDTHS, name):
            return tuple(tuple(int(width) for width in part) for part in widths)
        return ()

    def _refuse_unsupported(self, name: str) -> None:
        for reason in self._values(_UNSUPPORTED, name):
            raise UnsupportedError(f"{name}: DeepSpeed's AutoTP says it cannot be converted: {reason!s:.200}")

    def resolve(self, name: str, shards: Sequence[Shape]) -> tuple[Rule, Shape]:
        """Return the rule and the whole shape of a parameter whose ranks have shards of these shapes.

        Raises:
            UnsupportedError: see `rule` and `Rule.resolve`; or an affine map contradicts the rule.
        """
        if not self.declared:
            return WHOLE.resolve(name, shards)
        rule, whole = self.rule(name, len(shards[0])).resolve(name, shards)
        for entry in self._values(_MAPS, name):
            check_map(name, entry, rule, whole, len(shards), unrolled=self._unrolled)
        return rule, whole

    def info_at(self, tp: int, source_tp: int) -> Mapping[str, Any]:
        """Return the description for a tensor-parallel degree, without maps and widths that hold for another one."""
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
    """Return the patterns of an entry about fused parameters, after a check of its keys.

    Raises:
        UnsupportedError: keys are missing, or the patterns are no list.
    """
    if not isinstance(entry, Mapping) or not {"patterns", "shape", "partition_dim"} <= entry.keys():
        raise UnsupportedError(
            f"{_SUB} of universal_checkpoint_info has an entry without patterns, shape, partition_dim"
        )
    if not isinstance(entry["patterns"], list | tuple):
        raise UnsupportedError(f"{_SUB} of universal_checkpoint_info has the patterns {entry['patterns']!r:.80}")
    return entry["patterns"]


def parse(info: Any) -> Patterns:
    """Read `universal_checkpoint_info` as saved; None means that the checkpoint has none."""
    if not isinstance(info, Mapping):
        return Patterns(info={}, declared=False)
    return Patterns(info=info, declared=True)
