"""Entry point of the command: what is done before the rest is imported, which takes a moment."""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import sys
import threading
from collections.abc import Iterator, Sequence

from reshard.system.exit_signals import handle_exit_signals

_INTERRUPTED = 130  # `reshard.contract.ExitCode.INTERRUPTED`, which would have to be imported
_MESSAGE = b"reshard: interrupted before anything was done\n"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # numpy would start threads for linear algebra: there is none
    gc.disable()
    with _quiet_start():
        from reshard.cli.command_line import run
    gc.freeze()  # what the imports made stays: no collection need look at it
    gc.enable()
    return run(words)


@contextlib.contextmanager
def _quiet_start() -> Iterator[None]:
    """Let `ENDINGS` end the process at once: in an import, an exception could come out anywhere."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def leave(_number: int, _frame: object) -> None:
        with contextlib.suppress(OSError):  # a closed stream
            os.write(2, _MESSAGE)
        os._exit(_INTERRUPTED)

    before = {number: signal.signal(number, leave) for number in handle_exit_signals()}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


if __name__ == "__main__":
    sys.exit(main())
