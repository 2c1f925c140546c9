"""What the writers of the different files share: the target's parameters, its files so far, and their rows."""

from __future__ import annotations

import copy
import dataclasses
import math
from collections.abc import Iterable, Mapping
from typing import Any

from reshard.formats.deepspeed import autoep, flat
from reshard.formats.deepspeed.contents import DeepSpeedContents
from reshard.formats.deepspeed.fields import Kind
from reshard.formats.deepspeed.logical import Param, Stage, param_groups
from reshard.formats.deepspeed.reading.groups import group_holder, group_state
from reshard.formats.deepspeed.reading.opening import parallel_dimensions
from reshard.formats.deepspeed.reading.reader import DeepSpeedExtra
from reshard.formats.deepspeed.rows import Place
from reshard.formats.deepspeed.writing.carried_objects import Budget, Template
from reshard.formats.deepspeed.writing.origins import TargetRows
from reshard.formats.deepspeed.writing.progress import Progress
from reshard.formats.pt.objects import ITEM_BYTES, Size, StatefulDict, Tensor
from reshard.formats.pt.writer import PtLayout, lay_out_pt
from reshard.tensors.layout import ChecksumField, TargetFile
from reshard.topology import Topology


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class GroupTemplate:
    """States of a parameter group.

    Attributes:
        dtypes: types of the partitioned states, `fp32` among them.
        order: names of the optimizer's states in its own order.
        scalars: values of the states that are not partitioned.
    """

    dtypes: Mapping[str, str]
    order: tuple[str, ...]
    scalars: Mapping[str, Any]

    def state(self, own: Mapping[str, Tensor]) -> dict[str, Any]:
        """The optimizer's state of one group or sub-group, with partitions `own`; states without one are left out.

        Scalars are copied for each: groups that share one `step` tensor in the file would share it after loading, and
        each of them would count its own steps onto it.
        """
        held = [key for key in self.order if key in own or key in self.scalars]
        return {key: own[key] if key in own else copy.deepcopy(self.scalars[key]) for key in held}


