"""A checkpoint that does not say how its tensors are cut, and a file of patterns that does."""

import shutil
from pathlib import Path

import pytest

from reshard.api import plan_of, reshard
from reshard.errors import UnsupportedError
from reshard.execution.executor import execute
from reshard.formats.deepspeed import FORMAT
from reshard.formats.deepspeed.reading.reader import read_index
from reshard.formats.deepspeed.tensor_parallel.pattern_file import load
from reshard.formats.pt.reader import read
from reshard.topology import Topology
from tests.golden.command import Answer
from tests.golden.files import MODEL, PATTERNS, STEP, assemble, edit, golden


@pytest.fixture
def told(tmp_path):
    path = tmp_path / "patterns.yaml"
    path.write_text(PATTERNS)
    return load(path)


def stripped(name: str, tmp_path: Path) -> Path:
    folder = Path(shutil.copytree(golden(name), tmp_path / "source" / STEP))
    for path in folder.glob("mp_rank_*_model_states.pt"):
        edit(folder, path.name, lambda value: value.pop("universal_checkpoint_info"))
    return folder


@pytest.mark.parametrize(("name", "target"), [("pipeline-tp2-pp2", "dp=3"), ("pipeline-dp2", "tp=2,pp=2")])
def test_values_are_those_that_the_description_in_the_files_gives(tmp_path, told, name, target):
    folder = stripped(name, tmp_path)
    with pytest.raises(UnsupportedError, match="how ten"):
        plan_of(FORMAT.read(folder, None), Topology.parse(target))
    index = read_index(folder, None, told)
    expected = assemble(FORMAT.read(golden(name), None))
    found = assemble(index)
    assert found.keys() == expected.keys()
    assert all((value == found[key]).all() for key, value in expected.items())
    there = tmp_path / "there"
    there.mkdir()
    execute(plan_of(index, Topology.parse(target)), there, sync=False)
    after = assemble(FORMAT.read(there, None))  # the target says by itself how it is cut
    assert all((value == after[key]).all() for key, value in expected.items())
    assert read(there / MODEL.format(0)).value["universal_checkpoint_info"]["original_vocab_size"] == 13


def test_parameter_that_no_pattern_matches_is_refused(tmp_path, told):
    told = {**told, "parameter_with_row_parallelism_patterns": []}
    with pytest.raises(UnsupportedError, match=r"1.out: no pattern matches it"):
        read_index(stripped("pipeline-tp2-pp2", tmp_path), None, told)


def test_a_committed_checkpoint_is_verified_when_a_file_tells_its_padding_rows(tmp_path, capsys):
    """Its commit knows the vocabulary as one tensor: the checksums of its files prove it all the same."""
    folder, target = stripped("pipeline-dp2", tmp_path), tmp_path / "committed" / STEP
    (tmp_path / "patterns.yaml").write_text(PATTERNS)
    reshard(folder, target, Topology(dp=2, zero=1))
    answer = Answer(capsys)
    answer("verify", target, "--patterns", tmp_path / "patterns.yaml")
    answer("run", target, tmp_path / "tp2", "--to", "tp=2", "--patterns", tmp_path / "patterns.yaml")
    (path,) = target.glob("layer_01-*.pt")
    path.write_bytes(path.read_bytes()[:-200] + bytes([path.read_bytes()[-200] ^ 1]) + path.read_bytes()[-199:])
    assert "layer_01" in answer("verify", target, "--patterns", tmp_path / "patterns.yaml", code=10)
