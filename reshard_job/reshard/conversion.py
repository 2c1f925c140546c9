"""What a run of `reshard` is asked for."""

from __future__ import annotations

import dataclasses
import hashlib
import os
from pathlib import Path

from reshard.commits.commit import Commit, plain
from reshard.storage.object_store import check_path
from reshard.storage.yaml_file import read_content
from reshard.topology import Topology

PLAN = "plan"
"""Key of `Commit.options`: fingerprint of the plan that made the commit."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Conversion:
    """What a run is asked for.

    Attributes:
        source: folder of one checkpoint.
        target: folder to make; its parent is made if needed.
        topology: degrees of the target.
        target_format: name of a format; empty for the source's.
        weight_dtype: type of the weights, or None for the source's.
        states: states to take along (`weight`, `fp32`, `exp_avg`, ...); empty for all.
        like: checkpoint of the target's format that says what the source cannot, or None.
        names: file with a name map (`reshard.names`) that the target's names follow, or None.
        patterns: file of patterns for a DeepSpeed source that does not say how it is cut, or None.
        file_bytes: largest size of a file where the format leaves that open; None for its default.
        attempt: recorded in the commit.
        require_commit: refuse a source without a commit marker.
        keeps_stage: nobody asked for a ZeRO stage: native DeepSpeed checkpoints keep theirs.
        allow_differences: take the first copy of a tensor whose copies differ, and weights that are not their masters.
        allow_globals: `module.name` of what pickles may name besides the allow list (`reshard.formats.pt.trust`).
        owner: UID of the job that the result belongs to, recorded in the commit; empty for none.
    """

    source: Path
    target: Path
    topology: Topology
    target_format: str = ""
    weight_dtype: str | None = None
    states: tuple[str, ...] = ()
    like: Path | None = None
    names: Path | None = None
    patterns: Path | None = None
    file_bytes: int | None = None
    attempt: int = 0
    require_commit: bool = False
    keeps_stage: bool = False
    allow_differences: bool = False
    allow_globals: tuple[str, ...] = ()
    owner: str = ""

    @property
    def request(self) -> str:
        """Whatever the source holds, two runs with the same text are the same command."""
        wish = (self.topology, self.target_format, self.file_bytes, self.keeps_stage, sorted(self.options.items()))
        return f"{os.fsencode(self.source)!r} {'' if self.like is None else os.fsencode(self.like)!r} {wish}"

    def __post_init__(self) -> None:
        for path in (self.source, self.target, self.like, self.names, self.patterns):
            if path is not None:
                check_path(str(path))

    @property
    def options(self) -> dict[str, str]:
        """What tells the result from that of another conversion of the same source, for the commit."""
        found = {
            "dtype": self.weight_dtype or "",
            "states": ",".join(self.states),
            "names": _content_hash(self.names),
            "patterns": _content_hash(self.patterns),
            "allow_globals": ",".join(sorted(set(self.allow_globals))),
        }
        return {key: value for key, value in found.items() if value}

    def has_made(self, commit: Commit, topology: Topology) -> bool:
        """True if the same command made a commit of this topology, whatever its source held."""
        return (
            commit.source == plain(self.source)
            and commit.topology == topology
            and self.target_format in ("", commit.format)
            and {**commit.options, PLAN: ""} == {**self.options, PLAN: ""}
        )


def _content_hash(path: Path | None) -> str:
    """Name and content of a small file, in short; empty for None."""
    if path is None:
        return ""
    return f"{path.name} {hashlib.sha256(read_content(path)).hexdigest()[:16]}"
