"""The history of commits: which are known, which is used, which is not to be trusted, which may be removed."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Collection, Iterable, Mapping

from elastic_operator.api.status import (
    MAX_COMMITS,
    Checkpoint,
    Commit,
    Current,
    Resume,
    Status,
    short,
    with_newest,
)
from elastic_operator.manifests.attempt import commit_uri, start_uri
from reshard.contract import COMMIT_NAME, MAX_RELEASED, sentence
from reshard.topology import Topology

KEPT_VALID = 3
"""Newest valid commits that are never released: what is left if the newest turn out to be damaged."""

KEPT_INVALID = 2
"""Newest damaged commits that are not released, for whoever wants to know what happened to them."""


def add(checkpoint: Checkpoint, commit: Commit) -> Checkpoint:
    """Record a commit, once. The history is ordered by step, then by attempt, newest first.

    Of two commits of one step and attempt the one that is told later is the newer one.
    """
    if any(known.uri == commit.uri for known in checkpoint.history) or name_of(commit.uri) in checkpoint.released:
        return checkpoint
    ordered = sorted([commit, *checkpoint.history], key=lambda item: (item.step, item.attempt), reverse=True)
    return with_newest(dataclasses.replace(checkpoint, history=tuple(ordered)))


def release(checkpoint: Checkpoint, *, needed: Collection[str], read_by_others: bool = False) -> Checkpoint:
    """Release the commits that nothing refers to: they leave the history and may be removed from storage.

    Args:
        checkpoint: the history.
        needed: URIs that stay in any case: what the current attempt resumes from or is converted from.
        read_by_others: a start of another job reads in this job's folder: nothing is released until it is done.
    """
    valid = [item.uri for item in checkpoint.history if not item.invalid]
    invalid = [item.uri for item in checkpoint.history if item.invalid]
    kept = {*valid[:KEPT_VALID], *invalid[:KEPT_INVALID], *needed}
    history = tuple(item for item in checkpoint.history if read_by_others or item.uri in kept)
    names = [name_of(item.uri) for item in reversed(checkpoint.history) if item not in history]
    released = (*checkpoint.released, *(name for name in names if name))
    return dataclasses.replace(checkpoint, history=history[:MAX_COMMITS], released=released[-MAX_RELEASED:])


def needed(status: Status) -> frozenset[str]:
    """URIs of commits that the current attempt refers to, and of the newest one that it wrote."""
    resume = status.current.resume if status.current is not None else Resume()
    own = next((item.uri for item in status.checkpoint.history if item.attempt == status.attempt), "")
    return frozenset(uri for uri in (resume.uri, resume.source, own) if uri)


def forget_removed(checkpoint: Checkpoint, names: Collection[str]) -> Checkpoint:
    """Forget released commits that are not on the storage any more."""
    return dataclasses.replace(checkpoint, released=tuple(name for name in checkpoint.released if name not in names))


def released_text(names: Collection[str]) -> str:
    """Return the value of the annotation LeaseKey.RELEASED."""
    return json.dumps(list(names), separators=(",", ":"))


def name_of(uri: str) -> str:
    """Return the last two parts of a commit's folder (`a2/step-00000005`), empty where they are not of that form.

    These are its name below the checkpoint root, wherever the volume is mounted.
    """
    name = "/".join(uri.split("/")[-2:])
    return name if COMMIT_NAME.fullmatch(name) else ""


def is_read_by(starts: Iterable[tuple[str, str]], claim: str, path: str) -> bool:
    """Return whether any start from a folder (claim and path inside it) reads in a job's checkpoint root."""
    root = f"{path}/" if path else ""
    return any(
        claim == other and (f"{start}/".startswith(root) or root.startswith(f"{start}/")) for other, start in starts
    )


def invalidate(checkpoint: Checkpoint, uri: str, reason: str) -> Checkpoint:
    """Never use a commit again."""
    history = tuple(
        dataclasses.replace(item, invalid=True, invalid_reason=sentence(reason)) if item.uri == uri else item
        for item in checkpoint.history
    )
    return with_newest(dataclasses.replace(checkpoint, history=history))


def newest(checkpoint: Checkpoint, *, below: int) -> Commit | None:
    """The newest valid commit of an attempt below `below`."""
    valid = (item for item in checkpoint.history if not item.invalid and item.attempt < below)
    return next(valid, None)


def virtual_was_refused(checkpoint: Checkpoint, *, step: int) -> bool:
    """A conversion of this step could not be loaded: the next one is to write files, which proves the source or not."""
    return any(item.invalid and item.writer == "reshard" and item.step == step for item in checkpoint.history)


def is_virtual(checkpoint: Checkpoint, current: Current) -> bool:
    """The attempt resumes from a conversion that moved no bytes: those alone are not compared with their source."""
    found = (item for item in checkpoint.history if item.uri == current.resume.uri)
    return any(item.writer == "reshard" and not item.verified for item in found)


def choose_resume(
    checkpoint: Checkpoint, *, attempt: int, topology: Mapping[str, int], root: str, start: str = "", mark: str = ""
) -> Resume:
    """What `attempt` continues from in `topology`.

    Args:
        root: folder of the job's checkpoints.
        start: folder to go on from where the job has no commit of its own, empty for none.
        mark: at the end of the names of converted commits, where another job may have used the plain ones.
    """
    commit = newest(checkpoint, below=attempt)
    if commit is None:
        invalid = sum(item.invalid for item in checkpoint.history)
        reason = f"all {invalid} known commits are invalid" if invalid else "there is no commit yet"
        if start:
            # Always a copy, also where the layout fits: what others wrote has no checksums, and they may remove it.
            return Resume(
                uri=start_uri(root, attempt, mark),
                source=start,
                ready=False,
                external=True,
                reason=f"{reason}: {start} (spec.checkpoint.startFrom), resharded to {short(topology)}",
            )
        return Resume(reason=f"{reason}: training starts from nothing")
    same = Topology.from_dict(commit.topology) == Topology.from_dict(topology)
    what = f"step {commit.step} of attempt {commit.attempt} ({short(commit.topology)})"
    return Resume(
        uri=commit.uri if same else commit_uri(root, attempt, commit.step, mark),
        source=commit.uri,
        step=commit.step,
        samples=commit.samples,
        ready=same,
        reason=f"{what}, as it is" if same else f"{what}, resharded to {short(topology)}",
    )
