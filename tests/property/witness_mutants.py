"""Seeded defects of a conversion: `python -m tests.property.witness_mutants`.

A mutant is a conversion of a golden checkpoint in which one function of planner, layout, reader, writer, execution or
storage is replaced by one with a plausible defect, or in which the source changes. Each must end in one of our errors
and publish nothing. A defect of a reader or of a shared function concerns source and target alike, as it would in the
code. A mutant that publishes the same bytes as the conversion without it is none, and another one is drawn.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import os
import random
import re
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np

from reshard import api, witness
from reshard.api import Conversion, RunOptions, convert, index_of
from reshard.errors import ReshardError
from reshard.execution import executor, read_back, scan, tile
from reshard.formats.dcp import reader as dcp_reader
from reshard.formats.deepspeed import autoep, flat
from reshard.formats.deepspeed import names as file_names
from reshard.formats.deepspeed.experts import Experts
from reshard.formats.deepspeed.reading import opening
from reshard.formats.deepspeed.reading import partitions as deepspeed_partitions
from reshard.formats.deepspeed.tensor_parallel import patterns as tp_patterns
from reshard.formats.megatron import buckets
from reshard.names import apply
from reshard.planning import plan as planning
from reshard.planning.plan import Plan
from reshard.planning.replicas import Copies
from reshard.storage.target_writer import TargetWriter
from reshard.tensors.intervals import Int64Array
from reshard.tensors.layout import Index, LogicalTensor, TargetLayout, TensorKey
from reshard.tensors.shard_table import ShardTable
from reshard.topology import Topology
from reshard.witness import WitnessReport
from tests.golden.matrix import described_options

GOLDEN = Path(__file__).parents[1] / "golden"
NAME_MAPS = Path(__file__).parents[2] / "examples" / "name_maps"
_DS, _STEP = GOLDEN / "deepspeed-0.19.8", "step-00000002"
_FSDP = GOLDEN / "megatron-0.16.1" / "fsdp-dtensor-dp2" / "iter_0000002"


@dataclasses.dataclass(frozen=True, slots=True)
class Case:
    """A conversion that mutants are made of."""

    source: Path
    topology: str
    format: str = ""
    dtype: str | None = None
    states: tuple[str, ...] = ()
    names: tuple[str, str] = ("", "")
    """Name map of the examples, and its constants for the golden model."""
    described: bool = False
    """A model description and a configuration say what the source does not."""

    def conversion(self, target: Path) -> Conversion:
        """The conversion, into a folder."""
        name_map, constants = self.names
        path = target.with_suffix(".yaml") if name_map else None
        if path is not None:
            text = (NAME_MAPS / name_map).read_text(encoding="utf-8")
            lines = [
                f"constants: {{{constants}}}" if line.startswith("constants") else line for line in text.splitlines()
            ]
            path.write_text("\n".join(lines), encoding="utf-8")
        topology = Topology.parse(self.topology)
        said = described_options(index_of(self.source), topology, target.parent / "said") if self.described else {}
        return Conversion(
            source=self.source,
            target=target,
            topology=topology,
            target_format=self.format,
            weight_dtype=self.dtype,
            states=self.states,
            names=path,
            **said,
        )


CASES = (
    Case(_DS / "zero2-dp3" / _STEP, "dp=2,zero=1"),
    Case(_DS / "zero2-dp3" / _STEP, "dp=2,zero=3"),
    Case(_DS / "zero2-dp3" / _STEP, "dp=2,zero=0"),
    Case(_DS / "zero2-dp3" / _STEP, "dp=1", "safetensors"),
    Case(_DS / "zero2-dp3" / _STEP, "dp=3", "dcp"),
    Case(_DS / "zero2-dp3" / _STEP, "zero=1", "universal"),
    Case(_DS / "zero3-dp3" / _STEP, "dp=2,zero=3"),
    Case(_DS / "zero3-dp3" / _STEP, "dp=4,zero=2"),
    Case(_DS / "bf16-dp2" / _STEP, "dp=3,zero=2"),
    Case(_DS / "bf16-dp2" / _STEP, "dp=1", "safetensors", "float16"),
    Case(_DS / "pipeline-tp2-pp2" / _STEP, "tp=2,pp=1,dp=2"),
    Case(_DS / "pipeline-tp2-pp2" / _STEP, "tp=1,pp=2"),
    Case(_DS / "pipeline-dp2" / _STEP, "tp=2,pp=2"),
    Case(_DS / "pipeline-tp2-pp2" / _STEP, "zero=1", "universal"),
    Case(_DS / "megatron-tp2-pp2" / _STEP, "tp=1,pp=2"),
    Case(_DS / "megatron-tp2-pp2" / _STEP, "tp=2,pp=1,dp=2"),
    Case(_DS / "megatron-tp2-pp2" / _STEP, "zero=1", "universal"),
    Case(_DS / "experts-dp4-ep2" / _STEP, "dp=4,ep=1,zero=1"),
    Case(_DS / "experts-pp2-dp2-ep2" / _STEP, "pp=3,dp=2,ep=2,zero=1"),
    Case(_DS / "experts-pp2-dp2-ep2" / _STEP, "pp=1,dp=2,zero=1"),
    Case(_DS / "autoep-dp2-ep2" / _STEP, "dp=4,ep=4,zero=1"),
    Case(_DS / "autoep-tp2-dp2-ep2" / _STEP, "tp=1,dp=2,ep=2,zero=1"),
    Case(_DS / "autoep-tp2-dp2-ep2" / _STEP, "tp=3,dp=4,ep=2,zero=2"),
    Case(_DS / "autoep-dp2-ep2" / _STEP, "dp=4,ep=2,zero=3"),
    Case(_DS / "autoep-tp2-dp2-ep2" / _STEP, "tp=3,dp=2,ep=2,zero=3"),
    Case(_DS / "autoep-tp3-dp2-ep2-zero3" / _STEP, "tp=2,dp=4,ep=4,zero=3"),
    Case(_DS / "autoep-tp3-dp2-ep2-zero3" / _STEP, "tp=2,dp=2,ep=2,zero=1"),
    Case(GOLDEN / "universal-0.19.8" / "zero2-dp3" / _STEP, "dp=2,zero=2", "deepspeed"),
    Case(GOLDEN / "universal-0.19.8" / "pipeline-tp2-pp2" / _STEP, "tp=2,pp=2", "deepspeed"),
    Case(GOLDEN / "dcp-2.13" / "fsdp2-flat" / _STEP, "dp=3"),
    Case(GOLDEN / "dcp-2.13" / "tp2-fsdp2-titan" / _STEP, "dp=1", "safetensors"),
    *(
        Case(GOLDEN / "dcp-2.13" / "fsdp2-flat" / _STEP, f"dp=3,zero={stage}", "deepspeed", described=True)
        for stage in (1, 2, 3)
    ),
    Case(GOLDEN / "dcp-2.13" / "fsdp2-flat" / _STEP, "zero=1", "universal", described=True),
    Case(GOLDEN / "safetensors" / "llama", "dp=2,zero=1", "deepspeed", described=True),
    Case(GOLDEN / "accelerate-1.15" / "fsdp2", "dp=3"),
    Case(GOLDEN / "accelerate-1.15" / "fsdp2", "dp=2,zero=2", "deepspeed", described=True),
    Case(GOLDEN / "megatron-0.16.1" / "iter_0000003", "dp=1", "safetensors", None, ("weight",)),
    Case(GOLDEN / "megatron-0.16.1" / "iter_0000003", "dp=2", "dcp", None, ("fp32", "exp_avg")),
    Case(GOLDEN / "megatron-0.16.1" / "buckets-tp2" / "iter_0000003", "dp=2", "dcp"),
    Case(GOLDEN / "megatron-0.16.1" / "buckets-tp2" / "iter_0000003", "tp=2,dp=2"),
    Case(GOLDEN / "megatron-0.16.1" / "buckets-experts" / "iter_0000003", "dp=2", "dcp"),
    Case(_FSDP, "dp=3"),
    *(Case(_FSDP, f"dp=2,zero={stage}", "deepspeed", described=True) for stage in (1, 3)),
    Case(_FSDP, "zero=1", "universal", described=True),
    Case(GOLDEN / "safetensors" / "llama", "dp=2", "dcp"),
    Case(GOLDEN / "safetensors" / "phimoe", "dp=1", "safetensors", names=("phimoe.yaml", "experts: 4")),
    Case(
        GOLDEN / "safetensors" / "bloom",
        "dp=2",
        "dcp",
        names=("bloom-separate-qkv.yaml", "hidden: 8, heads: 4, head: 2"),
    ),
    Case(
        GOLDEN / "safetensors" / "phi3",
        "dp=1",
        "safetensors",
        names=("phi3.yaml", "hidden: 8, heads: 4, kv_heads: 2, head: 2"),
    ),
)

Mutate = Callable[[random.Random, Case], contextlib.AbstractContextManager[Any]]


_TRIES = 60
"""Conversions that are tried with a kind of defect before another kind is tried."""


class NoMutantError(Exception):
    """Nothing in this conversion can have this defect."""


# Defects of tables: of a reader's index (for source and target alike), and of a writer's layout.


def _twins(rng: random.Random, tensors: tuple[LogicalTensor, ...], *, same_state: bool) -> tuple[int, int]:
    """Draw two tensors of equal shape and type."""
    groups: dict[Any, list[int]] = {}
    for at, tensor in enumerate(tensors):
        if tensor.num_elements > 1:
            state = tensor.key.state if same_state else tensor.key.name
            groups.setdefault((state, tensor.shape, tensor.dtype), []).append(at)
    pairs = [group for group in groups.values() if len(group) > 1]
    if not pairs:
        raise NoMutantError
    first, second = rng.sample(rng.choice(pairs), 2)
    return first, second


def _names(rng: random.Random, tensors: tuple[LogicalTensor, ...], table: ShardTable) -> ShardTable:
    first, second = _twins(rng, tensors, same_state=True)
    return _swapped(table, first, second)


def _states(rng: random.Random, tensors: tuple[LogicalTensor, ...], table: ShardTable) -> ShardTable:
    first, second = _twins(rng, tensors, same_state=False)
    return _swapped(table, first, second)


def _swapped(table: ShardTable, first: int, second: int) -> ShardTable:
    tensor = table.tensor.copy()
    tensor[table.tensor == first], tensor[table.tensor == second] = second, first
    return dataclasses.replace(table, tensor=tensor)


def _axis(rng: random.Random, tensors: tuple[LogicalTensor, ...], table: ShardTable) -> ShardTable:
    """Read or write a box with its axes transposed."""
    wide = [at for at in range(len(table)) if not table.chunk[at] and (table.size[at] > 1).sum() > 1]
    if not wide:
        raise NoMutantError
    at = rng.choice(wide)
    dims = np.flatnonzero(table.size[at] > 1)[:2]
    stride = table.stride.copy()
    low, high = sorted(table.stride[at, dims])
    if low != 1:
        raise NoMutantError
    stride[at, dims[0]], stride[at, dims[1]] = 1, table.size[at, dims[0]]
    del high
    return dataclasses.replace(table, stride=stride)


def _offset(rng: random.Random, tensors: tuple[LogicalTensor, ...], table: ShardTable) -> ShardTable:
    """Shift the rows of a tensor by an element, or by a row of its last dim."""
    number = rng.choice(sorted(set(table.tensor.tolist())))
    tensor = tensors[number]
    step = tensor.item_bytes * rng.choice([1, -1, tensor.shape[-1] if tensor.shape else 1])
    rows = np.flatnonzero(table.tensor == number)
    if rng.random() < 0.5:
        rows = rows[:1]
    moved = table.byte_offset.copy()
    moved[rows] += step
    return dataclasses.replace(table, byte_offset=moved)


def _order(rng: random.Random, _tensors: tuple[LogicalTensor, ...], table: ShardTable) -> ShardTable:
    """Exchange two boxes of equal size of a tensor."""
    groups: dict[Any, list[int]] = {}
    for at in range(len(table)):
        if not table.chunk[at]:
            groups.setdefault((int(table.tensor[at]), int(table.replica[at]), tuple(table.size[at])), []).append(at)
    several = [group for group in groups.values() if len(group) > 1]
    if not several:
        raise NoMutantError
    first, second = rng.sample(rng.choice(several), 2)
    return _exchanged(table, first, second, "offset")


def _copy(rng: random.Random, _tensors: tuple[LogicalTensor, ...], table: ShardTable) -> ShardTable:
    """Take the bytes of another tensor's box of the same size."""
    groups: dict[Any, list[int]] = {}
    for at in range(len(table)):
        groups.setdefault((int(table.chunk[at]), tuple(table.size[at]), tuple(table.stride[at])), []).append(at)
    several = [group for group in groups.values() if len({int(table.tensor[at]) for at in group}) > 1]
    if not several:
        raise NoMutantError
    first, second = rng.sample(rng.choice(several), 2)
    columns = {name: getattr(table, name).copy() for name in ("file", "byte_offset")}
    for column in columns.values():
        column[first] = column[second]
    return dataclasses.replace(table, **columns)


