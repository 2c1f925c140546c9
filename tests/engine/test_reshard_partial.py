"""Partial parameters of a real DeepSpeed run: every tensor-parallel rank trains norms of its own, and declares them.

DeepSpeed's own `ds_to_universal` says what the mean is, bit by bit; training goes on from the native conversion as it
does from DeepSpeed's universal checkpoint.
"""

import dataclasses
import types
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest

from reshard.api import Conversion, RunOptions, convert, index_of
from reshard.execution.verify import read_digests
from reshard.formats import read_checkpoint
from reshard.topology import Topology
from tests.engine.reshard_run import folder_of, launch, save_all
from tests.golden import without_checksums
from tests.golden.files import assemble

pytestmark = [
    pytest.mark.engine,
    pytest.mark.timeout(600),
    pytest.mark.skipif(find_spec("deepspeed") is None, reason="needs DeepSpeed: make setup"),
]

CASE = {"model": "pipeline", "topology": "tp=2,zero=1", "partial": True, "size": "tiny"}
SOURCES = {"fp32": CASE, "bf16": {**CASE, "bf16": True}}
STATES = ("fp32", "exp_avg", "exp_avg_sq")
UNIVERSAL_RANK = Path(__file__).with_name("universal_rank.py")


def deepspeeds_own(source: Path, target: Path) -> Path:
    from deepspeed.checkpoint import ds_to_universal

    options = types.SimpleNamespace(
        input_folder=str(source), output_folder=str(target), num_extract_workers=1, num_merge_workers=1,
        keep_temp_folder=False, strict=True, inject_missing_state=False,
    )  # fmt: skip
    ds_to_universal.main(options)
    return target


@pytest.fixture(scope="module")
def converted(tmp_path_factory) -> dict[str, tuple[Path, Path, Path, str]]:
    """Source, native conversion to tp=1, DeepSpeed's universal checkpoint, and the message of the conversion."""
    root = tmp_path_factory.mktemp("partial")
    save_all(root, SOURCES)
    found = {}
    for name in SOURCES:
        source, native = folder_of(root, name), folder_of(root / "native", name)
        wanted = Conversion(source=source, target=native, topology=Topology.parse("tp=1,zero=1"))
        message = convert(wanted, RunOptions(reread=True)).message
        own = deepspeeds_own(source, folder_of(root / "universal", name))
        found[name] = (source, native, own, message)
    return found


@pytest.mark.parametrize("name", SOURCES)
def test_the_means_are_those_of_ds_to_universal_bit_by_bit(name, converted):
    import torch

    source, native, own, message = converted[name]
    assert "means of copies that differ between tensor-parallel ranks by up to" in message
    told = torch.load(native / "mp_rank_00_model_states.pt", weights_only=False)
    (optimizer_file,) = native.glob("*_optim_states.pt")
    state = torch.load(optimizer_file, weights_only=False)["optimizer_state_dict"]
    base = state["base_optimizer_state"]["state"]
    compared = 0
    for group, shapes in enumerate(told["param_shapes"]):
        flats = {"fp32": state["single_partition_of_fp32_groups"][group], **base[group]}
        start = 0
        for param, shape in shapes.items():
            for key in STATES:
                whole = torch.load(own / "zero" / param / f"{key}.pt", weights_only=False)["param"]
                value = flats[key][start : start + shape.numel()].view(shape)[: len(whole)]
                pair = (tensor.detach().contiguous().numpy().view(np.uint32) for tensor in (value, whole))
                assert np.array_equal(*pair), (key, param)
                compared += "norm" in param
            start += shape.numel()
    assert compared == 3 * 5
    assert read_digests(read_checkpoint(source, None)) == read_digests(read_checkpoint(native, None))


