"""Entry point of the command: prepare the process, then import the rest, which takes a moment."""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import sys
import threading
from collections.abc import Iterator, Sequence

from reshard.extras import extra_needed
from reshard.system.exit_signals import select_exit_signals

_INTERRUPTED = 130  # as `reshard.contract.ExitCode.INTERRUPTED`, without importing it
_MESSAGE = b"reshard: interrupted before anything was done\n"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # nothing here needs numpy's threads for linear algebra
    gc.disable()
    with _quiet_start(), extra_needed("reshard", "reshard"):
        from reshard.cli.command_line import run
    gc.freeze()  # objects of modules live as long as the process: collections need not visit them
    gc.enable()
    return run(words)


@contextlib.contextmanager
def _quiet_start() -> Iterator[None]:
    """Let exit signals end the process at once: an exception in the middle of an import could come out anywhere."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def leave(_number: int, _frame: object) -> None:
        with contextlib.suppress(OSError):  # a closed stream
            os.write(2, _MESSAGE)
        os._exit(_INTERRUPTED)

    old_handlers = {number: signal.signal(number, leave) for number in select_exit_signals()}
    try:
        yield
    finally:
        for number, handler in old_handlers.items():
            signal.signal(number, handler)


if __name__ == "__main__":
    sys.exit(main())
