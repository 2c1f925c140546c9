"""The optimizer's partitions as boxes of logical tensors: flat groups, ZeRO-3's slots, and ZeRO-0's whole states."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from reshard.errors import CorruptSourceError
from reshard.formats.deepspeed import flat, muon
from reshard.formats.deepspeed.contents import DeepSpeedContents
from reshard.formats.deepspeed.fields import Kind, kind_of
from reshard.formats.deepspeed.logical import Model, param_groups, param_shapes
from reshard.formats.deepspeed.rows import Place, Rows, add_span
from reshard.formats.deepspeed.slots import held_runs
from reshard.formats.deepspeed.states import group_states
from reshard.formats.deepspeed.unpartitioned import param_states
from reshard.formats.pt.objects import Inert


def add_unpartitioned(rows: Rows, source: DeepSpeedContents, model: Model, files: Mapping[str, int]) -> None:
    """ZeRO-0: every state has the shape of its parameter's shard."""
    topology = source.topology
    copies = _copies(model)
    for (mp, _), file in source.models.items():
        pp, tp = divmod(mp, topology.tp)
        states = param_states(source.optimizer(mp, 0), file.path, source.named[mp])
        for group, own in zip(source.named[mp], states, strict=True):
            for name, state in zip(group, own, strict=True):
                for key, tensor in state.tensors.items():
                    if tensor.shape != group[name]:
                        raise CorruptSourceError(
                            f"{key} of {name} has the shape {tensor.shape}, expected {group[name]}", path=file.path
                        )
                    place = Place(topology.tp, tp, copies[name].index(pp), files[file.path], tensor.file_offset)
                    rows.add_shard(key, model.params[name], place, dtype=tensor.dtype, strides=tensor.stride)


def add_partitions(
    rows: Rows, source: DeepSpeedContents, model: Model, files: Mapping[str, int], element_bytes: int
) -> None:
    """ZeRO-1/2: flat groups cut into equal partitions.

    Positions follow from the order in `param_shapes`, which is the buffer's; `param_slice_mappings` is wrong under
    `round_robin_gradients` and only compared where it should agree.
    """
    topology = source.topology
    copies = _copies(model)
    kind = kind_of(source.optimizer(0, 0))
    aligned = bool(source.zero_config.get("parameter_alignment")) and kind is Kind.ZERO12
    alignment = flat.param_alignment(element_bytes, aligned)
    for (mp, dp), file in source.optimizers.items():
        pp, tp = divmod(mp, topology.tp)
        shapes = param_shapes(source, mp)
        states = group_states(source, mp, dp)
        groups = param_groups(source, mp)
        whole_groups = {at for at, group in enumerate(groups) if muon.keeps_whole(kind, group, source.zero_config)}
        if len(states) != len(shapes):
            raise CorruptSourceError(f"{len(states)} groups, param_shapes has {len(shapes)}", path=file.path)
        for at, (state, group) in enumerate(zip(states, shapes, strict=True)):
            counts = tuple(math.prod(shape) for shape in group.values())
            names = list(group)
            num_partitions, own = source.partition(names, dp)
            layout = flat.FlatGroup(num_elements=counts, dp=num_partitions, param_alignment=alignment)
            spans = layout.spans(own)
            lean = layout.partition - layout.padding(own)
            partitioned, whole = muon.split(state.flat, whole=at in whole_groups)
            muon.check(at, whole, layout, own, file.path)
            for key, tensor in partitioned.items():
                if tensor.num_elements not in (lean, layout.partition):
                    if key == muon.MOMENTUM and not groups:
                        muon.refuse_elastic(file.path)
                    raise CorruptSourceError(
                        f"group {at}: partition {key!r} has {tensor.num_elements} elements, expected {lean}"
                        f" or with padding {layout.partition}",
                        path=file.path,
                    )
            if not model.round_robin:
                _compare_mappings(source.optimizer(mp, dp), at, names, spans, file.path)
            for span in spans:
                param = model.params[source.whole_name(names[span.index], dp)]
                place = Place(topology.tp, tp, copies[param.name].index(pp), files[file.path], 0)
                if source.experts is not None and param.name in source.experts.stacked:
                    place = place._replace(tp=topology.ep, rank=dp % topology.ep)
                add_span(rows, param, partitioned, span, place)
            for span in muon.whole_spans(layout, own) if whole else ():
                param = model.params[source.whole_name(names[span.index], dp)]
                if source.experts is not None and param.name in source.experts.stacked:
                    muon.refuse_experts(param.name, file.path)
                stages = copies[param.name]
                copy = stages.index(pp) + muon.nth_copy(layout, own, span.index) * len(stages)
                add_span(rows, param, whole, span, Place(topology.tp, tp, copy, files[file.path], 0))


def add_zero3(rows: Rows, source: DeepSpeedContents, model: Model, files: Mapping[str, int]) -> None:
    """ZeRO-3: every parameter has a slot in each rank's sub-group."""
    topology = source.topology
    for mp in range(topology.tp * topology.pp):
        shapes = param_shapes(source, mp)
        own = [source.optimizers[mp, dp] for dp in range(topology.dp)]
        states = [group_states(source, mp, dp) for dp in range(topology.dp)]
        for file, found in zip(own, states, strict=True):
            if len(found) != len(shapes):
                raise CorruptSourceError(f"{len(found)} sub-groups, param_shapes has {len(shapes)}", path=file.path)
        for at, group in enumerate(shapes):
            slots, length = flat.zero3_slots([math.prod(shape) for shape in group.values()], topology.dp)
            held = [(file, state[at].flat) for file, state in zip(own, states, strict=True)]
            keys = dict.fromkeys(key for _, tensors in held for key in tensors)
            runs = {
                key: held_runs(held, key, files, length=length, what=f"sub-group {at}: partition {key!r}")
                for key in keys
            }
            place = Place(topology.tp, mp, 0, 0, 0)
            for name, slot in zip(group, slots, strict=True):
                for key, (dtype, found_runs) in runs.items():
                    rows.add_slots(
                        key, model.params[name], place, found_runs, dtype=dtype, offset=slot.offset, size=slot.size
                    )


def _copies(model: Model) -> dict[str, list[int]]:
    """Stages that hold each parameter; tied ones are on several."""
    found: dict[str, list[int]] = {}
    for pp, stage in enumerate(model.stages):
        for name in (name for group in stage.groups for name in group):
            found.setdefault(name, []).append(pp)
    return found


def _compare_mappings(
    state: Mapping[str, Any], at: int, names: list[str], spans: tuple[flat.Span, ...], path: str
) -> None:
    mappings = state.get("param_slice_mappings")
    if not isinstance(mappings, list) or len(mappings) <= at or not isinstance(mappings[at], Mapping):
        return
    stated = {
        name: (address.state.get("start"), address.state.get("numel"))
        for name, address in mappings[at].items()
        if isinstance(address, Inert) and isinstance(address.state, Mapping)
    }
    expected = {names[span.index]: (span.offset, span.stop - span.start) for span in spans}
    if len(stated) == len(mappings[at]) and stated != expected:
        wrong = sorted(name for name in stated.keys() | expected.keys() if stated.get(name) != expected.get(name))
        raise CorruptSourceError(
            f"group {at}: param_slice_mappings and param_shapes disagree about {', '.join(wrong[:5])}", path=path
        )
