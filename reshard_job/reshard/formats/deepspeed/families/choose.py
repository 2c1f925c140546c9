"""Choose the family that a model is of, and say with patterns how it is split for tensor parallelism."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from typing import Any

from reshard.errors import UnsupportedError
from reshard.formats.deepspeed.families.fit import Fit, fit_family, rate
from reshard.formats.deepspeed.families.shapes import MisfitError
from reshard.formats.deepspeed.families.tables import FAMILIES
from reshard.formats.deepspeed.logical import Param, make_param
from reshard.formats.deepspeed.tensor_parallel import pattern_file
from reshard.formats.deepspeed.tensor_parallel.patterns import Patterns, parse

_SECTION = "tensor_parallel"
_OWN_SPLITS = ("partition_config", "vocab_parallel_lm_head", "tp", "tensor_parallel", "injection_policy_tuple")
"""Keys of `tensor_parallel` in ds_config that change how AutoTP splits a model."""
_VOCABULARY = ("vocabulary_parameter_patterns", "original_vocab_size", "padded_vocab_size", "vocab_multiple")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """A model whose source does not say how it is split.

    Attributes:
        params: optimized parameters, by name.
        weights: frozen parameters and buffers, by name.
        aliases: second name of a tied parameter -> its first.
        patterns: what the source says nevertheless.
        file: content of the model file of rank 0: `ds_config`, client state.
    """

    params: Mapping[str, Param]
    weights: Mapping[str, Param]
    aliases: Mapping[str, str]
    patterns: Patterns
    file: Mapping[str, Any]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Split:
    """The splits of a known family.

    Attributes:
        params: optimized parameters with their rules, by name.
        weights: frozen parameters and buffers with their rules.
        patterns: description of the splits.
        note: which family it is, for the plan and the report.
    """

    params: Mapping[str, Param]
    weights: Mapping[str, Param]
    patterns: Patterns
    note: str


def split_by_family(model: Model, tp: int) -> Split | list[str]:
    """Return how a model is split over `tp` ranks if it is of a known family.

    Else return why it is not of the closest family: an empty list if it has no name of any.

    Raises:
        UnsupportedError: families that the model could be of are split in different ways, DeepSpeed does not split the
            family, or `tp` does not divide its heads.
    """
    shapes = {param.name: param.shape for param in (*model.params.values(), *model.weights.values())}
    preset = _find_preset(model.file.get("ds_config"))
    if preset is None:
        return [f"ds_config has {_SECTION} settings of its own for the splits, which no known family has"]
    fits, misfits = _find_fits(shapes, model.aliases, preset)
    if not fits:
        return misfits
    chosen = [_parse_fit(fit, model.patterns) for fit in fits]
    titles = " or ".join(fit.family.title for fit in fits)
    if len({_describe_rules(patterns, shapes) for patterns in chosen}) > 1:
        raise UnsupportedError(
            f"tp={tp}: the parameters are those of {titles}, which are split in different ways",
            hint="say how with --patterns FILE",
        )
    for fit in fits:
        _refuse(fit, tp, model.file.get("checkpoint_version"))
    params, weights = (
        {name: make_param(name, [param.shape], chosen[0], 1) for name, param in own.items()}
        for own in (model.params, model.weights)
    )
    _check_stated(model.patterns, chosen[0], shapes, titles)
    return Split(params=params, weights=weights, patterns=chosen[0], note=_make_note(fits, titles, len(shapes)))


def _find_preset(config: Any) -> str | None:
    """Return AutoTP's preset in ds_config, empty for none; None if ds_config has splits of its own."""
    section = config.get(_SECTION) if isinstance(config, Mapping) else None
    if not isinstance(section, Mapping):
        return ""
    if any(section.get(key) not in (None, {}) for key in _OWN_SPLITS):
        return None
    preset = section.get("preset_model") or ""
    return preset.lower() if isinstance(preset, str) else None


