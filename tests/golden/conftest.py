"""Fixtures of the golden tests."""

import signal
from collections.abc import Iterator

import pytest

from tests.golden.command import Answer


@pytest.fixture
def say(capsys: pytest.CaptureFixture[str]) -> Answer:
    """The `reshard` command in this process."""
    return Answer(capsys)


@pytest.fixture(scope="session", autouse=True)
def signals_as_a_terminal_has_them() -> Iterator[None]:
    """Restore signals that pytest ignores under `nohup` or behind a shell's `&`; its commands would ignore them too."""
    ours = {signal.SIGINT: signal.default_int_handler, signal.SIGHUP: signal.SIG_DFL, signal.SIGTERM: signal.SIG_DFL}
    ignored = [number for number in ours if signal.getsignal(number) is signal.SIG_IGN]
    for number in ignored:
        signal.signal(number, ours[number])
    yield
    for number in ignored:
        signal.signal(number, signal.SIG_IGN)
