"""Locks of torch's compiled extensions: a live one is kept, one that a killed process has left stops nobody."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from testbed import extensions
from testbed.errors import TestbedError

_HOLDER = """
import importlib.util, pathlib, runpy, sys, time
torch = pathlib.Path(importlib.util.find_spec("torch").origin).parent  # its lock, without the seconds of its import
assert runpy.run_path(str(torch / "utils" / "file_baton.py"))["FileBaton"](sys.argv[1]).try_acquire()
print("held", flush=True)
time.sleep(600)
"""


@pytest.fixture
def lock(tmp_path: Path) -> Path:
    path = tmp_path / "fused_adam" / "lock"
    path.parent.mkdir()
    return path


def test_only_the_lock_of_a_killed_process_is_removed(tmp_path: Path, lock: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", _HOLDER, lock], stdout=subprocess.PIPE) as holder:
        assert holder.stdout is not None
        try:
            assert holder.stdout.readline() == b"held\n"
            assert extensions.remove_abandoned_locks(tmp_path) == []
            assert lock.exists()
        finally:
            holder.kill()
    assert lock.exists(), "torch's lock has gone with its process: this module has lost its reason"
    assert extensions.remove_abandoned_locks(tmp_path) == [lock]
    assert not lock.exists()


def test_a_lock_that_a_process_leaves_while_others_wait_does_not_stop_them(
    tmp_path: Path, lock: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    waiter = _HOLDER.replace("assert ", "baton = ", 1).replace(".try_acquire()", "; baton.wait()").partition("print")[0]
    lock.touch()
    with extensions.guard_locks():
        assert subprocess.run([sys.executable, "-c", waiter, lock], check=False, timeout=60).returncode == 0
    assert not lock.exists()


def test_sources_that_were_compiled_get_an_old_date_and_changed_ones_do_not(tmp_path: Path) -> None:
    (tmp_path / "csrc").mkdir()
    source, stamp = tmp_path / "csrc/adam.cpp", tmp_path / "stamp"
    source.write_text("one")
    stamp.write_text(extensions.date_back_known_sources(source.parent, stamp))
    assert source.stat().st_mtime > 0, "not compiled so far"
    extensions.date_back_known_sources(source.parent, stamp)
    assert source.stat().st_mtime == 0
    source.write_text("two")
    extensions.date_back_known_sources(source.parent, stamp)
    assert source.stat().st_mtime > 0


def test_a_folder_that_is_not_there_holds_no_lock(tmp_path: Path) -> None:
    assert extensions.remove_abandoned_locks(tmp_path / "none") == []


@pytest.mark.parametrize(
    ("program", "limit_seconds", "what"),
    [("import time; time.sleep(600)", 2, "longer than 2 s"), ("raise SystemExit(3)", 600, "ended with 3")],
)
def test_a_compiler_that_hangs_or_fails_is_told(
    program: str, limit_seconds: int, what: str, lock: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(lock.parents[1]))
    monkeypatch.setattr(extensions, "COMPILE_SECONDS", limit_seconds)
    monkeypatch.setattr(extensions, "_COMPILE", f"open({str(lock)!r}, 'x'); {program}")
    with pytest.raises(TestbedError, match=what):
        extensions.compile_all()
    assert not lock.exists()
