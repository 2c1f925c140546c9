"""Build what `--like` would name, a DeepSpeed checkpoint of the model, from a description and a configuration.

The result has the files of a run on one rank at ZeRO stage 1 without the bytes of their tensors, as
`universal.native_files` builds them from a universal checkpoint. The writers derive all other layouts from it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from reshard.errors import UnsupportedError, UsageError
from reshard.formats.base import Request
from reshard.formats.deepspeed import configured
from reshard.formats.deepspeed.contents import DeepSpeedContents
from reshard.formats.deepspeed.described.description import ModelDescription, load
from reshard.formats.deepspeed.described.fit import (
    has_weights_alone,
    list_differences,
    refuse_lost_masters,
    refuse_other_model,
    refuse_other_optimizer,
)
from reshard.formats.deepspeed.described.optimizer import Optimizer, find_optimizer, make_schedule
from reshard.formats.deepspeed.experts import is_native
from reshard.formats.deepspeed.fields import has_fp32_gradients, read_clipping, read_scaling
from reshard.formats.deepspeed.logical import Model, Stage, make_param
from reshard.formats.deepspeed.names import NAME
from reshard.formats.deepspeed.reading.reader import DeepSpeedExtra
from reshard.formats.deepspeed.tensor_parallel import patterns
from reshard.formats.deepspeed.writing.carried_objects import make_zero_stage_enum
from reshard.formats.pt.objects import StatefulDict, new_tensor
from reshard.formats.pt.reader import PtFile
from reshard.tensors.layout import Index, TensorKey
from reshard.tensors.shard_table import ShardTableBuilder
from reshard.topology import Topology

_VERSION = "0.19.8"
"""DeepSpeed's version whose files are built; it refuses files without one."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Example:
    """A checkpoint like the target, which no file holds.

    Attributes:
        index: what `--like` would name.
        stage: ZeRO stage of the configuration.
        weights_alone: the source holds nothing of an optimizer, and nothing of one is written.
        notes: sentences for the user.
    """

    index: Index
    stage: int
    weights_alone: bool
    notes: tuple[str, ...]


def complete_request(index: Index, request: Request) -> tuple[Request, Example | None]:
    """Return a request whose `like` is made of its description and configuration, where it has them.

    Raises:
        UsageError: the description or the configuration is wrong, or they contradict each other or the request.
        UnsupportedError: they do not fit the source.
    """
    if request.model is None or request.ds_config is None:
        return request, None
    config = configured.load(request.ds_config)
    example = build_example(index, load(request.model), config)
    topology = request.topology
    if request.keeps_stage:
        topology = dataclasses.replace(topology, zero=example.stage)
    elif topology.zero != example.stage:
        raise UsageError(
            f"--to says zero={topology.zero}, and zero_optimization.stage of the configuration is {example.stage}",
            path=str(request.ds_config),
            hint="leave zero out of --to, or name the configuration of the run that will load the result",
        )
    return dataclasses.replace(request, topology=topology, like=example.index, model=None, ds_config=None), example


def build_example(index: Index, description: ModelDescription, config: Mapping[str, Any]) -> Example:
    """Build the example for one source.

    Raises:
        UsageError: description and configuration do not go together.
        UnsupportedError: they do not fit the source, or DeepSpeed would need facts that nothing says.
    """
    stage, half_type = _read_stage(config), _read_half_type(config)
    if experts := [name for name in description.params if is_native(name)]:
        raise UnsupportedError(
            f"describes DeepSpeed's own experts, such as {experts[0]}, whose files say more",
            path=str(description.path),
            hint="name with --like a DeepSpeed checkpoint of the same model",
        )
    refuse_other_model(index, description)
    alone = has_weights_alone(index)
    schedule = None if alone else make_schedule(config, index.step)
    if alone:
        optimizer = Optimizer(name="none", order=(), settings=tuple({} for _ in description.groups))
        notes = _list_notes_of_weights(description)
    else:
        optimizer = find_optimizer(description, config, index)
        refuse_other_optimizer(index, optimizer)
        if stage == 0 and half_type is None:
            refuse_lost_masters(index)
        notes = (*_list_notes(description, index, schedule), *list_differences(index, description, optimizer))
    value = _make_model_value(index, description, config, None if alone else half_type or "float32", schedule)
    extra = _make_extra(description, config, value, optimizer)
    like = Index(
        root=description.path,
        format=NAME,
        topology=extra.source.topology,
        step=index.step,
        samples=index.samples,
        tensors=(),
        files=(),
        shards=ShardTableBuilder().build(),
        aliases=extra.aliases,
        extra=extra,
    )
    return Example(index=like, stage=stage, weights_alone=alone, notes=notes)


