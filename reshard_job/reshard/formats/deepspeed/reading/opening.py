"""Read and check all files of a native DeepSpeed checkpoint (metadata only), and find out its topology and experts."""

from __future__ import annotations

import dataclasses
import itertools
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from reshard.errors import CorruptSourceError, UnsupportedError, make_read_error
from reshard.formats.base import stated_topology
from reshard.formats.deepspeed import autoep, names, pipeline
from reshard.formats.deepspeed.contents import DeepSpeedContents, require_mapping
from reshard.formats.deepspeed.experts import Experts, find_experts, is_native
from reshard.formats.deepspeed.logical import is_layered, parse_layer, parse_param_shapes
from reshard.formats.deepspeed.pipeline import PipelineInfo
from reshard.formats.deepspeed.reading import older_experts
from reshard.formats.deepspeed.unpartitioned import build_stage_module, find_names
from reshard.formats.pt.equal_files import EqualFileReader
from reshard.formats.pt.objects import Global, Inert, Tensor
from reshard.formats.pt.reader import PtFile, read
from reshard.topology import Topology

_MOST_MISSING = 20
_STAGE_ENUM = Global("deepspeed.runtime.zero.config", "ZeroStageEnum")


def open_source(folder: Path, commit_model: Mapping[str, Any] | None = None) -> DeepSpeedContents:
    """Read and check all files of `folder`; `commit_model` is the model's description in its commit.

    Raises:
        CorruptSourceError: files are missing, left over, of different steps, or damaged.
        UnsupportedError: the checkpoint has a layout that is not converted.
    """
    file_names = _list_files(folder)
    _leave_out_experts(file_names, folder)
    prefixes = {parsed.prefix for parsed in file_names.values() if parsed.kind == "optimizer"}
    if len(prefixes) > 1:
        raise CorruptSourceError(
            "has optimizer files with and without the prefix bf16_: two saves mixed", path=str(folder)
        )
    models = {(parsed.mp, max(parsed.dp, 0)): name for name, parsed in file_names.items() if parsed.kind == "model"}
    if (0, 0) not in models:
        raise CorruptSourceError("misses the model file of rank 0", path=str(folder))
    first = read(folder / models[0, 0])
    topology = _read_topology(first, file_names, folder)
    prefix = next(iter(prefixes), "")
    layers = autoep.read_layers(first.value)
    ep = autoep.read_degree(layers) if topology.tp > 1 else 1
    if topology.tp > 1 and (layers or any(parsed.kind == "expert" for parsed in file_names.values())):
        _refuse_layout(topology, ep, str(folder), is_native=not layers)
    _check_names(folder, topology, file_names, prefix, ep)
    twins = EqualFileReader()
    files = {name: twins.read(folder / name) for name in file_names}
    source = DeepSpeedContents(
        folder=folder,
        topology=topology,
        prefix=prefix,
        pipeline=any(parsed.kind == "layer" for parsed in file_names.values()),
        model_axis=any(parsed.model_axis for parsed in file_names.values()),
        models={key: files[name] for key, name in sorted(models.items())},
        optimizers=_select_by_rank(file_names, files, "optimizer"),
        layers={
            (parsed.layer, parsed.mp): files[name]
            for name, parsed in sorted(file_names.items(), key=lambda item: (item[1].layer, item[1].mp))
            if parsed.kind == "layer"
        },
        named={},
        **_select_experts(file_names, files, topology.tp),
    )
    _check_contents(source)
    source = _add_experts(older_experts.complete_model_file(source), dict(commit_model or {}))
    return source if source.optimizers else _add_names(source, commit_model or {})


