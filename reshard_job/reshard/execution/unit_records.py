"""The proof of a conversion: what each unit did, added up.

A unit's record says which ranges were read and written, and the terms of the digests on both sides. Records of all
units, whoever did them, must cover the plan, and both sides must have the same digest of every tensor.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections import defaultdict
from collections.abc import Iterable, Mapping

import numpy as np

from reshard.checksums import crc
from reshard.checksums.crc import Piece
from reshard.checksums.digest import finished, to_hex
from reshard.errors import VerificationError
from reshard.planning.plan import Plan, Rounding


@dataclasses.dataclass(slots=True, kw_only=True)
class UnitRecord:
    """What was done for one unit of the plan.

    Attributes:
        unit: its position in `Plan.units`.
        source: target tensor -> term of its digest of what was read for it (converted, if it is of another type).
        target: (target tensor, replica) -> term of what was written.
        read: source file -> ranges.
        written: target file -> ranges.
        rounded: source tensor of `Plan.rounded_types` -> term of its digest in that type.
    """

    unit: int
    source: dict[int, int] = dataclasses.field(default_factory=lambda: defaultdict(int))
    target: dict[tuple[int, int], int] = dataclasses.field(default_factory=lambda: defaultdict(int))
    read: dict[int, list[Piece]] = dataclasses.field(default_factory=lambda: defaultdict(list))
    written: dict[int, list[Piece]] = dataclasses.field(default_factory=lambda: defaultdict(list))
    rounded: dict[int, int] = dataclasses.field(default_factory=lambda: defaultdict(int))


def merge(parts: Iterable[Mapping[int, list[Piece]]]) -> dict[int, list[Piece]]:
    """Ranges by file, of all records, with neighbours joined."""
    merged: dict[int, list[Piece]] = defaultdict(list)
    for part in parts:
        for file, pieces in part.items():
            merged[file] += pieces
    return {file: crc.join(pieces) for file, pieces in merged.items()}


def num_bytes(pieces: Mapping[int, list[Piece]]) -> int:
    """Of all ranges together."""
    return sum(piece.num_bytes for every in pieces.values() for piece in every)


def check_written(plan: Plan, written: Mapping[int, list[Piece]]) -> None:
    """Every target byte was written once: what neither was read nor written is not missed by sums over both.

    Raises:
        VerificationError: with every file that is not as planned.
    """
    shards, files = plan.layout.shards, plan.layout.files
    item = np.array([tensor.item_bytes for tensor in plan.target_tensors], dtype=np.int64)[shards.tensor]
    expected = shards.bytes_by_file(item, len(files))
    problems = []
    for number, file in enumerate(files):
        pieces = written.get(number, [])
        found = sum(piece.num_bytes for piece in pieces)
        if found != expected[number]:
            problems.append(f"{file.path}: {found} of {expected[number]} bytes of tensors were written")
        elif any(second.start < first.start + first.num_bytes for first, second in itertools.pairwise(pieces)):
            problems.append(f"{file.path}: bytes were written twice")
        elif pieces and pieces[-1].start + pieces[-1].num_bytes > file.num_bytes:
            problems.append(f"{file.path}: bytes behind its end were written")
    if problems:
        raise VerificationError(
            f"{len(problems)} files were not written as planned: nothing was published", problems=problems[:20]
        )


def unequal_roundings(plan: Plan, records: Iterable[UnitRecord]) -> list[Rounding]:
    """Weights whose digest is not that of their masters, rounded."""
    terms: dict[int, int] = defaultdict(int)
    for record in records:
        for number, term in record.rounded.items():
            terms[number] ^= term
    return [pair for pair in plan.roundings if terms[pair.weight] != terms[pair.master]]


def compare_copies(plan: Plan, records: Iterable[UnitRecord]) -> dict[int, int]:
    """Digest of every target tensor; every replica must have the source's.

    Raises:
        VerificationError: with every tensor that has another.
    """
    sources: dict[int, int] = defaultdict(int)
    targets: dict[tuple[int, int], int] = defaultdict(int)
    for record in records:
        for number, term in record.source.items():
            sources[number] ^= term
        for key, term in record.target.items():
            targets[key] ^= term
    digests = {number: finished(term, plan.target_tensors[number].num_bytes) for number, term in sources.items()}
    problems = []
    for (number, replica), term in sorted(targets.items()):
        if term != sources[number]:
            tensor = plan.target_tensors[number]
            expected, found = to_hex(digests[number]), to_hex(finished(term, tensor.num_bytes))
            problems.append(f"{tensor.key}, copy {replica}: source {expected}, target {found}")
    if problems:
        raise VerificationError(
            f"{len(problems)} tensors did not arrive as they were: nothing was published", problems=problems[:20]
        )
    return digests
