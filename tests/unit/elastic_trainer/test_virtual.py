"""Virtual commits in the training process: restore, shared memory, damage, and what retention keeps for them."""

import json
import multiprocessing
import shutil
from pathlib import Path

import pytest

from elastic_trainer import virtual
from elastic_trainer.mailbox import FileMailbox
from elastic_trainer.retention import find_commits, find_references, prune
from elastic_trainer.session import Session
from elastic_trainer.settings import from_env
from reshard.api import Conversion, reshard
from reshard.commits.commit import Commit, CommittedFile, read_commit, source_of, write_commit
from reshard.contract import MANIFEST_VERSIONS, LeaseKey, VirtualLoader
from reshard.errors import StoreError, TargetError, UnsupportedError
from reshard.topology import Topology
from reshard.virtual.conversion import prepare

GOLDEN = Path(__file__).parents[2] / "golden" / "deepspeed-0.19.8" / "zero3-dp3" / "step-00000002"
ONE = Topology.parse("dp=1,zero=3")


@pytest.fixture
def prepared(tmp_path):
    """A committed source, and a virtual commit of it for one rank."""
    source = tmp_path / "ckpt" / "a1" / "step-00000002"
    shutil.copytree(GOLDEN, source)
    files = [CommittedFile(path=path.name, num_bytes=path.stat().st_size) for path in sorted(source.iterdir())]
    commit = Commit(
        format="deepspeed", step=2, samples=24, topology=Topology.parse("dp=3,zero=3"), attempt=1, writer="trainer",
        files=files, data={"seed": 7},
    )  # fmt: skip
    write_commit(source, commit)
    folder = tmp_path / "ckpt" / "a2" / "step-00000002"
    prepare(Conversion(source=source, target=folder, topology=ONE, attempt=2))
    return source, folder


def session_of(tmp_path, folder):
    scratch = tmp_path / "memory"
    scratch.mkdir(exist_ok=True)
    environment = {
        "ETJ_ATTEMPT": "2",
        "ETJ_CHECKPOINT_ROOT": str(tmp_path / "ckpt"),
        "ETJ_HEARTBEAT_SECONDS": "0.05",
        "ETJ_RESUME": str(folder),
        "ETJ_TOPOLOGY": ONE.to_json(),
        "ETJ_SCRATCH": str(scratch),
    }
    return Session(from_env(environment), FileMailbox(tmp_path / "mailbox.json")), scratch


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.glob("*.pt")}


def test_restore_gives_the_framework_the_converted_files_and_frees_the_memory(prepared, tmp_path):
    source, folder = prepared
    session, scratch = session_of(tmp_path, folder)
    session.start()
    seen = {}
    position = session.restore(lambda path: seen.update(name=path.name, files=contents(path)))
    session.finish()
    reshard(source, tmp_path / "materialized", ONE)
    assert seen == {"name": "step-00000002", "files": contents(tmp_path / "materialized")}
    assert (position.step, position.data) == (2, {"seed": 7})
    assert [path for path in scratch.rglob("*") if path.is_file()] == []


@pytest.mark.parametrize("how", ["flipped", "gone"])
def test_a_damaged_source_ends_the_attempt_and_tells_the_operator(prepared, tmp_path, how):
    source, folder = prepared
    if how == "gone":
        shutil.rmtree(source)
    else:
        path = source / "zero_pp_rank_1_mp_rank_00_optim_states.pt"
        content = bytearray(path.read_bytes())
        found = virtual.decode(folder).plan.index
        shards, paths = found.shards.boxes(), [file.path for file in found.files]
        content[int(shards.byte_offset[shards.file.tolist().index(paths.index(path.name))])] ^= 4
        path.write_bytes(content)
    session, scratch = session_of(tmp_path, folder)
    session.start()
    loaded = []
    with pytest.raises(SystemExit) as stopped:
        session.restore(loaded.append)
    assert stopped.value.code == 76
    assert loaded == []
    told = json.loads((tmp_path / "mailbox.json").read_text())[LeaseKey.RESUME_ERROR]
    assert ("the file itself states" if how == "flipped" else "removed or replaced") in told
    assert [path for path in scratch.rglob("*") if path.is_file()] == []


def test_a_source_that_cannot_be_read_now_costs_no_commit(prepared, tmp_path, monkeypatch):
    def fail(manifest):
        raise StoreError("cannot be read: Input/output error")

    monkeypatch.setattr(virtual, "check_source", fail)
    session, _ = session_of(tmp_path, prepared[1])
    session.start()
    with pytest.raises(StoreError, match="Input/output"):
        session.restore(lambda folder: pytest.fail(f"loaded {folder}"))
    assert LeaseKey.RESUME_ERROR not in json.loads((tmp_path / "mailbox.json").read_text())


def test_a_script_that_loads_later_does_not_offer_to_load_a_virtual_commit_and_refuses_one(prepared, tmp_path):
    _, folder = prepared
    session, _ = session_of(tmp_path, folder)
    session.start()
    loaded = []
    with pytest.raises(SystemExit) as stopped:
        session.restore(loaded.append, virtual_commits=False)
    assert stopped.value.code == 76
    assert loaded == []
    told = json.loads((tmp_path / "mailbox.json").read_text())
    assert "reshard it in mode Materialize" in told[LeaseKey.RESUME_ERROR]
    assert VirtualLoader.from_json(told[LeaseKey.LOADER]).manifests == ()


