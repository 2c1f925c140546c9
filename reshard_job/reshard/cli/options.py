"""The command line's verbs and options. docs/reshard.md lists them; a test compares the two."""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
from typing import Never

from reshard.cli.output import write_data
from reshard.contract import ExitCode
from reshard.errors import UsageError
from reshard.formats import known_target_formats
from reshard.tensors.cast import FLOATS

VERBS = ("inspect", "plan", "run", "verify", "explain")

_EXAMPLES = {
    "": """\
examples:
  reshard inspect ckpt/global_step1000
  reshard plan ckpt/global_step1000 --to dp=6,zero=1
  reshard run ckpt/global_step1000 out/global_step1000 --to dp=6,zero=1
  reshard verify ckpt/global_step1000 out/global_step1000
  reshard explain ckpt/global_step1000 'fp32/*.weight' --to dp=6 --svg boxes.svg

A checkpoint is the folder of one tag, not the folder above it, unless that is a training folder
(checkpoint-500 of Hugging Face's Trainer). Data goes to stdout, log and progress to stderr.""",
    "inspect": """\
examples:
  reshard inspect ckpt/global_step1000
  reshard inspect ckpt/global_step1000 --tensors
  reshard inspect ckpt/global_step1000 --json | jq '.problems'

Metadata alone is read. What is damaged or suspicious is listed, and the exit code is that of the first problem.""",
    "plan": """\
examples:
  reshard plan ckpt/global_step1000 --to tp=2,pp=2,dp=3,zero=1
  reshard plan ckpt/global_step1000 out/global_step1000 --to dp=6 --files
  reshard plan ckpt/global_step1000 --format safetensors --dtype bfloat16

Nothing is converted. The source is read for about a second to measure its storage; with a target named, 32 MiB are
written beside it and removed.""",
    "run": """\
examples:
  reshard run ckpt/global_step1000 out/global_step1000 --to dp=6,zero=1
  reshard run output/checkpoint-500 new/checkpoint-500 --to dp=6      (of Hugging Face's Trainer, with all its files)
  reshard run ckpt/global_step1000 hf --format safetensors --dtype bfloat16 --names llama.yaml
  reshard run ckpt/global_step1000 out/global_step1000 --to dp=6 --worker 0/4      (and 1/4, 2/4, 3/4 elsewhere)

The target appears complete, verified and committed, or not at all. The source is never changed.""",
    "verify": """\
examples:
  reshard verify out/global_step1000
  reshard verify ckpt/global_step1000 out/global_step1000
  reshard verify ckpt/global_step1000 hf --names llama.yaml --states weight,fp32

Every byte is read. Two checkpoints may be in different layouts and formats: what both hold must be equal, and what only
one holds is listed as not compared.""",
    "explain": """\
examples:
  reshard explain ckpt/global_step1000 layers.0.attention.qkv.weight
  reshard explain ckpt/global_step1000 fp32/layers.0.attention.qkv.weight --to dp=6
  reshard explain ckpt/global_step1000 'exp_avg/*bias' --to tp=2,dp=3 --svg boxes.svg""",
}


class Parser(argparse.ArgumentParser):
    """Parser that raises UsageError for an invalid command line, so that it is reported like every other error."""

    def error(self, message: str) -> Never:
        """Raise UsageError."""
        raise UsageError(message, hint=f"{self.prog} --help")


class ShowVersion(argparse.Action):
    """Action that looks up the version when `--version` is given: that takes longer than parsing the command line."""

    def __call__(self, parser: argparse.ArgumentParser, *_values: object) -> Never:
        """Print the version and exit."""
        write_data([f"reshard {version()}"])
        parser.exit()


