"""A conversion as data: its source and target (`Conversion`), and the options of a run (`RunOptions`)."""

from __future__ import annotations

import dataclasses
import hashlib
import os
from pathlib import Path

from reshard.commits.commit import Commit, path_to_text
from reshard.commits.staging import Sharing
from reshard.errors import UsageError
from reshard.storage.object_store import check_path
from reshard.storage.yaml_file import read_content
from reshard.system.limits import DEFAULT_MEMORY_BYTES
from reshard.topology import Topology

PLAN = "plan"
"""Key of `Commit.options`: fingerprint of the plan that made the commit."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Conversion:
    """A conversion: its source, its target, and what the target shall be.

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
        ds_config: DeepSpeed's configuration, or None: with `model` that of the run that will load the target, else that
            of the run that saved an elastic source, which keeps no settings.
        model: model description for a DeepSpeed target, instead of `like`, or None.
        file_bytes: largest size of a file where the format leaves that open; None for its default.
        attempt: recorded in the commit.
        require_commit: refuse a source without a commit marker.
        keeps_stage: `topology` states no ZeRO stage: keep the source's if its format has one, or take
            that of `ds_config` if there is a `model`.
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
    ds_config: Path | None = None
    model: Path | None = None
    file_bytes: int | None = None
    attempt: int = 0
    require_commit: bool = False
    keeps_stage: bool = False
    allow_differences: bool = False
    allow_globals: tuple[str, ...] = ()
    owner: str = ""

    @property
    def request(self) -> str:
        """Text that is equal for two runs of the same command, whatever the source holds."""
        wish = (self.topology, self.target_format, self.file_bytes, self.keeps_stage, sorted(self.options.items()))
        return f"{os.fsencode(self.source)!r} {'' if self.like is None else os.fsencode(self.like)!r} {wish}"

    def __post_init__(self) -> None:
        for path in (self.source, self.target, self.like, self.names, self.patterns, self.ds_config, self.model):
            if path is not None:
                check_path(str(path))
        if self.model is not None and (self.like is not None or self.ds_config is None):
            raise UsageError(
                "--model says with --ds-config what --like would say: give it with --ds-config, and without --like"
            )

    @property
    def source_config(self) -> Path | None:
        """Return DeepSpeed's configuration of the run that saved the source, or None."""
        return None if self.model is not None else self.ds_config

    @property
    def options(self) -> dict[str, str]:
        """Options that tell the result from that of another conversion of the same source, for the commit."""
        options = {
            "dtype": self.weight_dtype or "",
            "states": ",".join(self.states),
            "names": _content_hash(self.names),
            "patterns": _content_hash(self.patterns),
            "ds_config": _content_hash(self.ds_config),
            "model": _content_hash(self.model),
            "allow_globals": ",".join(sorted(set(self.allow_globals))),
        }
        return {key: value for key, value in options.items() if value}

    def has_made(self, commit: Commit, topology: Topology) -> bool:
        """Return True if the same command made a commit of this topology, whatever its source held."""
        return (
            commit.source == path_to_text(self.source)
            and commit.topology == topology
            and self.target_format in ("", commit.format)
            and {**commit.options, PLAN: ""} == {**self.options, PLAN: ""}
        )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RunOptions:
    """Options of a run. The result is the same for all of them.

    Attributes:
        memory_bytes: for buffers.
        num_threads: 0 for the processors that this process may use.
        reread: read the whole result back through the format's reader before it is published.
        sync: have every file on stable storage before it is published.
        bytes_per_second: read no faster than that, all threads together; None for no limit.
        sharing: alone, resumable after a failure, or together with other workers.
        worker: which of how many workers, from 0.
        latest: let the file in which the framework looks for a checkpoint name the target.
    """

    memory_bytes: int = DEFAULT_MEMORY_BYTES
    num_threads: int = 0
    reread: bool = False
    sync: bool = True
    bytes_per_second: float | None = None
    sharing: Sharing = Sharing.ALONE
    worker: tuple[int, int] = (0, 1)
    latest: bool = False


def _content_hash(path: Path | None) -> str:
    """Return a small file's name and a hash of its content; empty for None."""
    if path is None:
        return ""
    return f"{path.name} {hashlib.sha256(read_content(path)).hexdigest()[:16]}"
