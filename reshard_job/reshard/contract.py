"""The wire contract between operator, reshard Job and training pods.

Names of environment variables, Lease annotations, labels and exit codes, and the report that a reshard pod leaves in
its termination message. Standard library only: the operator imports this and `reshard.topology`, nothing else.
Everything that arrives is validated strictly, because its writer may be wrong or malicious.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import json
import re
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

GROUP = "elastictraining.dev"
VERSION = "v1beta1"
KIND = "ElasticTrainingJob"
PLURAL = "elastictrainingjobs"

CONTRACT_VERSION = 1
"""Version of the contract; increased when a field changes its meaning. Readers refuse a newer one."""

MANIFEST_VERSIONS = (1, 2)
"""Versions of a virtual commit's manifest that this release reads; it writes the last one."""

ELASTIC_TRAINER = "elastic_trainer"
"""Name of the loader of virtual commits: `reshard run --loader elastic_trainer,ranks-per-node=N,node-memory=BYTES`."""

DCP = "dcp"
"""Format of a commit whose ranks torch.distributed.checkpoint can load in any topology, as COMMIT.json names it."""

COMMIT_FILE = "COMMIT.json"
"""Commit marker, written last. A checkpoint folder without it is not committed."""

UNCONFIRMED_FILE = "COMMIT.unconfirmed.json"
"""COMMIT_FILE of a complete save whose attempt could not reach its Lease; renamed once it can. No reader accepts it."""

OWNER_FILE = "OWNER.json"
"""Names the job that writes below a checkpoint root."""

COMMIT_FOLDER = re.compile(r"step-[A-Za-z0-9._-]{1,64}")
"""Name of a commit's folder in the folder of its attempt."""

COMMIT_NAME = re.compile(rf"a[0-9]{{1,9}}/{COMMIT_FOLDER.pattern}")
"""A commit's folder relative to ETJ_CHECKPOINT_ROOT, as LeaseKey.RELEASED names it."""

MAX_RELEASED = 32
"""Largest number of names in LeaseKey.RELEASED."""


class Env(enum.StrEnum):
    """Environment of the training container (operator writes, `elastic_trainer` reads)."""

    JOB = "ETJ_JOB"
    NAMESPACE = "ETJ_NAMESPACE"
    JOB_UID = "ETJ_JOB_UID"
    """UID of the ElasticTrainingJob: the owner of ETJ_CHECKPOINT_ROOT. Empty without a cluster."""
    TAKE_OVER = "ETJ_TAKE_OVER"
    """`spec.checkpoint.takeOver`, a `TakeOver`. Empty without a cluster."""
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
    """Folder in memory for files of a virtual commit; the user sets it, or the operator where it may make one."""
    MAILBOX = "ETJ_MAILBOX"
    """Path of a JSON file that replaces the Lease without a cluster."""


class TakeOver(enum.StrEnum):
    """Whether a job may take ETJ_CHECKPOINT_ROOT over: its first attempt (BEGIN), or the reshard Job before that."""

    NEVER = "Never"
    BEGIN = "Begin"
    RESUME = "Resume"


class Label(enum.StrEnum):
    """Labels on all objects that the operator creates; users and caches select by them."""

    JOB = f"{GROUP}/job-name"
    ATTEMPT = f"{GROUP}/attempt"
    ROLE = f"{GROUP}/role"
    """`worker` or `reshard`."""


class LeaseKey(enum.StrEnum):
    """Annotations of the attempt's Lease, through which rank 0 and the operator exchange messages.

    All values are strings, with numbers in decimal. A missing annotation means "not known yet".
    """

    PHASE = f"{GROUP}/phase"
    """Rank 0 writes a `TrainerPhase`."""
    STEP = f"{GROUP}/step"
    LOSS = f"{GROUP}/loss"
    SAMPLES = f"{GROUP}/samples"
    FIRST_STEP_TIME = f"{GROUP}/first-step-time"
    """RFC 3339 time at which this attempt finished its first step."""
    STEP_TIME = f"{GROUP}/step-time"
    """RFC 3339 time at which the step in STEP finished; an old time on a renewed Lease means that training hangs."""
    COMMIT = f"{GROUP}/commit"
    """Rank 0 writes the newest commit as JSON: `CommitRef.to_json`."""
    RESUME_ERROR = f"{GROUP}/resume-error"
    """Rank 0 writes why it could not use ETJ_RESUME; the operator falls back to the previous commit."""
    OWNER_ERROR = f"{GROUP}/owner-error"
    """Rank 0 writes why it may not use ETJ_CHECKPOINT_ROOT; the operator ends the job."""
    RELEASED = f"{GROUP}/released"
    """The operator writes the `COMMIT_NAME`s that nothing refers to any more, as a JSON array; rank 0 removes these."""
    REMOVED = f"{GROUP}/removed"
    """Rank 0 writes those commits of RELEASED that do not exist any more, in the same form."""
    REFUSED = f"{GROUP}/refused"
    """Rank 0 writes what the resharder refuses of its first commit: JSON, `message` (may be empty) and `toAllow`."""
    SAVE = f"{GROUP}/save"
    """Rank 0 writes in words how its newest save went, if the training saves asynchronously."""
    LOADER = f"{GROUP}/loader"
    """Rank 0 writes what `restore()` can load besides files, as JSON: `VirtualLoader.to_json`."""
    REQUEST = f"{GROUP}/request"
    """The operator writes a `Request`; rank 0 reads it from the response to its own renewal."""
    REQUEST_SEEN = f"{GROUP}/request-seen"
    """Rank 0 writes the request that it has read."""


