"""The job that a reshard pod works for, from the environment variables that the operator sets."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

from reshard.cli.output import write_report
from reshard.contract import Env, ExitCode, ReshardReport, TakeOver
from reshard.errors import ReshardError, UnsafePickleError
from reshard.storage.target_writer import target_errors

ALLOWED_GLOBALS = "spec.checkpoint.allowedGlobals"
"""Field of the job's resource that the operator passes on as `--allow-global`."""

_ATTEMPT = re.compile(r"a[0-9]+/")
"""Folder of an attempt. Only a source in such a folder shows that the job resumes its own run: see `claim_root`."""


def claim_checkpoint_root(source: Path, target: Path) -> str:
    """Claim the checkpoint root that the target lies in for the pod's job, and return the job's UID.

    Returns:
        The UID; empty if this process works for no job, or if the target is outside of the job's checkpoint root.

    Raises:
        NotOwnerError: the root belongs to another job.
        OSError: the claim cannot be read (StoreError) or written.
    """
    uid, root = os.environ.get(Env.JOB_UID, ""), Path(os.environ.get(Env.CHECKPOINT_ROOT, ""))
    if not uid or not root.is_absolute() or not target.is_relative_to(root):
        return ""
    from reshard.commits.root_owner import claim_root  # only reshard pods need this import

    claim_root(
        root,
        uid=uid,
        job=_job(),
        take_over=os.environ.get(Env.TAKE_OVER, "") == TakeOver.BEGIN,
        resumes=source.is_relative_to(root) and _ATTEMPT.match(source.relative_to(root).as_posix()) is not None,
    )
    return uid


def list_error_lines(error: ReshardError) -> list[str]:
    """Return the lines of an error; in a pod of a job, name the field of its spec instead of `--allow-global`.

    The field comes before the lines that a long report loses.
    """
    lines = error.lines()
    if not os.environ.get(Env.JOB):
        return lines
    first = lines[0].replace("--allow-global", ALLOWED_GLOBALS)
    to_allow = error.to_allow if isinstance(error, UnsafePickleError) else ()
    advice = f"if you know what these do, set {ALLOWED_GLOBALS}: [{', '.join(to_allow)}]"
    return [first, *([advice] if to_allow else []), *lines[1:]]


def take_over(source: str, target: Path) -> tuple[str, list[str]]:
    """Take the checkpoint root over if the pod's job asks for that, and the source is that root.

    Returns:
        The folder to convert: the commit from which the job goes on, or `source` if nothing is taken over; empty if the
        root holds no commit. And why newer commits are not taken.

    Raises:
        NotOwnerError: the root belongs to another job.
        SourceError: the root holds commits, but none to go on from; or it cannot be read now (StoreError).
        TargetError: the root cannot be read or written.
    """
    uid, root = os.environ.get(Env.JOB_UID, ""), os.environ.get(Env.CHECKPOINT_ROOT, "")
    if not uid or source != root or os.environ.get(Env.TAKE_OVER, "") != TakeOver.RESUME:
        return source, []
    from reshard.commits.takeover import take_root_over  # only reshard pods need this import

    with target_errors(target, 0):
        choice = take_root_over(Path(root), uid=uid, job=_job())
    skipped = [f"a newer commit is not taken: {why}" for why in choice.skipped]
    return (f"{root}/{choice.commit}" if choice.commit else ""), skipped


def report_nothing(path: str | None) -> tuple[dict[str, Any], list[str]]:
    """Write the report of a take-over of a root without a commit, and return it as a value and as lines."""
    message = "the folder holds no commit: the training begins from nothing"
    report = ReshardReport(ok=True, exit_code=ExitCode.OK, message=message, source=os.environ[Env.CHECKPOINT_ROOT])
    write_report(path, report)
    return json.loads(report.to_json()), [message]


def _job() -> str:
    return f"{os.environ.get(Env.NAMESPACE, '')}/{os.environ.get(Env.JOB, '')}"
