"""The layout of a trillion-parameter GPT at ZeRO-3, where every rank holds a part of every parameter."""

from __future__ import annotations

import dataclasses
from typing import Any

from benchmarks.checkpoints import ROOT
from benchmarks.scale_zero1 import HIDDEN, SHAPES, VOCABULARY
from reshard import api
from reshard.formats import format_of
from reshard.formats.base import Request
from reshard.formats.deepspeed.logical import Param, Stage
from reshard.formats.deepspeed.reading.reader import DeepSpeedExtra
from reshard.formats.deepspeed.tensor_parallel.rules import WHOLE
from reshard.formats.pt.objects import StatefulDict, new_tensor
from reshard.tensors.layout import LogicalTensor, TargetLayout, TensorKey
from reshard.topology import Topology

TINY = ROOT / "tests/golden/deepspeed-0.19.8/zero3-dp3/step-00000002"


def layout_zero3(layers: int, topology: Topology) -> TargetLayout:
    """A GPT of so many layers without a pipeline."""
    tiny = api.index_of(TINY)
    extra = tiny.extra
    assert isinstance(extra, DeepSpeedExtra)
    params = {name: Param(name=name, shape=shape, rule=WHOLE) for name, shape in _shapes(layers).items()}
    groups = tuple(tuple(name for name, param in params.items() if len(param.shape) == ndim) for ndim in (2, 1))
    model = dataclasses.replace(extra.model, params=params, groups=groups, stages=(Stage(groups=groups, ids=(0, 1)),))
    for file in extra.source.models.values():
        file.value["module"] = _module(file.value["module"], params)
    for file in extra.source.files:
        file.value["ds_config"]["zero_optimization"].pop("sub_group_size", None)  # the default: one for each group
    states = dict.fromkeys((tensor.key.state, tensor.dtype) for tensor in tiny.tensors if tensor.key.name in _TRAINED)
    tensors = [tensor for tensor in tiny.tensors if tensor.key.name in extra.weights]
    tensors += [
        LogicalTensor(key=TensorKey(state, param.name), shape=param.shape, dtype=dtype)
        for param in params.values()
        for state, dtype in states
    ]
    scaled = dataclasses.replace(tiny, tensors=tuple(tensors), extra=dataclasses.replace(extra, model=model))
    return format_of("deepspeed").layout(scaled, Request(topology=topology))


_TRAINED = "embed.weight"


def _shapes(layers: int) -> dict[str, tuple[int, ...]]:
    """Parameters by name."""
    block = {name: shape for name, shape in SHAPES.items() if name != "norm"}
    return {
        "embed.weight": (VOCABULARY, HIDDEN),
        **{f"layers.{number}.{name}.weight": shape for number in range(layers) for name, shape in block.items()},
        "norm.weight": SHAPES["norm"],
    }


def _module(tiny: Any, params: dict[str, Param]) -> StatefulDict:
    """The state dict of a rank: nothing of the parameters, and the buffer."""
    module = StatefulDict((name, new_tensor("float32", (0,))) for name in (*params, "head.weight"))
    module["scale"] = tiny["scale"]
    module.state = tiny.state
    return module