def _leave_out_experts(file_names: dict[str, names.FileName], folder: Path) -> None:
    """Remove the empty optimizer files of experts, which DeepSpeed before 0.19 saves beside the ZeRO files.

    Raises:
        UnsupportedError: there are files of experts that are not converted.
    """
    others = [name for name, parsed in file_names.items() if parsed.kind == "other"]
    optimizers = [name for name, parsed in file_names.items() if parsed.kind == "expert_optimizer"]
    others += [name for name in optimizers if read(folder / name).value != older_experts.NO_OPTIMIZER]
    if others:
        raise UnsupportedError(
            f"{len(others)} files of experts such as {others[0]}: experts without a layer's number, and optimizers of"
            " experts at ZeRO-0, are not converted",
            path=str(folder),
            hint="save with DeepSpeed 0.19 at ZeRO stage 1 or 2",
        )
    for name in optimizers:
        del file_names[name]


def _add_experts(source: DeepSpeedContents, commit_model: Mapping[str, Any]) -> DeepSpeedContents:
    """Find the experts and the degree of expert parallelism, and whether they are in a pipeline.

    Raises:
        CorruptSourceError: the degree does not divide the data-parallel degree.
        UnsupportedError: experts in this layout are not converted.
    """
    where, value = str(source.folder), source.models[0, 0].value
    layers = autoep.read_layers(value)
    shapes = [group for file in source.models.values() for group in file.value.get("param_shapes") or []]
    local = [name for group in shapes if isinstance(group, Mapping) for name in group]
    if not source.expert_files and not layers and not any(map(is_native, local)):
        return source
    topology = source.topology
    stages = (1, 2, 3) if layers else (1, 2)
    if topology.cp > 1 or topology.zero not in stages or (layers and topology.pp > 1):
        raise _make_layout_error(topology, where)
    if topology.tp > 1 and not layers:
        raise _make_layout_error(topology, where)
    if source.config.get("use_data_before_expert_parallelism"):
        raise UnsupportedError("use_data_before_expert_parallelism orders ranks otherwise than is read", path=where)
    if layers:
        counts, _, ep = autoep.find_stacks(layers, where, zero=topology.zero)
        experts = Experts(stacked=counts)
        _refuse_frozen(source, experts)
        _check_stacks(source, experts, ep)
    else:
        _check_counts(source)
        experts, ep = find_experts({key: file.value for key, file in source.expert_files.items()}, local, where)
    if topology.dp % ep:
        raise CorruptSourceError(f"has dp={topology.dp} and ep={ep}, which does not divide it", path=where)
    if topology.tp > 1:
        _check_folding(source, dataclasses.replace(topology, ep=ep))
    described = commit_model.get("pipeline", value.get("pipeline_layout"))
    is_pipeline = topology.pp > 1 or (pipeline.parse(described) is not None and all(map(is_layered, local)))
    if is_pipeline:
        _check_order([parse_layer(prefix) for prefix in experts.counts], where)
    return dataclasses.replace(
        source, experts=experts, topology=dataclasses.replace(topology, ep=ep), pipeline=source.pipeline or is_pipeline
    )


def _check_folding(source: DeepSpeedContents, topology: Topology) -> None:
    """Compare what AutoEP says in each file under tensor parallelism with the rank in the file's name.

    Raises:
        CorruptSourceError: it is another rank's, or missing.
    """
    files = [(file, dp, tp, "dense") for (tp, dp), file in source.models.items()]
    files += [(file, dp, tp, "zero_optimizer_state") for (tp, dp), file in source.optimizers.items()]
    for file, dp, tp, family in files:
        expected = autoep.make_folding(topology, dp, tp, family)
        stated = file.value.get(autoep.FOLDING)
        found = {key: stated.get(key) for key in expected} if isinstance(stated, Mapping) else None
        if found != expected:
            raise CorruptSourceError(f"{autoep.FOLDING} is {found!r:.400}, expected {expected!r:.400}", path=file.path)


def _refuse_frozen(source: DeepSpeedContents, experts: Experts) -> None:
    """Refuse frozen experts that model files list; at ZeRO-1, only the files of experts show them."""
    frozen = [name for file in source.models.values() for name in file.value.get("frozen_param_shapes") or ()]
    if stacks := [name for name in frozen if name in experts.stacked]:
        autoep.refuse_frozen(stacks[0], str(source.folder))


