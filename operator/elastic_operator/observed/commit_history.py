"""The history of commits: add, invalidate and release commits, and choose the one to resume from."""

from __future__ import annotations

import dataclasses
import itertools
import json
import re
from collections.abc import Collection

from elastic_operator.api.claim_path import BEGINNING
from elastic_operator.api.status import (
    MAX_WITHHELD,
    Checkpoint,
    Commit,
    Current,
    Resume,
    StartMode,
    Status,
    short,
    with_newest,
)
from elastic_operator.manifests.attempt import commit_uri, start_uri
from elastic_operator.observed.pending_starts import Protection, find_held
from reshard.contract import COMMIT_NAME, MAX_RELEASED, sentence
from reshard.topology import Topology

KEPT_VALID = 3
"""Number of newest valid commits that are never released, so that a fallback exists if the newest one is damaged."""

KEPT_INVALID = 2
"""Number of newest refused commits that are not released, so that an administrator can examine them; as many that
`spec.checkpoint.resumeFrom` has put aside. Without a valid commit all stay, so that each can be named.
"""

COMPARED_CHARACTERS = 400
"""Length in which reasons of refusals are compared: a longer reason was cut, where its commit's name decides."""


def add(checkpoint: Checkpoint, commit: Commit) -> Checkpoint:
    """Record a commit unless it is known. The history is ordered by step, then by attempt, newest first.

    If a new commit has the same step and attempt as a recorded one, the new commit comes first.
    """
    if any(known.uri == commit.uri for known in checkpoint.history) or parse_commit_name(commit.uri) in (
        *checkpoint.released,
        *checkpoint.withheld,
    ):
        return checkpoint
    ordered = sorted([commit, *checkpoint.history], key=lambda item: (item.step, item.attempt), reverse=True)
    return with_newest(dataclasses.replace(checkpoint, history=tuple(ordered)))


def release(
    checkpoint: Checkpoint,
    *,
    needed: Collection[str],
    read_by_others: bool = False,
    awaited: Collection[str] = (),
    pinned: Collection[str] = (),
) -> Checkpoint:
    """Take the commits that nothing refers to out of the history, and list them for deletion from storage.

    A commit that another job may still read is withheld first, and so is one for which the list has no room.

    Args:
        checkpoint: the history.
        needed: URIs that are kept in any case: the commit that the current attempt resumes from or is converted from.
        read_by_others: True if another job may read this job's folder; then nothing is released.
        awaited: folders, relative to the checkpoint root, from which jobs that wait will start.
        pinned: names of commits that the user has pinned.
    """
    valid = [item.uri for item in checkpoint.history if not item.invalid]
    refused = [item.uri for item in checkpoint.history if item.invalid and not item.put_aside]
    aside = [item.uri for item in checkpoint.history if item.put_aside]
    most_invalid = KEPT_INVALID if valid else len(checkpoint.history)
    kept = {*valid[:KEPT_VALID], *refused[:most_invalid], *aside[:most_invalid], *needed}
    history = tuple(item for item in checkpoint.history if item.uri in kept)
    names = [parse_commit_name(item.uri) for item in reversed(checkpoint.history) if item.uri not in kept]
    superseded = [*checkpoint.withheld, *(name for name in names if name)]
    checkpoint = dataclasses.replace(checkpoint, history=history, withheld=tuple(superseded))
    protection = Protection(is_read=read_by_others, folders=frozenset(awaited), pinned=frozenset(pinned))
    held = find_withheld(checkpoint, protection)
    free = [name for name in superseded if name not in held]
    released = list(checkpoint.released)
    # A commit that cannot be removed must not keep the others from their turn: with each new one, the oldest goes last.
    excess = max(0, len(released) + len(free) - MAX_RELEASED)
    again = [name for name in released if name not in held][: min(len(names), excess)]
    released = [name for name in released if name not in again]
    turn = [*free, *again][: MAX_RELEASED - len(released)]
    withheld = [name for name in (*superseded, *again) if name not in turn]
    return dataclasses.replace(checkpoint, released=(*released, *turn), withheld=tuple(withheld[-MAX_WITHHELD:]))


