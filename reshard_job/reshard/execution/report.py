"""Make the report of a run, for the operator and for `--json`."""

from __future__ import annotations

import resource
import time
from pathlib import Path

from reshard.commits.commit import Commit
from reshard.contract import ExitCode, ReshardReport
from reshard.execution.resume import NOTHING, Moved
from reshard.execution.verify import total_digest
from reshard.profile.collector import current


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
    """Make the report of a conversion whose result exists.

    Args:
        commit: commit of the result.
        source: folder of the source.
        target: folder of the result.
        started: start of the run, by the monotonic clock in seconds.
        message: sentence for the user.
        moved: bytes that this run has read and written.
        latest: file that now names the result; empty if none was written.
    """
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
        digest=total_digest(commit.digests),
        verified=True,
        latest=latest,
        witness=_count_witnessed(commit),
        milliseconds=current().milliseconds(),
    )


def _count_witnessed(commit: Commit) -> dict[str, int]:
    """Return how much of a result was witnessed; the commit says why the rest was not."""
    if not commit.witness:
        return {}
    missing = sum(commit.witness.get("not_witnessed", {}).values())
    return {**{key: commit.witness.get(key, 0) for key in ("tensors", "samples")}, "not_witnessed": missing}


def failure_report(exit_code: ExitCode, message: str, source: Path, target: Path, seconds: float) -> ReshardReport:
    """Make the report of a conversion that failed."""
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
    """Return the largest resident set of this process or of any child that has ended, in bytes.

    `getrusage` counts what this process was before its last `exec`, too: the program that started the conversion, and
    that one's children. The peak in /proc (proc(5), VmHWM) begins anew at an `exec`.
    """
    children_kib = _children_kib()
    return max(_own_kib(), children_kib if children_kib > _EARLIER_CHILDREN_KIB else 0) * 1024


def _own_kib() -> int:
    try:
        status = Path("/proc/self/status").read_text(encoding="ascii", errors="replace")
    except OSError:  # not Linux, or /proc is not mounted
        status = ""
    peaks = [int(line.split()[1]) for line in status.splitlines() if line.startswith("VmHWM:")]
    return peaks[0] if peaks else resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def _children_kib() -> int:
    return resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss  # Linux reports KiB


_EARLIER_CHILDREN_KIB = _children_kib()
"""Peak of the children that ended before this module was imported: none of them belongs to the conversion."""
