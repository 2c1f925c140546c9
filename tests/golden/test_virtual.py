"""Virtual commits of real checkpoints: every rank gets the bytes that a conversion would have written for it."""

import dataclasses
import hashlib
import json
import re
import shutil
from pathlib import Path

import numpy as np
import pytest

from reshard.api import Conversion, index_of, plan_conversion, plan_of, reshard
from reshard.commits.commit import read_commit
from reshard.contract import MANIFEST_VERSIONS, ExitCode
from reshard.errors import CorruptSourceError, TargetError, UnsupportedError, UsageError
from reshard.storage.files import LocalFile
from reshard.topology import Topology
from reshard.virtual.auto_mode import Loader
from reshard.virtual.columns import pack
from reshard.virtual.conversion import choose_mode, prepare, ranks_of
from reshard.virtual.load import check_source, load_files, prove
from reshard.virtual.manifest import COLUMNS_FILE, MANIFEST_FILE, decode, encode
from reshard.virtual.needs import compute_needs
from reshard.virtual.ranks import files_by_rank
from tests.golden.files import TARGETS, golden
from tests.randomness import some

CASES = [(name, target) for name, targets in TARGETS.items() for target in targets if "dp=64" not in target]
STORED = Path(__file__).parent
"""Of `virtual-<version>/`: the same manifest as each version writes it; `make_virtual.py` made them."""


def made(tmp_path, name="pipeline-tp2-pp2", target="tp=1,pp=1,dp=3"):
    folder = tmp_path / "virtual"
    prepare(Conversion(source=golden(name), target=folder, topology=Topology.parse(target)))
    return folder


@pytest.mark.parametrize(("name", "target"), some(CASES, every=3))
def test_every_rank_gets_the_bytes_of_its_files_and_reads_nothing_else(name, target, tmp_path, monkeypatch):
    reshard(golden(name), tmp_path / "materialized", Topology.parse(target))
    manifest = decode(made(tmp_path, name, target))
    plan = manifest.plan
    counted, read_into = [0], LocalFile.read_into

    def count(self, target, position):
        found = read_into(self, target, position)
        counted[0] += found
        return found

    monkeypatch.setattr(LocalFile, "read_into", count)
    ranges, opened = [], set()
    for rank, files in enumerate(manifest.ranks):
        folder = tmp_path / f"rank{rank}"
        folder.mkdir()
        counted[0] = 0
        loaded = load_files(manifest, [rank], folder)
        assert counted[0] == loaded.bytes_read == loaded.bytes_needed
        ranges.append(loaded.ranges)
        for at, file in enumerate(plan.layout.files):
            expected = (tmp_path / "materialized" / file.path).read_bytes() if at in files else b""
            assert (folder / file.path).read_bytes() == expected, file.path
        opened |= set(files.tolist())
    assert opened == set(range(len(plan.layout.files)))
    monkeypatch.undo()
    assert prove(plan.index.files, ranges, plan.index.root).open == 0


def test_ranks_of_one_node_read_no_byte_twice(tmp_path):
    manifest = decode(made(tmp_path, "pipeline-tp2-pp2", "tp=2,pp=2,dp=2"))
    (tmp_path / "node").mkdir()
    loaded = load_files(manifest, range(8), tmp_path / "node")
    shards, tensors = manifest.plan.index.shards, manifest.plan.index.tensors
    assert loaded.bytes_read == sum(tensor.num_bytes for tensor in tensors) == manifest.plan.bytes_to_read
    assert loaded.num_files == len(manifest.plan.layout.files)
    assert len(shards) > 0


def test_each_rank_opens_its_own_stage_partition_and_shard():
    index = index_of(golden("pipeline-tp2-pp2"))
    layout = plan_of(index, Topology.parse("tp=2,pp=2,dp=2"), num_threads=1).layout
    names = [{layout.files[at].path for at in files} for files in files_by_rank(layout)]
    assert names[7] == {
        "layer_03-model_01-model_states.pt", "mp_rank_03_model_states.pt", "zero_pp_rank_1_mp_rank_03_optim_states.pt",
        "layer_03-model_00-model_states.pt", "mp_rank_00_model_states.pt",
    }  # fmt: skip
    assert {"layer_00-model_00-model_states.pt", "layer_02-model_00-model_states.pt"} < names[0]
    # DeepSpeed opens the first on every rank; on one node alone that would never be missed.
    assert all("mp_rank_00_model_states.pt" in opened for opened in names)


