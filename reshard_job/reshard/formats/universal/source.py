"""Read the model files and the optimizer file of a universal checkpoint: names, shapes, groups, settings."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from reshard.errors import CorruptSourceError, TopologyError, UnsupportedError
from reshard.formats.deepspeed import names as native_names
from reshard.formats.deepspeed.logical import parse_param_shapes
from reshard.formats.deepspeed.reading.opening import read_zero_stage
from reshard.formats.deepspeed.tensor_parallel import megatron, patterns
from reshard.formats.deepspeed.tensor_parallel.patterns import Patterns
from reshard.formats.pt.objects import Tensor
from reshard.formats.pt.reader import PtFile, read
from reshard.formats.universal import weights
from reshard.formats.universal.names import MADE_FOR, MODEL_FILES, OPTIMIZER_FILE, WEIGHTS
from reshard.formats.universal.weights import Weights
from reshard.topology import Topology

Shape = tuple[int, ...]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class UniversalContents:
    """A universal checkpoint without its atoms.

    Attributes:
        folder: of the checkpoint.
        models: model files of the ranks of the run that saved, `[pp * tp]`; of one rank if reshard wrote the folder.
        ranks: model files of all data-parallel ranks, where they hold fragments of frozen parameters (ZeRO-3); else
            empty.
        optimizer: the optimizer file.
        groups: names of each parameter group.
        stages: the same for each pipeline stage, `[pp][groups]`.
        first_states: for each group the key of its states in the optimizer file of ZeRO-3 (its first sub-group).
        shapes: parameter -> shape of each tensor-parallel rank's shard when it was saved, `[tp]`.
        others: names of frozen parameters and buffers that the model files name.
        stored: those of `others` that must have an atom; DeepSpeed makes none for pipelines and for ZeRO-3.
        module: weights that the model file holds.
        aliases: second name of a tied weight -> its first.
        patterns: `universal_checkpoint_info`, or the content of a pattern file instead.
        has_pattern_file: `patterns` come from a pattern file, which overrides what atoms say about cuts.
        tp: tensor-parallel degree of the run that saved.
        made_for: topology that reshard laid the folder out for; None for a folder of DeepSpeed's own converter.
        own_weights: the module's weights as reshard stored them; None for a folder of DeepSpeed's own converter.
    """

    folder: Path
    models: tuple[PtFile, ...]
    ranks: tuple[PtFile, ...]
    optimizer: PtFile
    groups: tuple[tuple[str, ...], ...]
    stages: tuple[tuple[tuple[str, ...], ...], ...]
    first_states: tuple[int, ...]
    shapes: Mapping[str, tuple[Shape, ...]]
    others: tuple[str, ...]
    stored: frozenset[str]
    module: Mapping[str, Tensor]
    aliases: Mapping[str, str]
    patterns: Patterns
    has_pattern_file: bool
    tp: int
    made_for: Topology | None
    own_weights: Weights | None

    @property
    def model(self) -> PtFile:
        """Return the model file of rank 0."""
        return self.models[0]

    @property
    def settings(self) -> list[Mapping[str, Any]]:
        """Return the optimizer's `param_groups`, one for each of `groups`."""
        return list(self.optimizer.value["param_groups"])

    @property
    def frozen(self) -> tuple[str, ...]:
        """Return the names in `others` that are parameters."""
        frozen_shapes = self.model.value.get("frozen_param_shapes") or ()
        return tuple(name for name in self.others if name in frozen_shapes)

    def vocabulary_rows(self, name: str) -> tuple[int, int] | None:
        """Return the stated true and padded number of rows of a vocabulary's parameter; None for other parameters."""
        return self.patterns.vocabulary_rows if self.patterns.is_vocabulary(name) else None


def open_source(folder: Path, pattern_info: Mapping[str, Any] | None = None) -> UniversalContents:
    """Read and check the files of `folder` that are not atoms.

    Args:
        folder: of the checkpoint.
        pattern_info: how tensors are cut, from a pattern file (`pattern_file.load`); it replaces what the checkpoint
            says about it.

    Raises:
        CorruptSourceError: files are missing, damaged, or contradict each other.
        UnsupportedError: the parameter groups of a pipeline stage cannot be identified.
    """
    models = _read_model_files(folder)
    optimizer = read(folder / OPTIMIZER_FILE, root=folder)
    settings = optimizer.value.get("param_groups") if isinstance(optimizer.value, Mapping) else None
    if not isinstance(settings, list) or not all(isinstance(group, Mapping) for group in settings):
        raise UnsupportedError("has no list param_groups", path=optimizer.path)
    per_rank = [parse_param_shapes(file) for file in models]
    stages = _group_by_stage(per_rank, folder)
    groups: list[dict[str, None]] = [{} for _ in settings]
    firsts: tuple[int, ...] = ()
    per_stage = []
    for stage in stages:
        firsts, merged = _merge_sub_groups(stage[0], settings, folder)
        per_stage.append(tuple(map(tuple, merged)))
        for group, names in zip(groups, merged, strict=True):
            group.update(dict.fromkeys(names))
    made_for = _read_made_for(optimizer)
    if made_for is None:
        _refuse_round_robin(models[0], optimizer, folder)
    params = {name for group in groups for name in group}
    tensors = _read_module(models[0])
    aliases = _find_aliases(models[0], tensors, params)
    others = _find_others(models[0], tensors, params | aliases.keys())
    return UniversalContents(
        folder=folder,
        models=tuple(models),
        ranks=_read_ranks_with_fragments(folder, models),
        optimizer=optimizer,
        groups=tuple(tuple(group) for group in groups),
        stages=tuple(per_stage),
        first_states=firsts,
        shapes=_collect_shapes(stages, folder),
        others=others,
        stored=frozenset(others if made_for is not None else _list_with_atoms(models[0], tensors, others)),
        module=tensors,
        aliases=aliases,
        patterns=patterns.parse(_describe_splits(models[0].value) if pattern_info is None else pattern_info),
        has_pattern_file=pattern_info is not None,
        tp=len(stages[0]),
        made_for=made_for,
        own_weights=_read_own_weights(optimizer),
    )


