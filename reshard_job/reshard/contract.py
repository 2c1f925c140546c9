"""The wire contract between operator, reshard Job and training pods.

Names of environment variables, Lease annotations, labels and exit codes, and the report that a reshard pod leaves in
its termination message. Standard library only: the operator imports this and `reshard.topology`, nothing else.
"""

from __future__ import annotations

import dataclasses
import enum
import json
from collections.abc import Mapping
from typing import TypeVar

GROUP = "elastictraining.dev"
VERSION = "v1alpha1"
KIND = "ElasticTrainingJob"
PLURAL = "elastictrainingjobs"

CONTRACT_VERSION = 1
"""Raised when a field changes its meaning; readers refuse a newer one."""

MANIFEST_VERSIONS = (1, 2)
"""Versions of a virtual commit's manifest that this release reads; it writes the last."""

ELASTIC_TRAINER = "elastic_trainer"
"""Who loads virtual commits: `reshard run --loader elastic_trainer,ranks-per-node=N,node-memory=BYTES`."""

COMMIT_FILE = "COMMIT.json"
"""Written last; a checkpoint folder without it does not exist."""


class Env(enum.StrEnum):
    """Environment of the training container (operator writes, `elastic_trainer` reads)."""

    JOB = "ETJ_JOB"
    NAMESPACE = "ETJ_NAMESPACE"
    ATTEMPT = "ETJ_ATTEMPT"
    TOPOLOGY = "ETJ_TOPOLOGY"
    WORLD_SIZE = "ETJ_WORLD_SIZE"
    GLOBAL_BATCH = "ETJ_GLOBAL_BATCH"
    MICRO_BATCH = "ETJ_MICRO_BATCH"
    CHECKPOINT_ROOT = "ETJ_CHECKPOINT_ROOT"
    CHECKPOINT_INTERVAL_SECONDS = "ETJ_CHECKPOINT_INTERVAL_SECONDS"
    RESUME = "ETJ_RESUME"
    GRACE_SECONDS = "ETJ_GRACE_SECONDS"
    LEASE = "ETJ_LEASE"
    HEARTBEAT_SECONDS = "ETJ_HEARTBEAT_SECONDS"
    SCRATCH = "ETJ_SCRATCH"
    """Folder in memory for the files of a virtual commit. The user may set it; by default the operator does, where
    `spec.reshard.mode` is Virtual or may come to it."""
    MAILBOX = "ETJ_MAILBOX"
    """Path of a JSON file that stands in for the Lease where there is no cluster."""


class Label(enum.StrEnum):
    """Labels on everything the operator creates; selectors for humans and caches."""

    JOB = f"{GROUP}/job-name"
    ATTEMPT = f"{GROUP}/attempt"
    ROLE = f"{GROUP}/role"
    """`worker` or `reshard`."""


class LeaseKey(enum.StrEnum):
    """Annotations of the attempt Lease, the mailbox between rank 0 and the operator.

    All values are strings; numbers in decimal; a missing annotation means "not known yet".
    """

    PHASE = f"{GROUP}/phase"
    """Rank 0 writes a `TrainerPhase`."""
    STEP = f"{GROUP}/step"
    LOSS = f"{GROUP}/loss"
    SAMPLES = f"{GROUP}/samples"
    FIRST_STEP_TIME = f"{GROUP}/first-step-time"
    """RFC 3339 time at which this attempt finished its first step."""
    STEP_TIME = f"{GROUP}/step-time"
    """RFC 3339 time at which the step in STEP finished; an old one on a fresh Lease means a hang."""
    COMMIT = f"{GROUP}/commit"
    """Rank 0 writes the newest commit as JSON: `CommitRef.to_json`."""
    RESUME_ERROR = f"{GROUP}/resume-error"
    """Rank 0 writes why ETJ_RESUME could not be used; the operator falls back to the previous commit."""
    LOADER = f"{GROUP}/loader"
    """Rank 0 writes what `restore()` can load besides files, as JSON: `VirtualLoader.to_json`."""
    REQUEST = f"{GROUP}/request"
    """The operator writes a `Request`; rank 0 sees it in the answer to its own renewal."""
    REQUEST_SEEN = f"{GROUP}/request-seen"
    """Rank 0 echoes the request that it has seen."""


class TrainerPhase(enum.StrEnum):
    """What the training pods are doing."""

    STARTING = "Starting"
    RESTORING = "Restoring"
    TRAINING = "Training"
    SAVING = "Saving"
    DRAINING = "Draining"
    DRAINED = "Drained"
    COMPLETE = "Complete"


class Request(enum.StrEnum):
    """What the operator may ask of a running attempt."""

    DRAIN = "drain"
    """Commit at the next step boundary, then exit with `TrainerExit.DRAINED`."""


class TrainerExit(enum.IntEnum):
    """Exit codes of a training process. Advisory: launchers squash them."""

    COMPLETE = 0
    DRAINED = 75
    RESUME_INVALID = 76
    """ETJ_RESUME names a commit that cannot be used."""


