"""A source that changes while it is read, between two runs, or after a finished one, is refused."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from reshard.api import Conversion, Hooks, RunOptions, convert, index_of
from reshard.commits.commit import read_commit
from reshard.commits.staging import Sharing
from reshard.contract import ExitCode, ReshardReport
from reshard.errors import ReshardError, SourceChangedError
from reshard.planning import plan
from reshard.storage.object_store import RemotePath, location
from reshard.topology import Topology
from tests.golden.command import HERE, ZERO2, Answer
from tests.golden.test_source_checksums import committed, strip, write_marker

LLAMA = HERE / "safetensors/llama"
FILE = "model-00002-of-00002.safetensors"
Change = Callable[[Path], None]


class StoppedError(Exception):
    """Error that stops a run before its end."""


@pytest.fixture(autouse=True)
def small_units(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan, "SMALLEST_UNIT_BYTES", 128)
    monkeypatch.setattr(plan, "LARGEST_UNIT_BYTES", 4096)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """Weights without any checksum."""
    shutil.copytree(LLAMA, tmp_path / "source")
    newest = max(path.stat().st_ctime_ns for path in (tmp_path / "source").iterdir())
    probe = tmp_path / "probe"
    while probe.write_bytes(b"") or probe.stat().st_ctime_ns <= newest:  # times of files advance in steps
        pass
    probe.unlink()
    return tmp_path / "source"


def run(
    source: Path,
    target: Path,
    *,
    sharing: Sharing = Sharing.ALONE,
    worker: tuple[int, int] = (0, 1),
    progress: Callable[[int], None] | None = None,
) -> ReshardReport:
    wanted = Conversion(source=source, target=target, topology=Topology.parse("dp=1"), keeps_stage=True)
    options = RunOptions(sharing=sharing, worker=worker, num_threads=1)
    return convert(wanted, options, hooks=Hooks(on_progress=progress))


def stopped(source: Path, target: Path, sharing: Sharing = Sharing.RESUMABLE, after: int = 8) -> Path:
    """The unfinished result of a run that failed on the way."""
    count = [0]

    def progress(_num_bytes: int) -> None:
        count[0] += 1
        if count[0] > after:
            raise StoppedError

    with pytest.raises(StoppedError):
        run(source, target, sharing=sharing, progress=progress)
    (partial,) = target.parent.glob(f".{target.name}.partial-*")
    return partial


def in_place(path: Path) -> None:
    """The last byte is another."""
    with path.open("r+b") as stream:
        stream.seek(-1, os.SEEK_END)
        (byte,) = stream.read(1)
        stream.seek(-1, os.SEEK_END)
        stream.write(bytes([byte ^ 1]))


def in_place_and_dated_back(path: Path) -> None:
    before = path.stat()
    in_place(path)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def replaced_and_dated_back(path: Path) -> None:
    """As a synchronising program does that keeps times."""
    before = path.stat()
    other = path.with_name("other")
    shutil.copyfile(path, other)
    in_place(other)
    os.utime(other, ns=(before.st_atime_ns, before.st_mtime_ns))
    other.replace(path)


def truncated(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 1)


def removed(path: Path) -> None:
    path.unlink()


CHANGES = (in_place, in_place_and_dated_back, replaced_and_dated_back)
GONE = (truncated, removed)


def once(change: Change, path: Path, after: int = 1) -> Callable[[int], None]:
    """Progress that changes a file once, when so many bytes have been moved."""
    seen = [0]

    def progress(num_bytes: int) -> None:
        if seen[0] < after <= seen[0] + num_bytes:
            change(path)
        seen[0] += num_bytes

    return progress


@pytest.mark.parametrize("change", (*CHANGES, *GONE))
@pytest.mark.parametrize("sharing", list(Sharing))
def test_a_source_that_changes_while_it_is_read_is_not_converted(
    tmp_path: Path, source: Path, change: Change, sharing: Sharing
) -> None:
    num_bytes = sum(
        tensor.num_bytes for tensor in index_of(source).tensors
    )  # of a file that was read, the bytes are compared
    change_it = once(change, source / FILE, after=num_bytes if change is in_place_and_dated_back else 1)
    with pytest.raises(ReshardError) as caught:
        run(source, tmp_path / "out", sharing=sharing, progress=change_it)
    assert not (tmp_path / "out").exists()
    if change not in GONE:
        assert caught.value.exit_code == ExitCode.SOURCE_CHANGED
        assert FILE in str(caught.value)
    if sharing is not Sharing.TOGETHER:
        assert sorted(path.name for path in tmp_path.iterdir()) == ["source"]


@pytest.mark.parametrize("change", CHANGES)
def test_metadata_that_changes_while_tensors_are_read_is_noticed(tmp_path: Path, source: Path, change: Change) -> None:
    """The list of files is closed again before the first tensor is read."""
    change_it = once(lambda path: change_text(path, change), source / "model.safetensors.index.json")
    with pytest.raises(SourceChangedError, match=r"index\.json") as caught:
        run(source, tmp_path / "out", progress=change_it)
    assert caught.value.exit_code == ExitCode.SOURCE_CHANGED


def change_text(path: Path, change: Change) -> None:
    """The same for a file that must stay JSON: two files change places where the contents change."""
    before = path.stat()
    text = path.read_text().replace("00001-of", "x").replace("00002-of", "00001-of").replace("x", "00002-of", 1 << 30)
    if change is replaced_and_dated_back:
        path.unlink()
    path.write_text(text)
    if change is not in_place:
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def test_other_owners_modes_and_links_of_a_source_do_not_matter(tmp_path: Path, source: Path) -> None:
    """As Kubernetes gives the files of a volume another group whenever a pod mounts it."""

    def attributes(_num_bytes: int) -> None:
        for path in source.iterdir():
            path.chmod(0o640)

    found = run(source, tmp_path / "out", progress=attributes)
    assert found.verified
    stopped(source, tmp_path / "again")
    attributes(0)
    assert "had been done before" in run(source, tmp_path / "again", sharing=Sharing.RESUMABLE).message
    attributes(0)
    assert "already converted" in run(source, tmp_path / "out").message


@pytest.mark.parametrize("name", [FILE, "model-00001-of-00002.safetensors"])
@pytest.mark.parametrize("change", (in_place, replaced_and_dated_back))
def test_a_source_that_changed_since_is_not_gone_on_with(
    tmp_path: Path, source: Path, change: Change, name: str, say: Answer
) -> None:
    """The answer does not depend on whether the stopped run had read the file."""
    partial = stopped(source, tmp_path / "out")
    kept = sorted(path.name for path in partial.rglob("*"))
    change(source / name)
    found = say.json("run", source, tmp_path / "out", "--to", "dp=1", "--resume", code=ExitCode.SOURCE_CHANGED)
    assert found["exit_code"] == 13
    assert found["error"]["kind"] == "SourceChangedError"
    assert name in found["error"]["problems"][0]
    assert str(partial) in found["error"]["hint"]
    assert sorted(path.name for path in partial.rglob("*")) == kept
    assert not (tmp_path / "out").exists()
    say("run", source, tmp_path / "out", "--to", "dp=1")
    assert not partial.exists()


def test_what_was_read_before_is_compared_where_only_the_time_of_status_tells(tmp_path: Path, source: Path) -> None:
    stopped(source, tmp_path / "out", after=18)
    first = source / "model-00001-of-00002.safetensors"
    before = first.stat()
    content = bytearray(first.read_bytes())
    start = 8 + int.from_bytes(content[:8], "little")
    content[start:] = bytes(byte ^ 1 for byte in content[start:])
    first.write_bytes(content)
    os.utime(first, ns=(before.st_atime_ns, before.st_mtime_ns))
    with pytest.raises(SourceChangedError, match="another content"):
        run(source, tmp_path / "out", sharing=Sharing.RESUMABLE)
    assert not (tmp_path / "out").exists()


def test_a_source_with_another_description_is_not_silently_begun_anew(tmp_path: Path, say: Answer) -> None:
    """Archives state checksums, so another content is another plan: `--resume` must not find nothing to go on with."""
    source = tmp_path / "source"
    shutil.copytree(ZERO2, source)
    words = ("--to", "dp=2")
    wanted = Conversion(source=source, target=tmp_path / "out", topology=Topology.parse("dp=2"), keeps_stage=True)
    count = [0]

    def progress(_num_bytes: int) -> None:
        count[0] += 1
        if count[0] > 4:
            raise StoppedError

    with pytest.raises(StoppedError):
        convert(wanted, RunOptions(sharing=Sharing.RESUMABLE, num_threads=1), hooks=Hooks(on_progress=progress))
    strip(source / "mp_rank_00_model_states.pt")
    say("run", source, tmp_path / "out", *words, "--resume", code=ExitCode.SOURCE_CHANGED)


def test_records_of_units_whose_source_nobody_knows_are_not_believed(tmp_path: Path, source: Path) -> None:
    """As a version left them that did not say what it had read."""
    partial = stopped(source, tmp_path / "out")
    for path in (partial / ".journal").glob("source-*"):
        path.unlink()
    in_place(source / "model-00001-of-00002.safetensors")
    report = run(source, tmp_path / "out", sharing=Sharing.RESUMABLE)
    assert "had been done before" not in report.message
    assert report.digest == run(source, tmp_path / "fresh").digest


def test_workers_that_saw_two_sources_publish_nothing(tmp_path: Path, source: Path) -> None:
    stopped(source, tmp_path / "out", Sharing.TOGETHER)
    in_place(source / FILE)
    with pytest.raises(SourceChangedError) as caught:
        run(source, tmp_path / "out", sharing=Sharing.TOGETHER, worker=(1, 2))
    assert "remove" in caught.value.hint
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("resume", [False, True])
def test_a_result_of_an_earlier_content_is_not_called_done(
    tmp_path: Path, source: Path, say: Answer, change: Change, resume: bool
) -> None:
    words = ("--to", "dp=1", *(["--resume"] if resume else []))
    say("run", source, tmp_path / "out", *words)
    before = read_commit(tmp_path / "out")
    change(source / FILE)
    found = say.json("run", source, tmp_path / "out", *words, code=ExitCode.SOURCE_CHANGED)
    assert str(tmp_path / "out") in found["error"]["message"]
    say.json("plan", source, tmp_path / "out", "--to", "dp=1", code=ExitCode.SOURCE_CHANGED)
    assert read_commit(tmp_path / "out") == before


def test_two_tensors_that_changed_places_in_the_header_are_another_source(tmp_path: Path, source: Path) -> None:
    """Size, plan and every byte of every tensor are the same."""
    run(source, tmp_path / "out")
    swap_offsets(source / FILE)
    with pytest.raises(SourceChangedError):
        run(source, tmp_path / "out")


def swap_offsets(path: Path) -> None:
    """Two tensors of the same size change places, as far as the header says."""
    import json

    content = path.read_bytes()
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    tensors = [value for key, value in header.items() if key != "__metadata__"]
    one, other = next(
        (a, b) for a in tensors for b in tensors if a is not b and a["shape"] == b["shape"] and a["dtype"] == b["dtype"]
    )
    one["data_offsets"], other["data_offsets"] = other["data_offsets"], one["data_offsets"]
    text = json.dumps(header, separators=(",", ":")).encode().ljust(length)
    assert len(text) == length
    path.write_bytes(content[:8] + text + content[8 + length :])


def test_a_source_that_was_put_back_from_a_copy_is_the_same(tmp_path: Path, source: Path) -> None:
    """Other inodes and other times, and every byte as it was."""
    run(source, tmp_path / "out")
    shutil.copytree(source, tmp_path / "copy", copy_function=shutil.copyfile)
    shutil.rmtree(source)
    (tmp_path / "copy").rename(source)
    assert "already converted" in run(source, tmp_path / "out").message


@pytest.mark.parametrize("marker", ["written-again", "kept"])
def test_a_committed_source_that_changed_is_not_called_done(tmp_path: Path, marker: str) -> None:
    source = committed(LLAMA, tmp_path / "source")
    run(source, tmp_path / "out")
    in_place(source / FILE)
    if marker == "written-again":
        write_marker(source)
    with pytest.raises(SourceChangedError):
        run(source, tmp_path / "out")


def test_a_result_of_an_older_version_is_done_unless_the_source_was_written_since(tmp_path: Path, source: Path) -> None:
    import dataclasses

    from reshard.commits.commit import write_commit

    run(source, tmp_path / "out")
    commit = dataclasses.replace(read_commit(tmp_path / "out"), origin={})
    write_commit(tmp_path / "out", commit)
    assert "already converted" in run(source, tmp_path / "out").message
    in_place(source / FILE)
    with pytest.raises(SourceChangedError, match="was written at"):
        run(source, tmp_path / "out")


def test_a_marker_without_an_origin_is_read(tmp_path: Path, source: Path) -> None:
    import json

    run(source, tmp_path / "out")
    marker = json.loads((tmp_path / "out/COMMIT.json").read_text())
    assert set(marker["origin"]) == {"identity", "content"}
    del marker["origin"], marker["checksum"]
    (tmp_path / "out/COMMIT.json").write_text(json.dumps(marker))
    assert read_commit(tmp_path / "out").origin == {}


@pytest.fixture
def bucket(tmp_path: Path) -> RemotePath:
    source = location(f"memory://{tmp_path.name}/source")
    assert isinstance(source, RemotePath)
    for path in LLAMA.iterdir():
        source.filesystem().pipe_file(f"{source}/{path.name}", path.read_bytes())
    return source


def put(source: RemotePath, name: str = FILE) -> None:
    content = bytearray(source.filesystem().cat_file(f"{source}/{name}"))
    content[-1] ^= 1
    source.filesystem().pipe_file(f"{source}/{name}", bytes(content))


def test_an_object_that_is_written_while_it_is_read_is_refused(tmp_path: Path, bucket: RemotePath) -> None:
    with pytest.raises(SourceChangedError, match="is version"):
        run(bucket, tmp_path / "out", progress=once(lambda _: put(bucket), tmp_path))
    assert not (tmp_path / "out").exists()


def test_an_object_that_was_written_between_two_runs_is_refused(tmp_path: Path, bucket: RemotePath) -> None:
    stopped(bucket, tmp_path / "out", after=4)
    put(bucket)
    with pytest.raises(SourceChangedError):
        run(bucket, tmp_path / "out", sharing=Sharing.RESUMABLE)


def test_an_object_that_was_written_after_the_run_is_refused(tmp_path: Path, bucket: RemotePath) -> None:
    run(bucket, tmp_path / "out")
    assert "already converted" in run(bucket, tmp_path / "out").message
    bucket.filesystem().pipe_file(f"{bucket}/{FILE}", (LLAMA / FILE).read_bytes())  # put there again
    assert "already converted" in run(bucket, tmp_path / "out").message
    put(bucket)
    with pytest.raises(SourceChangedError):
        run(bucket, tmp_path / "out")


def test_a_virtual_commit_of_an_earlier_content_is_not_called_done(tmp_path: Path, say: Answer) -> None:
    source = tmp_path / "source"
    shutil.copytree(ZERO2, source)
    words = ("run", source, tmp_path / "out", "--to", "dp=2", "--mode", "virtual")
    say(*words)
    for path in source.iterdir():
        path.chmod(0o640)
    assert "already prepared" in say(*words)
    changed = source / "zero_pp_rank_1_mp_rank_00_optim_states.pt"
    changed.write_bytes(changed.read_bytes())
    found = say.json(*words, code=ExitCode.SOURCE_CHANGED)
    assert "describes" in found["error"]["problems"][0]