def _refuse_round_robin(model: PtFile, optimizer: PtFile, folder: Path) -> None:
    """Refuse atoms made from round-robin partitions: DeepSpeed 0.19.8 states wrong positions, which its converter uses.

    Raises:
        UnsupportedError: the run had round_robin_gradients and more than one partition.
    """
    config = model.value.get("ds_config")
    zero = config.get("zero_optimization") if isinstance(config, Mapping) else None
    if not isinstance(zero, Mapping) or not zero.get("round_robin_gradients"):
        return
    counts = optimizer.value.get("partition_count")
    if read_zero_stage(optimizer.value) < 3 and (not isinstance(counts, list) or any(count != 1 for count in counts)):
        raise UnsupportedError(
            "was made by DeepSpeed's converter of a run with round_robin_gradients: its atoms hold values of other"
            " parameters",
            path=str(folder),
            hint="convert from the native checkpoint with reshard, which reads it right",
        )


def _read_made_for(optimizer: PtFile) -> Topology | None:
    value = optimizer.value.get(MADE_FOR)
    try:
        return None if value is None else Topology.from_dict(value)
    except (TopologyError, TypeError) as error:
        raise UnsupportedError(f"its {MADE_FOR} is {value!r:.100}: {error}", path=optimizer.path) from error


def _read_own_weights(optimizer: PtFile) -> Weights | None:
    value = optimizer.value.get(WEIGHTS)
    return None if value is None else weights.parse(value, optimizer.path)


def _read_model_files(folder: Path) -> list[PtFile]:
    """Read the model files of all model-parallel ranks (ZeRO-3: of data-parallel rank 0), and check they are one save.

    Raises:
        CorruptSourceError: files are missing or contradict each other.
    """
    parsed_names = {item.name: native_names.parse(item.name) for item in folder.iterdir()}
    named = {name: parsed for name, parsed in parsed_names.items() if parsed is not None and parsed.kind == "model"}
    chosen = {parsed.mp: name for name, parsed in named.items() if parsed.dp == -1}
    chosen = chosen or {parsed.mp: name for name, parsed in named.items() if parsed.dp == 0}
    if 0 not in chosen:
        raise CorruptSourceError(f"has neither {MODEL_FILES[0]} nor {MODEL_FILES[1]}", path=str(folder))
    files = [read(folder / chosen[mp]) for mp in sorted(chosen)]
    first = files[0].value
    if not isinstance(first, Mapping) or not all(
        type(first.get(key)) is int for key in ("global_steps", "mp_world_size")
    ):
        raise UnsupportedError("is not a DeepSpeed model file: no global_steps, mp_world_size", path=files[0].path)
    problems = []
    if len(chosen) != first["mp_world_size"] or sorted(chosen) != list(range(len(chosen))):
        problems.append(f"model files of the ranks {sorted(chosen)}, expected {first['mp_world_size']}")
    others = [*files[1:], *_read_stage3_copy(folder, Path(files[0].path).name, named)]
    for file in others:
        for key in ("global_steps", "mp_world_size"):
            if not isinstance(file.value, Mapping) or file.value.get(key) != first[key]:
                name = Path(file.path).name
                problems.append(f"{name}: another {key} than the {first[key]} of {Path(files[0].path).name}")
    if problems:
        raise CorruptSourceError("its files contradict each other", path=str(folder), problems=problems)
    return files


def _read_ranks_with_fragments(folder: Path, models: list[PtFile]) -> tuple[PtFile, ...]:
    """Read the model files of all data-parallel ranks, if they hold fragments of frozen parameters (ZeRO-3).

    Raises:
        CorruptSourceError: a rank's file is missing or of another step.
    """
    first = models[0].value
    if len(models) > 1 or not first.get("frozen_param_fragments") or Path(models[0].path).name != MODEL_FILES[1]:
        return ()
    files = []
    for dp in range(_int_or_zero(first.get("dp_world_size"))):
        path = folder / native_names.model_file(0, dp=dp)
        if not path.is_file():
            raise CorruptSourceError(
                f"misses {path.name}, which holds fragments of frozen parameters", path=str(folder)
            )
        files.append(read(path))
        if not isinstance(files[-1].value, Mapping) or files[-1].value.get("global_steps") != first["global_steps"]:
            raise CorruptSourceError("is of another step than the file of rank 0", path=str(path))
    return tuple(files)