def version() -> str:
    """Return the version of the installed distribution."""
    import importlib.metadata

    try:
        return importlib.metadata.version("elastic-training-operator")
    except importlib.metadata.PackageNotFoundError:
        return "unknown"


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parse a command line.

    Raises:
        UsageError: an option or a value is wrong.
    """
    parser, verbs = _build()
    options, rest = parser.parse_known_args(arguments)
    if rest:
        raise _unknown(verbs.choices[options.verb], rest)
    return options


def _unknown(verb: Parser, words: Sequence[str]) -> UsageError:
    """Return the error to raise for words that a verb does not know, with the closest option that it has."""
    word = next((word for word in words if word.startswith("-")), None)
    if word is None:
        return UsageError(f"one argument too many: {words[0]!r}", hint=f"{verb.prog} --help")
    import difflib

    name = word.partition("=")[0]
    known = sorted(set(re.findall(r"--[a-z-]+", verb.format_usage())))
    begun = [option for option in known if option.startswith(name)]
    close = begun or difflib.get_close_matches(name, known, n=1, cutoff=0.75)
    meant = f"; did you mean {' or '.join(close)}?" if close else ""
    return UsageError(f"{verb.prog} has no option {name}{meant}", hint=f"{verb.prog} --help")


def build() -> Parser:
    """Build the parser of all verbs."""
    return _build()[0]


def _build() -> tuple[Parser, argparse._SubParsersAction[Parser]]:
    parser = Parser(
        prog="reshard",
        description="Convert training checkpoints between topologies and formats, exactly, without a GPU or torch.",
        epilog=_EXAMPLES[""] + "\n\nexit codes: " + ", ".join(f"{code.value} {code.name}" for code in ExitCode),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action=ShowVersion, nargs=0, help="show the version and exit")
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="VERB", parser_class=Parser)
    _add_inspect(_verb(verbs, "inspect", "what a checkpoint is: format, step, topology, tensors, bytes, problems"))
    _add_plan(_verb(verbs, "plan", "what a conversion would read and write, and how long it would take"))
    _add_run(_verb(verbs, "run", "convert, verify, publish"))
    _add_verify(_verb(verbs, "verify", "check one checkpoint against its commit, or two against each other"))
    _add_explain(_verb(verbs, "explain", "where every box of a tensor lies and goes, as text or picture"))
    return parser, verbs


def _verb(verbs: argparse._SubParsersAction[Parser], name: str, text: str) -> Parser:
    verb = verbs.add_parser(
        name,
        help=text,
        description=text[0].upper() + text[1:] + ".",
        epilog=_EXAMPLES[name],
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    verb.add_argument("--json", action="store_true", help="print JSON, also on failure")
    return verb


def _add_inspect(verb: Parser) -> None:
    verb.add_argument("path", metavar="PATH", help="folder of one checkpoint, or a training folder with one inside")
    verb.add_argument("--tensors", action="store_true", help="list every tensor: shape, type, copies, boxes")
    _add_patterns(verb)
    _add_ds_config(verb)
    _add_trust(verb)


def _add_plan(verb: Parser) -> None:
    verb.add_argument("source", metavar="SRC", help="folder of one checkpoint, or a training folder with one inside")
    verb.add_argument("target", metavar="DST", nargs="?", help="folder that `run` would make: its storage is measured")
    verb.add_argument("--files", action="store_true", help="list the files that would be written")
    verb.add_argument("--no-measure", action="store_true", help="assume the speed of storage instead of measuring it")
    _add_conversion(verb)
    _add_resources(verb)


def _add_run(verb: Parser) -> None:
    verb.add_argument("source", metavar="SRC", help="folder of one checkpoint, or a training folder with one inside")
    verb.add_argument(
        "target", metavar="DST", help="folder to make; must not exist, unless empty or as this conversion's result"
    )
    _add_conversion(verb)
    _add_resources(verb)
    verb.add_argument("--limit-rate", metavar="SIZE", help="read at most so much a second, for instance 200MiB")
    verb.add_argument("--resume", action="store_true", help="keep an unfinished result, and go on with one")
    verb.add_argument("--worker", metavar="I/N", help="one of N processes, on any machines, that make one result (0/4)")
    verb.add_argument(
        "--latest",
        action="store_true",
        help="update the framework's file beside DST to point to DST: latest or latest_universal (DeepSpeed),"
        " latest_checkpointed_iteration.txt (Megatron-LM)",
    )
    verb.add_argument("--reread", action="store_true", help="read the whole result back before it is published")
    verb.add_argument("--no-sync", action="store_true", help="do not wait for the disk: for results that can be lost")
    verb.add_argument(
        "--newest",
        action="store_true",
        help="SRC may be a folder of checkpoints: take the one that its file latest names, or the newest commit of a"
        " training job",
    )
    verb.add_argument("--require-commit", action="store_true", help="refuse a source without COMMIT.json")
    verb.add_argument("--attempt", type=int, default=0, metavar="N", help="attempt number recorded in the commit")
    verb.add_argument("--report", metavar="FILE", help="write a JSON report here, also on failure")
    verb.add_argument("--profile", action="store_true", help="show where the time went, by phase, worker and device")
    verb.add_argument("--profile-svg", metavar="FILE", help="draw where the time went into this file")
    verb.add_argument("--quiet", action="store_true", help="no progress on stderr")


def _add_verify(verb: Parser) -> None:
    verb.add_argument("first", metavar="A", help="folder of one checkpoint, or a training folder with one inside")
    verb.add_argument("second", metavar="B", nargs="?", help="another, in any layout or format")
    verb.add_argument("--states", default="", metavar="A,B", help="compare only these (weight, fp32, exp_avg, ...)")
    verb.add_argument("--names", metavar="FILE", help="name map: A is compared under the names that it gives")
    _add_patterns(verb)
    _add_trust(verb)
    verb.add_argument("--quiet", action="store_true", help="no progress on stderr")


def _add_explain(verb: Parser) -> None:
    verb.add_argument("source", metavar="SRC", help="folder of one checkpoint, or a training folder with one inside")
    verb.add_argument("tensor", metavar="TENSOR", help="a name (all its states), state/name, or a glob of either")
    verb.add_argument("--svg", metavar="FILE", help="draw a picture into this file")
    _add_conversion(verb)


def _add_conversion(verb: Parser) -> None:
    verb.add_argument(
        "--to",
        metavar="TOPOLOGY",
        help="degrees of the target, for instance tp=2,pp=2,dp=3,zero=1 (degrees left out are 1; zero stays);"
        " may be left out where a --format is given",
    )
    verb.add_argument(
        "--format", default="", metavar="NAME", help=f"of the target, by default the source's: {known_target_formats()}"
    )
    verb.add_argument(
        "--mode",
        choices=("auto", "materialize", "virtual"),
        default="auto",
        help="materialize writes the target's files; virtual writes where their bytes are, for elastic_trainer to load",
    )
    verb.add_argument(
        "--dtype",
        metavar="TYPE",
        help=f"of the weights, for the formats safetensors, dcp and megatron: {', '.join(FLOATS)}",
    )
    verb.add_argument("--states", default="", metavar="A,B", help="only these (weight, fp32, exp_avg, ...)")
    verb.add_argument("--names", metavar="FILE", help="name map (YAML): the target's names and parts of tensors")
    _add_patterns(verb)
    _add_ds_config(verb)
    verb.add_argument(
        "--like", metavar="DIR", help="a checkpoint of the target's format and the same model, as template"
    )
    verb.add_argument(
        "--model",
        metavar="FILE",
        help="a model description (JSON) for a DeepSpeed target, with --ds-config and instead of --like",
    )
    verb.add_argument("--file-size", metavar="SIZE", help="largest file of the format safetensors (default: 5GiB)")
    verb.add_argument(
        "--allow-differences",
        action="store_true",
        help="convert also where copies of a tensor differ between ranks (the first is taken), or weights are not"
        " their master weights rounded",
    )
    _add_trust(verb)


def _add_patterns(verb: Parser) -> None:
    verb.add_argument(
        "--patterns", metavar="FILE", help="how tensor parallelism cut a DeepSpeed source that does not say it (YAML)"
    )


def _add_ds_config(verb: Parser) -> None:
    verb.add_argument(
        "--ds-config",
        metavar="FILE",
        help="DeepSpeed's configuration (JSON): with --model that of the run that will load the target; else that of"
        " the run that saved an elastic checkpoint, which keeps no settings of the optimizer",
    )


def _add_trust(verb: Parser) -> None:
    verb.add_argument(
        "--allow-global",
        action="append",
        default=[],
        metavar="NAME",
        help="a class or function, by its full name, that pickles may name besides those that frameworks write; who"
        " loads the result runs it (may be repeated)",
    )


def _add_resources(verb: Parser) -> None:
    verb.add_argument(
        "--loader",
        metavar="WHO",
        help="who will load the target, for --mode auto to choose by: elastic_trainer,ranks-per-node=8,"
        "node-memory=512GiB (what is free of a node's memory while it loads); by default anybody: files are written",
    )
    verb.add_argument(
        "--memory", default="auto", metavar="SIZE", help="for buffers (128MiB); auto: 96MiB, less where less is free"
    )
    verb.add_argument(
        "--threads",
        type=int,
        default=0,
        metavar="N",
        help="fixed number of workers; by default the processors (at most 8) at first, then by measurement",
    )
