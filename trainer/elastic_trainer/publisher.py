"""Rank 0's writes below the checkpoint root: it claims the root, publishes commits and removes old ones.

An attempt that cannot reach its Lease may have been replaced without knowing it. It goes on training and saving. But it
publishes a save, and removes files that another process may read, only after the Lease has answered.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import shutil
import time
from pathlib import Path

from elastic_trainer import attempts, retention
from elastic_trainer.heartbeat import Heartbeat
from elastic_trainer.saving.refusals import RefusalCheck
from elastic_trainer.settings import Settings
from reshard.commits.commit import Commit, confirm_commit, write_commit
from reshard.commits.root_owner import claim_root
from reshard.contract import COMMIT_FILE, UNCONFIRMED_FILE, LeaseKey
from reshard.errors import NotOwnerError
from reshard.storage.durable import make_folder, sync_folder, sync_folders

_log = logging.getLogger(__name__)
CONFIRM_AT_END_SECONDS = 60.0
_CONFIRM_PAUSE_SECONDS = 1.0
MARKED = 1 << 32
"""See `commit_name`."""


class Publisher:
    """Publishes the commits of one attempt.

    Args:
        settings: settings of the attempt.
        heartbeat: heartbeat that reaches the Lease.
        keep: number of newest commits that are never removed.
    """

    def __init__(self, settings: Settings, heartbeat: Heartbeat, *, keep: int) -> None:
        self._settings = settings
        self._heartbeat = heartbeat
        self._keep = keep
        self._root = settings.checkpoint_root
        self._folder = self._root / f"a{settings.attempt}"
        self._unpublished: list[tuple[Path, Commit]] = []
        self._answers_before = 0
        self._is_marked = False
        self._refusals = RefusalCheck(heartbeat.update)

    def claim(self) -> None:
        """Claim the checkpoint root for the job, or check the claim.

        Raises:
            NotOwnerError: the root belongs to another job.
            OSError: the claim cannot be read or written.
        """
        settings = self._settings
        owner = claim_root(
            self._root,
            uid=settings.job_uid,
            job=f"{settings.namespace}/{settings.job}",
            take_over=settings.take_over,
            resumes=settings.resume is not None and settings.resume.is_relative_to(self._root),
        )
        self._is_marked = owner is not None and bool(owner.previous)

    def announce(self) -> None:
        """Write the marker that tells older attempts that this one has started.

        Raises:
            NotOwnerError: a newer attempt has already started.
        """
        newest = attempts.find_newest_attempt(self._root, self._settings.job_uid)
        if self._settings.job_uid and newest > self._settings.attempt:
            raise NotOwnerError(
                f"attempt {newest} of this job has started here before, and this is attempt {self._settings.attempt}: "
                "no file was changed",
                path=str(self._root),
                hint=f"the job's status was set back: raise status.attempt to {newest} and retry",
            )
        if self._settings.job_uid or self._settings.resume is not None:
            attempts.announce(self._root, self._settings.attempt, self._settings.job_uid)

    def free_number(self, step: int) -> int:
        """Return the first number n for which no folder `commit_name(step, n, uid)` exists.

        Raises:
            NotOwnerError: the checkpoint root belongs to another job.
        """
        self.claim()
        make_folder(self._folder)
        number = 1 + (MARKED if self._is_marked else 0)
        while os.path.lexists(folder := self._folder / commit_name(step, number, self._settings.job_uid)):
            complete = any(os.path.lexists(folder / marker) for marker in (COMMIT_FILE, UNCONFIRMED_FILE))
            if not complete and self._may_publish():
                shutil.rmtree(folder)  # a save of this attempt that never became a commit
            else:
                number += 1
        return number

    def publish(self, folder: Path, commit: Commit) -> None:
        """Complete a save, flush it to stable storage, and publish it if this attempt may publish.

        Raises:
            NotOwnerError: the checkpoint root belongs to another job.
        """
        sync_folders(folder)
        write_commit(folder, commit, name=UNCONFIRMED_FILE)
        sync_folder(folder.parent)
        self._unpublished.append((folder, commit))
        self._confirm()

    def confirm_when_answered(self) -> None:
        """Publish the newest save if it is unpublished and the Lease has answered since the last try.

        Raises:
            NotOwnerError: the checkpoint root belongs to another job.
        """
        if self._unpublished and self._heartbeat.answers > self._answers_before:
            self._confirm()

    def confirm_last(self) -> bool:
        """Publish the newest save at the end of the training; wait up to a minute for the Lease.

        Returns:
            False if there is an unpublished save.

        Raises:
            NotOwnerError: the checkpoint root belongs to another job.
        """
        deadline = time.monotonic() + CONFIRM_AT_END_SECONDS
        while self._unpublished:
            self._confirm()
            if not self._unpublished or time.monotonic() >= deadline:
                break
            time.sleep(_CONFIRM_PAUSE_SECONDS)
        for folder, _ in self._unpublished[-1:]:
            _log.error(
                "%s was never published; if no newer attempt exists, rename its %s to %s to publish it",
                folder,
                UNCONFIRMED_FILE,
                COMMIT_FILE,
            )
        return not self._unpublished

    def _confirm(self) -> None:
        """Publish the newest save if this attempt may publish; else remove unpublished saves except the newest ones."""
        self.claim()
        may_publish = self._may_publish()
        self._answers_before = self._heartbeat.answers
        folder, commit = self._unpublished[-1]
        if not may_publish:
            why = "a newer attempt has started" if self._is_superseded() else "the attempt's Lease does not answer"
            _log.warning("%s is complete but not published: %s", folder, why)
            self._drop(self._unpublished[: -max(1, self._keep)])
            return
        confirm_commit(folder)
        self._heartbeat.update({LeaseKey.COMMIT: commit.ref(folder).to_json()})
        self._heartbeat.flush()
        self._drop(self._unpublished[:-1])
        self._unpublished.clear()
        if self._settings.lease:
            self._refusals.begin(folder)
        self._remove_old()

    def _drop(self, saves: list[tuple[Path, Commit]]) -> None:
        """Remove unpublished saves of this process, which no other process has read."""
        for folder, _ in saves:
            with contextlib.suppress(OSError):
                (folder / UNCONFIRMED_FILE).unlink()
                shutil.rmtree(folder)
        self._unpublished = [save for save in self._unpublished if save not in saves]

    def _may_publish(self) -> bool:
        """Return whether the Lease answers now and, in a cluster, no newer attempt of the job has started."""
        return self._heartbeat.flush() and not (self._settings.lease and self._is_superseded())

    def _is_superseded(self) -> bool:
        return attempts.find_newest_attempt(self._root, self._settings.job_uid) > self._settings.attempt

    def _remove_old(self) -> None:
        """Remove the commits that the operator has released or, without a cluster, all but the newest ones."""
        settings = self._settings
        protected = {settings.resume} if settings.resume else set()
        if settings.lease and settings.job_uid:
            names = retention.read_released(self._heartbeat.released)
            removed = retention.remove_released(
                self._root, names, owner=settings.job_uid, keep=self._keep, protected=protected
            )
            self._heartbeat.update({LeaseKey.REMOVED: json.dumps(removed)})
        elif not self._is_superseded():
            retention.prune(self._root, attempt=settings.attempt, keep=self._keep, protected=protected)


def commit_name(step: int, number: int, uid: str = "") -> str:
    """Return the name of a commit's folder: `step-00000005`, or `step-00000005.2` for the second save of that step.

    For numbers above MARKED, MARKED is subtracted and the name contains the first 8 characters of the job's UID. Such
    names are used if the root had another owner, which may already have used the plain name, or may still use it.
    """
    mark, number = (f"-{uid[:8]}", number - MARKED) if number > MARKED else ("", number)
    return f"step-{step:08d}{mark}" if number == 1 else f"step-{step:08d}{mark}.{number}"
