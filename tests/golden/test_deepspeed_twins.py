"""Files of alike ranks are read, and laid out, once; what comes of it is what comes of each of them alone."""

import dataclasses
import shutil
import zipfile
from pathlib import Path

import pytest

from reshard.api import index_of, plan_of
from reshard.errors import CorruptSourceError, ReshardError
from reshard.formats.deepspeed.writing import rank_copies
from reshard.formats.deepspeed.writing.rank_copies import RankCopies
from reshard.formats.pt import equal_files
from reshard.formats.pt.objects import Storage
from reshard.formats.pt.reader import PtFile, read
from reshard.formats.pt.writer import PickledObject, lay_out_pt, pickle_object
from reshard.topology import Topology
from tests.golden.files import TARGETS, golden


def described(value: object, storages: dict[str, Storage]) -> str:
    """All of an object tree, with storages by their key."""
    return repr((value, storages))


def count_twins(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Paths of files that are found to be like one before."""
    found: list[str] = []
    real = equal_files._match_file

    def counted(file, path, known) -> PtFile | None:
        twin = real(file, path, known)
        found.extend([path] if twin is not None else [])
        return twin

    monkeypatch.setattr(equal_files, "_match_file", counted)
    return found


@pytest.mark.parametrize("name", TARGETS)
def test_a_file_is_read_as_it_is_alone(name: str) -> None:
    reader = equal_files.EqualFileReader()
    for path in sorted(golden(name).glob("*.pt")):
        together, alone = reader.read(path), read(path)
        assert described(together.value, together.storages) == described(alone.value, alone.storages)
        assert (together.path, together.num_bytes) == (alone.path, alone.num_bytes)
        mine = {id(storage) for storage in together.storages.values()}
        assert set(storages_in(together.value)) <= mine


def storages_in(value: object) -> list[int]:
    """Identities of the storages that tensors of a tree look at."""
    if dataclasses.is_dataclass(value) and hasattr(value, "storage"):
        return [id(value.storage)]
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else ()
    return [found for part in parts for found in storages_in(part)]


@pytest.mark.parametrize(("name", "expected"), [("zero3-dp3", 3), ("pipeline-tp2-pp2", 9), ("zero2-dp3", 0)])
def test_files_of_the_framework_are_found_to_be_alike(
    name: str, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = count_twins(monkeypatch)
    reader = equal_files.EqualFileReader()
    for path in sorted(golden(name).glob("*.pt")):
        reader.read(path)
    assert len(found) == expected


def test_what_alike_files_share_is_the_same_object() -> None:
    reader = equal_files.EqualFileReader()
    first, second = (
        reader.read(golden("zero3-dp3") / f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt") for rank in (1, 2)
    )
    assert first.value is not second.value
    assert first.value["ds_config"] is second.value["ds_config"]
    sums = [[storage.crc32 for storage in file.storages.values()] for file in (first, second)]
    assert sums[0] != sums[1]


def positions(path: Path) -> dict[str, list[int]]:
    """Bytes of a file that are not of a tensor, by what they are of."""
    with zipfile.ZipFile(path) as archive:
        start = archive.start_dir
        pickle = archive.getinfo("/".join((archive.namelist()[0].partition("/")[0], "data.pkl")))
    first = pickle.header_offset + 30 + int.from_bytes(path.read_bytes()[28:30], "little") + len(pickle.filename)
    return {
        "pickle": list(range(first, first + pickle.file_size, 97)),
        "directory": list(range(start, path.stat().st_size, 7)),
        "first header": list(range(0, first, 3)),
    }


@pytest.mark.parametrize("part", ["pickle", "directory", "first header"])
def test_a_file_that_differs_elsewhere_is_not_taken_for_alike(part: str, tmp_path: Path) -> None:
    source = golden("zero3-dp3")
    one, other = (source / f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt" for rank in (1, 2))
    reader = equal_files.EqualFileReader()
    reader.read(one)
    victim = tmp_path / other.name
    for position in positions(other)[part]:
        content = bytearray(other.read_bytes())
        content[position] ^= 0x11
        victim.write_bytes(content)
        assert said(reader.read, victim) == said(read, victim), f"byte {position}"
        reader.read(one)


@pytest.mark.parametrize("unusual", ["a comment", "bytes before", "another order"])
def test_an_unusual_archive_is_read_as_it_is_alone(unusual: str, tmp_path: Path) -> None:
    reader = equal_files.EqualFileReader()
    for rank in (1, 2):
        path = tmp_path / f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"
        path.write_bytes((golden("zero3-dp3") / path.name).read_bytes())
        if unusual == "a comment":
            with zipfile.ZipFile(path, "a") as archive:
                archive.comment = b"PK\x05\x06 and more"
        elif unusual == "bytes before":
            path.write_bytes(b"PK\x03\x04" + path.read_bytes())
        else:
            with zipfile.ZipFile(path) as archive:
                members = [(info.filename, archive.read(info)) for info in archive.infolist()]
            with zipfile.ZipFile(path, "w") as archive:
                for name, content in reversed(members):
                    archive.writestr(name, content)
        assert said(reader.read, path) == said(read, path)


def said(reading, path: Path) -> str:
    try:
        found = reading(path)
    except ReshardError as error:
        return f"{type(error).__name__}: {error}"
    return described(found.value, found.storages)


def test_ranks_whose_names_are_of_another_length_get_the_same_content(tmp_path: Path) -> None:
    plan = plan_of(index_of(golden("zero3-dp3")), Topology.parse("dp=12,zero=3"), num_threads=1)
    files = {file.path: file for file in plan.layout.files}
    values = {}
    for path, file in files.items():
        content = bytearray(file.num_bytes)
        for position, piece in file.fixed:
            content[position : position + len(piece)] = piece
        (tmp_path / path).write_bytes(content)
        stem = path.removesuffix(".pt")
        with zipfile.ZipFile(tmp_path / path) as archive:
            assert all(name.startswith(f"{stem}/") for name in archive.namelist())
        values[path] = read(tmp_path / path)
    for rank in range(4, 12):
        for kind in ("model", "optim"):
            one, other = (values[f"zero_pp_rank_{at}_mp_rank_00_{kind}_states.pt"] for at in (3, rank))
            assert repr(one.value["ds_config"]) == repr(other.value["ds_config"])
            assert list(one.storages) == list(other.storages)


def lay_out_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let every file be made by itself."""

    def add(self, name, _sources, make, _facts=()):
        value, result = make()
        return self._target.add_file(name, value), result

    monkeypatch.setattr(RankCopies, "add", add)


def count_pickles(monkeypatch: pytest.MonkeyPatch) -> list[None]:
    """One item for each optimizer file that is pickled."""
    pickled: list[None] = []

    def pickle(value: object) -> PickledObject:
        pickled.append(None)
        return pickle_object(value)

    monkeypatch.setattr(rank_copies, "pickle_object", pickle)
    return pickled


@pytest.mark.parametrize(
    ("name", "target", "num_pickles"),
    [
        ("pipeline-tp2-pp2", "tp=2,pp=2,dp=16", 16),
        ("pipeline-tp2-pp2", "tp=2,pp=1,dp=9", 9),
        ("megatron-tp2-pp2", "tp=2,pp=1,dp=16", 16),
        ("zero2-dp3", "dp=64,zero=2", 12),
        ("zero2-dp3-round-robin", "dp=64,zero=2", 12),
        ("bf16-optimizer-dp2", "dp=64", 13),
        ("muon-zero2-dp3", "dp=64,zero=2", 14),
        ("autoep-tp2-dp2-ep2", "tp=2,dp=4,ep=2", 8),
        ("experts-dp4-ep2", "dp=6,ep=2,zero=2", 6),
        ("zero0-dp2", "dp=64,zero=1", 64),
        ("zero3-dp3", "dp=64,zero=1", 12),
    ],
)
def test_files_that_share_a_pickle_are_what_each_of_them_is_alone(
    name: str, target: str, num_pickles: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    index, topology = index_of(golden(name)), Topology.parse(target)
    with monkeypatch.context() as context:
        pickled = count_pickles(context)
        together = plan_of(index, topology, num_threads=1)
        assert len(pickled) == num_pickles
    lay_out_alone(monkeypatch)
    alone = plan_of(index, topology, num_threads=1)
    assert together.layout.files == alone.layout.files
    assert together.layout.tensors == alone.layout.tensors
    for column in dataclasses.fields(together.layout.shards):
        one, other = (getattr(plan.layout.shards, column.name) for plan in (together, alone))
        assert (one == other).all(), column.name
    assert [column.tolist() for column in together.layout.zeros] == [column.tolist() for column in alone.layout.zeros]
    assert together.fingerprint == alone.fingerprint


def test_a_stencil_with_another_name_is_the_file_of_that_name() -> None:
    value = {"a": [1, 2.5], "name": "rank_1"}
    layout = lay_out_pt("rank_1", value)
    assert layout.with_stem("rank_7").fixed == lay_out_pt("rank_7", value).fixed
    assert layout.with_stem("rank_7").fixed != layout.fixed
    assert layout.fixed[0] == next(iter(layout.fixed))
    with pytest.raises(ValueError, match="a text of"):
        list(layout.with_stem("rank_17").fixed)


def test_a_rank_that_lacks_elements_is_named(tmp_path: Path) -> None:
    folder = tmp_path / "step-00000002"
    shutil.copytree(golden("zero3-dp3"), folder)
    short = plan_of(index_of(golden("zero3-dp3")), Topology.parse("dp=4,zero=3"), num_threads=1)
    name = "zero_pp_rank_2_mp_rank_00_optim_states.pt"
    (file,) = (file for file in short.layout.files if file.path == name)
    content = bytearray(file.num_bytes)
    for position, piece in file.fixed:
        content[position : position + len(piece)] = piece
    (folder / name).write_bytes(content)
    with pytest.raises(CorruptSourceError, match="rank_2"):
        index_of(folder)
