"""Settings and virtual commits are proved too, although they take parts of a committed checkpoint only."""

import json
import re
from pathlib import Path

import pytest

from reshard.cli.main import main
from reshard.contract import ExitCode
from reshard.errors import CorruptSourceError
from reshard.virtual import load, manifest
from reshard.virtual.conversion import prepare
from reshard.virtual.load import Ranges
from reshard.virtual.manifest import Manifest
from tests.golden.command import PIPELINE, ZERO2, ZERO3, Answer
from tests.golden.test_source_checksums import committed, flip, wanted


def damage_learning_rates(folder: Path) -> list[Path]:
    """Change a bit of the learning rate in each optimizer's pickle, which every parser takes for another number."""
    paths = sorted(folder.glob("*optim_states.pt"))
    for path in paths:
        found = re.search(rb"lr(q.|r....)?G", path.read_bytes(), re.DOTALL)  # a key, its memo, and a float of 8 bytes
        assert found is not None
        flip(path, found.end() + 3)
    return paths


@pytest.mark.parametrize("without_crc", [False, True])
def test_damaged_settings_of_a_committed_template_are_refused(tmp_path: Path, say: Answer, without_crc: bool) -> None:
    like = committed(ZERO2, tmp_path / "like", without_crc=without_crc)
    words = ("--to", "dp=2,zero=2", "--like", like)
    say("run", ZERO2, tmp_path / "intact", *words)
    damaged = damage_learning_rates(like)
    found = say.json("run", ZERO2, tmp_path / "out", *words, code=ExitCode.SOURCE_INVALID)
    assert any(path.name in json.dumps(found["error"]) for path in damaged)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("source", [ZERO2, ZERO3], ids=["zero2", "zero3"])
@pytest.mark.parametrize("without_crc", [False, True])
def test_damaged_settings_of_a_committed_source_get_no_virtual_commit(
    tmp_path: Path, say: Answer, source: Path, without_crc: bool
) -> None:
    folder = committed(source, tmp_path / "source", without_crc=without_crc)
    words = ("--to", "dp=2", "--mode", "virtual")
    say("run", folder, tmp_path / "intact", *words)
    damage_learning_rates(folder)
    say.json("run", folder, tmp_path / "out", *words, code=ExitCode.SOURCE_INVALID)
    assert not (tmp_path / "out").exists()


def loaded(decoded: Manifest, folder: Path, nodes: list[list[int]]) -> list[Ranges]:
    """Return the ranges that the nodes read when they load a virtual commit."""
    ranges: list[Ranges] = []
    for number, ranks in enumerate(nodes):
        (folder / f"node{number}").mkdir()
        ranges.append(load.load_files(decoded, ranks, folder / f"node{number}").ranges)
    return ranges


@pytest.mark.parametrize("nodes", [[[0, 1]], [[0], [1]], [[0, 1], [1]], [[0]]], ids=str)
def test_a_file_that_only_the_commit_proves_is_proved_however_little_of_it_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, nodes: list[list[int]]
) -> None:
    monkeypatch.setattr(load, "LARGEST_PADDING_BYTES", 0)
    source = committed(ZERO2, tmp_path / "source", without_crc=True)
    prepare(wanted(source, tmp_path / "virtual", "dp=2"))
    decoded = manifest.decode(tmp_path / "virtual")
    files = decoded.plan.index.files
    ranges = loaded(decoded, tmp_path, nodes)
    proof = load.prove(files, ranges, source)
    assert proof.open == 0
    assert proof.proved == len({number for own in ranges for number in own})
    damaged = damage_learning_rates(source)
    with pytest.raises(CorruptSourceError, match="damaged") as caught:
        load.prove(files, ranges, source)
    assert any(path.name in str(caught.value) for path in damaged)


@pytest.mark.parametrize(("source", "is_told"), [(PIPELINE, True), (ZERO2, False)], ids=["copies", "none"])
def test_a_virtual_commit_tells_that_copies_are_not_compared(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], source: Path, is_told: bool
) -> None:
    assert main(["run", str(source), str(tmp_path / "out"), "--to", "tp=1,pp=1,dp=2", "--mode", "virtual"]) == 0
    assert ("are not compared in a virtual commit" in capsys.readouterr().err) is is_told