def test_only_metadata_is_read_and_written(tmp_path):
    folder = made(tmp_path)
    commit = read_commit(folder)
    assert (
        {file.path for file in commit.files}
        == {MANIFEST_FILE, COLUMNS_FILE}
        == {path.name for path in folder.iterdir()} - {"COMMIT.json"}
    )
    assert (commit.format, commit.step, commit.source) == ("virtual", 2, str(golden("pipeline-tp2-pp2")))
    assert commit.topology == Topology(dp=3)
    assert commit.options["plan"] == decode(folder).fingerprint


def test_the_same_manifest_is_the_same_files(tmp_path):
    first, second = made(tmp_path / "a"), made(tmp_path / "b")
    for name in (MANIFEST_FILE, COLUMNS_FILE):
        assert (first / name).read_bytes() == (second / name).read_bytes()


def test_a_second_run_finds_it_done_and_another_one_is_refused(tmp_path):
    wanted = Conversion(source=golden("zero3-dp3"), target=tmp_path / "v", topology=Topology.parse("dp=2,zero=3"))
    assert prepare(wanted).bytes_written > 0
    assert prepare(wanted).message == "already prepared and committed"
    other = Conversion(source=golden("zero3-dp3"), target=tmp_path / "v", topology=Topology.parse("dp=4,zero=3"))
    with pytest.raises(TargetError, match="not the result of this conversion"):
        prepare(other)


@pytest.mark.parametrize("version", MANIFEST_VERSIONS)
def test_a_manifest_of_any_version_so_far_is_read(version):
    manifest = decode(STORED / f"virtual-{version}")
    assert str(manifest.plan.index.root) == "/checkpoints/a1/step-00000002"
    assert manifest.plan.layout.topology == Topology.parse("dp=2,zero=3")
    assert [len(files) for files in manifest.ranks] == [2, 2]
    assert manifest.plan.index.shards.has_families == (version > 1)


def test_versions_say_the_same_in_their_own_words():
    first, last = (decode(STORED / f"virtual-{version}").plan for version in (1, MANIFEST_VERSIONS[-1]))
    assert first.index.files == last.index.files
    assert first.target_tensors == last.target_tensors
    files = [
        {file.path: (file.num_bytes, tuple(file.fixed), file.checksums) for file in plan.layout.files}
        for plan in (first, last)
    ]
    assert files[0] == files[1]
    assert boxes_of(first.index) == boxes_of(last.index)
    assert boxes_of(first.layout) == boxes_of(last.layout)


def boxes_of(side):
    """Every box of an index or a layout, with the path of its file."""
    found = side.shards.boxes()
    columns = (found.tensor, found.replica, found.byte_offset, found.offset, found.size)
    return sorted(
        (side.files[file].path, *row) for file, row in zip(found.file, np.column_stack(columns).tolist(), strict=True)
    )


def test_what_is_written_is_the_last_version_byte_for_byte():
    folder = STORED / f"virtual-{MANIFEST_VERSIONS[-1]}"
    expected = {name: (folder / name).read_bytes() for name in (MANIFEST_FILE, COLUMNS_FILE)}
    assert encode(decode(folder)) == expected


@pytest.mark.parametrize("version", [0, MANIFEST_VERSIONS[-1] + 1, "2", None])
def test_a_manifest_of_another_version_is_refused(version, tmp_path):
    folder = made(tmp_path, "zero3-dp3", "dp=2,zero=3")
    value = json.loads((folder / MANIFEST_FILE).read_text())
    (folder / MANIFEST_FILE).write_text(json.dumps({**value, "version": version}))
    with pytest.raises(CorruptSourceError, match=r"version .*: this program reads 1, 2"):
        decode(folder)


def copied(tmp_path):
    """A source of one's own, and a manifest of it."""
    source = tmp_path / "source"
    shutil.copytree(golden("zero3-dp3"), source)
    prepare(Conversion(source=source, target=tmp_path / "v", topology=Topology.parse("dp=2,zero=3")))
    return source, decode(tmp_path / "v")


