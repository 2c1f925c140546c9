"""Folders and archives that were made to harm, and sources that change: a named error, at once, and nothing written."""

import contextlib
import json
import os
import shutil
import socket
import struct
import zipfile
from pathlib import Path

import pytest

from reshard.api import Conversion, RunOptions, convert, plan_of
from reshard.cli.main import main
from reshard.commits.commit import Commit, CommittedFile, check_files, read_commit, write_commit
from reshard.contract import ExitCode
from reshard.errors import CorruptSourceError, ReshardError, UnsupportedError
from reshard.execution.executor import execute
from reshard.formats import read_checkpoint
from reshard.formats.pt.archive import MAX_DIRECTORY_BYTES
from reshard.formats.pt.reader import read
from reshard.storage.durable import file_crc32
from reshard.topology import Topology
from tests.fuzz.guard import check_error, outcome_of, state_of
from tests.fuzz.targets import checkpoints

NAME = "deepspeed-0.19.8/zero2-dp3/step-00000002"
SOURCE, TO = checkpoints()[NAME]
MODEL, SHARD = "mp_rank_00_model_states.pt", "zero_pp_rank_1_mp_rank_00_optim_states.pt"


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    return Path(shutil.copytree(SOURCE, tmp_path / "source"))


def committed(folder: Path) -> Path:
    """The checkpoint with a marker, as the trainer leaves it."""
    files = [
        CommittedFile(path=path.name, num_bytes=path.stat().st_size, crc32=file_crc32(path))
        for path in sorted(folder.iterdir())
    ]
    commit = Commit(
        format="deepspeed", step=2, samples=0, topology=Topology(dp=3, zero=2), attempt=0, writer="trainer", files=files
    )
    write_commit(folder, commit)
    return folder


def refused(folder: Path, mentioned: str, tmp_path: Path, kind: type[ReshardError] = CorruptSourceError) -> None:
    """The conversion ends in the error, at once; the source is as it was, and nothing is left beside it."""
    before = state_of(folder)
    target = tmp_path / "out" / "step-00000002"
    error = outcome_of(
        lambda: convert(Conversion(source=folder, target=target, topology=TO), RunOptions(num_threads=1, sync=False))
    )
    assert isinstance(error, kind), error
    assert mentioned in str(error)
    assert state_of(folder) == before
    assert not target.parent.exists() or not list(target.parent.iterdir())


def replaced(path: Path, how: str) -> None:
    """Something else in the place of a file."""
    aside = path.parent.parent / "aside"
    path.rename(aside)
    if how == "a link":
        path.symlink_to(aside)
    elif how == "a link to itself":
        path.symlink_to(path.name)
    elif how == "a link to nothing":
        path.symlink_to("nowhere")
    elif how == "a link to a device":
        path.symlink_to("/dev/zero")
    elif how == "a pipe":
        os.mkfifo(path)
    elif how == "a folder":
        path.mkdir()
    else:
        here = Path.cwd()
        os.chdir(path.parent)  # names of sockets are short
        try:
            with socket.socket(socket.AF_UNIX) as server:
                server.bind(path.name)
        finally:
            os.chdir(here)


WAYS = ["a link", "a link to itself", "a link to nothing", "a link to a device", "a pipe", "a folder", "a socket"]


@pytest.mark.parametrize("how", WAYS)
@pytest.mark.parametrize("marked", [False, True])
@pytest.mark.parametrize("victim", [MODEL, SHARD])
def test_what_is_no_plain_file_is_refused_and_not_waited_for(how, marked, victim, copy, tmp_path):
    if marked:
        committed(copy)
    replaced(copy / victim, how)
    is_link = how.startswith("a link") and not marked  # what a link leads to may be sound
    refused(copy, victim, tmp_path, UnsupportedError if is_link else CorruptSourceError)


