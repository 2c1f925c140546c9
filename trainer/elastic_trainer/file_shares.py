"""Checks a commit before it is loaded: each rank its share of the files, and all ranks decide together.

A rank checks the files that it will load itself, as far as their names say so. The framework then reads them from the
page cache of the node, and each file crosses the network once.
"""

from __future__ import annotations

import dataclasses
import enum
import os
import re
from collections.abc import Sequence
from pathlib import Path

from reshard.commits.commit import Commit, CommittedFile, check_files, read_commit
from reshard.contract import DCP, ExitCode
from reshard.errors import ReshardError, UncommittedError, make_read_error
from reshard.topology import Topology

_DCP = re.compile(r"__(\d{1,9})_\d{1,9}\.distcp")
_DEEPSPEED = re.compile(r"(?:bf16_|fp16_)?(?:zero_pp_rank_(\d{1,9})_)?mp_rank_(\d{1,9})_(?:model|optim)_states\.pt")


class Verdict(enum.Enum):
    """Judgement of a rank on a commit."""

    SOUND = enum.auto()
    UNUSABLE = enum.auto()
    """Damaged, or of another topology or a newer version."""
    ABSENT = enum.auto()
    """Absent from the folder of its attempt, which is there."""
    UNKNOWN = enum.auto()
    """The storage cannot be read now, which says nothing about the commit."""


@dataclasses.dataclass(frozen=True, slots=True)
class Finding:
    """Judgement of a rank on its share of a commit, with the problem as text."""

    verdict: Verdict = Verdict.SOUND
    text: str = ""


def check_commit(folder: Path, *, rank: int, topology: Topology) -> tuple[Finding, Commit | None]:
    """Check a rank's share of a commit; return what was found, and the commit if it can be used.

    Args:
        folder: folder of the commit.
        rank: global rank.
        topology: topology of this attempt.
    """
    try:
        commit = read_commit(folder)
        if commit.topology != topology and commit.format != DCP:
            text = f"it is laid out for {commit.topology}, this attempt runs at {topology}: reshard it"
            return Finding(Verdict.UNUSABLE, text), None
        share = share_of(commit.files, rank=rank, topology=topology)
        check_files(folder, dataclasses.replace(commit, files=share), crc=True)
    except ReshardError as error:
        return judge(error, folder), None
    except OSError as error:
        return judge(make_read_error(error, str(folder)), folder), None
    return Finding(), commit


def judge(error: ReshardError, folder: Path) -> Finding:
    """Return what an error says of the commit in `folder`. Without its attempt's folder the storage is not there."""
    verdict = Verdict.UNUSABLE
    if not os.path.isdir(folder.parent):  # noqa: PTH112  (before Python 3.14, Path.is_dir raises EIO and the like)
        return Finding(Verdict.UNKNOWN, f"{folder.parent} is no folder now: check that the storage is mounted")
    if isinstance(error, UncommittedError):
        verdict = Verdict.ABSENT
    elif error.exit_code == ExitCode.SOURCE_UNAVAILABLE:
        verdict = Verdict.UNKNOWN
    return Finding(verdict, "; ".join(error.problems) or str(error))


def is_refused(findings: Sequence[Finding]) -> bool:
    """Return whether a commit that not all ranks find sound is given up, or tried again by the next attempt.

    It is absent only if no rank finds it: one node may not see what the others see.
    """
    verdicts = {finding.verdict for finding in findings}
    return Verdict.UNUSABLE in verdicts or verdicts == {Verdict.ABSENT}


def share_of(files: Sequence[CommittedFile], *, rank: int, topology: Topology) -> list[CommittedFile]:
    """Return the files that a rank checks; each file is in the share of exactly one rank.

    Args:
        files: all files of the commit.
        rank: global rank.
        topology: topology of this attempt.
    """
    world_size = topology.world_size
    owners = (_writer_of(file.path.rpartition("/")[2], topology) for file in files)
    return [
        file
        for at, (file, owner) in enumerate(zip(files, owners, strict=True))
        if (at if owner is None else owner) % world_size == rank
    ]


def _writer_of(name: str, topology: Topology) -> int | None:
    """Return the rank that wrote a file at this topology, and loads it; None if its name does not say it."""
    if match := _DCP.fullmatch(name):
        return int(match[1])
    if match := _DEEPSPEED.fullmatch(name):
        replica, model = int(match[1] or 0), int(match[2])
        pp, tp = divmod(model, topology.tp)
        if pp < topology.pp and replica < topology.dp:
            return topology.rank(pp=pp, dp=replica, tp=tp)
    return None
