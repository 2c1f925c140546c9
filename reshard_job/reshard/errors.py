"""All classes of errors that `reshard` raises on purpose.

::

    ReshardError
    ├── UsageError               the command line or an argument is invalid
    │   └── TopologyError        impossible degrees of parallelism
    ├── SourceError              the source checkpoint cannot be used
    │   ├── NotACheckpointError  no format recognises the path
    │   ├── UncommittedError     there is no commit marker where one is required
    │   ├── CorruptSourceError   truncated, damaged, missing or mixed files
    │   ├── SourceChangedError   other content than when the conversion began, or than was converted
    │   └── StoreError           the file system or object store returned an error
    ├── UnsupportedError         content or a conversion that this program does not convert
    │   └── UnsafePickleError    a pickle that needs more than plain data
    ├── PlanError                the plan does not cover the target exactly
    ├── TargetError              the target cannot be written
    │   ├── TargetTakenError     the target exists and is something else
    │   ├── NotOwnerError        the checkpoint root belongs to another job
    │   └── StorageFullError     no space left
    └── VerificationError        digests differ: the result was not committed

Each class has the exit code that the command line ends with; the operator reads it from the pod's status.

CorruptSourceError, and no other class, says that bytes are damaged: they contradict themselves, their index or their
checksum. What is well formed, and is not converted, is an UnsupportedError: unknown classes and fields, other versions,
and whatever is larger or deeper than this program reads. A framework may load it. What cannot be read now is a
StoreError: it says nothing about the bytes, and a retry may succeed.
"""

from __future__ import annotations

import errno
from collections.abc import Sequence

from reshard.contract import ExitCode


class ReshardError(Exception):
    """Base of all errors raised on purpose.

    Attributes:
        message: what is wrong: the object, what was expected and what was found.
        path: the file or folder, if there is one.
        hint: what the user can do.
        problems: all problems, if several were collected before the error was raised.
    """

    exit_code = ExitCode.INTERNAL

    def __init__(self, message: str, *, path: str | None = None, hint: str = "", problems: Sequence[str] = ()) -> None:
        super().__init__(message)
        self.message = message
        self.path = path
        self.hint = hint
        self.problems = tuple(problems)

    def lines(self) -> list[str]:
        """Return message, problems and hint as items to print on one line each; names in them may hold line breaks."""
        first = f"{self.path}: {self.message}" if self.path else self.message
        return [first, *(f"  - {problem}" for problem in self.problems), *([f"hint: {self.hint}"] if self.hint else [])]

    def __str__(self) -> str:
        return "\n".join(self.lines())


class UsageError(ReshardError, ValueError):
    """The command line or an argument is invalid."""

    exit_code = ExitCode.USAGE


class TopologyError(UsageError):
    """Impossible degrees of parallelism."""


class SourceError(ReshardError):
    """The source checkpoint cannot be used."""

    exit_code = ExitCode.UNSUPPORTED


class NotACheckpointError(SourceError):
    """No format recognises the path."""


class UncommittedError(SourceError):
    """There is no commit marker where one is required."""

    exit_code = ExitCode.SOURCE_UNAVAILABLE


class CorruptSourceError(SourceError):
    """Files of the source are truncated, damaged, missing or mixed: they contradict themselves or each other."""

    exit_code = ExitCode.SOURCE_INVALID


class SourceChangedError(SourceError):
    """The source has other content than when the conversion began, or than the result was made of."""

    exit_code = ExitCode.SOURCE_CHANGED


class StoreError(SourceError, OSError):
    """The file system or the object store returned an error, which says nothing about the content."""

    exit_code = ExitCode.SOURCE_UNAVAILABLE


class UnsupportedError(ReshardError):
    """The content is well formed, or the conversion is known, but this program does not convert it."""

    exit_code = ExitCode.UNSUPPORTED


class UnsafePickleError(UnsupportedError):
    """A pickle needs more than plain data.

    Attributes:
        to_allow: the names that make the pickle acceptable once the user allows them all, with those that are allowed
            already; empty if that is not possible.
    """

    to_allow: tuple[str, ...] = ()


class PlanError(ReshardError):
    """The plan does not cover the target exactly."""

    exit_code = ExitCode.PLAN_INVALID


class TargetError(ReshardError):
    """The target cannot be written."""

    exit_code = ExitCode.TARGET_FAILED


class TargetTakenError(TargetError):
    """The target exists and is something else, which is never changed."""


class NotOwnerError(TargetError):
    """The checkpoint root belongs to another job, so nothing is written there."""

    exit_code = ExitCode.NOT_OWNER


class StorageFullError(TargetError):
    """No space left on the target's file system."""

    exit_code = ExitCode.STORAGE_FULL


class VerificationError(ReshardError):
    """Digests differ, so the result was not committed."""

    exit_code = ExitCode.VERIFICATION_FAILED


_CONTRADICTIONS = {errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.EINVAL, errno.ENXIO}
"""Errors of a path that is missing, or is not a file."""


def make_read_error(
    error: OSError, path: str, *, what: str = "cannot be read", is_indexed: bool = True
) -> ReshardError:
    """Make the error for a file or folder of a source that could not be read.

    Args:
        error: as raised by the operating system or a store; a `ReshardError` is returned as it is.
        path: of the file.
        what: what failed.
        is_indexed: the checkpoint itself says that the path is there, so that it is damaged without it.
    """
    if isinstance(error, ReshardError):
        return error
    if error.errno == errno.ELOOP:
        hint = "copy what it links to into the folder: cp -rL"
        return UnsupportedError("is a symbolic link, or lies behind one", path=path, hint=hint)
    message = f"{what}: {error.strerror or error}"
    if is_indexed and error.errno in _CONTRADICTIONS:
        return CorruptSourceError(message, path=path)
    return StoreError(message, path=path, hint="check permissions and the file system; then run it again")