@dataclasses.dataclass(slots=True, kw_only=True)
class Target:
    """A checkpoint that is being laid out.

    Attributes:
        extra: the checkpoint that says what is not tensors: the source, or one like the target.
        progress: how far the run had come, where `extra` is not the source.
        topology: of the target.
        kind: of the optimizer.
        stages: what each pipeline stage holds.
        bounds: first layer of each stage and the number of layers; empty where the stages are the source's, or one.
        params: optimized parameters, with shapes as in the target.
        weights: frozen parameters and buffers, likewise.
        rows: where tensors go.
        layout_note: `pipeline_layout` of the client state, as true for the target; None where there is none.
        files: files so far.
        budget: of what is copied into them.
    """

    extra: DeepSpeedExtra
    progress: Progress | None
    topology: Topology
    kind: Kind
    stages: tuple[Stage, ...]
    bounds: tuple[int, ...]
    params: Mapping[str, Param]
    weights: Mapping[str, Param]
    rows: TargetRows
    layout_note: Mapping[str, Any] | None = None
    files: list[TargetFile] = dataclasses.field(default_factory=list)
    budget: Budget = dataclasses.field(default_factory=Budget)
    _holders: dict[str, list[int]] = dataclasses.field(default_factory=dict)
    _groups: dict[tuple[int, int], GroupTemplate] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        for pp, stage in enumerate(self.stages):
            for name in (name for group in stage.groups for name in group):
                self._holders.setdefault(name, []).append(pp)

    @property
    def source(self) -> DeepSpeedContents:
        """The source's files."""
        return self.extra.source

    def local_names(self, group: tuple[str, ...], part: int) -> dict[str, str]:
        """Names of a group's parameters on the ranks of a part of the experts -> names in the whole model."""
        if self.source.experts is None:
            return {name: name for name in group}
        return self.source.experts.local_names(group, self.topology.ep, part)

    def copy_of(self, name: str, pp: int) -> int:
        """How many earlier stages hold the parameter too."""
        return self._holders[name].index(pp)

    def num_copies(self, name: str) -> int:
        """Stages that hold the parameter."""
        return len(self._holders[name])

    @property
    def round_robin(self) -> bool:
        """Flat buffers are in round-robin order."""
        return bool(self.source.zero_config.get("round_robin_gradients")) and self.topology.zero in (1, 2)

    def is_stacked(self, name: str) -> bool:
        """The parameter is a stack of experts, which expert parallelism cuts."""
        return self.source.experts is not None and name in self.source.experts.stacked

    def shard(self, name: str, tp: int) -> tuple[int, ...]:
        """Shape `[ndim]` of a tensor-parallel rank's shard of a parameter or weight; of experts that of any part."""
        param = self.params.get(name) or self.weights[name]
        if self.is_stacked(name):
            return param.rule.shard_shape(name, param.shape, self.topology.ep)
        return param.rule.shard_shape(name, param.shape, self.topology.tp, tp)

    def shapes(self, names: tuple[str, ...], tp: int) -> StatefulDict:
        """An entry of a rank's `param_shapes`."""
        return StatefulDict((name, Size(self.shard(name, tp))) for name in names)

    def elements(self, names: tuple[str, ...], tp: int) -> tuple[int, ...]:
        """Elements of each parameter's shard."""
        return tuple(math.prod(self.shard(name, tp)) for name in names)

    @property
    def prefix(self) -> str:
        """Before the names of optimizer files (engine.py, `_get_zero_ckpt_prefix`)."""
        return "bf16_" if self.source.half_type == "bfloat16" else ""

    def like(self, pp: int, tp: int) -> int:
        """Model-parallel rank of the source whose scalars a target rank inherits."""
        found = self.source.topology
        return min(pp * found.pp // self.topology.pp, found.pp - 1) * found.tp + min(tp, found.tp - 1)

    def like_dp(self, dp: int) -> int:
        """Data-parallel rank of the source whose scalars a target rank inherits."""
        return min(dp, self.source.topology.dp - 1)

    def common(self, like: Mapping[str, Any], *, first: bool) -> dict[str, Any]:
        """Fields of a model file that follow from the topology; `first` is the file of rank 0."""
        topology = self.topology
        fields: dict[str, Any] = {} if self.layout_note is None else {"pipeline_layout": self.layout_note}
        if topology.zero == 0:
            fields["shared_params"] = None
        elif not first:  # only rank 0 says which names are shared
            fields["shared_params"] = {}
        elif self.source.topology.zero == 0:
            fields["shared_params"] = dict(self.extra.aliases)
        if topology.zero:
            fields["optimizer"] = None
        told = self.extra.model.patterns
        if told.declared:  # as true for the target; also where a file of patterns told it
            like = {"universal_checkpoint_info": None, **like}
            fields["universal_checkpoint_info"] = told.info_at(topology.tp, self.source.topology.tp)
        if layers := autoep.layers_of(like):
            shapes = {name: param.shape for name, param in self.params.items()}
            described = autoep.layers_at(layers, shapes, topology.ep, topology.dp)
            fields |= dict.fromkeys(autoep.KEYS, described)
            fields["universal_checkpoint_info"] = {
                **fields.get("universal_checkpoint_info", {}),
                "ds_autoep_layers": described,
            }
        if self.progress is not None:
            fields |= {"global_steps": self.progress.step, "global_samples": self.progress.samples}
        return {
            **{key: value for key, value in fields.items() if key in like},
            "dp_world_size": topology.dp,
            "mp_world_size": topology.tp * topology.pp,
            "checkpoint_parallel_dimensions": parallel_dimensions(topology),
        }

    def config(self, template: Template, like: Mapping[str, Any]) -> dict[str, Any]:
        """`ds_config` with the ZeRO stage of the target; the rest says how the source was trained."""
        found = like.get("ds_config")
        zero = found.get("zero_optimization") if isinstance(found, Mapping) else None
        if not isinstance(found, Mapping) or not isinstance(zero, Mapping) or "stage" not in zero:
            return {}
        elastic = {"elastic_checkpoint": False} if zero.get("elastic_checkpoint") else {}
        patched = template.copy_except(zero, {"stage": self.topology.zero, **elastic})
        return {"ds_config": template.copy_except(found, {"zero_optimization": patched})}

    def add_file(self, name: str, value: Any) -> File:
        """Lay out a file for an object tree, or for what `pickled` made of it."""
        layout = lay_out_pt(name.removesuffix(".pt"), value)
        checksums = tuple(
            ChecksumField(start=slot.offset, num_bytes=slot.num_bytes, positions=slot.crc_positions)
            for slot in layout.slots.values()
            if slot.num_bytes
        )
        self.files.append(TargetFile(path=name, num_bytes=layout.num_bytes, fixed=layout.fixed, checksums=checksums))
        return File(target=self, index=len(self.files) - 1, layout=layout)

    def add_twin(self, name: str, other: File) -> File:
        """Add a file with the same content as another, and a name of the same length."""
        layout = other.layout.named(name.removesuffix(".pt"))
        self.files.append(dataclasses.replace(self.files[other.index], path=name, fixed=layout.fixed))
        return File(target=self, index=len(self.files) - 1, layout=layout)

    def param_group(self, group: int, params: list[int]) -> dict[str, Any]:
        """An entry of the optimizer's `param_groups`."""
        mp, at = group_holder(self.source, self.extra.model, group)
        copied = Template(self.source.optimizer_file(mp, 0), self.budget).copy(param_groups(self.source, mp)[at])
        if self.progress is not None:
            copied = self.progress.settings(self.extra.model.groups[group], copied)
        if copied.get("moe") and str(copied.get("name", "")).startswith("ep_size_"):
            copied["name"] = f"ep_size_{self.topology.ep}"  # names the process group
        return {**copied, "params": params}

    def group_template(self, group: int, tp: int) -> GroupTemplate:
        """States of a parameter group, from the source (ZeRO-3: from its first sub-group)."""
        tp = min(tp, self.source.topology.tp - 1)
        if (group, tp) not in self._groups:
            self._groups[group, tp] = self._read_group(group, tp)
        return self._groups[group, tp]

    def _read_group(self, group: int, tp: int) -> GroupTemplate:
        mp, at = group_holder(self.source, self.extra.model, group)
        state = group_state(self.source, mp + tp, at)
        template = Template(self.source.optimizer_file(mp + tp, 0), self.budget)
        scalars = {key: template.copy(value) for key, value in state.scalars.items()}
        if self.progress is not None:
            scalars = self.progress.scalars(self.extra.model.groups[group], scalars)
        return GroupTemplate(
            dtypes={"fp32": "float32", **{key: tensor.dtype for key, tensor in state.flat.items()}},
            order=state.order,
            scalars=scalars,
        )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class File:
    """A file that was laid out, to say what its tensors are."""

    target: Target
    index: int
    layout: PtLayout

    def place(self, tensor: Tensor, tp: int, copy: int) -> Place:
        """Where a tensor is."""
        offset = self.layout.slots[tensor.storage].offset + tensor.offset * ITEM_BYTES[tensor.dtype]
        return Place(self.target.topology.tp, tp, copy, self.index, offset)

    def add_weight(self, param: Param, tensor: Tensor, tp: int, copy: int) -> None:
        """The tensor is the shard of a weight."""
        place = self.place(tensor, tp, copy)
        self.target.rows.add_shard("weight", param, place, dtype=tensor.dtype, strides=tensor.stride)

    def add_state(self, state: str, param: Param, tensor: Tensor, tp: int, copy: int) -> None:
        """The tensor is a state of the shape of a parameter's shard."""
        place = self.place(tensor, tp, copy)
        self.target.rows.add_shard(state, param, place, dtype=tensor.dtype, strides=tensor.stride)

    def add_span(self, param: Param, tensors: Mapping[str, Tensor], span: flat.Span, tp: int, copy: int) -> None:
        """Part of each partition is part of a parameter's shard."""
        for state, tensor in tensors.items():
            self._add_part(state, param, tensor, span, self.place(tensor, tp, copy))

    def add_gaps(self, tensors: Iterable[Tensor], gaps: Iterable[tuple[int, int]]) -> None:
        """Elements of each partition, (position, number), are padding; some partitions end before theirs."""
        padding = tuple(gaps)
        for tensor in tensors:
            start, item_bytes = self.place(tensor, 0, 0).byte_offset, ITEM_BYTES[tensor.dtype]
            for position, count in padding:
                held = max(0, min(count, tensor.num_elements - position))
                self.target.rows.add_zeros(self.index, start + position * item_bytes, held * item_bytes)

    def add_experts_span(self, param: Param, tensors: Mapping[str, Tensor], span: flat.Span, part: int) -> None:
        """Part of each partition is part of a stack of experts, of which the rank holds a part."""
        for state, tensor in tensors.items():
            place = self.place(tensor, part, 0)._replace(tp=self.target.topology.ep)
            self._add_part(state, param, tensor, span, place)

    def add_expert(self, param: Param, tensor: Tensor, expert: int) -> None:
        """The tensor is the weight of one expert, a slice of a stack."""
        place = self.place(tensor, expert, 0)._replace(tp=param.shape[0])
        strides = (tensor.num_elements, *tensor.stride)
        self.target.rows.add_shard("weight", param, place, dtype=tensor.dtype, strides=strides)

    def _add_part(self, state: str, param: Param, tensor: Tensor, span: flat.Span, place: Place) -> None:
        at = place.byte_offset + span.offset * ITEM_BYTES[tensor.dtype]
        self.target.rows.add_flat(
            state, param, place._replace(byte_offset=at), dtype=tensor.dtype, start=span.start, stop=span.stop
        )