class TrainerPhase(enum.StrEnum):
    """Phase of the training pods, as rank 0 reports it on the Lease."""

    STARTING = "Starting"
    RESTORING = "Restoring"
    TRAINING = "Training"
    SAVING = "Saving"
    DRAINING = "Draining"
    DRAINED = "Drained"
    COMPLETE = "Complete"


class Request(enum.StrEnum):
    """Requests of the operator to a running attempt."""

    DRAIN = "drain"
    """Commit at the next step boundary, then exit with `TrainerExit.DRAINED`."""
    STOP = "stop"
    """The attempt is over: exit at SIGTERM, without a commit."""


class TrainerExit(enum.IntEnum):
    """Exit codes of a training process. They are advisory, because launchers may replace them."""

    COMPLETE = 0
    DRAINED = 75
    RESUME_INVALID = 76
    """ETJ_RESUME names a commit that cannot be used."""
    NOT_OWNER = 77
    """ETJ_CHECKPOINT_ROOT belongs to another job."""
    UNPUBLISHED = 78
    """Training is done or drained, but its last save could not be published."""


class ExitCode(enum.IntEnum):
    """Exit codes of the `reshard` command line, one per error class."""

    OK = 0
    INTERNAL = 1
    USAGE = 2
    SOURCE_INVALID = 10
    UNSUPPORTED = 11
    PLAN_INVALID = 12
    SOURCE_CHANGED = 13
    SOURCE_UNAVAILABLE = 14
    TARGET_FAILED = 20
    STORAGE_FULL = 21
    NOT_OWNER = 22
    VERIFICATION_FAILED = 30
    INTERRUPTED = 130


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class CommitRef:
    """One committed checkpoint, as Lease annotations and the resource's status name it.

    Attributes:
        uri: absolute folder of the commit in the pods.
        step: optimizer steps done.
        samples: global samples consumed.
        attempt: attempt that wrote it.
        topology: `Topology.to_dict` of the topology in which it was written.
        num_bytes: size of all files, 0 if not known.
        format: format of its files, as COMMIT.json names it; empty if not known.
    """

    uri: str
    step: int
    samples: int
    attempt: int
    topology: Mapping[str, int]
    num_bytes: int = 0
    format: str = ""

    def to_json(self) -> str:
        """Encode as one line of JSON."""
        return json.dumps({**dataclasses.asdict(self), "topology": dict(self.topology)}, separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str) -> CommitRef:
        """Decode the output of `to_json`; keys that this version does not know are ignored.

        Raises:
            ValueError: the text is not JSON, or a field is missing, has another type or is out of range.
        """
        return _from_wire(cls, text)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class VirtualLoader:
    """The ability of a training script to load more than files of its own topology through `elastic_trainer`.

    Attributes:
        manifests: versions of the manifest of virtual commits that its `elastic_trainer` reads; empty for none.
        memory_bytes: free memory for the files on rank 0's node at the time of the restore.
        formats: formats of commits that it accepts in any topology.
    """

    manifests: tuple[int, ...]
    memory_bytes: int
    formats: tuple[str, ...] = ()

    def to_json(self) -> str:
        """Encode as one line of JSON."""
        return json.dumps(dataclasses.asdict(self), separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str) -> VirtualLoader:
        """Decode the output of `to_json`; keys that this version does not know are ignored.

        Raises:
            ValueError: the text is not JSON, or a field is missing, has another type or is out of range.
        """
        return _from_wire(cls, text)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ReshardReport:
    """Report of a reshard pod: its termination message, at most 4096 bytes.

    Attributes:
        ok: the target is committed and verified.
        exit_code: an `ExitCode`.
        message: one sentence for the user; the error, if there was one.
        source: folder of the commit that was read.
        target: folder of the commit that was written; empty if a root that was taken over holds no commit.
        step: optimizer steps done in that commit.
        samples: global samples consumed in that commit.
        mode: `materialize` or `virtual`.
        mode_reason: reason for the mode, if `auto` chose it.
        bytes_read: bytes read from storage.
        bytes_written: bytes written to storage.
        num_files: target files.
        seconds: wall time of the conversion.
        peak_rss_bytes: largest resident set of any process of the command.
        num_tensors: logical tensors verified.
        digest: of all tensors, in hex (docs/verification.md); that of the source, unless names or types change.
        verified: the target was checked against the source.
        latest: file that names the target to its framework, if this run wrote it.
        witness: numbers of `tensors` and `samples` compared by name, and of tensors `not_witnessed`; empty for none.
        milliseconds: of each step of the run, and as `units.PHASE` of all its workers together (docs/profile.md).
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
    witness: Mapping[str, int] = dataclasses.field(default_factory=dict)
    milliseconds: Mapping[str, int] = dataclasses.field(default_factory=dict)
    contract_version: int = CONTRACT_VERSION

    def to_json(self) -> str:
        """Encode as one line of JSON that fits the 4096 bytes of a termination message; a long message is cut."""
        message = self.message
        while True:
            text = json.dumps(dataclasses.asdict(dataclasses.replace(self, message=message)), separators=(",", ":"))
            if len(text.encode()) <= TERMINATION_MESSAGE_LIMIT_BYTES or not message:
                return text
            message = message[: len(message) * 3 // 4]

    @classmethod
    def from_json(cls, text: str) -> ReshardReport:
        """Decode the output of `to_json`; keys that this version does not know are ignored.

        Raises:
            ValueError: the text is not JSON, or a field is missing, has another type or is out of range.
        """
        return _from_wire(cls, text)


TERMINATION_MESSAGE_LIMIT_BYTES = 4096
"""Largest termination message that Kubernetes keeps (core/v1, terminationMessagePath)."""


MAX_TEXT = 16_384
"""Longest JSON of one object of the contract, in characters; writers stay far below."""

MAX_URI = 4096
"""Longest folder, in characters (PATH_MAX)."""

MAX_COUNT = 10**15
"""Largest step and number of samples: sums of many of them still fit 64 bits."""

MAX_BYTES = 10**18
"""Largest number of bytes."""

MAX_ATTEMPT = 999_999_999
"""Largest attempt number, which has nine digits."""

MAX_SECONDS = 10**9
"""Longest duration."""


def _whole(path: str, value: object, most: int) -> int:
    """Return an integer in 0..most; booleans are refused."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise ValueError(f"{path}: expected an integer, found {_brief(value)}")
    if not 0 <= value <= most:
        raise ValueError(f"{path}: expected 0 to {most}, found {_brief(value)}")
    return value


