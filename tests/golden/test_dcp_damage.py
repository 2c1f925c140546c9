"""Damaged, mixed, ambiguous and hostile DCP checkpoints are refused by name; nothing that a file says is executed."""

import contextlib
import os
import pickle
import random
import re
import shutil
from pathlib import Path

import pytest

from reshard.api import index_of, plan_of, view_of
from reshard.cli.inspection import inspect
from reshard.errors import CorruptSourceError, ReshardError, UnsafePickleError, UnsupportedError
from reshard.execution.verify import read_digests
from reshard.formats.dcp import FORMAT
from reshard.formats.dcp.metadata import read_metadata
from reshard.formats.pt.objects import Global, Inert, Size
from tests.golden.dcp_files import NAMES, chunks, convert, edit_metadata, golden, stored
from tests.golden.files import assemble
from tests.randomness import examples

UP = "model.up.weight"


@pytest.fixture
def copy(tmp_path) -> Path:
    return Path(shutil.copytree(golden("fsdp2-flat"), tmp_path / "copy"))


def move_chunk(state, at, offset, size) -> None:
    """Say that a chunk is elsewhere; its item stays."""
    chunk = chunks(state, UP)[at]
    index = next(
        i for i in state["storage_data"] if i.state["fqn"] == UP and i.state["offset"] == chunk.state["offsets"]
    )
    index.state["offset"] = chunk.state["offsets"] = Size(offset)
    chunk.state["sizes"] = Size(size)


def drop_chunk(state) -> None:
    chunk = chunks(state, UP).pop()
    stored_ = state["storage_data"]
    del stored_[next(i for i in stored_ if i.state["fqn"] == UP and i.state["offset"] == chunk.state["offsets"])]


def set_info(key, **values):
    return lambda state: stored(state, key).state.update(values)


def set_fields(**values):
    return lambda state: state.update(values)


METADATA = {
    "a chunk is missing": (drop_chunk, CorruptSourceError, "weight/up.weight"),
    "an item is missing": (
        lambda state: state["storage_data"].pop(next(i for i in state["storage_data"] if i.state["fqn"] == UP)),
        CorruptSourceError, f"{UP}: storage_data has no item for it"),
    "an item too many": (
        lambda state: state["state_dict_metadata"].pop(UP), CorruptSourceError,
        f"{UP}: storage_data has an item at [0, 0]"),
    "chunks overlap": (lambda s: move_chunk(s, 1, (2, 0), (3, 4)), CorruptSourceError, "overlap"),
    "chunks leave a hole": (lambda s: s["state_dict_metadata"][UP].state.update(size=Size((7, 4))),
        CorruptSourceError, "24 of 28 elements are covered"),
    "a chunk is outside": (lambda s: move_chunk(s, 1, (4, 0), (3, 4)), CorruptSourceError, "lies outside"),
    "a chunk of other dims": (lambda s: move_chunk(s, 1, (3,), (3,)), CorruptSourceError, "a chunk at (3,)"),
    "another type": (
        lambda s: s["state_dict_metadata"][UP].state["properties"].__setattr__(
            "state", (Global("torch", "float64"), *s["state_dict_metadata"][UP].state["properties"].state[1:])),
        CorruptSourceError, "holds float32 [3, 4], .metadata says float64"),
    "an unknown type": (
        lambda s: s["state_dict_metadata"][UP].state["properties"].__setattr__(
            "state", (Global("torch", "quint8"), *s["state_dict_metadata"][UP].state["properties"].state[1:])),
        UnsupportedError, f"{UP}: type quint8"),
    "a sparse tensor": (
        lambda s: s["state_dict_metadata"][UP].state["properties"].__setattr__(
            "state", (Global("torch", "float32"), Inert("reduce", Global("torch.serialization", "_get_layout"),
                                                        ("torch.sparse_coo",)))),
        CorruptSourceError, "layout ('torch.sparse_coo',)"),
    "an item reaches behind the file": (set_info(UP, offset=10**6), CorruptSourceError, "truncated"),
    "an item begins before the file": (set_info(UP, offset=-1), CorruptSourceError, "bytes -1"),
    "an item of no bytes": (set_info(UP, length=0), CorruptSourceError, UP),
    "an item is another tensor's": (
        lambda s: stored(s, UP).state.update(stored(s, "model.up.bias").state), CorruptSourceError,
        "holds float32 [3], .metadata says float32 [3, 4]"),
    "an item is an object": (
        lambda s: stored(s, UP).state.update(stored(s, "optim.param_groups.up.bias.lr").state), CorruptSourceError,
        "holds a float, expected a tensor"),
    "a file outside": (set_info(UP, relative_path="../__0_0.distcp"), CorruptSourceError, "not that of a file"),
    "an absolute path": (set_info(UP, relative_path="/etc/passwd"), CorruptSourceError, "not that of a file"),
    "compressed items": (set_info(UP, transform_descriptors=["zstd"]), UnsupportedError, "zstd"),
    "a later version": (set_fields(version="2.0.0"), UnsupportedError, "2.0.0"),
    "no storage data": (set_fields(storage_data=None), UnsupportedError, "no storage_data"),
    "a path to another key": (
        lambda s: s["planner_data"].update({UP: ("model", "down.weight")}), CorruptSourceError, "another key"),
    "two models": (
        lambda s: rename(s, lambda path: ("net", *path[1:]) if path[0] == "model" else path, twice="average"),
        UnsupportedError, "the weights could be any of average, net"),
}  # fmt: skip

