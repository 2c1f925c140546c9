"""Check the target of a run without starting it."""

from __future__ import annotations

import os
from pathlib import Path

from reshard import api
from reshard.commits.commit import VIRTUAL
from reshard.commits.staging import check_free, nearest_folder, no_permission_error
from reshard.errors import ReshardError
from reshard.execution.origin import check_origin, check_unread_origin
from reshard.planning.plan import Plan
from reshard.target import find_commit
from reshard.virtual import conversion as virtual_conversion


def find_refusal(conversion: api.Conversion, plan: Plan, mode: str) -> ReshardError | None:
    """Return the error that a run would end with before it moves a byte, or None."""
    try:
        if not is_done(conversion, plan, mode):
            _check_room(conversion.target, 0 if mode == VIRTUAL else plan.bytes_to_write)
    except ReshardError as error:
        return error
    return None


def is_done(conversion: api.Conversion, plan: Plan, mode: str) -> bool:
    """Return True if the target is this conversion's result already, so that a run would change nothing.

    Raises:
        TargetTakenError: the target holds something else.
        SourceChangedError: the target holds the result of what the source was before.
        UnsupportedError: `virtual` cannot make it.
    """
    if mode != VIRTUAL:
        commit = find_commit(conversion, plan)
        if commit is not None:
            check_origin(commit, plan, conversion.target)
        return commit is not None
    virtual_conversion.ranks_of(plan)
    commit = virtual_conversion.find_commit(virtual_conversion.with_topology_of(plan, conversion))
    if commit is not None:
        check_unread_origin(commit, plan.index, conversion.target)
    return commit is not None


def _check_room(target: Path, num_bytes: int) -> None:
    """Check that the folder can be made and that the result fits.

    Raises:
        TargetError: no permission, or the file system is read-only.
        StorageFullError: not enough space.
    """
    folder = nearest_folder(target)
    if not os.access(folder, os.W_OK | os.X_OK, effective_ids=True):
        raise no_permission_error(folder)
    check_free(folder, num_bytes)
