"""Safetensors files that are damaged, mixed or hostile: each a named error, before a byte of a tensor is read."""

import json
import os
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from reshard.cli.inspection import inspect
from reshard.errors import CorruptSourceError, ReshardError, UnsupportedError
from reshard.execution.verify import read_digests
from reshard.formats import read_checkpoint
from reshard.formats.safetensors import FORMAT
from tests.randomness import examples

GOOD = {"a": ("F32", [2, 3], [0, 24]), "b": ("BF16", [], [24, 26])}


def entries(**changes) -> dict:
    found = {**GOOD, **changes}
    return {
        name: {"dtype": entry[0], "shape": entry[1], "data_offsets": entry[2]}
        for name, entry in found.items()
        if entry is not None
    }


def write(path: Path, header: dict | bytes, data_bytes: int = 26, length: int | None = None) -> None:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.parent.mkdir(exist_ok=True, parents=True)
    path.write_bytes((len(text) if length is None else length).to_bytes(8, "little") + text + bytes(data_bytes))


def error_of(folder: Path) -> ReshardError:
    with pytest.raises(ReshardError) as caught:
        FORMAT.read(folder, None)
    assert caught.value.path is not None
    assert caught.value.path.startswith(str(folder))
    return caught.value


def test_a_plain_file_is_read(tmp_path):
    write(tmp_path / "model.safetensors", {**entries(), "__metadata__": {"format": "pt", "by": "me"}})
    index = FORMAT.read(tmp_path, None)
    assert [(str(tensor.key), tensor.shape, tensor.dtype) for tensor in index.tensors] == [
        ("weight/a", (2, 3), "float32"), ("weight/b", (), "bfloat16"),
    ]  # fmt: skip
    assert index.shards.byte_offset[1] - index.shards.byte_offset[0] == 24
    assert index.extra.metadata == {"format": "pt", "by": "me"}
    assert (index.step, index.samples, index.aliases) == (0, 0, {})


def test_padding_behind_the_header_is_read(tmp_path):
    write(tmp_path / "model.safetensors", json.dumps(entries()).encode() + b"     ")
    assert len(FORMAT.read(tmp_path, None).tensors) == 2


@pytest.mark.parametrize(
    ("header", "more", "found"),
    [
        (b"{}", {"length": 100_000_001}, "states a header of 100000001 bytes, the format allows 100000000"),
        (b"{}", {"length": 29}, "states a header of 29 bytes and has 36 bytes in all: truncated"),
        (b" {}", {"data_bytes": 0}, "its header begins with b' '"),
        (b"", {"data_bytes": 0}, "its header begins with b''"),
        (b"{", {}, "is no valid JSON"),
        (b"{} {}", {}, "is no valid JSON"),
        (b'{"a": NaN}', {}, "NaN is no JSON"),
        (b'{"a": "\xff"}', {}, "is no valid JSON"),
        (b'{"a":' * 100_000, {}, "is no valid JSON"),
        (b'{"a": {"dtype": "U8", "dtype": "U8"}}', {}, "'dtype' is there twice"),
        (b'{"\\ud800": 3}', {}, "is no valid JSON"),
        (b'{"__metadata__": [1]}', {"data_bytes": 0}, "its __metadata__ is not a map from text to text"),
        (b'{"__metadata__": {"a": 1}}', {"data_bytes": 0}, "its __metadata__ is not a map from text to text"),
        (b'{"a": 3}', {}, "tensor 'a': expected data_offsets, dtype, shape, found 3"),
        (b'{"a": {"dtype": "U8", "shape": [1]}}', {}, "tensor 'a': expected data_offsets, dtype, shape"),
        (entries(a=("F32", [2, 3], [0, 24, 25])), {}, "tensor 'a': data_offsets [0, 24, 25] are not two positions"),
        (entries(a=("F32", [2, 3], [0, 24.0])), {}, "are not two positions"),
        (entries(a=("F32", [2, 3], [24, 0])), {}, "lie outside of the 26 bytes behind the header"),
        (entries(a=("F32", [2, 3], [-24, 0])), {}, "lie outside"),
        (entries(), {"data_bytes": 25}, "tensor 'b': data_offsets [24, 26] lie outside of the 25 bytes"),
        (entries(), {"data_bytes": 27}, "its tensors end at byte 26, 27 bytes are there"),
        (entries(a=("F32", [2, 4], [0, 24])), {}, "tensor 'a': float32 [2, 4] takes 32 bytes, it has 24"),
        (entries(a=("F32", [-2, -3], [0, 24])), {}, "shape [-2, -3] is not a list of sizes"),
        (entries(a=("F32", [True, 6], [0, 24])), {}, "is not a list of sizes"),
        (entries(a=("F32", [2**63, 0], [0, 24])), {}, "is not a list of sizes"),
        (entries(a=("F32", [2**32, 2**32], [0, 24])), {}, "takes 73786976294838206464 bytes, it has 24"),
        (entries(a=(["F32"], [2, 3], [0, 24])), {}, "dtype ['F32'] is not text"),
        (entries(b=("BF16", [], [23, 25])), {}, "tensor 'b' begins at byte 23, expected 24: overlaps its neighbour"),
        (entries(a=("F32", [5], [0, 20])), {}, "tensor 'b' begins at byte 24, expected 20: leaves a hole before it"),
        (entries(c=("U8", [2], [24, 26])), {}, "tensor 'c' begins at byte 24, expected 26: overlaps its neighbour"),
    ],
)  # fmt: skip
def test_a_damaged_header_is_refused_by_name(tmp_path, header, more, found):
    write(tmp_path / "model.safetensors", header, **more)
    error = error_of(tmp_path)
    assert isinstance(error, CorruptSourceError)
    assert found in str(error)
    assert error.path == str(tmp_path / "model.safetensors")
    assert error.hint


