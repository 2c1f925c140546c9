"""Asynchronous saves with a real copy process: when a save is asynchronous, failures, drain, fencing, several nodes."""

import concurrent.futures
import json
import os
import shutil
import subprocess
import threading
import time

import pytest

from elastic_trainer import attempts
from elastic_trainer.collective import Collective
from elastic_trainer.errors import FencedError, SaveError
from elastic_trainer.mailbox import FileMailbox
from elastic_trainer.retention import find_commits
from elastic_trainer.saving.asynchronous import AsynchronousSaves
from elastic_trainer.saving.copier import Copier
from elastic_trainer.saving.copy_process import carry_out
from elastic_trainer.saving.reports import CopyOrder, NodeReport, merge, read_report
from elastic_trainer.session import Session
from elastic_trainer.settings import from_env
from reshard.commits.commit import Commit, CommittedFile, check_files, read_commit
from reshard.commits.root_owner import claim_root
from reshard.contract import LeaseKey
from reshard.topology import Topology


class Box(FileMailbox):
    """A mailbox that can be cut off."""

    is_cut = False

    def exchange(self, annotations):
        if self.is_cut:
            raise OSError("no route")
        return super().exchange(annotations)


@pytest.fixture
def make_session(tmp_path):
    sessions = []

    def make(*, attempt=1, **env):
        (tmp_path / "node").mkdir(exist_ok=True)
        environment = {
            "ETJ_ATTEMPT": str(attempt),
            "ETJ_CHECKPOINT_ROOT": str(tmp_path / "ckpt"),
            "ETJ_HEARTBEAT_SECONDS": "0.05",
            "ETJ_ASYNC_SAVES": "true",
            "ETJ_STAGING": str(tmp_path / "node"),
            "ETJ_STAGING_BYTES": "1000000",
            **env,
        }
        session = Session(from_env(environment), Box(tmp_path / f"mailbox-{attempt}.json"))
        session.start()
        sessions.append(session)
        return session

    yield make
    for session in sessions:
        session._close()


def mailbox(tmp_path, attempt=1):
    return json.loads((tmp_path / f"mailbox-{attempt}.json").read_text())


def write(folder, tag):
    (folder / tag / "part").mkdir(parents=True)
    (folder / tag / "weights.pt").write_bytes(b"w" * 1000)
    (folder / tag / "part" / "optimizer.pt").write_bytes(b"o" * 3000)
    (folder / "latest").write_text(tag)


def write_a_link(folder, tag):
    write(folder, tag)
    (folder / tag / "link").symlink_to("weights.pt")


def save(session, step, write=write):
    session.after_step(step=step, samples=10 * step, loss=1.0)
    return session.save(write, data={"seed": 7})


def wait_for(what):
    deadline = time.monotonic() + 30
    while not what():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def steps_of(tmp_path):
    return sorted(step for _, step, _ in find_commits(tmp_path / "ckpt"))


def test_an_asynchronous_commit_is_that_of_a_synchronous_save(make_session, tmp_path):
    asynchronous, synchronous = make_session(), make_session(attempt=2, ETJ_ASYNC_SAVES="")
    folders = [save(session, 3) for session in (asynchronous, synchronous)]
    for session in (asynchronous, synchronous):
        session.finish()
    one, other = (read_commit(folder).to_dict() for folder in folders)
    assert {**one, "attempt": 2, "created": ""} == {**other, "created": ""}
    assert (folders[0].parent / "latest").read_text() == "step-00000003"
    check_files(folders[0], read_commit(folders[0]), crc=True)
    assert LeaseKey.SAVE not in mailbox(tmp_path, 2)


def test_a_save_is_published_without_another_step(make_session, tmp_path):
    folder = save(make_session(), 1)
    wait_for((folder / "COMMIT.json").exists)
    wait_for(lambda: LeaseKey.COMMIT in mailbox(tmp_path))


class Held:
    """A future of a save that is under way."""

    def __init__(self):
        self.future = concurrent.futures.Future()

    def __call__(self, folder, tag):
        write(folder, tag)
        return self.future


def test_no_save_is_due_while_another_one_is_under_way(make_session, tmp_path):
    session = make_session(ETJ_CHECKPOINT_INTERVAL_SECONDS="1e-9")
    held = Held()
    assert session.after_step(step=1, samples=10, loss=1.0).save
    session.save(held)
    assert not session.after_step(step=2, samples=20, loss=1.0).save
    held.future.set_result(None)
    wait_for(lambda: steps_of(tmp_path) == [1])
    wait_for(lambda: not session._saves.is_busy)
    assert session.after_step(step=3, samples=30, loss=1.0).save


