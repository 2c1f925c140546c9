"""Describe a universal checkpoint as a native one, so that native files can be laid out from its folder alone.

DeepSpeed's converter copies the model files and rank 0's optimizer file without its partitions. Those files hold almost
everything that native files hold besides tensors. The description has the files that the run would have saved, without
the bytes of their tensors.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar

from reshard.errors import UnsupportedError
from reshard.formats.deepspeed import autoep, pipeline
from reshard.formats.deepspeed.experts import Experts, find_experts, is_native
from reshard.formats.deepspeed.logical import Model, Param, Stage, is_layered, make_param, merge_groups, parse_tied_key
from reshard.formats.deepspeed.reading.reader import DeepSpeedExtra as NativeExtra
from reshard.formats.deepspeed.tensor_parallel import patterns
from reshard.formats.deepspeed.tensor_parallel.patterns import Patterns
from reshard.formats.deepspeed.tensor_parallel.rules import Rule
from reshard.formats.universal.groups import GroupState
from reshard.formats.universal.hints import Hints
from reshard.formats.universal.module_weights import find_module_weights
from reshard.formats.universal.names import NAME
from reshard.formats.universal.native_files import build_native_contents
from reshard.formats.universal.source import Shape, UniversalContents
from reshard.formats.universal.weights import Weights


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class UniversalExtra:
    """Facts of a universal checkpoint besides its tensors that writers of DeepSpeed's formats need.

    Attributes:
        source: the files that are not atoms.
        params: every optimized parameter.
        hints: parameter -> what its atoms say about tensor parallelism; None where they say nothing.
        weights: what is not optimized (frozen, buffers).
        groups: states of each parameter group.
        commit_model: `Commit.model` of the source.
        tp: degree that the folder was laid out for; the description of the vocabulary is true for this degree.
    """

    format_name: ClassVar[str] = NAME
    source: UniversalContents
    params: Mapping[str, Param]
    hints: Mapping[str, Hints | None]
    weights: Mapping[str, Param]
    groups: tuple[GroupState, ...]
    commit_model: Mapping[str, Any]
    tp: int

    def pipeline_info(self) -> pipeline.PipelineInfo | None:
        """Read the description of the pipeline from the commit, or else from the model file."""
        return pipeline.parse(self.commit_model.get("pipeline", self.source.model.value.get("pipeline_layout")))

    def to_native(self) -> NativeExtra:
        """Describe the checkpoint as a native one.

        Raises:
            UnsupportedError: the folder lacks a fact; the message names it.
        """
        source = self.source
        info = self.pipeline_info()
        weights = find_module_weights(source, self.weights, info)
        rank_patterns = _find_patterns(self)
        experts = _find_experts(source, weights)
        params = {
            name: _make_param(source, name, shapes, rank_patterns)
            if experts is None or name not in experts.stacked
            else Param(name=name, shape=self.params[name].shape, rule=Rule(dim=0))
            for name, shapes in source.shapes.items()
        }
        others = {
            name: _make_param(source, name, (param.shape,), rank_patterns) for name, param in self.weights.items()
        }
        stages = tuple(Stage(groups=groups, ids=tuple(range(len(groups)))) for groups in source.stages)
        contents = build_native_contents(source, self.groups, weights, params | others, experts)
        if info is not None and experts is not None and all(map(is_layered, params)):
            contents = dataclasses.replace(contents, pipeline=True)
        return NativeExtra(
            source=contents,
            model=Model(
                params=params,
                stages=stages,
                groups=merge_groups(stages, len(source.groups), str(source.folder), info),
                patterns=rank_patterns,
                pipeline=info,
                tied_layers=_find_tied_layers(weights),
                round_robin=False,
            ),
            weights=others,
            commit_model=self.commit_model,
            element_bytes=2 if contents.half_type else 4,
            aliases=source.aliases,
        )


def _find_patterns(extra: UniversalExtra) -> Patterns:
    """Return `universal_checkpoint_info` for the degree of the model files, which is 1 if reshard wrote them."""
    saved_patterns = extra.source.patterns
    if not saved_patterns.declared or extra.source.tp == extra.tp:
        return saved_patterns
    return patterns.parse(saved_patterns.info_at(extra.source.tp, extra.tp))


def _make_param(source: UniversalContents, name: str, shapes: tuple[Shape, ...], rank_patterns: Patterns) -> Param:
    """Make a parameter from its shards' shapes; a vocabulary gets all the rows that it had in the run."""
    rows = rank_patterns.vocabulary_rows
    if rows is not None and len(shapes) == 1 and shapes[0] and rank_patterns.is_vocabulary(name):
        shapes = ((rows[1], *shapes[0][1:]),)
    return make_param(name, shapes, rank_patterns, source.tp)


def _find_tied_layers(weights: Weights) -> dict[int, str]:
    """Map each layer whose file holds a tied module to the key of that module."""
    first_names = {layer: names[0] for layer, names in (weights.layers or {}).items() if names}
    return {layer: key for layer, name in first_names.items() if (key := parse_tied_key(name)) is not None}


def _find_experts(source: UniversalContents, weights: Weights) -> Experts | None:
    where = str(source.folder)
    if layers := autoep.read_layers(source.model.value):
        return Experts(stacked=autoep.find_stacks(layers, where)[0])
    if not weights.experts:
        if native := [name for name in source.shapes if is_native(name)]:
            raise UnsupportedError(
                f"does not say which layers of experts there are, of which {native[0]} is one: DeepSpeed's converter"
                " copies no files of experts",
                path=where,
                hint="convert from the native checkpoint, or name one of the model with --like",
            )
        return None
    return find_experts(weights.experts, source.shapes, where)[0]