@pytest.mark.parametrize("how", WAYS)
def test_a_marker_that_is_no_plain_file_is_refused_and_not_waited_for(how, copy, tmp_path):
    replaced(committed(copy) / "COMMIT.json", how)
    refused(copy, "COMMIT.json", tmp_path)


@pytest.mark.parametrize("name", sorted(set(checkpoints()) - {NAME}))
@pytest.mark.parametrize("how", ["a pipe", "a link to a device", "a socket"])
def test_no_format_waits_for_what_is_no_file(name, how, tmp_path):
    source, topology = checkpoints()[name]
    folder = Path(shutil.copytree(source, tmp_path / "source"))
    for victim in sorted(path for path in folder.iterdir() if path.is_file())[:3]:
        replaced(victim, how)
        target = tmp_path / "out" / "x"
        wanted = Conversion(source=folder, target=target, topology=topology)
        error = outcome_of(lambda wanted=wanted: convert(wanted, RunOptions(num_threads=1, sync=False)))
        assert isinstance(error, ReshardError)
        assert not target.exists()
        victim.unlink()
        shutil.copy(source / victim.name, victim)
        with contextlib.suppress(FileNotFoundError):
            (tmp_path / "aside").unlink()


def test_the_folder_itself_may_be_a_link(copy, tmp_path):
    (tmp_path / "link").symlink_to(copy)
    convert(
        Conversion(source=tmp_path / "link", target=tmp_path / "out", topology=TO),
        RunOptions(num_threads=1, sync=False),
    )
    assert read_commit(tmp_path / "out").step == 2


def test_a_committed_folder_that_is_a_link_is_refused(tmp_path):
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere/f").write_bytes(b"abc")
    folder = tmp_path / "c"
    folder.mkdir()
    (folder / "sub").symlink_to(tmp_path / "elsewhere")
    commit = Commit(
        format="x", step=1, samples=0, topology=Topology(), attempt=0, writer="x",
        files=[CommittedFile(path="sub/f", num_bytes=3)],
    )  # fmt: skip
    with pytest.raises(CorruptSourceError, match="sub is a link"):
        check_files(folder, commit)


@pytest.mark.parametrize("name", ["../x", "/etc/passwd", "a/../../b", "a//b", "./a", "", "a\0b", "..", "a/."])
def test_a_committed_name_that_leaves_the_folder_is_refused(name, copy):
    path = committed(copy) / "COMMIT.json"
    value = json.loads(path.read_text())
    value["files"][0]["path"] = name
    path.write_text(json.dumps(value))
    with pytest.raises(CorruptSourceError, match="leaves the folder"):
        read_commit(copy)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("step", "7"), ("step", -1), ("step", True), ("samples", 1.5), ("format", None), ("files", {}),
        ("digests", {"a": 1}), ("digests", {"a": "00"}), ("topology", {"tp": "2"}), ("topology", {"tp": True}),
        ("version", True), ("data", []), ("options", {"dtype": 1}), ("created", 5),
    ],
)  # fmt: skip
def test_a_field_of_the_wrong_kind_in_a_marker_is_refused(field, value, copy):
    path = committed(copy) / "COMMIT.json"
    found = json.loads(path.read_text())
    found[field] = value
    path.write_text(json.dumps(found))
    with pytest.raises(CorruptSourceError, match=r"COMMIT\.json"):
        read_commit(copy)


@pytest.mark.parametrize(
    "text", ["[" * 100_000, '{"version": 1, "version": 1}', '{"version": NaN}', "{" * 50, "null", "\xff"]
)
def test_a_marker_that_is_no_object_is_refused(text, copy):
    (copy / "COMMIT.json").write_text(text, encoding="latin-1")
    error = outcome_of(lambda: read_commit(copy))
    assert isinstance(error, CorruptSourceError)


