"""The command line: `reshard inspect | plan | run | verify | explain`.

Data goes to stdout (`--json` for machines), log and progress go to stderr, and the exit code names the class of a
failure (`reshard.contract.ExitCode`). With `--json`, stdout holds one JSON object, also after a failure.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import signal
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from reshard.cli.arguments import check
from reshard.cli.commands import VERBS
from reshard.cli.job_env import list_error_lines
from reshard.cli.options import parse
from reshard.cli.output import check_report, open_streams, write_data, write_log, write_report
from reshard.cli.render import error_value
from reshard.contract import ExitCode
from reshard.errors import ReshardError, TargetError, UsageError
from reshard.execution.report import failure_report
from reshard.formats.pt.trust import trusting
from reshard.system.exit_signals import select_exit_signals


def run(words: Sequence[str]) -> int:
    """Run one command line and return its exit code."""
    open_streams()
    options = _unparsed_options(words)
    started = time.monotonic()
    try:
        options = parse(words)
        with _exit_signals_as_interrupt():
            check(options)
            with trusting(options.allow_global):
                result = VERBS[options.verb](options)
    except ReshardError as error:
        return _failed(options, error, error.exit_code, [*list_error_lines(error), *_notes(error)], started)
    except KeyboardInterrupt as error:
        return _failed(options, error, ExitCode.INTERRUPTED, _interrupted(options, error), started)
    except Exception as error:
        write_log(_traceback(error))
        return _failed(options, error, ExitCode.INTERNAL, [f"a bug: {type(error).__name__}: {error}"], started)
    try:
        write_data(_json(result.value) if options.json else result.lines)
    except TargetError as error:
        done = "; the conversion itself is done" if options.verb == "run" else ""
        write_log([f"reshard: {error}{done}"])
        return int(error.exit_code)
    return int(result.exit_code)


def _unparsed_options(words: Sequence[str]) -> argparse.Namespace:
    """Return the options that a report needs: also of a command line that cannot be parsed, the operator needs one."""
    report = next((after for word, after in itertools.pairwise(words) if word == "--report"), None)
    return argparse.Namespace(verb=words[0] if words else "", json="--json" in words, report=report)


def _notes(error: BaseException) -> list[str]:
    """Return the notes that were added to an error."""
    return list(getattr(error, "__notes__", ()))


def _json(value: dict[str, Any]) -> list[str]:
    """Return the lines of a JSON text; `json` escapes all control characters but DEL, which is escaped here."""
    return json.dumps(value, indent=1).replace("\x7f", "\\u007f").split("\n")


def _traceback(error: BaseException) -> list[str]:
    """Return lines about an unexpected error, its cause first; a message is one line, whatever it holds."""
    import traceback

    cause = error.__cause__ or error.__context__
    before = _traceback(cause) if cause is not None else []
    frames = [line for entry in traceback.format_tb(error.__traceback__) for line in entry.splitlines()]
    return [*before, *frames, f"{type(error).__name__}: {error}"]


def _interrupted(options: argparse.Namespace, error: BaseException) -> list[str]:
    if options.verb != "run":
        return ["interrupted"]
    if notes := _notes(error):
        return ["interrupted; nothing was published", *notes]
    return ["interrupted; nothing was published, and nothing is kept (--resume keeps what is done)"]


def _failed(
    options: argparse.Namespace, error: BaseException, exit_code: ExitCode, lines: list[str], started: float
) -> int:
    """Report an error on stderr, in the report file and as JSON, and return the exit code."""
    write_log([f"reshard: {lines[0]}", *lines[1:]])
    message = "\n".join(lines)
    value: dict[str, Any] = {"ok": False, "exit_code": int(exit_code)}
    if options.verb == "run":
        source, target = (Path(getattr(options, name, "")) for name in ("source", "target"))
        report = failure_report(exit_code, message, source, target, time.monotonic() - started)
        with contextlib.suppress(TargetError, UsageError):
            check_report(options.report, *(path.absolute() for path in (source, target) if path.parts))
            write_report(options.report, report)
        value = json.loads(report.to_json())
    if options.json:
        with contextlib.suppress(TargetError):
            write_data(_json({**value, "error": error_value(error, int(exit_code), message)}))
    return int(exit_code)


@contextlib.contextmanager
def _exit_signals_as_interrupt() -> Iterator[None]:
    """Let SIGTERM and a closed terminal unwind the stack as Ctrl-C does, so that unfinished results are removed."""

    def interrupt(_number: int, _frame: object) -> None:
        raise KeyboardInterrupt

    old_handlers = {number: signal.signal(number, interrupt) for number in select_exit_signals()}
    try:
        yield
    finally:
        for number, handler in old_handlers.items():
            signal.signal(number, handler)
