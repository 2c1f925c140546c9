"""Bugs planted in plans and in the executor: each is refused before a byte moves, or before the result is published."""

import dataclasses
import itertools
from collections import Counter
from collections.abc import Callable, Iterator

import numpy as np
import pytest

from reshard import api
from reshard.api import Conversion, RunOptions, convert, plan_of
from reshard.checksums import crc
from reshard.errors import PlanError, VerificationError
from reshard.execution import executor, tile
from reshard.formats import read_checkpoint
from reshard.planning.check import check_plan
from reshard.planning.plan import Plan, make_plan
from reshard.storage.source_reader import SourceReader
from reshard.storage.target_writer import TargetWriter
from reshard.tensors.geometry import Box
from reshard.tensors.layout import TargetLayout
from reshard.tensors.shard_table import ShardTable
from reshard.topology import Topology
from tests.boxes import in_boxes
from tests.fuzz.guard import state_of
from tests.fuzz.targets import checkpoints

SOURCES = {
    "deepspeed-0.19.8/pipeline-tp2-pp2/step-00000002": "tp=1,pp=2,dp=3",
    "deepspeed-0.19.8/zero2-dp3/step-00000002": "dp=2,zero=2",
    "deepspeed-0.19.8/zero3-dp3/step-00000002": "dp=2,zero=3",
    "dcp-2.13/fsdp2-flat/step-00000002": "dp=3,zero=3",
}


def plan_for(name: str) -> Plan:
    source, _ = checkpoints()[name]
    return plan_of(read_checkpoint(source, None), Topology.parse(SOURCES[name]), num_threads=1)


@pytest.fixture(scope="module", params=SOURCES)
def plan(request: pytest.FixtureRequest) -> Plan:
    return in_boxes(plan_for(request.param))


# Plans: rows of the target, or of the source, that are missing, doubled, shifted or swapped.


def rows(table: ShardTable, numbers: np.ndarray) -> ShardTable:
    """The table with these rows."""
    fields = {field.name: getattr(table, field.name)[numbers] for field in dataclasses.fields(table)}
    return ShardTable(**fields)


def changed(table: ShardTable, column: str, row: int, by: int, dim: int | None = None) -> ShardTable:
    values = getattr(table, column).copy()
    if dim is None:
        values[row] += by
    else:
        values[row, dim] += by
    return dataclasses.replace(table, **{column: values})


def swapped(table: ShardTable, first: int, second: int, *columns: str) -> ShardTable:
    values = {column: getattr(table, column).copy() for column in columns}
    for column in columns:
        values[column][[first, second]] = values[column][[second, first]]
    return dataclasses.replace(table, **values)


MISSING = "elements are covered|does not hold|written nowhere"


def without(table: ShardTable, row: int) -> ShardTable:
    return rows(table, np.delete(np.arange(len(table)), row))


def needed(table: ShardTable) -> np.ndarray:
    """Rows that are not a whole further copy by themselves: how many copies a format wants, only the format knows."""
    pairs = list(zip(table.tensor.tolist(), table.replica.tolist(), strict=True))
    rows_of, copies = Counter(pairs), Counter(tensor for tensor, _ in set(pairs))
    return np.array([at for at, pair in enumerate(pairs) if copies[pair[0]] == 1 or rows_of[pair] > 1])


def first_needed(table: ShardTable) -> int:
    return int(needed(table)[0])


def largest(table: ShardTable, *, sole: bool = True) -> int:
    """The row with most elements, be it a whole copy by itself or not."""
    among = np.arange(len(table)) if sole else needed(table)
    return int(among[table.size[among].prod(axis=1).argmax()])


def one_of_several(table: ShardTable) -> int:
    """A row of a tensor that is cut: alone it is no copy."""
    same = np.bincount(table.tensor, weights=table.replica == table.replica.min())[table.tensor]
    return int(np.flatnonzero((same > 1) & (table.replica == table.replica.min()))[0])


def of_other_size(table: ShardTable, row: int) -> int:
    """A row of another tensor and size."""
    count = table.size.prod(axis=1)
    return int(np.flatnonzero((table.tensor != table.tensor[row]) & (count != count[row]))[0])


def long_dim(table: ShardTable, row: int) -> int:
    return int(table.size[row].argmax())