def test_a_save_waits_for_the_one_under_way_and_tells_how_long(make_session, tmp_path):
    session = make_session()
    held = Held()
    save(session, 1, held)
    threading.Timer(0.3, held.future.set_result, [None]).start()
    save(session, 2)
    assert steps_of(tmp_path) == [1]
    session.finish()
    assert steps_of(tmp_path) == [1, 2]
    waited = float(mailbox(tmp_path)[LeaseKey.SAVE].split("waited ")[1].split(" s, ")[1].split(" s of it")[0])
    assert 0.2 < waited < 10


def test_the_files_of_a_future_are_committed_when_it_is_done_and_not_if_it_fails(make_session, tmp_path):
    session = make_session()
    held = Held()
    save(session, 1, held)
    held.future.set_exception(RuntimeError("one rank is out of memory"))
    wait_for(lambda: not session._saves.is_busy)
    assert session.after_step(step=2, samples=20, loss=1.0).save
    assert "one rank is out of memory" in session._saves._failure
    assert steps_of(tmp_path) == []


def test_a_synchronous_session_waits_for_a_future(make_session, tmp_path):
    session = make_session(ETJ_ASYNC_SAVES="")
    held = Held()
    threading.Timer(0.2, held.future.set_result, [None]).start()
    check_files(folder := save(session, 1, held), read_commit(folder), crc=True)


def test_the_size_of_the_next_save_is_known_from_the_last_one_or_the_resumed_commit(make_session, tmp_path):
    session = make_session(ETJ_STAGING_BYTES="")
    folder = save(session, 1)
    assert "synchronous, because the size of a save is not known yet" in told(session)
    save(session, 2)
    assert told(session).startswith("step 2: asynchronous;")
    session.finish()
    following = make_session(attempt=2, ETJ_STAGING_BYTES="", ETJ_RESUME=str(folder))
    following.restore(lambda folder: None)
    save(following, 2)
    assert told(following).startswith("step 2: asynchronous;")


def told(session):
    return session._heartbeat._annotations[LeaseKey.SAVE]


def test_a_save_that_does_not_fit_on_the_node_is_synchronous_and_says_why(make_session, tmp_path, monkeypatch):
    session = make_session(ETJ_STAGING_BYTES="4100")
    save(session, 1)
    save(session, 2)
    assert "synchronous, because a save needs 4200 bytes on the node of rank 0, ETJ_STAGING_BYTES allows 4100" in told(
        session
    )
    assert steps_of(tmp_path) == [1, 2]
    monkeypatch.setattr("elastic_trainer.saving.staging.free_bytes", lambda folder: 17)
    unbounded = make_session(attempt=2, ETJ_STAGING_BYTES="")
    unbounded._saves.expect(1000)
    save(unbounded, 3)
    assert "has 17 free" in told(unbounded)


def test_a_failed_save_is_told_and_followed_at_once_by_a_synchronous_one(make_session, tmp_path):
    session = make_session()
    save(session, 1)
    broken = save(session, 2, write_a_link)
    wait_for(lambda: not session._saves.is_busy)
    assert session.after_step(step=3, samples=30, loss=1.0).save
    session.save(write)
    assert told(session).startswith("step 3: synchronous, because the save before failed; ")
    assert steps_of(tmp_path) == [1, 3]
    assert not broken.exists()
    save(session, 4)
    assert told(session).startswith("step 4: asynchronous;")


@pytest.fixture
def small_volume(tmp_path):
    """The checkpoint volume, with room for two saves."""
    (tmp_path / "ckpt").mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(tmp_path / "ckpt")]
    if os.geteuid() != 0 or subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("may not mount")
    yield tmp_path / "ckpt"
    subprocess.run(["umount", "-l", str(tmp_path / "ckpt")], check=True)


def test_a_full_volume_fails_the_save_names_the_cause_and_leaves_the_commit_before(
    small_volume, make_session, tmp_path, caplog
):
    session = make_session()
    first = save(session, 1)
    wait_for(lambda: not session._saves.is_busy)
    (small_volume / "other").write_bytes(b"x" * (shutil.disk_usage(small_volume).free - 4096))
    second = save(session, 2)
    wait_for(lambda: not session._saves.is_busy)
    assert "No space left on device" in caplog.text
    assert steps_of(tmp_path) == [1]
    assert not second.exists()
    check_files(first, read_commit(first), crc=True)
    assert session.after_step(step=3, samples=30, loss=1.0).save
    with pytest.raises(OSError, match="No space left on device"):  # a synchronous save shows it to the script
        session.save(write)
    (small_volume / "other").unlink()
    save(session, 4)
    session.finish()
    assert steps_of(tmp_path) == [1, 4]