def _exchanged(table: ShardTable, first: int, second: int, *names: str) -> ShardTable:
    columns = {name: getattr(table, name).copy() for name in names}
    for name, column in columns.items():
        own = getattr(table, name)
        column[first], column[second] = own[second], own[first]
    return dataclasses.replace(table, **columns)


_TABLES = {"name": _names, "state": _states, "axis": _axis, "offset": _offset, "order": _order, "copy": _copy}


def _relabelled(rng: random.Random, tensors: tuple[LogicalTensor, ...]) -> tuple[LogicalTensor, ...]:
    other = {"float32": "int32", "bfloat16": "float16", "float16": "bfloat16", "int64": "float64"}
    at = rng.choice([at for at, tensor in enumerate(tensors) if tensor.dtype in other])
    name = tensors[at].key.name
    return tuple(
        dataclasses.replace(item, dtype=other.get(item.dtype, item.dtype))
        if item.key.name == name and item.dtype == tensors[at].dtype
        else item
        for item in tensors
    )


def reader(kind: str) -> Mutate:
    """A defect in the reader of the source's format; it reads targets of that format, too."""

    @contextlib.contextmanager
    def apply_to(rng: random.Random, case: Case) -> Iterator[None]:
        seed, real = rng.random(), api.read_checkpoint
        own = real(case.source, None).format

        def read(*args: Any) -> Index:
            index: Index = real(*args)
            if index.format != own:
                return index
            again = random.Random(seed)  # the same defect in every call
            if kind == "dtype":
                return dataclasses.replace(index, tensors=_relabelled(again, index.tensors))
            return dataclasses.replace(index, shards=_TABLES[kind](again, index.tensors, index.shards))

        with mock.patch.object(api, "read_checkpoint", read), mock.patch.object(read_back, "read_checkpoint", read):
            yield

    return apply_to


