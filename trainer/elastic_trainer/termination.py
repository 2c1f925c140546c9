"""SIGTERM as a request to leave: the training commits at the next step boundary, and then exits.

Kubernetes sends SIGTERM to a pod that is preempted, evicted or deleted, or whose node shuts down, and kills its
processes at the end of the grace period. The operator also sends SIGTERM, to the processes of an attempt that is over;
it says so on the Lease before, and then there is nothing to commit.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable

from elastic_trainer.errors import FencedError
from elastic_trainer.mailbox import Mailbox
from reshard.contract import LeaseKey, Request

_log = logging.getLogger(__name__)
EXIT_CODE = 128 + signal.SIGTERM
"""Exit code of a process that SIGTERM ends; the default action of the signal gives the same one in a shell."""

_JOIN_SECONDS = 1.0
"""Longest wait for the thread, which may itself wait for a rank 0 that does not answer."""


class Termination:
    """Decides what SIGTERM means: a request to leave, or the end of the process.

    A thread decides, because Python runs signal handlers in the main thread, which may wait in a collective for ever.

    Args:
        mailbox: where the operator says that the attempt is over.
        announce: called once, from the thread, when this process was asked to leave.
    """

    def __init__(self, mailbox: Mailbox, *, announce: Callable[[], None]) -> None:
        self._mailbox = mailbox
        self._announce = announce
        self._can_commit = False
        self._is_requested = False
        self._pipe: tuple[socket.socket, socket.socket] | None = None
        self._thread: threading.Thread | None = None

    @property
    def is_requested(self) -> bool:
        """True if this process was asked to leave."""
        return self._is_requested

    def install(self) -> None:
        """Handle SIGTERM, unless the script handles it itself or this is not the main thread."""
        is_main = threading.current_thread() is threading.main_thread()
        if not is_main or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
            return
        reader, writer = socket.socketpair()
        writer.setblocking(False)
        other = signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
        if other != -1:  # for instance of an asyncio loop, which needs it
            signal.set_wakeup_fd(other)
            reader.close()
            writer.close()
            return
        self._pipe = reader, writer
        self._thread = threading.Thread(target=self._listen, args=(reader,), name="termination", daemon=True)
        self._thread.start()
        signal.signal(signal.SIGTERM, _ignore)
        signal.siginterrupt(signal.SIGTERM, False)
        os.register_at_fork(after_in_child=self._forget)

    def expect_commit(self) -> None:
        """From now on the training has something to commit; before, SIGTERM ends the process at once."""
        self._can_commit = True

    def close(self) -> None:
        """End the thread; SIGTERM ends the process at once again."""
        self._can_commit = False
        if self._pipe is None or threading.current_thread() is not threading.main_thread():
            return
        pipe, self._pipe = self._pipe, None
        # The kernel ignores SIGTERM for process 1 of a container if there is no handler.
        signal.signal(signal.SIGTERM, _exit if os.getpid() == 1 else signal.SIG_DFL)
        signal.set_wakeup_fd(-1)
        pipe[1].close()
        if self._thread is not None:
            self._thread.join(timeout=_JOIN_SECONDS)
        pipe[0].close()

    def _forget(self) -> None:
        """Handle SIGTERM no more in a forked process, which must not report its own end as the end of this one."""
        if self._pipe is not None:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            signal.set_wakeup_fd(-1)
            self._pipe = None

    def _listen(self, reader: socket.socket) -> None:
        while numbers := reader.recv(64):
            for number in numbers:
                if number == signal.SIGTERM:
                    self._decide()

    def _decide(self) -> None:
        if self._is_requested or not self._can_commit or self._is_attempt_over():
            _exit()
        self._is_requested = True
        sys.stderr.write("elastic_trainer: SIGTERM: the training commits at the next step boundary and exits\n")
        sys.stderr.flush()
        with contextlib.suppress(Exception):  # the operator also sees that the pod has to stop, and asks rank 0
            self._announce()

    def _is_attempt_over(self) -> bool:
        """Return whether the operator has ended the attempt; False if the API server does not answer."""
        try:
            return self._mailbox.read().get(LeaseKey.REQUEST) == Request.STOP
        except FencedError:
            return True
        except OSError as error:
            _log.warning("cannot read the Lease at SIGTERM: %s", error)
            return False


def _ignore(_number: int, _frame: object) -> None:
    """Do nothing: the thread has been woken."""


def _exit(*_: object) -> None:
    os._exit(EXIT_CODE)