def _number(path: str, value: object, most: float) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"{path}: expected a number, found {_brief(value)}")
    if not 0 <= value <= most:
        raise ValueError(f"{path}: expected 0 to {most}, found {_brief(value)}")
    return float(value)


def _flag(path: str, value: object) -> bool:
    if not isinstance(value, bool):
        raise ValueError(f"{path}: expected true or false, found {_brief(value)}")
    return value


def _text(path: str, value: object, most: int) -> str:
    """Return a string of at most `most` printable characters."""
    if not isinstance(value, str):
        raise ValueError(f"{path}: expected a string, found {_brief(value)}")
    if len(value) > most:
        raise ValueError(f"{path}: expected at most {most} characters, found {len(value)}")
    if not value.isprintable():
        raise ValueError(f"{path}: expected printable characters, found {_brief(value)}")
    return value


def _prose(path: str, value: object) -> str:
    """Return a text for users unchanged; whoever prints it passes it through `sentence`."""
    if not isinstance(value, str):
        raise ValueError(f"{path}: expected a string, found {_brief(value)}")
    return value


def _topology(path: str, value: object) -> dict[str, int]:
    """Return degrees of parallelism; `reshard.topology` checks whether the combination is possible."""
    if not isinstance(value, dict) or not 1 <= len(value) <= _MAX_DEGREES:
        raise ValueError(f"{path}: expected 1 to {_MAX_DEGREES} degrees of parallelism, found {_brief(value)}")
    return {_text(path, key, 16): _whole(f"{path}.{key[:16]}", item, _MAX_DEGREE) for key, item in value.items()}


def _counts(path: str, value: object) -> dict[str, int]:
    if not isinstance(value, dict) or len(value) > _MAX_VERSIONS:
        raise ValueError(f"{path}: expected an object of at most {_MAX_VERSIONS} numbers, found {_brief(value)}")
    return {_text(path, key, 64): _whole(f"{path}.{key[:16]}", item, MAX_COUNT) for key, item in value.items()}