PLANTED: dict[str, tuple[Callable[[ShardTable], ShardTable], str]] = {
    "missing": (lambda t: without(t, largest(t, sole=False)), MISSING),
    "the first missing": (lambda t: without(t, first_needed(t)), MISSING),
    "doubled": (lambda t: rows(t, np.append(np.arange(len(t)), largest(t))), "overlap|twice"),
    "shifted up": (lambda t: changed(t, "offset", largest(t), 1, long_dim(t, largest(t))), "outside|overlap|covered"),
    "one element too few": (lambda t: changed(t, "size", largest(t), -1, long_dim(t, largest(t))), "are covered"),
    "one element too many": (lambda t: changed(t, "size", largest(t), 1, long_dim(t, largest(t))),
                             "outside|overlap|twice"),
    "boxes of other tensors": (lambda t: swapped(t, largest(t), of_other_size(t, largest(t)), "tensor"),
                               "outside|overlap|covered|does not hold|is made of"),
    "in another copy": (lambda t: changed(t, "replica", one_of_several(t), 7), "are covered"),
}  # fmt: skip


@pytest.mark.parametrize("name", PLANTED)
def test_a_plan_whose_target_is_wrong_is_refused_and_the_tensor_named(plan: Plan, name: str) -> None:
    change, complaint = PLANTED[name]
    layout = dataclasses.replace(plan.layout, shards=change(plan.layout.shards))
    refused(plan, layout, complaint)


@pytest.mark.parametrize("name", [name for name in PLANTED if name != "in another copy"])
def test_a_plan_whose_source_is_wrong_is_refused_and_the_tensor_named(plan: Plan, name: str) -> None:
    change, complaint = PLANTED[name]
    needed = np.sort(np.concatenate(plan.source_rows))
    index = dataclasses.replace(plan.index, shards=change(rows(plan.index.shards, needed)))
    with pytest.raises(PlanError, match=complaint) as caught:
        check_plan(make_plan(index, plan.layout))
    assert any(str(tensor.key) in str(caught.value) for tensor in plan.index.tensors)


ZERO3 = "deepspeed-0.19.8/zero3-dp3/step-00000002"
WRONG_FAMILIES: dict[str, tuple[str, int, str]] = {
    "a part too long": ("chunk", 1, "twice|is written"),
    "parts too short, in more files": ("chunk", -1, "in chunks of|twice|is written"),
    "no parts": ("chunk", -(10**6), "in chunks of"),
    "one element too few": ("stop", -1, "are covered"),
    "one element too many": ("stop", 1, "in chunks of"),
    "the first element missing": ("start", 1, "are covered"),
    "an element before the first": ("start", -1, "in chunks of"),
    "elements of another type": ("item_bytes", -2, "in chunks of"),
    "in files that are not there": ("file", 10**6, "in chunks of"),
    "in the next files": ("file", 1, "in chunks of|twice|is written"),
    "in another place": ("byte_offset", 4, "twice|is written"),
    "of another copy": ("replica", 7, "are covered"),
}


@pytest.mark.parametrize("name", WRONG_FAMILIES)
def test_a_wrong_family_of_boxes_is_refused(name: str) -> None:
    column, by, complaint = WRONG_FAMILIES[name]
    plan = plan_for(ZERO3)
    table = plan.layout.shards
    assert table.has_families
    row = int((table.num_elements * (table.num_chunks > 1)).argmax())
    if column == "replica":  # a copy that is there in part
        table = changed(rows(table, np.append(np.arange(len(table)), row)), "stop", len(table), -1)
        row = len(table) - 1
    refused(plan, dataclasses.replace(plan.layout, shards=changed(table, column, row, by)), complaint)


@pytest.mark.parametrize("column", ["start", "stop", "item_bytes", "file"])
def test_a_wrong_family_of_the_source_is_refused(column: str) -> None:
    plan = plan_for(ZERO3)
    index = dataclasses.replace(plan.index, shards=changed(plan.index.shards, column, 0, 10**6))
    with pytest.raises(PlanError, match=r"source fp32/.*in chunks of"):
        check_plan(make_plan(index, plan.layout))


def refused(plan: Plan, layout: TargetLayout, complaint: str) -> None:
    with pytest.raises(PlanError, match=complaint) as caught:
        check_plan(make_plan(plan.index, layout))
    named = [str(tensor.key) for tensor in plan.target_tensors] + [file.path for file in layout.files]
    assert any(name in str(caught.value) for name in named)


