"""The right to publish and remove below a checkpoint root: no API server, second saves, other owners."""

import errno
import json
from pathlib import Path

import pytest

from elastic_trainer import publisher
from elastic_trainer.attempts import find_newest_attempt
from elastic_trainer.mailbox import FileMailbox
from elastic_trainer.retention import find_commits, read_released
from elastic_trainer.saving.refusals import RefusalCheck
from elastic_trainer.session import Session
from elastic_trainer.settings import from_env
from reshard.commits import root_owner
from reshard.commits.commit import read_commit
from reshard.commits.root_owner import claim_root, read_owner
from reshard.contract import COMMIT_FILE, MAX_RELEASED, OWNER_FILE, UNCONFIRMED_FILE, LeaseKey
from reshard.errors import NotOwnerError, StoreError

UID, OTHER = "6f0e0a4e-0001", "9b1d3c55-0002"


class CutMailbox(FileMailbox):
    """A Lease whose API server can be cut off."""

    reachable = True

    def exchange(self, annotations):
        if not self.reachable:
            raise OSError("No route to host")
        return super().exchange(annotations)


def make(root, *, attempt=1, resume=None, uid=UID, keep=3, **env):
    """A session in a cluster: with a Lease, an owner and a mailbox that can be cut off."""
    environment = {
        "ETJ_ATTEMPT": str(attempt),
        "ETJ_CHECKPOINT_ROOT": str(root / "ckpt"),
        "ETJ_HEARTBEAT_SECONDS": "0.02",
        "ETJ_RESUME": str(resume or ""),
        "ETJ_LEASE": f"gpt-a{attempt}" if uid else "",
        "ETJ_JOB": "gpt",
        "ETJ_JOB_UID": uid,
        **env,
    }
    mailbox = CutMailbox(root / f"mailbox-{uid}-{attempt}.json")
    session = Session(from_env(environment), mailbox, keep=keep)
    session.mailbox = mailbox
    SESSIONS.append(session)
    return session


SESSIONS = []


@pytest.fixture(autouse=True)
def no_commit_is_read_as_the_resharder_does(monkeypatch):
    """The commits here hold nothing that it could read; `test_refusals.py` has some that do."""
    monkeypatch.setattr(RefusalCheck, "begin", lambda *_: None)


@pytest.fixture(autouse=True)
def no_heartbeat_outlives_its_test():
    yield
    while SESSIONS:
        session = SESSIONS.pop()
        session.mailbox.reachable = True
        session._heartbeat.stop()


def write(folder, tag):
    (folder / tag / "part").mkdir(parents=True)
    (folder / tag / "weights.pt").write_bytes(b"w" * 1000)
    (folder / tag / "part" / "optimizer.pt").write_bytes(b"o" * 3000)


def save(session, step):
    session.after_step(step=step, samples=step * 10, loss=2.5)
    return session.save(write)


def steps(root):
    return [(attempt, step) for attempt, step, _ in sorted(find_commits(root / "ckpt"))]


def release(session, *names):
    session.mailbox.exchange({LeaseKey.RELEASED: json.dumps(names)})


def told(session):
    return json.loads(session.mailbox.path.read_text())


def snapshot(root):
    return {str(path): path.read_bytes() for path in sorted(root.rglob("*")) if path.is_file()}


def test_an_attempt_without_the_api_server_removes_and_publishes_nothing_and_its_successors_commit_stays(tmp_path):
    zombie = make(tmp_path)
    zombie.start()
    committed = [save(zombie, step) for step in (3, 4, 5)]
    zombie.mailbox.reachable = False
    second = make(tmp_path, attempt=2, resume=committed[-1])
    second.start()
    assert second.restore(lambda folder: None).step == 5
    before = {path: snapshot(path) for path in committed}
    for step in (6, 7, 8):
        save(zombie, step)
    assert {path: snapshot(path) for path in committed} == before
    assert steps(tmp_path) == [(1, 3), (1, 4), (1, 5)]
    third = make(tmp_path, attempt=3, resume=committed[-1])
    third.start()
    assert third.restore(lambda folder: None).step == 5
    for session in (second, third):
        session.finish()


def test_an_attempt_that_sees_a_newer_one_on_the_storage_publishes_and_removes_nothing_though_its_lease_answers(
    tmp_path,
):
    old = make(tmp_path)
    old.start()
    folder = save(old, 5)
    new = make(tmp_path, attempt=2, resume=folder)
    new.start()
    release(old, "a1/step-00000005")
    save(old, 6)
    assert steps(tmp_path) == [(1, 5)]
    new.finish()


