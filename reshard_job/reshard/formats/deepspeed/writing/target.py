"""The target that the writers of all files share: its parameters, the files so far, and the rows of its shard table."""

from __future__ import annotations

import copy
import dataclasses
import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from reshard.formats.deepspeed import autoep, flat
from reshard.formats.deepspeed.contents import DeepSpeedContents
from reshard.formats.deepspeed.fields import Kind
from reshard.formats.deepspeed.logical import Param, Stage, read_param_groups
from reshard.formats.deepspeed.reading.groups import find_group_holder, read_group_state
from reshard.formats.deepspeed.reading.opening import make_parallel_dimensions
from reshard.formats.deepspeed.reading.reader import DeepSpeedExtra
from reshard.formats.deepspeed.rows import Place
from reshard.formats.deepspeed.tensor_parallel import megatron
from reshard.formats.deepspeed.writing.carried_objects import Budget, Template
from reshard.formats.deepspeed.writing.origins import TargetRows
from reshard.formats.deepspeed.writing.progress import Progress
from reshard.formats.pt.objects import ITEM_BYTES, Size, StatefulDict, Tensor
from reshard.formats.pt.writer import PtLayout, lay_out_pt, pickle_object
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
        """Return the optimizer's state of one group or sub-group with partitions `own`; others are left out.

        Every call copies the scalars. Groups that share one `step` tensor in the file would share it after loading, and
        each group would add its own steps to it.
        """
        keys = [key for key in self.order if key in own or key in self.scalars]
        return {key: own[key] if key in own else copy.deepcopy(self.scalars[key]) for key in keys}