def layout(kind: str) -> Mutate:
    """A defect in the target's writer, with a reader that has the same one: the placement finds no difference."""

    @contextlib.contextmanager
    def apply_to(rng: random.Random, _case: Case) -> Iterator[None]:
        seed, real = rng.random(), api.lay_out

        def changed(index: Index, made: TargetLayout) -> TargetLayout:
            again = random.Random(seed)
            tensors = made.tensors or index.tensors
            if kind == "dtype":
                return dataclasses.replace(
                    made, tensors=_relabelled(again, tensors), origins=made.origins or tuple(range(len(tensors)))
                )
            return dataclasses.replace(made, shards=_TABLES[kind](again, tensors, made.shards))

        def lay_out(index: Index, *options: Any) -> TargetLayout:
            return changed(index, real(index, *options))

        with mock.patch.object(api, "lay_out", lay_out), mock.patch.object(read_back, "check_placement", _nothing):
            yield

    return apply_to


def _nothing(*_args: Any) -> None:
    pass


# Defects of the planner.


@contextlib.contextmanager
def planner(rng: random.Random, _case: Case) -> Iterator[None]:
    """Match two source tensors of one shape with each other's targets."""
    seed, real = rng.random(), api.make_plan

    def plan(index: Index, made: TargetLayout, **options: Any) -> Plan:
        found: Plan = real(index, made, **options)
        again = random.Random(seed)
        first, second = _twins(again, index.tensors, same_state=again.random() < 0.7)
        name = again.choice(["source_rows", "target_rows"])
        rows = list(getattr(found, name))
        if name == "source_rows":
            # The tables refer to tensors, too: rows of the one are rows of the other from here on.
            return dataclasses.replace(
                found,
                index=dataclasses.replace(index, shards=_swapped(index.shards, first, second)),
                source_rows=tuple(_exchange(rows, first, second)),
                copy_rows=(),
                roundings=(),
            )
        return dataclasses.replace(found, target_rows=tuple(_exchange(rows, first, second)), roundings=())

    with mock.patch.object(api, "make_plan", plan):
        yield


