"""The history of commits: which are known, which is used, which is not to be trusted."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from elastic_operator.manifests import commit_uri, start_uri
from elastic_operator.status import MAX_COMMITS, Checkpoint, Commit, Current, Resume, short
from reshard.topology import Topology


def add(checkpoint: Checkpoint, commit: Commit) -> Checkpoint:
    """Record a commit, once. The history is ordered by step, then by attempt, newest first."""
    if any(known.uri == commit.uri for known in checkpoint.history):
        return checkpoint
    ordered = sorted([*checkpoint.history, commit], key=lambda item: (item.step, item.attempt), reverse=True)
    return _with_newest(dataclasses.replace(checkpoint, history=tuple(ordered[:MAX_COMMITS])))


def invalidate(checkpoint: Checkpoint, uri: str, reason: str) -> Checkpoint:
    """Never use a commit again."""
    history = tuple(
        dataclasses.replace(item, invalid=True, invalid_reason=reason[:512]) if item.uri == uri else item
        for item in checkpoint.history
    )
    return _with_newest(dataclasses.replace(checkpoint, history=history))


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
    checkpoint: Checkpoint, *, attempt: int, topology: Mapping[str, int], root: str, start: str = ""
) -> Resume:
    """What `attempt` continues from in `topology`.

    Args:
        root: folder of the job's checkpoints.
        start: folder to go on from where the job has no commit of its own, empty for none.
    """
    commit = newest(checkpoint, below=attempt)
    if commit is None:
        invalid = sum(item.invalid for item in checkpoint.history)
        reason = f"all {invalid} known commits are invalid" if invalid else "there is no commit yet"
        if start:
            # Always a copy, also where the layout fits: what others wrote has no checksums, and they may remove it.
            return Resume(
                uri=start_uri(root, attempt),
                source=start,
                ready=False,
                external=True,
                reason=f"{reason}: {start} (spec.checkpoint.startFrom), resharded to {short(topology)}",
            )
        return Resume(reason=f"{reason}: training starts from nothing")
    same = Topology.from_dict(commit.topology) == Topology.from_dict(topology)
    what = f"step {commit.step} of attempt {commit.attempt} ({short(commit.topology)})"
    return Resume(
        uri=commit.uri if same else commit_uri(root, attempt, commit.step),
        source=commit.uri,
        step=commit.step,
        samples=commit.samples,
        ready=same,
        reason=f"{what}, as it is" if same else f"{what}, resharded to {short(topology)}",
    )


def _with_newest(checkpoint: Checkpoint) -> Checkpoint:
    best = next((item for item in checkpoint.history if not item.invalid), None)
    if best is None:
        return Checkpoint(history=checkpoint.history)
    return Checkpoint(
        uri=best.uri,
        step=best.step,
        samples=best.samples,
        attempt=best.attempt,
        topology=best.topology,
        verified=best.verified,
        history=checkpoint.history,
    )
