"""`run` compares the bytes that it reads with the source's COMMIT.json; damage is never published."""

import dataclasses
import json
import os
import shutil
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from reshard.api import Conversion, Hooks, RunOptions, convert, index_of
from reshard.commits.commit import Commit, CommittedFile, read_commit, write_commit
from reshard.commits.staging import Sharing
from reshard.contract import ExitCode
from reshard.errors import CorruptSourceError, UnsupportedError
from reshard.execution import source_checks
from reshard.planning import plan
from reshard.storage.durable import file_crc32
from reshard.storage.object_store import REQUESTS, location
from reshard.tensors.intervals import Int64Array
from reshard.tensors.layout import Index
from reshard.tensors.views import select_states
from reshard.topology import Topology
from reshard.virtual import conversion, load, manifest
from tests.golden.command import EVERY, HERE, PIPELINE, ZERO2, ZERO3, Answer
from tests.randomness import some

LLAMA = HERE / "safetensors/llama"
DCP = HERE / "dcp-2.13/fsdp2-flat/step-00000002"
MEGATRON = HERE / "megatron-0.16.1/iter_0000003"
UNIVERSAL = HERE / "universal-0.19.8/zero2-dp3/step-00000002"
SOURCES = {
    "safetensors": LLAMA,
    "dcp": DCP,
    "zero2": ZERO2,
    "zero3": ZERO3,
    "tp2-pp2": PIPELINE,
    "universal": UNIVERSAL,
}
TO = {"safetensors": "dp=1", "tp2-pp2": "tp=1,pp=2,dp=3"}


def committed(source: Path, folder: Path, *, without_crc: bool = False) -> Path:
    """A committed copy of a checkpoint; without the checksums that torch.save writes if asked for."""
    shutil.copytree(source, folder, dirs_exist_ok=True)
    if without_crc:
        for path in folder.rglob("*.pt"):
            strip(path)
    write_marker(folder)
    return folder


def write_marker(folder: Path) -> None:
    """Commit what is there."""
    (folder / "COMMIT.json").unlink(missing_ok=True)
    index = index_of(folder)
    names = sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())
    files = [CommittedFile(path=n, num_bytes=(folder / n).stat().st_size, crc32=file_crc32(folder / n)) for n in names]
    write_commit(
        folder,
        Commit(
            format=index.format,
            step=index.step,
            samples=index.samples,
            topology=index.topology,
            attempt=0,
            writer="trainer",
            files=files,
        ),
    )


def edit_marker(folder: Path, **changes: object) -> None:
    """Write the marker again with other fields, and with the checksum of itself that they need."""
    write_commit(folder, dataclasses.replace(read_commit(folder), **changes))


def strip(path: Path) -> None:
    """Zero the checksums in an archive, as torch.serialization.set_crc32_options(False) does."""
    content = bytearray(path.read_bytes())
    with zipfile.ZipFile(path) as archive:
        start = archive.start_dir
        for info in archive.infolist():
            content[info.header_offset + 14 : info.header_offset + 18] = bytes(4)
            descriptor = content.find(b"PK\x07\x08", info.header_offset)
            if info.flag_bits & 8 and descriptor >= 0:
                content[descriptor + 4 : descriptor + 8] = bytes(4)
    while (start := content.find(b"PK\x01\x02", start)) >= 0:
        content[start + 16 : start + 20] = bytes(4)
        start += 4
    path.write_bytes(content)


def flip(path: Path, position: int, bit: int = 1) -> None:
    content = bytearray(path.read_bytes())
    content[position] ^= bit
    path.write_bytes(content)


