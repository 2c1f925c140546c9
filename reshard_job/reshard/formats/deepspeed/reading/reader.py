"""Index a native DeepSpeed checkpoint: every stored byte of model and optimizer is in a box of a logical tensor."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Protocol, runtime_checkable

from reshard.commits.commit import Commit
from reshard.errors import UnsupportedError, UsageError
from reshard.formats.deepspeed import pipeline
from reshard.formats.deepspeed.configured import COUNT, make_groups
from reshard.formats.deepspeed.contents import DeepSpeedContents
from reshard.formats.deepspeed.logical import Model, Param, describe_model
from reshard.formats.deepspeed.names import NAME
from reshard.formats.deepspeed.reading.groups import read_groups
from reshard.formats.deepspeed.reading.opening import drop_optimizer, open_source
from reshard.formats.deepspeed.reading.partitions import add_partitions, add_unpartitioned, add_zero3
from reshard.formats.deepspeed.reading.weights import (
    add_experts,
    add_layers,
    add_modules,
    add_zero3_buffers,
    add_zero3_frozen,
    read_shared_names,
)
from reshard.formats.deepspeed.rows import Rows
from reshard.formats.deepspeed.states import check_scalars, read_group_states
from reshard.formats.deepspeed.tensor_parallel import megatron, patterns
from reshard.formats.pt.reader import PtFile
from reshard.tensors.layout import PADDING, Checksum, FormatExtra, Index, LogicalTensor, SourceFile, TensorKey


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class DeepSpeedExtra:
    """Facts of a native checkpoint besides its tensors that writers of DeepSpeed's formats need.

    Attributes:
        source: the files.
        model: the whole model.
        weights: frozen parameters and buffers, by name.
        commit_model: `Commit.model` of the source.
        element_bytes: of the model's dtype, from which `parameter_alignment` follows.
        aliases: second name of a tied weight -> its first.
    """

    format_name: ClassVar[str] = NAME
    source: DeepSpeedContents
    model: Model
    weights: Mapping[str, Param]
    commit_model: Mapping[str, Any]
    element_bytes: int
    aliases: Mapping[str, str]


@runtime_checkable
class NativeConvertible(FormatExtra, Protocol):
    """`Index.extra` of another format whose files hold all that native ones hold besides tensors."""

    def to_native(self) -> DeepSpeedExtra:
        """Describe the checkpoint as a native one.

        Raises:
            UnsupportedError: the checkpoint lacks a fact; the message names it.
        """
        ...


def read_index(
    folder: Path,
    commit: Commit | None,
    pattern_info: Mapping[str, Any] | None = None,
    config: Mapping[str, Any] | None = None,
) -> Index:
    """Index the checkpoint in `folder`.

    Args:
        folder: of the tag.
        commit: its commit marker, if it has one.
        pattern_info: how tensors are cut, from a pattern file (`pattern_file.load`); it replaces what the checkpoint
            says about it.
        config: DeepSpeed's configuration (`configured.load`), for an elastic checkpoint.

    Raises:
        UsageError: the configuration does not fit the checkpoint.
        CorruptSourceError, UnsafePickleError, UnsupportedError: see `reshard.formats.base`.
    """
    source = open_source(folder, dict(commit.model) if commit is not None else {})
    if config is not None:
        source = _add_settings(source, config)
    try:
        return _build_index(source, commit, pattern_info)
    except UnsupportedError as error:
        if (
            source.unread is not None or source.pipeline or source.topology.zero == 3
        ):  # their weights need the optimizer
            raise
        try:
            return _build_index(drop_optimizer(source, error), commit, pattern_info)
        except UnsupportedError:
            raise error from None


def _add_settings(source: DeepSpeedContents, config: Mapping[str, Any]) -> DeepSpeedContents:
    """Give an elastic checkpoint the settings of its parameter groups from a configuration.

    Raises:
        UsageError: the configuration lacks settings, or the checkpoint keeps its own.
        UnsupportedError: settings of another optimizer or schedule.
    """
    where = str(source.folder)
    state = source.optimizer(0, 0) if source.optimizers else {}
    if not isinstance(state.get("base_optimizer_state"), list):
        raise UsageError("keeps the settings of its optimizer itself", path=where, hint="leave --ds-config out")
    if source.topology.pp > 1:
        raise UnsupportedError("is an elastic checkpoint of a pipeline: its stages' groups have no names", path=where)
    states = [{**group.scalars, **group.flat} for group in read_group_states(source, 0, 0)]
    states = [{key: value for key, value in group.items() if key != "fp32"} for group in states]
    try:
        settings = make_groups(config, states, source.models[0, 0].value, state.get(COUNT))
    except UsageError as error:
        raise UsageError(
            f"--ds-config {error.message}", path=where, problems=error.problems, hint=error.hint
        ) from error
    return dataclasses.replace(source, settings=settings)


def _build_index(source: DeepSpeedContents, commit: Commit | None, pattern_info: Mapping[str, Any] | None) -> Index:
    if source.unread is None:
        check_scalars(source)
    commit_model = dict(commit.model) if commit is not None else {}
    first = source.models[0, 0].value
    info = pattern_info
    if pattern_info is None:
        info = megatron.add_vocabulary_multiple(first.get("universal_checkpoint_info"), first)
    layers = commit_model.get("pipeline", first.get("pipeline_layout"))
    model = describe_model(source, patterns.parse(info), pipeline.parse(layers))
    rows = Rows()
    files = {file.path: at for at, file in enumerate(source.files)}
    weights: dict[str, Param] = {}
    aliases: dict[str, str] = {}
    if not source.has_modules:
        add_layers(rows, source, model, files, weights)
    elif source.topology.zero < 3:
        aliases = add_modules(rows, source, model, files, weights)
        add_experts(rows, source, model, files, weights)
    else:
        aliases = read_shared_names(first.get("shared_params"), model)
    element_bytes = 2 if source.half_type else 4
    if source.unread is not None:
        pass
    elif source.topology.zero == 0:
        add_unpartitioned(rows, source, model, files)
    elif source.topology.zero < 3:
        add_partitions(rows, source, model, files, element_bytes)
    else:
        add_zero3(rows, source, model, files)
        add_zero3_frozen(rows, source, model, files, weights)
        add_zero3_buffers(rows, source, model, files, weights)
    return Index(
        root=source.folder,
        format=NAME,
        topology=source.topology,
        step=source.step,
        samples=source.samples if commit is None else commit.samples,
        tensors=tuple(rows.tensors),
        files=_make_source_files(source.files),
        shards=rows.build(),
        groups=read_groups(source, model),
        aliases=aliases,
        unread=source.unread,
        has_rounded_weights=_has_rounded_weights(source),
        rank_local=_find_rank_local(source),
        free_copies=_find_free_copies(source, model, rows.tensors),
        averaged=_find_averaged(source, model, weights, rows.tensors),
        extra=DeepSpeedExtra(
            source=source,
            model=model,
            weights=weights,
            commit_model=commit_model,
            element_bytes=element_bytes,
            aliases=aliases,
        ),
    )


def _has_rounded_weights(source: DeepSpeedContents) -> bool:
    """Return whether each weight is its master weight, rounded: DeepSpeed rounds in every step and when it loads.

    It does not hold with features that change weights without the optimizer, or that let weights lag behind masters.
    """
    config = source.models[0, 0].value.get("ds_config")
    config = config if isinstance(config, Mapping) else {}
    zero = config.get("zero_optimization")
    zero = zero if isinstance(zero, Mapping) else {}
    offload = zero.get("offload_optimizer")
    changed = any(config.get(key) for key in ("quantize_training", "compression_training", "hybrid_engine"))
    lags = bool(zero.get("zenflow")) or (isinstance(offload, Mapping) and bool(offload.get("super_offload")))
    return source.unread is None and source.topology.zero < 3 and not changed and not lags


def _find_rank_local(source: DeepSpeedContents) -> frozenset[TensorKey]:
    """Return the buffers that differ between data-parallel ranks (running means of a batch norm): those of ZeRO-3."""
    if source.topology.zero < 3:
        return frozenset()
    names = {name for file in source.models.values() for name in file.value.get("buffer_names") or ()}
    return frozenset(TensorKey("weight", name) for name in names)


def _find_free_copies(
    source: DeepSpeedContents, model: Model, tensors: Sequence[LogicalTensor]
) -> dict[TensorKey, int]:
    """Return the tensors of which only the first stage's copies count, each with the number of those."""
    if source.topology.pp == 1:
        return {}
    names = {name for name in model.params if model.patterns.takes_first_stage(name)}
    copies = {name: source.topology.tp if model.params[name].rule.dim is None else 1 for name in names}
    return {tensor.key: copies[tensor.key.name] for tensor in tensors if tensor.key.name in names}


