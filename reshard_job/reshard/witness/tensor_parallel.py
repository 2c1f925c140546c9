"""Join tensor-parallel shards by the rules of DeepSpeed's ds_to_universal (deepspeed/checkpoint, 0.19.8).

`universal_checkpoint_info` lists patterns of names. A pattern is matched from the start of a name, as `re.match` does.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from reshard.formats.deepspeed.tensor_parallel.regex import Matcher
from reshard.storage.yaml_file import read_yaml
from reshard.witness.pickles import NotWitnessedError
from reshard.witness.table import Holder, Piece, Tensor, row_major

Shape = tuple[int, ...]


class Shard(NamedTuple):
    """The part of a parameter that one tensor-parallel rank holds.

    Attributes:
        shape: of the shard.
        holder: that holds its elements.
        start: element of the holder that is the first one.
        strides: elements of the holder between neighbours, [ndim].
        dtype: of the elements.
    """

    shape: Shape
    holder: Holder
    start: int
    strides: tuple[int, ...]
    dtype: str


_DEFAULT_KIND = "along dim 0"
_KINDS = (
    ("tp_replicated_parameter_patterns", "not at all"),
    ("parameter_to_average_patterns", "not at all, and is a mean"),
    ("parameter_with_2_sub_params_cat_dim_0", "as fused parts along dim 0"),
    ("parameter_with_row_parallelism_patterns", "along dim 1"),
)


_FEW_REPEATS = re.compile(r"[^*+?{]{0,200}(?:[*+?][^*+?{]{0,200}){0,2}")
_COSTLY = re.compile(r"\)[*+?{]|\(\?|\\[1-9]")


def _compile(pattern: str) -> Callable[[str], bool]:
    """Return a function that matches a pattern from the start of a name, whatever the pattern in bounded time.

    Python's engine is the faster one, and backtracks: it gets patterns with at most two repeats of single characters.
    """
    if _FEW_REPEATS.fullmatch(pattern) and not _COSTLY.search(pattern):
        compiled = re.compile(pattern)
        return lambda name: compiled.match(name) is not None
    return Matcher(pattern).match


class Patterns:
    """The patterns of a checkpoint.

    Args:
        info: `universal_checkpoint_info`, or None if the checkpoint has none.
    """

    def __init__(self, info: Any) -> None:
        self._info: Mapping[str, Any] = info if isinstance(info, Mapping) else {}
        self._is_stated = bool(self._info)
        self._matchers: dict[str, Callable[[str], bool]] = {}
        self._results: dict[tuple[str, str], bool] = {}

    def _matches(self, patterns: Any, name: str) -> bool:
        return any(self._is_match(str(pattern), name) for pattern in patterns or ())

    def _is_match(self, pattern: str, name: str) -> bool:
        if (pattern, name) not in self._results:
            if pattern not in self._matchers:
                self._matchers[pattern] = _compile(pattern)
            self._results[pattern, name] = self._matchers[pattern](name)
        return self._results[pattern, name]

    def vocabulary_rows(self, name: str) -> int | None:
        """Return the rows of a vocabulary without its padding; None if the parameter is no vocabulary."""
        if self._matches(self._info.get("vocabulary_parameter_patterns"), name):
            return int(self._info.get("original_vocab_size") or 0) or None
        return None

    def is_replicated(self, name: str) -> bool:
        """Return True if every rank holds the whole parameter."""
        return self._matches(self._info.get("tp_replicated_parameter_patterns"), name)

    def is_first_stages(self, name: str) -> bool:
        """Return True if ds_to_universal skips a parameter on later stages; the vocabulary is equal on all of them."""
        is_skipped = self._matches(self._info.get("pipeline_replicated_parameter_patterns"), name)
        is_average = self._matches(self._info.get("parameter_to_average_patterns"), name)
        return is_skipped and not is_average and self.vocabulary_rows(name) is None

    @property
    def omits_rows(self) -> bool:
        """Return True if there are no row-parallel patterns; Megatron-DeepSpeed leaves them out at tp=1."""
        return not self._info.get("parameter_with_row_parallelism_patterns")

    def listed_kind_of(self, name: str) -> str:
        """Return how a parameter that patterns list is cut, in words; empty if none lists it."""
        kind = self.kind_of(name)
        return "" if kind == _DEFAULT_KIND else kind

    def kind_of(self, name: str) -> str:
        """Return how the parameter is cut, in words; empty if the checkpoint does not say it."""
        if not self._is_stated:
            return ""
        for key, words in _KINDS:
            if self._matches(self._info.get(key), name):
                return words
        for rule in self._info.get("parameter_with_sub_params") or ():
            if self._matches(_field(rule, "patterns"), name):
                return f"as fused parts along dim {_field(rule, 'partition_dim')}"
        return _DEFAULT_KIND

    def join(self, name: str, shards: Sequence[Shard]) -> Tensor:
        """Return the tensor that shards of one rank after the other are parts of.

        Raises:
            NotWitnessedError: it is not known how the parameter was cut.
        """
        first = shards[0]
        is_average = self._matches(self._info.get("parameter_to_average_patterns"), name)
        if len(shards) == 1 or is_average or self.is_replicated(name):
            copies = [[_whole_piece(shard)] for shard in shards]
            return Tensor(first.shape, first.dtype, copies, num_averaged=len(shards) if is_average else 0)
        if not self._is_stated:
            raise NotWitnessedError("the checkpoint does not say how tensor parallelism cut it")
        for rule in self._info.get("parameter_with_sub_params") or ():
            matched = [pattern for pattern in _field(rule, "patterns") or () if self._is_match(str(pattern), name)]
            if matched:
                return self._join_parts(rule, str(matched[0]), shards)
        if self._matches(self._info.get("parameter_with_2_sub_params_cat_dim_0"), name):
            widths = [[shard.shape[0] // 2 for shard in shards]] * 2
            return _join_along(0, shards, [shard.shape for shard in shards], widths)
        dim = 1 if self._matches(self._info.get("parameter_with_row_parallelism_patterns"), name) else 0
        return _join_along(dim, shards, [shard.shape for shard in shards], [[shard.shape[dim] for shard in shards]])

    def _join_parts(self, rule: Any, pattern: str, shards: Sequence[Shard]) -> Tensor:
        """Join shards of fused parts, each of which was cut along one dim of a view of the parameter."""
        dim = int(_field(rule, "partition_dim"))
        view: list[Any] = list(_field(rule, "shape"))
        if isinstance(rule, Mapping) and rule.get("own_dims"):
            view += shards[0].shape[len(view) :]
        total = sum(math.prod(shard.shape) for shard in shards)
        sizes = view[dim]
        if isinstance(sizes, int):
            whole = sum(shard.shape[dim] for shard in shards)
            sizes = [whole // sizes] * sizes if sizes > 0 else [whole]
        widths = (self._info.get("sub_param_shard_widths") or {}).get(pattern)
        if widths is None:
            if any(size % len(shards) for size in sizes):
                raise NotWitnessedError("its fused parts are not divisible, and nothing says what each rank holds")
            widths = [[size // len(shards)] * len(shards) for size in sizes]
        view[dim] = sum(sizes)
        flat = [sum(size) if isinstance(size, tuple | list) else int(size) for size in view]
        known = math.prod(size for size in flat if size > 0)
        flat = [total // known if size < 0 else size for size in flat]
        views = [(*flat[:dim], sum(own[rank] for own in widths), *flat[dim + 1 :]) for rank in range(len(shards))]
        return _join_along(dim, shards, views, widths)


def read_pattern_file(path: Path | None) -> dict[str, Any] | None:
    """Return the content of a pattern file (docs/deepspeed-format.md) in the words of `universal_checkpoint_info`."""
    if path is None:
        return None
    content = read_yaml(path)
    sizes = content.get("vocabulary") or {}
    info: dict[str, Any] = {"original_vocab_size": sizes.get("rows")}
    lists = {
        "unique": "tp_replicated_parameter_patterns",
        "replicate": "tp_replicated_parameter_patterns",
        "average": "parameter_to_average_patterns",
        "shard-h": "parameter_with_row_parallelism_patterns",
    }
    for rule in content["rules"]:
        pattern = f"(?:{rule['pattern']})$"
        if rule.get("vocabulary"):
            info.setdefault("vocabulary_parameter_patterns", []).append(pattern)
        if rule["kind"] in lists:
            info.setdefault(lists[rule["kind"]], []).append(pattern)
        elif rule["kind"] != "shard-v":
            view, parts, dim = rule.get("view"), rule.get("parts"), rule["dim"]
            shape = list(view) if view else [-1] * (dim + 1)
            if isinstance(parts, int) and view:
                parts = [view[dim] // parts] * parts
            shape[dim] = tuple(parts) if isinstance(parts, list) else parts or ((view[dim],) if view else 1)
            entry = {"patterns": [pattern], "shape": shape, "partition_dim": dim, "own_dims": not view}
            info.setdefault("parameter_with_sub_params", []).append(entry)
    return info


def _field(rule: Any, name: str) -> Any:
    """Return a field of a rule, which is a dict or DeepSpeed's class SubparamShape."""
    return rule.get(name) if isinstance(rule, Mapping) else rule.field(name)