@pytest.mark.parametrize(
    ("without_crc", "kind"), some([(without_crc, kind) for kind in SOURCES for without_crc in (False, True)], every=3)
)
def test_a_flipped_bit_anywhere_in_a_committed_source_is_refused(
    tmp_path: Path, say: Answer, kind: str, without_crc: bool
) -> None:
    source = committed(SOURCES[kind], tmp_path / "source", without_crc=without_crc)
    words = ("--to", TO.get(kind, "dp=2"))
    say("run", source, tmp_path / "intact", *words)
    whole = {path: path.read_bytes() for path in source.rglob("*") if path.is_file() and path.name != "COMMIT.json"}
    read = {file.path for file in (*index_of(source).files, *index_of(source).metadata)}
    for path, content in whole.items():
        if str(path.relative_to(source)) not in read:
            continue
        for position in some(sorted({0, len(content) // 3, len(content) * 5 // 6, len(content) - 1}), every=3):
            flip(path, position)
            found = say.json("run", source, tmp_path / "out", *words, code=ExitCode.SOURCE_INVALID)
            assert not (tmp_path / "out").exists(), (path, position)
            assert found["error"]["kind"] != "SourceChangedError"
            path.write_bytes(content)
    say("run", source, tmp_path / "out", *words)


def test_a_damaged_file_is_named_with_both_checksums(tmp_path: Path, say: Answer) -> None:
    source = committed(LLAMA, tmp_path / "source")
    flip(source / "model-00002-of-00002.safetensors", -1)
    found = say.json("run", source, tmp_path / "out", "--to", "dp=1", code=ExitCode.SOURCE_INVALID)
    assert found["error"]["message"] == "1 file is not what was committed"
    (problem,) = found["error"]["problems"]
    assert problem.startswith("model-00002-of-00002.safetensors: CRC-32 ")


def test_damaged_metadata_is_refused_before_a_byte_is_moved(tmp_path: Path) -> None:
    """A note of the user in `.metadata` that no parser would miss."""
    source = committed(DCP, tmp_path / "source")
    marker = json.loads((source / "COMMIT.json").read_text())
    (entry,) = [file for file in marker["files"] if file["path"] == ".metadata"]
    entry["crc32"] = f"{int(entry['crc32'], 16) ^ 1:08x}"
    del marker["checksum"]
    (source / "COMMIT.json").write_text(json.dumps(marker))
    moved: list[int] = []
    with pytest.raises(Exception, match="not what was committed") as caught:
        convert(wanted(source, tmp_path / "out", "dp=2"), hooks=Hooks(on_progress=moved.append))
    assert caught.value.exit_code == ExitCode.SOURCE_INVALID
    assert not moved


def wanted(source: Path, target: Path, to: str, **options: object) -> Conversion:
    return Conversion(source=source, target=target, topology=Topology.parse(to), keeps_stage=True, **options)


def refusals(say: Answer, source: Path, target: Path, to: str) -> list[dict[str, Any]]:
    """Return what each command says of a source that it refuses as corrupt."""
    words = ("--to", to)
    commands = (("run", source, target, *words), ("plan", source, target, *words), ("verify", source))
    found = [say.json(*command, code=ExitCode.SOURCE_INVALID)["error"] for command in commands]
    assert not target.exists()
    assert {error["kind"] for error in found} == {"CorruptSourceError"}
    assert all(error["hint"] for error in found)
    return found


@pytest.mark.parametrize("kind", SOURCES)
def test_a_committed_tensor_that_no_file_holds_is_refused(tmp_path: Path, say: Answer, kind: str) -> None:
    source = committed(SOURCES[kind], tmp_path / "source")
    edit_marker(source, digests={"weight/gone": "0123abcd"})
    for error in refusals(say, source, tmp_path / "out", TO.get(kind, "dp=2")):
        assert error["problems"] == ["weight/gone: digest 0123abcd was committed, no file holds the tensor"]
    (problem,) = say.json("inspect", source, code=ExitCode.SOURCE_INVALID)["problems"]
    assert problem["message"].startswith("weight/gone: ")


@pytest.mark.parametrize("kind", SOURCES)
def test_a_file_that_is_read_and_that_the_commit_does_not_list_is_refused(
    tmp_path: Path, say: Answer, kind: str
) -> None:
    """Its bytes are proved by nothing."""
    source = committed(SOURCES[kind], tmp_path / "source")
    files, index = read_commit(source).files, index_of(source)
    for path in (index.files[-1].path, *(file.path for file in index.metadata[-1:] if file.path != "COMMIT.json")):
        edit_marker(source, files=[file for file in files if file.path != path])
        for error in refusals(say, source, tmp_path / "out", TO.get(kind, "dp=2")):
            assert error["problems"] == [f"{path}: is read, COMMIT.json does not list it"]
        (problem,) = say.json("inspect", source, code=ExitCode.SOURCE_INVALID)["problems"]
        assert problem["message"].startswith(f"{path}: ")


@pytest.mark.parametrize("kind", SOURCES)
def test_a_commit_of_another_format_than_the_files_have_is_refused(tmp_path: Path, say: Answer, kind: str) -> None:
    source = committed(SOURCES[kind], tmp_path / "source")
    own = read_commit(source).format
    other = "dcp" if own != "dcp" else "safetensors"
    edit_marker(source, format=other)
    for error in refusals(say, source, tmp_path / "out", TO.get(kind, "dp=2")):
        assert error["problems"] == [f"COMMIT.json says format {other}, the files say {own}"]


def test_at_most_twenty_lines_tell_how_a_commit_and_its_files_differ(tmp_path: Path) -> None:
    source = committed(LLAMA, tmp_path / "source")
    edit_marker(source, files=(), digests={f"weight/{number:03}{'x' * 5000}": "0" * 8 for number in range(50)})
    with pytest.raises(CorruptSourceError) as caught:
        index_of(source)
    assert len(caught.value.problems) == 20
    assert caught.value.problems[-1] == "and 34 more"
    assert len(str(caught.value)) < 10_000


def test_a_file_that_nobody_reads_need_not_be_committed(tmp_path: Path, say: Answer) -> None:
    source = committed(LLAMA, tmp_path / "source")
    (source / "notes.txt").write_text("mine")
    say("run", source, tmp_path / "out", "--to", "dp=1")
    say("verify", source)


@pytest.mark.parametrize("path", [*EVERY, MEGATRON], ids=lambda path: path.parent.name)
def test_a_commit_that_lists_all_files_and_tensors_is_believed(tmp_path: Path, path: Path) -> None:
    source = committed(path, tmp_path / "source")
    tensors = index_of(source).tensors
    edit_marker(source, digests={str(tensor.key): "0" * 8 for tensor in tensors})
    assert index_of(source).tensors == tensors


def test_patterns_need_not_tell_the_padding_rows_that_a_commit_tells_apart(tmp_path: Path) -> None:
    source = committed(ZERO2, tmp_path / "source")
    index = index_of(source)
    edit_marker(source, digests={"weight/embed.weight#padding": "0" * 8})
    source_checks.check_matches_commit(index, read_commit(source), has_patterns=True)
    with pytest.raises(CorruptSourceError, match="#padding"):
        source_checks.check_matches_commit(index, read_commit(source))


def test_of_a_source_whose_weights_alone_are_read_no_other_state_is_missed(tmp_path: Path) -> None:
    source = committed(ZERO2, tmp_path / "source")
    index = index_of(source)
    edit_marker(source, digests={str(tensor.key): "0" * 8 for tensor in index.tensors})
    weights = dataclasses.replace(select_states(index, ("weight",)), unread=UnsupportedError("an optimizer"))
    source_checks.check_matches_commit(weights, read_commit(source))
    edit_marker(source, digests={"weight/gone": "0" * 8})
    with pytest.raises(CorruptSourceError, match="weight/gone"):
        source_checks.check_matches_commit(weights, read_commit(source))


def test_what_a_virtual_commit_leads_to_has_to_match_its_own_commit(tmp_path: Path) -> None:
    source = committed(ZERO2, tmp_path / "source")
    conversion.prepare(wanted(source, tmp_path / "virtual", "dp=2"))
    assert index_of(tmp_path / "virtual").root == source
    edit_marker(source, digests={"weight/gone": "0" * 8})
    with pytest.raises(CorruptSourceError, match="weight/gone"):
        index_of(tmp_path / "virtual")


def test_names_that_a_map_swaps_are_compared_with_the_digests_of_their_own_names(tmp_path: Path, say: Answer) -> None:
    source = tmp_path / "source"
    say("run", LLAMA, source, "--to", "dp=1")
    first, second = "model.layers.0.self_attn.k_proj.weight", "model.layers.0.self_attn.v_proj.weight"
    new = {tensor.key.name: tensor.key.name for tensor in index_of(source).tensors} | {first: second, second: first}
    rules = [{"from": name, "to": other} for name, other in new.items()]
    (tmp_path / "map.yaml").write_text(json.dumps({"version": 1, "rules": rules}))
    words = ("--to", "dp=1", "--names", tmp_path / "map.yaml")
    say("run", source, tmp_path / "out", *words)
    digests = read_commit(source).digests
    assert digests[f"weight/{first}"] != digests[f"weight/{second}"]
    assert read_commit(tmp_path / "out").digests == {f"weight/{new[key[7:]]}": digests[key] for key in digests}
    edit_marker(source, digests={**digests, f"weight/{first}": "0123abcd"})
    found = say.json("run", source, tmp_path / "damaged", *words, code=ExitCode.SOURCE_INVALID)
    assert found["error"]["problems"] == [
        f"weight/{first}: 0123abcd was committed, {digests[f'weight/{first}']} is there"
    ]


def test_a_part_that_a_map_gives_the_name_of_the_whole_is_not_compared_with_it(tmp_path: Path, say: Answer) -> None:
    source, name = tmp_path / "source", "model.layers.0.mlp.gate_proj.weight"
    say("run", LLAMA, source, "--to", "dp=1")
    names = [tensor.key.name for tensor in index_of(source).tensors if tensor.key.name != name]
    rules = [{"from": name, "to": [name, "rest"], "sizes": [2, 4]}, *({"from": other, "to": other} for other in names)]
    (tmp_path / "map.yaml").write_text(json.dumps({"version": 1, "rules": rules}))
    say("run", source, tmp_path / "out", "--to", "dp=1", "--names", tmp_path / "map.yaml")
    assert {"weight/rest", f"weight/{name}"} <= read_commit(tmp_path / "out").digests.keys()


@pytest.mark.parametrize("kind", SOURCES)
def test_every_byte_of_a_source_is_read_once_to_check_it(tmp_path: Path, kind: str) -> None:
    source = committed(SOURCES[kind], tmp_path / "source", without_crc=True)
    report = convert(wanted(source, tmp_path / "out", TO.get(kind, "dp=2")))
    assert report.bytes_read <= sum(path.stat().st_size for path in source.rglob("*") if path.name != "COMMIT.json")


def test_what_is_not_needed_is_not_read_where_containers_state_checksums(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of an optimizer's file one state in three is converted."""
    monkeypatch.setattr(source_checks, "SMALL_BYTES", 0)
    stated = committed(ZERO2, tmp_path / "stated")
    bare = committed(ZERO2, tmp_path / "bare", without_crc=True)
    some, every = (
        convert(
            wanted(source, tmp_path / f"out-{source.name}", "dp=1", target_format="safetensors", states=("weight",))
        )
        for source in (stated, bare)
    )
    assert some.bytes_read < every.bytes_read
    assert some.digest == every.digest


def test_a_file_of_which_little_is_needed_is_checked_whole_where_only_the_commit_states_a_checksum(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(source_checks, "SMALL_BYTES", 0)
    source = committed(ZERO2, tmp_path / "source", without_crc=True)
    index = index_of(source)
    unread = next(row for row in index.shards.iterate_boxes(index.shards.by_tensor(len(index.tensors))[-1], 1))
    assert index.tensors[-1].key.state != "weight"
    flip(source / index.files[unread.file].path, unread.byte_offset)
    with pytest.raises(Exception, match="not what was committed"):
        convert(wanted(source, tmp_path / "out", "dp=1", target_format="safetensors", states=("weight",)))
    assert not (tmp_path / "out").exists()


def test_a_stored_range_is_checked_however_little_of_it_is_needed(tmp_path: Path) -> None:
    """Without a commit: what one tensor of a large storage needs is proved by reading the rest of that storage."""
    from reshard.checksums.crc import CrcRange, crc32
    from reshard.storage.source_reader import SourceReader
    from reshard.tensors.layout import Checksum, SourceFile

    content = bytes(range(256)) * (16 << 10)
    (tmp_path / "file").write_bytes(content)
    stated = Checksum(start=64, num_bytes=len(content) - 64, crc32=crc32(content[64:]))
    source = SourceReader(tmp_path, [SourceFile(path="file", num_bytes=len(content), checksums=(stated,))])
    piece = CrcRange(100, 10, crc32(content[100:110]))
    assert source.check_sums({0: [piece]}) == stated.num_bytes - 10
    flip(tmp_path / "file", -1)
    with pytest.raises(CorruptSourceError, match="damaged"):
        source.check_sums({0: [piece]})
    source.close()


def test_overlapping_ranges_count_once_and_are_compared() -> None:
    from reshard.checksums.crc import CrcRange, separate_overlaps

    pieces = [CrcRange(0, 10, 1), CrcRange(5, 10, 2), CrcRange(10, 5, 3), CrcRange(12, 2, 4)]
    assert separate_overlaps(pieces) == ([pieces[0], pieces[2]], [pieces[1], pieces[3]])


@pytest.mark.parametrize("where", ["tensor", "header"])
def test_damage_in_a_store_is_refused_and_a_sound_object_is_fetched_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    monkeypatch.setattr(plan, "LARGEST_REMOTE_UNIT_BYTES", 1 << 12)
    monkeypatch.setattr(plan, "SMALLEST_UNIT_BYTES", 1 << 12)
    folder = committed(LLAMA, tmp_path / "local")
    source = location(f"memory://checksums-{where}")
    source.filesystem().put(str(folder), str(source), recursive=True)
    index_of(source)
    before = REQUESTS.num_bytes
    report = convert(wanted(source, tmp_path / "intact", "dp=1"))
    size = sum(path.stat().st_size for path in folder.iterdir() if path.name != "COMMIT.json")
    assert report.bytes_read <= size
    assert REQUESTS.num_bytes - before <= 4 * size  # headers are parsed, and the witness reads
    name = f"{source}/model-00001-of-00002.safetensors"
    content = bytearray(source.filesystem().cat_file(name))
    content[-1 if where == "tensor" else 12] ^= 1
    source.filesystem().pipe_file(name, bytes(content))
    with pytest.raises(Exception) as caught:
        convert(wanted(source, tmp_path / "out", "dp=1"))
    assert caught.value.exit_code == ExitCode.SOURCE_INVALID
    assert not (tmp_path / "out").exists()


def test_what_one_worker_read_damaged_is_refused_by_the_one_that_publishes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The damage is gone when the second one comes, and size and times of the file are as they were."""
    monkeypatch.setattr(plan, "SMALLEST_UNIT_BYTES", 128)
    source = committed(ZERO2, tmp_path / "source", without_crc=True)
    index = index_of(source)
    first = next(iter(index.shards.iterate_boxes(rows_of(index, 0), 1)))
    damaged = source / index.files[first.file].path
    status = damaged.stat()
    flip(damaged, first.byte_offset)
    os.utime(damaged, ns=(status.st_atime_ns, status.st_mtime_ns))
    count = [0]

    def progress(_num_bytes: int) -> None:
        count[0] += 1
        if count[0] > 8:
            raise KeyboardInterrupt

    def work(number: int, told: Callable[[int], None] | None = None) -> None:
        request = wanted(source, tmp_path / "out", "dp=2")
        convert(
            request,
            RunOptions(sharing=Sharing.TOGETHER, worker=(number, 2), num_threads=1),
            hooks=Hooks(on_progress=told),
        )

    with pytest.raises(KeyboardInterrupt):
        work(0, progress)
    flip(damaged, first.byte_offset)
    os.utime(damaged, ns=(status.st_atime_ns, status.st_mtime_ns))
    with pytest.raises(CorruptSourceError, match="not what was committed"):
        work(1)
    assert not (tmp_path / "out").exists()


def test_what_is_loaded_by_a_virtual_commit_is_held_against_the_checksums_of_its_sources_commit(tmp_path: Path) -> None:
    """The archives state none."""
    source = committed(ZERO2, tmp_path / "source", without_crc=True)
    conversion.prepare(wanted(source, tmp_path / "virtual", "dp=2"))
    decoded = manifest.decode(tmp_path / "virtual")
    index = index_of(source)
    flip(source / index.files[1].path, next(iter(index.shards.iterate_boxes(rows_of(index, 1), 1))).byte_offset)
    (tmp_path / "files").mkdir()
    loaded = load.load_files(decoded, range(2), tmp_path / "files")
    with pytest.raises(CorruptSourceError, match="damaged"):
        load.prove(decoded.plan.index.files, [loaded.ranges], source)


def rows_of(index: Index, file: int) -> Int64Array:
    return np.flatnonzero(index.shards.file == file)