@pytest.mark.parametrize("num_bytes", range(8))
def test_a_file_shorter_than_its_first_number_is_refused(tmp_path, num_bytes):
    (tmp_path / "model.safetensors").write_bytes(bytes(num_bytes))
    assert f"has {num_bytes} bytes" in str(error_of(tmp_path))


def test_a_file_cut_anywhere_is_refused(tmp_path):
    path = tmp_path / "model.safetensors"
    write(path, entries())
    content = path.read_bytes()
    for length in range(len(content)):
        path.write_bytes(content[:length])
        assert isinstance(error_of(tmp_path), CorruptSourceError), length


@settings(
    deadline=None,
    max_examples=examples(300),
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
@given(data=st.data())
def test_whatever_happens_to_its_bytes_a_header_is_understood_or_refused(tmp_path, data):
    path = tmp_path / "model.safetensors"
    write(path, entries())
    content = bytearray(path.read_bytes())
    for _ in range(data.draw(st.integers(1, 4))):
        start = data.draw(st.integers(0, len(content)))
        stop = min(len(content), start + data.draw(st.integers(0, 6)))
        content[start:stop] = data.draw(
            st.binary(max_size=6) | st.sampled_from([b"[[[", b'"a"', b"9" * 20, b"-", b"1e9"])
        )
    path.write_bytes(content)
    try:
        index = FORMAT.read(tmp_path, None)
    except ReshardError:
        return
    start = 8 + int.from_bytes(content[:8], "little")
    assert sum(tensor.num_bytes for tensor in index.tensors) == len(content) - start
    assert ((index.shards.byte_offset >= start) & (index.shards.byte_offset < len(content))).all()


def test_a_header_without_metadata_may_say_so(tmp_path):
    write(tmp_path / "model.safetensors", {"__metadata__": None, **entries()})
    assert FORMAT.read(tmp_path, None).extra.metadata == {}


@pytest.mark.parametrize(
    ("changed", "found"),
    [
        ({"shape": [2, 3] + [1] * 63}, "tensor 'a' has 65 dims, at most 64 are known"),
        ({"more": 1}, "tensor 'a' has unknown fields: more"),
    ],
)
def test_what_safetensors_reads_is_not_called_damaged(tmp_path, changed, found):
    header = entries()
    header["a"] |= changed
    write(tmp_path / "model.safetensors", header)
    error = error_of(tmp_path)
    assert isinstance(error, UnsupportedError)
    assert error.problems == (found,)


def test_types_that_are_not_converted_are_refused_with_all_their_tensors(tmp_path):
    write(tmp_path / "model.safetensors", entries(a=("F8_E8M0", [24], [0, 24]), b=("F4", [4], [24, 26])))
    error = error_of(tmp_path)
    assert isinstance(error, UnsupportedError)
    assert error.problems == ("tensor 'a' is of type F8_E8M0", "tensor 'b' is of type F4")


FIRST, SECOND = (f"model-0000{number}-of-00002.safetensors" for number in (1, 2))


def sharded(folder: Path, **weight_map) -> None:
    write(folder / FIRST, entries(b=None), 24)
    write(folder / SECOND, entries(a=None, b=("BF16", [], [0, 2])), 2)
    found = {"a": FIRST, "b": SECOND, **weight_map}
    value = {"metadata": {"total_size": 26.0}, "weight_map": {key: file for key, file in found.items() if file}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(value))


def test_files_with_an_index_are_read(tmp_path):
    sharded(tmp_path)
    write(tmp_path / "consolidated.safetensors", entries())  # the same in another tool's names, as some models ship
    index = FORMAT.read(tmp_path, None)
    assert [str(tensor.key) for tensor in index.tensors] == ["weight/a", "weight/b"]
    assert [file.path for file in index.files] == [f"model-0000{n}-of-00002.safetensors" for n in (1, 2)]


def test_files_of_a_series_without_an_index_are_read(tmp_path):
    sharded(tmp_path)
    (tmp_path / "model.safetensors.index.json").unlink()
    assert len(FORMAT.read(tmp_path, None).tensors) == 2
    (tmp_path / FIRST).unlink()
    assert "model: of 2 files number 1 is missing" in str(error_of(tmp_path))


def test_a_missing_file_is_named(tmp_path):
    sharded(tmp_path)
    (tmp_path / SECOND).unlink()
    assert "model-00002-of-00002.safetensors is missing" in str(error_of(tmp_path))


@pytest.mark.parametrize("name", ["model.safetensors", "model-00001-of-00003.safetensors"])
def test_files_of_another_save_are_refused(tmp_path, name):
    sharded(tmp_path)
    write(tmp_path / name, entries())
    assert f"{name} is not in model.safetensors.index.json" in str(error_of(tmp_path))


@pytest.mark.parametrize(
    ("weight_map", "found"),
    [
        ({"c": FIRST}, "tensor 'c' is not in model-00001-of-00002.safetensors, which"),
        ({"a": SECOND, "b": FIRST}, f"tensor 'a' is in {FIRST}, the index names {SECOND}"),
        ({"a": None, "c": FIRST}, f"tensor 'a' is in {FIRST}, the index names no file"),
        ({"a": "../model.safetensors"}, "names files that are no safetensors files of its folder"),
        ({"a": "/etc/passwd"}, "/etc/passwd"),
        ({"a": "model.bin"}, "model.bin"),
        ({"a": 3}, "names files that are no"),
    ],
)  # fmt: skip
def test_an_index_that_does_not_fit_the_files_is_refused(tmp_path, weight_map, found):
    sharded(tmp_path, **weight_map)
    error = error_of(tmp_path)
    assert isinstance(error, UnsupportedError if "no safetensors files" in str(error) else CorruptSourceError)
    assert found in str(error)


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("", CorruptSourceError),
        ('{"a": 1, "a": 2}', CorruptSourceError),
        ("\udcff", CorruptSourceError),
        ("[]", UnsupportedError),
        ("{}", UnsupportedError),
        ('{"weight_map": {}}', UnsupportedError),
        ('{"weight_map": []}', UnsupportedError),
    ],
)
def test_an_index_that_is_none_is_refused(tmp_path, text, kind):
    sharded(tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text(text, errors="surrogateescape")
    assert isinstance(error_of(tmp_path), kind)


def test_two_checkpoints_in_one_folder_are_refused_with_both_names(tmp_path):
    sharded(tmp_path)
    (tmp_path / "other.safetensors.index.json").write_text("{}")
    assert "holds 2 checkpoints: model.safetensors.index.json, other.safetensors.index.json" in str(error_of(tmp_path))


@pytest.mark.parametrize(
    ("first", "second", "kind"),
    [
        ("model.fp16.safetensors", "model.safetensors", UnsupportedError),
        ("consolidated.safetensors", "model.safetensors", UnsupportedError),
        (FIRST, SECOND, CorruptSourceError),
    ],
)
def test_a_tensor_in_two_files_is_refused_with_both(tmp_path, first, second, kind):
    write(tmp_path / first, entries())
    write(tmp_path / second, entries(a=None, b=("BF16", [], [0, 2])), 2)
    error = error_of(tmp_path)
    assert type(error) is kind
    assert f"tensor 'b' is in {first} and in {second}" in str(error)


def test_a_link_is_refused_and_not_followed(tmp_path):
    write(tmp_path / "blobs" / "x", entries())
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "model.safetensors").symlink_to("../blobs/x")
    assert "is a symbolic link" in str(error_of(folder))


