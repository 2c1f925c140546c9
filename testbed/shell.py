"""Running programs, waiting, and saying what happens."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

from testbed.errors import TestbedError, TimedOutError

T = TypeVar("T")
_STARTED = time.monotonic()


def say(text: str) -> None:
    """One line of progress on stderr, with the seconds since the program started."""
    sys.stderr.write(f"testbed [{time.monotonic() - _STARTED:5.1f}s] {text}\n")
    sys.stderr.flush()


def run(*arguments: str | Path, check: bool = True, cwd: Path | None = None, quiet: bool = True) -> str:
    """Run a program to its end and return its standard output.

    Raises:
        TestbedError: it failed, with the end of what it printed.
    """
    done = subprocess.run(
        [str(argument) for argument in arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE if quiet else None,
        text=True,
        cwd=cwd,
        check=False,
    )
    if check and done.returncode:
        command = " ".join(str(argument) for argument in arguments)
        raise TestbedError(f"`{command}` ended with {done.returncode}: {(done.stderr or '').strip()[-800:]}")
    return done.stdout


def run_with_progress(
    label: str, arguments: Sequence[str | Path], *, cwd: Path, env: dict[str, str], log: Path
) -> None:
    """Run something long; say every 15 s that it goes on, and show the end of its log when it fails."""
    started = time.monotonic()
    with open(log, "ab") as stream:
        process = subprocess.Popen(
            [str(argument) for argument in arguments], stdout=stream, stderr=stream, cwd=cwd, env=env
        )
        while True:
            try:
                code = process.wait(timeout=15)
                break
            except subprocess.TimeoutExpired:
                say(f"{label}: {time.monotonic() - started:.0f} s so far")
    if code:
        tail = log.read_text(errors="replace")[-1500:]
        raise TestbedError(f"{label} ended with {code}; the end of {log}:\n{tail}")


def until(
    condition: Callable[[], T | None], *, what: str, timeout_seconds: float = 120, every_seconds: float = 0.05
) -> T:
    """Call `condition` until it returns something true; exceptions count as "not yet".

    Raises:
        TimedOutError: naming `what` and the last exception.
    """
    deadline = time.monotonic() + timeout_seconds
    last = ""
    while time.monotonic() < deadline:
        try:
            value = condition()
        except Exception as error:
            last = f" (last error: {type(error).__name__}: {error})"
        else:
            if value:
                return value
        time.sleep(every_seconds)
    raise TimedOutError(f"waited {timeout_seconds:.0f} s for {what}{last}")
