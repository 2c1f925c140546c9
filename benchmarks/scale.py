"""Planning for thousands of ranks: a GPT of up to a trillion parameters whose files have their metadata and no payload.

The files are laid out by our own writer from a tiny real checkpoint, with the shapes of a large model, and written
sparse: `reshard plan` reads them as it reads any others.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

from benchmarks.checkpoints import ENVIRONMENT, OUTPUT, ROOT
from reshard import api
from reshard.formats import format_of
from reshard.formats.base import Request
from reshard.formats.deepspeed.logical import Param, Stage
from reshard.formats.deepspeed.reader import Extra
from reshard.layout import LogicalTensor, TargetLayout, TensorKey
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
CASES = ((8, "tp=8,pp=4,dp=32", "tp=8,pp=2,dp=64"), (32, "tp=8,pp=16,dp=32", "tp=8,pp=8,dp=64"))
LARGEST = (128, "tp=8,pp=64,dp=32", "tp=8,pp=32,dp=64")
MEASURE = """
import json, resource, sys, time
from pathlib import Path
from reshard import api
from reshard.check import check_plan
from reshard.formats import format_of
from reshard.formats.base import Request
from reshard.plan import make_plan
from reshard.topology import Topology
marks = [time.monotonic()]
index = api.index_of(Path(sys.argv[1])); marks.append(time.monotonic())
request = Request(topology=Topology.parse(sys.argv[2]))
layout = format_of(index.format).layout(index, request); marks.append(time.monotonic())
plan = make_plan(index, layout); marks.append(time.monotonic())
check_plan(plan); marks.append(time.monotonic())
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
rows = [len(index.shards), len(layout.shards)]
print(json.dumps({"seconds": [b - a for a, b in zip(marks, marks[1:])], "peak_kib": peak, "rows": rows}))
"""


def scale(_repeat: int) -> str:
    """1,024, 4,096 and 16,384 ranks of ZeRO-1, with model and pipeline growing alike."""
    lines = [
        "| ranks | parameters | files | boxes, source + target | index s | lay out s | plan s | check s | memory |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for layers, before, after in (*CASES, LARGEST):
        folder = OUTPUT / "scale"
        shutil.rmtree(folder, ignore_errors=True)
        num_files = make_checkpoint(folder, layers, Topology.parse(before))
        command = [sys.executable, "-c", MEASURE, str(folder), after]
        found = json.loads(subprocess.run(command, env=ENVIRONMENT, check=True, capture_output=True).stdout)
        shutil.rmtree(folder)
        seconds = " | ".join(f"{value:.1f}" for value in found["seconds"])
        parameters = sum(math.prod(shape) for shape in SHAPES.values()) * layers + VOCABULARY * HIDDEN
        lines.append(
            f"| {Topology.parse(before).world_size} | {parameters / 1e9:.0f} billion | {num_files} "
            f"| {found['rows'][0]} + {found['rows'][1]} | {seconds} | {found['peak_kib'] / 2**20:.2f} GiB |"
        )
        sys.stdout.write(lines[-1] + "\n")
    lines += ["", f"ZeRO-1, half the pipeline and twice the data parallelism; last: {LARGEST[1]} to {LARGEST[2]}.", ""]
    return "\n".join(lines)


def make_checkpoint(folder: Path, layers: int, topology: Topology) -> int:
    """Files with all metadata and holes for payloads; returns how many."""
    layout = _layout(layers, topology)
    folder.mkdir(parents=True)
    for file in layout.files:
        descriptor = os.open(folder / file.path, os.O_CREAT | os.O_WRONLY)
        os.ftruncate(descriptor, file.num_bytes)
        for position, content in file.fixed:
            os.pwrite(descriptor, content, position)
        os.close(descriptor)
    return len(layout.files)


def _layout(layers: int, topology: Topology) -> TargetLayout:
    """The tiny checkpoint's layout with more layers, larger shapes and more ranks."""
    tiny = api.index_of(TINY)
    extra = tiny.extra
    assert isinstance(extra, Extra)
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