class ExitCode(enum.IntEnum):
    """Exit codes of the `reshard` command line, one per error class."""

    OK = 0
    INTERNAL = 1
    USAGE = 2
    SOURCE_INVALID = 10
    UNSUPPORTED = 11
    PLAN_INVALID = 12
    TARGET_FAILED = 20
    STORAGE_FULL = 21
    VERIFICATION_FAILED = 30
    INTERRUPTED = 130


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class CommitRef:
    """One committed checkpoint, as named in Lease annotations and in the resource's status.

    Attributes:
        uri: absolute folder of the commit, as seen in the pods.
        step: optimizer steps done.
        samples: global samples consumed.
        attempt: attempt that wrote it.
        topology: wire form of the topology it was written in.
        num_bytes: size of all files, 0 if not known.
    """

    uri: str
    step: int
    samples: int
    attempt: int
    topology: Mapping[str, int]
    num_bytes: int = 0

    def to_json(self) -> str:
        """One line of JSON."""
        return json.dumps({**dataclasses.asdict(self), "topology": dict(self.topology)}, separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str) -> CommitRef:
        """Inverse of `to_json`; keys that this version does not know are ignored.

        Raises:
            ValueError: not JSON, or a field is missing.
        """
        return _from_wire(cls, text)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class VirtualLoader:
    """That a training script restores through `elastic_trainer`, which loads virtual commits, and with what memory.

    Attributes:
        manifests: versions of the manifest that it reads.
        memory_bytes: free for it on rank 0's node as it restores.
    """

    manifests: tuple[int, ...]
    memory_bytes: int

    def to_json(self) -> str:
        """One line of JSON."""
        return json.dumps(dataclasses.asdict(self), separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str) -> VirtualLoader:
        """Inverse of `to_json`; keys that this version does not know are ignored.

        Raises:
            ValueError: not JSON, or a field is missing or of another type.
        """
        found = _from_wire(cls, text)
        try:
            manifests = tuple(int(version) for version in found.manifests)
            return cls(manifests=manifests, memory_bytes=int(found.memory_bytes))
        except TypeError as error:
            raise ValueError(f"VirtualLoader: expected integers, found {text[:80]!r}") from error


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ReshardReport:
    """What a reshard pod says at its end: the termination message, at most 4096 bytes.

    Attributes:
        ok: the target is committed and verified.
        exit_code: an `ExitCode`.
        message: one sentence for people; the error, if there was one.
        source: folder of the commit that was read.
        target: folder of the commit that was written.
        step: optimizer steps done in that commit.
        samples: global samples consumed in that commit.
        mode: `materialize` or `virtual`.
        mode_reason: why, where it was chosen.
        bytes_read: bytes read from storage.
        bytes_written: bytes written to storage.
        num_files: target files.
        seconds: wall time of the conversion.
        peak_rss_bytes: largest resident set of any process of the command.
        num_tensors: logical tensors verified.
        digest: sum of all tensors' digests, in hex; equal for source and target.
        verified: the target was checked against the source.
        latest: file that names the target to DeepSpeed, if this run wrote it.
        contract_version: `CONTRACT_VERSION` of the writer.
    """

    ok: bool
    exit_code: int
    message: str
    source: str = ""
    target: str = ""
    step: int = 0
    samples: int = 0
    mode: str = "materialize"
    mode_reason: str = ""
    bytes_read: int = 0
    bytes_written: int = 0
    num_files: int = 0
    seconds: float = 0.0
    peak_rss_bytes: int = 0
    num_tensors: int = 0
    digest: str = ""
    verified: bool = False
    latest: str = ""
    contract_version: int = CONTRACT_VERSION

    def to_json(self) -> str:
        """One line of JSON that fits the 4096 bytes of a termination message."""
        message = self.message
        while True:
            text = json.dumps(dataclasses.asdict(dataclasses.replace(self, message=message)), separators=(",", ":"))
            if len(text.encode()) <= TERMINATION_MESSAGE_LIMIT_BYTES or not message:
                return text
            message = message[: len(message) * 3 // 4]

    @classmethod
    def from_json(cls, text: str) -> ReshardReport:
        """Inverse of `to_json`; keys that this version does not know are ignored.

        Raises:
            ValueError: not JSON, or a field is missing.
        """
        return _from_wire(cls, text)


TERMINATION_MESSAGE_LIMIT_BYTES = 4096
"""Kubernetes keeps no more (core/v1, terminationMessagePath)."""


_Wire = TypeVar("_Wire", CommitRef, VirtualLoader, ReshardReport)


def _from_wire(cls: type[_Wire], text: str) -> _Wire:
    value = json.loads(text)
    if not isinstance(value, dict):
        raise ValueError(f"expected a JSON object for {cls.__name__}, found {text[:80]!r}")
    known = {field.name for field in dataclasses.fields(cls)}
    try:
        return cls(**{key: item for key, item in value.items() if key in known})
    except TypeError as error:
        raise ValueError(f"{cls.__name__}: {error}") from error