def test_a_save_that_could_not_be_published_is_published_as_soon_as_the_lease_answers(tmp_path):
    session = make(tmp_path)
    session.start()
    save(session, 1)
    session.mailbox.reachable = False
    save(session, 2)
    folder = save(session, 3)
    assert steps(tmp_path) == [(1, 1)]
    assert (folder / UNCONFIRMED_FILE).is_file()
    session.mailbox.reachable = True
    answers = session._heartbeat.answers
    while session._heartbeat.answers == answers:
        pass
    session.after_step(step=4, samples=40, loss=1.0)
    assert steps(tmp_path) == [(1, 1), (1, 3)]
    assert read_commit(folder).step == 3
    assert json.loads(told(session)[LeaseKey.COMMIT])["step"] == 3
    assert not (tmp_path / "ckpt" / "a1" / "step-00000002").exists()
    session.finish()


def test_unpublished_saves_do_not_fill_the_volume(tmp_path):
    session = make(tmp_path, keep=2)
    session.start()
    first = save(session, 1)
    session.mailbox.reachable = False
    for step in range(2, 9):
        save(session, step)
    assert first.exists()
    left = sorted(path.parent.name for path in (tmp_path / "ckpt").rglob(UNCONFIRMED_FILE))
    assert left == ["step-00000007", "step-00000008"]


def test_the_last_save_of_a_training_is_published_when_the_lease_comes_back_in_time(tmp_path, monkeypatch):
    session = make(tmp_path)
    session.start()
    session.mailbox.reachable = False
    save(session, 1)
    monkeypatch.setattr(
        publisher.time, "sleep", lambda seconds: setattr(session.mailbox, "reachable", True), raising=True
    )
    session.finish()
    assert steps(tmp_path) == [(1, 1)]


def test_only_what_the_operator_has_released_is_removed_and_that_is_told(tmp_path):
    session = make(tmp_path, keep=1)
    session.start()
    for step in range(1, 6):
        save(session, step)
    assert len(steps(tmp_path)) == 5
    release(session, "a1/step-00000001", "a1/step-00000003")
    save(session, 6)
    assert [step for _, step in steps(tmp_path)] == [2, 4, 5, 6]
    session.finish()
    assert json.loads(told(session)[LeaseKey.REMOVED]) == ["a1/step-00000001", "a1/step-00000003"]


def test_a_released_commit_stays_while_the_attempt_was_resumed_from_it_or_it_is_among_the_newest(tmp_path):
    first = make(tmp_path)
    first.start()
    resume = save(first, 1)
    second = make(tmp_path, attempt=2, resume=resume, keep=2)
    second.start()
    for step in (2, 3):
        save(second, step)
    release(second, "a1/step-00000001", "a2/step-00000002", "a2/step-00000003")
    save(second, 4)
    assert steps(tmp_path) == [(1, 1), (2, 3), (2, 4)]
    second.finish()


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{}",
        "null",
        "[1]",
        '["/etc"]',
        '["a1/../../x"]',
        '["a1/step-1/.."]',
        '["step-1"]',
        '["a1/step-1", "a1"]',
        "[" * 5000,
        json.dumps(["a1/step-1"] * (MAX_RELEASED + 1)),
        json.dumps(["a1/step-1" + " " * 9000]),
    ],
)
def test_a_list_of_released_commits_that_makes_no_sense_releases_nothing(text):
    assert read_released(text) == ()


def test_a_released_name_that_is_a_link_is_not_followed(tmp_path):
    session = make(tmp_path, keep=1)
    session.start()
    for step in (1, 2):
        save(session, step)
    outside = tmp_path / "outside"
    (tmp_path / "ckpt" / "a1" / "step-00000001").rename(outside)
    (tmp_path / "ckpt" / "a1" / "step-00000001").symlink_to(outside)
    release(session, "a1/step-00000001")
    save(session, 3)
    assert (outside / COMMIT_FILE).is_file()
    session.finish()


def test_a_second_save_of_a_step_leaves_the_first_commit_as_it_is(tmp_path):
    session = make(tmp_path)
    session.start()
    first = save(session, 1)
    before = snapshot(first)
    second = session.save(write)
    assert second == first.with_name("step-00000001.2")
    assert snapshot(first) == before
    assert [read_commit(folder).step for folder in (first, second)] == [1, 1]
    session.finish()


