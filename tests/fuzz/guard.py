"""The promise that every fuzz case is held to."""

from __future__ import annotations

import contextlib
import hashlib
import resource
import signal
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from reshard.contract import ExitCode
from reshard.errors import ReshardError

MAX_SECONDS = 2.0
MAX_BYTES = 200 << 20

CODES = {
    "UsageError": ExitCode.USAGE,
    "TopologyError": ExitCode.USAGE,
    "SourceError": ExitCode.UNSUPPORTED,
    "NotACheckpointError": ExitCode.UNSUPPORTED,
    "UncommittedError": ExitCode.SOURCE_UNAVAILABLE,
    "StoreError": ExitCode.SOURCE_UNAVAILABLE,
    "CorruptSourceError": ExitCode.SOURCE_INVALID,
    "SourceChangedError": ExitCode.SOURCE_CHANGED,
    "UnsupportedError": ExitCode.UNSUPPORTED,
    "UnsafePickleError": ExitCode.UNSUPPORTED,
    "PlanError": ExitCode.PLAN_INVALID,
    "TargetError": ExitCode.TARGET_FAILED,
    "TargetTakenError": ExitCode.TARGET_FAILED,
    "NotOwnerError": ExitCode.NOT_OWNER,
    "StorageFullError": ExitCode.STORAGE_FULL,
    "VerificationError": ExitCode.VERIFICATION_FAILED,
}
"""Every class of errors, except the base; said once more, so that a class that changes its code is noticed."""


class TooSlowError(AssertionError):
    """A case did not end in time."""


@contextlib.contextmanager
def limits(*, seconds: float = MAX_SECONDS, num_bytes: int = MAX_BYTES) -> Iterator[None]:
    """Interrupt what takes longer (of processor time: others use this machine too), and refuse what needs more memory.

    Raises:
        AssertionError: one of the limits is broken.
    """

    def too_slow(*_arguments: object) -> None:
        raise TooSlowError(f"not done after {seconds} s of processor time")

    # Waiting takes no processor time: a case that hangs in a system call is ended by the wall clock.
    before = {kind: signal.signal(kind, too_slow) for kind in (signal.SIGVTALRM, signal.SIGALRM)}
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    signal.setitimer(signal.ITIMER_VIRTUAL, seconds)
    signal.setitimer(signal.ITIMER_REAL, 10 * seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.setitimer(signal.ITIMER_REAL, 0)
        for kind, handler in before.items():
            signal.signal(kind, handler)
    more = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - peak) * 1024
    assert more <= num_bytes, f"took {more} bytes of memory"


def outcome_of(action: Callable[[], Any]) -> Any:
    """Return the result of `action`, or the `ReshardError` that it raises; any other exception is a finding."""
    with limits():
        try:
            return action()
        except ReshardError as error:
            check_error(error)
            return error


def check_error(error: ReshardError) -> None:
    """It has the exit code of its class, says something, and does not say it in megabytes."""
    name = type(error).__name__
    assert error.exit_code == CODES[name], (name, error.exit_code)
    assert error.message
    text = str(error)
    assert len(text) < 100_000, f"a message of {len(text)} characters: {text[:200]}"
    text.encode("utf-8", "surrogateescape" if "\udc80" <= max(text) <= "\udcff" else "backslashreplace")


def state_of(folder: Path) -> dict[str, tuple[int, int, int, str]]:
    """Kind, size, time of change and content of everything in a folder, to see whether somebody touched it."""
    found = {}
    for path in sorted(folder.rglob("*")):
        status = path.lstat()
        content = ""
        if stat.S_ISREG(status.st_mode) and status.st_size < 1 << 26:
            content = hashlib.sha256(path.read_bytes()).hexdigest()
        elif stat.S_ISLNK(status.st_mode):
            content = str(path.readlink())
        found[str(path)] = (status.st_mode, status.st_size, status.st_mtime_ns, content)
    return found
