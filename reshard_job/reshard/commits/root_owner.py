"""OWNER.json: the file that names the job to which a checkpoint root belongs.

Attempt numbers are unique within one job only. Two jobs that write below one root would use the same folder names, and
so would a job that was deleted and created again. So the first writer claims the root with its UID, every writer checks
the claim before it publishes, and a writer with another UID stops. docs/checkpoint-format.md is normative.
"""

from __future__ import annotations

import dataclasses
import datetime
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from reshard.contract import COMMIT_FILE, OWNER_FILE
from reshard.errors import NotOwnerError, make_read_error
from reshard.storage.durable import create_file, make_folder, read_file, replace_file

_VERSION = 1
_MAX_BYTES = 64 << 10
_MAX_TEXT = 512
_MAX_PREVIOUS = 64
_UNKNOWN = "unknown"
_OF_ANOTHER = (
    "delete this job and create it with another spec.checkpoint.path, and with startFrom to go on from a checkpoint"
    " here; or set spec.checkpoint.takeOver and retry: Resume goes on from the newest commit here, Begin begins from"
    " nothing; both write beside the other job's commits, which stay as they are"
)
_OF_FORMER = "it cannot be taken back: delete this job and create it with another spec.checkpoint.path"
_WITHOUT_JOB = "choose another ETJ_CHECKPOINT_ROOT"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Owner:
    """Content of OWNER.json.

    Attributes:
        uid: UID of the ElasticTrainingJob.
        job: `namespace/name` of the job, for display only.
        since: RFC 3339 time of the claim.
        previous: UIDs of earlier owners, oldest first. None of them may take the root over again.
    """

    uid: str
    job: str = ""
    since: str = ""
    previous: tuple[str, ...] = ()


def read_owner(root: Path) -> Owner | None:
    """Read OWNER.json of a checkpoint root; return None if there is none.

    Raises:
        NotOwnerError: the content of OWNER.json makes no sense, so the owner of the root is not known.
        StoreError: OWNER.json cannot be read now.
    """
    path = root / OWNER_FILE
    try:
        content = read_file(path, _MAX_BYTES)
        return None if content is None else _parse(json.loads(content))
    except OSError as error:
        raise make_read_error(error, str(path), is_indexed=False) from error
    except (ValueError, RecursionError) as error:
        raise NotOwnerError(
            f"cannot be read: {error!s:.200}",
            path=str(path),
            hint="if no other job writes here, remove the file: the next attempt claims the folder again",
        ) from error


def claim_root(root: Path, *, uid: str, job: str = "", take_over: bool = False, resumes: bool = False) -> Owner | None:
    """Claim a checkpoint root for a job, or check that the job owns it already; return the owner, or None.

    Args:
        root: folder of all attempts' checkpoints; it is made if it is missing and `uid` is given.
        uid: UID of the job. It is empty without a cluster: then nothing is written, and the root must have no owner.
        job: `namespace/name` of the job.
        take_over: replace another owner, or claim a root that holds commits of an unknown owner.
        resumes: the job resumes from a commit below `root`, so commits of an unknown owner are its own.

    Raises:
        NotOwnerError: the root belongs to another job.
        OSError: the claim cannot be read (StoreError) or written.
    """
    owner = read_owner(root)
    if owner is not None and owner.uid == uid:
        return owner
    if not uid:
        if owner is not None:
            raise _refusal(root, owner, "no job: ETJ_JOB_UID is not set", _WITHOUT_JOB)
        return None
    claim = Owner(uid=uid, job=job, since=_now())
    if owner is None:
        if not (take_over or resumes) and next(root.glob(f"a*/step-*/{COMMIT_FILE}"), None) is not None:
            raise _refusal(root, None, f"job {job} (UID {uid})", _OF_ANOTHER)
        make_folder(root)
        if take_over:  # commits here may be another job's: with a previous owner, this job uses other folder names
            claim = dataclasses.replace(claim, previous=(_UNKNOWN,))
        if not _create(root / OWNER_FILE, claim):  # another writer was faster
            return claim_root(root, uid=uid, job=job, take_over=take_over, resumes=resumes)
        return claim
    if uid in owner.previous:
        raise _refusal(root, owner, f"job {job} (UID {uid}), from which that job has taken it over", _OF_FORMER)
    if not take_over:
        raise _refusal(root, owner, f"job {job} (UID {uid})", _OF_ANOTHER)
    claim = dataclasses.replace(claim, previous=(*owner.previous, owner.uid)[-_MAX_PREVIOUS:])
    replace_file(root / OWNER_FILE, _content(claim))
    return claim


def _refusal(root: Path, owner: Owner | None, who: str, hint: str) -> NotOwnerError:
    if owner is None:
        whose = f"holds commits of an unknown job, and {who} has not written here before"
    else:
        whose = f"belongs to job {owner.job or '(unnamed)'} (UID {owner.uid}), expected {who}"
    return NotOwnerError(f"{whose}; nothing of it was changed", path=str(root), hint=hint)


def _create(path: Path, owner: Owner) -> bool:
    """Create OWNER.json with its whole content; return False if it exists."""
    return create_file(path, _content(owner))


def _content(owner: Owner) -> bytes:
    value = {"version": _VERSION, **dataclasses.asdict(owner)}
    return (json.dumps(value, indent=1) + "\n").encode()


def _parse(value: Any) -> Owner:
    if not isinstance(value, dict) or value.get("version") != _VERSION:
        raise ValueError(f"expected an object of version {_VERSION}, found {value!r:.100}")
    uid = _text(value, "uid")
    if not uid:
        raise ValueError("uid is empty")
    previous = value.get("previous", [])
    if not isinstance(previous, list) or len(previous) > _MAX_PREVIOUS:
        raise ValueError(f"previous is no list of at most {_MAX_PREVIOUS} UIDs")
    return Owner(
        uid=uid,
        job=_text(value, "job"),
        since=_text(value, "since"),
        previous=tuple(_text({"previous": item}, "previous") for item in previous),
    )


def _text(value: Mapping[str, Any], key: str) -> str:
    text = value.get(key, "")
    if not isinstance(text, str) or len(text) > _MAX_TEXT or not text.isprintable():
        raise ValueError(f"{key} is {text!r:.100}, expected at most {_MAX_TEXT} printable characters")
    return text


def _now() -> str:
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds").replace("+00:00", "Z")