def _int_or_zero(value: Any) -> int:
    return value if type(value) is int else 0


def _read_stage3_copy(folder: Path, first: str, named: Mapping[str, Any]) -> list[PtFile]:
    """Read the copy of the model file under stage 3's name, which a folder for all stages has."""
    return [read(folder / MODEL_FILES[1])] if first == MODEL_FILES[0] and MODEL_FILES[1] in named else []


def _group_by_stage(per_rank: Sequence[list[dict[str, Shape]]], folder: Path) -> list[list[list[dict[str, Shape]]]]:
    """Group the ranks by pipeline stage, `[pp][tp]`: ranks of one stage hold the same names and are consecutive."""
    stages: list[list[list[dict[str, Shape]]]] = []
    for rank in per_rank:
        names = [list(group) for group in rank]
        if stages and [list(group) for group in stages[-1][0]] == names:
            stages[-1].append(rank)
        else:
            stages.append([rank])
    if len({len(stage) for stage in stages}) > 1:
        raise CorruptSourceError("tensor-parallel ranks hold parameters of different names", path=str(folder))
    return stages


def _merge_sub_groups(
    shapes: Sequence[Mapping[str, Shape]], settings: Sequence[Mapping[str, Any]], folder: Path
) -> tuple[tuple[int, ...], list[list[str]]]:
    """Merge the names of each group's sub-groups (ZeRO-3); `params` of a group has one entry for each of them.

    Returns:
        For each group the index of its first sub-group, and its names.

    Raises:
        UnsupportedError: the optimizer has another number of sub-groups than the stage.
    """
    counts = [len(group.get("params", ())) for group in settings]
    if sum(counts) != len(shapes):
        raise UnsupportedError(
            f"cannot tell which parameter groups a pipeline stage holds: it has {len(shapes)}, rank 0 says {counts}",
            path=str(folder),
            hint="DeepSpeed drops groups that are empty on a stage; convert from the native checkpoint",
        )
    firsts, merged, start = [], [], 0
    for count in counts:
        firsts.append(start)
        merged.append([name for group in shapes[start : start + count] for name in group])
        start += count
    return tuple(firsts), merged


def _describe_splits(model: Mapping[str, Any]) -> Any:
    return megatron.add_vocabulary_multiple(model.get("universal_checkpoint_info"), model)


def _collect_shapes(
    stages: Sequence[Sequence[Sequence[Mapping[str, Shape]]]], folder: Path
) -> dict[str, tuple[Shape, ...]]:
    shapes_by_name: dict[str, tuple[Shape, ...]] = {}
    problems = []
    for number, stage in enumerate(stages):
        ranks = [{name: shape for group in rank for name, shape in group.items()} for rank in stage]
        for name in ranks[0]:
            shapes = tuple(rank[name] for rank in ranks)
            if shapes_by_name.setdefault(name, shapes) != shapes:
                problems.append(f"{name} is {shapes} on stage {number}, {shapes_by_name[name]} on an earlier one")
    if problems:
        raise CorruptSourceError("pipeline stages disagree about shapes", path=str(folder), problems=problems[:20])
    return shapes_by_name


def _read_module(model: PtFile) -> dict[str, Tensor]:
    """Return the weights that the model file holds, without the empty tensors that ZeRO-3 saves for parameters."""
    module = model.value.get("module")
    return {
        str(name): tensor
        for name, tensor in (module.items() if isinstance(module, Mapping) else ())
        if isinstance(tensor, Tensor) and tensor.num_elements
    }


def _find_aliases(model: PtFile, tensors: Mapping[str, Tensor], params: set[str]) -> dict[str, str]:
    """Map second names of tied weights to first names: `shared_params` of the model file, and views of a parameter."""
    shared = model.value.get("shared_params")
    aliases = {
        str(alias): str(name)
        for alias, name in (shared.items() if isinstance(shared, Mapping) else ())
        if name in params and alias not in params
    }
    for name, tensor in tensors.items():
        if name not in params and name not in aliases:
            twin = next((other for other in tensors if other in params and tensors[other].same_view(tensor)), None)
            aliases |= {} if twin is None else {name: twin}
    return aliases


def _find_others(model: PtFile, tensors: Mapping[str, Tensor], known: set[str]) -> tuple[str, ...]:
    """List the names of frozen parameters and buffers."""
    frozen, buffers = model.value.get("frozen_param_shapes") or (), model.value.get("buffer_names") or ()
    names = dict.fromkeys(str(name) for name in (*frozen, *buffers, *tensors))
    return tuple(name for name in names if name not in known)


def _list_with_atoms(model: PtFile, tensors: Mapping[str, Tensor], others: tuple[str, ...]) -> tuple[str, ...]:
    """List those of `others` that ds_to_universal makes atoms of: all of them below ZeRO-3, if the module is saved."""
    return others if Path(model.path).name == MODEL_FILES[0] and tensors else ()
