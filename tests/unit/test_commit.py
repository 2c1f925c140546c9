"""COMMIT.json: written last, read with suspicion."""

import json
from pathlib import Path

import pytest

from reshard.commit import Commit, CommittedFile, check_files, file_crc32, read_commit, write_commit
from reshard.contract import COMMIT_FILE
from reshard.errors import CorruptSourceError, UncommittedError
from reshard.topology import Topology


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "weights.pt").write_bytes(b"w" * 1000)
    (tmp_path / "state.pt").write_bytes(b"s" * 10)
    return tmp_path


def commit_of(folder: Path) -> Commit:
    names = ("state.pt", "sub/weights.pt")
    return Commit(
        format="deepspeed",
        step=20,
        samples=640,
        topology=Topology(tp=2, dp=3),
        attempt=1,
        writer="trainer",
        files=tuple(
            CommittedFile(path=name, num_bytes=(folder / name).stat().st_size, crc32=file_crc32(folder / name))
            for name in names
        ),
        data={"seed": 1, "sampleIndex": 640},
        model={"pipeline": {"num_layers": 8}},
        created="2026-01-01T00:00:00Z",
    )


def test_a_written_commit_reads_back_equal_and_leaves_no_draft(folder: Path) -> None:
    commit = commit_of(folder)
    write_commit(folder, commit)
    assert read_commit(folder) == commit
    check_files(folder, commit, crc=True)
    assert sorted(path.name for path in folder.iterdir()) == [COMMIT_FILE, "state.pt", "sub"]
    assert commit.ref(folder).num_bytes == 1010


def test_without_a_marker_there_is_no_checkpoint(folder: Path) -> None:
    with pytest.raises(UncommittedError, match="never completed"):
        read_commit(folder)


def test_damage_to_any_file_is_named_with_expected_and_found(folder: Path) -> None:
    commit = commit_of(folder)
    (folder / "state.pt").unlink()
    (folder / "sub" / "weights.pt").write_bytes(b"w" * 999)
    with pytest.raises(CorruptSourceError) as caught:
        check_files(folder, commit)
    assert len(caught.value.problems) == 2
    assert "1000 bytes were committed, 999 are there" in caught.value.problems[1]


def test_a_flipped_bit_is_found_by_its_crc_alone(folder: Path) -> None:
    commit = commit_of(folder)
    damaged = bytearray((folder / "sub" / "weights.pt").read_bytes())
    damaged[500] ^= 1
    (folder / "sub" / "weights.pt").write_bytes(damaged)
    check_files(folder, commit)
    with pytest.raises(CorruptSourceError, match="1 of 2 files"):
        check_files(folder, commit, crc=True)


@pytest.mark.parametrize(
    "edit",
    [
        {"version": 2},
        {"version": None},
        {"files": "none"},
        {"files": [{"path": "../../etc/passwd", "bytes": 1}]},
        {"files": [{"path": "/etc/passwd", "bytes": 1}]},
        {"files": [{"path": "a", "bytes": "many"}]},
        {"topology": {"tp": 0}},
        {"topology": None},
    ],
    ids=str,
)
def test_a_marker_that_is_not_ours_is_refused(folder: Path, edit: dict) -> None:
    write_commit(folder, commit_of(folder))
    value = json.loads((folder / COMMIT_FILE).read_text())
    (folder / COMMIT_FILE).write_text(json.dumps({**value, **edit}))
    with pytest.raises(CorruptSourceError):
        read_commit(folder)


@pytest.mark.parametrize("keep", [0, 1, 10, 200])
def test_a_truncated_marker_is_refused(folder: Path, keep: int) -> None:
    write_commit(folder, commit_of(folder))
    path = folder / COMMIT_FILE
    path.write_text(path.read_text()[:keep])
    with pytest.raises(CorruptSourceError):
        read_commit(folder)