def find_withheld(checkpoint: Checkpoint, protection: Protection) -> frozenset[str]:
    """Return the names of commits outside the history that must stay for other jobs or are pinned."""
    history = {parse_commit_name(item.uri) for item in checkpoint.history}
    return find_held(protection, history, (*checkpoint.released, *checkpoint.withheld))


def find_needed(status: Status) -> frozenset[str]:
    """Return the URIs of commits that the current attempt refers to, and of the newest commit that it wrote."""
    resume = status.current.resume if status.current is not None else Resume()
    own = next((item.uri for item in status.checkpoint.history if item.attempt == status.attempt), "")
    return frozenset(uri for uri in (resume.uri, resume.source, own) if uri)


def forget_removed(checkpoint: Checkpoint, names: Collection[str]) -> Checkpoint:
    """Drop commits that were removed from storage."""
    released, withheld = (
        tuple(name for name in listed if name not in names) for listed in (checkpoint.released, checkpoint.withheld)
    )
    return dataclasses.replace(checkpoint, released=released, withheld=withheld)


def format_released(names: Collection[str]) -> str:
    """Return the value of the annotation LeaseKey.RELEASED."""
    return json.dumps(list(names), separators=(",", ":"))


def parse_commit_name(uri: str) -> str:
    """Return the last two parts of a commit's folder (`a2/step-00000005`), empty if they have another form.

    These parts name the commit below the checkpoint root, wherever the volume is mounted.
    """
    name = "/".join(uri.split("/")[-2:])
    return name if COMMIT_NAME.fullmatch(name) else ""


def invalidate(checkpoint: Checkpoint, uri: str, reason: str) -> Checkpoint:
    """Mark a commit invalid, so that no attempt resumes from it."""
    history = tuple(
        dataclasses.replace(item, invalid=True, invalid_reason=sentence(reason)) if item.uri == uri else item
        for item in checkpoint.history
    )
    return with_newest(dataclasses.replace(checkpoint, history=history))


def find_named(checkpoint: Checkpoint, name: str) -> Commit | None:
    """Return the commit of the history with this name (`a2/step-00000005`), or None."""
    return next((item for item in checkpoint.history if parse_commit_name(item.uri) == name), None)


def resume_from(checkpoint: Checkpoint, commit: Commit | None) -> Checkpoint:
    """Put all newer commits aside, so that the next attempt resumes from `commit`; all of them if it is None.

    A commit that was refused is valid again, for one try.
    """
    position = checkpoint.history.index(commit) if commit is not None else len(checkpoint.history)
    aside = tuple(
        dataclasses.replace(
            item, invalid=True, put_aside=True, invalid_reason=item.invalid_reason or "put aside by a user"
        )
        for item in checkpoint.history[:position]
    )
    chosen = checkpoint.history[position : position + 1]
    valid = tuple(dataclasses.replace(item, invalid=False, put_aside=False, invalid_reason="") for item in chosen)
    return with_newest(dataclasses.replace(checkpoint, history=(*aside, *valid, *checkpoint.history[position + 1 :])))


def is_own(status: Status, commit: Commit) -> bool:
    """Return whether a commit holds steps of the job, and is no copy of `spec.checkpoint.startFrom`."""
    return commit.writer != "reshard" or status.started_from is None or commit.step > status.started_from.step


def has_own_commit(status: Status) -> bool:
    """Return whether an own commit was ever acknowledged, unless a user has put all of them aside.

    Without a history, the rest of the status may still tell of a commit. What is older than an attempt that began from
    nothing because a user said so is put aside, too.
    """
    checkpoint, choice = status.checkpoint, status.resume_choice
    if checkpoint.history:
        return any(is_own(status, item) and not item.put_aside for item in checkpoint.history)
    begun = choice.attempt if choice is not None and choice.value == BEGINNING else 0
    first = status.started_from.step if status.started_from is not None else 0
    names = (name.partition("/")[0] for name in (*checkpoint.released, *checkpoint.withheld))
    return any(not name[1:].isdigit() or int(name[1:]) >= begun for name in names) or any(
        item.commit_step > first and item.from_attempt >= begun for item in status.changes
    )


