"""The layout of a trillion-parameter GPT at ZeRO-1: a tiny real checkpoint with more, larger layers and more ranks."""

from __future__ import annotations

import dataclasses
from typing import Any

from benchmarks.checkpoints import ROOT
from reshard import api
from reshard.formats import format_of
from reshard.formats.base import Request
from reshard.formats.deepspeed.logical import Param, Stage
from reshard.formats.deepspeed.reading.reader import DeepSpeedExtra
from reshard.tensors.layout import LogicalTensor, TargetLayout, TensorKey
from reshard.topology import Topology

TINY = ROOT / "tests/golden/deepspeed-0.19.8/pipeline-tp2-pp2/step-00000002"
HIDDEN, KEY_VALUE, FFN, VOCABULARY = 25600, 2560, 81920, 128256
SHAPES: dict[str, tuple[int, ...]] = {
    "qkv": (HIDDEN + 2 * KEY_VALUE, HIDDEN),
    "out": (HIDDEN, HIDDEN),
    "gate_up": (2 * FFN, HIDDEN),
    "down": (HIDDEN, FFN),
    "attention_norm": (HIDDEN,),
    "ffn_norm": (HIDDEN,),
    "norm": (HIDDEN,),
}


def layout_zero1(layers: int, topology: Topology) -> TargetLayout:
    """A GPT of so many layers in a PipelineModule."""
    tiny = api.index_of(TINY)
    extra = tiny.extra
    assert isinstance(extra, DeepSpeedExtra)
    assert extra.model.pipeline is not None
    params = {name: _scaled(param, name) for old, param in extra.model.params.items() for name in _names(old, layers)}
    groups = tuple(
        tuple(sorted((name for old in group for name in _names(old, layers)), key=_layer))
        for group in extra.model.groups
    )
    model = dataclasses.replace(
        extra.model,
        params=params,
        groups=groups,
        stages=(Stage(groups=groups, ids=(0, 1)), *extra.model.stages[1:]),
        patterns=dataclasses.replace(extra.model.patterns, info=_info(extra.model.patterns.info)),
        pipeline=dataclasses.replace(
            extra.model.pipeline, num_layers=layers + 3, parts=(0, layers + 3), tied={"embed": (0, layers + 2)}
        ),
    )
    for file in extra.source.models.values():
        file.value["universal_checkpoint_info"] = _info(file.value["universal_checkpoint_info"])
        note = {"num_layers": layers + 3, "tied": {"embed": [0, layers + 2]}}
        file.value["pipeline_layout"] = {**file.value["pipeline_layout"], **note}
    found = extra.source.layers
    files = {(0, tp): found[0, tp] for tp in range(2)}
    files |= {(layer, tp): found[1, tp] for layer in range(1, layers + 1) for tp in range(2)}
    files |= {(layers + 1, tp): found[3, tp] for tp in range(2)}
    tensors = tuple(
        LogicalTensor(key=TensorKey(tensor.key.state, name), shape=params[name].shape, dtype=tensor.dtype)
        for tensor in tiny.tensors
        for name in _names(tensor.key.name, layers)
        if name in params
    )
    source = dataclasses.replace(extra.source, layers=files)
    scaled = dataclasses.replace(tiny, tensors=tensors, extra=dataclasses.replace(extra, source=source, model=model))
    return format_of("deepspeed").layout(scaled, Request(topology=topology))


def _names(name: str, layers: int) -> list[str]:
    """Names in the large model of a parameter of the tiny one: the first block becomes all blocks."""
    layer, _, rest = name.partition(".")
    if layer == "1":
        return [f"{number}.{rest}" for number in range(1, layers + 1)]
    if layer == "2":
        return []
    return [f"{layers + 1}.{rest}"] if layer == "3" else [name]


def _layer(name: str) -> int:
    """Position of a parameter's layer; tied modules come first, as PipelineModule registers them."""
    layer = name.partition(".")[0]
    return int(layer) if layer.isdigit() else 0


def _scaled(param: Param, name: str) -> Param:
    shape = SHAPES.get(name.rpartition(".")[2], (VOCABULARY, HIDDEN))
    rule = param.rule
    if rule.parts:
        rule = dataclasses.replace(rule, parts=(HIDDEN, KEY_VALUE, KEY_VALUE))
    return dataclasses.replace(param, name=name, shape=shape, rule=rule, rows=None)


def _info(info: Any) -> dict[str, Any]:
    """`universal_checkpoint_info` of the large model."""
    (fused,) = info["parameter_with_sub_params"]
    return {
        **info,
        "original_vocab_size": VOCABULARY,
        "padded_vocab_size": VOCABULARY,
        "parameter_with_sub_params": [{**fused, "shape": [[HIDDEN, KEY_VALUE, KEY_VALUE], HIDDEN]}],
    }
