"""Lay out a universal checkpoint that unmodified DeepSpeed loads in ZeRO stages 1, 2 and 3.

DeepSpeed's own converter makes one form of folder for stages 1 and 2, and another for stage 3. This folder has what
both loaders need: dicts around tensors (stage 3 accepts them), `step.pt`, the model file under both names, and one
optimizer file in both forms (base_optimizer.py, `load_hp_checkpoint_state_from_checkpoint_dir`, and stage3.py, 0.19.8).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from reshard.errors import UnsupportedError
from reshard.formats.base import Request
from reshard.formats.deepspeed.fields import refuse_small_gradients
from reshard.formats.deepspeed.logical import Param
from reshard.formats.deepspeed.reading.reader import DeepSpeedExtra as NativeExtra
from reshard.formats.deepspeed.rows import Place
from reshard.formats.deepspeed.tensor_parallel.rules import WHOLE
from reshard.formats.deepspeed.writing.carried_objects import Template
from reshard.formats.deepspeed.writing.origins import TargetRows
from reshard.formats.deepspeed.writing.progress import Progress
from reshard.formats.pt.objects import Size, StatefulDict, Tensor, new_tensor
from reshard.formats.pt.writer import lay_out_pt
from reshard.formats.universal.blueprint import Blueprint, Group, blueprint_of
from reshard.formats.universal.hints import PARAM, Hints, for_param
from reshard.formats.universal.names import (
    MADE_FOR,
    MASTER,
    MODEL_FILES,
    NAME,
    OPTIMIZER_FILE,
    STEP,
    WEIGHTS,
    atom_file,
    check_names,
)
from reshard.formats.universal.refusals import list_warnings, refuse
from reshard.formats.universal.vocabulary import pad_vocabulary
from reshard.tensors.layout import ChecksumField, Index, TargetFile, TargetLayout
from reshard.tensors.shard_table import ranges_of
from reshard.topology import Topology


@dataclasses.dataclass(slots=True, kw_only=True)
class _Target:
    """A checkpoint that is being laid out."""

    rows: TargetRows
    files: list[TargetFile] = dataclasses.field(default_factory=list)

    def add(self, path: str, value: Any, tensors: Mapping[tuple[str, str], tuple[Param, Tensor]] | None = None) -> None:
        """Add a file; `tensors` describes its tensors: (state, name) -> parameter and tensor."""
        stem = path.rpartition("/")[2].removesuffix(".pt")
        layout = lay_out_pt(stem, value)
        checksums = tuple(
            ChecksumField(start=slot.offset, num_bytes=slot.num_bytes, positions=slot.crc_positions)
            for slot in layout.slots.values()
            if slot.num_bytes
        )
        for (state, _), (param, tensor) in (tensors or {}).items():
            place = Place(1, 0, 0, len(self.files), layout.slots[tensor.storage].offset)
            self.rows.add_shard(state, param, place, dtype=tensor.dtype, strides=tensor.stride)
        self.files.append(TargetFile(path=path, num_bytes=layout.num_bytes, fixed=layout.fixed, checksums=checksums))

    def add_atom(self, path: str, state: str, param: Param, dtype: str, hints: Hints) -> None:
        """Add the file of one state of one parameter."""
        tensor = new_tensor(dtype, param.shape)
        whole = dataclasses.replace(param, rule=WHOLE)
        self.add(path, {**hints, PARAM: tensor}, {(state, param.name): (whole, tensor)})


def lay_out(index: Index, request: Request) -> TargetLayout:
    """Lay out the tensors of `index`; everything else comes from `request.like` or the checkpoint behind `index`.

    Raises:
        UnsupportedError: DeepSpeed would load the target wrongly, or not at all, or a fact that it needs is not known.
    """
    described = index if request.like is None else request.like
    blueprint = blueprint_of(described)
    if blueprint is None:
        raise UnsupportedError(
            f"a checkpoint of the format {described.format} does not say what else a universal checkpoint holds",
            path=str(described.root),
            hint="describe the model with --model and the run with --ds-config (docs/model-description.md), or name"
            " with --like a DeepSpeed checkpoint of the same model, native or universal; a run that starts from weights"
            " alone loads them into the model before deepspeed.initialize",
        )
    progress = None if described is index else Progress.of(index, blueprint.aliases)
    blueprint = _apply_progress(blueprint, progress)
    blueprint, splits, misfits = _split_known_family(blueprint, request.topology)
    check_names((*blueprint.params, *blueprint.weights), str(index.root))
    if isinstance(index.extra, NativeExtra):
        refuse_small_gradients(index.extra.source, request.topology)
    refuse(blueprint, request.topology, misfits)
    params, weights = (
        {name: pad_vocabulary(param, blueprint, request.topology) for name, param in own.items()}
        for own in (blueprint.params, blueprint.weights)
    )
    target = _Target(rows=TargetRows(index, blueprint.aliases))
    model = _build_model_file(blueprint, params, weights, progress, request.topology)
    for name in MODEL_FILES:
        target.add(name, model)
    target.add(OPTIMIZER_FILE, _build_optimizer_file(blueprint, request.topology))
    for group in blueprint.groups:
        for name in group.names:
            _add_atoms(target, params[name], group, blueprint.hints[name])
    for name, param in weights.items():
        dtype = target.rows.source_type("weight", name) or target.rows.source_type(MASTER, name)
        target.add_atom(atom_file(name, MASTER), "weight", param, dtype or "float32", {})
    target.rows.require()
    return TargetLayout(
        format=NAME,
        topology=request.topology,
        files=tuple(target.files),
        shards=target.rows.build(),
        aliases=blueprint.aliases,
        zeros=ranges_of(target.rows.zeros),
        tensors=tuple(target.rows.tensors),
        origins=tuple(target.rows.origins),
        model=_make_commit_model(blueprint),
        notes=(
            *splits,
            *target.rows.zero_notes(),
            *_describe_unused(index, target.rows),
            *list_warnings(blueprint, request.topology, params),
        ),
    )


def _split_known_family(blueprint: Blueprint, target: Topology) -> tuple[Blueprint, tuple[str, ...], tuple[str, ...]]:
    """Split a model for tensor parallelism as its family is split, where nothing else says how.

    Returns:
        The blueprint with the splits, notes about them, and the reasons why the model is of no known family.

    Raises:
        UnsupportedError: see `split_by_family`.
    """
    if target.tp == 1 or blueprint.tp > 1 or blueprint.cut_is_known:
        return blueprint, (), ()
    from reshard.formats.deepspeed.families.choose import Model as ToSplit
    from reshard.formats.deepspeed.families.choose import split_by_family  # only a change of tp needs it

    split = split_by_family(
        ToSplit(
            params=blueprint.params,
            weights=blueprint.weights,
            aliases=blueprint.aliases,
            patterns=blueprint.patterns,
            file=blueprint.model.value,
        ),
        target.tp,
    )
    if isinstance(split, list):
        return blueprint, (), tuple(split)
    known = dataclasses.replace(
        blueprint,
        params=split.params,
        weights=split.weights,
        patterns=split.patterns,
        hints={name: for_param(param, cut_is_known=True) for name, param in split.params.items()},
        cut_is_known=True,
    )
    return known, (split.note,), ()


def _apply_progress(blueprint: Blueprint, progress: Progress | None) -> Blueprint:
    """Replace settings and scalars by those of the source, where the blueprint is of another checkpoint."""
    if progress is None:
        return blueprint
    groups = tuple(
        dataclasses.replace(
            group,
            scalars=progress.scalars(group.names, group.scalars),
            settings=progress.settings(group.names, group.settings),
        )
        for group in blueprint.groups
    )
    return dataclasses.replace(blueprint, groups=groups)


def _add_atoms(target: _Target, param: Param, group: Group, hints: Hints) -> None:
    for state, dtype in group.dtypes.items():
        target.add_atom(atom_file(param.name, state), state, param, dtype, hints)
    if STEP in group.scalars:
        target.add(atom_file(param.name, STEP), group.scalars[STEP])


def _build_model_file(
    blueprint: Blueprint,
    params: Mapping[str, Param],
    weights: Mapping[str, Param],
    progress: Progress | None,
    target: Topology,
) -> dict[str, Any]:
    """Build the model file of rank 0 for a run with one rank, without weights, which are in the atoms."""
    like = blueprint.model.value
    frozen = [name for name in weights if name not in blueprint.buffers]
    no_shapes = None if like.get("frozen_param_shapes") is None else StatefulDict()
    replaced: dict[str, Any] = {
        "module": None,
        "buffer_names": list(blueprint.buffers),
        "optimizer": None,
        "param_shapes": [
            StatefulDict((name, Size(params[name].shape)) for name in group.names) for group in blueprint.groups
        ],
        "frozen_param_shapes": StatefulDict((name, Size(weights[name].shape)) for name in frozen) or no_shapes,
        "frozen_param_fragments": None,
        "shared_params": dict(blueprint.aliases),
        "dp_world_size": 1,
        "mp_world_size": 1,  # the loader compares it with the number of model files
        "checkpoint_parallel_dimensions": {"pp_degree": 1, "tp_degree": 1},
    }
    if (layout := _merge_stages(like.get("pipeline_layout"))) is not None:
        replaced["pipeline_layout"] = layout
    if blueprint.patterns.declared:
        replaced["universal_checkpoint_info"] = blueprint.patterns.info_at(target.tp, blueprint.tp)
    if progress is not None:
        replaced |= {"global_steps": progress.step, "global_samples": progress.samples}
    return Template(blueprint.model).copy_except(like, replaced)


def _build_optimizer_file(blueprint: Blueprint, target: Topology) -> dict[str, Any]:
    """Build the optimizer file in both forms: `param_groups` for stages 1 and 2, `optimizer_state_dict` for stage 3.

    Stage 3 gives the settings of group 0 to all groups. Its form therefore has only the settings that all groups have
    in common, so that each group keeps the other settings as the run that loads the folder has configured them.
    """
    groups = [{**group.settings, "params": [at]} for at, group in enumerate(blueprint.groups)]
    first = blueprint.groups[0]
    step = {STEP: first.scalars[STEP]} if STEP in first.scalars else {}
    inner = {"state": {0: step} if step else {}, "param_groups": [{**find_common_settings(blueprint), "params": [0]}]}
    return {
        **blueprint.scaling,
        "ds_version": blueprint.model.value.get("ds_version"),
        "param_groups": groups,
        "optimizer_state_dict": inner,
        MADE_FOR: target.to_dict(),
        **({} if blueprint.weights_of_module is None else {WEIGHTS: blueprint.weights_of_module.to_dict()}),
    }


def find_common_settings(blueprint: Blueprint) -> dict[str, Any]:
    """Return the settings that have the same value in all groups."""
    first, *others = blueprint.groups
    return {
        key: value
        for key, value in first.settings.items()
        if all(key in group.settings and repr(group.settings[key]) == repr(value) for group in others)
    }


def _merge_stages(described: Any) -> dict[str, Any] | None:
    """Return the description of a pipeline with all layers on one stage; None if it is no such description."""
    if not isinstance(described, Mapping) or "num_layers" not in described:
        return None
    return {**described, "parts": [0, described["num_layers"]]}


def _make_commit_model(blueprint: Blueprint) -> dict[str, Any]:
    model = dict(blueprint.commit_model)
    if (description := _merge_stages(model.get("pipeline"))) is not None:
        model["pipeline"] = description
    return model


def _describe_unused(index: Index, rows: TargetRows) -> tuple[str, ...]:
    """Describe the source's tensors that the target does not hold.

    Weights with master weights are no loss, because DeepSpeed rounds them from the master weights when it loads.
    """
    used = set(rows.origins)
    stored = {tensor.key.name for tensor in rows.tensors if tensor.key.state == MASTER}
    unused: dict[str, list[str]] = {}
    for at, tensor in enumerate(index.tensors):
        if at not in used and not (tensor.key.state == "weight" and tensor.key.name in stored):
            unused.setdefault(tensor.key.state, []).append(tensor.key.name)
    return tuple(
        f"{state}: {len(names)} tensors of the source are not stored in the target, such as {names[0]}"
        for state, names in sorted(unused.items())
    )