def _open(folder, scratch, barrier, results):
    with virtual.open_virtual_commit(folder, ranks=range(1), scratch=scratch) as made:
        barrier.wait(60)  # nobody leaves before all are in
        results.put((made.loaded is not None, len(contents(made.folder))))
        barrier.wait(60)


def test_processes_of_a_node_share_what_one_of_them_made(prepared, tmp_path):
    _, folder = prepared
    context = multiprocessing.get_context("spawn")
    barrier, results = context.Barrier(3), context.Queue()
    arguments = (folder, tmp_path, barrier, results)
    processes = [context.Process(target=_open, args=arguments) for _ in range(3)]
    for process in processes:
        process.start()
    found = [results.get(timeout=60) for _ in processes]
    for process in processes:
        process.join(60)
    assert sorted(made for made, _ in found) == [False, False, True]
    assert len({count for _, count in found}) == 1
    assert list(tmp_path.glob("elastic-trainer-*/*")) == []


def test_what_a_killed_process_left_is_removed_and_not_used(prepared, tmp_path):
    _, folder = prepared
    with virtual.open_virtual_commit(folder, ranks=range(1), scratch=tmp_path) as made:
        base, name = made.folder.parents[1], made.folder.parent.name
        whole = contents(made.folder)
    (base / name / folder.name).mkdir(parents=True)
    (base / name / folder.name / "half.pt").write_bytes(b"half")  # no .ready
    (base / "0123").mkdir()
    (base / "0123.lock").touch()
    with virtual.open_virtual_commit(folder, ranks=range(1), scratch=tmp_path) as made:
        assert contents(made.folder) == whole
        assert not (base / "0123").exists()


def test_a_scratch_folder_that_others_can_write_is_refused(prepared, tmp_path):
    _, folder = prepared
    with virtual.open_virtual_commit(folder, ranks=range(1), scratch=tmp_path) as made:
        base = made.folder.parents[1]
    base.chmod(0o777)
    with (
        pytest.raises(TargetError, match="not a folder of this user alone"),
        virtual.open_virtual_commit(folder, ranks=range(1), scratch=tmp_path),
    ):
        pass


def committed(root, attempt, step, **fields):
    folder = root / f"a{attempt}" / f"step-{step:08d}"
    folder.mkdir(parents=True)
    commit = Commit(
        **{"format": "deepspeed", "step": step, "samples": step, "topology": ONE, "attempt": attempt,
           "writer": "trainer", "files": [], **fields}
    )  # fmt: skip
    write_commit(folder, commit)
    return folder


def test_retention_keeps_the_source_of_a_virtual_commit_as_long_as_that_stays(tmp_path):
    first = committed(tmp_path, 1, 1)
    committed(tmp_path, 1, 2)
    through = committed(tmp_path, 2, 2, format="virtual", source=str(first))
    committed(tmp_path, 2, 3)
    prune(tmp_path, attempt=2, keep=2, protected=set())
    assert [folder for _, _, folder in sorted(find_commits(tmp_path))] == [
        first, through, tmp_path / "a2" / "step-00000003",
    ]  # fmt: skip
    committed(tmp_path, 2, 4)
    committed(tmp_path, 2, 5)
    prune(tmp_path, attempt=2, keep=2, protected={through})
    assert first.exists()
    prune(tmp_path, attempt=2, keep=2, protected=set())
    assert not first.exists()
    assert not through.exists()


def test_references_follow_other_names_of_a_folder(tmp_path):
    first = committed(tmp_path / "real", 1, 1)
    (tmp_path / "link").symlink_to(tmp_path / "real")
    through = committed(tmp_path / "real", 2, 1, format="virtual", source=str(tmp_path / "link/a1/step-00000001"))
    assert find_references({first, through}) == {through: first}


def test_the_bytes_of_a_chain_of_virtual_commits_are_found(tmp_path):
    first = committed(tmp_path, 1, 1)
    second = committed(tmp_path, 2, 1, format="virtual", source=str(first))
    third = committed(tmp_path, 3, 1, format="virtual", source=str(second))
    assert source_of(third, read_commit(third)) == first
    circle = committed(tmp_path, 4, 1, format="virtual", source=str(tmp_path / "a4/step-00000001"))
    with pytest.raises(UnsupportedError, match="more than 8"):
        source_of(circle, read_commit(circle))


def test_restore_says_what_it_can_load_at_a_first_start_too(tmp_path):
    session, scratch = session_of(tmp_path, "")
    session.start()
    session.restore(lambda path: None)
    session.finish()
    told = VirtualLoader.from_json(json.loads((tmp_path / "mailbox.json").read_text())[LeaseKey.LOADER])
    assert told.manifests == MANIFEST_VERSIONS
    assert 0 < told.memory_bytes <= shutil.disk_usage(scratch).total


def test_memory_for_loading_is_what_is_free_of_the_machine_where_there_is_no_scratch_folder(tmp_path):
    assert virtual.describe_loader(tmp_path / "none").memory_bytes > 0