def _exchange(items: list[Any], first: int, second: int) -> list[Any]:
    items[first], items[second] = items[second], items[first]
    return items


# Defects of functions that reader and writer share.


@contextlib.contextmanager
def sub_groups(rng: random.Random, case: Case) -> Iterator[None]:
    """Mix up the slots of ZeRO-3's sub-groups: their order, or their offsets, in reader and writer alike."""
    if "zero3" not in str(case.source) and "zero=3" not in case.topology:
        raise NoMutantError
    kind, real = rng.choice(["order", "exchange", "shift"]), flat.zero3_slots

    def slots(num_elements: Any, dp: int) -> tuple[tuple[flat.Slot, ...], int]:
        found, length = real(num_elements, dp)
        if kind == "order":
            ends = [slot.offset + slot.size for slot in found]
            return tuple(flat.Slot(length - end, slot.size) for slot, end in zip(found, ends, strict=True)), length
        equal = [(a, b) for a in range(len(found)) for b in range(a) if found[a].size == found[b].size]
        if kind == "exchange" and equal:
            a, b = equal[0]
            return tuple(_exchange(list(found), a, b)), length
        return tuple(flat.Slot((slot.offset + 1) % max(1, length - slot.size + 1), slot.size) for slot in found), length

    with mock.patch.object(flat, "zero3_slots", slots):
        yield