def test_a_training_whose_last_save_failed_does_not_end_as_complete(make_session, tmp_path):
    session = make_session()
    save(session, 1)
    save(session, 2, write_a_link)
    with pytest.raises(SystemExit) as caught:
        session.finish()
    assert caught.value.code == 78
    assert steps_of(tmp_path) == [1]


def test_a_write_that_raises_does_not_block_the_next_save(make_session, tmp_path):
    session = make_session()

    def die(folder, tag):
        write(folder, tag)
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        save(session, 1, die)
    save(session, 2)
    session.finish()
    assert steps_of(tmp_path) == [2]


def test_a_drain_loses_no_step_and_waits_for_the_save_under_way(make_session, tmp_path):
    session = make_session()
    held = Held()
    save(session, 1, held)
    FileMailbox(tmp_path / "mailbox-1.json").exchange({LeaseKey.REQUEST: "drain"})
    wait_for(lambda: session._heartbeat.request == "drain")
    action = session.after_step(step=2, samples=20, loss=1.0)
    assert (action.save, action.stop) == (True, True)
    threading.Timer(0.1, held.future.set_result, [None]).start()
    session.save(write)
    assert steps_of(tmp_path) == [1, 2]
    assert told(session).startswith("step 2: synchronous, because the training stops")
    with pytest.raises(SystemExit) as caught:
        session.finish()
    assert caught.value.code == 75


def test_without_the_lease_a_save_is_published_only_when_it_answers_again(make_session, tmp_path):
    session = make_session()
    session._heartbeat._mailbox.is_cut = True
    folder = save(session, 1)
    wait_for(lambda: not session._saves.is_busy)
    assert (folder / "COMMIT.unconfirmed.json").exists()
    session.after_step(step=2, samples=20, loss=1.0)
    assert steps_of(tmp_path) == []
    session._heartbeat._mailbox.is_cut = False
    session._heartbeat.flush()
    session.after_step(step=3, samples=30, loss=1.0)
    assert steps_of(tmp_path) == [1]


def test_an_attempt_that_was_replaced_while_it_copied_publishes_nothing(make_session, tmp_path):
    session = make_session(ETJ_LEASE="gpt-a1", ETJ_JOB_UID="uid")
    held = Held()
    folder = save(session, 1, held)
    attempts.announce(tmp_path / "ckpt", 2, "uid")
    held.future.set_result(None)
    wait_for(lambda: not session._saves.is_busy)
    assert (folder / "COMMIT.unconfirmed.json").exists()
    assert steps_of(tmp_path) == []


def test_a_root_that_another_job_has_taken_over_meanwhile_ends_the_training_with_77(make_session, tmp_path):
    session = make_session(ETJ_JOB_UID="uid")
    held = Held()
    save(session, 1, held)
    claim_root(tmp_path / "ckpt", uid="other", job="team/other", take_over=True, resumes=False)
    held.future.set_result(None)
    wait_for(lambda: not session._saves.is_busy)
    with pytest.raises(SystemExit) as caught:
        session.after_step(step=2, samples=20, loss=1.0)
    assert caught.value.code == 77
    assert steps_of(tmp_path) == []


def test_a_refused_lease_leaves_the_save_unpublished(make_session, tmp_path, monkeypatch):
    session = make_session()

    def refuse(annotations):
        raise FencedError("the Lease is gone")

    monkeypatch.setattr(session._heartbeat._mailbox, "exchange", refuse)
    folder = save(session, 1)
    wait_for(lambda: not session._saves.is_busy)
    assert (folder / "COMMIT.unconfirmed.json").exists()


# -- several nodes ---------------------------------------------------------------------------------------------


class ThreadCollective(Collective):
    """The ranks are threads of this process."""

    def __init__(self, rank, shared, barrier):
        super().__init__(rank=rank, world_size=len(shared))
        self._shared, self._barrier = shared, barrier

    def gather(self, value):
        self._shared[self.rank] = value
        self._barrier.wait(30)
        values = list(self._shared)
        self._barrier.wait(30)
        return values


