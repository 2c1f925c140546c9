"""Choose the units of a run, reuse the units of earlier runs, and report what is kept when a run fails."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

from reshard.commits.staging import Sharing
from reshard.errors import CorruptSourceError, SourceChangedError, TargetTakenError, VerificationError
from reshard.execution.executor import Mover
from reshard.execution.journal import Journal
from reshard.execution.unit_records import UnitRecord
from reshard.planning.plan import Plan
from reshard.profile.collector import timed
from reshard.system.limits import format_bytes


@dataclasses.dataclass(frozen=True, slots=True)
class Moved:
    """Bytes that one run has read and written."""

    bytes_read: int
    bytes_written: int

    def less(self, other: Moved) -> Moved:
        """Return the difference of both numbers to those of another one."""
        return Moved(self.bytes_read - other.bytes_read, self.bytes_written - other.bytes_written)


NOTHING = Moved(0, 0)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Resumed:
    """Summary of what earlier runs of the same conversion have done.

    Attributes:
        units: number of units that are intact and are not done again.
        damaged: number of units that were done but are not intact, and are done again.
        num_units: number of units of the whole conversion.
        num_bytes: source bytes of the intact units.
    """

    units: int
    damaged: int
    num_units: int
    num_bytes: int

    def __str__(self) -> str:
        if not self.units + self.damaged:
            return "nothing to go on with: no run of this conversion left an unfinished result"
        again = f"; {self.damaged} damaged ones are done again" if self.damaged else ""
        done = f"{self.units} of {self.num_units} units ({format_bytes(self.num_bytes)})"
        return f"{done} had been done before and are kept{again}"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """Units that one run has done.

    Attributes:
        records: records of these units.
        before: bytes that earlier runs have moved for units that this run kept.
        resumed: end of the report's sentence, about the earlier runs; empty if there were none.
    """

    records: Sequence[UnitRecord] = ()
    before: Moved = NOTHING
    resumed: str = ""

    @property
    def moved(self) -> Moved:
        """Return the bytes that this run has read and written."""
        return _moved(self.records)

    def share(self, plan: Plan) -> str:
        """Describe the share of the conversion's units that this run has done."""
        return f"{len(self.records)} of {len(plan.units)} units"


@timed("move")
def do_units(
    mover: Mover,
    folder: Path,
    sharing: Sharing,
    worker: tuple[int, int],
    resumed: Callable[[Resumed], None] | None = None,
) -> Work:
    """Move the units of a run: all units, those that an earlier run has not done, or this worker's share.

    Args:
        mover: mover of the conversion.
        folder: folder of the unfinished result.
        sharing: who may work on the result.
        worker: number of this worker, from 0, and number of workers.
        resumed: called with a summary of earlier runs, if this run may resume.
    """
    plan = mover.plan
    order = interleave(len(plan.units), plan.num_threads)
    if sharing is Sharing.ALONE:
        return Work(records=mover.do(order))
    journal = Journal(folder)
    earlier = journal.records()
    intact = [record for record in earlier if mover.is_intact(record, reread=sharing is Sharing.RESUMABLE)]
    for unit in {record.unit for record in earlier} - {record.unit for record in intact}:
        journal.forget(unit)
    if sharing is Sharing.TOGETHER:
        return Work(records=mover.do(journal.share(len(plan.units), *worker), journal.record))
    done = {record.unit for record in intact}
    before = Resumed(
        units=len(done),
        damaged=len(earlier) - len(intact),
        num_units=len(plan.units),
        num_bytes=plan.units.count_bytes(done),
    )
    if resumed is not None:
        resumed(before)
    records = mover.do((unit for unit in order if unit not in done), journal.record)
    return Work(records=records, before=_moved(intact), resumed=f"; {before}" if earlier else "")


def interleave(count: int, num_stripes: int) -> list[int]:
    """Return the numbers 0 to `count - 1` in an order that takes one number of each stripe in turn.

    A stripe is a sequence of neighbouring numbers. Threads that take the next unit when they are free then mostly work
    on different files of the target. That is faster, because the kernel lets only one thread at a time write to a file.
    """
    bounds = [count * at // num_stripes for at in range(num_stripes + 1)]
    stripes = [range(first, last) for first, last in itertools.pairwise(bounds)]
    return [unit for row in itertools.zip_longest(*stripes) for unit in row if unit is not None]


def _moved(records: Iterable[UnitRecord]) -> Moved:
    """Add up the bytes of units."""
    read = written = 0
    for record in records:
        read += sum(crc_range.num_bytes for ranges in record.read.values() for crc_range in ranges)
        written += sum(crc_range.num_bytes for ranges in record.written.values() for crc_range in ranges)
    return Moved(read, written)


@contextlib.contextmanager
def note_kept_work(folder: Path, plan: Plan, sharing: Sharing) -> Iterator[None]:
    """Add a note to any error that ends the run: which units are kept, where, and how to continue."""
    try:
        yield
    except BaseException as error:
        is_removed = isinstance(error, TargetTakenError) or (
            sharing is Sharing.RESUMABLE
            and isinstance(error, VerificationError | CorruptSourceError | SourceChangedError)
        )
        if sharing is not Sharing.ALONE and not is_removed:
            with contextlib.suppress(OSError):
                error.add_note(_describe_kept_work(folder, plan, sharing))
        raise


def _describe_kept_work(folder: Path, plan: Plan, sharing: Sharing) -> str:
    done = Journal(folder).done()
    num_bytes = plan.units.count_bytes(unit for unit in done if unit < len(plan.units))
    again = "with --resume" if sharing is Sharing.RESUMABLE else "for each worker"
    units = f"{len(done)} of {len(plan.units)} units ({format_bytes(num_bytes)})"
    return f"kept: {units} in {folder}; the same command {again} goes on with them, another one removes them"
