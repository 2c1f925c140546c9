"""Parse and check the values on a command line, before anything is opened."""

from __future__ import annotations

import argparse
from pathlib import Path

from reshard.commits.latest import check_format
from reshard.errors import UsageError
from reshard.formats import TARGET_FORMATS, known_target_formats
from reshard.storage.object_store import check_path, local
from reshard.system.limits import buffer_bytes, format_bytes, parse_bytes
from reshard.tensors.cast import FLOATS
from reshard.topology import Topology

MOST_THREADS = 256
MOST_ATTEMPTS = (1 << 63) - 1
MOST_WORKERS = 1 << 20
SMALLEST_MEMORY_BYTES = 1 << 20
LARGEST_MEMORY_BYTES = 1 << 50

_LONGEST_NUMBER = 40
_FOLDERS = {"path": "the path", "source": "the source", "target": "the target", "first": "A", "second": "B"}
_FILES = ("ds_config", "like", "model", "names", "patterns", "report", "svg")
_ONLY_FILES = ("resume", "reread", "worker", "limit_rate", "no_sync")
_ONLY_WITH_TARGET = ("ds_config", "dtype", "like", "model", "file_size")


def check(options: argparse.Namespace) -> None:
    """Refuse what can be refused without looking at a checkpoint.

    Raises:
        UsageError: a value is wrong for every checkpoint, or an option would do nothing.
    """
    for name, what in _FOLDERS.items():
        if getattr(options, name, None) == "":
            raise UsageError(f"{what} is an empty string: name a folder")
    for name in (*_FOLDERS, *_FILES):
        check_path(getattr(options, name, None) or ".")
    parse_states(getattr(options, "states", ""))
    if options.verb in ("plan", "run", "explain"):
        _check_conversion(options)
    if options.verb in ("plan", "run"):
        _check_resources(options)
    if options.verb == "run":
        _check_run(options)


def _check_conversion(options: argparse.Namespace) -> None:
    parse_topology(options.to)
    if options.format and options.format not in TARGET_FORMATS:
        raise UsageError(f"--format {options.format}: expected one of {known_target_formats()}")
    if options.dtype is not None and options.dtype not in FLOATS:
        raise UsageError(f"--dtype {options.dtype}: expected one of {', '.join(FLOATS)}")
    parse_size("--file-size", options.file_size)
    if options.model is not None and (options.ds_config is None or options.like is not None):
        raise UsageError(
            "--model: expected together with --ds-config, and without --like",
            hint="name DeepSpeed's configuration of the run that will load the target",
        )
    if options.to or options.format:
        return
    if options.verb != "explain":
        raise UsageError("say what the target shall be: --to TOPOLOGY, --format NAME or both")
    _refuse_idle(options, _ONLY_WITH_TARGET, "without a target (--to, --format) it does nothing")


def _check_resources(options: argparse.Namespace) -> None:
    if not 0 <= options.threads <= MOST_THREADS:
        raise UsageError(f"--threads {options.threads}: expected 1 to {MOST_THREADS}, or 0 for the default")
    if options.memory != "auto":
        parse_memory_bytes(options.memory)
    if options.loader is not None:
        from reshard.virtual.auto_mode import parse_loader  # only with this option

        parse_loader(options.loader)
        if options.mode != "auto":
            raise UsageError(f"--loader: only --mode auto asks for it, not {options.mode}", hint="leave it out")
    if options.target is not None:
        parse_target(options.target)


def _check_run(options: argparse.Namespace) -> None:
    parse_worker(options.worker)
    parse_size("--limit-rate", options.limit_rate)
    if not 0 <= options.attempt <= MOST_ATTEMPTS:
        raise UsageError(f"--attempt {options.attempt}: expected 0 or more, at most {MOST_ATTEMPTS}")
    if options.mode == "virtual":
        _refuse_idle(options, _ONLY_FILES, "--mode virtual moves no bytes, so it does nothing")
        if options.latest:
            raise UsageError("--latest: DeepSpeed does not load what --mode virtual writes", hint="leave it out")
    if options.loader is not None:
        _refuse_idle(
            options, (*_ONLY_FILES, "latest"), "with --loader a manifest may be written, which knows nothing of it"
        )
    if options.latest and options.format:
        check_format(options.format)


def _refuse_idle(options: argparse.Namespace, names: tuple[str, ...], why: str) -> None:
    given = [f"--{name.replace('_', '-')}" for name in names if getattr(options, name) not in (None, False)]
    if given:
        raise UsageError(f"{', '.join(given)}: {why}", hint="leave it out")


def parse_topology(text: str | None) -> Topology | None:
    """Parse `--to`: degrees, or None if the option is left out. An empty text stands for degrees of 1.

    Raises:
        UsageError: the topology is impossible, or the text has another form.
    """
    return None if text is None else Topology.parse(text)


def parse_states(text: str) -> tuple[str, ...]:
    """Parse `--states A,B`; empty for all states.

    Raises:
        UsageError: a name is empty, or is that of a tensor.
    """
    if not text:
        return ()
    names = tuple(part.strip() for part in text.split(","))
    if any(not state or "/" in state for state in names):
        raise UsageError(
            f"--states {text}: expected names of states with commas between them, for instance weight,fp32,exp_avg",
            hint="reshard inspect lists the states that a checkpoint holds",
        )
    return names


def parse_worker(text: str | None) -> tuple[int, int] | None:
    """Parse `--worker I/N`: the number of this worker, from 0, and how many workers there are.

    Raises:
        UsageError: the text has another form, or there are too many workers.
    """
    if text is None:
        return None
    number, _, count = text.partition("/")
    digits = len(text) <= _LONGEST_NUMBER and text.isascii() and number.isdigit() and count.isdigit()
    if not (digits and int(number) < int(count)):
        raise UsageError(f"--worker {text}: write the worker's number, from 0, and their number, for instance 0/4")
    if int(count) > MOST_WORKERS:
        raise UsageError(f"--worker {text}: expected at most {MOST_WORKERS} workers")
    return int(number), int(count)


def parse_size(option: str, text: str | None) -> int | None:
    """Parse a number of bytes of at least 1; None if the option is left out.

    Args:
        option: for messages.
        text: value of the option, or None.

    Raises:
        UsageError: the text has another form.
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


def parse_memory_bytes(text: str) -> int:
    """Parse `--memory`: bytes for buffers; `auto` chooses them for this machine.

    Raises:
        UsageError: too little or too much memory, or the text has another form.
    """
    if text == "auto":
        return buffer_bytes()
    value = parse_size("--memory", text) or 0
    if value < SMALLEST_MEMORY_BYTES:
        raise UsageError(f"--memory {format_bytes(value)}: at least {format_bytes(SMALLEST_MEMORY_BYTES)} are needed")
    if value > LARGEST_MEMORY_BYTES:
        raise UsageError(f"--memory {text}: expected at most {format_bytes(LARGEST_MEMORY_BYTES)}")
    return value


def parse_target(text: str) -> Path:
    """Parse the target: the folder to make.

    Raises:
        UsageError: the folder would be in an object store.
    """
    path = local(text)
    if path is None:
        raise UsageError(f"{text}: object stores are read, not written", hint="name a folder of a file system")
    return path.absolute()
