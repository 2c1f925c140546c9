"""Rank 0's thread that publishes a staged save when all nodes have reported that their files are on the volume."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import shutil
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from elastic_trainer.errors import SaveError
from elastic_trainer.saving.reports import NodeReport, merge, read_report
from reshard.commits.commit import Commit

_log = logging.getLogger(__name__)
_POLL_SECONDS = 0.1


class Publication(threading.Thread):
    """Waits for the nodes' reports, then publishes the commit.

    Args:
        folder: folder of the commit on the checkpoint volume.
        commit: the commit without its files.
        reports: file of each node's report, by the node's first rank.
        publish: publishes a complete save; raises what `Publisher.publish` raises.
    """

    def __init__(
        self, folder: Path, commit: Commit, reports: Mapping[int, Path], publish: Callable[[Path, Commit], None]
    ) -> None:
        super().__init__(name="publication", daemon=True)
        self.error: Exception | None = None
        self.step = commit.step
        self._folder = folder
        self._commit = commit
        self._paths = reports
        self._publish = publish
        self._reports: dict[int, NodeReport] = {}
        self._provided = threading.Event()

    def provide(self, reports: Sequence[NodeReport]) -> None:
        """Hand over reports that came through a collective operation; a network file system may show files late."""
        self._reports.update({report.node: report for report in reports})
        self._provided.set()

    def run(self) -> None:
        """Publish the save, or keep the error and remove what was written of it."""
        started = time.monotonic()
        try:
            self._collect()
            commit = dataclasses.replace(self._commit, files=merge(self._reports))
            self._publish(self._folder, commit)
        except Exception as error:  # whatever it is, the save has failed, and the training has to be told
            self.error = error
            if isinstance(error, SaveError):  # every node has ended its part, and nothing refers to the folder
                shutil.rmtree(self._folder, ignore_errors=True)
            _log.error("the asynchronous save of step %d failed: %s", self.step, error)
        else:
            seconds = time.monotonic() - started
            _log.info(
                "saved step %d asynchronously: %.2f GB, on the volume %.1f s after the save began",
                *(self.step, commit.num_bytes / 1e9, seconds),
            )
        for path in self._paths.values():
            with contextlib.suppress(OSError):
                path.unlink(missing_ok=True)

    def _collect(self) -> None:
        """Wait for the reports of all nodes."""
        while missing := [node for node in self._paths if node not in self._reports]:
            for node in missing:
                if (report := read_report(self._paths[node])) is not None:
                    self._reports[node] = report
            if len(self._reports) < len(self._paths):
                self._provided.wait(_POLL_SECONDS)
                self._provided.clear()
