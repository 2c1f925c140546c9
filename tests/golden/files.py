"""The golden checkpoints and what tests do with them: put tensors together, change a file."""

import contextlib
import hashlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from reshard.api import plan_of
from reshard.errors import UnsupportedError
from reshard.execution.verify import read_digests
from reshard.formats import read_checkpoint
from reshard.formats.pt import emit
from reshard.formats.pt.reader import read
from reshard.formats.pt.writer import lay_out_pt
from reshard.tensors.layout import Index
from reshard.tensors.views import select_states
from reshard.topology import Topology

ROOT = Path(__file__).parent / "deepspeed-0.19.8"
STEP = "step-00000002"
TARGETS = {
    "pipeline-tp2-pp2": ["tp=1", "tp=2", "pp=2", "pp=3,dp=2", "tp=2,pp=2,dp=2", "dp=5", "tp=2,pp=1,dp=3"],
    "pipeline-dp2": ["tp=1", "tp=2", "pp=2", "tp=2,pp=2", "tp=2,pp=3,dp=2", "dp=7"],
    "zero2-dp3": ["dp=1,zero=2", "dp=2,zero=1", "dp=8,zero=2", "dp=64,zero=2"],
    "zero2-dp3-round-robin": ["dp=1,zero=2", "dp=2,zero=1", "dp=8,zero=2"],
    "zero2-dp4-cp2": ["dp=3,zero=2", "dp=2,cp=2,zero=1", "dp=6,cp=3,zero=2", "dp=4,cp=4"],
    "zero3-dp3": ["dp=1,zero=3", "dp=2,zero=3", "dp=7,zero=3", "dp=64,zero=3"],
    "bf16-dp2": ["dp=1", "dp=3", "dp=4,zero=2"],
    "bf16-optimizer-dp2": ["dp=1", "dp=3", "dp=4,zero=2"],
    "autoep-dp2-ep2": ["dp=4,ep=4", "dp=2,ep=1,zero=2", "dp=4,ep=2", "dp=3,zero=2"],
    "autoep-tp2-dp2-ep2": ["dp=2,ep=2", "tp=2,dp=4,ep=4", "tp=3,dp=2,ep=2,zero=2"],
    "autoep-tp3-dp2-ep2-zero3": [
        "tp=1,dp=2,ep=2,zero=3",
        "tp=2,dp=2,ep=2,zero=3",
        "tp=2,dp=4,ep=4,zero=3",
        "tp=3,dp=4,ep=2,zero=3",
    ],
    "experts-dp4-ep2": ["dp=2,ep=2", "dp=4,ep=1", "dp=6,ep=2,zero=2", "dp=1,zero=2"],
    "experts-pp2-dp2-ep2": ["pp=1,dp=2,ep=2", "pp=3,dp=4,ep=2", "pp=2,dp=3"],
    "zero0-dp2": ["dp=1,zero=0", "dp=3,zero=0"],
    "zero0-bf16-dp2": ["dp=1,zero=0", "dp=3,zero=0"],
}
NUMPY = {"float32": np.uint32, "bfloat16": np.uint16, "uint8": np.uint8, "int64": np.int64}


def patterns(*, rows: int, padded_rows: int, parts: Sequence[int]) -> str:
    """Return the content of a file for `--patterns` that describes the pipelines of examples/gpt_deepspeed."""
    return rf"""
version: 1
vocabulary: {{rows: {rows}, padded_rows: {padded_rows}}}
rules:
  - {{pattern: 'tied_modules\.embed\.weight', kind: shard-v, vocabulary: true}}
  - {{pattern: '.*norm', kind: replicate}}
  - {{pattern: '\d+\.qkv', kind: shard-nc, dim: 0, parts: {list(parts)}}}
  - {{pattern: '\d+\.gate_up', kind: shard-nc, dim: 0, parts: 2}}
  - {{pattern: '\d+\.(out|down)', kind: shard-h}}
"""


PATTERNS = patterns(rows=13, padded_rows=16, parts=(8, 4, 4))
"""Of the golden pipeline."""


