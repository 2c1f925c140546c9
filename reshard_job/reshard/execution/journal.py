"""What of a conversion is done, beside its unfinished result: for resuming, and for several workers on one result.

Every unit that is done leaves a record, written under another name and renamed. A unit that is taken leaves a claim, a
file that only one worker can create. Nobody waits for a worker that died: units that stay claimed without a record are
done once more by whoever has nothing else to do, which is harmless, for the same bytes go to the same places.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

from reshard.checksums.crc import Piece
from reshard.execution.unit_records import UnitRecord

FOLDER = ".journal"
_RECORDS = "[0-9]" * 8 + ".json"
_PATIENCE_SECONDS = 2.0
_PATIENCE_UNITS = 3.0  # a unit that takes this many times as long as one's own is a straggler's


class Journal:
    """Records and claims in folder `.journal` of an unfinished result."""

    def __init__(self, staging: Path) -> None:
        self._folder = staging / FOLDER
        with contextlib.suppress(FileNotFoundError):  # published meanwhile: there is nothing left to do
            self._folder.mkdir(exist_ok=True)

    def record(self, record: UnitRecord) -> None:
        """Leave the record of a unit."""
        self.note(f"{record.unit:08d}.json", to_json(record))

    def note(self, name: str, content: str) -> None:
        """Leave a file, whole or not at all."""
        draft = self._folder / f".{name.removesuffix('.json')}.{os.getpid()}"
        with contextlib.suppress(FileNotFoundError):  # published meanwhile: others did this too
            draft.write_text(content, encoding="utf-8")
            draft.rename(self._folder / name)

    def done(self) -> set[int]:
        """Units that have a record."""
        return {int(path.stem) for path in self._paths()}

    def _paths(self) -> list[Path]:
        with contextlib.suppress(FileNotFoundError):  # published between two looks of `glob`
            return sorted(self._folder.glob(_RECORDS))
        return []

    def records(self) -> list[UnitRecord]:
        """All records; one that cannot be read is as good as none."""
        found = []
        for path in self._paths():
            try:
                record = from_json(path.read_text(encoding="utf-8"))
                if record.unit != int(path.stem):
                    raise ValueError(f"is the record of unit {record.unit}")
                found.append(record)
            except FileNotFoundError:  # published meanwhile
                continue
            except (ValueError, KeyError, TypeError, RecursionError):
                path.unlink(missing_ok=True)
        return found

    def forget(self, unit: int) -> None:
        """Take back the record and the claim of a unit."""
        (self._folder / f"{unit:08d}.json").unlink(missing_ok=True)
        (self._folder / f"{unit:08d}.claim").unlink(missing_ok=True)

    def claim(self, unit: int) -> bool:
        """Take a unit; False if somebody else has it."""
        try:
            descriptor = os.open(self._folder / f"{unit:08d}.claim", os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644)
        except (FileExistsError, FileNotFoundError):
            return False
        os.close(descriptor)
        return True

    def remove(self) -> None:
        """The result is complete: nobody needs the journal any more."""
        shutil.rmtree(self._folder, ignore_errors=True)

    @property
    def exists(self) -> bool:
        """The result is not published yet."""
        return self._folder.exists()

    def share(self, num_units: int, worker: int, num_workers: int) -> Iterator[int | None]:
        """Units for one of several workers: first its own share, then what others have not begun, then stragglers'.

        None while others may still do theirs: whoever asks leaves the records of what it has done meanwhile, or two
        workers would wait for each other's.
        """
        first = worker * num_units // num_workers
        started, own = time.monotonic(), set[int]()
        for unit in (*range(first, num_units), *range(first)):
            if self.claim(unit):
                own.add(unit)
                yield unit
        mean = (time.monotonic() - started) / max(1, len(own))
        patience = max(_PATIENCE_SECONDS, _PATIENCE_UNITS * mean)
        waited_since = time.monotonic()
        while self.exists and (missing := sorted(set(range(num_units)) - self.done() - own)):
            if time.monotonic() - waited_since >= patience:
                unit = missing[worker % len(missing)]
                own.add(unit)
                yield unit
                waited_since = time.monotonic()
            else:
                yield None


def to_json(record: UnitRecord) -> str:
    """One line."""
    return json.dumps(
        {
            "unit": record.unit,
            "source": [[number, f"{value:08x}"] for number, value in record.source.items()],
            "target": [[number, replica, f"{value:08x}"] for (number, replica), value in record.target.items()],
            "read": [[file, *piece] for file, pieces in record.read.items() for piece in pieces],
            "written": [[file, *piece] for file, pieces in record.written.items() for piece in pieces],
            "rounded": [[number, f"{value:08x}"] for number, value in record.rounded.items()],
        }
    )


def from_json(text: str) -> UnitRecord:
    """Inverse of `to_json`.

    Raises:
        ValueError, KeyError, TypeError: it is not such a line.
    """
    value = json.loads(text)
    record = UnitRecord(unit=_count(value["unit"]))
    for number, term in value["source"]:
        record.source[_count(number)] = _term(term)
    for number, replica, term in value["target"]:
        record.target[_count(number), _count(replica)] = _term(term)
    for number, term in value.get("rounded", ()):  # records of older versions have none: compared by reading
        record.rounded[_count(number)] = _term(term)
    for name, pieces in (("read", record.read), ("written", record.written)):
        for file, start, num_bytes, crc32 in value[name]:
            pieces[_count(file)].append(Piece(_count(start), _count(num_bytes), _count(crc32)))
    return record


def _count(value: object) -> int:
    if type(value) is not int or not 0 <= value < 1 << 63:
        raise ValueError(f"expected a number, found {value!r:.60}")
    return value


def _term(value: object) -> int:
    if not isinstance(value, str) or len(value) != 8 or not value.isalnum():
        raise ValueError(f"expected a term of a digest, found {value!r:.60}")
    return int(value, 16)
