"""Command line of `kubectl etj`. Common flags may stand before or after the verb."""

from __future__ import annotations

import argparse
from typing import Any

DESCRIPTION = "See and steer elastic training jobs."
EPILOG = """\
exit codes: 0 done, 1 no such job, forbidden or not possible now, 2 usage, 3 cluster unreachable, 4 CRD not
installed, 5 --wait timed out. Fields of -o json are described in docs/kubectl-etj.md.
"""


def make_parser() -> argparse.ArgumentParser:
    """Build the parser with all verbs."""
    top = argparse.ArgumentParser(
        prog="kubectl etj", description=DESCRIPTION, epilog=EPILOG, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    _common(top, top=True)
    verbs = top.add_subparsers(dest="verb", required=True, metavar="VERB")
    _list(_verb(verbs, "list", "all jobs, one line each"))
    _status(
        _verb(verbs, "status", "what a job does, what it waits for, and every recovery with its seconds", name=True)
    )
    _plan(_verb(verbs, "plan", "what would happen if nodes or GPUs were lost or added", name=True))
    _waits(_verb(verbs, "drain", "commit now, exit cleanly, start again in the best topology", name=True))
    _waits(_verb(verbs, "suspend", "commit, exit, and give the nodes back until `resume`", name=True))
    _waits(_verb(verbs, "resume", "go on from the newest commit", name=True))
    _waits(
        _verb(verbs, "retry", "start a job that has Failed again, or a failed conversion of a checkpoint", name=True)
    )
    _logs(_verb(verbs, "logs", "the log that matters: rank 0 of what runs, else the pod that failed", name=True))
    return top


def _verb(verbs: Any, verb: str, text: str, *, name: bool = False) -> argparse.ArgumentParser:
    one: argparse.ArgumentParser = verbs.add_parser(verb, help=text, description=f"{text[0].upper()}{text[1:]}.")
    if name:
        one.add_argument("name", metavar="NAME", help="an ElasticTrainingJob; etj/NAME is understood too")
    _common(one, top=False)
    return one


def _common(one: argparse.ArgumentParser, *, top: bool) -> None:
    # The default of a flag after the verb must not overwrite a value that was given before the verb.
    def default(value: Any) -> Any:
        return value if top else argparse.SUPPRESS

    one.add_argument("-n", "--namespace", default=default(None), help="default: that of the context")
    one.add_argument("--context", default=default(None), help="context of the kubeconfig")
    one.add_argument("--kubeconfig", default=default(None), help="default: $KUBECONFIG, else ~/.kube/config")
    one.add_argument("-o", "--output", choices=("text", "json"), default=default("text"), help="default: text")


def _list(one: argparse.ArgumentParser) -> None:
    one.add_argument("-A", "--all-namespaces", action="store_true", help="of all namespaces")


def _status(one: argparse.ArgumentParser) -> None:
    one.add_argument("--events", type=_whole, default=10, metavar="N", help="newest events to show (default: 10)")


def _plan(one: argparse.ArgumentParser) -> None:
    change = one.add_mutually_exclusive_group()
    change.add_argument(
        "--lose",
        action="append",
        nargs="+",
        default=[],
        metavar="NODE[:GPUS]",
        help="nodes that are lost; with :GPUS only so many accelerators of it",
    )
    change.add_argument("--gpus", type=_whole, metavar="N", help="accelerators that the job may use in all")
    one.add_argument("--add", type=_whole, default=0, metavar="NODES", help="new nodes, each of the job's full size")


def _waits(one: argparse.ArgumentParser) -> None:
    one.add_argument("--wait", action="store_true", help="return when it is done")
    one.add_argument("--timeout", type=_whole, default=600, metavar="SECONDS", help="of --wait (default: 600)")


def _logs(one: argparse.ArgumentParser) -> None:
    one.add_argument("--attempt", type=_whole, metavar="N", help="default: the newest one with pods")
    which = one.add_mutually_exclusive_group()
    which.add_argument("--rank", type=_whole, metavar="R", help="the pod that runs global rank R")
    which.add_argument("--index", type=_whole, metavar="I", help="pod I of the attempt, counted from 0")
    which.add_argument("--reshard", action="store_true", help="the pod that converts the checkpoint")
    one.add_argument("-f", "--follow", action="store_true", help="print new lines as they arrive")
    one.add_argument("--tail", type=_whole, metavar="LINES", help="only the last lines")
    one.add_argument("--timestamps", action="store_true", help="time of each line")
    one.add_argument("--raw", action="store_true", help="do not escape control characters")


def _whole(text: str) -> int:
    if not text.isdigit():
        raise argparse.ArgumentTypeError(f"{text!r}: expected a whole number from 0 on")
    return int(text)