@pytest.mark.parametrize("by", [4, -4, 64])
def test_bytes_that_are_written_over_others_are_refused_and_the_file_named(plan: Plan, by: int) -> None:
    table = plan.layout.shards
    layout = dataclasses.replace(plan.layout, shards=changed(table, "byte_offset", largest(table), by))
    refused(plan, layout, "written twice|is written")


def test_every_single_row_of_the_target_is_needed(plan: Plan) -> None:
    table = plan.layout.shards
    by_copy = {}
    for number, key in enumerate(zip(table.tensor.tolist(), table.replica.tolist(), strict=True)):
        by_copy.setdefault(key, []).append(number)
    for numbers in by_copy.values():
        if len(numbers) == 1:
            continue  # without its only row there is no such copy
        kept = np.delete(np.arange(len(table)), numbers[-1])
        with pytest.raises(PlanError, match="elements are covered"):
            check_plan(make_plan(plan.index, dataclasses.replace(plan.layout, shards=rows(table, kept))))
        if len(table) > 200:
            break


# Runs: what the executor does is changed under it.

NAME = "deepspeed-0.19.8/pipeline-tp2-pp2/step-00000002"


def touching_with(change: Callable[[Iterator], Iterator]) -> Callable:
    """`tile.find_touching`, with what it says of the target's rows changed."""
    real = tile.find_touching

    def touching(shards, found, region):
        rows_ = list(real(shards, found, region))
        return iter(change(rows_)) if shards is touching.target else iter(rows_)

    return touching


def drop_copies(found):
    return [(row, part) for row, part in found if row.replica == 0]


def drop_a_box(found):
    return found[1:] if len(found) > 1 else found


def double_a_box(found):
    return [found[0], *found]


def swap_places(found):
    """Two boxes of one size get each other's places in the files; the executor does not know."""
    for first, second in itertools.combinations(range(len(found)), 2):
        (row, part), (other, other_part) = found[first], found[second]
        if part.size == other_part.size and part != other_part and row.replica == other.replica:
            found[first], found[second] = (
                (moved(other, other_part, part), part),
                (moved(row, part, other_part), other_part),
            )
            break
    return found


def moved(row, part: Box, to: Box):
    """The row, as if what is at `part` of it were at `to`."""
    by = [new - old for new, old in zip(to.offset, part.offset, strict=True)]
    return row._replace(box=Box(tuple(low + step for low, step in zip(row.box.offset, by, strict=True)), row.box.size))


def in_flight(monkeypatch: pytest.MonkeyPatch, change: Callable) -> None:
    touching = touching_with(change)
    real = executor.Mover.__init__

    def init(self, plan, *arguments, **options):
        touching.target = plan.layout.shards
        real(self, plan, *arguments, **options)

    monkeypatch.setattr(executor.Mover, "__init__", init)
    monkeypatch.setattr(tile, "find_touching", touching)