def _check_stacks(source: DeepSpeedContents, experts: Experts, ep: int) -> None:
    """Compare the stacks of experts in `param_shapes`, of which each rank has a part, with the stated `num_experts`.

    Raises:
        CorruptSourceError: a stack has another number of experts.
    """
    for file in source.models.values():
        for name, shape in (item for group in parse_param_shapes(file) for item in group.items()):
            count = experts.stacked.get(name)
            if count is not None and count != shape[0] * ep:
                raise CorruptSourceError(
                    f"{name} has {shape[0]} experts on each of {ep} ranks, num_experts is {count}", path=file.path
                )


def _check_counts(source: DeepSpeedContents) -> None:
    """Compare the files of experts with the number of experts that the model files state for each layer.

    Raises:
        CorruptSourceError: files are missing, or there are more of them.
    """
    lists = [file.value.get("num_experts") for file in source.models.values()]
    stated = [count for counts in lists for count in (counts if isinstance(counts, list) else [])]
    found = list(Counter(layer for layer, _ in source.expert_files).values())
    if stated and stated != found:
        raise CorruptSourceError(
            f"files of {found} experts are there, num_experts is {stated!r:.200}",
            path=str(source.folder),
            hint="a layer_*_expert_* file is missing",
        )


def _check_order(layers: Sequence[int | None], where: str) -> None:
    """Check that layers of experts have the numbers that they have on a single stage: those of the pipeline's layers.

    Args:
        layers: layer of the pipeline that holds each layer of experts, in the order of their files; None if it is tied.
        where: the checkpoint.

    Raises:
        UnsupportedError: experts are in a tied module, which several stages hold.
        CorruptSourceError: files of experts are those of another stage.
    """
    if None in layers:
        raise UnsupportedError("has experts in a tied module of a pipeline", path=where)
    if list(layers) != sorted(layer for layer in layers if layer is not None):
        raise CorruptSourceError(
            f"its files of experts are of the pipeline's layers {layers}, in this order", path=where
        )


def _refuse_layout(topology: Topology, ep: int, where: str, *, is_native: bool) -> None:
    """Refuse experts under tensor parallelism that are not converted.

    Raises:
        UnsupportedError: DeepSpeed's own experts, another stage, or parts that do not tile the data-parallel ranks.
    """
    if is_native or topology.zero not in (1, 2, 3):
        raise _make_layout_error(topology, where)
    if topology.dp % ep:
        raise UnsupportedError(
            f"has experts at tp={topology.tp}, and ep={ep} does not divide dp={topology.dp}: only degrees of expert"
            " parallelism that divide dp are converted",
            path=where,
        )


def _make_layout_error(topology: Topology, where: str) -> UnsupportedError:
    return UnsupportedError(
        f"has experts in the layout {topology}: DeepSpeed's own are converted at tp=1, cp=1 and ZeRO stages 1 and 2,"
        " those of AutoEP at pp=1 and cp=1 in the stages 1, 2 and 3 at any tp",
        path=where,
    )


def _add_names(source: DeepSpeedContents, commit_model: Mapping[str, Any]) -> DeepSpeedContents:
    """Find the names of the parameters that the optimizer of ZeRO-0 numbers; without them only weights can be read."""
    layers = commit_model.get("pipeline", source.models[0, 0].value.get("pipeline_layout"))
    info = pipeline.parse(layers) if source.pipeline else None
    try:
        return dataclasses.replace(source, named={mp: _find_names(source, info, mp) for mp, _ in source.models})
    except UnsupportedError as error:
        if source.pipeline:  # without parameters the layers of a pipeline are not known
            raise
        return drop_optimizer(source, error)


def drop_optimizer(source: DeepSpeedContents, why: UnsupportedError) -> DeepSpeedContents:
    """Return the contents without the optimizer's groups; `why` says what of the optimizer cannot be read."""
    hint = "; ".join(filter(None, (why.hint, "--states weight takes the weights alone")))
    unread = UnsupportedError(why.message, path=why.path, problems=why.problems, hint=hint)
    return dataclasses.replace(source, named={mp: [] for mp, _ in source.models}, unread=unread)


