"""Asynchronous saves of one training process, as the session uses them.

A save is staged in a node-local folder, copied by one process per node, and published by a thread of rank 0. One save
is under way at a time. `connect`, `find_obstacle`, `begin` and `wait` are collective: all ranks call them in the same
order. If asynchronous saves are switched off, none of them does anything.
"""

from __future__ import annotations

import functools
import logging
import secrets
import shutil
from collections.abc import Callable
from pathlib import Path

from elastic_trainer.collective import Collective
from elastic_trainer.saving import futures, reuse, staging
from elastic_trainer.saving.copier import Copier
from elastic_trainer.saving.publication import Publication
from elastic_trainer.saving.reports import FILES, REPORTS, CopyOrder, report_path, write_note
from elastic_trainer.settings import Settings
from reshard.commits.commit import Commit
from reshard.errors import NotOwnerError
from reshard.storage.durable import make_folder

_log = logging.getLogger(__name__)
_MARGIN = 1.05
"""The next save may be a little larger than the last one of this node."""

_MARGIN_OF_GUESS = 1.25
"""If only the size of the whole commit is known, this node's part may be larger than its share."""


class AsynchronousSaves:
    """Stages saves, has them copied, and publishes them in the background.

    Args:
        settings: settings of the process.
        collective: operations between the ranks.
        publish: publishes a complete save; called from a thread of rank 0, and only there.
    """

    def __init__(
        self, settings: Settings, collective: Collective, publish: Callable[[Path, Commit], None] | None
    ) -> None:
        self._settings = settings
        self._collective = collective
        self._publish = publish
        self._node = settings.rank - settings.local_rank
        self._target = settings.checkpoint_root / f"a{settings.attempt}"
        self._nodes: list[int] = []
        self._num_local = 1
        self._folder: Path | None = None
        self._lock = -1
        self._copier: Copier | None = None
        self._publication: Publication | None = None
        self._is_under_way = False
        self._expected_bytes = 0
        self._failure = ""

    def connect(self) -> None:
        """Make this node's staging folder and start its copy process.

        Raises:
            TargetError: the staging folder cannot be used.
            ConfigurationError: this rank does not share the staging folder of its node's first rank.
        """
        settings = self._settings
        if not settings.async_saves:
            return
        if settings.rank == 0:
            shutil.rmtree(self._target / REPORTS, ignore_errors=True)
            make_folder(self._target / REPORTS)
        folder = None
        if settings.local_rank == 0:
            folder, self._lock = staging.create(settings.staging)
            self._copier = Copier(self._lock)
            self._copier.start()
        ranks = self._collective.gather((self._node, folder))
        self._nodes = sorted({node for node, _ in ranks})
        self._num_local = sum(node == self._node for node, _ in ranks)
        self._folder = next((path for node, path in ranks if node == self._node and path), settings.staging / "none")
        if settings.local_rank != 0:
            self._lock = staging.join(self._folder)

    def expect(self, num_bytes: int) -> None:
        """Take the size of a whole commit as a guess for the next save."""
        self._expected_bytes = int(num_bytes / max(1, len(self._nodes)) * _MARGIN_OF_GUESS)

    def find_obstacle(self, has_failed: int) -> str:
        """Return why the next save cannot be asynchronous, the same on all ranks; empty if it can.

        Args:
            has_failed: 1 if the save before has failed, so that its error may show in a synchronous save.
        """
        if not self._settings.async_saves:
            return "asynchronous saves are switched off"
        if has_failed:
            self._failure = ""
            return "the save before failed"
        own = self._find_own_obstacle() if self._settings.local_rank == 0 else ""
        return next((text for text in self._collective.gather(own) if text), "")

    def _find_own_obstacle(self) -> str:
        assert self._folder is not None
        needed, bound = self._expected_bytes, self._settings.staging_bytes
        if not needed and not bound:
            return "the size of a save is not known yet, and ETJ_STAGING_BYTES is not set"
        needed = needed or bound
        if bound and needed > bound:
            return f"a save needs {needed} bytes on the node of rank {self._node}, ETJ_STAGING_BYTES allows {bound}"
        free = staging.free_bytes(self._folder) + reuse.num_bytes(self._folder / reuse.SPARES)
        if needed > free:
            return f"a save needs {needed} bytes on the node of rank {self._node}, {self._folder} has {free} free"
        return ""

    def begin(self, write: Callable[[Path, str], object], folder: Path, commit: Commit) -> None:
        """Stage a save; it is copied and published in the background.

        Args:
            write: saves with the framework's own function.
            folder: folder of the commit on the checkpoint volume.
            commit: the commit without its files.
        """
        assert self._folder is not None
        token = self._collective.gather(secrets.token_hex(8) if self._settings.rank == 0 else "")[0]
        staged = self._folder / token
        (staged / FILES).mkdir(parents=True, exist_ok=True)
        reports = {node: report_path(self._target, token, node) for node in self._nodes}
        self._is_under_way = True
        if self._copier is not None:
            self._copier.submit(
                CopyOrder(
                    staged=staged,
                    target=self._target,
                    tag=folder.name,
                    report=reports[self._node],
                    node=self._node,
                    local_ranks=self._num_local,
                )
            )
        if self._publish is not None:
            self._publication = Publication(folder, commit, reports, self._publish)
            self._publication.start()
        tell = functools.partial(write_note, staged, self._settings.local_rank)
        try:
            with reuse.reuse_spares(staged / FILES / folder.name, self._folder / reuse.SPARES):
                result = write(staged / FILES, folder.name)
            futures.when_done(result, tell)
        except BaseException as error:
            tell(f"{type(error).__name__}: {error}")
            raise

    @property
    def is_busy(self) -> bool:
        """True on rank 0 while a save is neither published nor failed."""
        return self._publication is not None and self._publication.is_alive()

    def has_failed(self) -> bool:
        """Return on rank 0 whether a save has failed that no other one has followed.

        Raises:
            NotOwnerError: the checkpoint root belongs to another job.
        """
        error = None
        if self._publication is not None and not self._publication.is_alive():
            error, self._publication.error = self._publication.error, None
        if isinstance(error, NotOwnerError):
            raise error
        self._failure = self._failure or str(error or "")
        return bool(self._failure)

    def check(self) -> None:
        """Start this node's copy process again if it has died; do not wait.

        Raises:
            OSError: it dies again and again, and that cannot be reported.
        """
        if self._copier is not None:
            self._copier.is_done()

    def wait(self) -> None:
        """Wait until the save under way, if there is one, is published or has failed; see `has_failed`."""
        if not self._is_under_way:
            return
        self._is_under_way = False
        own = self._copier.wait() if self._copier is not None else None
        if own is not None and not own.error:
            self._expected_bytes = int(own.num_bytes * _MARGIN)
        reports = [report for report in self._collective.gather(own) if report is not None]
        if self._publication is not None:
            self._publication.provide(reports)
            self._publication.join()

    def close(self) -> None:
        """End the copy process and remove the staging folder; a save that is under way is given up."""
        if self._copier is not None:
            self._copier.close()
        if self._folder is not None and self._lock >= 0:
            staging.release(self._folder, self._lock, remove=self._settings.local_rank == 0)
            self._lock = -1