@contextlib.contextmanager
def partitions(rng: random.Random, _case: Case) -> Iterator[None]:
    """Put the parameters of a flat group in another order, in reader and writer alike."""
    kind = rng.choice(["backwards", "exchange"])

    def offsets(self: flat.FlatGroup) -> tuple[int, ...]:
        counts = self.num_elements
        if kind == "backwards":
            ends = np.cumsum([0, *reversed(counts)])[:-1]
            return tuple(int(end) for end in reversed(ends))
        starts = [int(start) for start in np.cumsum([0, *counts])[:-1]]
        equal = [(a, b) for a in range(len(counts)) for b in range(a) if counts[a] == counts[b] and counts[a]]
        return tuple(_exchange(starts, *equal[0]) if equal else starts)

    with mock.patch.object(flat.FlatGroup, "offsets", property(offsets)):
        yield


@contextlib.contextmanager
def expert_parts(_rng: random.Random, case: Case) -> Iterator[None]:
    """Spread experts over the ranks backwards, in reader and writer alike."""
    if not case.source.parent.name.startswith("experts"):
        raise NoMutantError
    whole, local = Experts.whole_name, Experts.local_names

    def whole_name(self: Experts, name: str, ep: int, part: int) -> str:
        return whole(self, name, ep, ep - 1 - part)

    def local_names(self: Experts, names: Any, ep: int, part: int) -> dict[str, str]:
        return local(self, names, ep, ep - 1 - part)

    with mock.patch.object(Experts, "whole_name", whole_name), mock.patch.object(Experts, "local_names", local_names):
        yield


@contextlib.contextmanager
def expert_holders(rng: random.Random, case: Case) -> Iterator[None]:
    """Partition AutoEP's experts at ZeRO-3 over the ranks of another part, or in another order of the ranks.

    Reader and writer do so alike, and so do the files' descriptions.
    """
    if not case.source.parent.name.startswith("autoep") or "zero=3" not in case.topology:
        raise NoMutantError
    real, kind = autoep.list_holders, rng.choice(["another part", "backwards", "tensor-parallel rank first"])

    def holders(topology: Topology, part: int) -> Sequence[int]:
        if kind == "another part":
            return real(topology, topology.ep - 1 - part)
        if kind == "backwards":
            return real(topology, part)[::-1]
        return sorted(real(topology, part), key=lambda rank: (rank % topology.tp, rank))

    with (
        mock.patch.object(autoep, "list_holders", holders),
        mock.patch.object(deepspeed_partitions, "_check_partition_groups", _nothing),
    ):
        yield