def _find_names(source: DeepSpeedContents, info: PipelineInfo | None, mp: int) -> list[dict[str, tuple[int, ...]]]:
    file = source.models[mp, 0]
    if not isinstance(file.value.get("optimizer"), Mapping):
        lost = _is_lost_by_deepspeed(file.value)
        raise UnsupportedError(
            "has no optimizer, and there are no *_optim_states.pt files",
            path=file.path,
            hint="DeepSpeed 0.17 saves no optimizer states in bf16 at ZeRO-0: train with ZeRO stage 1"
            if lost
            else "save from an engine with an optimizer",
        )
    pp, tp = divmod(mp, source.topology.tp)
    module = build_stage_module(source, info, pp, tp) if source.pipeline else require_mapping(file, "module")
    tensors = {name: tensor for name, tensor in module.items() if isinstance(tensor, Tensor)}
    return find_names(require_mapping(file, "optimizer"), tensors, file)


def _list_files(folder: Path) -> dict[str, names.FileName]:
    try:
        listed = sorted(item.name for item in folder.iterdir())
    except OSError as error:
        raise make_read_error(error, str(folder), what="cannot be listed", is_indexed=False) from error
    return {name: parsed for name in listed if (parsed := names.parse(name)) is not None}


def _select_by_rank(
    file_names: Mapping[str, names.FileName], files: Mapping[str, PtFile], kind: str
) -> dict[tuple[int, int], PtFile]:
    ranks = sorted((parsed.mp, parsed.dp, name) for name, parsed in file_names.items() if parsed.kind == kind)
    return {(mp, dp): files[name] for mp, dp, name in ranks}


