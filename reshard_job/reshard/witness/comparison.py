"""Compare a finished target with its source: names, shapes and types of all tensors, every byte, and samples."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from reshard.errors import ReshardError, VerificationError
from reshard.storage.object_store import RemotePath
from reshard.witness.archives import Kept, keeping_small_objects
from reshard.witness.cover import count_places, find_byte_problems, find_cover_problems
from reshard.witness.matching import Match, Pair, Wanted, match
from reshard.witness.names import NameMap, Origin
from reshard.witness.pickles import ITEM_BYTES, NotWitnessedError
from reshard.witness.samples import Bytes, ElementReader, convert, draw, random_integers, widen
from reshard.witness.table import Ints, Piece, Table, Tensor, row_major, select
from reshard.witness.tensor_parallel import read_pattern_file

_ALL_ELEMENTS = 1 << 18
"""A target with no more elements is compared whole."""

_PLACES = 1 << 12
_LEAST_PLACES, _MOST_PLACES = 6, 8
"""Places in each tensor where elements are compared: about as many as make `_PLACES` in all."""

_MOST_PIECES = 1 << 21
"""Pieces of which it is looked up which bytes of which file they are, in a time of about ten seconds."""

_MOST_CORNERS = 6
_BATCH_ELEMENTS = 1 << 18
_REMOTE_TENSORS, _REMOTE_PLACES = 64, 2
"""Tensors of a source in an object store of which elements are compared, and places in each, which cost a request."""

_MOST_PROBLEMS = 20
_HINT = "this is a bug of reshard, or the source changed while it was read: please report it with the command"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A conversion as a stranger knows it.

    Attributes:
        source: folder of the source's files.
        source_format: name of its format.
        target: folder of the finished files.
        target_format: name of its format.
        states: states that were selected; empty for all.
        weight_dtype: type that was asked for, or None.
        allow_differences: copies of the source may differ, and weights from their masters.
        names: file of the name map, or None.
        patterns: file that says how tensor parallelism cut the source, or None.
        source_model: description of the model in the source's commit.
        target_model: description of the model in the target's commit.
    """

    source: Path
    source_format: str
    target: Path
    target_format: str
    states: Sequence[str] = ()
    weight_dtype: str | None = None
    allow_differences: bool = False
    names: Path | None = None
    patterns: Path | None = None
    source_model: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    target_model: Mapping[str, Any] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class WitnessReport:
    """Result of a comparison: numbers of compared tensors and elements.

    Attributes:
        tensors: tensors of the target whose names, shapes, types and places were compared.
        samples: elements that were compared.
        not_witnessed: reason -> number of tensors about which the stranger cannot say anything.
    """

    tensors: int = 0
    samples: int = 0
    not_witnessed: Mapping[str, int] = dataclasses.field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as COMMIT.json states them."""
        return dataclasses.asdict(self)


class Seen(NamedTuple):
    """What the witness has read of a source, or why it cannot read it, and small objects that it has fetched."""

    case: Case
    source: Table | NotWitnessedError
    kept: dict[str, Kept]


def see_source(case: Case) -> Seen:
    """Read the names and places of a source's tensors; the target need not be there yet.

    Raises:
        VerificationError: it cannot be read.
    """
    kept: dict[str, Kept] = {}
    with _as_witness(case, kept):
        try:
            return Seen(case, _read_source(case), kept)
        except NotWitnessedError as error:
            return Seen(case, error, kept)


def compare(seen: Seen, files: Mapping[str, int | None]) -> WitnessReport:
    """Compare a finished target with its source as a stranger would.

    Args:
        seen: what was read of the source.
        files: path of every file of the target -> its CRC-32 as it was written, or None.

    Raises:
        VerificationError: they differ; the error names tensors, and what was expected and found.
    """
    with _as_witness(seen.case, seen.kept):
        try:
            if isinstance(seen.source, NotWitnessedError):
                raise seen.source
            return _compare(seen.case, seen.source, files)
        except NotWitnessedError as error:
            return WitnessReport(not_witnessed={str(error): 1})


@contextlib.contextmanager
def _as_witness(case: Case, kept: dict[str, Kept]) -> Iterator[None]:
    """Prepare this process for many small objects, and say of errors that they are the witness's."""
    collects = gc.isenabled()
    gc.disable()  # many new objects and no cycles: the collector would search all objects of the plan again and again
    try:
        with keeping_small_objects(kept):
            yield
    except ReshardError:  # some are an OSError or a ValueError, too
        raise
    except OSError as error:
        raise VerificationError(f"a witness cannot read a file: {error}", path=str(case.target), hint=_HINT) from error
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError) as error:
        what = f"{type(error).__name__}: {error!s:.80}"
        raise VerificationError(
            f"a witness cannot compare source and result ({what}): nothing was published",
            path=str(case.target),
            hint=_HINT,
        ) from error
    finally:
        if collects:
            gc.enable()


