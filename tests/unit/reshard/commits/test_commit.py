"""COMMIT.json: written last, read with suspicion."""

import dataclasses
import json
from pathlib import Path

import pytest

from reshard.checksums.self_checksum import with_self_checksum
from reshard.commits.commit import (
    Commit,
    CommittedFile,
    check_files,
    is_vacant,
    read_commit,
    taken_error,
    write_commit,
)
from reshard.contract import COMMIT_FILE
from reshard.errors import CorruptSourceError, UncommittedError, UnsupportedError
from reshard.storage.durable import file_crc32
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


def test_a_marker_of_a_newer_version_is_not_called_damaged(folder: Path) -> None:
    value = {**commit_of(folder).to_dict(), "version": 2}
    (folder / COMMIT_FILE).write_bytes(with_self_checksum(value))
    with pytest.raises(UnsupportedError, match="version 2: this program reads 1"):
        read_commit(folder)


@pytest.mark.parametrize("keep", [0, 1, 10, 200])
def test_a_truncated_marker_is_refused(folder: Path, keep: int) -> None:
    write_commit(folder, commit_of(folder))
    path = folder / COMMIT_FILE
    path.write_text(path.read_text()[:keep])
    with pytest.raises(CorruptSourceError):
        read_commit(folder)


def test_every_flipped_bit_of_a_marker_is_a_named_error(folder: Path) -> None:
    write_commit(folder, commit_of(folder))
    path = folder / COMMIT_FILE
    content = path.read_bytes()
    for bit in range(8 * len(content)):
        changed = bytearray(content)
        changed[bit // 8] ^= 1 << bit % 8
        path.write_bytes(changed)
        with pytest.raises(CorruptSourceError, match=r"COMMIT\.json"):
            read_commit(folder)


def test_a_marker_of_an_older_writer_states_no_checksum_and_is_read(folder: Path) -> None:
    commit = commit_of(folder)
    (folder / COMMIT_FILE).write_text(json.dumps(commit.to_dict(), indent=1))
    assert read_commit(folder) == commit


def test_an_edited_marker_is_refused_until_its_checksum_is_removed(folder: Path) -> None:
    write_commit(folder, commit_of(folder))
    path = folder / COMMIT_FILE
    path.write_text(path.read_text().replace('"step": 20', '"step": 21'))
    with pytest.raises(CorruptSourceError, match="damaged, or edited") as caught:
        read_commit(folder)
    assert "remove its field checksum" in caught.value.hint
    path.write_text("\n".join(line for line in path.read_text().splitlines() if '"checksum"' not in line))
    assert read_commit(folder).step == 21


@pytest.mark.parametrize("text", ["crc32:00000000", '\n "checksum": "crc32:00000000', "crc32:"])
def test_texts_that_look_like_the_checksum_do_not_disturb_it(folder: Path, text: str) -> None:
    commit = dataclasses.replace(commit_of(folder), data={"note": text, "notes": [text], "checksum": text})
    write_commit(folder, commit)
    assert read_commit(folder) == commit


def test_a_target_that_is_a_link_to_an_empty_folder_is_refused_as_a_link(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    link = tmp_path / "link"
    link.symlink_to("empty")
    assert not is_vacant(link)
    error = taken_error(link)
    assert (str(error.path), error.hint) == (str(link), "name the folder itself")
    assert "is a link to empty: expected a folder to make, or an empty one" in str(error)