def _select_experts(file_names: Mapping[str, names.FileName], files: Mapping[str, PtFile], tp: int) -> dict[str, Any]:
    """Return the fields of the files of experts; each stage counts its layers from 0, here all are counted."""
    found = sorted(
        (parsed.mp // tp, parsed.layer, parsed.expert, parsed.mp, name)
        for name, parsed in file_names.items()
        if parsed.kind == "expert"
    )
    numbers = {layer: at for at, layer in enumerate(dict.fromkeys((pp, layer) for pp, layer, _, _, _ in found))}
    every: dict[tuple[int, int], list[PtFile]] = {}
    for pp, layer, expert, _, name in found:
        file = files[name]
        if isinstance(file.value, Mapping) and autoep.FOLDING in file.value:
            value = {key: item for key, item in file.value.items() if key != autoep.FOLDING}
            file = dataclasses.replace(file, value=value)
        every.setdefault((numbers[pp, layer], expert), []).append(file)
    return {
        "expert_files": {key: own[0] for key, own in every.items()},
        "expert_copies": {key: tuple(own[1:]) for key, own in every.items() if own[1:]},
    }


def read_zero_stage(state: Mapping[str, Any]) -> int:
    """Return the ZeRO stage of an `optimizer_state_dict`: 1 if it states none (BF16_Optimizer), -1 if it is invalid."""
    value = state.get("zero_stage", 1)
    if isinstance(value, Inert) and value.target == _STAGE_ENUM and len(value.args) == 1:
        value = value.args[0]
    return value if isinstance(value, int) else -1


def _read_topology(first: PtFile, file_names: Mapping[str, names.FileName], folder: Path) -> Topology:
    value = first.value
    if not isinstance(value, Mapping) or "dp_world_size" not in value or "global_steps" not in value:
        raise UnsupportedError("is not a DeepSpeed model file: no dp_world_size, global_steps", path=first.path)
    dp: Any = value["dp_world_size"]
    mp: Any = value.get("mp_world_size", 1)
    tp: Any
    pp: Any
    dims = value.get("checkpoint_parallel_dimensions")
    if isinstance(dims, Mapping):
        tp, pp = dims.get("tp_degree"), dims.get("pp_degree")
    else:  # before DeepSpeed 0.19: count the tensor-parallel ranks of the layer files, as ds_to_universal does
        layers = {parsed.mp for parsed in file_names.values() if parsed.kind == "layer"}
        tp = len(layers) or mp
        pp = mp // tp if isinstance(mp, int) else None
    degrees = {"tp": tp, "pp": pp, "dp": dp, "mp": mp}
    integers = all(type(degree) is int and degree >= 1 for degree in degrees.values())
    tp, cp = (1, tp) if integers and mp == pp == 1 and dp % tp == 0 else (tp, 1)  # see `make_parallel_dimensions`
    if not integers or tp * pp != mp:
        raise CorruptSourceError(f"its degrees of parallelism {degrees} do not fit each other", path=first.path)
    prefixes = [parsed.prefix for parsed in file_names.values() if parsed.kind == "optimizer"]
    if not prefixes:
        return _make_zero0_topology(first, stated_topology(first.path, tp=tp, pp=pp, dp=dp, cp=cp), file_names)
    path = folder / names.optimizer_file(prefixes[0], 0, 0)
    if not path.exists():
        raise CorruptSourceError(f"misses {path.name}", path=str(folder))
    state = read(path).value
    inner = state.get("optimizer_state_dict") if isinstance(state, Mapping) else None
    stage = read_zero_stage(inner) if isinstance(inner, Mapping) else -1
    if stage not in (1, 2, 3):
        raise UnsupportedError(f"ZeRO stage {stage}: expected 1, 2 or 3", path=str(path))
    return stated_topology(first.path, tp=tp, pp=pp, dp=dp, cp=cp, zero=stage)


def make_parallel_dimensions(topology: Topology) -> dict[str, int]:
    """Return `checkpoint_parallel_dimensions` as a model file of such a run has it.

    DeepSpeed's own mpu for sequence parallelism calls its group the model-parallel group
    (deepspeed/runtime/sequence_parallel/parallel_state_sp.py 0.19.8). The engine states its size as the tensor-parallel
    degree in this field only; the files are those of tp=1. Other mpus state their tensor parallelism here. Then nothing
    in the files states cp.
    """
    plain = topology.tp * topology.pp == 1
    return {"pp_degree": topology.pp, "tp_degree": topology.cp if plain else topology.tp}


def _make_zero0_topology(first: PtFile, topology: Topology, file_names: Mapping[str, names.FileName]) -> Topology:
    """Return the topology of a checkpoint without optimizer files, which is of ZeRO-0.

    Raises:
        CorruptSourceError: the run saved optimizer files, which are missing.
    """
    has_experts = any(parsed.kind == "expert" for parsed in file_names.values())
    misses_experts = has_experts and first.value.get("optimizer") is None
    if misses_experts or (first.value.get("param_shapes") is not None and not _is_lost_by_deepspeed(first.value)):
        raise CorruptSourceError("has no *_optim_states.pt files beside it, and was saved with them", path=first.path)
    return dataclasses.replace(topology, zero=0)


def _is_lost_by_deepspeed(model: Mapping[str, Any]) -> bool:
    """Return whether DeepSpeed 0.17 saved no optimizer states, as it does for bf16 at ZeRO-0 (seen in 0.17.6)."""
    config = model.get("ds_config")
    sections = [config.get(key) for key in ("bf16", "zero_optimization")] if isinstance(config, Mapping) else [None]
    bf16, zero = [section if isinstance(section, Mapping) else {} for section in (*sections, None)[:2]]
    version = str(model.get("ds_version"))
    return version.startswith("0.17.") and bf16.get("enabled") is True and zero.get("stage", 0) == 0


def _check_names(
    folder: Path, topology: Topology, file_names: Mapping[str, names.FileName], prefix: str, ep: int
) -> None:
    """Check that every rank has its files, and that no file belongs to a rank that does not exist.

    Raises:
        CorruptSourceError: the message lists missing and unexpected files.
    """
    most = len(file_names) + _MOST_MISSING  # a hostile checkpoint can state any number of ranks
    expected = set(itertools.islice(_expect_names(topology, file_names, prefix, ep), most + 1))
    problems = [f"{name} is missing" for name in sorted(expected - file_names.keys())[:_MOST_MISSING]]
    if len(expected) <= most:
        problems += [f"{name} belongs to no rank of this layout" for name in sorted(file_names.keys() - expected)]
    else:
        problems += [f"{len(file_names)} files are there, more than {most} are expected"]
    if problems:
        raise CorruptSourceError(
            f"its files do not fit {topology}",
            path=str(folder),
            problems=problems,
            hint="a rank did not save, two saves are mixed in one folder, or each node saved its own ranks"
            " (use_node_local_storage): copy the files of all nodes into one folder",
        )


def _expect_names(topology: Topology, file_names: Mapping[str, names.FileName], prefix: str, ep: int) -> Iterator[str]:
    """Yield the name of every file of the layout; `ep` is AutoEP's degree under tensor parallelism."""
    num_mp = topology.tp * topology.pp
    for mp in range(num_mp):
        for dp in [None] if topology.zero < 3 else range(topology.dp):
            yield names.model_file(mp, dp=dp)
        for dp in range(topology.dp) if topology.zero else ():
            yield names.optimizer_file(prefix, dp, mp)
    axis = any(parsed.model_axis for parsed in file_names.values())
    for layer in {parsed.layer for parsed in file_names.values() if parsed.kind == "layer"}:
        for tp in range(topology.tp):
            yield names.layer_file(layer, tp, model_axis=axis)
    counts: dict[tuple[int, int], int] = {}
    for parsed in file_names.values():
        if parsed.kind == "expert" and parsed.mp < num_mp:
            stage = parsed.mp // topology.tp
            counts[stage, parsed.layer] = max(counts.get((stage, parsed.layer), 0), parsed.expert + 1)
    folded = dataclasses.replace(topology, ep=ep) if topology.dp % ep == 0 else topology
    for (stage, layer), count in counts.items():
        for expert in range(count):
            part = expert * ep // count
            for tp in autoep.list_writers(folded, part):
                yield names.expert_file(layer, expert, stage * topology.tp + tp)


def _is_divisor(count: object, dp: int) -> bool:
    return isinstance(count, int) and count > 0 and dp % count == 0


def _check_contents(source: DeepSpeedContents) -> None:
    problems: list[str] = []
    reference = source.models[0, 0].value
    for file in source.models.values():
        for key in ("global_steps", "dp_world_size", "mp_world_size", "checkpoint_parallel_dimensions"):
            if not isinstance(file.value, Mapping) or file.value.get(key) != reference.get(key):
                name = Path(file.path).name
                problems.append(f"{name}: another {key} than rank 0's {reference.get(key)!r}")
    stages = {read_zero_stage(source.optimizer(*rank)) for rank in source.optimizers}
    if stages - {source.topology.zero}:
        problems.append(f"optimizer files are of the ZeRO stages {sorted(stages)}")
    for rank, file in source.optimizers.items():
        counts = source.optimizer(*rank).get("partition_count", source.topology.dp)
        counts = counts if isinstance(counts, list) else [counts]
        dp = source.topology.dp  # experts have fewer partitions, because each expert is on some of the ranks only
        num_ranks = dp * source.topology.tp
        if any(count != dp and not (source.expert_files and _is_divisor(count, num_ranks)) for count in counts):
            problems.append(f"{Path(file.path).name}: written for {counts} partitions, not {source.topology.dp}")
    problems += [
        f"{Path(file.path).name}: not a dict of tensors"
        for file in (*source.layers.values(), *source.expert_files.values())
        if not isinstance(file.value, Mapping) or not all(isinstance(item, Tensor) for item in file.value.values())
    ]
    if problems:
        raise CorruptSourceError("its files contradict each other", path=str(source.folder), problems=problems)
