"""What a run says at its end, for the operator and for `--json`."""

from __future__ import annotations

import resource
import time
from pathlib import Path

from reshard.commits.commit import Commit
from reshard.contract import ExitCode, ReshardReport
from reshard.execution.resume import NOTHING, Moved
from reshard.execution.verify import total


def done_report(
    commit: Commit,
    *,
    source: Path,
    target: Path,
    started: float,
    message: str,
    moved: Moved = NOTHING,
    latest: str = "",
) -> ReshardReport:
    """The report of a conversion whose result is there; `started` is a reading of the monotonic clock, in seconds."""
    return ReshardReport(
        ok=True,
        exit_code=ExitCode.OK,
        message=message,
        source=str(source),
        target=str(target),
        step=commit.step,
        samples=commit.samples,
        bytes_read=moved.bytes_read,
        bytes_written=moved.bytes_written,
        num_files=len(commit.files),
        seconds=round(time.monotonic() - started, 3),
        peak_rss_bytes=peak_rss_bytes(),
        num_tensors=len(commit.digests),
        digest=total(commit.digests),
        verified=True,
        latest=latest,
    )


def failure_report(exit_code: ExitCode, message: str, source: Path, target: Path, seconds: float) -> ReshardReport:
    """The report of a conversion that failed."""
    return ReshardReport(
        ok=False,
        exit_code=exit_code,
        message=message,
        source=str(source),
        target=str(target),
        seconds=round(seconds, 3),
        peak_rss_bytes=peak_rss_bytes(),
    )


def peak_rss_bytes() -> int:
    """Largest resident set of this process, or of one that it forked and that has ended (KiB on Linux)."""
    whose = (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
    return max(resource.getrusage(who).ru_maxrss for who in whose) * 1024
