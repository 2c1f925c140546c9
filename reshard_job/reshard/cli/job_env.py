"""The job that a reshard pod works for, from the environment variables that the operator sets."""

from __future__ import annotations

import os
import re
from pathlib import Path

from reshard.contract import Env

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