@pytest.mark.parametrize("name", ["zero_pp_rank_1_mp_rank_00_optim_states.pt"])
def test_one_flipped_bit_that_no_node_sees_alone_is_found_together(name, tmp_path):
    source, manifest = copied(tmp_path)
    at = next(at for at, file in enumerate(manifest.plan.index.files) if file.path == name)
    shards = manifest.plan.index.shards.boxes()
    row = shards.file.tolist().index(at)
    content = bytearray((source / name).read_bytes())
    content[int(shards.byte_offset[row])] ^= 1
    (source / name).write_bytes(content)
    ranges = []
    for rank in range(2):
        (tmp_path / str(rank)).mkdir()
        ranges.append(load_files(manifest, [rank], tmp_path / str(rank)).ranges)
    with pytest.raises(CorruptSourceError, match=r"1 tensor is damaged[\s\S]*the file itself states"):
        prove(manifest.plan.index.files, ranges, source)


def test_a_source_that_ends_early_is_refused(tmp_path):
    source, manifest = copied(tmp_path)
    path = source / "zero_pp_rank_1_mp_rank_00_optim_states.pt"
    path.write_bytes(path.read_bytes()[:600])
    (tmp_path / "0").mkdir()
    with pytest.raises(CorruptSourceError, match="truncated"):
        load_files(manifest, [0, 1], tmp_path / "0")


def test_a_source_whose_marker_is_another_one_is_refused(tmp_path):
    source, manifest = copied(tmp_path)
    check_source(manifest)
    (source / "COMMIT.json").write_text("{}")
    with pytest.raises(CorruptSourceError, match="removed or replaced"):
        check_source(manifest)


def test_a_rank_that_is_not_there_is_refused(tmp_path):
    manifest = decode(made(tmp_path))
    with pytest.raises(UsageError, match="rank 3 of tp=1,pp=1,dp=3"):
        load_files(manifest, [3], tmp_path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda value: value.update(columns_sha256="0" * 64), "has SHA-256"),
        (lambda value: value.pop("columns_sha256"), "KeyError"),
        (lambda value: value["target"]["files"][0].__setitem__(0, "../out"), "leaves the folder"),
        (lambda value: value["target"]["files"][0].__setitem__(1, 10), "and below"),
        (lambda value: value["target"]["files"][-1].pop(), "ValueError"),
        (lambda value: value["target"]["files"][-1].__setitem__(2, "x"), "a text of 1 bytes, its form has gaps"),
        (lambda value: value["target"]["files"][-1].__setitem__(2, "x" * 4000), "a text of 4000 bytes, its form"),
        (lambda value: [file.__setitem__(1, 10) for file in value["source"]["files"]], "is read"),
        (lambda value: value["source"]["tensors"][0].__setitem__(2, [1]), "not a consistent manifest"),
        (lambda value: value["target"]["tensors"][0].__setitem__(3, 10**6), "and below"),
        (lambda value: value["target"]["topology"].update(dp=3), "ranks are not told"),
        (lambda value: value.pop("source"), "KeyError"),
        (lambda value: value.update(step=True), "expected an integer"),
    ],
)
def test_a_manifest_that_does_not_add_up_is_refused(change, message, tmp_path):
    folder = made(tmp_path, "zero3-dp3", "dp=2,zero=3")
    value = json.loads((folder / MANIFEST_FILE).read_text())
    change(value)
    (folder / MANIFEST_FILE).write_text(json.dumps(value))
    with pytest.raises(CorruptSourceError, match=message):
        decode(folder)


@pytest.mark.parametrize(
    ("column", "row", "change", "message"),
    [
        ("form", (0, 0), -5000, "but byte"),
        ("form", (0, 1), 1, "a text of"),
        ("form", (0, 1), 4000, "a text of"),
        ("gap", (0, 1), -(1 << 40), "is not inside|integer from 0"),
        ("gap", (0, 1), 1 << 40, "is not inside"),
        ("gap", (0, 0), 1 << 40, "and below"),
        ("source_byte_offset", -1, 1 << 20, "is read"),
        ("source_chunk", 0, -1, "not a consistent manifest"),
        ("source_stop", 0, 1, "not a consistent manifest"),
        ("source_start", 0, 1, "not a consistent manifest"),
        ("source_item_bytes", 0, 1, "not a consistent manifest"),
        ("source_file", 0, 2, "in file|there are"),
        ("target_chunk", -1, 1 << 40, "are written twice"),
        ("target_stop", -1, 1 << 61, "not a consistent manifest"),
        ("target_start", 0, -5, "a negative number"),
        ("target_byte_offset", 0, 1 << 30, "but byte"),
    ],
)
def test_columns_that_do_not_add_up_are_refused(column, row, change, message, tmp_path):
    folder = made(tmp_path, "zero3-dp3", "dp=2,zero=3")
    columns = dict(np.load(folder / COLUMNS_FILE))
    columns[column][row] += change
    content = pack(columns)
    (folder / COLUMNS_FILE).write_bytes(content)
    value = json.loads((folder / MANIFEST_FILE).read_text())
    value["columns_sha256"] = hashlib.sha256(content).hexdigest()
    (folder / MANIFEST_FILE).write_text(json.dumps(value))
    with pytest.raises(CorruptSourceError, match=message):
        decode(folder)


