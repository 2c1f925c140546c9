"""Failures of a command, with the exit code that tells machines the same as the message tells people."""

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
    """What `--wait` waited for did not happen in time."""


class PluginError(Exception):
    """A command cannot do what it was asked to; the message is one line for people."""

    def __init__(self, code: Exit, message: str) -> None:
        super().__init__(message)
        self.code = code
