"""Make the files that some ranks open from a manifest, and prove over all nodes that no byte was damaged."""

from __future__ import annotations

import bisect
import dataclasses
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path

import numpy as np

from reshard.checksums import crc
from reshard.checksums.crc import CrcRange
from reshard.commits.commit import check_files, read_commit
from reshard.errors import CorruptSourceError, UsageError
from reshard.execution.executor import Mover
from reshard.planning.check import check_plan
from reshard.storage.source_reader import SourceReader, damaged_ranges_error, describe_mismatch
from reshard.storage.target_writer import target_errors
from reshard.tensors.layout import Checksum, SourceFile
from reshard.virtual.manifest import Manifest, commit_crc32
from reshard.virtual.restrict import restrict

LARGEST_PADDING_BYTES = 1 << 20
"""Largest total of gaps between ranges that are read to complete a checksum."""

Ranges = Mapping[int, Sequence[CrcRange]]
"""Ranges that were read of each source file, with their checksums."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Loaded:
    """The result of `load_files`.

    Attributes:
        num_files: files with content.
        bytes_read: of the source.
        bytes_needed: tensor bytes of the source that the files are made of, each counted once.
        ranges: ranges that were read of each source file.
    """

    num_files: int
    bytes_read: int
    bytes_needed: int
    ranges: dict[int, list[CrcRange]]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Proof:
    """Numbers of the source's own checksums that cover the ranges that were read.

    Attributes:
        proved: number of checksums that agree.
        open: number of checksums of ranges of which only a part was read.
    """

    proved: int
    open: int


def check_source(manifest: Manifest) -> None:
    """Check that the source is complete and is the one that the manifest was made of.

    Raises:
        CorruptSourceError: the source was removed, changed or replaced.
    """
    root = manifest.plan.index.root
    actual = commit_crc32(root)
    if actual != manifest.source_commit:
        expected_text, actual_text = (
            "none" if value is None else f"{value:08x}" for value in (manifest.source_commit, actual)
        )
        raise CorruptSourceError(
            f"its COMMIT.json has CRC-32 {actual_text}, {expected_text} when the virtual commit was made:"
            " removed or replaced",
            path=str(root),
            hint="use an earlier commit",
        )
    if actual is not None:
        check_files(root, read_commit(root))


def load_files(manifest: Manifest, ranks: Collection[int], folder: Path) -> Loaded:
    """Write the files that `ranks` open into `folder`, which exists and is empty; read every source byte once.

    The target's other files are made empty: the framework lists them, and fails if it opens one.

    Raises:
        UsageError: the target has no such rank.
        CorruptSourceError: the source ended early.
        StorageFullError: no space left in `folder`.
        VerificationError: digests of what was read and what was written differ.
    """
    if wrong := sorted(rank for rank in ranks if not 0 <= rank < len(manifest.ranks)):
        raise UsageError(f"rank {wrong[0]} of {manifest.plan.layout.topology}, which has {len(manifest.ranks)}")
    wanted = np.unique(np.concatenate([np.empty(0, dtype=np.int64), *(manifest.ranks[rank] for rank in ranks)]))
    # Without checksums, the mover does not read to the end of a stored range to check it: `prove` does, over all nodes.
    bare = tuple(dataclasses.replace(file, checksums=()) for file in manifest.plan.index.files)
    plan = dataclasses.replace(manifest.plan, index=dataclasses.replace(manifest.plan.index, files=bare))
    part = restrict(plan, wanted.tolist())
    check_plan(part)
    with Mover(part, folder, sync=False) as mover:
        records = mover.do(range(len(part.units)))
        outcome = mover.finish(records)
    ranges: dict[int, list[CrcRange]] = {}
    for record in records:
        for file, pieces in record.read.items():
            ranges.setdefault(file, []).extend(pieces)
    with target_errors(folder, 0):
        for at in sorted(set(range(len(manifest.plan.layout.files))) - set(wanted.tolist())):
            (folder / manifest.plan.layout.files[at].path).touch(mode=0o444)
    return Loaded(
        num_files=len(wanted),
        bytes_read=outcome.bytes_read,
        bytes_needed=part.bytes_to_read,
        ranges={file: crc.join(pieces) for file, pieces in ranges.items()},
    )


def prove(files: Sequence[SourceFile], read: Iterable[Ranges], root: Path | None = None) -> Proof:
    """Compare what all nodes together have read with the checksums that the source states.

    A node that needs a part of a stored range cannot check it alone. CRC-32 values of ranges that follow each other
    combine to the value of the whole.

    Args:
        files: of the source.
        read: ranges that each node has read.
        root: folder of the source, to read what no rank needs: padding, and all of a file that only the commit proves.
            None leaves such ranges open.

    Raises:
        CorruptSourceError: with every range that differs.
    """
    ranges_by_file: dict[int, set[CrcRange]] = {}
    for node_ranges in read:
        for number, new in node_ranges.items():
            ranges_by_file.setdefault(number, set()).update(CrcRange(*piece) for piece in new)
    problems: list[str] = []
    num_proved = num_open = 0
    source = None if root is None else SourceReader(root, files)
    try:
        for number, ranges in sorted(ranges_by_file.items()):
            for stated in files[number].checksums:
                inside = _inside(sorted(ranges), stated)
                if not inside:
                    continue
                actual = _crc32(source, number, inside, stated, is_file=_is_file(files[number], stated))
                if actual is None:
                    num_open += 1
                    continue
                num_proved += 1
                if actual != stated.crc32:
                    problems.append(describe_mismatch(files[number], stated, actual))
    finally:
        if source is not None:
            source.close()
    if problems:
        raise damaged_ranges_error(problems, None if root is None else str(root))
    return Proof(proved=num_proved, open=num_open)


def _inside(ranges: Sequence[CrcRange], stated: Checksum) -> list[CrcRange]:
    """Return those of the sorted ranges that lie in the stated range."""
    end = stated.start + stated.num_bytes
    first = bisect.bisect_left(ranges, stated.start, key=lambda item: item.start)
    last = bisect.bisect_left(ranges, end, key=lambda item: item.start)
    return [item for item in ranges[first:last] if item.start + item.num_bytes <= end]


def _is_file(file: SourceFile, stated: Checksum) -> bool:
    """Return True for a checksum of a whole file, which the source's commit states where the container states none."""
    return stated.start == 0 and stated.num_bytes == file.num_bytes


