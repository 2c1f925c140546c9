"""The session in one process: commit protocol, restore, drain, retention. Its framework writes plain files."""

import errno
import json
from pathlib import Path

import pytest

from elastic_trainer.file_shares import Finding
from elastic_trainer.mailbox import FileMailbox
from elastic_trainer.retention import find_commits, find_superseded
from elastic_trainer.session import Session
from elastic_trainer.settings import from_env
from reshard.commits import commit as commits
from reshard.commits.commit import check_files, read_commit
from reshard.contract import CommitRef, LeaseKey
from reshard.errors import StoreError


def make_session(tmp_path, *, attempt=1, resume=None, keep=3, **env):
    environment = {
        "ETJ_ATTEMPT": str(attempt),
        "ETJ_CHECKPOINT_ROOT": str(tmp_path / "ckpt"),
        "ETJ_HEARTBEAT_SECONDS": "0.05",
        "ETJ_RESUME": str(resume or ""),
        **env,
    }
    return Session(from_env(environment), FileMailbox(tmp_path / f"mailbox-{attempt}.json"), keep=keep)


def mailbox(tmp_path, attempt=1):
    return json.loads((tmp_path / f"mailbox-{attempt}.json").read_text())


def write_files(folder, tag):
    (folder / tag / "part").mkdir(parents=True)
    (folder / tag / "weights.pt").write_bytes(b"w" * 1000)
    (folder / tag / "part" / "optimizer.pt").write_bytes(b"o" * 3000)


def run(session, *, first=0, steps=1, save=True):
    for step in range(first + 1, first + steps + 1):
        session.after_step(step=step, samples=step * 10, loss=2.5)
    return session.save(write_files, data={"seed": 7}, model={"pipeline": {}}) if save else None


def test_a_save_is_published_with_sizes_and_checksums_and_told_to_the_operator(tmp_path):
    session = make_session(tmp_path)
    session.start()
    folder = run(session, steps=4)
    session.finish()
    commit = read_commit(folder)
    assert folder == tmp_path / "ckpt" / "a1" / "step-00000004"
    assert [(file.path, file.num_bytes) for file in commit.files] == [("part/optimizer.pt", 3000), ("weights.pt", 1000)]
    assert all(file.crc32 is not None for file in commit.files)
    assert (commit.step, commit.samples, commit.writer, commit.data) == (4, 40, "trainer", {"seed": 7})
    box = mailbox(tmp_path)
    assert CommitRef.from_json(box[LeaseKey.COMMIT]) == commit.ref(folder)
    assert (box[LeaseKey.PHASE], box[LeaseKey.STEP], box[LeaseKey.SAMPLES]) == ("Complete", "4", "40")
    assert box[LeaseKey.FIRST_STEP_TIME] <= box[LeaseKey.STEP_TIME]


def test_a_link_that_a_script_saves_is_left_out_of_the_commit_which_stays_whole(tmp_path, caplog):
    session = make_session(tmp_path)
    session.start()
    session.after_step(step=1, samples=10, loss=1.0)

    def write_with_link(folder, tag):
        write_files(folder, tag)
        (folder / tag / "best.pt").symlink_to("weights.pt")

    folder = session.save(write_with_link)
    session.finish()
    commit = read_commit(folder)
    check_files(folder, commit)
    assert "best.pt" not in {file.path for file in commit.files}
    assert "best.pt: is a symbolic link" in caplog.text


def test_a_save_that_dies_before_its_marker_is_invisible_and_can_be_repeated(tmp_path):
    session = make_session(tmp_path)
    session.start()
    session.after_step(step=1, samples=10, loss=1.0)

    def die(folder, tag):
        write_files(folder, tag)
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        session.save(die)
    assert find_commits(tmp_path / "ckpt") == []
    assert session.save(write_files) == tmp_path / "ckpt" / "a1" / "step-00000001"
    assert len(find_commits(tmp_path / "ckpt")) == 1
    session.finish()


def test_the_next_attempt_goes_on_where_the_commit_ends(tmp_path):
    first = make_session(tmp_path)
    first.start()
    folder = run(first, steps=3)
    first.finish()
    loaded = []
    second = make_session(tmp_path, attempt=2, resume=folder)
    second.start()
    position = second.restore(loaded.append)
    second.finish()
    assert (position.step, position.samples, position.data, loaded) == (3, 30, {"seed": 7}, [folder])


def test_a_first_start_loads_nothing(tmp_path):
    session = make_session(tmp_path)
    session.start()
    assert session.restore(lambda folder: pytest.fail(f"loaded {folder}")).step == 0
    session.finish()