@contextlib.contextmanager
def expert_layers(rng: random.Random, case: Case) -> Iterator[None]:
    """Give the files of experts the number of another layer, or of another stage; the reader does not look at it."""
    if not case.source.parent.name.startswith("experts"):
        raise NoMutantError
    real, kind = file_names.expert_file, rng.choice(["backwards", "another stage"])

    def expert_file(layer: int, expert: int, mp: int = 0) -> str:
        stages = Topology.parse(case.topology).pp
        if kind == "another stage":
            return real(layer, expert, stages - 1 - mp)
        return real(2 // stages - layer, expert, mp)

    with (
        mock.patch.object(file_names, "expert_file", expert_file),
        mock.patch.object(opening, "_check_order", _nothing),
        mock.patch.object(opening, "_check_counts", _nothing),
        mock.patch.object(opening, "_check_names", _nothing),
    ):
        yield


@contextlib.contextmanager
def bucket_places(rng: random.Random, case: Case) -> Iterator[None]:
    """Mix up the parts of parameters in Megatron-Core's buckets: names, ranks, gate and up, experts, or stages."""
    if "buckets" not in str(case.source):
        raise NoMutantError
    own_kinds = ["expert", "virtual stage"] if "experts" in str(case.source) else ["rank"]
    kind, seed = rng.choice(["exchange", "gate", *own_kinds]), rng.random()
    real_cut, real_place = buckets._cut, buckets._place_parts
    real_expert, real_chunks = buckets._cut_expert, buckets.list_chunks

    def cut_expert(name: str, location: Any, tp: int, rank: int, expert: int) -> Any:
        return real_expert(name, location, tp, rank, expert ^ 1 if kind == "expert" else expert)

    def list_chunks(*args: Any) -> Any:
        found = real_chunks(*args)
        return [found[at] for at in (0, 2, 1, 3)] if kind == "virtual stage" else found

    def cut(name: str, location: Any, tp: int, rank: int, *, shared: bool) -> Any:
        part = real_cut(name, location, tp, tp - 1 - rank if kind == "rank" else rank, shared=shared)
        return part._replace(boxes=part.boxes[::-1]) if kind == "gate" else part

    def place(parts: Any, own: Any) -> Any:
        found = real_place(parts, own)
        if kind != "exchange" or found is None:
            return found
        equal = [
            (a, b) for a in range(len(found)) for b in range(a) if found[a][2].num_elements == found[b][2].num_elements
        ]
        if not equal:
            return found
        first, second = random.Random(seed).choice(equal)
        names = [part for _, _, part in found]
        names[first], names[second] = names[second], names[first]
        return [(bucket, start, part) for (bucket, start, _), part in zip(found, names, strict=True)]

    with (
        mock.patch.object(buckets, "_cut", cut),
        mock.patch.object(buckets, "_place_parts", place),
        mock.patch.object(buckets, "_cut_expert", cut_expert),
        mock.patch.object(buckets, "list_chunks", list_chunks),
    ):
        yield


@contextlib.contextmanager
def optimizer_names(rng: random.Random, case: Case) -> Iterator[None]:
    """Exchange optimizer states of Megatron-FSDP: of gate and up, of two layers, both moments, or of two weights."""
    if case.source != _FSDP:
        raise NoMutantError
    kind, seed, real = rng.choice(["halves", "layers", "states", "exchange"]), rng.random(), dcp_reader.find_names

    def other(key: TensorKey) -> TensorKey:
        if kind == "states":
            return TensorKey("exp_avg" if key.state == "exp_avg_sq" else "exp_avg_sq", key.name)
        first, second = ("_w", "_v") if kind == "halves" else ("layers.0.", "layers.1.")
        ways = {first: second, second: first}
        return TensorKey(key.state, re.sub("|".join(map(re.escape, ways)), lambda found: ways[found[0]], key.name))

    def find_names(entries: Any, where: str) -> Any:
        naming = real(entries, where)
        shapes = {entry.key: entry.shape for entry in entries}
        states = {entry: key for entry, key in naming.tensors.items() if key.state.startswith("exp_avg")}
        if kind == "exchange":
            groups: dict[Any, list[str]] = {}
            for entry, key in sorted(states.items()):
                groups.setdefault((key.state, shapes[entry]), []).append(entry)
            again = random.Random(seed)
            first, second = again.sample(again.choice([own for own in groups.values() if len(own) > 1]), 2)
            changed = {first: states[second], second: states[first]}
        else:
            changed = {entry: other(key) for entry, key in states.items()}
        return dataclasses.replace(naming, tensors={**naming.tensors, **changed})

    with mock.patch.object(dcp_reader, "find_names", find_names):
        yield


@contextlib.contextmanager
def cut_rules(rng: random.Random, case: Case) -> Iterator[None]:
    """Take row-parallel parameters for column-parallel ones, or fused parts for one, in reader and writer alike."""
    if "pipeline" not in str(case.source):
        raise NoMutantError
    real = tp_patterns.parse
    key = rng.choice(
        [
            "parameter_with_row_parallelism_patterns",
            "parameter_with_2_sub_params_cat_dim_0",
            "parameter_with_sub_params",
        ]
    )

    def parse(info: Any) -> Any:
        return real({**info, key: []} if isinstance(info, dict) and key in info else info)

    with mock.patch.object(tp_patterns, "parse", parse):
        yield


@contextlib.contextmanager
def last_copy(_rng: random.Random, case: Case) -> Iterator[None]:
    """Take the last copy of each tensor and compare none: the first stage alone uses Megatron's learned positions."""
    if not case.source.parent.name.startswith("megatron-tp2"):
        raise NoMutantError

    def last(shards: ShardTable, rows: Int64Array) -> Int64Array:
        own = rows[shards.replica[rows] == shards.replica[rows].max()] if len(rows) else rows
        return first(shards, own)

    first = planning._one_replica
    with (
        mock.patch.object(planning, "_one_replica", last),
        mock.patch.object(planning, "copies_to_compare", _no_copies),
    ):
        yield


def _no_copies(index: Index, *_args: Any) -> Copies:
    return Copies((np.zeros(0, dtype=np.int64),) * len(index.tensors), ())


@contextlib.contextmanager
def name_map(rng: random.Random, case: Case) -> Iterator[None]:
    """Give two tensors each other's names after a name map, or take the parts of one in another order."""
    if not case.names[0]:
        raise NoMutantError
    seed, real = rng.random(), apply.rename

    def rename(index: Index, rules: Any) -> Index:
        made: Index = real(index, rules)
        return dataclasses.replace(made, shards=_names(random.Random(seed), made.tensors, made.shards))

    with mock.patch("reshard.names.rename", rename):
        yield


# Defects of the execution, of the storage, and of the source.


@contextlib.contextmanager
def wrong_read(rng: random.Random, _case: Case) -> Iterator[None]:
    """Read one range of a tile from a place beside it."""
    countdown, step = [rng.randrange(12)], rng.choice([4, -4, 8, 64])
    real = scan.split_into_ranges

    def split(row: Any, box: Any, elements: Any) -> Any:
        countdown[0] -= 1
        for position, content in real(row, box, elements):
            yield (position + step if countdown[0] == -1 else position), content

    with (
        mock.patch.object(scan, "split_into_ranges", split),
        mock.patch.object(scan, "view_elements", lambda *_: None),
        mock.patch.object(tile, "view_elements", lambda *_: None),
    ):
        yield


@contextlib.contextmanager
def wrong_write(rng: random.Random, _case: Case) -> Iterator[None]:
    """Write the content of one range into the place of another one of the same length, and report the right one."""
    first = rng.randrange(24)
    real = TargetWriter.write
    seen: list[tuple[int, int, Any]] = []

    def write(self: TargetWriter, file: int, position: int, content: Any, crc32: int | None = None) -> Any:
        at = len(seen)
        before = [old for old in seen[max(0, at - 8) :] if len(old[2]) == len(content)]
        seen.append((file, position, content.copy()))
        report = real(self, file, position, content, crc32)
        if at >= first and before and seen[first:] and not getattr(self, "done", False):
            other = before[-1]
            if bytes(other[2]) != bytes(content):
                _write_over(self, other[0], other[1], content)
                _write_over(self, file, position, other[2])
                write.done = True  # type: ignore[attr-defined]
                seen.clear()
        return report

    def once(self: TargetWriter, file: int, position: int, content: Any, crc32: int | None = None) -> Any:
        return (
            real(self, file, position, content, crc32)
            if getattr(write, "done", False)
            else write(self, file, position, content, crc32)
        )

    def _write_over(self: TargetWriter, file: int, position: int, content: Any) -> None:
        real(self, file, position, content)

    with mock.patch.object(TargetWriter, "write", once):
        yield


def _equal_files(folder: Path, *, pattern: str) -> list[tuple[Path, Path]]:
    files = sorted(path for path in folder.rglob(pattern) if path.is_file() and path.name != "COMMIT.json")
    return [(a, b) for at, a in enumerate(files) for b in files[:at] if a.stat().st_size == b.stat().st_size]


@contextlib.contextmanager
def swapped_target(rng: random.Random, _case: Case) -> Iterator[None]:
    """Exchange two finished files of the same size in the staging folder, before it is verified."""
    seed, real = rng.random(), executor.Mover.finish

    def finish(self: executor.Mover, *args: Any, **options: Any) -> Any:
        outcome = real(self, *args, **options)
        pairs = _equal_files(self._target._folder, pattern="*")
        if not pairs:
            raise NoMutantError
        _exchange_content(*random.Random(seed).choice(pairs))
        return outcome

    with mock.patch.object(executor.Mover, "finish", finish):
        yield


@contextlib.contextmanager
def swapped_source(rng: random.Random, case: Case) -> Iterator[None]:
    """Exchange two files of the source, of the same size and with the same times, while bytes move."""
    seed, real = rng.random(), executor.Mover.do

    def do(self: executor.Mover, *args: Any, **options: Any) -> Any:
        pairs = _equal_files(self.plan.index.root, pattern="*")
        if not pairs:
            raise NoMutantError
        first, second = random.Random(seed).choice(pairs)
        if random.Random(seed).random() < 0.5:
            _exchange_content(first, second)
            return real(self, *args, **options)
        records = real(self, *args, **options)
        _exchange_content(first, second)
        return records

    with mock.patch.object(executor.Mover, "do", do):
        yield


def _exchange_content(first: Path, second: Path) -> None:
    """Exchange the bytes of two files in place, and set their times back."""
    contents, times = (first.read_bytes(), second.read_bytes()), (first.stat(), second.stat())
    for path, content, status in zip((first, second), reversed(contents), times, strict=True):
        with path.open("r+b") as file:
            file.write(content)
        os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


KINDS: dict[str, Mutate] = {
    **{f"reader: {kind}": reader(kind) for kind in (*_TABLES, "dtype")},
    **{f"layout: {kind}": layout(kind) for kind in (*_TABLES, "dtype")},
    "planner: name": planner,
    "shared: sub-group": sub_groups,
    "shared: order of a flat group": partitions,
    "reader: places in buckets": bucket_places,
    "reader: names of optimizer states": optimizer_names,
    "shared: parts of experts": expert_parts,
    "shared: ranks that hold experts": expert_holders,
    "layout: layers of experts": expert_layers,
    "shared: axis of tensor parallelism": cut_rules,
    "shared: name map": name_map,
    "planner: copy of another stage": last_copy,
    "execution: read beside": wrong_read,
    "storage: write elsewhere": wrong_write,
    "target: files exchanged": swapped_target,
    "source: files exchanged": swapped_source,
}


@dataclasses.dataclass(frozen=True, slots=True)
class Outcome:
    """How a mutant ended.

    Attributes:
        kind: of the defect.
        case: the conversion.
        error: the error in which it ended; None if it was published.
        without: the error without the witness; None if it was published.
    """

    kind: str
    case: Case
    error: BaseException | None
    without: BaseException | None = None


def content_of(folder: Path) -> dict[str, bytes]:
    """Return all files of a result without its commit."""
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.name != "COMMIT.json"
    }


