"""The job that a reshard pod works for, from the environment variables that the operator sets."""

from __future__ import annotations

import os
import re
from pathlib import Path

from reshard.contract import Env
from reshard.errors import ReshardError, UnsafePickleError

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
        OSError: the claim cannot be written.
    """
    uid, root = os.environ.get(Env.JOB_UID, ""), Path(os.environ.get(Env.CHECKPOINT_ROOT, ""))
    if not uid or not root.is_absolute() or not target.is_relative_to(root):
        return ""
    from reshard.commits.root_owner import claim_root  # only reshard pods need this import

    claim_root(
        root,
        uid=uid,
        job=f"{os.environ.get(Env.NAMESPACE, '')}/{os.environ.get(Env.JOB, '')}",
        take_over=os.environ.get(Env.TAKE_OVER, "") == "true",
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