def _compare(case: Case, source: Table, files: Mapping[str, int | None]) -> WitnessReport:
    target = _read_target(case)
    problems = [problem for key, tensor in target.tensors.items() for problem in find_cover_problems(key, tensor)]
    unknown: dict[str, int] = {}
    if (num_places := count_places(target)) <= _MOST_PIECES:
        problems += find_byte_problems(target, files)
    else:
        unknown[f"bytes of files: {num_places} pieces are too many"] = len(target.tensors)
    _refuse(case, problems)
    wanted = Wanted(
        names=NameMap(case.names),
        weight_dtype=case.weight_dtype,
        only_weights=case.target_format == "safetensors",
        prefers_masters=case.target_format in ("dcp", "megatron") and case.weight_dtype is None,
    )
    found = match(select(source, case.states), source, target, wanted)
    _refuse(case, found.problems)
    comparison = _Comparison(case, source, target)
    problems = list(comparison.find_problems(found))
    _refuse(case, problems)
    return WitnessReport(
        tensors=len(found.pairs),
        samples=comparison.num_samples,
        not_witnessed={**unknown, **found.unknown, **comparison.unknown},
    )


def _read_source(case: Case) -> Table:
    """Return the table of the source, which the strict reader has accepted.

    Raises:
        NotWitnessedError: the strict reader knows more forms of the format than the stranger.
    """
    try:
        return _read(
            case.source_format, case.source, case.source_model, read_pattern_file(case.patterns), is_target=False
        )
    except (ReshardError, OSError, NotWitnessedError):
        raise
    except Exception as error:
        kind = f"{type(error).__name__}: {error}"
        raise NotWitnessedError(
            f"a form of {case.source_format} that the stranger does not know ({kind:.80})"
        ) from error


def _read_target(case: Case) -> Table:
    """Return the table of the target.

    Raises:
        VerificationError: it is not of a form that the stranger knows, though we wrote it.
    """
    try:
        return _read(case.target_format, case.target, case.target_model, None, is_target=True)
    except (ReshardError, OSError, NotWitnessedError):
        raise
    except Exception as error:
        raise VerificationError(
            f"a stranger cannot read the result ({type(error).__name__}: {error!s:.80}): nothing was published",
            path=str(case.target),
            hint=_HINT,
        ) from error


def _read(name: str, root: Path, model: Mapping[str, Any], info: Any, *, is_target: bool) -> Table:
    """Read a checkpoint with the stranger of its format.

    Raises:
        NotWitnessedError: no stranger knows the format, or the stranger does not know the form.
    """
    # Imports take a large part of a small conversion's time: only the strangers that are asked are loaded.
    if name == "deepspeed":
        from reshard.witness import deepspeed

        return deepspeed.read(root, info=info, pipeline=model.get("pipeline"), is_target=is_target)
    if name == "universal":
        from reshard.witness import universal

        return universal.read(root, info=info, is_target=is_target)
    if name in ("dcp", "megatron"):
        from reshard.witness import dcp

        return dcp.read(root, is_megatron=name == "megatron", is_target=is_target)
    if name == "safetensors":
        from reshard.witness import safetensors

        return safetensors.read(root, is_target=is_target)
    raise NotWitnessedError(f"no stranger knows the format {name}")


