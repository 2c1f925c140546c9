"""The journal of a conversion: which units are done, and which worker has claimed which unit.

The journal is a folder in the unfinished result. Runs read it to resume, and several workers share it. Every unit that
is done has a record, a file that is written under another name and renamed. Every unit that a worker has claimed has a
claim, a file that only one worker can create. If a worker dies, its claimed units have no record. Workers that have
done everything else then do these units again, which is harmless, because they write the same bytes to the same ranges.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

from reshard.checksums.crc import CrcRange
from reshard.execution.unit_records import UnitRecord
from reshard.profile import wire

FOLDER = ".journal"
_RECORDS = "[0-9]" * 8 + ".json"
_PATIENCE_SECONDS = 2.0
_PAUSE_AFTER_LISTING = 9.0
"""A waiting worker lists the folder for at most a tenth of its time: the others need the file system, too."""

_PATIENCE_UNITS = 3.0  # a worker waits this many times the mean time of its own units before it does a missing unit


class Journal:
    """Reads and writes records and claims in folder `.journal` of an unfinished result."""

    def __init__(self, staging: Path) -> None:
        self._folder = staging / FOLDER
        with contextlib.suppress(FileNotFoundError):  # another worker has published the result: nothing is left to do
            self._folder.mkdir(exist_ok=True)

    def record(self, record: UnitRecord) -> None:
        """Write the record of a unit."""
        self.note(f"{record.unit:08d}.json", to_json(record))

    def note(self, name: str, content: str) -> None:
        """Write a file of the journal atomically; do nothing if the result was published."""
        draft = self._folder / f".{name.removesuffix('.json')}.{os.getpid()}"
        with contextlib.suppress(FileNotFoundError):  # published meanwhile: another worker did this unit, too
            draft.write_text(content, encoding="utf-8")
            draft.rename(self._folder / name)

    def done(self) -> set[int]:
        """Return the units that have a record."""
        return {int(path.stem) for path in self._paths()}

    def _paths(self) -> list[Path]:
        with contextlib.suppress(FileNotFoundError):  # the folder was removed while `glob` was reading it
            return sorted(self._folder.glob(_RECORDS))
        return []

    def records(self) -> list[UnitRecord]:
        """Read all records, and remove those that cannot be read."""
        records = []
        for path in self._paths():
            try:
                record = from_json(path.read_text(encoding="utf-8"))
                if record.unit != int(path.stem):
                    raise ValueError(f"expected the record of unit {int(path.stem)}, found that of {record.unit}")
                records.append(record)
            except FileNotFoundError:  # published meanwhile
                continue
            except (ValueError, KeyError, TypeError, RecursionError):
                path.unlink(missing_ok=True)
        return records

    def forget(self, unit: int) -> None:
        """Remove the record and the claim of a unit."""
        (self._folder / f"{unit:08d}.json").unlink(missing_ok=True)
        (self._folder / f"{unit:08d}.claim").unlink(missing_ok=True)

    def claim(self, unit: int) -> bool:
        """Claim a unit; return False if another worker has claimed it before."""
        try:
            descriptor = os.open(self._folder / f"{unit:08d}.claim", os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644)
        except (FileExistsError, FileNotFoundError):
            return False
        os.close(descriptor)
        return True

    def remove(self) -> None:
        """Remove the journal of a complete result."""
        shutil.rmtree(self._folder, ignore_errors=True)

    @property
    def exists(self) -> bool:
        """Return True as long as the result is not published."""
        return self._folder.exists()

    def share(self, num_units: int, worker: int, num_workers: int) -> Iterator[int | None]:
        """Yield the units for one of several workers: its own share, then unclaimed units, then units of slow workers.

        None is yielded while other workers may still do their units. The caller must then write the records of its own
        units; otherwise two workers would wait for each other's records.

        Args:
            num_units: number of units of the conversion.
            worker: number of this worker, from 0.
            num_workers: number of workers.
        """
        first, last = (at * num_units // num_workers for at in (worker, worker + 1))
        started, own = time.monotonic(), set[int]()
        for unit in self._claimable(range(first, last), num_units, worker / num_workers):
            own.add(unit)
            yield unit
        mean = (time.monotonic() - started) / max(1, len(own))
        patience = max(_PATIENCE_SECONDS, _PATIENCE_UNITS * mean)
        waited_since = time.monotonic()
        while self.exists:
            listing_since = time.monotonic()
            if not (missing := sorted(set(range(num_units)) - self.done() - own)):
                return
            listed = time.monotonic()
            if listing_since - waited_since >= patience:
                unit = missing[worker % len(missing)]
                own.add(unit)
                yield unit
                waited_since = time.monotonic()
            yield None
            while time.monotonic() - listed < _PAUSE_AFTER_LISTING * (listed - listing_since):
                yield None

    def _claimable(self, share: range, num_units: int, position: float) -> Iterator[int]:
        """Claim and yield the units of a share, then all units that nobody has claimed.

        A claim is a file that every worker can see, so units that others have claimed are found by listing the folder
        instead of trying each of them: 64 workers would try 177,000 units 11 million times.

        Args:
            share: the worker's own units.
            num_units: number of units of the conversion.
            position: this worker's place among all workers, from 0 to 1, so that they begin at different units.
        """
        for unit in share:
            if self.claim(unit):
                yield unit
        while unclaimed := self._unclaimed(num_units):
            start = int(position * len(unclaimed))
            for unit in (*unclaimed[start:], *unclaimed[:start]):
                if not self.claim(unit):
                    break  # others have claimed units since the folder was listed
                yield unit

    def _unclaimed(self, num_units: int) -> list[int]:
        """Return the units without a claim, in ascending order; none if the result is published."""
        with contextlib.suppress(FileNotFoundError), os.scandir(self._folder) as entries:
            claimed = {int(entry.name[:8]) for entry in entries if entry.name.endswith(".claim")}
            return [unit for unit in range(num_units) if unit not in claimed]
        return []


def to_json(record: UnitRecord) -> str:
    """Encode a record as one line of JSON."""
    return json.dumps(
        {
            "unit": record.unit,
            "source": [[number, f"{value:08x}"] for number, value in record.source.items()],
            "target": [[number, replica, f"{value:08x}"] for (number, replica), value in record.target.items()],
            "read": [[file, *crc_range] for file, ranges in record.read.items() for crc_range in ranges],
            "written": [[file, *crc_range] for file, ranges in record.written.items() for crc_range in ranges],
            "rounded": [[number, f"{value:08x}"] for number, value in record.rounded.items()],
            "averaged": [[number, difference.hex()] for number, difference in record.averaged.items()],
            "times": None if record.times is None else wire.encode(record.times),
        }
    )


def from_json(text: str) -> UnitRecord:
    """Decode a record from the output of `to_json`.

    Raises:
        ValueError, KeyError, TypeError: the text is not such a line.
    """
    value = json.loads(text)
    record = UnitRecord(unit=_count(value["unit"]))
    for number, term in value["source"]:
        record.source[_count(number)] = _term(term)
    for number, replica, term in value["target"]:
        record.target[_count(number), _count(replica)] = _term(term)
    for number, term in value.get("rounded", ()):  # absent in records of older versions: masters are then read again
        record.rounded[_count(number)] = _term(term)
    for number, difference in value.get("averaged", ()):  # absent in records of older versions, which averaged nothing
        record.averaged[_count(number)] = _difference(difference)
    record.times = wire.decode(value.get("times"))
    for name, ranges in (("read", record.read), ("written", record.written)):
        for file, start, num_bytes, crc32 in value[name]:
            ranges[_count(file)].append(CrcRange(_count(start), _count(num_bytes), _count(crc32)))
    return record


def _count(value: object) -> int:
    if type(value) is not int or not 0 <= value < 1 << 63:
        raise ValueError(f"expected a number, found {value!r:.60}")
    return value


def _difference(value: object) -> float:
    if not isinstance(value, str) or not (difference := float.fromhex(value)) >= 0:
        raise ValueError(f"expected a difference, found {value!r:.60}")
    return difference


def _term(value: object) -> int:
    if not isinstance(value, str) or len(value) != 8 or not value.isalnum():
        raise ValueError(f"expected a term of a digest, found {value!r:.60}")
    return int(value, 16)
