"""Make the files that some ranks open, from a manifest; and the proof over all nodes that no byte was damaged."""

from __future__ import annotations

import bisect
import dataclasses
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path

import numpy as np

from reshard.checksums import crc
from reshard.checksums.crc import Piece
from reshard.commits.commit import check_files, read_commit
from reshard.errors import CorruptSourceError, UsageError
from reshard.execution.executor import Mover
from reshard.planning.check import check_plan
from reshard.storage.source_reader import SourceReader, damaged, differs
from reshard.storage.target_writer import target_errors
from reshard.tensors.layout import Checksum, SourceFile
from reshard.virtual.manifest import Manifest, commit_crc32
from reshard.virtual.restrict import restrict

_LARGEST_PADDING_BYTES = 1 << 20

Ranges = Mapping[int, Sequence[Piece]]
"""What was read of each source file, with checksums."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Loaded:
    """What was made.

    Attributes:
        num_files: files with content.
        bytes_read: of the source.
        bytes_needed: tensor bytes of the source that the files are made of, each counted once.
        ranges: what was read of each source file.
    """

    num_files: int
    bytes_read: int
    bytes_needed: int
    ranges: dict[int, list[Piece]]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Proof:
    """How much of what was read is proved by the source's own checksums.

    Attributes:
        proved: checksums that agree.
        open: checksums of ranges that were read in part only.
    """

    proved: int
    open: int


def check_source(manifest: Manifest) -> None:
    """The source is the one that the manifest was made of, and complete.

    Raises:
        CorruptSourceError: it was removed, changed or replaced.
    """
    root = manifest.plan.index.root
    found = commit_crc32(root)
    if found != manifest.source_commit:
        expected, actual = ("none" if value is None else f"{value:08x}" for value in (manifest.source_commit, found))
        raise CorruptSourceError(
            f"its COMMIT.json has CRC-32 {actual}, {expected} when the virtual commit was made: removed or replaced",
            path=str(root),
            hint="use an earlier commit",
        )
    if found is not None:
        check_files(root, read_commit(root))


def load_files(manifest: Manifest, ranks: Collection[int], folder: Path) -> Loaded:
    """Write the files that `ranks` open into `folder`, which exists and is empty; every source byte is read once.

    The target's other files are there with no content: the framework lists them, and fails if it opens one.

    Raises:
        UsageError: a rank that the target has not.
        CorruptSourceError: the source ended early.
        StorageFullError: no space left in `folder`.
        VerificationError: digests of what was read and what was written differ.
    """
    if wrong := sorted(rank for rank in ranks if not 0 <= rank < len(manifest.ranks)):
        raise UsageError(f"rank {wrong[0]} of {manifest.plan.layout.topology}, which has {len(manifest.ranks)}")
    wanted = np.unique(np.concatenate([np.empty(0, dtype=np.int64), *(manifest.ranks[rank] for rank in ranks)]))
    # Alone, this would read on to the end of a stored range to check it: all nodes together prove it, see `prove`.
    bare = tuple(dataclasses.replace(file, checksums=()) for file in manifest.plan.index.files)
    plan = dataclasses.replace(manifest.plan, index=dataclasses.replace(manifest.plan.index, files=bare))
    part = restrict(plan, wanted.tolist())
    check_plan(part)
    with Mover(part, folder, sync=False) as mover:
        records = mover.do(range(len(part.units)))
        outcome = mover.finish(records)
    ranges: dict[int, list[Piece]] = {}
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
    """Compare what all nodes have read together with the checksums that the source states.

    A node that needs a part of a stored range cannot check it alone; CRC-32 of parts add up to that of the whole.

    Args:
        files: of the source.
        read: what each node has read.
        root: folder of the source, to read what no rank needs: padding, and all of a file that the commit alone proves;
            None leaves such ranges open.

    Raises:
        CorruptSourceError: with every range that differs.
    """
    pieces: dict[int, set[Piece]] = {}
    for ranges in read:
        for number, own in ranges.items():
            pieces.setdefault(number, set()).update(Piece(*piece) for piece in own)
    problems: list[str] = []
    proved = left = 0
    source = None if root is None else SourceReader(root, files)
    try:
        for number, found in sorted(pieces.items()):
            for stated in files[number].checksums:
                inside = _inside(sorted(found), stated)
                if not inside:
                    continue
                actual = _crc32(source, number, inside, stated, is_file=_is_file(files[number], stated))
                if actual is None:
                    left += 1
                    continue
                proved += 1
                if actual != stated.crc32:
                    problems.append(differs(files[number], stated, actual))
    finally:
        if source is not None:
            source.close()
    if problems:
        raise damaged(problems, None if root is None else str(root))
    return Proof(proved=proved, open=left)


def _inside(pieces: Sequence[Piece], stated: Checksum) -> list[Piece]:
    """Those of the sorted pieces that lie in the stated range."""
    end = stated.start + stated.num_bytes
    first = bisect.bisect_left(pieces, stated.start, key=lambda piece: piece.start)
    last = bisect.bisect_left(pieces, end, key=lambda piece: piece.start)
    return [piece for piece in pieces[first:last] if piece.start + piece.num_bytes <= end]


def _is_file(file: SourceFile, stated: Checksum) -> bool:
    """True for a checksum of a whole file: that of the commit, the only one that a virtual commit has."""
    return stated.start == 0 and stated.num_bytes == file.num_bytes


def _crc32(
    source: SourceReader | None, file: int, pieces: Sequence[Piece], stated: Checksum, *, is_file: bool
) -> int | None:
    """CRC-32 of a stated range of which sorted pieces are known, or None where too much of it is not.

    A whole file is read to its end, however much that is: nothing else proves what was read of it.
    """
    if source is not None:
        pieces = sorted([*pieces, *_padding(source, file, pieces, stated, is_limited=not is_file)])
    chain = _chain(pieces, stated)
    if chain is not None:
        return crc.assemble(chain, start=stated.start, num_bytes=stated.num_bytes)
    if source is None or not is_file:
        return None
    return source.complete(file, pieces, stated.start, stated.num_bytes)[0]  # pieces overlap


def _padding(
    source: SourceReader, file: int, pieces: Sequence[Piece], stated: Checksum, *, is_limited: bool
) -> list[Piece]:
    """Read what sorted pieces leave out of the stated range; with a limit nothing where that is much."""
    gaps, position = [], stated.start
    for piece in (*pieces, Piece(stated.start + stated.num_bytes, 0, 0)):
        if piece.start > position:
            gaps.append((position, piece.start - position))
        position = max(position, piece.start + piece.num_bytes)
    if is_limited and sum(length for _, length in gaps) > _LARGEST_PADDING_BYTES:
        return []
    return [source.checksum(file, start, length) for start, length in gaps]


def _chain(pieces: Sequence[Piece], stated: Checksum) -> list[Piece] | None:
    """Some of the sorted pieces that lie end to end in the stated range and fill it, or None."""
    end = stated.start + stated.num_bytes
    leads_to: dict[int, Piece | None] = {stated.start: None}  # position that a chain reaches -> its last piece
    for piece in pieces:
        stop = piece.start + piece.num_bytes
        if piece.start in leads_to and stop <= end and stop not in leads_to:
            leads_to[stop] = piece
    chain: list[Piece] = []
    position = end
    while position != stated.start:
        last = leads_to.get(position)
        if last is None:
            return None
        chain.append(last)
        position = last.start
    return chain[::-1]