def _refuse(case: Case, problems: Sequence[str]) -> None:
    if problems:
        more = [f"and {len(problems) - _MOST_PROBLEMS} more"] if len(problems) > _MOST_PROBLEMS else []
        raise VerificationError(
            f"read as a stranger, the result is not the source: {len(problems)} differences; nothing was published",
            path=str(case.target),
            problems=[*problems[:_MOST_PROBLEMS], *more],
            hint=_HINT,
        )


class _Sample(NamedTuple):
    """Elements of a tensor that are compared, by their number in the tensor."""

    pair: Pair
    element: Ints


class _Request(NamedTuple):
    """Elements of a copy of a tensor that are read."""

    tensor: Tensor | Origin
    copy: int
    element: Ints


class _Comparison:
    """Compares elements of a target's tensors with those of their origins."""

    def __init__(self, case: Case, source: Table, target: Table) -> None:
        self._case, self._target = case, target
        self._source_reader, self._target_reader = ElementReader(source), ElementReader(target)
        self.num_samples = 0
        self.unknown: dict[str, int] = {}

    def find_problems(self, found: Match) -> Iterator[str]:
        """Describe tensors of which a sampled element is not that of the source."""
        pairs = found.pairs
        total = sum(pair.target.num_elements for pair in pairs)
        count = max(_LEAST_PLACES, min(_MOST_PLACES, _PLACES // max(1, len(pairs))))
        count = total if total <= _ALL_ELEMENTS else count
        if isinstance(self._case.source, RemotePath) and len(pairs) > _REMOTE_TENSORS:
            chosen = np.argsort(random_integers(len(pairs), 1 << 62))[:_REMOTE_TENSORS].tolist()
            self.unknown["elements of a source in an object store"] = len(pairs) - _REMOTE_TENSORS
            pairs, count = [pairs[at] for at in sorted(chosen)], _REMOTE_PLACES
        batch: list[_Sample] = []
        size = 0
        for pair in pairs:
            if pair.target.num_elements:
                element = draw(pair.target.num_elements, count, _corners(pair.target))
                batch.append(_Sample(pair, element))
                size += len(element) * (1 + len(pair.target.copies))
            if size > _BATCH_ELEMENTS:
                yield from self._compare(batch)
                batch, size = [], 0
        yield from self._compare(batch)

    def _compare(self, batch: Sequence[_Sample]) -> Iterator[str]:
        """Compare the samples of some tensors, which are read together in the order of the files."""
        self.num_samples += sum(len(sample.element) for sample in batch)
        sources: list[_Request] = []
        targets: list[_Request] = []
        for (_, target, origin), element in batch:
            if origin is not None:
                sources += [_Request(origin, copy, element) for copy in range(self._count_copies(origin))]
            targets += [_Request(target, copy, element) for copy in range(len(target.copies))]
        stored = iter(_read_elements(self._source_reader, sources))
        written = iter(_read_elements(self._target_reader, targets))
        for pair, element in batch:
            _, target, origin = pair
            if origin is None:
                expected = [np.zeros((len(element), ITEM_BYTES[target.dtype]), dtype=np.uint8)]
            else:
                copies = [next(stored) for _ in range(self._count_copies(origin))]
                accepted = [_mean(copies, origin.dtype)] if origin.is_average else copies
                expected = [convert(bits, origin.dtype, target.dtype) for bits in accepted]
            for copy in range(len(target.copies)):
                actual = next(written)
                problems = [self._find_difference(pair, copy, element, (bits, actual)) for bits in expected]
                if all(problems):
                    yield problems[0]

    def _count_copies(self, origin: Origin) -> int:
        """Return how many copies of a source's tensor are read: all if they may differ, else the first."""
        if origin.is_average:
            return origin.num_averaged
        return origin.num_copies if origin.is_rank_local or self._case.allow_differences else 1

    def _find_difference(self, pair: Pair, copy: int, element: Ints, values: tuple[Bytes, Bytes]) -> str:
        """Describe the first element that is not the expected one; empty if there is none."""
        _, target, origin = pair
        expected, actual = values
        if np.array_equal(expected, actual):
            return ""
        unequal = (actual != expected).any(axis=1)
        if origin is not None and origin.dtype != target.dtype:  # any NaN is as good as another
            unequal &= ~(np.isnan(widen(actual, target.dtype)) & np.isnan(widen(expected, target.dtype)))
        if not unequal.any():
            return ""
        at = int(unequal.argmax())
        wanted, found = (f"0x{bits[at][::-1].tobytes().hex()}" for bits in values)
        return f"{self._describe(pair, copy, int(element[at]))}: expected {wanted}, found {found}"

    def _describe(self, pair: Pair, copy: int, element: int) -> str:
        index = [int(part) for part in np.unravel_index(element, pair.target.shape or (1,))]
        files, positions = pair.target.find(copy, np.array([element]))
        place = f"{self._target.files[int(files[0])]}, byte {int(positions[0])}" if files[0] >= 0 else "nowhere"
        return f"{pair.key}: element {index} of copy {copy} ({place})"


def _mean(copies: Sequence[Bytes], dtype: str) -> Bytes:
    """Return the mean of copies: the sum in float32, in the order of the ranks, divided by their number."""
    total = widen(copies[0], dtype).astype(np.float32)
    for copy in copies[1:]:
        total = total + widen(copy, dtype).astype(np.float32)
    mean = (total / np.float32(len(copies))).astype("<f4")
    return convert(np.ascontiguousarray(mean).view(np.uint8).reshape(-1, 4), "float32", dtype)


def _read_elements(reader: ElementReader, requests: Sequence[_Request]) -> list[Bytes]:
    """Read the elements of several requests together."""
    found: list[Bytes] = [np.zeros((0, 0), dtype=np.uint8)] * len(requests)
    for item_bytes in {ITEM_BYTES[request.tensor.dtype] for request in requests}:
        own = [at for at, request in enumerate(requests) if ITEM_BYTES[request.tensor.dtype] == item_bytes]
        places = [requests[at].tensor.find(requests[at].copy, requests[at].element) for at in own]
        files, positions = (np.concatenate(column) for column in zip(*places, strict=True))
        content = reader.read(files, positions, item_bytes)
        ends = np.cumsum([len(requests[at].element) for at in own]).tolist()
        for at, start, stop in zip(own, [0, *ends], ends, strict=False):
            found[at] = content[start:stop]
    return found


def _corners(tensor: Tensor) -> Ints:
    """Return the first and the last element of pieces, and of partitions that they are cut into."""
    corners: list[int] = []
    for copy in tensor.copies[:_MOST_CORNERS]:
        for piece in copy if len(copy) <= _MOST_CORNERS else [copy[0], copy[len(copy) // 2], copy[-1]]:
            corners += [_number_in(piece, 0), _number_in(piece, piece.num_elements - 1)]
            border = piece.holder.border
            if border and piece.strides == row_major(piece.size):
                borders = range(border - piece.start % border, piece.num_elements, border)
                step = max(1, len(borders) // _MOST_CORNERS)
                corners += [_number_in(piece, at + beside) for at in borders[::step] for beside in (-1, 0)]
    return np.array(sorted(set(corners)), dtype=np.int64)


def _number_in(piece: Piece, element: int) -> int:
    """Return the number in the whole tensor of an element of a piece; both count in row-major order."""
    if piece.size == piece.whole:
        return element
    number = 0
    for low, size, step in reversed(list(zip(piece.low, piece.size, row_major(piece.whole), strict=True))):
        element, index = divmod(element, size)
        number += (low + index) * step
    return number
