"""Progress of the resharder on stderr, and sizes as text."""

import io
import itertools
import os
from pathlib import Path

import pytest

from reshard.cli.progress import ProgressLine
from reshard.system.limits import format_bytes, format_seconds, parse_bytes


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_log_gets_plain_lines_and_a_terminal_one_living_line() -> None:
    log, terminal = io.StringIO(), Terminal()
    for stream in (log, terminal):
        line = ProgressLine(4096, stream=stream, every_seconds=0.0)
        line(1024)
        line.close()
    assert log.getvalue().startswith("reshard:  25.0 %  1.0 KiB")
    assert "\r" not in log.getvalue()
    assert "\n" not in terminal.getvalue()


def test_a_narrow_terminal_gets_what_fits_in_its_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "20")
    monkeypatch.setattr("reshard.cli.progress.time.monotonic", itertools.count().__next__)
    terminal = Terminal()
    line = ProgressLine(4096, stream=terminal)
    line(1024)
    assert terminal.getvalue() == "\r\x1b[K 25.0 %  1.0 KiB  1"


def test_a_terminal_that_knows_no_codes_gets_plain_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "dumb")
    terminal = Terminal()
    line = ProgressLine(4096, stream=terminal, every_seconds=0.0)
    line(1024)
    line.close()
    assert terminal.getvalue().startswith("reshard:  25.0 %") and "\x1b" not in terminal.getvalue()


def test_a_log_is_not_flooded() -> None:
    log = io.StringIO()
    line = ProgressLine(4096, stream=log, every_seconds=3600.0)
    for _ in range(1000):
        line(4)
    assert log.getvalue() == ""


def test_the_line_says_how_far_how_fast_and_how_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("reshard.cli.progress.time.monotonic", lambda: 100.0)
    line = ProgressLine(stream=io.StringIO())
    line.expect(100 << 20)
    line(25 << 20)
    assert line.text(110.0) == " 25.0 %  25.0 MiB  2.5 MiB/s  30 s left"


def test_the_rate_is_that_of_the_last_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr("reshard.cli.progress.time.monotonic", lambda: now[0])
    log = io.StringIO()
    line = ProgressLine(1000 << 20, stream=log)
    for _ in range(4):  # fast for 20 s, then a tenth of that
        now[0] += 5.0
        line(100 << 20)
    for _ in range(6):
        now[0] += 5.0
        line(10 << 20)
    first, *_, last = log.getvalue().splitlines()
    assert first == "reshard:  10.0 %  100.0 MiB  20.0 MiB/s  45 s left"
    assert last == "reshard:  46.0 %  460.0 MiB  2.0 MiB/s  4 min 30 s left"


def test_more_than_expected_is_no_more_than_all() -> None:
    line = ProgressLine(100, stream=io.StringIO())
    line(150)
    assert line.text(1e9).startswith("100.0 %")
    assert line.text(1e9).endswith("0 ms left")


def test_before_the_first_byte_nobody_knows() -> None:
    assert ProgressLine(100, stream=io.StringIO()).text(1e9).endswith("unknown time left")


def test_quiet_is_quiet() -> None:
    for stream in (io.StringIO(), Terminal()):
        line = ProgressLine(4096, stream=stream, every_seconds=0.0, quiet=True)
        line(1024)
        line.close()
        assert stream.getvalue() == ""


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0 ms"),
        (0.042, "42 ms"),
        (0.44, "0.4 s"),
        (9.96, "10 s"),
        (59.6, "1 min 0 s"),
        (185, "3 min 5 s"),
        (3599.7, "1 h 0 min"),
        (7620, "2 h 7 min"),
    ],
)
def test_times_are_printed(seconds: float, text: str) -> None:
    assert format_seconds(seconds) == text


@pytest.mark.parametrize(("text", "num_bytes"), [("1", 1), ("7B", 7), ("64KiB", 65536), ("96MiB", 96 << 20)])
def test_sizes_are_read(text: str, num_bytes: int) -> None:
    assert parse_bytes(text) == num_bytes


@pytest.mark.parametrize("text", ["", "MiB", "-1", "1MB", "1.5GiB", "1 KiBiB", "KiB1"])
def test_other_sizes_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="for instance 256MiB"):
        parse_bytes(text)


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [(0, "0 B"), (1023, "1023 B"), (1536, "1.5 KiB"), (3 << 30, "3.00 GiB"), (5 << 40, "5.00 TiB")],
)
def test_sizes_are_printed(num_bytes: int, text: str) -> None:
    assert format_bytes(num_bytes) == text


def test_a_log_that_takes_nothing_is_no_error_and_not_asked_again() -> None:
    with open("/dev/full", "w", encoding="utf-8") as log:
        line = ProgressLine(100, stream=log, every_seconds=0.0)
        for _ in range(3):
            line(10)
        line.close()
        assert os.path.samestat(os.fstat(log.fileno()), Path(os.devnull).stat())
