"""Failures of a command: a message for people and an exit code for machines."""

from __future__ import annotations

import enum


class Exit(enum.IntEnum):
    """Exit codes of `kubectl etj`; docs/kubectl-etj.md lists them."""

    OK = 0
    REFUSED = 1
    """No such job, not permitted, or not possible in the job's state."""
    USAGE = 2
    UNREACHABLE = 3
    """No cluster answers, or there are no usable credentials."""
    NOT_INSTALLED = 4
    """The cluster does not know the resource: the CRD is not installed."""
    TIMEOUT = 5
    """`--wait` reached its timeout."""


class PluginError(Exception):
    """A command failed; the message is one line for people."""

    def __init__(self, code: Exit, message: str) -> None:
        super().__init__(message)
        self.code = code


class NoSuchJobError(PluginError):
    """There is no job of this name."""

    def __init__(self, message: str) -> None:
        super().__init__(Exit.REFUSED, message)