def _find_averaged(
    source: DeepSpeedContents, model: Model, weights: Mapping[str, Param], tensors: Sequence[LogicalTensor]
) -> dict[TensorKey, int]:
    """Return the tensors that are the mean of the tensor-parallel ranks' copies, each with the number of ranks.

    DeepSpeed averages parameters and never buffers.
    """
    tp = source.topology.tp
    buffers = {name for file in source.models.values() for name in file.value.get("buffer_names") or ()}
    params = {**weights, **model.params}
    names = {name for name, param in params.items() if param.rule.averaged and name not in buffers}
    if tp == 1 or not names:
        return {}
    averaged = {tensor.key: tp for tensor in tensors if tensor.key.name.removesuffix(PADDING) in names}
    if source.unread is not None and source.half_type:  # there are masters, and they cannot be read
        averaged |= {TensorKey("fp32", name): tp for name in names}
    return averaged


def _make_source_files(files: Sequence[PtFile]) -> tuple[SourceFile, ...]:
    known: dict[int, tuple[Checksum, ...]] = {}  # equal files of many ranks share one object
    source_files = []
    for file in files:
        if id(file.storages) not in known:
            known[id(file.storages)] = _read_checksums(file)
        source_files.append(
            SourceFile(path=Path(file.path).name, num_bytes=file.num_bytes, checksums=known[id(file.storages)])
        )
    return tuple(source_files)


def _read_checksums(file: PtFile) -> tuple[Checksum, ...]:
    stated = sorted(
        (storage.file_offset, storage.num_bytes, storage.crc32)
        for storage in file.storages.values()
        if storage.crc32 is not None and storage.num_elements
    )
    return tuple(Checksum(start=start, num_bytes=count, crc32=crc) for start, count, crc in stated)
