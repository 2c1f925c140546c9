"""Partial parameters: copies that tensor-parallel ranks have trained by themselves become their mean."""

import dataclasses
import shutil
from pathlib import Path

import numpy as np
import pytest

from reshard import api
from reshard.api import Conversion, RunOptions, convert, index_of, plan_of
from reshard.commits.staging import Sharing
from reshard.errors import CorruptSourceError, ReshardError, UnsupportedError, VerificationError
from reshard.execution.executor import Mover
from reshard.execution.journal import from_json, to_json
from reshard.execution.unit_records import UnitRecord
from reshard.execution.verify import read_digests
from reshard.formats import read_checkpoint
from reshard.formats.pt.reader import read
from reshard.tensors.layout import Index, TensorKey
from reshard.topology import Topology
from reshard.virtual import conversion as virtual
from reshard.virtual.auto_mode import Loader
from tests.golden import without_checksums
from tests.golden.command import Answer
from tests.golden.files import LAYER, MODEL, OPTIMIZER, assemble, edit, golden
from tests.golden.partial import NORMS, STATES, declare, diverge, flip, names_of, partial

IS_NORM = ("norm",)


def copies(index: Index) -> dict[str, dict[int, np.ndarray]]:
    """All copies of the norms' tensors, by `state/name` and copy, as float32."""
    contents = [np.fromfile(index.root / file.path, dtype=np.uint8) for file in index.files]
    found: dict[str, dict[int, np.ndarray]] = {}
    for number, rows in enumerate(index.shards.by_tensor(len(index.tensors))):
        tensor = index.tensors[number]
        if not tensor.key.name.endswith("norm"):
            continue
        for row in index.shards.iterate_boxes(rows, 1):
            values = contents[row.file][row.byte_offset : row.byte_offset + 4 * row.box.size[0]].view(np.float32)
            whole = found.setdefault(str(tensor.key), {}).setdefault(row.replica, np.zeros(tensor.shape, np.float32))
            whole[row.box.offset[0] : row.box.end[0]] = values
    return found


def means(folder: Path) -> dict[str, np.ndarray]:
    """What the target must hold of the norms: sum in the order of the ranks, then division, in float32."""
    found = copies(read_checkpoint(folder, None))
    return {key: (own[0] + own[1]) / np.float32(2) for key, own in found.items()}


def run(source: Path, target: Path, to: str = "tp=1", **options: object) -> str:
    conversion = Conversion(source=source, target=target, topology=Topology.parse(to), **options)
    return convert(conversion, RunOptions(reread=True)).message


def assert_means(target: Path, expected: dict[str, np.ndarray]) -> None:
    held = copies(read_checkpoint(target, None))
    assert held.keys() == expected.keys()
    for key, by_copy in held.items():
        for copy in by_copy.values():
            assert np.array_equal(copy.view(np.uint32), expected[key].view(np.uint32)), key


@pytest.mark.parametrize("to", ["tp=1", "tp=2,pp=1,dp=2", "tp=1,pp=2,dp=2", "tp=4,dp=1", "tp=2,pp=2,zero=0"])
def test_copies_that_differ_become_their_mean_in_every_copy(tmp_path, to):
    source = partial(tmp_path / "source")
    message = run(source, tmp_path / "out", to)
    assert_means(tmp_path / "out", means(source))
    assert "12 tensors are means of copies that differ between tensor-parallel ranks by up to" in message or "20" in message
