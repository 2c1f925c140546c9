"""The command line: `reshard inspect | plan | run | verify | explain`.

Data goes to stdout (`--json` for machines), log and progress to stderr, and the exit code names the class of a failure
(`reshard.contract.ExitCode`). With `--json`, stdout holds one JSON object whatever happens.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from reshard import api
from reshard.arguments import check
from reshard.contract import ExitCode
from reshard.errors import ReshardError, TargetError, UsageError
from reshard.options import parse
from reshard.render import error_value
from reshard.verbs import VERBS, check_report, write_report


def run(words: Sequence[str]) -> int:
    """Run one command line and return its exit code."""
    _open_streams()
    options = _before_parsing(words)
    started = time.monotonic()
    try:
        options = parse(words)
        with _termination_as_interrupt():
            check(options)
            result = VERBS[options.verb](options)
    except ReshardError as error:
        return _failed(options, error, error.exit_code, "\n".join([str(error), *_notes(error)]), started)
    except KeyboardInterrupt as error:
        return _failed(options, error, ExitCode.INTERRUPTED, _interrupted(options, error), started)
    except Exception as error:
        import traceback

        traceback.print_exc()
        return _failed(options, error, ExitCode.INTERNAL, f"a bug: {type(error).__name__}: {error}", started)
    _say(json.dumps(result.value, indent=1) if options.json else result.text)
    return int(result.exit_code)


def _before_parsing(words: Sequence[str]) -> argparse.Namespace:
    """What is needed to report a command line that cannot be parsed: a pod's report is all that the operator sees."""
    report = next((after for word, after in itertools.pairwise(words) if word == "--report"), None)
    return argparse.Namespace(verb=words[0] if words else "", json="--json" in words, report=report)


def _notes(error: BaseException) -> list[str]:
    """What was said of an error on its way up."""
    return list(getattr(error, "__notes__", ()))


def _interrupted(options: argparse.Namespace, error: BaseException) -> str:
    if options.verb != "run":
        return "interrupted"
    if notes := _notes(error):
        return "\n".join(["interrupted; nothing was published", *notes])
    return "interrupted; nothing was published, and nothing is kept (--resume keeps what is done)"


def _failed(
    options: argparse.Namespace, error: BaseException, exit_code: ExitCode, message: str, started: float
) -> int:
    """Say why on stderr, in the report, and as JSON."""
    sys.stderr.write(f"reshard: {message}\n")
    value: dict[str, Any] = {"ok": False, "exit_code": int(exit_code)}
    if options.verb == "run":
        source, target = (Path(getattr(options, name, "")) for name in ("source", "target"))
        report = api.failure_report(exit_code, message, source, target, time.monotonic() - started)
        with contextlib.suppress(TargetError, UsageError):
            check_report(options.report, *(path.absolute() for path in (source, target) if path.parts))
            write_report(options.report, report)
        value = json.loads(report.to_json())
    if options.json:
        _say(json.dumps({**value, "error": error_value(error, int(exit_code), message)}, indent=1))
    return int(exit_code)


def _open_streams() -> None:
    """A process that was started with closed streams (`>&-`) has none: what is said then goes nowhere."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115


def _say(text: str) -> None:
    """Print data; a reader that has seen enough (`| head`) is no failure."""
    try:
        sys.stdout.write(text + "\n")
        sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


@contextlib.contextmanager
def _termination_as_interrupt() -> Iterator[None]:
    """Let SIGTERM unwind the stack as Ctrl-C does, so that half results are removed."""

    def interrupt(_number: int, _frame: object) -> None:
        raise KeyboardInterrupt

    previous = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)
