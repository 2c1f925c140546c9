"""What the values on a command line mean. All of them are judged before anything is opened."""

from __future__ import annotations

import argparse
from pathlib import Path

from reshard.commits.latest import check_format
from reshard.errors import UsageError
from reshard.formats import FORMATS, known_formats
from reshard.storage.object_store import check_path, local
from reshard.system.limits import buffer_bytes, format_bytes, parse_bytes
from reshard.tensors.cast import FLOATS
from reshard.topology import Topology
from reshard.virtual.auto_mode import parse_loader

MOST_THREADS = 256
MOST_ATTEMPTS = (1 << 63) - 1
SMALLEST_MEMORY_BYTES = 1 << 20

_LONGEST_NUMBER = 40
_FOLDERS = {"path": "the path", "source": "the source", "target": "the target", "first": "A", "second": "B"}
_FILES = ("like", "names", "patterns", "report", "svg")
_OF_FILES = ("resume", "reread", "worker", "limit_rate", "no_sync")
_OF_A_TARGET = ("dtype", "like", "file_size")


def check(options: argparse.Namespace) -> None:
    """Refuse what can be refused without looking at a checkpoint.

    Raises:
        UsageError: a value that no checkpoint could make sense of, or an option that would do nothing.
    """
    for name, what in _FOLDERS.items():
        if getattr(options, name, None) == "":
            raise UsageError(f"{what} is an empty string: name a folder")
    for name in (*_FOLDERS, *_FILES):
        check_path(getattr(options, name, None) or ".")
    states(getattr(options, "states", ""))
    if options.verb in ("plan", "run", "explain"):
        _check_conversion(options)
    if options.verb in ("plan", "run"):
        _check_resources(options)
    if options.verb == "run":
        _check_run(options)


def _check_conversion(options: argparse.Namespace) -> None:
    topology(options.to)
    if options.format and options.format not in FORMATS:
        raise UsageError(f"--format {options.format}: expected one of {known_formats()}")
    if options.dtype is not None and options.dtype not in FLOATS:
        raise UsageError(f"--dtype {options.dtype}: expected one of {', '.join(FLOATS)}")
    size("--file-size", options.file_size)
    if options.to or options.format:
        return
    if options.verb != "explain":
        raise UsageError("say what the target shall be: --to TOPOLOGY, --format NAME or both")
    _refuse_idle(options, _OF_A_TARGET, "without a target (--to, --format) it does nothing")


def _check_resources(options: argparse.Namespace) -> None:
    if not 0 <= options.threads <= MOST_THREADS:
        raise UsageError(f"--threads {options.threads}: expected 1 to {MOST_THREADS}, or 0 for the default")
    if options.memory != "auto":
        memory_bytes(options.memory)
    if parse_loader(options.loader) is not None and options.mode != "auto":
        raise UsageError(f"--loader: only --mode auto asks for it, not {options.mode}", hint="leave it out")
    if options.target is not None:
        new_folder(options.target)


def _check_run(options: argparse.Namespace) -> None:
    worker(options.worker)
    size("--limit-rate", options.limit_rate)
    if not 0 <= options.attempt <= MOST_ATTEMPTS:
        raise UsageError(f"--attempt {options.attempt}: expected 0 or more, at most {MOST_ATTEMPTS}")
    if options.mode == "virtual":
        _refuse_idle(options, _OF_FILES, "--mode virtual moves no bytes, so it does nothing")
        if options.latest:
            raise UsageError("--latest: DeepSpeed does not load what --mode virtual writes", hint="leave it out")
    if options.loader is not None:
        _refuse_idle(
            options, (*_OF_FILES, "latest"), "with --loader a manifest may be written, which knows nothing of it"
        )
    if options.latest and options.format:
        check_format(options.format)


def _refuse_idle(options: argparse.Namespace, names: tuple[str, ...], why: str) -> None:
    given = [f"--{name.replace('_', '-')}" for name in names if getattr(options, name) not in (None, False)]
    if given:
        raise UsageError(f"{', '.join(given)}: {why}", hint="leave it out")


def topology(text: str | None) -> Topology | None:
    """`--to`: degrees, or None where it is left out (an empty one names none).

    Raises:
        UsageError: impossible, or not understood.
    """
    return None if text is None else Topology.parse(text)


def states(text: str) -> tuple[str, ...]:
    """`--states A,B`; empty for all.

    Raises:
        UsageError: an empty name, or that of a tensor.
    """
    if not text:
        return ()
    found = tuple(part.strip() for part in text.split(","))
    if any(not state or "/" in state for state in found):
        raise UsageError(
            f"--states {text}: expected names of states with commas between them, for instance weight,fp32,exp_avg",
            hint="reshard inspect lists the states that a checkpoint holds",
        )
    return found


def worker(text: str | None) -> tuple[int, int] | None:
    """`--worker I/N`: number of this worker from 0, and their number.

    Raises:
        UsageError: anything else.
    """
    if text is None:
        return None
    number, _, count = text.partition("/")
    digits = len(text) <= _LONGEST_NUMBER and text.isascii() and number.isdigit() and count.isdigit()
    if not (digits and int(number) < int(count)):
        raise UsageError(f"--worker {text}: write the worker's number, from 0, and their number, for instance 0/4")
    return int(number), int(count)


def size(option: str, text: str | None) -> int | None:
    """A number of bytes of at least 1, or None where the option is left out.

    Raises:
        UsageError: anything else.
    """
    if text is None:
        return None
    try:
        value = parse_bytes(text)
    except ValueError as error:
        raise UsageError(f"{option}: {error}") from error
    if value < 1:
        raise UsageError(f"{option} {text}: expected more than nothing")
    return value


def memory_bytes(text: str) -> int:
    """`--memory`: bytes for buffers; `auto` for what suits this machine.

    Raises:
        UsageError: too little, or not understood.
    """
    if text == "auto":
        return buffer_bytes()
    value = size("--memory", text) or 0
    if value < SMALLEST_MEMORY_BYTES:
        raise UsageError(f"--memory {format_bytes(value)}: at least {format_bytes(SMALLEST_MEMORY_BYTES)} are needed")
    return value


def new_folder(text: str) -> Path:
    """The folder to make.

    Raises:
        UsageError: it would be in an object store.
    """
    path = local(text)
    if path is None:
        raise UsageError(f"{text}: object stores are read, not written", hint="name a folder of a file system")
    return path.absolute()