def _run(conversion: Conversion, mutate: Mutate, seed: int, case: Case) -> BaseException | None:
    try:
        with mutate(random.Random(seed), case):
            convert(conversion, RunOptions(sync=False, num_threads=1))
    except ReshardError as error:
        return error
    return None


def run_mutant(seed: int, *, also_without: bool = False) -> Outcome:
    """Draw a mutant and run it; with `also_without` once more without the witness."""
    rng = random.Random(seed)
    kinds = list(KINDS)
    rng.shuffle(kinds)
    for kind in (kind for kind in kinds for _ in range(_TRIES)):
        case, own = rng.choice(CASES), rng.randrange(1 << 30)
        with tempfile.TemporaryDirectory() as scratch:
            folder = Path(scratch)
            source = case.source
            if kind.startswith("source"):
                source = folder / source.name
                source.mkdir()
                _copy_tree(case.source, source)
            own_case = dataclasses.replace(case, source=source)
            try:
                error = _run(own_case.conversion(folder / "out"), KINDS[kind], own, own_case)
            except (NoMutantError, IndexError, ValueError, TypeError, KeyError, AssertionError, ZeroDivisionError):
                continue  # no such defect here, or one that crashes at once
            if error is None:
                convert(case.conversion(folder / "plain"), RunOptions(sync=False, num_threads=1))
                if content_of(folder / "out") == content_of(folder / "plain"):
                    continue
                return Outcome(kind, case, None)
            assert not (folder / "out").exists(), f"seed {seed}: {kind} published something and then failed"
            without = None
            if also_without:
                if kind.startswith("source"):
                    _copy_tree(case.source, source)
                with (
                    mock.patch.object(witness, "see_source", lambda _: None),
                    mock.patch.object(witness, "compare", lambda *_: WitnessReport()),
                    contextlib.suppress(Exception),
                ):
                    without = _run(own_case.conversion(folder / "without"), KINDS[kind], own, own_case)
                published = (folder / "without").exists()
                without = None if published else without or RuntimeError("failed")
            return Outcome(kind, case, error, without)
    raise AssertionError(f"seed {seed}: no mutant found")


