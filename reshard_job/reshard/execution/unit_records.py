"""Records of units, and the proof of a conversion that is computed from them.

A unit's record holds the ranges that were read and written, and the terms of the digests of both sides. The records of
all units, from any number of workers, must cover the plan, and both sides must have the same digest of every tensor.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections import defaultdict
from collections.abc import Iterable, Mapping

import numpy as np

from reshard.checksums import crc
from reshard.checksums.crc import CrcRange
from reshard.checksums.digest import finish_digest, to_hex
from reshard.errors import VerificationError
from reshard.planning.plan import Plan, Rounding
from reshard.profile.clock import UnitTimes


@dataclasses.dataclass(slots=True, kw_only=True)
class UnitRecord:
    """Ranges and digest terms of one unit of the plan.

    Attributes:
        unit: position of the unit in `Plan.units`.
        source: target tensor -> term of the elements that were read for it, in the target tensor's type.
        target: (target tensor, replica) -> term of the elements that were written.
        read: source file -> ranges that were read.
        written: target file -> ranges that were written.
        rounded: source tensor of `Plan.rounded_types` -> term of its digest in that type.
        averaged: source tensor -> largest difference between copies that were averaged; only where copies differ.
        times: measurements of the unit; None in records of older versions.
    """

    unit: int
    source: dict[int, int] = dataclasses.field(default_factory=lambda: defaultdict(int))
    target: dict[tuple[int, int], int] = dataclasses.field(default_factory=lambda: defaultdict(int))
    read: dict[int, list[CrcRange]] = dataclasses.field(default_factory=lambda: defaultdict(list))
    written: dict[int, list[CrcRange]] = dataclasses.field(default_factory=lambda: defaultdict(list))
    rounded: dict[int, int] = dataclasses.field(default_factory=lambda: defaultdict(int))
    averaged: dict[int, float] = dataclasses.field(default_factory=dict)
    times: UnitTimes | None = None


def merge(by_record: Iterable[Mapping[int, list[CrcRange]]]) -> dict[int, list[CrcRange]]:
    """Merge the ranges of all records by file, and join ranges that follow each other."""
    merged: dict[int, list[CrcRange]] = defaultdict(list)
    for by_file in by_record:
        for file, ranges in by_file.items():
            merged[file] += ranges
    return {file: crc.join(ranges) for file, ranges in merged.items()}


def num_bytes(ranges: Mapping[int, list[CrcRange]]) -> int:
    """Return the bytes of all ranges together."""
    return sum(crc_range.num_bytes for every in ranges.values() for crc_range in every)


def largest_differences(plan: Plan, records: Iterable[UnitRecord]) -> dict[str, float]:
    """Return the source tensors whose copies differed and were averaged, with the largest difference of each."""
    largest: dict[int, float] = {}
    for record in records:
        for number, difference in record.averaged.items():
            largest[number] = max(difference, largest.get(number, 0.0))
    return {str(plan.index.tensors[number].key): largest[number] for number in sorted(largest)}


def check_written(plan: Plan, written: Mapping[int, list[CrcRange]]) -> None:
    """Check that every target byte of a tensor was written once.

    The comparison of digests cannot detect elements that were neither read nor written, so the ranges are checked too.

    Raises:
        VerificationError: files were not written as planned; the error lists them.
    """
    shards, files = plan.layout.shards, plan.layout.files
    item = np.array([tensor.item_bytes for tensor in plan.target_tensors], dtype=np.int64)[shards.tensor]
    expected = shards.bytes_by_file(item, len(files))
    problems = []
    for number, file in enumerate(files):
        ranges = written.get(number, [])
        actual = sum(crc_range.num_bytes for crc_range in ranges)
        if actual != expected[number]:
            problems.append(f"{file.path}: {actual} of {expected[number]} bytes of tensors were written")
        elif any(second.start < first.start + first.num_bytes for first, second in itertools.pairwise(ranges)):
            problems.append(f"{file.path}: bytes were written twice")
        elif ranges and ranges[-1].start + ranges[-1].num_bytes > file.num_bytes:
            problems.append(f"{file.path}: bytes behind its end were written")
    if problems:
        raise VerificationError(
            f"{len(problems)} files were not written as planned: nothing was published", problems=problems[:20]
        )


def unequal_roundings(plan: Plan, records: Iterable[UnitRecord]) -> list[Rounding]:
    """Return the weights whose digest differs from that of their rounded masters, or is not known.

    Records of older versions, which a resumed run finds, state no digest of the rounded elements.
    """
    if not plan.roundings:
        return []
    origins, compared = plan.origins.tolist(), plan.rounded_types.keys()
    terms: dict[int, int] = defaultdict(int)
    unknown: set[int] = set()
    for record in records:
        for number, term in record.rounded.items():
            terms[number] ^= term
        unknown |= compared & {origins[target] for target in record.source} - record.rounded.keys()
    return [
        pair
        for pair in plan.roundings
        if terms[pair.weight] != terms[pair.master] or not unknown.isdisjoint((pair.weight, pair.master))
    ]


def compare_copies(plan: Plan, records: Iterable[UnitRecord]) -> dict[int, int]:
    """Return the digest of every target tensor, after comparing every replica in the target with the source.

    Raises:
        VerificationError: digests differ; the error lists the tensors.
    """
    sources: dict[int, int] = defaultdict(int)
    targets: dict[tuple[int, int], int] = defaultdict(int)
    for record in records:
        for number, term in record.source.items():
            sources[number] ^= term
        for key, term in record.target.items():
            targets[key] ^= term
    digests = {number: finish_digest(term, plan.target_tensors[number].num_bytes) for number, term in sources.items()}
    problems = []
    for (number, replica), term in sorted(targets.items()):
        if term != sources[number]:
            tensor = plan.target_tensors[number]
            expected, actual = to_hex(digests[number]), to_hex(finish_digest(term, tensor.num_bytes))
            problems.append(f"{tensor.key}, copy {replica}: source {expected}, target {actual}")
    if problems:
        raise VerificationError(
            f"{len(problems)} tensors did not arrive as they were: nothing was published", problems=problems[:20]
        )
    return digests
