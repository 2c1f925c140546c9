"""Lay out a native DeepSpeed checkpoint for another topology, for unmodified DeepSpeed to load."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from reshard.errors import UnsupportedError
from reshard.formats.deepspeed import flat, names
from reshard.formats.deepspeed.logical import Model, Param, Stage, layer_weights, param_groups
from reshard.formats.deepspeed.reader import Extra
from reshard.formats.deepspeed.rows import Place, Rows
from reshard.formats.deepspeed.source import Source
from reshard.formats.deepspeed.stages import target_stages
from reshard.formats.deepspeed.states import group_states
from reshard.formats.deepspeed.template import Template, fragment_address, zero_stage_enum
from reshard.formats.pt.objects import ITEM_BYTES, Size, StatefulDict, Tensor, new_tensor
from reshard.formats.pt.writer import PtLayout, lay_out_pt
from reshard.layout import ChecksumField, Index, TargetFile, TargetLayout
from reshard.topology import Topology


def lay_out(index: Index, target: Topology) -> TargetLayout:
    """Lay out the checkpoint behind `index` for `target`.

    Raises:
        UnsupportedError: a conversion that would need a guess or is not implemented.
    """
    extra = index.extra
    assert isinstance(extra, Extra)
    _refuse(extra, target)
    stages, bounds = target_stages(extra.source, extra.model, target)
    params = {name: _at_target(param, extra.model, target.tp) for name, param in extra.model.params.items()}
    weights = {name: _at_target(param, extra.model, target.tp) for name, param in extra.weights.items()}
    writer = _Writer(index=index, extra=extra, target=target, stages=stages, params=params, weights=weights)
    writer.write()
    model = dict(extra.commit_model)
    if bounds and isinstance(model.get("pipeline"), Mapping):
        model["pipeline"] = {**model["pipeline"], "parts": list(bounds)}
    elif target.pp == 1 and isinstance(model.get("pipeline"), Mapping):
        model["pipeline"] = {**model["pipeline"], "parts": [0, model["pipeline"].get("num_layers", 0)]}
    return TargetLayout(
        format=index.format,
        topology=target,
        files=tuple(writer.files),
        shards=writer.rows.build(),
        model=model,
    )


def _refuse(extra: Extra, target: Topology) -> None:
    """Conversions that need more than is known."""
    source, topology = extra.source, extra.source.topology
    where = str(source.folder)
    if (target.zero == 3) != (topology.zero == 3) or target.zero == 0:
        raise UnsupportedError(
            f"from ZeRO stage {topology.zero} to {target.zero}: only 1 and 2 are exchanged", path=where
        )
    if target.ep > 1 or target.cp > 1:
        raise UnsupportedError(f"{target}: expert and context parallelism are not laid out", path=where)
    if target.tp == topology.tp:
        return
    if not extra.model.patterns.declared:
        some = ", ".join(list(extra.model.params)[:5])
        raise UnsupportedError(
            f"{target}: nothing is said about how tensor parallelism cuts {some}, ...",
            path=where,
            hint="save with client_state={'universal_checkpoint_info': ...}",
        )
    if not extra.model.patterns.tells_rows:
        raise UnsupportedError(
            f"{target}: universal_checkpoint_info declares no row-parallel parameter, so those would be cut along the"
            " wrong dim (Megatron-DeepSpeed leaves them out at tp=1)",
            path=where,
            hint="save with parameter_with_row_parallelism_patterns filled in at tp=1 too",
        )


def _at_target(param: Param, model: Model, tp: int) -> Param:
    """The same parameter with the vocabulary padding of another tensor-parallel degree; checks that it divides."""
    padded = model.patterns.padded_rows(tp)
    if param.rule.vocabulary and padded is not None and param.shape:
        rows = model.patterns.vocabulary_rows
        assert rows is not None
        if param.shape[0] == rows[1]:
            shape = (padded, *param.shape[1:])
            param = dataclasses.replace(param, shape=shape, rows=rows[0] if rows[0] < padded else None)
    param.rule.shard_shape(param.name, param.shape, tp)
    return param


@dataclasses.dataclass(slots=True, kw_only=True)
class _Writer:
    """Collects files and rows of one target."""

    index: Index
    extra: Extra
    target: Topology
    stages: tuple[Stage, ...]
    params: Mapping[str, Param]
    weights: Mapping[str, Param]
    files: list[TargetFile] = dataclasses.field(default_factory=list)
    rows: Rows = dataclasses.field(init=False)
    copies: dict[str, list[int]] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        self.rows = Rows(self.index.tensors)
        for pp, stage in enumerate(self.stages):
            for name in (name for group in stage.groups for name in group):
                self.copies.setdefault(name, []).append(pp)

    @property
    def source(self) -> Source:
        return self.extra.source

    def write(self) -> None:
        for pp in range(self.target.pp):
            for tp in range(self.target.tp):
                self._write_rank(pp, tp)
        if self.source.pipeline:
            self._write_layers()

    # One file -----------------------------------------------------------------------------------------------------

    def _add_file(self, name: str, value: Any) -> tuple[int, PtLayout]:
        layout = lay_out_pt(name.removesuffix(".pt"), value)
        self.files.append(
            TargetFile(
                path=name,
                num_bytes=layout.num_bytes,
                fixed=layout.fixed,
                checksums=tuple(
                    ChecksumField(start=slot.offset, num_bytes=slot.num_bytes, positions=slot.crc_positions)
                    for slot in layout.slots.values()
                    if slot.num_bytes
                ),
            )
        )
        return len(self.files) - 1, layout

    def _like(self, pp: int, tp: int) -> int:
        """Model-parallel rank of the source whose scalars a target rank inherits."""
        topology = self.source.topology
        return min(pp * topology.pp // self.target.pp, topology.pp - 1) * topology.tp + min(tp, topology.tp - 1)

    def _shard_elements(self, name: str) -> int:
        param = self.params[name]
        return math.prod(param.rule.shard_shape(name, param.shape, self.target.tp))

    # Model files --------------------------------------------------------------------------------------------------

    def _write_rank(self, pp: int, tp: int) -> None:
        buffers = [self._buffer_order(group) for group in self.stages[pp].groups]
        if self.target.zero == 3:
            for dp in range(self.target.dp):
                self._write_zero3(tp, dp)
            return
        self._write_model(pp, tp, buffers)
        for dp in range(self.target.dp):
            self._write_optimizer(pp, tp, dp, buffers)

    def _buffer_order(self, group: tuple[str, ...]) -> tuple[str, ...]:
        if not self.extra.model.round_robin:
            return group
        return tuple(group[at] for at in flat.round_robin(len(group), self.target.dp))

    def _shapes(self, group: tuple[str, ...]) -> StatefulDict:
        return StatefulDict(
            (name, Size(self.params[name].rule.shard_shape(name, self.params[name].shape, self.target.tp)))
            for name in group
        )

    def _common(self, pp: int) -> dict[str, Any]:
        """Fields of a model file that follow from the topology."""
        fields: dict[str, Any] = {
            "dp_world_size": self.target.dp,
            "mp_world_size": self.target.tp * self.target.pp,
            "checkpoint_parallel_dimensions": {"pp_degree": self.target.pp, "tp_degree": self.target.tp},
        }
        if self.source.pipeline:
            fields["buffer_names"] = self._buffer_names(pp)
        return fields

    def _buffer_names(self, pp: int) -> list[str]:
        names_of_all: dict[str, None] = {}
        for file in self.source.models.values():
            names_of_all.update(dict.fromkeys(file.value.get("buffer_names") or ()))
        if self.target.pp == 1 or not names_of_all:
            return list(names_of_all)
        raise UnsupportedError(
            f"a pipeline with buffers ({next(iter(names_of_all))}) is not moved to other stages",
            path=str(self.source.folder),
        )

    def _write_model(self, pp: int, tp: int, buffers: list[tuple[str, ...]]) -> None:
        like = self.source.models[self._like(pp, tp), 0]
        template = Template(like)
        replaced = {**self._common(pp), "param_shapes": [self._shapes(group) for group in buffers]}
        module: dict[str, tuple[Param, Tensor]] = {}
        if not self.source.pipeline:
            replaced["module"], module = self._module(like.value["module"], tp)
        frozen = like.value.get("frozen_param_fragments")
        if frozen:
            raise UnsupportedError(f"frozen parameters ({next(iter(frozen))}) are not converted", path=like.path)
        if self.target.zero != self.source.topology.zero:
            empty = StatefulDict() if self.target.zero == 2 else None
            replaced |= {"frozen_param_shapes": empty, "frozen_param_fragments": empty}
        value = template.copy_except(like.value, replaced)
        file, layout = self._add_file(names.model_file(pp * self.target.tp + tp), value)
        for param, tensor in module.values():
            self._add_weight(param, tensor, tp, 0, file, layout)

    def _module(self, like: StatefulDict, tp: int) -> tuple[StatefulDict, dict[str, tuple[Param, Tensor]]]:
        """The module's state dict with new shapes; a tied weight's second name shares the first one's tensor."""
        module = StatefulDict()
        own: dict[str, tuple[Param, Tensor]] = {}
        module.state = Template(self.source.models[0, 0]).copy(like.state)
        for name, tensor in like.items():
            twin = next((other for other in own if like[other].same_view(tensor)), None)
            param = self.params.get(name) or self.weights.get(name)
            if twin is not None and name not in self.params:
                module[name] = module[twin]
                continue
            assert param is not None
            module[name] = new_tensor(tensor.dtype, param.rule.shard_shape(name, param.shape, self.target.tp))
            own[name] = (param, module[name])
        return module, own

    def _add_weight(self, param: Param, tensor: Tensor, tp: int, copy: int, file: int, layout: PtLayout) -> None:  # noqa: PLR0917
        slot = layout.slots[tensor.storage]
        place = Place(self.target.tp, tp, copy, file, slot.offset)
        self.rows.add_shard("weight", param, place, dtype=tensor.dtype, strides=tensor.stride)

    def _write_layers(self) -> None:
        """`layer_*` files: the same for every pp, cut anew for another tp."""
        model_axis = self.source.model_axis or self.target.tp > 1
        copies: dict[str, int] = {}
        for layer in sorted({layer for layer, _ in self.source.layers}):
            found = layer_weights(self.source, self.extra.model, layer)
            for name in found:
                copies[name] = copies.get(name, -1) + 1
            for tp in range(self.target.tp):
                like = self.source.layers[layer, min(tp, self.source.topology.tp - 1)]
                value = StatefulDict()
                value.state = Template(like).copy(getattr(like.value, "state", None))
                own: list[tuple[Param, Tensor, int]] = []
                for key, (name, shards) in zip(like.value, found.items(), strict=True):
                    param = self.params.get(name) or self.weights[name]
                    shape = param.rule.shard_shape(name, param.shape, self.target.tp)
                    value[key] = new_tensor(shards[0].dtype, shape)
                    own.append((param, value[key], copies[name]))
                file, layout = self._add_file(names.layer_file(layer, tp, model_axis=model_axis), value)
                for param, tensor, copy in own:
                    self._add_weight(param, tensor, tp, copy, file, layout)

    # Optimizer files ----------------------------------------------------------------------------------------------

    def _write_optimizer(self, pp: int, tp: int, dp: int, buffers: list[tuple[str, ...]]) -> None:
        stage = self.stages[pp]
        mp = self._like(pp, tp)
        like = self.source.optimizers[mp, min(dp, self.source.topology.dp - 1)]
        template = Template(like)
        state = like.value["optimizer_state_dict"]
        layouts = [self._flat_group(group) for group in buffers]
        tensors: list[dict[str, Tensor]] = []
        base_state: dict[int, dict[str, Any]] = {}
        padded = "zero_stage" not in state  # BF16_Optimizer keeps the padding of its master weights
        for at, (group, layout) in enumerate(zip(stage.ids, layouts, strict=True)):
            lean = layout.partition - (0 if padded else layout.padding(dp))
            found = self._group_state(group, tp)
            own = {
                key: new_tensor(dtype, (lean if key == "fp32" else layout.partition,))
                for key, dtype in found.dtypes.items()
            }
            tensors.append(own)
            merged = dict(found.ordered(own))
            if merged:
                base_state[at] = merged
        replaced: dict[str, Any] = {
            "base_optimizer_state": self._base_state(template, state["base_optimizer_state"], stage, base_state),
            "single_partition_of_fp32_groups": [own["fp32"] for own in tensors],
            "group_paddings": [layout.padding(dp) for layout in layouts],
            "partition_count": [self.target.dp] * len(layouts),
            "param_slice_mappings": [
                self._mappings(group, buffer, layout, dp)
                for group, buffer, layout in zip(stage.groups, buffers, layouts, strict=True)
            ],
        }
        if "param_alignment_paddings" in state:
            replaced["param_alignment_paddings"] = [list(layout.param_paddings) for layout in layouts]
        if not padded:
            replaced["zero_stage"] = zero_stage_enum(self.target.zero)
        value = template.copy_except(like.value, {"optimizer_state_dict": template.copy_except(state, replaced)})
        name = names.optimizer_file(self.source.prefix, dp, pp * self.target.tp + tp)
        file, layout_pt = self._add_file(name, value)
        for buffer, layout, own in zip(buffers, layouts, tensors, strict=True):
            for span in layout.spans(dp):
                self._add_span(buffer[span.index], own, span, (pp, tp), file, layout_pt)

    def _flat_group(self, buffer: tuple[str, ...]) -> flat.FlatGroup:
        enabled = bool(self.source.zero_config.get("parameter_alignment"))
        return flat.FlatGroup(
            num_elements=tuple(self._shard_elements(name) for name in buffer),
            dp=self.target.dp,
            param_alignment=flat.param_alignment(self.extra.element_bytes, enabled),
        )

    def _add_span(  # noqa: PLR0917
        self, name: str, own: Mapping[str, Tensor], span: flat.Span, rank: tuple[int, int], file: int, layout: PtLayout
    ) -> None:
        pp, tp = rank
        for key, tensor in own.items():
            offset = layout.slots[tensor.storage].offset + span.offset * ITEM_BYTES[tensor.dtype]
            place = Place(self.target.tp, tp, self.copies[name].index(pp), file, offset)
            self.rows.add_flat(key, self.params[name], place, dtype=tensor.dtype, start=span.start, stop=span.stop)

    def _mappings(
        self, group: tuple[str, ...], buffer: tuple[str, ...], layout: flat.FlatGroup, dp: int
    ) -> StatefulDict:
        """True positions, also under `round_robin_gradients` where DeepSpeed's own are wrong; in optimizer order."""
        spans = {buffer[span.index]: span for span in layout.spans(dp)}
        return StatefulDict(
            (name, fragment_address(spans[name].offset, spans[name].stop - spans[name].start))
            for name in group
            if name in spans
        )

    def _base_state(
        self, template: Template, like: Mapping[str, Any], stage: Stage, state: dict[int, dict[str, Any]]
    ) -> dict[str, Any]:
        groups = [{**self._param_group(group), "params": [at]} for at, group in enumerate(stage.ids)]
        return template.copy_except(like, {"state": state, "param_groups": groups})

    def _holder(self, group: int) -> tuple[int, int]:
        """First stage of the source that holds a group, and the group's position there."""
        for pp, stage in enumerate(self.extra.model.stages):
            if group in stage.ids:
                return pp, stage.ids.index(group)
        raise AssertionError(f"group {group} is on no stage")

    def _param_group(self, group: int) -> dict[str, Any]:
        pp, at = self._holder(group)
        mp = pp * self.source.topology.tp
        copied = Template(self.source.optimizers[mp, 0]).copy(param_groups(self.source, mp)[at])
        assert isinstance(copied, dict)
        return copied

    def _group_state(self, group: int, tp: int) -> _GroupTemplate:
        pp, at = self._holder(group)
        mp = pp * self.source.topology.tp + min(tp, self.source.topology.tp - 1)
        state = group_states(self.source, mp, 0)[at]
        template = Template(self.source.optimizers[mp, 0])
        inner = self.source.optimizer(mp, 0)["base_optimizer_state"]["state"].get(at, {})
        return _GroupTemplate(
            dtypes={key: tensor.dtype for key, tensor in state.flat.items()},
            order=tuple(inner),
            scalars={key: template.copy(value) for key, value in state.scalars.items()},
        )

    def _write_zero3(self, tp: int, dp: int) -> None:
        raise UnsupportedError("ZeRO-3 targets are not laid out yet")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _GroupTemplate:
    """States of a group: types of the partitioned ones, values of the others, in the optimizer's order."""

    dtypes: Mapping[str, str]
    order: tuple[str, ...]
    scalars: Mapping[str, Any]

    def ordered(self, own: Mapping[str, Tensor]) -> list[tuple[str, Any]]:
        """(state, value) in order; partitioned ones from `own`."""
        return [(key, own[key] if key in own else self.scalars[key]) for key in self.order]