def archive(entries: list[tuple[str, bytes, dict[str, int]]], path: Path, **end: int) -> Path:
    """A zip file whose headers lie as they are told to."""
    out, directory = bytearray(), bytearray()
    for name, payload, lies in entries:
        at, size, method = lies.get("at", len(out)), lies.get("size", len(payload)), lies.get("method", 0)
        packed, flags = lies.get("packed", size), lies.get("flags", 0)
        raw = name.encode()
        out += struct.pack("<4s5H3I2H", b"PK\3\4", 0, flags, method, 0, 0, 0, packed, size, len(raw), 0) + raw + payload
        directory += struct.pack(
            "<4s6H3I5H2I", b"PK\1\2", 0, 0, flags, method, 0, 0, 0, packed, size, len(raw), *(0,) * 5, at
        )
        directory += raw
    size, start = end.get("size", len(directory)), end.get("start", len(out))
    tail = struct.pack("<4s4H2IH", b"PK\5\6", 0, 0, len(entries) & 0xFFFF, len(entries) & 0xFFFF, size, start, 0)
    path.write_bytes(bytes(out + directory) + tail)
    return path


PICKLE = b"\x80\x02}."
BOMBS: dict[str, tuple[list[tuple[str, bytes, dict[str, int]]], dict[str, int], str]] = {
    "a payload of 4 GB that is not there": ([("a/data.pkl", PICKLE, {"size": 0xFFFFFFF0})], {}, "ends at byte"),
    "a compressed entry": ([("a/data.pkl", b"x", {"method": 8, "size": 1 << 30, "packed": 1})], {}, "compressed"),
    "a compressed entry that says stored": ([("a/data.pkl", b"x", {"size": 1 << 30, "packed": 1})], {}, "compressed"),
    "an encrypted entry": ([("a/data.pkl", PICKLE, {"flags": 1})], {}, "encrypted"),
    "two entries on one payload": ([("a/data.pkl", PICKLE, {}), ("a/data/0", PICKLE, {"at": 0})], {}, "overlap"),
    "a name twice": ([("a/data.pkl", PICKLE, {}), ("a/data.pkl", PICKLE, {})], {}, "twice"),
    "a name outside": ([("a/data.pkl", PICKLE, {}), ("../../x", b"", {})], {}, "outside"),
    "an entry of no archive": ([("a/data.pkl", PICKLE, {"at": 7})], {}, "no local header"),
    "no pickle": ([("a/data/0", b"1234", {})], {}, "no entry data.pkl"),
    "a directory outside": ([("a/data.pkl", PICKLE, {})], {"size": 0xFFFFFFF0}, "zip directory"),
    "a directory before the file": ([("a/data.pkl", PICKLE, {})], {"start": 0xFFFFFFF0}, "no local header"),
}


@pytest.mark.parametrize("name", BOMBS)
def test_a_zip_bomb_is_refused(name, tmp_path):
    entries, end, message = BOMBS[name]
    path = archive(entries, tmp_path / "bomb.pt", **end)
    error = outcome_of(lambda: read(path))
    assert isinstance(error, CorruptSourceError | UnsupportedError)
    assert message in str(error)
    assert "bomb.pt" in str(error)


def test_a_directory_of_gigabytes_in_a_file_of_holes_is_refused(tmp_path):
    """A sparse file costs an attacker nothing; reading its directory would cost us all memory."""
    path, size = tmp_path / "sparse.pt", 8 << 30
    with open(path, "wb") as stream:
        stream.write(b"PK\3\4")
        stream.seek(size)
        stream.write(struct.pack("<4sQ2H2I4Q", b"PK\6\6", 44, 0, 45, 0, 0, 1, 1, size - 64, 64))
        stream.write(struct.pack("<4sIQI", b"PK\6\7", 0, size, 1))
        stream.write(struct.pack("<4s4H2IH", b"PK\5\6", 0, 0, 1, 1, 0xFFFFFFFF, 0xFFFFFFFF, 0))
    error = outcome_of(lambda: read(path))
    assert isinstance(error, CorruptSourceError)
    assert f"at most {MAX_DIRECTORY_BYTES} are read" in str(error)


