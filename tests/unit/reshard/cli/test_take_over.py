"""A reshard pod takes a root over (`takeOver: Resume`), and converts the newest commit of its former owner."""

from __future__ import annotations

import json
import shutil
import zlib
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

from reshard.checksums import self_checksum
from reshard.cli.locate import find_newest
from reshard.cli.main import main
from reshard.commits import root_owner, takeover
from reshard.commits.commit import Commit, CommittedFile, read_commit, write_commit
from reshard.commits.root_owner import claim_root, read_owner
from reshard.commits.takeover import choose_commit, take_root_over
from reshard.contract import COMMIT_FILE, OWNER_FILE, UNCONFIRMED_FILE, Env, ExitCode, ReshardReport
from reshard.errors import CorruptSourceError, ReshardError, StoreError
from reshard.topology import Topology
from tests.unit.reshard.cli.test_job_env import OTHER, SOURCE, UID, fail_to_read, root

__all__ = ["root"]


@pytest.fixture
def taken(root: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the root of another job, to be taken over."""
    claim_root(root, uid=OTHER, job="team/old")
    monkeypatch.setenv(Env.TAKE_OVER, "Resume")
    return root


def leave(root: Path, name: str, *, step: int, owner: str = OTHER) -> Path:
    """Leave a commit of `owner` in `root`."""
    folder = root / name
    shutil.copytree(SOURCE, folder)
    files = [
        CommittedFile(path=path.name, num_bytes=path.stat().st_size, crc32=zlib.crc32(path.read_bytes()))
        for path in sorted(folder.iterdir())
    ]
    commit = Commit(
        format="deepspeed",
        step=step,
        samples=8 * step,
        topology=Topology(dp=3, zero=2),
        attempt=1,
        writer="trainer",
        files=files,
        owner=owner,
    )
    write_commit(folder, commit)
    return folder


def resume(root: Path, attempt: int = 1) -> tuple[int, ReshardReport]:
    """Convert as the reshard Job of an attempt does, and return the exit code and the report."""
    report = root.parent / "report.json"
    target = root / f"a{attempt}/step-start-{UID[:8]}"
    words = ["--require-commit", "--to", "dp=2,zero=2", "--report", str(report), "--attempt", str(attempt)]
    return main(["run", str(root), str(target), *words]), ReshardReport.from_json(report.read_text())


def snapshot(root: Path) -> dict[str, bytes]:
    """Return every file below `root`, and its content."""
    return {str(path.relative_to(root)): path.read_bytes() for path in root.rglob("*") if path.is_file()}


def test_a_job_that_resumes_in_the_folder_of_another_goes_on_from_its_newest_commit_and_changes_none(
    taken: Path,
) -> None:
    for name, step in (("a1/step-00000005", 5), ("a2/step-00000009", 9), ("a3/step-00000009", 9)):
        leave(taken, name, step=step)
    leave(taken, "a3/step-00000030", step=30)
    (taken / "a3/step-00000030" / COMMIT_FILE).rename(taken / "a3/step-00000030" / UNCONFIRMED_FILE)  # half written
    leave(taken, "a3/.step-00000040.partial-abc", step=40)  # the result of a conversion before its rename
    before = snapshot(taken)
    code, report = resume(taken)
    assert (code, report.source) == (ExitCode.OK, str(taken / "a3/step-00000009"))
    owner = read_owner(taken)
    assert owner is not None
    assert (owner.uid, owner.previous) == (UID, (OTHER,))
    assert read_commit(Path(report.target)).owner == UID
    del before[OWNER_FILE]
    assert {name: content for name, content in snapshot(taken).items() if name in before} == before


def test_a_conversion_that_is_tried_again_goes_on_from_the_same_commit_whatever_a_zombie_publishes(taken: Path) -> None:
    leave(taken, "a1/step-00000005", step=5)
    first = take_root_over(taken, uid=UID, job="team/gpt")  # the pod dies here
    assert first.commit == "a1/step-00000005"
    leave(taken, "a1/step-00000010", step=10)  # it had checked the claim before
    sources = {resume(taken, attempt)[1].source for attempt in (1, 2)}
    assert sources == {str(taken / first.commit)}


def test_a_root_without_a_commit_is_claimed_and_the_training_begins_from_nothing(root: Path, taken: Path) -> None:
    code, report = resume(taken)
    assert (code, report.ok, report.source, report.target) == (ExitCode.OK, True, str(taken), "")
    assert "begins from nothing" in report.message
    leave(taken, "a1/step-00000010", step=10)
    assert resume(taken)[1].target == "", "decided once, whatever a former owner publishes late"


def test_a_root_that_does_not_exist_is_claimed_too(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(Env.TAKE_OVER, "Resume")
    assert resume(root)[1].target == ""
    assert read_owner(root) is not None


def damage(folder: Path) -> None:
    (folder / COMMIT_FILE).write_text("{")


def shorten(folder: Path) -> None:
    next(folder.glob("*optim_states.pt")).write_bytes(b"")


@pytest.mark.parametrize("spoil", [damage, shorten])
@pytest.mark.parametrize(("num_spoilt", "step"), [(1, 6), (2, None), (3, None)])
def test_one_commit_that_cannot_be_read_is_passed_over_aloud_and_more_of_them_stop_the_job(
    taken: Path, spoil: Callable[[Path], None], num_spoilt: int, step: int | None
) -> None:
    folders = [leave(taken, f"a1/step-{number:08d}", step=number) for number in (5, 6, 7)]
    for folder in folders[3 - num_spoilt :]:
        spoil(folder)
    code, report = resume(taken)
    assert "a1/step-00000007" in report.message
    if step is not None:
        assert (code, report.source) == (ExitCode.OK, str(folders[step - 5]))
    else:
        assert code == ExitCode.SOURCE_INVALID
        assert "begins neither from nothing" in report.message


def test_a_commit_that_cannot_be_reached_now_is_not_passed_over_and_nothing_is_recorded(
    taken: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folders = [leave(taken, f"a1/step-{number:08d}", step=number) for number in (5, 6)]

    def fail_at_newest(folder: Path) -> Commit:
        if folder == folders[-1]:
            raise StoreError("cannot be read: Input/output error", path=str(folder))
        return read_commit(folder)

    monkeypatch.setattr(takeover, "read_commit", fail_at_newest)
    assert take_over_code(taken) == ExitCode.SOURCE_UNAVAILABLE
    monkeypatch.undo()
    assert not list(taken.glob("TAKEOVER-*"))
    assert take_root_over(taken, uid=UID, job="team/gpt").commit == str(folders[-1].relative_to(taken))


@pytest.mark.parametrize("module", [root_owner, takeover])
def test_an_owner_or_a_choice_that_cannot_be_read_now_is_read_again(
    taken: Path, monkeypatch: pytest.MonkeyPatch, module: ModuleType
) -> None:
    monkeypatch.setattr(module, "read_file", fail_to_read)
    leave(taken, "a1/step-00000005", step=5)
    code, report = resume(taken)
    assert code == report.exit_code == ExitCode.SOURCE_UNAVAILABLE
    assert "remove the file" not in report.message


def take_over_code(root: Path) -> ExitCode:
    """Return the exit code of the error that a take-over ends with."""
    with pytest.raises(ReshardError) as caught:
        take_root_over(root, uid=UID, job="team/gpt")
    return caught.value.exit_code


def test_a_newest_commit_of_a_newer_version_stops_the_job_as_not_converted(taken: Path) -> None:
    leave(taken, "a1/step-00000005", step=5)
    marker = leave(taken, "a1/step-00000006", step=6) / COMMIT_FILE
    value = json.loads(marker.read_text()) | {"version": 999}
    del value[self_checksum.FIELD]
    marker.write_text(json.dumps(value))
    assert take_over_code(taken) == ExitCode.UNSUPPORTED
    assert not list(taken.glob("TAKEOVER-*"))


def test_damage_counts_for_the_last_owner_only_and_lets_no_older_owner_take_its_place(taken: Path) -> None:
    old = [leave(taken, f"a1/step-{step:08d}", step=step) for step in (400, 500)]
    claim_root(taken, uid="begins", take_over=True)
    mine = [leave(taken, f"a1/step-{step:08d}-begins", step=step, owner="begins") for step in (3, 4)]
    for folder in old:
        shorten(folder)
    assert choose_commit(taken, uid=UID, writers=("begins", OTHER)).commit == "a1/step-00000004-begins"
    for folder in mine:
        shorten(folder)
    with pytest.raises(CorruptSourceError, match="begins neither from nothing nor from an older commit"):
        choose_commit(taken, uid=UID, writers=("begins", OTHER))


def test_a_recorded_commit_that_a_person_has_removed_because_it_is_damaged_is_replaced_by_the_next_one(
    taken: Path,
) -> None:
    good, bad = (leave(taken, f"a1/step-{step:08d}", step=step) for step in (5, 6))
    states = next(bad.glob("*optim_states.pt"))
    content = bytearray(states.read_bytes())
    content[len(content) // 2] ^= 255
    states.write_bytes(content)
    assert resume(taken)[0] == ExitCode.SOURCE_INVALID
    shutil.rmtree(bad)
    for attempt in (2, 3):
        code, report = resume(taken, attempt)
        assert (code, report.source) == (ExitCode.OK, str(good))
    for folder in taken.glob("a*"):
        shutil.rmtree(folder)
    assert take_over_code(taken) == ExitCode.SOURCE_INVALID, "it does not begin from nothing"


def test_of_several_former_owners_the_last_one_with_a_commit_counts(taken: Path) -> None:
    leave(taken, "a1/step-00000500", step=500)
    claim_root(taken, uid="begins", take_over=True)
    leave(taken, "a1/step-00000003-begins", step=3, owner="begins")
    claim_root(taken, uid="dies", take_over=True)
    assert resume(taken)[1].source == str(taken / "a1/step-00000003-begins")


def test_a_former_owner_cannot_resume(taken: Path) -> None:
    claim_root(taken, uid=UID, take_over=True)
    claim_root(taken, uid="third", take_over=True)
    code, report = resume(taken)
    assert code == ExitCode.NOT_OWNER
    assert "cannot be taken back" in report.message


def test_who_starts_from_a_folder_that_was_taken_over_gets_no_commit_of_a_former_owner(taken: Path) -> None:
    leave(taken, "a1/step-00000005", step=5)
    resume(taken)
    leave(taken, "a1/step-00000010", step=10)
    assert find_newest(taken) == taken / f"a1/step-start-{UID[:8]}"


@pytest.mark.parametrize("content", ["[]", '{"version": 1, "uid": "other"}', '{"version": 1, "uid": "6f0e0a4e-0001"}'])
def test_a_choice_that_cannot_be_read_is_refused(taken: Path, content: str) -> None:
    leave(taken, "a1/step-00000005", step=5)
    (taken / f"TAKEOVER-{UID}.json").write_text(content)
    code, report = resume(taken)
    assert code == ExitCode.NOT_OWNER
    assert "TAKEOVER" in report.message