def save_on_nodes(tmp_path, local_world_size, write):
    """One save of two nodes; return what rank 0 published, or the error."""
    (tmp_path / "node").mkdir()
    world_size = 2 * local_world_size
    shared, barrier = [None] * world_size, threading.Barrier(world_size)
    folder = tmp_path / "ckpt" / "a1" / "step-00000001"
    commit = Commit(format="x", step=1, samples=1, topology=Topology(), attempt=1, writer="trainer", files=[])
    published = []

    def rank(number):
        settings = from_env(
            {
                "RANK": str(number),
                "LOCAL_RANK": str(number % local_world_size),
                "WORLD_SIZE": str(world_size),
                "ETJ_CHECKPOINT_ROOT": str(tmp_path / "ckpt"),
                "ETJ_ASYNC_SAVES": "true",
                "ETJ_STAGING": str(tmp_path / "node"),
            }
        )
        publish = (lambda folder, commit: published.append(commit)) if number == 0 else None
        saves = AsynchronousSaves(settings, ThreadCollective(number, shared, barrier), publish)
        saves.connect()
        saves.begin(lambda folder, tag: write(number, folder, tag), folder, commit)
        saves.wait()
        if number == 0:
            saves.has_failed()
            published.append(saves._failure)
        saves.close()

    with concurrent.futures.ThreadPoolExecutor(world_size) as pool:
        list(pool.map(rank, range(world_size)))
    return published


def test_the_files_of_all_nodes_are_one_commit(tmp_path):
    def write(rank, folder, tag):
        (folder / tag).mkdir(exist_ok=True)
        (folder / tag / f"rank-{rank}").write_text(f"of {rank}")
        if rank == 0:
            (folder / "latest").write_text(tag)

    commit, failure = save_on_nodes(tmp_path, 2, write)
    assert failure == ""
    assert [file.path for file in commit.files] == ["rank-0", "rank-1", "rank-2", "rank-3"]
    check_files(tmp_path / "ckpt" / "a1" / "step-00000001", commit, crc=True)
    assert list((tmp_path / "node").glob("*/*")) == []


@pytest.mark.parametrize("name", ["{tag}/same", "same"])
def test_a_file_that_two_nodes_write_is_refused_with_both_named(tmp_path, name):
    def write(rank, folder, tag):
        (folder / tag).mkdir()
        (folder / name.format(tag=tag)).write_text(f"of {rank}")

    (failure,) = save_on_nodes(tmp_path, 1, write)
    assert "same was written by the node of rank 0 (" in failure
    assert "and by the node of rank 1 (" in failure
    assert not (tmp_path / "ckpt" / "a1" / "step-00000001").exists()


def test_a_node_that_fails_is_named():
    reports = {0: NodeReport(node=0, host="a"), 8: NodeReport(node=8, host="b", error="No space left on device")}
    with pytest.raises(SaveError, match=r"the node of rank 8 \(b\): No space left on device"):
        merge(reports)


# -- the copy process's own steps ------------------------------------------------------------------------------


@pytest.fixture
def order(tmp_path):
    staged = tmp_path / "node" / "token"
    (staged / "files" / "step-1").mkdir(parents=True)
    (staged / "files" / "step-1" / "w").write_text("new")
    (staged / "note-0").write_text("")
    (tmp_path / "a1" / ".saves").mkdir(parents=True)
    return CopyOrder(
        staged=staged, target=tmp_path / "a1", tag="step-1", report=tmp_path / "a1" / ".saves" / "token-0.json",
        node=0, local_ranks=1,
    )  # fmt: skip


def test_an_order_that_is_repeated_after_its_report_copies_nothing_into_the_commit(order, tmp_path):
    (tmp_path / "a1" / "step-1").mkdir()
    (tmp_path / "a1" / "step-1" / "w").write_text("committed")
    file = CommittedFile(path="w", num_bytes=9, crc32=1)
    report = NodeReport(node=0, host="a", files=(file,))
    report.write(order.local_report)  # the process was killed here
    carry_out(CopyOrder.from_json(order.to_json()))
    assert read_report(order.report) == read_report(order.done) == report
    assert (tmp_path / "a1" / "step-1" / "w").read_text() == "committed"
    assert not order.staged.exists()
    order.report.unlink()  # rank 0 has published
    carry_out(order)
    assert not order.report.exists()


def test_a_report_of_another_version_names_the_file(order):
    order.report.write_text('{"version": 2, "files": []}')
    with pytest.raises(SaveError, match=r"token-0.json is no report of a node: version 2, expected 1"):
        read_report(order.report)


def test_a_copy_process_that_dies_after_its_report_is_not_a_failure(order, tmp_path):
    NodeReport(node=0, host="a").write(order.done)
    copier = Copier(0)
    copier._order = order
    assert copier.wait() == NodeReport(node=0, host="a")
    assert copier.wait() is None