def _whole_piece(shard: Shard) -> Piece:
    return Piece((0,) * len(shard.shape), shard.shape, shard.holder, shard.start, shard.strides, shard.shape)


def _join_along(dim: int, shards: Sequence[Shard], views: Sequence[Shape], widths: Sequence[Sequence[int]]) -> Tensor:
    """Return the tensor whose parts, one behind the other along `dim`, were each cut over all ranks.

    Args:
        dim: of the views.
        shards: of the ranks.
        views: shape in which each rank's shard is cut.
        widths: elements along `dim` that each rank holds of each part, [parts][ranks].
    """
    total = sum(sum(own) for own in widths)
    whole = (*views[0][:dim], total, *views[0][dim + 1 :])
    pieces: list[Piece] = []
    before, inner = 0, [0] * len(shards)
    for own in widths:
        for rank, width in enumerate(own):
            shard, view = shards[rank], views[rank]
            strides = shard.strides if view == shard.shape else row_major(view)
            if view != shard.shape and shard.strides != row_major(shard.shape):
                raise NotWitnessedError("a view of a tensor with gaps")
            low = (*(0,) * dim, before, *(0,) * (len(view) - dim - 1))
            size = (*view[:dim], width, *view[dim + 1 :])
            if width:
                start = shard.start + inner[rank] * strides[dim]
                pieces.append(Piece(low, size, shard.holder, start, strides, whole))
            inner[rank] += width
            before += width
    return Tensor(_unfold(dim, shards, whole), shards[0].dtype, [pieces])


def _unfold(dim: int, shards: Sequence[Shard], whole: Shape) -> Shape:
    """Return the parameter's own shape, which may have fewer dims than a view that separates fused ones."""
    shape = shards[0].shape
    if len(shape) == len(whole):
        return whole
    step = math.prod(whole[dim + 1 :])
    for at in reversed(range(len(shape))):  # the dim of the parameter that the cut dim of the view is folded into
        inner = math.prod(shape[at + 1 :])
        if inner <= step < inner * shape[at]:
            others = math.prod(shape[:at]) * inner
            return (*shape[:at], math.prod(whole) // others, *shape[at + 1 :])
    raise NotWitnessedError("a view that does not fit the parameter")