def assemble(index: Index) -> dict[str, np.ndarray]:
    """Every replica of every logical tensor, put together from the files; replicas must agree."""
    contents = [np.fromfile(index.root / file.path, dtype=np.uint8) for file in index.files]
    result: dict[str, np.ndarray] = {}
    rows_of = index.shards.by_tensor(len(index.tensors))
    for tensor, rows in zip(index.tensors, rows_of, strict=True):
        kind = np.dtype(NUMPY[tensor.dtype])
        copies: dict[int, np.ndarray] = {}
        filled: dict[int, np.ndarray] = {}
        for row in index.shards.iterate_boxes(rows, len(tensor.shape)):
            last = sum((size - 1) * stride for size, stride in zip(row.box.size, row.strides, strict=True))
            flat = contents[row.file][row.byte_offset : row.byte_offset + (last + 1) * kind.itemsize].copy().view(kind)
            view = np.lib.stride_tricks.as_strided(flat, row.box.size, [s * kind.itemsize for s in row.strides])
            target = copies.setdefault(row.replica, np.zeros(tensor.shape, kind))
            seen = filled.setdefault(row.replica, np.zeros(tensor.shape, np.int64))
            where = tuple(slice(low, high) for low, high in zip(row.box.offset, row.box.end, strict=True))
            target[where] = view
            seen[where] += 1
        assert all((seen == 1).all() for seen in filled.values()), tensor.key
        for copy in copies.values():
            assert (copy == copies[0]).all(), f"copies of {tensor.key} differ"
        result[str(tensor.key)] = copies[0]
    return result


def check_truth(found: Mapping[str, np.ndarray], wanted: Mapping[str, Mapping[str, Any]]) -> None:
    """Check that there are these tensors alone, with these shapes and SHA-256 sums."""
    assert found.keys() == wanted.keys()
    for key, value in wanted.items():
        assert list(found[key].shape) == value["shape"], key
        assert hashlib.sha256(found[key].tobytes()).hexdigest() == value["sha256"], key


def whole(tensors: dict[str, np.ndarray], key: str) -> np.ndarray:
    """A tensor with its vocabulary's padding rows put back."""
    padding = tensors.get(f"{key}#padding")
    return tensors[key] if padding is None else np.concatenate([tensors[key], padding])


def cut(name: str, value: np.ndarray, tp: int, rank: int) -> np.ndarray:
    """The example models' tensor parallelism in words of numpy: what rank `rank` holds."""
    leaf = name.rsplit(".", 1)[-1]
    if name.partition("/")[2].startswith(("embed.", "norm.", "block", "down.bias")):  # AutoTP's
        return value
    if name.endswith("down.weight"):
        return np.split(value, tp, axis=1)[rank]
    if leaf in ("attention_norm", "ffn_norm", "norm"):
        return value
    if leaf in ("out", "down"):
        return np.split(value, tp, axis=1)[rank]
    if leaf == "qkv":  # 4 heads and twice 2 heads of width 2
        return np.concatenate([np.split(part, tp)[rank] for part in np.split(value, [8, 12])])
    if leaf == "gate_up":
        return np.concatenate([np.split(part, tp)[rank] for part in np.split(value, 2)])
    return np.split(value, tp)[rank]


def golden(name: str) -> Path:
    return ROOT / name / STEP


@contextlib.contextmanager
def any_name() -> Iterator[None]:
    """Write names into pickles that the resharder itself never writes: to make hostile files."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(emit, "is_accepted", lambda name: True)
        yield


def edit(folder: Path, name: str, change) -> None:
    """Write a file again with its object changed."""
    file, original = read(folder / name), (folder / name).read_bytes()
    for storage in file.storages.values():
        storage.data = original[storage.file_offset : storage.file_offset + storage.num_bytes]
    change(file.value)
    with any_name():
        layout = lay_out_pt(name.removesuffix(".pt"), file.value)
    content = bytearray(layout.num_bytes)
    for offset, data in layout.fixed:
        content[offset : offset + len(data)] = data
    (folder / name).write_bytes(content)


def refused_but_for_weights(folder: Path, text: str) -> None:
    """Check that a checkpoint gives its weights to safetensors and refuses all else with `text`."""
    index = read_checkpoint(folder, None)
    for refused in (lambda: plan_of(index, Topology(dp=3)), lambda: select_states(index, ())):
        with pytest.raises(UnsupportedError, match=text) as caught:
            refused()
        assert "--states weight takes the weights alone" in caught.value.hint
    weights = read_digests(select_states(index, ("weight",)))
    plan = plan_of(select_states(index, ("weight",)), Topology(), target_format="safetensors")
    assert len(plan.layout.tensors) == len(weights) > 1


OPTIMIZER = "zero_pp_rank_0_mp_rank_{:02d}_optim_states.pt"
MODEL = "mp_rank_{:02d}_model_states.pt"
LAYER = "layer_{:02d}-model_{:02d}-model_states.pt"