def _read_stage(config: Mapping[str, Any]) -> int:
    section = config.get("zero_optimization", {})
    stage = section.get("stage", 0) if isinstance(section, Mapping) else None
    if type(stage) is not int or stage not in range(4):
        raise UsageError(f"--ds-config: zero_optimization.stage is {stage!r:.40}, expected 0, 1, 2 or 3")
    size = section.get("sub_group_size", 0)
    if stage == 3 and type(size) not in (int, float):
        raise UsageError(
            f"--ds-config: zero_optimization.sub_group_size is {size!r:.40}, expected a number",
            hint="groups are cut by it: say the number that the run will have",
        )
    return stage


def _read_half_type(config: Mapping[str, Any]) -> str | None:
    """Return the type of the weights in the run to come, `bfloat16`, or None for fp32.

    Raises:
        UsageError: it is left open, as in configurations for `accelerate`.
        UnsupportedError: fp16, whose loss scale no source says.
    """
    enabled = {}
    for key in ("bf16", "fp16"):
        section = config.get(key, {})
        enabled[key] = section.get("enabled", False) if isinstance(section, Mapping) else section
        if type(enabled[key]) is not bool:
            raise UsageError(f"--ds-config: {key}.enabled is {enabled[key]!r:.40}, expected true or false")
    if enabled["fp16"]:
        raise UnsupportedError(
            "--ds-config trains in fp16, and the source does not say the loss scale that it had reached",
            hint="train in bf16, or name with --like a DeepSpeed checkpoint of the same model",
        )
    return "bfloat16" if enabled["bf16"] else None


def _list_notes(description: ModelDescription, index: Index, schedule: Mapping[str, int] | None) -> tuple[str, ...]:
    order = f"order and groups of the parameters are those of {description.path.name}"
    if schedule is None:
        advice = (
            "a script that passes its own loads with load_lr_scheduler_states=False, and sets it to the step itself"
        )
        return (f"{order}; --ds-config has no scheduler: {advice}",)
    if not index.step:
        return (f"{order}; the source does not say its step: the learning-rate schedule begins anew",)
    return (f"{order}; the learning-rate schedule goes on after step {index.step}",)


def _list_notes_of_weights(description: ModelDescription) -> tuple[str, ...]:
    how = f"engine.load_checkpoint(..., load_module_only=True) into the model of {description.path.name}"
    return (f"the source holds weights alone, and so does the result: load it with {how}; the optimizer starts anew",)


