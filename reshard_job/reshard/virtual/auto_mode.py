"""`--mode auto`: choose whether a conversion writes files or a manifest that says where their bytes are. Pure.

The two modes are compared by the time until all ranks have read their files. To materialize, one pod reads the source
and writes the files, and every node reads those of its ranks. To load virtually, every node reads what its ranks need
of the source and makes their files in memory. All nodes share storage with `_READ` and `_WRITE` bytes per second in
all; a process makes files at `_MAKE` bytes per second. The seconds are

    written = read/_READ + read/_MAKE + write/_WRITE + loads * all nodes' files/_READ
    virtual = loads * (all nodes' needs of the source/_READ + the largest node's/_MAKE)

The rates are constants, so that `plan` and `run` choose the same mode and the operator can predict it.
"""

from __future__ import annotations

import dataclasses

from reshard.contract import ELASTIC_TRAINER
from reshard.errors import UsageError
from reshard.system.limits import format_bytes, format_seconds, parse_bytes

MATERIALIZE, VIRTUAL = "materialize", "virtual"
LEAST_SAVING_SECONDS = 5.0
"""Least saving that justifies a virtual commit: any framework loads files, and they do not need the source."""

_READ = _WRITE = 500e6  # bytes/s: a network volume or a SATA disk, as `estimate` assumes
_MAKE = 1e9  # bytes/s: one process with two threads, which checks and digests what it copies (docs/benchmarks.md)
_MEMORY_FACTOR = 2  # the files, and what the framework allocates while it reads them


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """A mode, and the reason for it."""

    mode: str
    reason: str


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Loader:
    """The training processes that will load the target with `elastic_trainer`, which alone loads virtual commits.

    Attributes:
        ranks_per_node: ranks that share a node's memory.
        memory_bytes: free on each node while it loads.
        num_loads: how often the target will be loaded.
    """

    ranks_per_node: int
    memory_bytes: int
    num_loads: int = 1


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Needs:
    """Bytes that a conversion and its loading read and write.

    Attributes:
        read: bytes of the source, each once.
        write: bytes of all target files.
        node_source: bytes of the source that the node which needs most of it reads.
        node_files: bytes of the files of one node's ranks, on the node that has most.
        all_source: bytes of the source that all nodes read, added up.
        all_files: bytes of the files of all nodes' ranks; files that ranks of one node share count once for it.
    """

    read: int
    write: int
    node_source: int
    node_files: int
    all_source: int
    all_files: int


def choose(loader: Loader | None, needs: Needs | None, refused: str = "") -> Choice:
    """Choose the mode of a conversion.

    Args:
        loader: who will load the target, or None if any framework may.
        needs: bytes that are read and written, or None if they are not known.
        refused: why there can be no virtual commit; empty if there can be one.
    """
    if refused:
        return Choice(mode=MATERIALIZE, reason=refused)
    if loader is None or needs is None:
        return Choice(
            mode=MATERIALIZE,
            reason="any unmodified framework loads the files; only elastic_trainer loads a manifest (--loader)",
        )
    memory = _MEMORY_FACTOR * needs.node_files
    if memory > loader.memory_bytes:
        return Choice(
            mode=MATERIALIZE,
            reason=f"loading virtually takes {format_bytes(memory)} of a node's memory for the files of its"
            f" {loader.ranks_per_node} ranks, {format_bytes(loader.memory_bytes)} are free",
        )
    written = (
        needs.read / _READ + needs.read / _MAKE + needs.write / _WRITE + loader.num_loads * needs.all_files / _READ
    )
    virtual = loader.num_loads * (needs.all_source / _READ + needs.node_source / _MAKE)
    costs = f"about {format_seconds(virtual)} to load virtually, {format_seconds(written)} to write files and load them"
    if written - virtual < LEAST_SAVING_SECONDS:
        return Choice(mode=MATERIALIZE, reason=f"{costs}: less than {format_seconds(LEAST_SAVING_SECONDS)} are saved")
    return Choice(mode=VIRTUAL, reason=costs)


def parse_loader(text: str | None) -> Loader | None:
    """Parse `--loader elastic_trainer,ranks-per-node=8,node-memory=512GiB[,loads=1]`; None if the option is left out.

    Raises:
        UsageError: the text has another form.
    """
    if text is None:
        return None
    name, *pairs = text.split(",")
    values = dict(pair.partition("=")[::2] for pair in pairs)
    try:
        if name != ELASTIC_TRAINER or len(values) != len(pairs) or values.keys() - {*_NEEDED, "loads"}:
            raise ValueError(f"cannot read {text!r}")
        loader = Loader(
            ranks_per_node=int(values["ranks-per-node"]),
            memory_bytes=parse_bytes(values["node-memory"]),
            num_loads=int(values.get("loads", "1")),
        )
    except (KeyError, ValueError) as error:
        why = f"{error.args[0]} is missing" if isinstance(error, KeyError) else error
        raise UsageError(f"--loader {text}: {why}", hint=f"write it as {_EXAMPLE}") from error
    if loader.ranks_per_node < 1 or loader.num_loads < 1:
        raise UsageError(f"--loader {text}: expected 1 or more", hint=f"write it as {_EXAMPLE}")
    return loader


_NEEDED = ("ranks-per-node", "node-memory")
_EXAMPLE = f"{ELASTIC_TRAINER},ranks-per-node=8,node-memory=512GiB"
