"""The engine tier: no rank waits for a lock that a killed one has left."""

from collections.abc import Iterator

import pytest

from testbed import extensions


@pytest.fixture(scope="session", autouse=True)
def extension_locks() -> Iterator[None]:
    with extensions.guard_locks():
        yield