def _make_model_value(
    index: Index,
    description: ModelDescription,
    config: Mapping[str, Any],
    dtype: str | None,
    schedule: Mapping[str, int] | None,
) -> dict[str, Any]:
    """Make the value of the model file, with the fields of DeepSpeed's `_save_checkpoint` in its order.

    Args:
        index: the source.
        description: of the model.
        config: of the run to come.
        dtype: of its parameters; None to keep the source's, which DeepSpeed rounds when it loads them.
        schedule: state of its schedule.
    """
    types = {tensor.key: tensor.dtype for tensor in index.tensors}
    module = StatefulDict()
    second = {name: alias for alias, name in description.shared.items()}
    for name, shape in {**description.params, **description.buffers}.items():
        keys = (TensorKey(state, one) for state in ("weight", "fp32") for one in (name, second.get(name, name)))
        saved = next((types[key] for key in keys if key in types), "float32")
        module[name] = new_tensor(dtype if dtype is not None and name in description.params else saved, shape)
    for alias, name in description.shared.items():
        module[alias] = module[name]
    # Without global_samples, DeepSpeed multiplies the steps by the batch size.
    counted = {"global_samples": index.samples} if index.samples else {}
    return {
        "module": module,
        "buffer_names": list(description.buffers),
        "optimizer": None,
        "param_shapes": None,
        "frozen_param_shapes": StatefulDict() if description.frozen else None,
        "shared_params": dict(description.shared),
        "frozen_param_fragments": StatefulDict() if description.frozen else None,
        "lr_scheduler": None if schedule is None else dict(schedule),
        "data_sampler": None,
        "random_ltd": None,
        "skipped_steps": 0,
        "global_steps": index.step,
        **counted,
        "dp_world_size": 1,
        "mp_world_size": 1,
        "checkpoint_parallel_dimensions": {"pp_degree": 1, "tp_degree": 1},
        "ds_config": dict(config),
        "ds_version": _VERSION,
    }


def _make_extra(
    description: ModelDescription, config: Mapping[str, Any], value: Mapping[str, Any], optimizer: Optimizer
) -> DeepSpeedExtra:
    source = DeepSpeedContents(
        folder=description.path,
        topology=Topology(zero=1),
        prefix="",
        pipeline=False,
        model_axis=False,
        models={(0, 0): _make_file(description, value)},
        optimizers={(0, 0): _make_file(description, {})},
        layers={},
        named={},
    )
    state = _make_optimizer_state(source.half_type, config, optimizer)
    outer = {"optimizer_state_dict": state, "ds_config": value["ds_config"], "ds_version": _VERSION}
    source = dataclasses.replace(source, optimizers={(0, 0): _make_file(description, outer)})
    known = patterns.parse(None)
    groups = tuple(group.names for group in description.groups)
    trained = {name for group in groups for name in group}
    others = {**{name: shape for name, shape in description.params.items() if name not in trained},
              **description.buffers}  # fmt: skip
    return DeepSpeedExtra(
        source=source,
        model=Model(
            params={
                name: make_param(name, (shape,), known, 1)
                for name, shape in description.params.items()
                if name in trained
            },
            stages=(Stage(groups=groups, ids=tuple(range(len(groups)))),),
            groups=groups,
            patterns=known,
            pipeline=None,
            tied_layers={},
            round_robin=False,
        ),
        weights={name: make_param(name, (shape,), known, 1) for name, shape in others.items()},
        commit_model={},
        element_bytes=2 if source.half_type else 4,
        aliases=dict(description.shared),
    )


def _make_file(description: ModelDescription, value: Mapping[str, Any]) -> PtFile:
    return PtFile(path=str(description.path), num_bytes=0, value=dict(value), storages={}, metadata_bytes=0)


def _make_optimizer_state(half_type: str | None, config: Mapping[str, Any], optimizer: Optimizer) -> dict[str, Any]:
    """Make the state of ZeRO stage 1's optimizer, with empty partitions (stage_1_and_2.py, `state_dict`)."""
    states = {
        at: {state: optimizer.step if state == "step" else new_tensor("float32", (0,)) for state in optimizer.order}
        for at in range(len(optimizer.settings))
    }
    groups = [{**settings, "params": [at]} for at, settings in enumerate(optimizer.settings)]
    is_bf16_optimizer = half_type == "bfloat16" and has_fp32_gradients(config)
    return {
        **({} if is_bf16_optimizer else read_scaling({})),
        **read_clipping({}, config),
        "base_optimizer_state": {"state": states, "param_groups": groups},
        "single_partition_of_fp32_groups": [new_tensor("float32", (0,)) for _ in groups],
        **({} if is_bf16_optimizer else {"zero_stage": make_zero_stage_enum(1)}),
        "group_paddings": None,
        **({} if is_bf16_optimizer else {"param_alignment_paddings": None}),
        "partition_count": None,
        "ds_version": _VERSION,
        "param_slice_mappings": None,
    }
