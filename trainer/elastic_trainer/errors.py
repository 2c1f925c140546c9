"""Errors of a training process.

::

    TrainerError
    ├── ConfigurationError     an environment variable or a batch size is invalid
    ├── FencedError            a newer attempt has replaced this one: this process must stop
    └── SaveError              an asynchronous save failed; the commit before it stays the newest
"""

from __future__ import annotations


class TrainerError(Exception):
    """Base class of the errors of this package."""


class ConfigurationError(TrainerError, ValueError):
    """An environment variable or a batch size is invalid."""


class FencedError(TrainerError):
    """A newer attempt has replaced this one: this process must stop."""


class SaveError(TrainerError):
    """An asynchronous save failed; the commit before it stays the newest."""
