"""`kubectl etj convert`: reads the files, prints the notes on stderr, and returns the resource."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from elastic_operator.plugin.convert.documents import MAX_BYTES, read_documents
from elastic_operator.plugin.convert.job import Choices, convert
from elastic_operator.plugin.convert.section import ConvertError
from elastic_operator.plugin.errors import Exit, PluginError
from elastic_operator.plugin.output import quote_as_for_kubectl, write_note


def add_options(one: argparse.ArgumentParser) -> None:
    """Add the options of the verb to its parser."""
    one.add_argument(
        "-f", "--filename", action="append", required=True, metavar="FILE",
        help="YAML of the workload, for a TrainJob also of its runtime; - reads stdin; may be repeated",
    )  # fmt: skip
    one.add_argument(
        "--claim", default="", metavar="NAME",
        help="PersistentVolumeClaim for checkpoints (default: the only one that the training mounts)",
    )  # fmt: skip
    one.add_argument("--path", default="", help="folder inside the claim (default: the name of the job)")
    one.add_argument("--format", choices=("DeepSpeed", "DCP"), default="DeepSpeed", help="default: DeepSpeed")
    one.add_argument("--global-samples", type=_number, metavar="N", help="samples per optimizer step on all GPUs")
    one.add_argument("--micro-samples", type=_number, metavar="N", help="samples per forward pass (default: 1)")
    one.add_argument("--min-nodes", type=_number, metavar="N", help="default: as in the source")
    one.add_argument("--accelerator", default="", metavar="RESOURCE", help="default: the GPUs of the training")


def convert_files(options: argparse.Namespace) -> tuple[str, dict[str, Any]]:
    """Convert the workload in the files; return the resource as YAML and as data.

    Raises:
        PluginError: a file cannot be read, or its workload cannot be converted truly.
    """
    choices = Choices(
        claim=options.claim,
        path=options.path,
        checkpoint_format=options.format,
        global_samples=options.global_samples,
        micro_samples=options.micro_samples,
        least_nodes=options.min_nodes,
        accelerator=options.accelerator,
    )
    try:
        job, notes = convert(_read_files(options.filename), choices)
    except ConvertError as error:
        raise PluginError(Exit.REFUSED, str(error)) from None
    for text in notes.left_out:
        write_note(f"left out: {text}")
    for text in notes.decisions:
        write_note(f"decide: {text}")
    return _to_yaml(job), job


def _read_files(names: Sequence[str]) -> list[dict[str, Any]]:
    found = []
    for name in names:
        try:
            if name == "-":
                content = sys.stdin.buffer.read(MAX_BYTES + 1)
            else:
                with Path(name).open("rb") as file:
                    content = file.read(MAX_BYTES + 1)
            text = content.decode("utf-8")
        except (OSError, UnicodeDecodeError) as error:
            reason = getattr(error, "strerror", None) or str(error)
            raise PluginError(Exit.REFUSED, f"{name}: cannot be read: {reason}") from None
        found += read_documents(text, name)
    return found


class _Dumper(yaml.SafeDumper):
    """Writes texts of several lines as blocks, and no aliases."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _represent_text(dumper: yaml.SafeDumper, text: str) -> yaml.Node:
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None)


_Dumper.add_representer(str, _represent_text)
quote_as_for_kubectl(_Dumper)


def _to_yaml(job: dict[str, Any]) -> str:
    return yaml.dump(job, Dumper=_Dumper, sort_keys=False, width=120).rstrip("\n")


def _number(text: str) -> int:
    if not (text.isdecimal() and int(text)):
        raise argparse.ArgumentTypeError(f"{text!r}: expected a whole number from 1 on")
    return int(text)