def test_dying_in_the_second_save_of_a_step_leaves_the_first_commit(tmp_path):
    session = make(tmp_path)
    session.start()
    first = save(session, 1)

    def die(folder, tag):
        write(folder, tag)
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        session.save(die)
    assert steps(tmp_path) == [(1, 1)]
    again = make(tmp_path, attempt=2, resume=first)
    again.start()
    assert again.restore(lambda folder: None).step == 1
    for each in (session, again):
        each.finish()


def refused(session):
    with pytest.raises(SystemExit) as caught:
        session.start()
    assert caught.value.code == 77
    return told(session)[LeaseKey.OWNER_ERROR]


def test_another_job_on_the_same_root_is_refused_with_both_named_and_touches_nothing(tmp_path):
    first = make(tmp_path)
    first.start()
    save(first, 1)
    before = snapshot(tmp_path / "ckpt")
    text = refused(make(tmp_path, uid=OTHER))
    assert UID in text
    assert OTHER in text
    assert "takeOver" in text
    assert snapshot(tmp_path / "ckpt") == before
    first.finish()


def test_a_process_without_a_job_is_refused_in_the_root_of_a_job(tmp_path):
    first = make(tmp_path)
    first.start()
    assert UID in refused(make(tmp_path, uid=""))
    first.finish()


def test_commits_of_an_unknown_owner_are_refused_unless_the_job_goes_on_from_one(tmp_path):
    nobody = make(tmp_path, uid="")
    nobody.start()
    folder = save(nobody, 1)
    nobody.finish()
    assert "unknown job" in refused(make(tmp_path))
    job = make(tmp_path, attempt=2, resume=folder)
    job.start()
    job.finish()
    assert read_owner(tmp_path / "ckpt").uid == UID


def test_a_job_that_takes_a_root_over_begins_beside_the_old_commits_and_removes_none_of_them(tmp_path):
    old = make(tmp_path)
    old.start()
    kept = [save(old, step) for step in (1, 2, 7)]
    before = {path: snapshot(path) for path in kept}
    new = make(tmp_path, uid=OTHER, keep=1, ETJ_TAKE_OVER="Begin")
    new.start()
    own = [save(new, step) for step in (1, 2, 3)]
    assert own[0].name == "step-00000001-9b1d3c55"
    release(new, *(f"a1/{path.name}" for path in [*kept, *own]))
    save(new, 4)
    assert {path: snapshot(path) for path in kept} == before
    assert [path.exists() for path in own] == [False, False, False]
    new.finish()


def test_a_save_of_the_former_owner_that_is_under_way_meets_no_folder_of_the_new_one(tmp_path):
    old = make(tmp_path)
    old.start()
    save(old, 1)
    partial = tmp_path / "ckpt" / "a1" / "step-00000007"
    write(partial.parent, partial.name)  # the old job's ranks are still writing it
    new = make(tmp_path, uid=OTHER, ETJ_TAKE_OVER="Begin")
    new.start()
    own = save(new, 7)
    (partial / "weights.pt").write_bytes(b"more of the old job")
    assert own.name == "step-00000007-9b1d3c55"
    assert (partial / "part" / "optimizer.pt").exists()
    again = make(tmp_path, uid=OTHER, attempt=2, resume=own)  # the word in the spec is needed once only
    again.start()
    assert again.restore(lambda folder: None).step == 7
    assert save(again, 8).name == "step-00000008-9b1d3c55"
    signs = sorted(path.name for path in partial.parent.glob("ATTEMPT*"))
    assert signs == ["ATTEMPT-6f0e0a4e.json", "ATTEMPT-9b1d3c55.json"]


def test_an_attempt_below_one_that_has_started_is_refused_with_both_numbers(tmp_path):
    newer = make(tmp_path, attempt=9)
    newer.start()
    text = refused(make(tmp_path, attempt=3))
    assert "attempt 9" in text
    assert "attempt 3" in text


def test_a_training_whose_last_save_was_never_published_does_not_end_as_complete(tmp_path, monkeypatch):
    monkeypatch.setattr(publisher, "CONFIRM_AT_END_SECONDS", 0.0)
    session = make(tmp_path)
    session.start()
    save(session, 1)
    session.mailbox.reachable = False
    save(session, 2)
    monkeypatch.setattr(
        session._heartbeat,
        "stop",
        lambda: setattr(session.mailbox, "reachable", True) or type(session._heartbeat).stop(session._heartbeat),
    )
    with pytest.raises(SystemExit) as caught:
        session.finish()
    assert caught.value.code == 78
    assert told(session).get(LeaseKey.PHASE) not in ("Complete", "Drained")