@pytest.mark.parametrize("name", SOURCES)
def test_weights_are_the_masters_mean_rounded(name, converted):
    import torch

    _, native, own, _ = converted[name]
    for layer in native.glob("layer_*.pt"):
        number = str(int(layer.name[6:8]))
        for leaf, weight in torch.load(layer, weights_only=False).items():
            if "norm" in leaf:
                master = torch.load(own / "zero" / f"{number}.{leaf}" / "fp32.pt", weights_only=False)["param"]
                assert torch.equal(master.to(weight.dtype), weight), leaf


def test_training_goes_on_as_from_deepspeeds_universal_checkpoint(converted, tmp_path):
    source, native, own, _ = converted["fp32"]
    run = {**CASE, "topology": "tp=1,zero=1", "steps": 3}
    ours = launch([{**run, "name": "native", "load": str(native)}])["native"]
    theirs = launch([{**run, "name": "universal", "load": str(own)}], UNIVERSAL_RANK)["universal"]
    assert ours == pytest.approx(theirs, abs=1e-6, rel=0)
    assert all(np.isfinite(ours))
    cut = tmp_path / "step-00000002"
    convert(Conversion(source=source, target=cut, topology=Topology.parse("tp=2,dp=2,zero=1")), RunOptions())
    again = launch([{**CASE, "topology": "tp=2,dp=2,zero=1", "steps": 3, "name": "cut", "load": str(cut)}])["cut"]
    assert again == pytest.approx(ours, abs=1e-6, rel=0)


PATTERNS = r"""
version: 1
rules:
  - {pattern: 'embed\.weight', kind: replicate}
  - {pattern: 'norm\.(weight|bias)', kind: average}
  - {pattern: 'up\.(weight|bias)', kind: shard-v}
  - {pattern: 'down\.weight', kind: shard-h}
  - {pattern: 'down\.bias', kind: replicate}
"""


def test_zero3_partitions_of_copies_have_a_mean(tmp_path):
    """AutoTP keeps norms equal, so one rank's copies are changed in its files, which then state no checksums."""
    saved = tmp_path / "saved" / "step-00000002"
    run = {"model": "cut", "inner": 46, "topology": "tp=2,dp=2,zero=3", "size": "tiny"}
    launch([{**run, "name": "zero3", "steps": 2, "save_at": 2, "save": str(saved)}])
    source = without_checksums.copied(saved, tmp_path)
    patterns = tmp_path / "patterns.yaml"
    patterns.write_text(PATTERNS)
    index = index_of(source, patterns=patterns)
    expected = {}
    for number, rows in enumerate(index.shards.by_tensor(len(index.tensors))):
        tensor = index.tensors[number]
        if not tensor.key.name.startswith("norm."):
            continue
        assert index.averaged[tensor.key] == 2
        copies = np.zeros((2, *tensor.shape), np.float32)
        for row in index.shards.iterate_boxes(rows, len(tensor.shape)):
            path, size = source / index.files[row.file].path, row.box.num_elements
            values = np.fromfile(path, np.float32, size, offset=row.byte_offset)
            if row.replica == 1:
                values = (values * np.float32(1.01) + np.float32(0.003)).astype(np.float32)
                with open(path, "r+b") as file:
                    file.seek(row.byte_offset)
                    file.write(values.tobytes())
            copies[row.replica, row.box.offset[0] : row.box.end[0]] = values
        expected[str(tensor.key)] = (copies[0] + copies[1]) / np.float32(2)
    assert len(expected) == 2 * len(STATES)
    wanted = Conversion(source=source, target=tmp_path / "out", topology=Topology.parse("tp=1,dp=3,zero=1"))
    message = convert(dataclasses.replace(wanted, patterns=patterns), RunOptions(reread=True)).message
    assert "6 tensors are means of copies" in message
    held = assemble(read_checkpoint(tmp_path / "out", None))
    for key, mean in expected.items():
        assert np.array_equal(held[key], mean.view(np.uint32)), key
        if key.startswith("fp32/"):
            assert np.array_equal(held[key.replace("fp32", "weight")], mean.view(np.uint32)), key