@dataclasses.dataclass(slots=True, kw_only=True)
class Target:
    """A checkpoint that is being laid out.

    Attributes:
        extra: the checkpoint that everything besides tensors comes from: the source, or one like the target.
        progress: the run's progress, if `extra` is not the source.
        topology: of the target.
        kind: of the optimizer.
        stages: what each pipeline stage holds.
        bounds: first layer of each stage and the number of layers; empty if the stages are the source's, or only one.
        params: optimized parameters, with shapes as in the target.
        weights: frozen parameters and buffers, with shapes as in the target.
        rows: tensors of the target and where they lie.
        layout_note: `pipeline_layout` of the client state for the target; None if the source has none.
        files: the files so far.
        weights_alone: nothing of an optimizer is written.
        budget: limit on the bytes that are copied into files.
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
    weights_alone: bool = False
    budget: Budget = dataclasses.field(default_factory=Budget)
    _written: Counter[tuple[str, int]] = dataclasses.field(default_factory=Counter)
    _holders: dict[str, list[int]] = dataclasses.field(default_factory=dict)
    _groups: dict[tuple[int, int], GroupTemplate] = dataclasses.field(default_factory=dict)
    _equal_groups: dict[tuple[bytes, ...], GroupTemplate] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        for pp, stage in enumerate(self.stages):
            for name in (name for group in stage.groups for name in group):
                self._holders.setdefault(name, []).append(pp)

    @property
    def source(self) -> DeepSpeedContents:
        """Return the files of the source, or of the checkpoint like the target."""
        return self.extra.source

    def local_names(self, group: tuple[str, ...], part: int) -> dict[str, str]:
        """Map the names of a group's parameters on the ranks of a part of the experts to names in the whole model."""
        if self.source.experts is None:
            return {name: name for name in group}
        return self.source.experts.local_names(group, self.topology.ep, part)

    def copy_of(self, name: str, pp: int) -> int:
        """Count the earlier stages that also hold the parameter."""
        return self._holders[name].index(pp)

    def next_copy(self, name: str, tp: int) -> int:
        """Count the weights of that name that were written for a tensor-parallel rank, and add one."""
        self._written[name, tp] += 1
        return self._written[name, tp] - 1

    def find_stage(self, name: str) -> int:
        """Return the first stage that holds a parameter; 0 for others, which models without a pipeline have."""
        return self._holders.get(name, [0])[0]

    def num_copies(self, name: str) -> int:
        """Count the stages that hold the parameter."""
        return len(self._holders[name])

    @property
    def round_robin(self) -> bool:
        """Return whether flat buffers are in round-robin order."""
        return bool(self.source.zero_config.get("round_robin_gradients")) and self.topology.zero in (1, 2)

    def is_stacked(self, name: str) -> bool:
        """Return whether the parameter is a stack of experts, which expert parallelism cuts."""
        return self.source.experts is not None and name in self.source.experts.stacked

    def shard(self, name: str, tp: int) -> tuple[int, ...]:
        """Return the shape `[ndim]` of a tensor-parallel rank's shard; stacks of experts have one on all ranks."""
        param = self.params.get(name) or self.weights[name]
        if self.is_stacked(name):
            return param.rule.shard_shape(name, param.shape, self.topology.ep)
        return param.rule.shard_shape(name, param.shape, self.topology.tp, tp)

    def shapes(self, names: tuple[str, ...], tp: int) -> StatefulDict:
        """Make an entry of a rank's `param_shapes`."""
        return StatefulDict((name, Size(self.shard(name, tp))) for name in names)

    def elements(self, names: tuple[str, ...], tp: int) -> tuple[int, ...]:
        """Return the number of elements of each parameter's shard."""
        return tuple(math.prod(self.shard(name, tp)) for name in names)

    @property
    def prefix(self) -> str:
        """Return the prefix of the names of optimizer files (engine.py, `_get_zero_ckpt_prefix`)."""
        return "bf16_" if self.source.half_type == "bfloat16" else ""

    def like(self, pp: int, tp: int) -> int:
        """Return the model-parallel rank of the source whose scalars a target rank inherits."""
        before = self.source.topology
        return min(pp * before.pp // self.topology.pp, before.pp - 1) * before.tp + min(tp, before.tp - 1)

    def like_dp(self, dp: int) -> int:
        """Return the data-parallel rank of the source whose scalars a target rank inherits."""
        return min(dp, self.source.topology.dp - 1)

    @property
    def is_folded(self) -> bool:
        """Return whether AutoEP spreads its experts over tensor-parallel ranks, too, and each file says so."""
        return self.source.experts is not None and self.topology.tp > 1

    def fold(self, value: dict[str, Any], dp: int, tp: int, family: str, **fields: Any) -> dict[str, Any]:
        """Return the value of a rank's file with what AutoEP says in it under tensor parallelism, and else without."""
        if not self.is_folded:
            return {key: item for key, item in value.items() if key != autoep.FOLDING}
        return {**value, autoep.FOLDING: autoep.make_folding(self.topology, dp, tp, family, **fields)}

    def universal_info(self) -> Mapping[str, Any]:
        """Return `universal_checkpoint_info` for the target, without AutoTP's maps of stacks that ep cuts otherwise."""
        info = self.extra.model.patterns.info_at(self.topology.tp, self.source.topology.tp)
        experts, maps = self.source.experts, info.get("affine_map")
        if experts is None or not isinstance(maps, Mapping) or self.topology.ep == self.source.topology.ep:
            return info
        stacks = {f"^{re.escape(name)}$" for name in experts.stacked}
        kept = {pattern: entry for pattern, entry in maps["params"].items() if pattern not in stacks}
        return {**info, "affine_map": {**maps, "params": kept}}

    def common(self, like: Mapping[str, Any], *, first: bool, dp: int = 0, tp: int = 0) -> dict[str, Any]:
        """Return the fields of a rank's model file that follow from the topology.

        `first` marks the file of rank 0.
        """
        topology = self.topology
        fields: dict[str, Any] = {} if self.layout_note is None else {"pipeline_layout": self.layout_note}
        if topology.zero == 0:
            fields["shared_params"] = None
        elif not first:  # only the file of rank 0 states shared names
            fields["shared_params"] = {}
        elif self.source.topology.zero == 0:
            fields["shared_params"] = dict(self.extra.aliases)
        if topology.zero:
            fields["optimizer"] = None
        patterns = self.extra.model.patterns
        if patterns.declared:  # by the source or by a pattern file, of which `like` has no entry
            like = {"universal_checkpoint_info": None, **like}
            fields["universal_checkpoint_info"] = self.universal_info()
        if layers := autoep.read_layers(like):
            shapes = {name: param.shape for name, param in self.params.items()}
            described = autoep.convert_layers(layers, shapes, topology, dp * topology.tp + tp)
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
            "checkpoint_parallel_dimensions": make_parallel_dimensions(topology),
        }

    def arguments(self, template: Template, like: Mapping[str, Any]) -> dict[str, Any]:
        """Return the client state's `args` with the degrees and the vocabulary of the target, if it has any."""
        if megatron.KEY not in like:
            return {}
        padded = self.extra.model.patterns.padded_rows(self.topology.tp)
        copied = template.copy(like[megatron.KEY])
        return {megatron.KEY: megatron.replace_arguments(copied, self.topology, padded)}

    def config(self, template: Template, like: Mapping[str, Any]) -> dict[str, Any]:
        """Return `ds_config` with the ZeRO stage of the target; other settings stay those of the source's training."""
        saved = like.get("ds_config")
        zero = saved.get("zero_optimization") if isinstance(saved, Mapping) else None
        if not isinstance(saved, Mapping) or not isinstance(zero, Mapping) or "stage" not in zero:
            return {}
        elastic = {"elastic_checkpoint": False} if zero.get("elastic_checkpoint") else {}
        patched = template.copy_except(zero, {"stage": self.topology.zero, **elastic})
        return {"ds_config": template.copy_except(saved, {"zero_optimization": patched})}

    def add_file(self, name: str, value: Any) -> File:
        """Lay out a file for a value, or for the result of `pickled`."""
        layout = lay_out_pt(name.removesuffix(".pt"), value)
        checksums = tuple(
            ChecksumField(start=slot.offset, num_bytes=slot.num_bytes, positions=slot.crc_positions)
            for slot in layout.slots.values()
            if slot.num_bytes
        )
        self.files.append(TargetFile(path=name, num_bytes=layout.num_bytes, fixed=layout.fixed, checksums=checksums))
        return File(target=self, index=len(self.files) - 1, layout=layout)

    def add_twin(self, name: str, other: File, *, is_own: bool = False) -> File:
        """Add a file with the same content as another, and a name of the same length; see `FilledTemplate.is_own`."""
        layout = other.layout.with_stem(name.removesuffix(".pt"), is_own=is_own)
        self.files.append(dataclasses.replace(self.files[other.index], path=name, fixed=layout.fixed))
        return File(target=self, index=len(self.files) - 1, layout=layout)

    def param_group(self, group: int, params: list[int]) -> dict[str, Any]:
        """Make an entry of the optimizer's `param_groups`."""
        mp, at = find_group_holder(self.source, self.extra.model, group)
        copied = Template(self.source.optimizer_file(mp, 0), self.budget).copy(read_param_groups(self.source, mp)[at])
        if self.progress is not None:
            copied = self.progress.settings(self.extra.model.groups[group], copied)
        if copied.get("moe") and str(copied.get("name", "")).startswith("ep_size_"):
            copied["name"] = f"ep_size_{self.topology.ep}"  # DeepSpeed looks up the process group by this name
        return {**copied, "params": params}

    def group_template(self, group: int, tp: int) -> GroupTemplate:
        """Return the states of a parameter group, from the source (ZeRO-3: from its first sub-group).

        Equal states of several tensor-parallel ranks are one object.
        """
        tp = min(tp, self.source.topology.tp - 1)
        if (group, tp) not in self._groups:
            template = self._read_group(group, tp)
            pickle = pickle_object((template.dtypes, template.order, template.scalars))
            content = (pickle.data, *(storage.data or b"" for storage in pickle.storages))
            self._groups[group, tp] = self._equal_groups.setdefault(content, template)
        return self._groups[group, tp]

    def _read_group(self, group: int, tp: int) -> GroupTemplate:
        mp, at = find_group_holder(self.source, self.extra.model, group)
        state = read_group_state(self.source, mp + tp, at)
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
    """A file that was laid out; its methods add rows for its tensors."""

    target: Target
    index: int
    layout: PtLayout

    def place(self, tensor: Tensor, tp: int, copy: int) -> Place:
        """Return the position of a tensor in the file, with its owner."""
        offset = self.layout.slots[tensor.storage].offset + tensor.offset * ITEM_BYTES[tensor.dtype]
        return Place(self.target.topology.tp, tp, copy, self.index, offset)

    def add_weight(self, param: Param, tensor: Tensor, tp: int, copy: int) -> None:
        """Add a tensor that is the shard of a weight."""
        place = self.place(tensor, tp, copy)
        self.target.rows.add_shard("weight", param, place, dtype=tensor.dtype, strides=tensor.stride)

    def add_state(self, state: str, param: Param, tensor: Tensor, tp: int, copy: int) -> None:
        """Add a tensor that is a state in the shape of a parameter's shard."""
        place = self.place(tensor, tp, copy)
        self.target.rows.add_shard(state, param, place, dtype=tensor.dtype, strides=tensor.stride)

    def add_span(self, param: Param, tensors: Mapping[str, Tensor], span: flat.Span, tp: int, copy: int) -> None:
        """Add a span of a parameter's shard, which lies in each of the partitions."""
        self._add_partitions(param, tensors, span, [self.place(tensor, tp, copy) for tensor in tensors.values()])

    def add_gaps(self, tensors: Iterable[Tensor], gaps: Iterable[tuple[int, int]]) -> None:
        """Mark elements of each partition, (position, number), as padding; partitions that end before have none."""
        padding = tuple(gaps)
        for tensor in tensors:
            start, item_bytes = self.place(tensor, 0, 0).byte_offset, ITEM_BYTES[tensor.dtype]
            for position, count in padding:
                num_zeros = max(0, min(count, tensor.num_elements - position))
                self.target.rows.add_zeros(self.index, start + position * item_bytes, num_zeros * item_bytes)

    def add_experts_span(self, param: Param, tensors: Mapping[str, Tensor], span: flat.Span, part: int) -> None:
        """Add a span of a stack of experts, which lies in each of the partitions; `part` is the rank's experts."""
        ep = self.target.topology.ep
        places = [self.place(tensor, part, 0)._replace(tp=ep) for tensor in tensors.values()]
        self._add_partitions(param, tensors, span, places)

    def add_expert(self, param: Param, tensor: Tensor, expert: int, copy: int) -> None:
        """Add a tensor that is the weight of one expert, a slice of a stack."""
        place = self.place(tensor, expert, copy)._replace(tp=param.shape[0])
        strides = (tensor.num_elements, *tensor.stride)
        self.target.rows.add_shard("weight", param, place, dtype=tensor.dtype, strides=strides)

    def _add_partitions(
        self, param: Param, tensors: Mapping[str, Tensor], span: flat.Span, places: Sequence[Place]
    ) -> None:
        if places:
            parts = [
                (state, tensor.dtype, place.byte_offset)
                for (state, tensor), place in zip(tensors.items(), places, strict=True)
            ]
            self.target.rows.add_span(param, places[0], span, parts)