def find_refused_alike(checkpoint: Checkpoint) -> str:
    """Return the reason for which two of the newest commits were refused alike; empty if there is none.

    Damage differs from commit to commit. One reason for two of them is one of the program that reads them.
    """
    newest = [*itertools.takewhile(lambda item: item.invalid, checkpoint.history)]
    alike = [_without_own_name(item) for item in newest]
    repeated = (
        item.invalid_reason
        for item, text in zip(newest, alike, strict=True)
        if text and not item.put_aside and alike.count(text) > 1
    )
    return next(repeated, "")


def _without_own_name(commit: Commit) -> str:
    """Return why a commit was refused, without what names the commit itself."""
    text, name = commit.invalid_reason, "/".join(commit.uri.split("/")[-2:])
    for own in (commit.uri, name, name.partition("/")[2]):
        text = text.replace(own, "COMMIT") if own else text
    text = re.sub(rf"(step|attempt)([ -]?)0*({commit.step}|{commit.attempt})\b", r"\1\2N", text)
    return text[:COMPARED_CHARACTERS]


def find_newest(checkpoint: Checkpoint, *, below: int) -> Commit | None:
    """Return the newest valid commit of an attempt below `below`, or None."""
    valid = (item for item in checkpoint.history if not item.invalid and item.attempt < below)
    return next(valid, None)


def is_conversion_refused(checkpoint: Checkpoint, *, step: int) -> bool:
    """Return whether a converted commit of this step could not be loaded.

    The next conversion then writes files, which shows whether the source is readable.
    """
    return any(item.invalid and item.writer == "reshard" and item.step == step for item in checkpoint.history)


def is_virtual(checkpoint: Checkpoint, current: Current) -> bool:
    """Return whether the attempt resumes from a virtual commit.

    A virtual commit moves no bytes, so it is the only conversion that is not verified against its source.
    """
    commits = (item for item in checkpoint.history if item.uri == current.resume.uri)
    return any(item.writer == "reshard" and not item.verified for item in commits)


def choose_resume(
    checkpoint: Checkpoint,
    *,
    attempt: int,
    topology: Topology,
    root: str,
    start: str = "",
    field: str = "",
    mark: str = "",
) -> Resume:
    """Choose the commit that `attempt` resumes from in `topology`.

    Args:
        checkpoint: the history of commits.
        attempt: number of the attempt that is planned.
        topology: degrees of parallelism of that attempt.
        root: folder of the job's checkpoints.
        start: folder to start from if the job has no commit of its own, empty for none.
        field: path of the field that says so.
        mark: suffix for the names of converted commits, if another job may have used the plain names.
    """
    commit = find_newest(checkpoint, below=attempt)
    if commit is None:
        invalid = sum(item.invalid for item in checkpoint.history)
        reason = f"all {invalid} known commits are invalid" if invalid else "there is no commit yet"
        if any(item.put_aside for item in checkpoint.history):
            reason = "spec.checkpoint.resumeFrom is Beginning"
        if start:
            # Convert even if the layout fits: a foreign checkpoint has no checksums, and its owner may remove it.
            return Resume(
                uri=start_uri(root, attempt, mark),
                source=start,
                ready=False,
                external=True,
                mode=StartMode.RESHARD,
                reason=f"{reason}: {start} ({field}), resharded to {short(topology)}",
            )
        return Resume(reason=f"{reason}: training starts from nothing")
    is_same_layout = commit.topology == topology
    description = f"step {commit.step} of attempt {commit.attempt} ({short(commit.topology)})"
    return Resume(
        uri=commit.uri if is_same_layout else commit_uri(root, attempt, commit.step, mark),
        source=commit.uri,
        step=commit.step,
        samples=commit.samples,
        ready=is_same_layout,
        mode=StartMode.AS_IS if is_same_layout else StartMode.RESHARD,
        reason=f"{description}, as it is" if is_same_layout else f"{description}, resharded to {short(topology)}",
    )
