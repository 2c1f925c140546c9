"""Rank 0's writes below the checkpoint root: claim it, publish commits, remove old ones.

An attempt that cannot reach its Lease may have been replaced without knowing it. It goes on computing and saving, but
a save is published only after the Lease has answered, and nothing that another process may read is ever removed
before.
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
from elastic_trainer.settings import Settings
from reshard.commits.commit import Commit, confirm_commit, write_commit
from reshard.commits.root_owner import claim_root
from reshard.contract import COMMIT_FILE, UNCONFIRMED_FILE, LeaseKey
from reshard.errors import NotOwnerError
from reshard.storage.durable import make_folder, sync_folder, sync_folders

_log = logging.getLogger(__name__)
_CONFIRM_AT_END_SECONDS = 60.0
_CONFIRM_PAUSE_SECONDS = 1.0
MARKED = 1 << 32
"""See `commit_name`."""


class Publisher:
    """Publishes the commits of one attempt.

    Args:
        settings: of the attempt.
        heartbeat: by which the Lease is reached.
        keep: so many of the newest commits are never removed.
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

    def claim(self) -> None:
        """Claim the checkpoint root for the job, or check the claim.

        Raises:
            NotOwnerError: it belongs to another job.
            OSError: the claim cannot be written.
        """
        found = self._settings
        owner = claim_root(
            self._root,
            uid=found.job_uid,
            job=f"{found.namespace}/{found.job}",
            take_over=found.take_over,
            resumes=found.resume is not None and found.resume.is_relative_to(self._root),
        )
        self._is_marked = owner is not None and bool(owner.previous)

    def announce(self) -> None:
        """Let older attempts see on the storage that this one has started.

        Raises:
            NotOwnerError: a newer one has started already.
        """
        newest = attempts.newest_announced(self._root, self._settings.job_uid)
        if self._settings.job_uid and newest > self._settings.attempt:
            raise NotOwnerError(
                f"attempt {newest} of this job has started here before, and this is attempt {self._settings.attempt}: "
                "nothing was changed",
                path=str(self._root),
                hint=f"the job's status was set back: raise status.attempt to {newest} and retry",
            )
        if self._settings.job_uid or self._settings.resume is not None:
            attempts.announce(self._root, self._settings.attempt, self._settings.job_uid)

    def free_number(self, step: int) -> int:
        """Return the first number n for which `commit_name(step, n, uid)` is free; see there.

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
        """Complete a save whose files are on stable storage, and publish it if this attempt may.

        Raises:
            NotOwnerError: the checkpoint root belongs to another job.
        """
        sync_folders(folder)
        write_commit(folder, commit, name=UNCONFIRMED_FILE)
        sync_folder(folder.parent)
        self._unpublished.append((folder, commit))
        self._confirm()

    def confirm_when_answered(self) -> None:
        """Publish the newest save if the Lease did not answer when it was written, and has answered since.

        Raises:
            NotOwnerError: the checkpoint root belongs to another job.
        """
        if self._unpublished and self._heartbeat.answers > self._answers_before:
            self._confirm()

    def confirm_last(self) -> bool:
        """Publish the newest save at the end of the training; wait a while for the Lease if need be.

        Returns:
            Whether it is published, as far as there is one.

        Raises:
            NotOwnerError: the checkpoint root belongs to another job.
        """
        deadline = time.monotonic() + _CONFIRM_AT_END_SECONDS
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
        """Publish the newest save if this attempt may; else keep the newest `keep` of those that nobody reads."""
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
        self._remove_old()

    def _drop(self, saves: list[tuple[Path, Commit]]) -> None:
        """Remove saves of this process that were never published: nobody else has read them."""
        for folder, _ in saves:
            with contextlib.suppress(OSError):
                (folder / UNCONFIRMED_FILE).unlink()
                shutil.rmtree(folder)
        self._unpublished = [save for save in self._unpublished if save not in saves]

    def _may_publish(self) -> bool:
        """Return whether the Lease answers now and, in a cluster, no newer attempt of the job has started."""
        return self._heartbeat.flush() and not (self._settings.lease and self._is_superseded())

    def _is_superseded(self) -> bool:
        return attempts.newest_announced(self._root, self._settings.job_uid) > self._settings.attempt

    def _remove_old(self) -> None:
        """Remove what the operator has released or, without a cluster, all but the newest commits."""
        found = self._settings
        protected = {found.resume} if found.resume else set()
        if found.lease and found.job_uid:
            names = retention.read_released(self._heartbeat.released)
            gone = retention.remove_released(
                self._root, names, owner=found.job_uid, keep=self._keep, protected=protected
            )
            self._heartbeat.update({LeaseKey.REMOVED: json.dumps(gone)})
        elif not self._is_superseded():
            retention.prune(self._root, attempt=found.attempt, keep=self._keep, protected=protected)


def commit_name(step: int, number: int, uid: str = "") -> str:
    """Return the name of a commit's folder: `step-00000005`, or `step-00000005.2` for the second save of that step.

    A number from MARKED on counts from there, and the name has the first part of the job's UID: the root has had
    another owner, who may have used the plain name, or may be about to.
    """
    mark, number = (f"-{uid[:8]}", number - MARKED) if number > MARKED else ("", number)
    return f"step-{step:08d}{mark}" if number == 1 else f"step-{step:08d}{mark}.{number}"
