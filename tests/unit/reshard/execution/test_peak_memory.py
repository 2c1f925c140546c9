"""The peak memory that a report names."""

import subprocess
import sys

import pytest

from reshard.execution.report import peak_rss_bytes

MIB = 1 << 20
LARGE = 256 * MIB

PRINT = "from reshard.execution.report import peak_rss_bytes; {}; print(peak_rss_bytes())"
FILL = f"bytearray({LARGE}).replace(b'a', b'b')"


def run(statements: str) -> int:
    return int(subprocess.run([sys.executable, "-c", statements], check=True, capture_output=True, text=True).stdout)


def test_memory_of_the_program_that_starts_a_conversion_is_not_counted() -> None:
    # Linux hands the peak of the launcher to the process that it starts: `getrusage` alone would return that.
    large = bytearray(b"a" * LARGE)
    peak = peak_rss_bytes()
    assert peak > LARGE
    assert run(PRINT.format("0")) < peak - LARGE // 2
    assert len(large) == LARGE


def test_memory_of_children_of_the_program_that_became_the_conversion_is_not_counted() -> None:
    shell = f"import os, subprocess, sys; subprocess.run([sys.executable, '-c', {FILL!r}]); "
    assert run(f"{shell}os.execv(sys.executable, [sys.executable, '-c', {PRINT.format('0')!r}])") < LARGE // 2


@pytest.mark.parametrize(
    "use",
    [
        pytest.param(FILL, id="itself"),
        pytest.param(f"import subprocess, sys; subprocess.run([sys.executable, '-c', {FILL!r}])", id="a-child"),
    ],
)
def test_the_peak_of_the_conversion_and_of_its_children_is_counted(use: str) -> None:
    assert run(PRINT.format(use)) > LARGE