def test_the_former_owner_stops_at_its_next_save_and_cannot_take_the_root_back(tmp_path):
    old = make(tmp_path, ETJ_TAKE_OVER="Begin")
    old.start()
    save(old, 1)
    new = make(tmp_path, uid=OTHER, ETJ_TAKE_OVER="Begin")
    new.start()
    old.after_step(step=2, samples=20, loss=1.0)
    with pytest.raises(SystemExit) as caught:
        old.save(write)
    assert caught.value.code == 77
    assert steps(tmp_path) == [(1, 1)]
    assert "has taken it over" in refused(make(tmp_path, attempt=2, ETJ_TAKE_OVER="Begin"))
    new.finish()


@pytest.mark.parametrize(
    "content",
    ["", "[]", "{", '{"version": 2, "uid": "u"}', '{"version": 1}', '{"version": 1, "uid": "\\u001b[2J"}', "[" * 9999],
)
def test_an_owner_file_that_cannot_be_read_refuses_everybody(tmp_path, content):
    (tmp_path / OWNER_FILE).write_text(content)
    with pytest.raises(NotOwnerError, match=r"OWNER\.json"):
        claim_root(tmp_path, uid=UID, take_over=True)


def fail_to_read(path, max_bytes):
    raise OSError(errno.ESTALE, "Stale file handle", str(path))


@pytest.mark.parametrize("publishes", [False, True])
def test_an_owner_file_that_cannot_be_read_now_fails_the_save_and_not_the_job(tmp_path, monkeypatch, publishes):
    session = make(tmp_path)
    session.start()
    save(session, 1)
    session.after_step(step=2, samples=20, loss=1.0)

    def write_and_fail(folder, tag):
        write(folder, tag)
        monkeypatch.setattr(root_owner, "read_file", fail_to_read)

    if not publishes:
        monkeypatch.setattr(root_owner, "read_file", fail_to_read)
    with pytest.raises(StoreError, match=r"OWNER\.json.*Stale"):
        session.save(write_and_fail)
    monkeypatch.undo()
    assert LeaseKey.OWNER_ERROR not in told(session)
    assert steps(tmp_path) == [(1, 1)]


def test_no_rank_waits_for_rank_0_that_cannot_reach_the_storage(tmp_path, monkeypatch):
    session = make(tmp_path)
    session.start()
    sent = []
    monkeypatch.setattr(root_owner, "read_file", fail_to_read)
    monkeypatch.setattr(session._collective, "broadcast", lambda value: sent.append(value) or value)
    with pytest.raises(StoreError, match="Stale"):
        session.save(write)
    peer = Session(from_env({"RANK": "1", "WORLD_SIZE": "2", "ETJ_TOPOLOGY": "dp=2"}), CutMailbox(tmp_path / "peer"))
    monkeypatch.setattr(peer._collective, "broadcast", lambda value: sent[-1])
    with pytest.raises(StoreError, match="rank 0"):
        peer.save(write)


def test_of_two_first_claims_one_wins(tmp_path, monkeypatch):
    create = root_owner._create

    def slow(path: Path, owner: root_owner.Owner) -> bool:
        monkeypatch.setattr(root_owner, "_create", create)
        claim_root(tmp_path, uid=OTHER)  # between this one's look and its claim
        return create(path, owner)

    monkeypatch.setattr(root_owner, "_create", slow)
    with pytest.raises(NotOwnerError, match=OTHER):
        claim_root(tmp_path, uid=UID)


def test_attempts_of_other_owners_do_not_count_as_newer_ones(tmp_path):
    for attempt, uid in ((2, UID), (7, OTHER)):
        session = make(tmp_path / uid, attempt=attempt, uid=uid)
        session.start()
        session.finish()
    moved = tmp_path / OTHER / "ckpt" / "a7"
    moved.rename(tmp_path / UID / "ckpt" / "a7")
    assert find_newest_attempt(tmp_path / UID / "ckpt", UID) == 2
    (tmp_path / UID / "ckpt" / "a9").mkdir()
    (tmp_path / UID / "ckpt" / "a9" / "ATTEMPT-6f0e0a4e.json").write_text("[]")
    assert find_newest_attempt(tmp_path / UID / "ckpt", UID) == 2