OPTIMIZERS = {
    "states are numbered": (
        lambda s: rename(s, lambda path: ("optim", "state", str(len(path[1])), path[1].rpartition(".")[2])
                         if path[1].startswith("state.") else path), "numbered, not named"),
    "two optimizers": (
        lambda s: rename(s, lambda path: ("second", *path[1:]) if path[1] == "param_groups.up.bias.lr" else path),
        "2 optimizers: optim, second"),
    "a state of no weight": (
        lambda s: rename(s, lambda path: ("optim", "state.nobody.exp_avg")
                         if path[1] == "state.up.bias.exp_avg" else path), "state.nobody.exp_avg"),
}  # fmt: skip


def rename(state, change, twice: str = "") -> None:
    """Change paths; with `twice` every entry of the first container is there under that name, too."""
    described, paths, places = state["state_dict_metadata"], state["planner_data"], state["storage_data"]
    new = {key: change(path) for key, path in paths.items()}
    old = dict(described)
    described.clear()
    paths.clear()
    for key, path in new.items():
        for way in [path, (twice, *path[1:])] if twice and path[0] == "net" else [path]:
            described[".".join(way)], paths[".".join(way)] = old[key], way
    for index, info in list(places.items()):
        way = new[index.state["fqn"]]
        index.state["fqn"] = ".".join(way)
        if twice and way[0] == "net":
            places[Inert("new", index.target, (), {**index.state, "fqn": ".".join((twice, *way[1:]))})] = info


@pytest.mark.parametrize("name", METADATA)
def test_metadata_that_is_wrong_is_refused_and_the_entry_named(name, copy):
    change, kind, mentioned = METADATA[name]
    edit_metadata(copy, change)
    with pytest.raises(kind) as caught:
        FORMAT.read(copy, None)
    assert mentioned in str(caught.value)
    assert str(copy) in str(caught.value)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_of_an_optimizer_that_is_not_understood_the_weights_are_taken_if_they_are_asked_for(name, copy):
    whole = read_digests(FORMAT.read(copy, None))
    change, mentioned = OPTIMIZERS[name]
    edit_metadata(copy, change)
    index = index_of(copy)
    for refused in (
        lambda: view_of(index),
        lambda: view_of(index, states=("weight", "exp_avg")),
        lambda: plan_of(index, index.topology),
    ):
        with pytest.raises(UnsupportedError, match=re.escape(mentioned)) as caught:
            refused()
        assert str(copy) in str(caught.value)
        assert "--states weight" in caught.value.hint
    weights = {key: value for key, value in whole.items() if key.startswith("weight/")}
    assert read_digests(view_of(index, states=("weight",))) == weights
    problems = inspect(copy, lambda commit: FORMAT.read(copy, commit)).problems
    assert [(problem.kind, mentioned in problem.message) for problem in problems] == [("UnsupportedError", True)]