def _copy_tree(source: Path, target: Path) -> None:
    for path in source.rglob("*"):
        if path.is_dir():
            (target / path.relative_to(source)).mkdir(parents=True, exist_ok=True)
        else:
            (target / path.relative_to(source)).parent.mkdir(parents=True, exist_ok=True)
            (target / path.relative_to(source)).write_bytes(path.read_bytes())


def main() -> int:
    """Run mutants and print how each kind ended."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("count", type=int, nargs="?", default=200)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--verbose", action="store_true")
    options = parser.parse_args()
    caught: Counter[str] = Counter()
    alone: Counter[str] = Counter()
    accepted = []
    for seed in range(options.first, options.first + options.count):
        outcome = run_mutant(seed, also_without=True)
        caught[outcome.kind] += outcome.error is not None
        alone[outcome.kind] += outcome.error is not None and outcome.without is None
        if outcome.error is None:
            accepted.append((seed, outcome))
        if options.verbose:
            text = str(outcome.error).partition("\n")[0][:150] if outcome.error else "ACCEPTED"
            sys.stdout.write(f"{seed}: {outcome.kind}: {'' if outcome.without else 'ALONE '}{text}\n")
    for kind in KINDS:
        sys.stdout.write(f"{kind}: {caught[kind]} caught, {alone[kind]} of them by the witness alone\n")
    for seed, outcome in accepted:
        sys.stdout.write(f"ACCEPTED: seed {seed}: {outcome.kind} of {outcome.case}\n")
    sys.stdout.write(f"{sum(caught.values())} of {options.count} caught, {sum(alone.values())} by the witness alone\n")
    return bool(accepted)


if __name__ == "__main__":
    sys.exit(main())
