"""Take a checkpoint root over from another job, and go on from its newest commit (`spec.checkpoint.takeOver: Resume`).

The job claims the root first, and looks for the newest commit then: so it misses no commit of a writer that still owned
the root. It records its choice once. A conversion that is tried again goes on from the same commit, whatever a former
owner publishes late. Only if a person has removed that commit, it chooses again, and records that beside the first
choice. docs/protocol.md says why this is safe.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from reshard.commits.commit import Commit, check_files, read_commit
from reshard.commits.root_owner import claim_root
from reshard.contract import COMMIT_FILE, COMMIT_FOLDER, COMMIT_NAME
from reshard.errors import CorruptSourceError, NotOwnerError, ReshardError, make_read_error
from reshard.storage.durable import create_file, read_file

_VERSION = 1
_MAX_BYTES = 64 << 10
_ATTEMPT = re.compile(r"a([0-9]{1,9})")
_STEP = re.compile(r"step-([0-9]{8,18})(?![0-9])")
_MOST_PROBLEMS = 20
_ADVICE = (
    "mend them, or set spec.checkpoint.takeOver: Begin to begin from nothing; to go on from one that you choose, create"
    " the job with another spec.checkpoint.path, and with startFrom naming that commit"
)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """Content of the file that records a choice.

    Attributes:
        uid: UID of the job that goes on from the commit.
        commit: name of the commit, relative to the root; empty if there was none.
        skipped: why newer commits are not taken.
    """

    uid: str
    commit: str
    skipped: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True, slots=True)
class _Found:
    """A folder with a commit marker: the commit, or the error of the marker."""

    step: int
    attempt: int
    folder: Path
    commit: Commit | None
    error: ReshardError | None

    @property
    def name(self) -> str:
        return f"a{self.attempt}/{self.folder.name}"

    def describe_damage(self) -> str:
        """Return what is damaged, empty for nothing. Raise what says nothing about the bytes."""
        try:
            if self.error is not None:
                raise self.error
            if self.commit is not None:
                check_files(self.folder, self.commit)
        except CorruptSourceError as error:
            return f"{error!s:.300}"
        return ""


def take_root_over(root: Path, *, uid: str, job: str) -> Choice:
    """Claim a checkpoint root for a job, and return the newest commit of its former owner.

    Args:
        root: folder of all attempts' checkpoints.
        uid: UID of the job.
        job: `namespace/name` of the job.

    Raises:
        NotOwnerError: the root belongs to a job that has taken it over from this one; or the recorded choice cannot be
            read.
        CorruptSourceError: there are commits, but no readable one; or two or more newer ones cannot be read.
        StoreError: a commit cannot be reached now; nothing is recorded.
        UnsupportedError: a commit is of a newer version; nothing is recorded.
        OSError: the root cannot be read, or the claim cannot be written.
    """
    owner = claim_root(root, uid=uid, job=job, take_over=True)
    stem = f"TAKEOVER-{re.sub(r'[^A-Za-z0-9-]', '', uid)[:64]}"
    path, number = root / f"{stem}.json", 0
    while (choice := _read_choice(path, uid)) is not None:
        if not choice.commit or (root / choice.commit / COMMIT_FILE).exists():
            return choice
        number += 1
        path = root / f"{stem}.{number}.json"
    former = reversed(owner.previous if owner is not None else ())
    choice = choose_commit(root, uid=uid, writers=tuple(former))
    if number and not choice.commit:
        raise CorruptSourceError(
            "the commit that was chosen is gone, and no other is there", path=str(root), hint=_ADVICE
        )
    create_file(path, (json.dumps({"version": _VERSION, **dataclasses.asdict(choice)}) + "\n").encode())
    return _read_choice(path, uid) or choice  # another pod of this conversion may have been faster


def choose_commit(root: Path, *, uid: str, writers: Sequence[str]) -> Choice:
    """Return the newest commit of the first writer that has one, else the newest of all.

    Damage counts for that writer only, also where it leaves the writer no commit: no older writer's is taken instead.

    Args:
        root: folder of all attempts' checkpoints.
        uid: UID of the job that goes on from the commit.
        writers: UIDs of former owners, the last one first.

    Raises:
        CorruptSourceError: there are commits, but no readable one; or two or more newer ones cannot be read: that is no
            accident of the storage, and an older commit might lose much work.
        StoreError: a commit cannot be reached now.
        UnsupportedError: a commit is of a newer version.
        OSError: the root cannot be read.
    """
    found = sorted(_find_markers(root), key=lambda item: (item.step, item.attempt, item.name), reverse=True)
    owners = {item.commit.owner for item in found if item.commit is not None}
    writer = next((name for name in writers if name in owners), None)
    skipped: list[str] = []
    for item in found:
        if writer is not None and item.commit is not None and item.commit.owner != writer:
            continue
        if damage := item.describe_damage():
            skipped.append(f"{item.name}: {damage}")
        elif len(skipped) < 2:
            return Choice(uid=uid, commit=item.name, skipped=tuple(skipped))
        else:
            break
    if not skipped:
        return Choice(uid=uid, commit="")
    raise CorruptSourceError(
        f"the newest {len(skipped)} commits of {len(found)} cannot be read, and the job begins neither from nothing nor"
        " from an older commit on its own",
        path=str(root),
        problems=skipped[:_MOST_PROBLEMS],
        hint=_ADVICE,
    )


def find_job_commits(root: Path) -> Iterator[tuple[int, Path]]:
    """Yield (attempt, folder) of every folder `a<attempt>/step-...` that has a commit marker; it may be damaged."""
    for attempt in root.iterdir():
        if (match := _ATTEMPT.fullmatch(attempt.name)) is None or not attempt.is_dir():
            continue
        for folder in attempt.iterdir():
            # Not a hidden folder: the result of a conversion has its marker before it is renamed.
            if COMMIT_FOLDER.fullmatch(folder.name) and (folder / COMMIT_FILE).exists():
                yield int(match[1]), folder


def _find_markers(root: Path) -> Iterator[_Found]:
    for attempt, folder in find_job_commits(root):
        commit, problem = None, None
        try:
            commit = read_commit(folder)
        except ReshardError as error:
            problem = error
        yield _Found(_step_of(folder, commit), attempt, folder, commit, problem)


def _step_of(folder: Path, commit: Commit | None) -> int:
    match = _STEP.match(folder.name)
    return commit.step if commit is not None else int(match[1]) if match else 0


def _read_choice(path: Path, uid: str) -> Choice | None:
    try:
        content = read_file(path, _MAX_BYTES)
        if content is None:
            return None
        value = json.loads(content)
        if not isinstance(value, dict) or (value.get("version"), value.get("uid")) != (_VERSION, uid):
            raise ValueError(f"expected version {_VERSION} of job {uid}, found {value!r:.100}")
        commit, skipped = value.get("commit"), value.get("skipped")
        if not isinstance(commit, str) or (commit and COMMIT_NAME.fullmatch(commit) is None):
            raise ValueError(f"commit is {commit!r:.100}, expected a<attempt>/step-...")
        if not isinstance(skipped, list) or not all(isinstance(item, str) for item in skipped):
            raise ValueError(f"skipped is {skipped!r:.100}, expected texts")
        return Choice(uid=uid, commit=commit, skipped=tuple(skipped))
    except OSError as error:
        raise make_read_error(error, str(path), is_indexed=False) from error
    except (ValueError, RecursionError) as error:
        raise NotOwnerError(
            f"cannot be read: {error!s:.200}", path=str(path), hint="remove the file: the next try chooses again"
        ) from error