def flip_a_bit(folder):
    path = folder / "weights.pt"
    content = bytearray(path.read_bytes())
    content[500] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize(
    ("damage", "told"),
    [
        (flip_a_bit, "weights.pt: CRC-32"),
        (
            lambda folder: (folder / "weights.pt").write_bytes(b"w"),
            "weights.pt: 1000 bytes were committed, 1 are there",
        ),
        (lambda folder: (folder / "part" / "optimizer.pt").unlink(), "optimizer.pt: No such file"),
        (lambda folder: (folder / "COMMIT.json").unlink(), "never completed"),
        (lambda folder: (folder / "COMMIT.json").write_text("{"), "not a commit marker"),
    ],
)
def test_a_damaged_commit_is_never_loaded_and_the_operator_hears_why(tmp_path, damage, told):
    first = make_session(tmp_path)
    first.start()
    folder = run(first)
    first.finish()
    damage(folder)
    second = make_session(tmp_path, attempt=2, resume=folder)
    second.start()
    with pytest.raises(SystemExit) as caught:
        second.restore(lambda folder: pytest.fail(f"loaded {folder}"))
    assert caught.value.code == 76
    assert told in mailbox(tmp_path, 2)[LeaseKey.RESUME_ERROR]


def make_stale(folder, monkeypatch):
    def fail(path):
        raise OSError(errno.ESTALE, "Stale file handle", str(path))

    monkeypatch.setattr(commits, "file_crc32", fail)


@pytest.mark.parametrize(
    "fail",
    [
        make_stale,
        lambda folder, _: folder.parent.rename(folder.parents[2] / "away"),
        lambda folder, _: folder.parents[1].rename(folder.parents[2] / "away"),
    ],
    ids=["stale", "no-attempt", "no-root"],
)
def test_a_storage_that_cannot_be_read_ends_the_attempt_and_costs_no_commit(tmp_path, monkeypatch, fail):
    first = make_session(tmp_path)
    first.start()
    folder = run(first)
    first.finish()
    second = make_session(tmp_path, attempt=2, resume=folder)
    second.start()
    fail(folder, monkeypatch)
    with pytest.raises(StoreError, match="step-00000001"):
        second.restore(lambda folder: pytest.fail(f"loaded {folder}"))
    assert LeaseKey.RESUME_ERROR not in mailbox(tmp_path, 2)


@pytest.mark.parametrize(("others", "error"), [("read it", StoreError), ("miss it, too", SystemExit)])
def test_a_commit_is_gone_only_if_no_rank_sees_it(tmp_path, monkeypatch, others, error):
    (tmp_path / "ckpt" / "a1").mkdir(parents=True)
    session = make_session(tmp_path, attempt=2, resume=tmp_path / "ckpt" / "a1" / "step-00000001")
    session.start()
    other = [Finding()] if others == "read it" else []
    monkeypatch.setattr(session._collective, "gather", lambda value: [value, *other])
    with pytest.raises(error):
        session.restore(lambda folder: pytest.fail(f"loaded {folder}"))
    assert (LeaseKey.RESUME_ERROR in mailbox(tmp_path, 2)) == (error is SystemExit)


def test_a_commit_of_another_topology_is_refused_with_both_named(tmp_path):
    first = make_session(tmp_path)
    first.start()
    folder = run(first)
    first.finish()
    second = make_session(tmp_path, attempt=2, resume=folder, ETJ_TOPOLOGY="zero=0")
    second.start()
    with pytest.raises(SystemExit):
        second.restore(lambda folder: pytest.fail(f"loaded {folder}"))
    told = mailbox(tmp_path, 2)[LeaseKey.RESUME_ERROR]
    assert "tp=1,pp=1,dp=1,zero=1" in told
    assert "tp=1,pp=1,dp=1,zero=0" in told


def write_dcp_files(folder, tag):
    """Write the files that torch.distributed.checkpoint writes on two ranks, one of them hidden."""
    (folder / tag).mkdir(parents=True)
    for name, content in ((".metadata", b"m" * 300), ("__0_0.distcp", b"0" * 2000), ("__1_0.distcp", b"1" * 1000)):
        (folder / tag / name).write_bytes(content)


def save_dcp(tmp_path, **env):
    session = make_session(tmp_path, **env)
    session.start()
    session.after_step(step=2, samples=20, loss=1.0)
    folder = session.save(write_dcp_files, format_="dcp", data={"seed": 7})
    session.finish()
    return folder