def _items(path: str, value: object, read: Callable[[str, object], Any], what: str) -> tuple[Any, ...]:
    if not isinstance(value, list | tuple) or len(value) > _MAX_VERSIONS:
        raise ValueError(f"{path}: expected a list of at most {_MAX_VERSIONS} {what}, found {_brief(value)}")
    return tuple(read(f"{path}[{at}]", item) for at, item in enumerate(value))


_MAX_DEGREES, _MAX_DEGREE, _MAX_VERSIONS, _MAX_DIGITS = 16, 10**6, 32, 24

_Reader = Callable[[str, object], Any]
_READERS: Mapping[type, Mapping[str, _Reader]] = {
    CommitRef: {
        "uri": functools.partial(_text, most=MAX_URI),
        "step": functools.partial(_whole, most=MAX_COUNT),
        "samples": functools.partial(_whole, most=MAX_COUNT),
        "attempt": functools.partial(_whole, most=MAX_ATTEMPT),
        "topology": _topology,
        "num_bytes": functools.partial(_whole, most=MAX_BYTES),
        "format": functools.partial(_text, most=64),
    },
    VirtualLoader: {
        "manifests": functools.partial(_items, read=functools.partial(_whole, most=MAX_ATTEMPT), what="integers"),
        "memory_bytes": functools.partial(_whole, most=MAX_BYTES),
        "formats": functools.partial(_items, read=functools.partial(_text, most=64), what="formats"),
    },
    ReshardReport: {
        "ok": _flag,
        "exit_code": functools.partial(_whole, most=255),
        "message": _prose,
        "source": functools.partial(_text, most=MAX_URI),
        "target": functools.partial(_text, most=MAX_URI),
        "step": functools.partial(_whole, most=MAX_COUNT),
        "samples": functools.partial(_whole, most=MAX_COUNT),
        "mode": functools.partial(_text, most=32),
        "mode_reason": _prose,
        "bytes_read": functools.partial(_whole, most=MAX_BYTES),
        "bytes_written": functools.partial(_whole, most=MAX_BYTES),
        "num_files": functools.partial(_whole, most=MAX_COUNT),
        "seconds": functools.partial(_number, most=MAX_SECONDS),
        "peak_rss_bytes": functools.partial(_whole, most=MAX_BYTES),
        "num_tensors": functools.partial(_whole, most=MAX_COUNT),
        "digest": functools.partial(_text, most=128),
        "verified": _flag,
        "latest": functools.partial(_text, most=MAX_URI),
        "witness": _counts,
        "milliseconds": _counts,
        "contract_version": functools.partial(_whole, most=MAX_ATTEMPT),
    },
}
"""Reader of each field. A value that a pod wrote is accepted only if it has the expected type and range."""

_Wire = TypeVar("_Wire", CommitRef, VirtualLoader, ReshardReport)


def _from_wire(cls: type[_Wire], text: str) -> _Wire:
    value = parse_json(text)
    if not isinstance(value, dict):
        raise ValueError(f"expected a JSON object for {cls.__name__}, found {_brief(value)}")
    readers = _READERS[cls]
    try:
        return cls(**{name: read(name, value[name]) for name, read in readers.items() if name in value})
    except TypeError as error:
        raise ValueError(f"{cls.__name__}: {error}") from error


def parse_json(text: str) -> object:
    """Parse JSON of bounded length, depth and numbers.

    Raises:
        ValueError: the text is not JSON, or exceeds a bound.
    """
    if len(text) > MAX_TEXT:
        raise ValueError(f"expected at most {MAX_TEXT} characters of JSON, found {len(text)}")
    try:
        return json.loads(text, parse_int=_parse_int, parse_constant=_refuse)
    except RecursionError:
        raise ValueError("expected JSON of few levels, found too many") from None


def _parse_int(text: str) -> int:
    if len(text) > _MAX_DIGITS:
        raise ValueError(f"expected a number of at most {_MAX_DIGITS} digits, found {len(text)}")
    return int(text)


def _refuse(text: str) -> object:
    raise ValueError(f"expected JSON, which has no {text}")


def _brief(value: object) -> str:
    """Format a value for an error message: short, and printable in any terminal."""
    text = ascii(value)
    return text if len(text) <= 60 else f"{text[:60]}..."


def sentence(text: str, most: int = 512) -> str:
    """Convert a text to one line of printable characters of at most `most` bytes in UTF-8.

    A longer text is cut and ends in `...`.
    """
    line = " ".join(text[: 4 * most].replace("\nhint: ", "; hint: ").split())
    if not line.isprintable():
        line = " ".join("".join(char if char.isprintable() else " " for char in line).split())
    data = line.encode()
    return line if len(data) <= most else data[: most - 3].decode(errors="ignore") + "..."
