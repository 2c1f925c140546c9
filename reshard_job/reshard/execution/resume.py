"""Which units a run does, what it says of those that others did, and what is kept when it ends before its time."""

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
from reshard.system.limits import format_bytes


@dataclasses.dataclass(frozen=True, slots=True)
class Moved:
    """Bytes that one process has read and written."""

    bytes_read: int
    bytes_written: int

    def less(self, other: Moved) -> Moved:
        """Without what another has moved."""
        return Moved(self.bytes_read - other.bytes_read, self.bytes_written - other.bytes_written)


NOTHING = Moved(0, 0)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Resumed:
    """What an earlier run of the same conversion had done.

    Attributes:
        units: that are intact and are not done again.
        damaged: units that had been done, are not intact, and are done again.
        num_units: of the whole conversion.
        num_bytes: source bytes of `units`.
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
    """What one run did.

    Attributes:
        records: of the units that it did.
        before: bytes that an earlier run had moved for it.
        resumed: what the report says about that, to follow a sentence; empty if there was none.
    """

    records: Sequence[UnitRecord] = ()
    before: Moved = NOTHING
    resumed: str = ""

    @property
    def moved(self) -> Moved:
        """Bytes of its units."""
        return _moved(self.records)

    def share(self, plan: Plan) -> str:
        """Its part of the whole, in words."""
        return f"{len(self.records)} of {len(plan.units)} units"


def do(
    mover: Mover,
    folder: Path,
    sharing: Sharing,
    worker: tuple[int, int],
    resumed: Callable[[Resumed], None] | None = None,
) -> Work:
    """Do all units, those that an earlier run left, or this worker's.

    Args:
        mover: of the conversion.
        folder: the unfinished result.
        sharing: which of the three.
        worker: which of how many workers, from 0.
        resumed: told about the earlier run, where this one may go on.
    """
    plan = mover.plan
    order = striped(len(plan.units), plan.num_threads)
    if sharing is Sharing.ALONE:
        return Work(records=mover.do(order))
    journal = Journal(folder)
    found = journal.records()
    intact = [record for record in found if mover.intact(record, reread=sharing is Sharing.RESUMABLE)]
    for unit in {record.unit for record in found} - {record.unit for record in intact}:
        journal.forget(unit)
    if sharing is Sharing.TOGETHER:
        return Work(records=mover.do(journal.share(len(plan.units), *worker), journal.record))
    done = {record.unit for record in intact}
    before = Resumed(
        units=len(done),
        damaged=len(found) - len(intact),
        num_units=len(plan.units),
        num_bytes=sum(plan.units[unit].num_bytes for unit in done),
    )
    if resumed is not None:
        resumed(before)
    records = mover.do((unit for unit in order if unit not in done), journal.record)
    return Work(records=records, before=_moved(intact), resumed=f"; {before}" if found else "")


def striped(count: int, num_stripes: int) -> list[int]:
    """0 to `count - 1`, one of each stripe of neighbours in turn.

    Threads that take the next one when they are free then work in different parts of the checkpoint, so on different
    files of the target mostly: the kernel lets one thread at a time write to a file.
    """
    bounds = [count * at // num_stripes for at in range(num_stripes + 1)]
    stripes = [range(first, last) for first, last in itertools.pairwise(bounds)]
    return [unit for row in itertools.zip_longest(*stripes) for unit in row if unit is not None]


def _moved(records: Iterable[UnitRecord]) -> Moved:
    """Bytes of units."""
    read = written = 0
    for record in records:
        read += sum(piece.num_bytes for pieces in record.read.values() for piece in pieces)
        written += sum(piece.num_bytes for pieces in record.written.values() for piece in pieces)
    return Moved(read, written)


@contextlib.contextmanager
def kept(folder: Path, plan: Plan, sharing: Sharing) -> Iterator[None]:
    """Whatever ends a run that can go on: its message says what is kept, where, and how to go on."""
    try:
        yield
    except BaseException as error:
        removed = isinstance(error, TargetTakenError) or (
            sharing is Sharing.RESUMABLE
            and isinstance(error, VerificationError | CorruptSourceError | SourceChangedError)
        )
        if sharing is not Sharing.ALONE and not removed:
            with contextlib.suppress(OSError):
                error.add_note(_kept(folder, plan, sharing))
        raise


def _kept(folder: Path, plan: Plan, sharing: Sharing) -> str:
    done = Journal(folder).done()
    num_bytes = sum(plan.units[unit].num_bytes for unit in done if unit < len(plan.units))
    again = "with --resume" if sharing is Sharing.RESUMABLE else "for each worker"
    units = f"{len(done)} of {len(plan.units)} units ({format_bytes(num_bytes)})"
    return f"kept: {units} in {folder}; the same command {again} goes on with them, another one removes them"
