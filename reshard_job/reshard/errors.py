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
    │   ├── UnsafePickleError    a pickle that needs more than plain data
    │   └── StoreError           an object store returned an error
    ├── UnsupportedError         a layout or conversion that is recognized, but not supported
    ├── PlanError                the plan does not cover the target exactly
    ├── TargetError              the target cannot be written
    │   ├── TargetTakenError     the target exists and is something else
    │   ├── NotOwnerError        the checkpoint root belongs to another job
    │   └── StorageFullError     no space left
    └── VerificationError        digests differ: the result was not committed

Each class has the exit code that the command line ends with; the operator reads it from the pod's status.
"""

from __future__ import annotations

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

    exit_code = ExitCode.SOURCE_INVALID


class NotACheckpointError(SourceError):
    """No format recognises the path."""


class UncommittedError(SourceError):
    """There is no commit marker where one is required."""


class CorruptSourceError(SourceError):
    """Files of the source are truncated, damaged, missing or mixed."""


class SourceChangedError(SourceError):
    """The source has other content than when the conversion began, or than the result was made of."""

    exit_code = ExitCode.SOURCE_CHANGED


class UnsafePickleError(SourceError):
    """A pickle needs more than plain data.

    Attributes:
        to_allow: the names that make the pickle acceptable once the user allows them all, with those that are allowed
            already; empty if that is not possible.
    """

    to_allow: tuple[str, ...] = ()


class StoreError(SourceError, OSError):
    """An object store returned an error."""


class UnsupportedError(ReshardError):
    """A layout or conversion is recognized, but not supported."""

    exit_code = ExitCode.UNSUPPORTED


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