BLOB = "../../blobs/"


def hub_cache(root: Path) -> Path:
    """A snapshot of a sharded model as huggingface_hub leaves it; returns the snapshot's folder."""
    snapshot = root / "models--org--name/snapshots/0123abcd"
    sharded(snapshot)
    (root / "models--org--name/blobs").mkdir()
    for number, path in enumerate(sorted(snapshot.iterdir())):
        name = f"{number:040x}" if path.suffix == ".json" else f"{number:064x}"
        path.rename(root / "models--org--name/blobs" / name)
        path.symlink_to(BLOB + name)
    return snapshot


def test_links_of_a_hugging_face_cache_are_followed_into_its_own_blobs(tmp_path):
    snapshot = hub_cache(tmp_path)
    sharded(tmp_path / "plain")
    assert all(path.is_symlink() for path in snapshot.iterdir())
    (tmp_path / "short").symlink_to(snapshot)
    expected = read_digests(read_checkpoint(tmp_path / "plain", None))
    for folder in (snapshot, tmp_path / "short"):
        index = read_checkpoint(folder, None)
        assert all(file.path.startswith(BLOB) for file in index.files)
        assert read_digests(index) == expected


def test_inspection_of_such_a_cache_states_the_sizes_of_the_files_and_not_of_the_links(tmp_path):
    snapshot = hub_cache(tmp_path)
    sharded(tmp_path / "plain")
    found = [
        inspect(folder, lambda _, folder=folder: read_checkpoint(folder, None))
        for folder in (snapshot, tmp_path / "plain")
    ]
    assert found[0].file_bytes == found[1].file_bytes == sum(path.stat().st_size for path in snapshot.iterdir())
    assert found[0].num_files == found[1].num_files


