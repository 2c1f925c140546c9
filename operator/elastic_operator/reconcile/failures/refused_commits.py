"""Commits that were refused, and the user's word about them (`spec.checkpoint.resumeFrom`).

While a commit was ever acknowledged, only that word lets a job begin from nothing. A single damaged commit is passed
over. If all are refused, or two alike, the job stops and asks.
"""

from __future__ import annotations

import dataclasses

from elastic_operator.api.claim_path import BEGINNING
from elastic_operator.api.conditions import Type
from elastic_operator.api.status import Commit, Phase, ResumeChoice, Status, short
from elastic_operator.manifests.attempt import start_field
from elastic_operator.observed import commit_history
from elastic_operator.reconcile.context import Context
from reshard.contract import sentence

COMMITS_REFUSED = "CommitsRefused"
"""Reason of a job that has Failed because no commit can be used without a word of the user."""

COMMIT_UNKNOWN = "CommitUnknown"
"""Reason of a job that has Failed because that word names a commit that the history does not hold."""

ASKING = (COMMITS_REFUSED, COMMIT_UNKNOWN)

_REASON_BYTES = 200


def is_choice_open(status: Status) -> bool:
    """Return whether the word has not been used, and the training has committed nothing since it was said."""
    choice = status.resume_choice
    return choice is not None and not choice.attempt and _find_last(status) <= (choice.after_attempt, choice.after_step)


def note_choice(context: Context, status: Status) -> Status:
    """Record a new word, and the newest commit at that time; forget a word that was taken back.

    A word that comes while an attempt runs never acts on a commit of the job.
    """
    value, choice = context.spec.checkpoint.resume_from, status.resume_choice
    if value == (choice.value if choice is not None else ""):
        return status
    if not value:
        return dataclasses.replace(status, resume_choice=None)
    attempt, step = _find_last(status)
    if status.launched and not status.terminal:
        attempt, step = 0, 0  # so that a status that has lost a used word does not use it again
        text = f"spec.checkpoint.resumeFrom is {value}, but attempt {status.attempt} runs: it does not act"
        advice = f"to go back, empty the field, then kubectl etj suspend {context.job.name}, set it, and resume"
        context.emit("ResumeFromIgnored", f"{text}; {advice}", warning=True)
    choice = ResumeChoice(value=value, after_attempt=attempt, after_step=step)
    return dataclasses.replace(status, resume_choice=choice)


def follow_choice(context: Context, status: Status) -> Status:
    """Prepare the history for the next plan by an open word; else stop the job if no commit can be used without one."""
    choice = status.resume_choice
    if choice is None or not is_choice_open(status):
        problem = find_problem(status)
        return stop(context, status, COMMITS_REFUSED, problem) if problem else status
    commit = commit_history.find_named(status.checkpoint, choice.value)
    if commit is None and choice.value != BEGINNING:
        problem = f"spec.checkpoint.resumeFrom names {choice.value}, which status.checkpoint.history does not hold"
        return stop(context, status, COMMIT_UNKNOWN, problem)
    attempt = status.attempt + 1
    if status.checkpoint.history:
        text = f"attempt {attempt} starts from {choice.value}, as spec.checkpoint.resumeFrom says, which is used now"
        context.emit("ResumeFromUsed", f"{text} and acts no more: the field can be emptied")
    return dataclasses.replace(
        status,
        checkpoint=commit_history.resume_from(status.checkpoint, commit),
        resume_choice=dataclasses.replace(choice, attempt=attempt),
        pinned=None,
        pin=None,
    )


def find_problem(status: Status) -> str:
    """Return why a word of the user is needed; empty if a commit can be used, or if there never was one of the job."""
    has_own = commit_history.has_own_commit(status)
    if alike := commit_history.find_refused_alike(status.checkpoint):
        text = "two copies of the checkpoint that the job starts from were refused alike"
        text = "two commits were refused alike, so they are not damaged" if has_own else text
        return f"{text} ({sentence(alike, _REASON_BYTES)})"
    if not has_own:
        return ""
    newest = commit_history.find_newest(status.checkpoint, below=status.attempt + 1)
    if newest is not None and commit_history.is_own(status, newest):
        return ""
    return "every commit of the job was refused" if status.checkpoint.history else "the status holds no commit any more"


def stop_unloadable(context: Context, status: Status) -> Status:
    """Stop a job whose commit can be neither converted nor loaded in its own topology, which the spec excludes."""
    why = status.reshard.message if status.reshard is not None else ""
    problem = f"the newest commit cannot be converted ({sentence(why, _REASON_BYTES)}), and its topology "
    problem += f"{short(status.pinned)} cannot run as the spec is: permit it, then kubectl etj retry {context.job.name}"
    return stop(context, status, COMMITS_REFUSED, problem)


def stop(context: Context, status: Status, reason: str, problem: str) -> Status:
    """End a job that only a word of the user lets go on; the message says which words there are."""
    message = f"{problem}; no attempt begins from nothing by itself. {_describe_words(context, status)}"
    context.emit(reason, message, warning=True)
    conditions = context.add_condition(
        status,
        Type.RESUMED,
        False,
        reason=reason,
        message=message,
    )
    return dataclasses.replace(
        status, conditions=conditions, phase=Phase.FAILED, reason=reason, message=message, current=None, drain=None,
        growth=None,
    )  # fmt: skip


def _describe_words(context: Context, status: Status) -> str:
    """Return the words that let the job go on, the command that says one, and what was said of each commit."""
    names = {name: item for item in status.checkpoint.history if (name := commit_history.parse_commit_name(item.uri))}
    usable = next((name for name, item in names.items() if not item.invalid), next(iter(names), BEGINNING))
    job, choice = context.job, status.resume_choice
    start = start_field(context.spec) or "nothing"
    patch = f'{{"spec":{{"checkpoint":{{"resumeFrom":"{usable}"}}}}}}'
    text = f"To go on, set spec.checkpoint.resumeFrom to the name of a commit, or to {BEGINNING} (from {start}): "
    text += f"kubectl patch etj {job.name} -n {job.namespace} --type merge -p '{patch}'"
    if choice is not None and not is_choice_open(status):
        used = f", which attempt {choice.attempt} has used" if choice.attempt else ""
        text += f". To repeat {choice.value}{used}, empty the field first"
    return ". ".join([text, *(f"{name}: {_describe(item)}" for name, item in names.items())])


def _describe(commit: Commit) -> str:
    return sentence(commit.invalid_reason, _REASON_BYTES) if commit.invalid else "not refused"


def _find_last(status: Status) -> tuple[int, int]:
    """Return attempt and step of the newest commit that the training itself has written; zeros for none."""
    own = ((item.attempt, item.step) for item in status.checkpoint.history if item.writer != "reshard")
    return max(own, default=(0, 0))