def drop_a_tile(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither read nor written: sums over both sides agree."""
    real, count = tile.Carrier.move, itertools.count()
    monkeypatch.setattr(tile.Carrier, "move", lambda self, *rest: None if next(count) == 3 else real(self, *rest))


def double_a_tile(monkeypatch: pytest.MonkeyPatch) -> None:
    """Moved twice: sums over both sides agree, and are not the tensor's."""
    real, count = tile.Carrier.move, itertools.count()

    def move(self, *rest):
        real(self, *rest)
        if next(count) == 3:
            real(self, *rest)

    monkeypatch.setattr(tile.Carrier, "move", move)


def drop_a_unit(monkeypatch: pytest.MonkeyPatch) -> None:
    real = executor.Mover.do
    monkeypatch.setattr(executor.Mover, "do", lambda self, units, done=None: real(self, list(units)[1:], done))


def wrong_elements(monkeypatch: pytest.MonkeyPatch, change: Callable[[np.ndarray], None]) -> None:
    """The first part of a tile that goes elsewhere than the rest is changed on the way."""
    real, count = np.ascontiguousarray, itertools.count()

    class Numpy:
        def __getattr__(self, name):
            return getattr(np, name)

        @staticmethod
        def ascontiguousarray(value):
            found = real(value)
            part = isinstance(value, np.ndarray) and value.base is not None and 2 <= value.size < value.base.size
            if part and found.dtype.kind == "u" and found.min() != found.max() and next(count) == 0:
                found = found.copy()
                change(found.reshape(-1))
            return found

    monkeypatch.setattr(tile, "np", Numpy())


def roll(elements: np.ndarray) -> None:
    elements[:] = np.roll(elements, 1)


def swap(elements: np.ndarray) -> None:
    first, second = int(elements.argmin()), int(elements.argmax())
    elements[[first, second]] = elements[[second, first]]


def flip(elements: np.ndarray) -> None:
    elements[0] ^= elements.dtype.type(1)


def forget(elements: np.ndarray) -> None:
    elements[int(elements.argmax())] = 0


def repeat(elements: np.ndarray) -> None:
    elements[int(elements.argmax())] = elements.min()


def written_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """The write goes 4 bytes too far; the executor does not know."""
    real, count = TargetWriter.write, itertools.count()

    def write(self, file, position, content, crc32=None):
        late = 4 if next(count) == 2 else 0
        piece = real(self, file, position + late, content, crc32)
        return piece._replace(start=position)

    monkeypatch.setattr(TargetWriter, "write", write)


def lost_write(monkeypatch: pytest.MonkeyPatch) -> None:
    """The storage says that it wrote, and did not."""
    write, count = TargetWriter.write, itertools.count()

    def lose(self, file, position, content, crc32=None):
        data = np.zeros_like(content) if next(count) == 2 else content
        piece = write(self, file, position, data, crc32)
        return piece._replace(crc32=int(crc.crc32(content.data)))

    monkeypatch.setattr(TargetWriter, "write", lose)


BUGS = {
    "dropped copies": lambda m: in_flight(m, drop_copies),
    "a dropped box": lambda m: in_flight(m, drop_a_box),
    "a doubled box": lambda m: in_flight(m, double_a_box),
    "elements one place too far": lambda m: wrong_elements(m, roll),
    "two swapped elements": lambda m: wrong_elements(m, swap),
    "a flipped bit": lambda m: wrong_elements(m, flip),
    "a missing element": lambda m: wrong_elements(m, forget),
    "an element twice": lambda m: wrong_elements(m, repeat),
    "a dropped tile": drop_a_tile,
    "a doubled tile": double_a_tile,
    "a dropped unit": drop_a_unit,
}
BUGS_OF_PLACE = {
    "swapped places": lambda m: in_flight(m, swap_places),
    "written elsewhere": written_elsewhere,
    "a lost write": lost_write,
}


def run(tmp_path, *, reread: bool = False) -> None:
    source, _ = checkpoints()[NAME]
    before = state_of(source)
    wanted = Conversion(source=source, target=tmp_path / "out", topology=Topology.parse(SOURCES[NAME]))
    try:
        convert(wanted, RunOptions(num_threads=1, sync=False, reread=reread))
    finally:
        assert state_of(source) == before


@pytest.mark.parametrize("mapped", [False, True])
@pytest.mark.parametrize("name", BUGS)
def test_a_bug_of_the_executor_is_not_published(
    name: str, mapped: bool, tmp_path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(SourceReader, "may_map", mapped)
    BUGS[name](monkeypatch)
    with pytest.raises(VerificationError):
        run(tmp_path)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", BUGS_OF_PLACE)
def test_what_went_to_a_wrong_place_of_the_right_size_is_found_by_reading_again(
    name: str, tmp_path, monkeypatch: pytest.MonkeyPatch
) -> None:
    BUGS_OF_PLACE[name](monkeypatch)
    with pytest.raises(VerificationError, match="reads back differently"):
        run(tmp_path, reread=True)
    assert not list(tmp_path.iterdir())


def test_a_copy_that_the_plan_forgets_leaves_bytes_that_nobody_accounts_for(
    tmp_path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = api.make_plan

    def forgetful(index, layout, **options):
        first = rows(layout.shards, np.flatnonzero(layout.shards.replica == 0))
        assert len(first) < len(layout.shards)
        return real(index, dataclasses.replace(layout, shards=first), **options)

    monkeypatch.setattr(api, "make_plan", forgetful)
    with pytest.raises(PlanError, match="are neither of a tensor, nor constant, nor padding"):
        run(tmp_path)
    assert not list(tmp_path.iterdir())


def test_without_a_planted_bug_the_run_succeeds(tmp_path) -> None:
    run(tmp_path, reread=True)
    assert (tmp_path / "out" / "COMMIT.json").exists()