def _find_fits(
    shapes: Mapping[str, tuple[int, ...]], aliases: Mapping[str, str], preset: str
) -> tuple[list[Fit], list[str]]:
    """Return the families that a model is of, and why it is not of the closest other one, if it has its names."""
    fits: list[Fit] = []
    misfits: list[tuple[tuple[int, int], str]] = []
    for family in (family for family in FAMILIES if preset in family.presets):
        try:
            fits.append(fit_family(family, shapes, aliases))
        except MisfitError as error:
            rating = rate(family, shapes)
            if rating[0]:
                misfits.append((rating, f"it is not {family.title}: {error}"))
    if not misfits:
        return fits, []
    return fits, [max(misfits, key=lambda misfit: misfit[0])[1]]


def _parse_fit(fit: Fit, stated: Patterns) -> Patterns:
    """Return the patterns of a family; rows of the vocabulary are those that the source states."""
    rules: list[dict[str, Any]] = []
    for entry in fit.family.entries:
        names = [name for name, own in fit.entries.items() if own is entry]
        if not names:
            continue
        pattern = re.sub(r"\\\{[a-z]+\\\}", r"\\d+", re.escape(entry.name))
        kind = fit.kind_of(names[0])
        split = {"kind": kind} if entry.parts == 1 else {"kind": "shard-nc", "dim": 0, "parts": entry.parts}
        rules.append({"pattern": pattern, **split})
    info = dict(pattern_file.build({"version": pattern_file.VERSION, "rules": rules}))
    return parse({**info, **{key: stated.info[key] for key in _VOCABULARY if key in stated.info}})


def _describe_rules(patterns: Patterns, shapes: Mapping[str, tuple[int, ...]]) -> tuple[Any, ...]:
    return tuple(patterns.rule(name, len(shape)) for name, shape in shapes.items())


def _refuse(fit: Fit, tp: int, version: Any) -> None:
    """Refuse a family that DeepSpeed does not split, or not over so many ranks.

    Raises:
        UnsupportedError: the message gives the reason.
    """
    family, key, head = fit.family, fit.sizes.get("key", 0), fit.sizes.get("head", 0)
    if family.refused:
        raise UnsupportedError(
            f"tp={tp}: the parameters are those of {family.title}: {family.refused}", hint="choose tp=1"
        )
    if isinstance(version, int | float) and version < family.version:
        raise UnsupportedError(
            f"tp={tp}: {family.title} with checkpoint_version {version}: heads are fused otherwise than since"
            f" {family.version:g}",
            hint="say with --patterns FILE how all parameters are split",
        )
    if head and key // head % tp:
        raise UnsupportedError(
            f"tp={tp}: {family.title} with {key // head} heads of keys and values: AutoTP would give the ranks"
            " different numbers of heads",
            hint="choose a tp that divides the number of heads",
        )


def _check_stated(stated: Patterns, chosen: Patterns, shapes: Mapping[str, tuple[int, ...]], titles: str) -> None:
    """Compare what the source says with the family; Megatron-DeepSpeed says it at tp=1 but for row-parallel ones.

    Raises:
        UnsupportedError: a pattern of the source splits a parameter in another way.
    """
    if not stated.declared:
        return
    for name, shape in shapes.items():
        if not stated.names(name):
            continue
        own, expected = stated.rule(name, len(shape)), chosen.rule(name, len(shape))
        if (own.dim, own.num_parts or len(own.parts)) != (expected.dim, expected.num_parts or len(expected.parts)):
            raise UnsupportedError(
                f"{name}: universal_checkpoint_info splits it in another way than {titles}",
                hint="say with --patterns FILE how all parameters are split",
            )


def _make_note(fits: list[Fit], titles: str, count: int) -> str:
    fit = fits[0]
    sizes = ", ".join(f"{name} {size}" for name, size in fit.sizes.items() if name != "positions")
    tied = ", with the output head tied to the embedding" if fit.tied else ""
    heads = (
        ""
        if fit.sizes.get("head") or not fit.sizes.get("key")
        else "; the files do not state the number of heads: tp must divide that of keys and values, or the run that"
        " loads the result finds other shapes"
    )
    advice = "".join(f"; {text}" for text in dict.fromkeys(fit.family.advice for fit in fits) if text)
    return (
        f"split as {titles}, because all {count} parameters have its names and shapes ({sizes}){tied}: --patterns"
        f" overrides{heads}{advice}"
    )
