"""A recovery in one sentence: what was lost, how long training stood still, which steps and bytes it took."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from elastic_operator.api.status import Recovery, StartMode
from elastic_operator.reconcile.goodput import PAUSES

CAPACITY_RETURNED = "CapacityReturned"
"""Cause of a planned change to a better topology."""

_MAX_NAMED = 4


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RecoverySummary:
    """A recovery that has ended, together with those that it superseded: failures before the first step.

    Attributes:
        cause: cause of the first of them, which stopped the training.
        causes: all causes, each once, oldest first.
        message: one sentence about the first cause.
        lost: all nodes that were lost.
        blamed: the node on which the first failure began; empty if it is not known.
        planned: True if no part of it was a failure.
        seconds: from the first signal to the first step.
        lost_steps: steps that are done again.
        start_mode: how the new attempt started, as in `status.recoveries`.
        is_converted: a reshard Job converted the checkpoint.
        bytes_read: bytes that conversions read.
        bytes_written: bytes that conversions wrote.
        before: topology before.
        after: topology after.
        attempt: the new attempt.
        ended_at: time of its first step.
    """

    cause: str
    causes: tuple[str, ...]
    message: str
    lost: tuple[str, ...]
    blamed: str
    planned: bool
    seconds: float
    lost_steps: int
    start_mode: str
    is_converted: bool
    bytes_read: int
    bytes_written: int
    before: str
    after: str
    attempt: int
    ended_at: float

    @property
    def is_growth(self) -> bool:
        """True for a change to more nodes, or to a better topology, and nothing else."""
        return self.planned and self.causes == (CAPACITY_RETURNED,)


def summarize_recovery(recoveries: Sequence[Recovery], index: int) -> RecoverySummary | None:
    """Summarize a recovery; return None if it is open or superseded, or if nothing was to run meanwhile."""
    last = recoveries[index]
    if last.first_step_time is None or last.cause in PAUSES:
        return None
    begin = index
    while begin and recoveries[begin - 1].first_step_time is None and recoveries[begin - 1].cause not in PAUSES:
        begin -= 1
    chain = recoveries[begin : index + 1]
    first = chain[0]
    since = first.signal_time if first.signal_time is not None else first.detect_time
    conversions = [item.conversion for item in chain if item.conversion is not None]
    return RecoverySummary(
        cause=first.cause,
        causes=tuple(dict.fromkeys(item.cause for item in chain)),
        message=first.message,
        lost=tuple(dict.fromkeys(name for item in chain for name in item.lost)),
        blamed=first.blamed,
        planned=all(item.planned for item in chain),
        seconds=max(0.0, last.first_step_time - since) if since is not None else last.seconds.get("total", 0.0),
        lost_steps=sum(item.lost_steps for item in chain),
        start_mode=last.start_mode,
        is_converted=bool(conversions),
        bytes_read=sum(item.bytes_read for item in conversions),
        bytes_written=sum(item.bytes_written for item in conversions),
        before=first.from_,
        after=last.to,
        attempt=last.to_attempt,
        ended_at=last.first_step_time,
    )


def describe_recovery(summary: RecoverySummary) -> str:
    """Return one sentence, such as `lost node x (NodeNotReady), back in 24 s, 0 steps lost, 1.2 GB moved`."""
    parts = [
        _describe_cause(summary),
        f"back in {_format_duration(summary.seconds)}",
        f"{pluralize(summary.lost_steps, 'step')} lost",
        _describe_bytes(summary),
    ]
    text = ", ".join(parts)
    return f"{text}; from {summary.before} to {summary.after}" if summary.before != summary.after else text


def _describe_cause(summary: RecoverySummary) -> str:
    causes = ", ".join(summary.causes)
    if summary.is_growth:
        return "changed to a better topology"
    if summary.lost:
        names = ", ".join(summary.lost[:_MAX_NAMED])
        more = len(summary.lost) - _MAX_NAMED
        nodes = f"{names} and {more} more" if more > 0 else names
        return f"lost node{'s' if len(summary.lost) > 1 else ''} {nodes} ({causes})"
    if summary.planned:
        return f"planned change ({causes})"
    return f"failure on node {summary.blamed} ({causes})" if summary.blamed else f"failure ({causes})"


def _describe_bytes(summary: RecoverySummary) -> str:
    if not summary.is_converted and summary.start_mode == StartMode.LOAD:
        return "the training loaded the commit of the other topology itself"
    return f"{format_size(summary.bytes_written)} moved"


def _format_duration(seconds: float) -> str:
    whole = round(seconds)
    if whole < 120:
        return f"{whole} s"
    minutes, rest = divmod(whole, 60)
    if minutes < 120:
        return f"{minutes} min {rest} s" if rest else f"{minutes} min"
    return f"{minutes // 60} h {minutes % 60} min"


def format_size(num_bytes: float) -> str:
    """Format a number of bytes in decimal units."""
    value, units = float(num_bytes), ("B", "kB", "MB", "GB", "TB", "PB")
    for unit in units:
        if value < 999.5 or unit == units[-1]:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.3g} {unit}"
        value /= 1000
    raise AssertionError("unreachable: the last unit has no upper bound")


def pluralize(number: int, what: str) -> str:
    """Format a number with its noun: `1 step`, `3 steps`, `2 losses`."""
    plural = f"{what}es" if what.endswith("s") else f"{what}s"
    return f"{number} {what if number == 1 else plural}"
