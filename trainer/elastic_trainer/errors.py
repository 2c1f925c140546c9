"""What a training process says when it cannot go on.

::

    TrainerError
    ├── ConfigurationError     environment or batch arithmetic makes no sense
    └── FencedError            a newer attempt has taken over: this process must stop
"""

from __future__ import annotations


class TrainerError(Exception):
    """Base of all errors raised on purpose."""


class ConfigurationError(TrainerError, ValueError):
    """Environment or batch arithmetic makes no sense."""


class FencedError(TrainerError):
    """A newer attempt has taken over: this process must stop."""