def abroad(root: Path, link: Path) -> None:
    link.symlink_to(root / "elsewhere")


def up_and_away(root: Path, link: Path) -> None:
    link.symlink_to(f"{BLOB}../../elsewhere")


def blob_is_a_link(root: Path, link: Path) -> None:
    (root / "models--org--name/blobs" / ("f" * 64)).symlink_to(root / "elsewhere")
    link.symlink_to(BLOB + "f" * 64)


def blobs_are_a_link(root: Path, link: Path) -> None:
    (root / "models--org--name/blobs").rename(root / "real")
    (root / "models--org--name/blobs").symlink_to(root / "real")
    link.symlink_to(f"{BLOB}{1:064x}")


def no_checksum(root: Path, link: Path) -> None:
    (root / "models--org--name/blobs/model").write_bytes((root / "elsewhere").read_bytes())
    link.symlink_to(f"{BLOB}model")


def no_snapshot(root: Path, link: Path) -> None:
    link.symlink_to(f"{BLOB}{1:064x}")
    link.parent.parent.rename(root / "models--org--name/shots")


def nowhere(_root: Path, link: Path) -> None:
    link.symlink_to(BLOB + "e" * 64)


@pytest.mark.parametrize(
    "change", [abroad, up_and_away, blob_is_a_link, blobs_are_a_link, no_checksum, no_snapshot, nowhere]
)
def test_other_links_are_not_followed_even_there(tmp_path, change):
    snapshot = hub_cache(tmp_path)
    write(tmp_path / "elsewhere", entries())
    for path in snapshot.iterdir():
        path.unlink()
    change(tmp_path, snapshot / "model.safetensors")
    folder = next((tmp_path / "models--org--name").glob("s*/0123abcd"))
    error = error_of(folder)
    assert "is a symbolic link" in str(error)
    assert "cp -rL" in error.hint


