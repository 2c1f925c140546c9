"""Find names and types of the module's weights in a universal checkpoint."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from reshard.errors import UnsupportedError
from reshard.formats.deepspeed import autoep
from reshard.formats.deepspeed.logical import parse_layer, parse_tied_key
from reshard.formats.deepspeed.pipeline import PipelineInfo
from reshard.formats.universal.source import UniversalContents
from reshard.formats.universal.weights import MODULE, Weights

_LIKE = "or name a native checkpoint of the same model with --like"


def find_module_weights(source: UniversalContents, others: Collection[str], info: PipelineInfo | None) -> Weights:
    """Find names and types of the module's weights.

    Args:
        source: the files that are not atoms.
        others: names of the frozen parameters and buffers that the checkpoint holds.
        info: description of the pipeline, if there is one.

    Raises:
        UnsupportedError: the checkpoint does not say them.
    """
    if source.own_weights is not None:
        return source.own_weights
    module = source.model.value.get("module")
    if isinstance(module, Mapping):
        state = getattr(module, "state", None)
        experts = _list_autoep_files(source)
        expert_names = (name for names in experts.values() for name in names)
        dtypes = {str(name): tensor.dtype for name, tensor in module.items()}
        return Weights(
            dtypes=dtypes | dict.fromkeys(expert_names, _find_configured_type(source)),
            experts=experts,
            attributes={} if state is None else {MODULE: state},
        )
    if source.made_for is not None:
        raise UnsupportedError(
            "is a universal checkpoint of an earlier reshard, which does not say of which types the weights are",
            path=str(source.folder),
            hint=f"convert again from the native checkpoint, {_LIKE}",
        )
    return _find_pipeline_weights(source, others, info)


def _find_pipeline_weights(source: UniversalContents, others: Collection[str], info: PipelineInfo | None) -> Weights:
    """Assign the weights of a PipelineModule to its layers, as DeepSpeed's converter does not copy the layer files.

    A layer without weights is a function, which has no file, or a module, which must have one. Every layer gets a file
    here because DeepSpeed ignores the files of functions.
    """
    where = str(source.folder)
    tied = {key for name in source.shapes if (key := parse_tied_key(name)) is not None}
    if info is None or tied - set(info.tied or ()):
        lacks = "how many layers the pipeline has" if info is None else "at which layers the tied modules stand"
        raise UnsupportedError(
            f"does not say {lacks}: native checkpoints have a file for each layer",
            path=where,
            hint="save with client_state={'pipeline_layout': {num_layers, partition_method, tied}},"
            f" or write it into COMMIT.json as model.pipeline, {_LIKE}",
        )
    buffers = {str(name) for file in source.models for name in file.value.get("buffer_names") or ()}
    if lost := sorted(buffers - set(others)):
        raise UnsupportedError(
            f"{len(lost)} buffers of the pipeline, such as {lost[0]}, are in none of its files: DeepSpeed's converter"
            " does not copy the layer files",
            path=where,
            hint="convert from the native checkpoint",
        )
    names = (*source.shapes, *others)
    layers = {
        at: tuple(
            name
            for name in names
            if parse_layer(name) == at or at in (info.tied or {}).get(parse_tied_key(name) or "", ())
        )
        for at in range(info.num_layers)
    }
    return Weights(dtypes=dict.fromkeys(names, _find_configured_type(source)), layers=layers, model_axis=source.tp > 1)


def _list_autoep_files(source: UniversalContents) -> dict[tuple[int, int], tuple[str, ...]]:
    """List the names in each expert's file: slices of the stacks that DeepSpeed's own converter builds."""
    layers = autoep.read_layers(source.model.value)
    if not layers:
        return {}
    counts, prefixes, _ = autoep.find_stacks(layers, str(source.folder))
    return {
        (layer, expert): tuple(f"{prefix}.{weight}.{expert}" for weight in autoep.WEIGHTS)
        for layer, prefix in prefixes.items()
        for expert in range(counts[f"{prefix}.{autoep.WEIGHTS[0]}"])
    }


def _find_configured_type(source: UniversalContents) -> str:
    """Return the type to which DeepSpeed casts the module, from `ds_config`.

    Source: runtime/config.py, `get_bfloat16_config`, `get_float16_config`.
    """
    saved_config = source.model.value.get("ds_config")
    config = saved_config if isinstance(saved_config, Mapping) else {}
    for keys, dtype in ((("bf16", "bfloat16"), "bfloat16"), (("fp16",), "float16")):
        if any(isinstance(config.get(key), Mapping) and config[key].get("enabled") for key in keys):
            return dtype
    return "float32"
