"""Randomness of the tests: none in `make test`, where a failure must come from a change; much in a soak.

`ETJ_SOAK=1` (`make test-all`) draws other examples in every run, and more of them.
"""

from __future__ import annotations

import hashlib
import os
import secrets
from collections.abc import Iterable
from typing import TypeVar

from hypothesis import HealthCheck, settings

Case = TypeVar("Case")

SOAKING = os.environ.get("ETJ_SOAK", "") not in ("", "0")
SEEDED, SOAK = "seeded", "soak"
_SOAK_FACTOR = 10
_DEFAULT_EXAMPLES = 100

# Tests look at results, never at the clock: other work on the machine must not make them fail.
_NO_CLOCK = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow]}
settings.register_profile(SEEDED, derandomize=True, database=None, max_examples=_DEFAULT_EXAMPLES, **_NO_CLOCK)
settings.register_profile(
    SOAK, derandomize=False, print_blob=True, max_examples=_DEFAULT_EXAMPLES * _SOAK_FACTOR, **_NO_CLOCK
)


def load_profile() -> None:
    """Set what Hypothesis does in this process; called before test modules are imported."""
    settings.load_profile(SOAK if SOAKING else SEEDED)


def examples(count: int, *, soak: int | None = None) -> int:
    """Return the number of random examples of a test: `count`, or in a soak `soak` or ten times as many.

    A number in `settings(max_examples=...)` takes the place of the profile's. So every test that states one takes it
    from here.
    """
    if not SOAKING:
        return count
    return count * _SOAK_FACTOR if soak is None else soak


def some(cases: Iterable[Case], *, every: int) -> list[Case]:
    """Return every nth case, beginning with the first one, or in a soak all of them.

    For long lists of cases that share most of their code: `make test` has an hour on two processors.
    """
    return list(cases)[:: 1 if SOAKING else every]


def _draw() -> int:
    """Draw a number; the workers of one run of pytest-xdist draw the same, as they must collect the same tests."""
    run = os.environ.get("PYTEST_XDIST_TESTRUNUID", "")
    return int.from_bytes(hashlib.sha256(run.encode()).digest()[:6]) if run else secrets.randbits(48)


def seeds(count: int, *, soak: int | None = None) -> range:
    """Return the seeds of `examples(count, soak=soak)` cases: always the same ones, or in a soak new ones."""
    first = _draw() if SOAKING else 0
    return range(first, first + examples(count, soak=soak))