def _crc32(
    source: SourceReader | None, file: int, ranges: Sequence[CrcRange], stated: Checksum, *, is_file: bool
) -> int | None:
    """Return the CRC-32 of a stated range of which sorted ranges are known, or None if too much of it is not known.

    A whole file is read to its end, however long it is: nothing else proves what was read of it.
    """
    if source is not None:
        ranges = sorted([*ranges, *_padding(source, file, ranges, stated, is_limited=not is_file)])
    chain = _chain(ranges, stated)
    if chain is not None:
        return crc.assemble(chain, start=stated.start, num_bytes=stated.num_bytes)
    if source is None or not is_file:
        return None
    return source.complete(file, ranges, stated.start, stated.num_bytes)[0]  # ranges overlap


def _padding(
    source: SourceReader, file: int, ranges: Sequence[CrcRange], stated: Checksum, *, is_limited: bool
) -> list[CrcRange]:
    """Read what sorted ranges leave out of the stated range; with a limit, read nothing if that is much."""
    gaps, position = [], stated.start
    for item in (*ranges, CrcRange(stated.start + stated.num_bytes, 0, 0)):
        if item.start > position:
            gaps.append((position, item.start - position))
        position = max(position, item.start + item.num_bytes)
    if is_limited and sum(length for _, length in gaps) > LARGEST_PADDING_BYTES:
        return []
    return [source.checksum(file, start, length) for start, length in gaps]


def _chain(ranges: Sequence[CrcRange], stated: Checksum) -> list[CrcRange] | None:
    """Return some of the sorted ranges that follow each other and fill the stated range, or None."""
    end = stated.start + stated.num_bytes
    leads_to: dict[int, CrcRange | None] = {stated.start: None}  # position that a chain reaches -> its last range
    for item in ranges:
        stop = item.start + item.num_bytes
        if item.start in leads_to and stop <= end and stop not in leads_to:
            leads_to[stop] = item
    chain: list[CrcRange] = []
    position = end
    while position != stated.start:
        last = leads_to.get(position)
        if last is None:
            return None
        chain.append(last)
        position = last.start
    return chain[::-1]