@pytest.mark.parametrize("name", ["model.safetensors", "model.safetensors.index.json"])
def test_what_is_no_file_is_refused_and_not_waited_for(tmp_path, name):
    sharded(tmp_path / "pipe")
    (tmp_path / "pipe" / name).unlink(missing_ok=True)
    os.mkfifo(tmp_path / "pipe" / name)
    assert isinstance(error_of(tmp_path / "pipe"), CorruptSourceError)
    (tmp_path / "folder" / name).mkdir(parents=True)
    write(tmp_path / "folder" / "other.safetensors", entries())
    assert "cannot be read: Is a directory" in str(error_of(tmp_path / "folder"))


def of_torch(folder: Path, offsets: object, total: object = 26, *, index: bool = True) -> None:
    """Write files as HuggingFaceStorageWriter of torch 2.13 does."""
    sharding = offsets if isinstance(offsets, str) else json.dumps(offsets)
    about = {"DCP_VERSION": "1.0", "format": "pt", "DCP_SHARDING_INFO": sharding}
    write(folder / "model-00001-of-00001.safetensors", {**entries(), "__metadata__": about})
    listing = {"metadata": {"total_size": total}, "weight_map": dict.fromkeys(GOOD, "model-00001-of-00001.safetensors")}
    if index:
        (folder / "model.safetensors.index.json").write_text(json.dumps(listing))


BEGINNINGS = {"a": {"saved_offsets": [0, 0]}, "b": {"saved_offsets": []}}


@pytest.mark.parametrize("total", [26, 20, None, "many"])
def test_whole_tensors_of_torchs_writer_are_read(tmp_path, total):
    of_torch(tmp_path, BEGINNINGS, total)
    index = FORMAT.read(tmp_path, None)
    assert [tensor.shape for tensor in index.tensors] == [(2, 3), ()]
    assert index.extra.metadata == {"format": "pt"}


@pytest.mark.parametrize(
    ("offsets", "index"), [(BEGINNINGS, False), ({**BEGINNINGS, "a": {"saved_offsets": [2, 0]}}, True)]
)
def test_shards_of_tensors_are_refused_with_what_to_do(tmp_path, offsets, index):
    of_torch(tmp_path, offsets, index=index)
    error = error_of(tmp_path)
    assert isinstance(error, UnsupportedError)
    assert "consolidate_safetensors_files" in error.hint


def test_what_ranks_wrote_over_each_other_is_refused(tmp_path):
    of_torch(tmp_path, BEGINNINGS, 50)
    error = error_of(tmp_path)
    assert isinstance(error, CorruptSourceError)
    assert "states tensors of 50 bytes, the files hold 26" in str(error)


@pytest.mark.parametrize(
    "offsets", ["{", "[]", {"a": {"saved_offsets": [0, 0]}}, {**BEGINNINGS, "a": 3}, "[" * 100_000]
)
def test_sharding_that_says_nothing_is_refused(tmp_path, offsets):
    of_torch(tmp_path, offsets)
    assert "does not say where every tensor begins" in str(error_of(tmp_path))


@pytest.mark.parametrize(
    ("key", "value"), [("reshard.step", "x"), ("reshard.samples", "-1"), ("reshard.step", "9" * 30)]
)
def test_a_step_that_is_no_number_is_refused(tmp_path, key, value):
    write(tmp_path / "model.safetensors", {**entries(), "__metadata__": {key: value}})
    assert key in str(error_of(tmp_path))


def test_sniffing_says_why_not(tmp_path):
    assert FORMAT.sniff(tmp_path) == "no file *.safetensors"
    (tmp_path / "._model.safetensors").write_bytes(b"what macOS leaves behind")
    assert FORMAT.sniff(tmp_path) == "no file *.safetensors"
    write(tmp_path / "x.safetensors", entries())
    assert FORMAT.sniff(tmp_path) is None
    assert FORMAT.sniff(tmp_path / "x.safetensors") == "not a folder (name the folder of the files)"
    assert FORMAT.sniff(tmp_path / "none") == "not a folder (name the folder of the files)"
