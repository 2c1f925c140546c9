"""The account that benchmarks keep of a command."""

import os
import sys
from pathlib import Path

import pytest

from benchmarks.measure import measure, size_of

MIB = 1 << 20


def test_bytes_and_memory_of_a_command_and_its_children_are_counted(tmp_path: Path) -> None:
    (tmp_path / "data").write_bytes(bytes(8 * MIB))
    source, copy = str(tmp_path / "data"), str(tmp_path / "copy")
    child = f"block = open({source!r}, 'rb').read(); open({copy!r}, 'wb').write(block)"
    hold = f"held = b'x' * {32 * MIB}"
    parent = f"import subprocess, sys; {hold}; subprocess.run([sys.executable, '-c', {child!r}], check=True)"
    found = measure([sys.executable, "-c", parent], env=dict(os.environ), log=tmp_path / "log")
    assert 8 * MIB <= found.bytes_read < 16 * MIB
    assert 8 * MIB <= found.bytes_written < 9 * MIB
    assert found.peak_rss_bytes > 32 * MIB
    assert size_of(tmp_path) == 16 * MIB


def test_a_command_that_fails_is_no_measurement(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="ended with 3"):
        measure([sys.executable, "-c", "raise SystemExit(3)"], env=dict(os.environ), log=tmp_path / "log")
