"""The handle of the node's copy process in the first rank of the node: starts it, gives it orders, starts it again."""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import subprocess
import sys
import time

from elastic_trainer.saving.reports import CopyOrder, NodeReport, deliver, read_report

_log = logging.getLogger(__name__)
_COMMAND = "import sys; from elastic_trainer.saving.copy_process import main; sys.exit(main())"
_MAX_STARTS = 3
"""Starts of a copy process for one save; after that the save has failed."""

_POLL_SECONDS = 0.02
_END_SECONDS = 5.0


class Copier:
    """Copies staged saves to the checkpoint volume in another process.

    Args:
        lock: descriptor of the staging folder's lock, which the process inherits.
    """

    def __init__(self, lock: int) -> None:
        self._lock = lock
        self._process: subprocess.Popen[bytes] | None = None
        self._order: CopyOrder | None = None
        self._starts = 0

    def start(self) -> None:
        """Start the process, so that the first save does not wait for it."""
        # The script may have found its modules by a path of its own, so the process gets the same one.
        paths = os.pathsep.join(path for path in sys.path if path and isinstance(path, str))
        self._process = subprocess.Popen(
            [sys.executable or "", "-P", "-c", _COMMAND, str(os.getpid())],
            env={**os.environ, "PYTHONPATH": paths, "OPENBLAS_NUM_THREADS": "1"},
            stdin=subprocess.PIPE,
            pass_fds=[self._lock],
            start_new_session=True,
        )

    def submit(self, order: CopyOrder) -> None:
        """Order the copy of one save; the former one is done."""
        self._order, self._starts = order, 1
        if self._process is None or self._process.poll() is not None:
            self.start()
        self._send(order)

    def is_done(self) -> bool:
        """Return whether the last order is done, well or not; start the process again if it has died.

        Raises:
            OSError: the process dies again and again, and not even that can be reported.
        """
        order = self._order
        if order is None or order.done.exists():
            return True
        assert self._process is not None
        code = self._process.poll()
        if code is None:
            return False
        if self._starts >= _MAX_STARTS:
            error = f"its copy process ended {_MAX_STARTS} times, the last time with exit code {code}"
            report = NodeReport(node=order.node, host=os.uname().nodename, error=error)
            deliver(order, read_report(order.local_report) or report)
            shutil.rmtree(order.staged, ignore_errors=True)
            order.local_report.rename(order.done)
            return True
        _log.warning("the copy process of step %s ended with exit code %s: it copies again", order.tag, code)
        self._starts += 1
        self.start()
        self._send(order)
        return False

    def wait(self) -> NodeReport | None:
        """Wait until the last order is done, and return its report; None if there is no order."""
        while not self.is_done():
            time.sleep(_POLL_SECONDS)
        order, self._order = self._order, None
        if order is None:
            return None
        report = read_report(order.done)
        order.done.unlink(missing_ok=True)
        return report

    def close(self) -> None:
        """End the process."""
        process, self._process = self._process, None
        if process is None:
            return
        assert process.stdin is not None
        with contextlib.suppress(OSError):
            process.stdin.close()
        if self._order is not None:
            process.kill()
        try:
            process.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()

    def _send(self, order: CopyOrder) -> None:
        assert self._process is not None
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):  # it has ended: `is_done` notices
            self._process.stdin.write(order.to_json().encode() + b"\n")
            self._process.stdin.flush()