def test_a_real_compressed_archive_is_refused(tmp_path):
    with zipfile.ZipFile(tmp_path / "c.pt", "w", zipfile.ZIP_DEFLATED) as stream:
        stream.writestr("a/data.pkl", b"\0" * 1_000_000)
    with pytest.raises(UnsupportedError, match="compressed"):
        read(tmp_path / "c.pt")


# Files that are mixed, and files that change.


def test_a_missing_rank_and_a_stale_one_are_named(copy, tmp_path):
    (copy / SHARD).rename(copy / SHARD.replace("rank_1", "rank_5"))
    before = state_of(copy)
    error = outcome_of(lambda: read_checkpoint(copy, None))
    assert f"{SHARD} is missing" in str(error)
    assert "zero_pp_rank_5_mp_rank_00_optim_states.pt belongs to no rank" in str(error)
    assert state_of(copy) == before


def test_a_file_of_another_save_in_a_committed_folder_is_named(copy, tmp_path):
    """Of the same size, so that only its checksum tells; reading again the whole folder is what `verify` is for."""
    committed(copy)
    content = bytearray((copy / SHARD).read_bytes())
    content[len(content) // 2] ^= 1
    (copy / SHARD).write_bytes(content)
    with pytest.raises(CorruptSourceError, match=f"{SHARD}: CRC-32"):
        check_files(copy, read_commit(copy), crc=True)
    assert main(["verify", str(copy)]) == ExitCode.SOURCE_INVALID


@pytest.mark.parametrize("change", ["shrinks", "is emptied", "vanishes", "is replaced by a pipe", "is overwritten"])
def test_a_source_that_changes_between_plan_and_run_is_refused(change, copy, tmp_path):
    plan = plan_of(read_checkpoint(copy, None), TO, num_threads=1)
    victim, target = copy / SHARD, tmp_path / "target"
    target.mkdir()
    if change == "shrinks":
        os.truncate(victim, victim.stat().st_size // 2)
    elif change == "is emptied":
        os.truncate(victim, 0)
    elif change == "vanishes":
        victim.unlink()
    elif change == "is replaced by a pipe":
        victim.unlink()
        os.mkfifo(victim)
    else:
        victim.write_bytes(bytes(victim.stat().st_size))
    error = outcome_of(lambda: execute(plan, target, sync=False))
    assert isinstance(error, CorruptSourceError)
    assert SHARD in str(error)


def test_a_file_that_shrinks_while_it_is_read_is_refused(copy, tmp_path, monkeypatch):
    """After its metadata, and after its first tensor."""
    victim, reads = copy / SHARD, []
    real = os.preadv

    def shrink(descriptor, buffers, position):
        if Path(f"/proc/self/fd/{descriptor}").samefile(victim):
            reads.append(position)
            if len(reads) == 2:
                os.truncate(victim, position)
        return real(descriptor, buffers, position)

    monkeypatch.setattr(os, "preadv", shrink)
    target = tmp_path / "out" / "x"
    with pytest.raises(CorruptSourceError, match=rf"{SHARD}: ends at byte \d+.*truncated") as caught:
        convert(Conversion(source=copy, target=target, topology=TO), RunOptions(num_threads=1, sync=False))
    check_error(caught.value)
    assert len(reads) >= 2
    assert not list(target.parent.iterdir())


@pytest.mark.parametrize("damage", ["bomb", "pipe", "marker"])
def test_the_command_ends_with_the_code_of_the_error_and_names_it(damage, copy, tmp_path, capsys):
    if damage == "bomb":
        archive(BOMBS["two entries on one payload"][0], copy / MODEL)
    elif damage == "pipe":
        replaced(copy / MODEL, "a pipe")
    else:
        (copy / "COMMIT.json").write_text("{}")
    code = main(["run", str(copy), str(tmp_path / "out"), "--to", str(TO)])
    assert code == ExitCode.SOURCE_INVALID
    assert (MODEL if damage != "marker" else "COMMIT.json") in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
