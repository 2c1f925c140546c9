"""The command line: `reshard inspect | plan | run | verify`.

Data goes to stdout (`--json` for machines), log and progress to stderr, and the exit code names the class of a failure
(`reshard.contract.ExitCode`).
"""

from __future__ import annotations

import argparse
import contextlib
import json
import signal
import sys
import time
import traceback
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from reshard import api
from reshard.contract import ExitCode, ReshardReport
from reshard.errors import ReshardError, UsageError
from reshard.formats import known_formats
from reshard.limits import format_bytes, parse_bytes
from reshard.progress import ProgressLine
from reshard.remote import location
from reshard.render import inspect_text, plan_text, report_text
from reshard.staging import Sharing
from reshard.topology import Topology
from reshard.verify import compare, total, verify_commit


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code."""
    options = _parser().parse_args(arguments)
    started = time.monotonic()
    try:
        with _termination_as_interrupt():
            value, text = options.handler(options)
    except ReshardError as error:
        return _failed(options, error.exit_code, str(error), started)
    except KeyboardInterrupt:
        return _failed(options, ExitCode.INTERRUPTED, "interrupted; nothing was published", started)
    except Exception as error:
        traceback.print_exc()
        return _failed(options, ExitCode.INTERNAL, f"a bug: {type(error).__name__}: {error}", started)
    sys.stdout.write((json.dumps(value, indent=1) if options.json else text) + "\n")
    return int(ExitCode.OK)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="reshard", description="Convert training checkpoints between topologies.")
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="VERB")

    inspect = verbs.add_parser("inspect", help="what a checkpoint is: format, step, topology, tensors, bytes, problems")
    inspect.add_argument("path", type=location)
    inspect.set_defaults(handler=_inspect)

    plan = verbs.add_parser("plan", help="what a conversion would read and write; nothing is written")
    plan.add_argument("source", type=location)
    plan.set_defaults(handler=_plan)

    run = verbs.add_parser("run", help="convert, verify, publish")
    run.add_argument("source", type=location)
    run.add_argument("target", type=Path, help="folder to make; must not exist")
    run.add_argument("--attempt", type=int, default=0, help="attempt number recorded in the commit")
    run.add_argument("--require-commit", action="store_true", help="refuse a source without COMMIT.json")
    run.add_argument("--report", type=Path, help="write a JSON report here, also on failure")
    run.add_argument("--reread", action="store_true", help="read the whole result back before it is published")
    run.add_argument(
        "--resume", action="store_true", help="keep an unfinished result, and go on with one that is there"
    )
    run.add_argument("--worker", metavar="I/N", help="one of N processes, on any machines, that make one result (0/4)")
    run.add_argument("--no-sync", action="store_true", help="do not wait for the disk: for results that can be lost")
    run.set_defaults(handler=_run)

    verify = verbs.add_parser("verify", help="check one checkpoint against its commit, or two against each other")
    verify.add_argument("first", type=location)
    verify.add_argument("second", type=location, nargs="?")
    verify.set_defaults(handler=_verify)

    for verb in (plan, run):
        verb.add_argument("--to", required=True, metavar="TOPOLOGY", help="for instance tp=2,pp=2,dp=3,zero=1")
        verb.add_argument("--format", default="", help=f"of the target, default that of the source: {known_formats()}")
        verb.add_argument("--dtype", metavar="TYPE", help="of the weights, where the format leaves that open")
        verb.add_argument("--states", default="", metavar="A,B", help="only these (weight, fp32, exp_avg, ...)")
        verb.add_argument(
            "--like", type=location, help="a checkpoint of the target's format and the same model, as template"
        )
        verb.add_argument("--file-size", default="5GiB", help="largest file, where the format leaves that open")
        verb.add_argument("--memory", default="96MiB", help="for buffers (default: %(default)s)")
        verb.add_argument("--threads", type=int, default=0, help="default: the processors of this process, at most 8")
    for verb in (inspect, plan, run, verify):
        verb.add_argument("--json", action="store_true", help="print JSON")
    return parser


def _inspect(options: argparse.Namespace) -> tuple[dict[str, Any], str]:
    index = api.index_of(options.path)
    return inspect_text(index)


def _plan(options: argparse.Namespace) -> tuple[dict[str, Any], str]:
    wanted = _conversion(options, options.source)
    plan = api.plan_conversion(wanted, memory_bytes=_memory(options.memory), num_threads=options.threads)
    summary = plan.summary()
    return summary, plan_text(summary)


def _run(options: argparse.Namespace) -> tuple[dict[str, Any], str]:
    wanted = _conversion(options, options.target)
    worker = _worker(options.worker)
    sharing = Sharing.TOGETHER if worker else Sharing.RESUMABLE if options.resume else Sharing.ALONE
    line = ProgressLine()
    report = api.convert(
        wanted,
        memory_bytes=_memory(options.memory),
        num_threads=options.threads,
        reread=options.reread,
        sync=not options.no_sync,
        sharing=sharing,
        worker=worker or (0, 1),
        progress=line,
        planned=lambda plan: line.expect(plan.bytes_to_read // (worker[1] if worker else 1)),
    )
    line.close()
    _write_report(options.report, report)
    return json.loads(report.to_json()), report_text(report)


def _conversion(options: argparse.Namespace, target: Path) -> api.Conversion:
    return api.Conversion(
        source=options.source.absolute(),
        target=target.absolute(),
        topology=Topology.parse(options.to),
        target_format=options.format,
        weight_dtype=options.dtype,
        states=tuple(filter(None, options.states.split(","))),
        like=None if options.like is None else options.like.absolute(),
        file_bytes=_bytes("--file-size", options.file_size),
        attempt=getattr(options, "attempt", 0),
        require_commit=getattr(options, "require_commit", False),
    )


def _worker(text: str | None) -> tuple[int, int] | None:
    if text is None:
        return None
    worker, _, count = text.partition("/")
    if not (worker.isdigit() and count.isdigit() and int(worker) < int(count)):
        raise UsageError(f"--worker {text}: write the worker's number, from 0, and their number, for instance 0/4")
    return int(worker), int(count)


def _verify(options: argparse.Namespace) -> tuple[dict[str, Any], str]:
    first = verify_commit(api.index_of(options.first))
    value = {"first": str(options.first), "tensors": len(first), "digest": total(first)}
    if options.second is None:
        return value, f"{options.first}: {len(first)} tensors, digest {total(first)}: intact"
    compare(first, verify_commit(api.index_of(options.second)))
    value["second"] = str(options.second)
    return value, f"{options.first} and {options.second} hold the same {len(first)} tensors, digest {total(first)}"


def _bytes(option: str, text: str) -> int:
    try:
        return parse_bytes(text)
    except ValueError as error:
        raise UsageError(f"{option}: {error}") from error


def _memory(text: str) -> int:
    value = _bytes("--memory", text)
    if value < 1 << 20:
        raise UsageError(f"--memory {format_bytes(value)}: at least 1MiB is needed")
    return value


def _write_report(path: Path | None, report: ReshardReport) -> None:
    if path is not None:
        path.write_text(report.to_json(), encoding="utf-8")


def _failed(options: argparse.Namespace, exit_code: ExitCode, message: str, started: float) -> int:
    """Say why on stderr and in the report."""
    sys.stderr.write(f"reshard: {message}\n")
    if options.verb == "run":
        seconds = time.monotonic() - started
        with contextlib.suppress(OSError):
            report = api.failure_report(exit_code, message, options.source, options.target, seconds)
            _write_report(options.report, report)
    return int(exit_code)


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


if __name__ == "__main__":
    sys.exit(main())