@pytest.mark.parametrize("compiled", [lambda name: f"_orig_mod.{name}", lambda name: name.replace(".", "._orig_mod.")])
def test_what_torch_compile_puts_into_names_is_no_part_of_them(compiled, copy, tmp_path):
    """Of a compiled model's own state dict; get_optimizer_state_dict names its states without it."""
    before = FORMAT.read(copy, None)
    edit_metadata(copy, lambda s: rename(s, lambda path: ("model", compiled(path[1])) if path[0] == "model" else path))
    index = FORMAT.read(copy, None)
    assert [tensor.key for tensor in index.tensors] == [tensor.key for tensor in before.tensors]
    convert(index, tmp_path / "out", 3)
    names = [tensor.key.name for tensor in before.tensors if tensor.key.state == "weight"]
    written = {entry.key for entry in read_metadata(tmp_path / "out")}
    assert {key for key in written if key.startswith("model.")} == {f"model.{compiled(name)}" for name in names}


class Evil:
    def __reduce__(self):
        return pickle.loads, (b"cos\nsystem\n(S'touch executed'\ntR.",)


@pytest.mark.parametrize("code", [b"cos\nsystem\n(X\x05\x00\x00\x00touchtR.", pickle.dumps(Evil())])
def test_code_in_the_metadata_is_refused_and_not_run(code, copy, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    (copy / ".metadata").write_bytes(code if code[:1] == b"\x80" else b"\x80\x02" + code)
    with pytest.raises(UnsafePickleError, match=r"its pickle names (os\.system|_pickle\.loads): expected only"):
        FORMAT.read(copy, None)
    assert not (tmp_path / "executed").exists()


FILES = {
    "a file is missing": (lambda f: (f / "__1_0.distcp").unlink(), "__1_0.distcp is missing"),
    "a file of a larger world is left over": (
        lambda f: shutil.copy(f / "__1_0.distcp", f / "__7_0.distcp"), "__7_0.distcp is not named in .metadata"),
    "a file is empty": (lambda f: (f / "__1_0.distcp").write_bytes(b""), "truncated"),
    "a file is a link": (
        lambda f: [(f / "__1_0.distcp").rename(f.parent / "it"), (f / "__1_0.distcp").symlink_to(f.parent / "it")],
        "__1_0.distcp is a link"),
    "files are swapped": (
        lambda f: [(f / "__1_0.distcp").rename(f / "t"), (f / "__0_0.distcp").rename(f / "__1_0.distcp"),
                   (f / "t").rename(f / "__0_0.distcp")], ""),
    "the metadata is empty": (lambda f: (f / ".metadata").write_bytes(b""), ".metadata"),
    "the metadata is another object": (
        lambda f: (f / ".metadata").write_bytes(pickle.dumps({"a": 1})), "expected a Metadata"),
}  # fmt: skip
WELL_FORMED = {"the metadata is another object"}


@pytest.mark.parametrize("name", FILES)
def test_files_that_are_wrong_are_refused_and_named(name, copy):
    damage, mentioned = FILES[name]
    damage(copy)
    with pytest.raises(UnsupportedError if name in WELL_FORMED else CorruptSourceError) as caught:
        FORMAT.read(copy, None)
    assert mentioned in str(caught.value)


def test_the_empty_file_of_a_rank_that_had_nothing_to_save_is_no_fault(copy):
    before = read_digests(FORMAT.read(copy, None))
    (copy / "__7_0.distcp").touch()
    assert read_digests(FORMAT.read(copy, None)) == before


def test_a_folder_without_metadata_is_not_of_this_format(copy):
    (copy / ".metadata").unlink()
    assert "written last" in str(FORMAT.sniff(copy))


@pytest.mark.parametrize("name", NAMES)
def test_a_file_cut_off_at_the_end_of_any_item_is_refused(name, tmp_path):
    folder = Path(shutil.copytree(golden(name), tmp_path / "copy"))
    ends: dict[str, set[int]] = {}
    for item in read_metadata(folder):
        for _, place in item.chunks:
            ends.setdefault(place.file, set()).update((place.offset, place.offset + place.length - 1))
    for file, positions in ends.items():
        content = (folder / file).read_bytes()
        for position in sorted(positions)[:: max(1, len(positions) // 12)]:
            (folder / file).write_bytes(content[:position])
            with pytest.raises(CorruptSourceError, match="truncated"):
                FORMAT.read(folder, None)
        (folder / file).write_bytes(content)


def test_one_flipped_bit_of_a_tensor_is_found(copy, tmp_path):
    index = FORMAT.read(copy, None)
    for number, file in enumerate(index.files):
        assert file.checksums
        for stated in file.checksums[:: max(1, len(file.checksums) // 6)]:
            position = stated.start + stated.num_bytes // 2
            content = bytearray((copy / file.path).read_bytes())
            content[position] ^= 0x10
            (copy / file.path).write_bytes(content)
            with pytest.raises(CorruptSourceError, match=rf"{file.path}: bytes {stated.start}:"):
                convert(FORMAT.read(copy, None), tmp_path / "out", 3)
            content[position] ^= 0x10
            (copy / file.path).write_bytes(content)
        assert number < 2


@pytest.mark.slow
@pytest.mark.parametrize("file", ["__0_0.distcp", "__1_0.distcp", ".metadata"])
def test_flipped_bytes_anywhere_are_refused_or_harmless(file, copy, tmp_path):
    """Nothing but our own errors, and no element or option that differs from the original without one."""
    original = (copy / file).read_bytes()
    index = FORMAT.read(copy, None)
    wanted, groups, keys = assemble(index), index.groups, index.extra.order
    chance, refused, count = random.Random(7), 0, examples(25)
    for _ in range(count):
        content = bytearray(original)
        content[chance.randrange(len(content))] ^= 1 << chance.randrange(8)
        (copy / file).write_bytes(content)
        try:
            found = FORMAT.read(copy, None)
            convert(found, tmp_path / "out", 2)
        except ReshardError:
            refused += 1
            continue
        if file != ".metadata":  # which has no checksum of its own: COMMIT.json has one
            again = FORMAT.read(tmp_path / "out", None)
            assert again.groups == groups
            assert again.extra.order == keys
            assert all((value == wanted[key]).all() for key, value in assemble(again).items())
    assert refused > count // 6


def test_random_metadata_never_ends_otherwise_than_in_our_errors(copy):
    original = (copy / ".metadata").read_bytes()
    chance = random.Random(11)
    for _ in range(150):
        content = bytearray(original)
        for _ in range(chance.randrange(1, 6)):
            at = chance.randrange(len(content))
            if chance.random() < 0.5:
                content[at] = chance.randrange(256)
            else:
                del content[at : at + chance.randrange(1, 20)]
        (copy / ".metadata").write_bytes(content)
        with contextlib.suppress(ReshardError):
            FORMAT.read(copy, None)


def test_metadata_that_memory_does_not_suffice_for_is_refused_before_it_is_read(copy):
    os.truncate(copy / ".metadata", 1 << 40)
    with pytest.raises(UnsupportedError, match=r"has 1099511627776 bytes.* about 6.00 TiB of memory, .* is free"):
        FORMAT.read(copy, None)