@pytest.mark.parametrize("part", [0.1, 0.5, 0.9, 0.999])
@pytest.mark.parametrize("name", [MANIFEST_FILE, COLUMNS_FILE])
def test_a_truncated_manifest_is_refused(name, part, tmp_path):
    folder = made(tmp_path, "zero3-dp3", "dp=2,zero=3")
    content = (folder / name).read_bytes()
    (folder / name).write_bytes(content[: int(len(content) * part)])
    with pytest.raises(CorruptSourceError, match="is not"):
        decode(folder)


def test_a_format_whose_ranks_open_any_file_is_refused(tmp_path):
    wanted = Conversion(
        source=golden("zero2-dp3"), target=tmp_path / "v", topology=Topology(dp=2), target_format="universal"
    )
    with pytest.raises(UnsupportedError, match=r"virtual.*universal.*may open any file") as error:
        prepare(wanted)
    assert error.value.exit_code == ExitCode.UNSUPPORTED
    assert not (tmp_path / "v").exists()


NODE = Loader(ranks_per_node=2, memory_bytes=1 << 30)


def test_auto_writes_files_of_what_is_small_and_says_so():
    plan = plan_of(index_of(golden("zero2-dp3")), Topology.parse("dp=2,zero=2"), num_threads=1)
    assert "(--loader)" in choose_mode(plan, None).reason
    assert re.search("less than 5.0 s are saved", choose_mode(plan, NODE).reason)
    assert "free" in choose_mode(plan, dataclasses.replace(NODE, memory_bytes=1000)).reason


def test_auto_does_not_speak_of_loading_a_manifest_where_none_can_be_made(tmp_path):
    wanted = Conversion(
        source=golden("zero2-dp3"), target=tmp_path / "v", topology=Topology(dp=2), target_format="universal"
    )
    for loader in (None, NODE):
        choice = choose_mode(plan_conversion(wanted), loader)
        assert choice.mode == "materialize"
        assert choice.reason == "virtual is refused: a rank may open any file of the format universal"


@pytest.mark.parametrize("per_node", [1, 2, 3, 8])
def test_what_nodes_need_is_what_they_then_read(per_node, tmp_path):
    manifest = decode(made(tmp_path, "zero3-dp3", "dp=8,zero=3"))
    found = compute_needs(manifest.plan, manifest.ranks, per_node)
    loads = []
    for first in range(0, 8, per_node):
        folder = tmp_path / str(first)
        folder.mkdir()
        own = range(first, min(8, first + per_node))
        loads.append((load_files(manifest, own, folder), sum(path.stat().st_size for path in folder.iterdir())))
    assert found.node_files == max(size for _, size in loads)
    assert found.all_files == sum(size for _, size in loads)
    assert found.write == manifest.plan.bytes_to_write
    assert found.read == manifest.plan.bytes_to_read
    if len(loads) <= 4:  # else some were looked at
        assert found.node_source == max(loaded.bytes_read for loaded, _ in loads)
        assert found.all_source == sum(loaded.bytes_read for loaded, _ in loads)
    else:
        assert found.all_source == pytest.approx(sum(loaded.bytes_read for loaded, _ in loads), rel=0.2)


def test_a_source_of_links_to_a_download_cache_is_not_made_virtual():
    """A manifest names files of the source's own folder only."""
    plan = plan_of(index_of(golden("zero2-dp3")), Topology(dp=2))
    assert ranks_of(plan)
    files = (dataclasses.replace(plan.index.files[0], path="../../blobs/" + "0" * 64), *plan.index.files[1:])
    linked = dataclasses.replace(plan, index=dataclasses.replace(plan.index, files=files))
    with pytest.raises(UnsupportedError, match="is a blob of a download cache"):
        ranks_of(linked)
