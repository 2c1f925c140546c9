"""Everything that `reshard` raises on purpose.

::

    ReshardError
    ├── UsageError               the command line or an argument makes no sense
    │   └── TopologyError        impossible degrees of parallelism
    ├── SourceError              the source checkpoint cannot be used
    │   ├── NotACheckpointError  no format recognises the path
    │   ├── UncommittedError     there is no commit marker where one is demanded
    │   ├── CorruptSourceError   truncated, flipped, missing or mixed files
    │   ├── SourceChangedError   another content than when the conversion began, or than was converted
    │   ├── UnsafePickleError    a pickle that wants more than data
    │   └── StoreError           an object store does not answer as it should
    ├── UnsupportedError         understood, but refused: layout or conversion we will not guess at
    ├── PlanError                the plan does not cover the target exactly
    ├── TargetError              the target cannot be written
    │   ├── TargetTakenError     there is something else of this name
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
        message: what is wrong, with the object, what was expected and what was found.
        path: the file or folder concerned, if there is one.
        hint: what to do about it.
        problems: all problems found, when several were collected before raising once.
    """

    exit_code = ExitCode.INTERNAL

    def __init__(self, message: str, *, path: str | None = None, hint: str = "", problems: Sequence[str] = ()) -> None:
        super().__init__(message)
        self.message = message
        self.path = path
        self.hint = hint
        self.problems = tuple(problems)

    def lines(self) -> list[str]:
        """Return what is told of the error, one item a line; a name in it may hold line breaks of its own."""
        first = f"{self.path}: {self.message}" if self.path else self.message
        return [first, *(f"  - {problem}" for problem in self.problems), *([f"hint: {self.hint}"] if self.hint else [])]

    def __str__(self) -> str:
        return "\n".join(self.lines())


class UsageError(ReshardError, ValueError):
    """The command line or an argument makes no sense."""

    exit_code = ExitCode.USAGE


class TopologyError(UsageError):
    """Impossible degrees of parallelism."""


class SourceError(ReshardError):
    """The source checkpoint cannot be used."""

    exit_code = ExitCode.SOURCE_INVALID


class NotACheckpointError(SourceError):
    """No format recognises the path."""


class UncommittedError(SourceError):
    """There is no commit marker where one is demanded."""


class CorruptSourceError(SourceError):
    """Truncated, flipped, missing or mixed files."""


class SourceChangedError(SourceError):
    """The source has another content than when the conversion began, or than the result was made of."""

    exit_code = ExitCode.SOURCE_CHANGED


class UnsafePickleError(SourceError):
    """A pickle that wants more than data."""


class StoreError(SourceError, OSError):
    """An object store does not answer as it should."""


class UnsupportedError(ReshardError):
    """Understood, but refused: a layout or conversion that we will not guess at."""

    exit_code = ExitCode.UNSUPPORTED


class PlanError(ReshardError):
    """The plan does not cover the target exactly."""

    exit_code = ExitCode.PLAN_INVALID


class TargetError(ReshardError):
    """The target cannot be written."""

    exit_code = ExitCode.TARGET_FAILED


class TargetTakenError(TargetError):
    """There is something else of the target's name, and it is never touched."""


class NotOwnerError(TargetError):
    """The checkpoint root belongs to another job: nothing is written there."""

    exit_code = ExitCode.NOT_OWNER


class StorageFullError(TargetError):
    """No space left on the target's file system."""

    exit_code = ExitCode.STORAGE_FULL


class VerificationError(ReshardError):
    """Digests differ: the result was not committed."""

    exit_code = ExitCode.VERIFICATION_FAILED
