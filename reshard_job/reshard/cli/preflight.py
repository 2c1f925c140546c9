"""What a run would come to at its target, without beginning it."""

from __future__ import annotations

import os
from pathlib import Path

from reshard import api
from reshard.commits.commit import VIRTUAL
from reshard.commits.staging import above, check_free, forbidden
from reshard.errors import ReshardError
from reshard.execution.origin import check_origin, check_unread_origin
from reshard.planning.plan import Plan
from reshard.virtual import conversion


def refusal(wanted: api.Conversion, plan: Plan, mode: str) -> ReshardError | None:
    """The error that a run would end with before it moves a byte, or None."""
    try:
        if not is_done(wanted, plan, mode):
            _check_room(wanted.target, 0 if mode == VIRTUAL else plan.bytes_to_write)
    except ReshardError as error:
        return error
    return None


def is_done(wanted: api.Conversion, plan: Plan, mode: str) -> bool:
    """The target is this conversion's result already: a run would change nothing.

    Raises:
        TargetTakenError: it is something else.
        SourceChangedError: it was made of what the source was before.
        UnsupportedError: `virtual` cannot make it.
    """
    if mode != VIRTUAL:
        done = api.already_done(wanted, plan)
        if done is not None:
            check_origin(done, plan, wanted.target)
        return done is not None
    conversion.ranks_of(plan)
    prepared = conversion.already_done(conversion.settled(wanted, plan))
    if prepared is not None:
        check_unread_origin(prepared, plan.index, wanted.target)
    return prepared is not None


def _check_room(target: Path, num_bytes: int) -> None:
    """The folder can be made, and the result fits.

    Raises:
        TargetError: no permission, or the file system is read-only.
        StorageFullError: not enough space.
    """
    folder = above(target)
    if not os.access(folder, os.W_OK | os.X_OK, effective_ids=True):
        raise forbidden(folder)
    check_free(folder, num_bytes)
