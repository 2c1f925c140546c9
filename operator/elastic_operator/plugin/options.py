"""Command line of `kubectl etj`. Common flags may stand before or after the verb."""

from __future__ import annotations

import argparse
import importlib.metadata
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from elastic_operator.plugin.convert.command import add_options as _convert
from elastic_operator.plugin.pages.usage import SORTS

DESCRIPTION = "See and steer elastic training jobs."
EPILOG = """\
exit codes: 0 done, 1 no such job, forbidden or not possible now, 2 usage, 3 cluster unreachable, 4 CRD not
installed, 5 --wait timed out. Fields of -o json and -o yaml are described in docs/kubectl-etj.md.
"""


OUTPUTS = ("text", "json", "yaml", "md", "html")
_PAGES = ("md", "html")
SHELLS = ("bash", "zsh", "fish", "kubectl")


class _Version(argparse._VersionAction):
    """Print the version; looks it up only if it is asked for, because that reads files."""

    def __call__(self, parser: argparse.ArgumentParser, *arguments: Any) -> None:
        self.version = f"kubectl etj {find_version()}"
        super().__call__(parser, *arguments)


def find_version() -> str:
    """Return the version of the distribution, or `unknown` in a source tree that is not installed."""
    try:
        return importlib.metadata.version("elastic-training-operator")
    except importlib.metadata.PackageNotFoundError:
        return "unknown"


def make_parser() -> argparse.ArgumentParser:
    """Build the parser with all verbs."""
    top = argparse.ArgumentParser(
        prog="kubectl etj", description=DESCRIPTION, epilog=EPILOG, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    top.add_argument("--version", action=_Version, help="print the version")
    _common(top, top=True)
    verbs = top.add_subparsers(dest="verb", required=True, metavar="VERB")
    _list(_verb(verbs, "list", "all jobs, one line each"))
    _status(
        _verb(verbs, "status", "what a job does, what it waits for, and every recovery with its seconds", name=True)
    )
    _top(_verb(verbs, "top", "what jobs use, and what comes out of it"))
    _watch(_verb(verbs, "watch", "a live view of a job: nodes and GPUs, steps, recovery, events", name=True))
    _verb(verbs, "why", "the last decision about a job, and its reasons", name=True)
    _report(_verb(verbs, "report", "a page about a job, as Markdown or with -o html as HTML", name=True))
    _plan(_verb(verbs, "plan", "what would happen if nodes or GPUs were lost or added", name=True))
    _waits(_verb(verbs, "drain", "commit now, exit cleanly, start again in the best topology", name=True))
    _waits(_verb(verbs, "suspend", "commit, exit, and give the nodes back until `resume`", name=True))
    _waits(_verb(verbs, "resume", "go on from the newest commit", name=True))
    _waits(
        _verb(verbs, "retry", "start a job that has Failed again, or a failed conversion of a checkpoint", name=True)
    )
    _logs(_verb(verbs, "logs", "the log that matters: rank 0 of what runs, else the pod that failed", name=True))
    _convert(_verb(verbs, "convert", "make an ElasticTrainingJob from a PyTorchJob, TrainJob or JobSet in a file"))
    completion = _verb(verbs, "completion", "a script with which a shell completes verbs, flags and names of jobs")
    completion.add_argument("shell", choices=SHELLS, help="kubectl: what kubectl runs to complete `kubectl etj`")
    return top


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Parse a command line; exit with the usage code if it is wrong."""
    parser = make_parser()
    options = parser.parse_args(arguments)
    if options.output in _PAGES and options.verb != "report":
        parser.error(f"-o {options.output} is for report only")
    if "name" in options:
        options.name = options.name.rpartition("/")[2]
    return options


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
    one.add_argument(
        "--color",
        choices=("auto", "always", "never"),
        default=default("auto"),
        help="auto: on a terminal, without NO_COLOR",
    )
    help_text = "html and md are for `report` (default: text)"
    one.add_argument("-o", "--output", choices=OUTPUTS, default=default("text"), help=help_text)


def _list(one: argparse.ArgumentParser) -> None:
    one.add_argument("-A", "--all-namespaces", action="store_true", help="of all namespaces")


def _status(one: argparse.ArgumentParser) -> None:
    one.add_argument("--events", type=_whole, default=10, metavar="N", help="newest events to show (default: 10)")


def _top(one: argparse.ArgumentParser) -> None:
    _list(one)
    help_text = "most GPUs, least useful time, oldest step or most failures first"
    one.add_argument("--sort", choices=SORTS, default="gpus", help=f"{help_text} (default: gpus)")


def _watch(one: argparse.ArgumentParser) -> None:
    one.add_argument(
        "--interval", type=_seconds, default=2.0, metavar="SECONDS", help="between two looks at the job (default: 2)"
    )
    one.add_argument("--target-step", type=_whole, metavar="STEP", help="show the way to this step, and the time left")
    one.add_argument("--nodes", type=_whole, default=16, metavar="N", help="nodes to list; 0 reads none (default: 16)")
    one.add_argument("--events", type=_whole, default=5, metavar="N", help="newest events to show (default: 5)")
    one.add_argument("--record", type=Path, metavar="FILE", help="append each observed step and loss, for `report`")
    one.add_argument("--plain", action="store_true", help="one line for each change, as without a terminal")


def _report(one: argparse.ArgumentParser) -> None:
    one.add_argument("--history", type=Path, metavar="FILE", help="losses that `watch --record` has observed")


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


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0.2 <= value <= 3600:
        raise argparse.ArgumentTypeError(f"{text!r}: expected seconds from 0.2 to 3600")
    return value


def _whole(text: str) -> int:
    if not text.isdigit():
        raise argparse.ArgumentTypeError(f"{text!r}: expected a whole number from 0 on")
    return int(text)
