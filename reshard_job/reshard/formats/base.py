"""The interface of a checkpoint format, and checks that all formats share."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

from reshard.commits.commit import Commit
from reshard.errors import ReshardError, TopologyError, UnsupportedError, UsageError
from reshard.tensors.layout import Index, TargetLayout
from reshard.topology import Topology

DEFAULT_FILE_BYTES = 5 << 30
"""Largest file that formats make which choose the size of their files themselves."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """Options of a target: its topology, types, example and file sizes.

    Attributes:
        topology: degrees of parallelism; formats that are not cut for ranks take no notice.
        weight_dtype: type of the weights in the target, or None to keep the source's.
        like: a checkpoint of the target's format and model, for what a source of another format cannot tell (files,
            scalars and settings that are not tensors); its topology does not matter.
        model: a model description, which with `ds_config` says what `like` would say, or None.
        ds_config: DeepSpeed's configuration of the run that will load the target; None without `model`.
        keeps_stage: take the ZeRO stage of `ds_config`: `topology` states none.
        file_bytes: largest size of a file where the format leaves that open; None for `DEFAULT_FILE_BYTES`.
    """

    topology: Topology
    weight_dtype: str | None = None
    like: Index | None = None
    model: Path | None = None
    ds_config: Path | None = None
    keeps_stage: bool = False
    file_bytes: int | None = None


def stated_topology(path: str, *, tp: int = 1, pp: int = 1, dp: int = 1, cp: int = 1, zero: int = 1) -> Topology:
    """Return the topology that a checkpoint's files state; `path` is where they state it.

    Raises:
        CorruptSourceError: no such topology is possible, or it has more ranks than are planned.
    """
    try:
        topology = Topology(tp=tp, pp=pp, dp=dp, cp=cp, zero=zero)
        topology.refuse_partitioned_pipeline()
    except TopologyError as error:
        raise UnsupportedError(f"states impossible degrees of parallelism: {error.message}", path=path) from error
    return topology


class Format(Protocol):
    """One on-disk format. Readers look at metadata only and never execute anything that a file says."""

    @property
    def name(self) -> str:
        """Name in commands and in COMMIT.json."""
        ...

    @property
    def takes_patterns(self) -> bool:
        """True if a file of patterns may say how tensor parallelism cut a checkpoint of this format."""
        ...

    @property
    def takes_ds_config(self) -> bool:
        """True if a checkpoint of this format may lack settings that DeepSpeed's configuration has."""
        ...

    @property
    def keeps_zero_stage(self) -> bool:
        """True if a checkpoint of this format has a ZeRO stage, which a conversion keeps unless it names another."""
        ...

    def sniff(self, path: Path) -> str | None:
        """Return why `path` is not of this format, or None if it is."""
        ...

    def read(
        self, path: Path, commit: Commit | None, patterns: Path | None = None, ds_config: Path | None = None
    ) -> Index:
        """Index the checkpoint in folder `path`.

        Args:
            path: folder of one checkpoint (for DeepSpeed: of the tag).
            commit: its commit marker, if it has one.
            patterns: file that says how tensor parallelism cut the checkpoint; None where `takes_patterns` is False.
            ds_config: DeepSpeed's configuration of the run that saved the checkpoint, for settings that an elastic one
                does not keep; None where `takes_ds_config` is False.

        Raises:
            UsageError: the file of patterns cannot be read.
            CorruptSourceError: truncated, missing or mixed files.
            UnsafePickleError: a pickle wants more than data.
            UnsupportedError: understood, but not read by this version.
        """
        ...

    def layout(self, index: Index, request: Request) -> TargetLayout:
        """Lay out the tensors of `index`, which any format may have read, in this format.

        Raises:
            UnsupportedError: a conversion that would need a guess, with the tensors that it would be about.
        """
        ...


@contextlib.contextmanager
def understood(folder: Path, writer: str, *, instead: str, also: tuple[type[Exception], ...] = ()) -> Iterator[None]:
    """Fields of other types than a framework writes surface wherever they are used: say whose fault it is.

    Args:
        folder: of the checkpoint.
        writer: name of the framework.
        instead: what to do, if the framework does not load the checkpoint either.
        also: errors that such fields lead to besides the usual ones.

    Raises:
        CorruptSourceError: in the place of errors that are not ours.
    """
    foreign: tuple[type[Exception], ...] = (TypeError, ValueError, LookupError, AttributeError, RecursionError, *also)
    try:
        yield
    except ReshardError:
        raise
    except foreign as error:
        raise UnsupportedError(
            f"holds something that {writer} does not write ({type(error).__name__}: {error})",
            path=str(folder),
            hint=f"{instead}; if {writer} loads this one, report it as a bug of reshard",
        ) from error


def refuse_options(
    name: str,
    request: Request,
    *,
    weight_dtype: bool = False,
    like: bool = True,
    model: bool = False,
    file_bytes: bool = False,
) -> None:
    """Refuse what a format has no use for, rather than ignore it; what it has a use for is True.

    Raises:
        UsageError: naming the option.
    """
    if request.weight_dtype is not None and not weight_dtype:
        raise UsageError(
            f"--dtype {request.weight_dtype}: the format {name} keeps the types of the source",
            hint="leave --dtype out, or choose --format safetensors",
        )
    if request.like is not None and not like:
        raise UsageError(
            f"--like {request.like.root}: the format {name} holds nothing that a source could not tell",
            hint="leave --like out",
        )
    if request.model is not None and not model:
        raise UsageError(
            f"--model {request.model}: a model description is for DeepSpeed's formats, not for {name}",
            hint="leave --model and --ds-config out, or choose --format deepspeed or universal",
        )
    if request.file_bytes is not None and not file_bytes:
        raise UsageError(
            f"--file-size: the sizes of files of the format {name} follow from the topology",
            hint="leave --file-size out, or choose --format safetensors",
        )
