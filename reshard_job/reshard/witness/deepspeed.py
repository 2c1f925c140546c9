"""A stranger to DeepSpeed's native checkpoints: it opens the files rank by rank and follows DeepSpeed's own rules.

Sources: deepspeed/runtime/engine.py, runtime/pipe/module.py, runtime/zero/stage_1_and_2.py, runtime/zero/stage3.py and
checkpoint/ds_to_universal.py of 0.19.8.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from reshard.witness import optimizer_names
from reshard.witness.opened import OpenedFile
from reshard.witness.pickles import Inert, NotWitnessedError, StoredTensor
from reshard.witness.table import OPTIMIZER, Holder, Key, Parts, Piece, Slots, Stream, Table, Tensor, row_major
from reshard.witness.tensor_parallel import Patterns, Shard

_MODEL = re.compile(r"mp_rank_(\d+)_model_states\.pt")
_MODEL_ZERO3 = re.compile(r"zero_pp_rank_(\d+)_mp_rank_(\d+)_model_states\.pt")
_OPTIMIZER = re.compile(r"(?:bf16_)?zero_pp_rank_(\d+)_mp_rank_(\d+)_optim_states\.pt")
_LAYER = re.compile(r"layer_(\d+)(?:-model_(\d+))?-model_states\.pt")
_EXPERT = re.compile(r"layer_(\d+)_expert_(\d+)_mp_rank_(\d+)_model_states\.pt")
_LOCAL_EXPERT = re.compile(r"(.*deepspeed_moe\.experts\.deepspeed_experts\.)(\d+)(\..*)")

_GATE = ".deepspeed_moe.gate.wg.weight"

Rank = tuple[int, int]
"""Model-parallel rank, and data-parallel rank."""


def read(root: Path, *, info: Any = None, pipeline: Any = None, is_target: bool = False) -> Table:
    """Read the tensors of a native checkpoint.

    Args:
        root: folder of the tag.
        info: `universal_checkpoint_info` that replaces the checkpoint's own, or None.
        pipeline: description of the pipeline in the commit, or None for that of the checkpoint.
        is_target: every byte of the files will be accounted for.
    """
    return _Stranger(root, info, pipeline, is_target).read()


class _Stranger:
    def __init__(self, root: Path, info: Any, pipeline: Any, is_target: bool) -> None:
        self._table = Table(root)
        self._whole: dict[Key, Tensor] = {}
        self._is_target = is_target
        names = sorted(item.name for item in root.iterdir())
        self._models = {(int(found[1]), 0): self._open(name) for name in names if (found := _MODEL.fullmatch(name))}
        self._models |= {
            (int(found[2]), int(found[1])): self._open(name)
            for name in names
            if (found := _MODEL_ZERO3.fullmatch(name))
        }
        self._optimizers = {
            (int(found[2]), int(found[1])): self._open(name) for name in names if (found := _OPTIMIZER.fullmatch(name))
        }
        self._optimizers = dict(sorted(self._optimizers.items()))  # by rank: as names, 10 comes before 2
        self._layers = {
            (int(found[1]), int(found[2] or 0)): self._open(name) for name in names if (found := _LAYER.fullmatch(name))
        }
        self._experts = {
            (int(found[1]), int(found[2]), int(found[3])): self._open(name)
            for name in names
            if (found := _EXPERT.fullmatch(name))
        }
        first = self._models[0, 0]
        self._patterns = Patterns(first.find("universal_checkpoint_info") if info is None else info)
        self._table.kind_of = self._patterns.kind_of
        self._pipeline = first.find("pipeline_layout") if pipeline is None else pipeline
        num_mp = 1 + max(mp for mp, _ in self._models)
        self._dp = 1 + max((dp for _, dp in self._optimizers), default=0)
        dims = first.find("checkpoint_parallel_dimensions")
        stated = int(dims["tp_degree"]) if isinstance(dims, Mapping) else len({tp for _, tp in self._layers}) or num_mp
        self._tp = min(stated, num_mp)  # sequence parallelism is stated as tensor parallelism; its files are of tp=1
        self._pp = num_mp // self._tp
        if not self._is_target and self._tp == 1 and self._patterns.omits_rows:  # then what is not listed is not stated
            self._table.kind_of = self._patterns.listed_kind_of
        self._stage = self._read_stage()

    def _open(self, name: str) -> OpenedFile:
        return OpenedFile(self._table, name, is_target=self._is_target)

    def _read_stage(self) -> int:
        if not self._optimizers:
            return 0
        stage = self._optimizers[0, 0].find("optimizer_state_dict", "zero_stage")
        if isinstance(stage, Inert):
            stage = stage.args[0]
        return int(stage) if stage is not None else 1  # BF16_Optimizer does not state its stage

    def read(self) -> Table:
        """Return the table of all tensors."""
        if self._stage in {1, 2} and self._experts and len(self._models) == 1:
            self._name_older_groups()
        if self._stage and any(file.find("param_shapes") is None for file in self._models.values()):
            self._table.unknown[OPTIMIZER] = "older model files do not name the parameters of the optimizer"
        if self._layers:
            self._add_layers()
        elif self._stage < 3:
            for stage in range(self._pp):  # several only in a pipeline with experts
                self._add_modules(stage)
            self._add_experts()
        else:
            self._add_buffers()
        if self._stage == 0:
            self._add_whole_states()
        elif not isinstance(self._models[0, 0].find("param_shapes"), list):
            self._table.unknown[OPTIMIZER] = "the model files, of DeepSpeed before 0.19, do not list its parameters"
        elif self._stage < 3:
            self._add_partitions()
        else:
            self._add_slots()
        for key, tensor in self._whole.items():
            self._table.add(key, tensor, self._patterns.vocabulary_rows(key.name))
        config = self._models[0, 0].find("ds_config") or {}
        enabled = {key: (config.get(key) or {}).get("enabled") for key in ("bf16", "bfloat16", "fp16")}
        half = "bfloat16" if enabled["bf16"] or enabled["bfloat16"] else "float16" if enabled["fp16"] else "float32"
        self._table.model_dtype = half
        return self._table

    def _name_older_groups(self) -> None:
        model = self._models[0, 0]
        if model.find("param_shapes") is None:
            groups = optimizer_names.read_shapes_of_older_experts(
                model, list(self._experts.values()), list(self._optimizers.values())
            )
            model.value = {**model.value, "param_shapes": groups}

    def _put(self, state: str, name: str, copies: Sequence[Sequence[Shard]]) -> None:
        """Add a tensor of which each copy is cut over the tensor-parallel ranks."""
        try:
            whole = [self._patterns.join(name, shards) for shards in copies]
        except NotWitnessedError as error:
            self._table.unknown[name] = str(error)
            return
        if not self._is_target and self._patterns.is_first_stages(name):
            whole, later = whole[:1], whole[1:]
            self._table.others += later
        first = self._whole.setdefault(Key(state, name), whole[0])
        for tensor in whole:
            if tensor is not first:
                first.copies += tensor.copies

    # Weights.

    def _add_modules(self, stage: int) -> None:
        """Add the weights of a model without layer files: `module` of each tensor-parallel rank of a stage."""
        files = [self._models[stage * self._tp + tp, 0] for tp in range(self._tp)]
        modules = [file.value["module"] for file in files]
        shared = files[0].find("shared_params") or {}
        seen: dict[tuple[Any, ...], str] = {}
        for name, tensor in modules[0].items():
            place = (tensor.storage.key, tensor.offset, tensor.shape, tensor.stride)
            first = seen.setdefault(place, name) if tensor.shape and math.prod(tensor.shape) else name
            if first != name or (name in shared and shared[name] in modules[0]):
                self._table.aliases[name] = first if first != name else shared[name]
                if first != name:
                    continue
            if name in shared and shared[name] not in modules[0]:  # of a frozen weight that was left out
                self._table.aliases[name] = shared[name]
                own = [_shard(file, module[name]) for file, module in zip(files, modules, strict=True)]
                self._table.others += [self._patterns.join(name, [shard]) for shard in own]
                continue
            target = self._table.aliases.get(name, name)
            self._put(
                "weight", target, [[_shard(file, module[name]) for file, module in zip(files, modules, strict=True)]]
            )
            fragments = [file.find("frozen_param_fragments", name) for file in files]
            if (
                all(
                    isinstance(item, StoredTensor) and item[:4] != module[name][:4]
                    for item, module in zip(fragments, modules, strict=True)
                )
                and fragments[0].shape == tensor.shape
            ):
                self._put("weight", name, [[_shard(file, item) for file, item in zip(files, fragments, strict=True)]])

    def _add_experts(self) -> None:
        """Add the weights of experts: a file for each, with names of the whole model, or with slices of stacks.

        Raises:
            ValueError: a file of a target has the number of another layer, or of another stage.
        """
        counts = self._count_stacked()
        copies: Counter[tuple[int, int]] = Counter()
        for (layer, expert, mp), file in self._experts.items():
            copies[layer, expert] += 1
            for name, stored in file.value.items():
                if not isinstance(stored, StoredTensor):  # what AutoEP says about the rank
                    continue
                stack = name.removesuffix(f".{expert}")
                count = counts.get(stack.rpartition(".")[0])
                if count is None:
                    if self._is_target and not name.startswith(self._find_prefix(mp, layer, expert)):
                        raise ValueError(f"{name} is in the file of expert {expert} of layer {layer} of rank {mp}")
                    self._put("weight", name, [[_shard(file, stored)]])
                else:
                    shape, strides = (1, *stored.shape), (0, *stored.stride)
                    shard = _shard(file, stored)._replace(shape=shape, strides=strides)
                    self._add_slice(Key("weight", stack), count, expert, shard, copies[layer, expert] - 1)

    def _count_stacked(self) -> dict[str, int]:
        """Return the number of experts in each layer of AutoEP, by the prefix of its parameters."""
        layers = self._models[0, 0].find("ds_autoep_layers") or self._models[0, 0].find("autoep_layers") or ()
        return {entry["expert_key_prefix"]: int(entry["num_experts"]) for entry in layers}

    def _find_prefix(self, mp: int, layer: int, expert: int) -> str:
        """Return how names in the file of an expert begin: a rank counts its layers in the order of the module."""
        gates = [name for name in self._models[mp, 0].value["module"] if name.endswith(_GATE)]
        return f"{gates[layer].removesuffix(_GATE)}.deepspeed_moe.experts.deepspeed_experts.{expert}."

    def _add_slice(self, key: Key, num_experts: int, first: int, shard: Shard, copy: int = 0) -> None:
        """Add consecutive experts of a copy of a stack `[experts, ...]`."""
        whole = (num_experts, *shard.shape[1:])
        low = (first, *(0,) * (len(whole) - 1))
        tensor = self._whole.setdefault(key, Tensor(whole, shard.dtype, [[]]))
        tensor.copies += [[] for _ in range(copy + 1 - len(tensor.copies))]
        tensor.copies[copy].append(Piece(low, shard.shape, shard.holder, shard.start, shard.strides, whole))

    def _add_expert_partitions(self, mp: int, at: int, shapes: Mapping[str, Any], count: int) -> None:
        """Add a flat group of experts: every `ep`-th rank holds the same part of them, and they share its partitions.

        AutoEP counts all ranks of a stage, also those of tensor parallelism.
        """
        every = [(mp + tp, dp) for dp in range(self._dp) for tp in range(self._tp)]
        ep = len(every) // count
        natives = [found for name in shapes if (found := _LOCAL_EXPERT.fullmatch(name))]
        locals_of = Counter((found[1], found[3]) for found in natives)
        for part in range(ep):
            for state, stream in self._streams(at, every[part::ep]):
                start = 0
                for name, shape, padding in self._with_paddings(mp, at, shapes):
                    shard = Shard(shape, stream, start, row_major(shape), stream.parts.storages[0].dtype)
                    native = _LOCAL_EXPERT.fullmatch(name)
                    if native is not None:
                        number = part * locals_of[native[1], native[3]] + int(native[2])
                        self._put(state, f"{native[1]}{number}{native[3]}", [[shard]])
                    else:
                        self._add_slice(Key(state, name), shape[0] * ep, part * shape[0], shard)
                    start += math.prod(shape) + padding

    def _add_layers(self) -> None:
        """Add the weights of a pipeline: a file for each layer and tensor-parallel rank."""
        tied = (self._pipeline or {}).get("tied") if isinstance(self._pipeline, Mapping) else None
        keys = {int(layer): key for key, layers in (tied or {}).items() for layer in layers}
        shapes = {name for shapes in self._shapes_of_all() for name in shapes}
        for layer in sorted({layer for layer, _ in self._layers}):
            files = [self._layers[layer, tp] for tp in range(self._tp)]
            for sub in files[0].value:
                name = f"tied_modules.{keys[layer]}.{sub}" if layer in keys else f"{layer}.{sub}"
                if layer not in keys and name not in shapes:  # frozen, a buffer, or tied without a description
                    ties = [
                        other for other in shapes if other.startswith("tied_modules.") and other.endswith(f".{sub}")
                    ]
                    if len(ties) == 1 and tied is None:
                        name = ties[0]
                self._put("weight", name, [[_shard(file, file.value[sub]) for file in files]])

    def _shapes_of_all(self) -> Iterator[Mapping[str, Any]]:
        for file in self._models.values():
            yield from file.find("param_shapes") or ()

    def _add_buffers(self) -> None:
        """Add what ZeRO-3's model files hold: whole buffers of every rank, and pieces of frozen parameters."""
        for name in self._models[0, 0].find("buffer_names") or ():
            ranks = [
                [self._models[mp, dp] for mp in range(self._tp)]
                for dp in range(self._dp)
                if isinstance(self._models[0, dp].find("module", name), StoredTensor)
            ]
            if ranks:
                self._put(
                    "weight", name, [[_shard(file, file.value["module"][name]) for file in files] for files in ranks]
                )
                if Key("weight", name) in self._whole:
                    self._whole[Key("weight", name)].is_rank_local = True
        for alias, name in (self._models[0, 0].find("shared_params") or {}).items():
            self._table.aliases[alias] = name
        for name in self._models[0, 0].find("frozen_param_shapes") or ():
            shards = []
            for mp in range(self._tp):
                files = [self._models[mp, dp] for dp in range(self._dp)]
                shape = tuple(files[0].value["frozen_param_shapes"][name])
                parts = [file.value["frozen_param_fragments"][name] for file in files]
                shards.append(make_slots(files, parts, shape, 0))
            self._put("weight", name, [shards])

    # The optimizer.

    def _add_whole_states(self) -> None:
        """Add the states of ZeRO-0, which has one for each parameter, or for each group in `FP16_Optimizer`."""
        copies: dict[Key, dict[int, dict[int, Shard]]] = {}
        for mp in range(self._tp * self._pp):
            stage, tp = divmod(mp, self._tp)
            file = self._models[mp, 0]
            optimizer = file.find("optimizer")
            if not isinstance(optimizer, Mapping):
                continue
            shapes = self._module_shapes(mp)
            try:
                found = list(optimizer_names.read_states(optimizer, shapes))
            except NotWitnessedError as error:
                self._table.unknown[OPTIMIZER] = str(error)
                return
            for state, name, tensor, start, shape in found:
                storage = file.storage_of(tensor)
                shard = Shard(
                    shape,
                    storage,
                    tensor.offset + start,
                    tensor.stride if not start and tensor.shape == shape else row_major(shape),
                    tensor.dtype,
                )
                copies.setdefault(Key(state, name), {}).setdefault(stage, {})[tp] = shard
        for key, stages in copies.items():
            self._put(*key, [[shards[tp] for tp in range(self._tp)] for shards in stages.values()])

    def _module_shapes(self, mp: int) -> dict[str, tuple[int, ...]]:
        """Return names and shapes of the parameters of a rank's module, in the module's order."""
        if not self._layers:
            buffers = set(self._models[mp, 0].find("buffer_names") or ())
            module = self._models[mp, 0].value["module"]
            return {
                name: tensor.shape
                for name, tensor in module.items()
                if name not in buffers and name not in self._table.aliases
            }
        layout = self._pipeline if isinstance(self._pipeline, Mapping) else {}
        stage, tp = divmod(mp, self._tp)
        parts = list(layout.get("parts") or (0, layout.get("num_layers", 1 << 30)))
        keys = {int(layer): key for key, layers in (layout.get("tied") or {}).items() for layer in layers}
        tied: dict[str, tuple[int, ...]] = {}
        own: dict[str, tuple[int, ...]] = {}
        for layer in range(parts[stage], min(parts[stage + 1], parts[-1])):
            places = layout["tied"][keys[layer]] if layer in keys else [layer]
            file = next((self._layers[at, tp] for at in places if (at, tp) in self._layers), None)
            shapes, prefix = (tied, f"tied_modules.{keys[layer]}.") if layer in keys else (own, f"{layer}.")
            shapes.update({f"{prefix}{sub}": item.shape for sub, item in (file.value if file else {}).items()})
        return tied | own

    def _states(self, rank: Rank) -> list[Mapping[str, Any]]:
        """Return the flat states of each group (or sub-group of ZeRO-3) of a rank."""
        inner = self._optimizers[rank].value["optimizer_state_dict"]
        if self._stage == 3:
            base, masters = inner["optimizer_state_dict"]["state"], inner["fp32_flat_groups"]
        else:
            base, masters = inner["base_optimizer_state"], inner["single_partition_of_fp32_groups"]
            base = base["state"] if isinstance(base, Mapping) else dict(enumerate(base))
        return [
            {"fp32": master, **{key: value for key, value in (base.get(at) or {}).items() if _is_flat(value)}}
            for at, master in enumerate(masters)
        ]

    def _add_partitions(self) -> None:
        """Add the flat groups of ZeRO-1 and 2: parameters one behind the other, cut into a partition for each rank."""
        copies: dict[Key, dict[int, dict[int, Shard]]] = {}
        stacks = self._count_stacked()
        for mp in range(self._tp * self._pp):
            stage, tp = divmod(mp, self._tp)
            for at, shapes in enumerate(self._models[mp, 0].find("param_shapes") or ()):
                count = self._partition_count(mp, at)
                if count != self._dp or (self._tp > 1 and any(name.rpartition(".")[0] in stacks for name in shapes)):
                    if not tp:
                        self._add_expert_partitions(mp, at, shapes, count)
                    continue
                for state, stream in self._streams(at, [(mp, dp) for dp in range(self._dp)]):
                    start = 0
                    for name, shape, padding in self._with_paddings(mp, at, shapes):
                        shard = Shard(shape, stream, start, row_major(shape), stream.parts.storages[0].dtype)
                        copies.setdefault(Key(state, name), {}).setdefault(stage, {})[tp] = shard
                        start += math.prod(shape) + padding
        for key, stages in copies.items():
            self._put(*key, [[shards[tp] for tp in range(self._tp)] for shards in stages.values()])

    def _with_paddings(self, mp: int, at: int, shapes: Mapping[str, Any]) -> Iterator[tuple[str, tuple[int, ...], int]]:
        paddings = self._optimizers[mp, 0].find("optimizer_state_dict", "param_alignment_paddings")
        own = list(paddings[at]) if paddings else [0] * len(shapes)
        for (name, shape), padding in zip(shapes.items(), own, strict=True):
            yield name, tuple(shape), int(padding)

    def _partition_count(self, mp: int, at: int) -> int:
        count = self._optimizers[mp, 0].find("optimizer_state_dict", "partition_count") or self._dp
        return int(count[at] if isinstance(count, list) else count)

    def _streams(self, at: int, ranks: Sequence[Rank]) -> Iterator[tuple[str, Stream]]:
        """Yield the buffer of each state of a group that some ranks share."""
        files = [self._optimizers[rank] for rank in ranks]
        groups = files[0].find("optimizer_state_dict", "base_optimizer_state")
        options = groups["param_groups"][at] if isinstance(groups, Mapping) and at < len(groups["param_groups"]) else {}
        states = [self._states(rank)[at] for rank in ranks]
        partition = self._partition(files, states, at)
        for state in states[0]:
            if state == "momentum_buffer" and options.get("use_muon") and self._keeps_whole_momentum(files[0]):
                self._add_whole_momentum(ranks[0][0], at, files, states, partition)
                continue
            own = [each[state] for each in states if state in each]
            if len(own) < len(files) or any(tensor.offset for tensor in own):
                raise NotWitnessedError(f"ranks without the state {state}, or states that share a storage")
            yield (
                state,
                Stream(Parts([file.storage_of(tensor) for file, tensor in zip(files, own, strict=True)]), partition),
            )

    def _keeps_whole_momentum(self, file: OpenedFile) -> bool:
        """Return True if Muon, which needs whole matrices, keeps its momentum for whole parameters."""
        zero = self._models[0, 0].find("ds_config", "zero_optimization") or {}
        offload = zero.get("offload_optimizer")
        is_offloaded = isinstance(offload, Mapping) and offload.get("device") in ("cpu", "nvme")
        is_offloaded |= zero.get("cpu_offload") is True  # the older name of the setting
        return file.find("optimizer_state_dict", "zero_stage") is not None and not is_offloaded

    def _add_whole_momentum(
        self, mp: int, at: int, files: Sequence[OpenedFile], states: Sequence[Mapping[str, Any]], partition: int
    ) -> None:
        """Add a momentum of which each rank holds the whole of every parameter that its partition touches."""
        if self._tp > 1:
            raise NotWitnessedError("the momentum of Muon under tensor parallelism")
        for rank, (file, own) in enumerate(zip(files, states, strict=True)):
            first, offset = 0, 0
            held = own["momentum_buffer"].shape[0] if "momentum_buffer" in own else 0
            for name, shape, padding in self._with_paddings(mp, at, self._models[mp, 0].value["param_shapes"][at]):
                count = math.prod(shape)
                if first < (rank + 1) * partition and first + count > rank * partition and count:
                    stored = own["momentum_buffer"]
                    shard = Shard(
                        shape, file.storage_of(stored), stored.offset + offset, row_major(shape), stored.dtype
                    )
                    self._put("momentum_buffer", name, [[shard]])
                    offset += count
                first += count + padding
            if offset > held:
                raise NotWitnessedError("a momentum of Muon that holds neither whole parameters nor a known partition")

    def _partition(self, files: Sequence[OpenedFile], states: Sequence[Mapping[str, Any]], at: int) -> int:
        """Return the elements of a partition: those of the master weights, with the padding that was stripped."""
        lengths: list[int] = []
        for file, own in zip(files, states, strict=True):
            inner = file.value["optimizer_state_dict"]
            stripped = "zero_stage" in inner  # BF16_Optimizer keeps the padding
            lengths.append(own["fp32"].shape[0] + (int(inner["group_paddings"][at]) if stripped else 0))
        return max(lengths, default=0)

    def _add_slots(self) -> None:
        """Add the sub-groups of ZeRO-3: each parameter has a slot of the same size in each rank's buffer."""
        shards: dict[Key, list[Shard]] = {}
        states = {rank: self._states(rank) for rank in self._optimizers}
        stacks = self._count_stacked()
        every = [(tp, dp) for dp in range(self._dp) for tp in range(self._tp)]
        for mp in range(self._tp):
            for at, shapes in enumerate(self._models[mp, 0].find("param_shapes") or ()):
                if not any(name.rpartition(".")[0] in stacks for name in shapes):
                    own = {rank: found[at] for rank, found in states.items() if rank[0] == mp}
                    for key, shard in self._slots(own, shapes):
                        shards.setdefault(key, []).append(shard)
                    continue
                name, (held, *_) = next(iter(shapes.items()))  # every `ep`-th rank of all holds the same experts
                ep = stacks[name.rpartition(".")[0]] // held
                for part in range(0 if mp else ep):
                    for key, shard in self._slots({rank: states[rank][at] for rank in every[part::ep]}, shapes):
                        self._add_slice(key, held * ep, part * held, shard)
        for key, whole in shards.items():
            self._put(*key, [whole])

    def _slots(
        self, states: Mapping[Rank, Mapping[str, Any]], shapes: Mapping[str, Any]
    ) -> Iterator[tuple[Key, Shard]]:
        """Yield the slots of a sub-group, which some ranks share; `states` are theirs."""
        files = [self._optimizers[rank] for rank in states]
        for state in next(iter(states.values())):
            parts = [own[state] for own in states.values()]
            slot = 0
            shared = Parts([file.storage_of(part) for file, part in zip(files, parts, strict=True)])
            for name, size in shapes.items():
                shape = tuple(size)
                count = math.prod(shape)
                chunk = -(-count // len(files))
                holder = Slots(shared, slot, max(1, chunk), count)
                yield Key(state, name), Shard(shape, holder, 0, row_major(shape), shared.storages[0].dtype)
                slot += chunk


def _is_flat(value: Any) -> bool:
    return isinstance(value, StoredTensor) and len(value.shape) == 1


def _shard(file: OpenedFile, tensor: StoredTensor) -> Shard:
    holder: Holder = file.storage_of(tensor)
    return Shard(tensor.shape, holder, tensor.offset, tensor.stride, tensor.dtype)


def make_slots(files: Sequence[OpenedFile], parts: Sequence[StoredTensor], shape: tuple[int, ...], slot: int) -> Shard:
    storages = Parts([file.storage_of(part) for file, part in zip(files, parts, strict=True)])
    count = math.prod(shape)
    holder = Slots(storages, slot, max(1, -(-count // len(files))), count)
    return Shard(shape, holder, 0, row_major(shape), parts[0].dtype)