def test_a_dcp_commit_names_its_format_and_its_hidden_file(tmp_path):
    folder = save_dcp(tmp_path)
    commit = read_commit(folder)
    assert commit.format == "dcp"
    assert [file.path for file in commit.files] == [".metadata", "__0_0.distcp", "__1_0.distcp"]
    assert all(file.crc32 is not None for file in commit.files)
    told = CommitRef.from_json(mailbox(tmp_path)[LeaseKey.COMMIT])
    assert (told.format, told.num_bytes) == ("dcp", 3300)


@pytest.mark.parametrize("topology", ["zero=3", "zero=0", "zero=1"])
def test_a_dcp_commit_is_loaded_in_any_topology(tmp_path, topology):
    folder = save_dcp(tmp_path, ETJ_TOPOLOGY="zero=3")
    loaded = []
    session = make_session(tmp_path, attempt=2, resume=folder, ETJ_TOPOLOGY=topology)
    session.start()
    position = session.restore(loaded.append)
    session.finish()
    assert (position.step, position.samples, position.data, loaded) == (2, 20, {"seed": 7}, [folder])


@pytest.mark.parametrize("name", [".metadata", "__1_0.distcp"])
def test_a_damaged_dcp_commit_is_refused_in_another_topology_too(tmp_path, name):
    folder = save_dcp(tmp_path, ETJ_TOPOLOGY="zero=3")
    content = bytearray((folder / name).read_bytes())
    content[50] ^= 1
    (folder / name).write_bytes(content)
    session = make_session(tmp_path, attempt=2, resume=folder, ETJ_TOPOLOGY="zero=0")
    session.start()
    with pytest.raises(SystemExit) as caught:
        session.restore(lambda folder: pytest.fail(f"loaded {folder}"))
    assert caught.value.code == 76
    assert f"{name}: CRC-32" in mailbox(tmp_path, 2)[LeaseKey.RESUME_ERROR]


def test_a_drain_request_saves_stops_and_exits_with_75(tmp_path):
    session = make_session(tmp_path)
    session.start()
    assert not session.after_step(step=1, samples=10, loss=1.0).stop
    FileMailbox(tmp_path / "mailbox-1.json").exchange({LeaseKey.REQUEST: "drain"})
    while session._heartbeat.request != "drain":
        pass
    action = session.after_step(step=2, samples=20, loss=1.0)
    assert (action.save, action.stop) == (True, True)
    session.save(write_files)
    with pytest.raises(SystemExit) as caught:
        session.finish()
    assert caught.value.code == 75
    box = mailbox(tmp_path)
    assert (box[LeaseKey.PHASE], box[LeaseKey.REQUEST_SEEN]) == ("Drained", "drain")
    assert CommitRef.from_json(box[LeaseKey.COMMIT]).step == 2


def test_commits_are_due_by_time_only_where_an_interval_is_set(tmp_path):
    never = make_session(tmp_path)
    assert not never.after_step(step=1, samples=10, loss=1.0).save
    always = make_session(tmp_path, attempt=2, ETJ_CHECKPOINT_INTERVAL_SECONDS="1e-9")
    assert always.after_step(step=1, samples=10, loss=1.0).save


COMMITS = [(attempt, step, Path(f"a{attempt}/step-{step:08d}")) for attempt, step in [(1, 5), (1, 9), (2, 9), (2, 12)]]


@pytest.mark.parametrize(
    ("attempt", "keep", "protected", "gone"),
    [
        (2, 3, [], [(1, 5)]),
        (2, 1, [], [(2, 9), (1, 9), (1, 5)]),
        (2, 1, [(2, 9)], [(1, 9), (1, 5)]),
        (1, 1, [], [(1, 5)]),  # an attempt that was superseded leaves the newer one's commits alone
        (3, 9, [], []),
    ],
)
def test_the_newest_commits_and_the_one_in_use_stay(attempt, keep, protected, gone):
    folder = {(attempt, step): path for attempt, step, path in COMMITS}
    found = find_superseded(COMMITS, attempt=attempt, keep=keep, protected={folder[key] for key in protected})
    assert found == [folder[key] for key in gone]


def test_old_commits_go_after_a_publish(tmp_path):
    session = make_session(tmp_path, keep=2)
    session.start()
    for step in (1, 2, 3):
        run(session, first=step - 1)
    session.finish()
    assert sorted(path.name for _, _, path in find_commits(tmp_path / "ckpt")) == ["step-00000002", "step-00000003"]
    assert not (tmp_path / "ckpt" / "a1" / "step-00000001").exists()
