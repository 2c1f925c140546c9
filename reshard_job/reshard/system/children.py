"""What all child processes have in common: they end with their parent, and their errors reach it."""

from __future__ import annotations

import ctypes
import os
import signal
import traceback

from reshard.errors import ReshardError, StoreError

_PR_SET_PDEATHSIG = 1  # linux/prctl.h


def bind_to_parent(parent: int) -> bool:
    """Let the kernel kill this process when its parent ends; return False if the parent has already ended."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    return os.getppid() == parent


def make_picklable(error: BaseException) -> BaseException:
    """Return an error that can be pickled: a ReshardError as it is, any other one with its traceback as text."""
    if isinstance(error, ReshardError):
        return error
    return RuntimeError("".join(traceback.format_exception(error)))


def process_end_error(code: int) -> ReshardError:
    """Make the error for a process that ended with this exit code and sent no answer."""
    if code == -signal.SIGBUS:
        return StoreError(
            "a file of the source became shorter, or could not be read, while it was converted",
            hint="nothing was published; convert it again when nobody writes to it",
        )
    how = f"signal {-code} ({signal.Signals(-code).name})" if code < 0 else f"exit code {code}"
    return ReshardError(
        f"a process of the conversion was ended by {how}",
        hint="often the memory limit was reached: allow more, or fewer --threads" if code == -signal.SIGKILL else "",
    )
