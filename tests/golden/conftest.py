"""Fixtures of the golden tests."""

import pytest

from tests.golden.command import Answer


@pytest.fixture
def say(capsys: pytest.CaptureFixture[str]) -> Answer:
    """The `reshard` command in this process."""
    return Answer(capsys)
