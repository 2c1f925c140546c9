"""A run refuses differences between things that must be equal: places, copies, weights and their masters."""

import dataclasses
import itertools
import json
import shutil
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from reshard import api
from reshard.cli.main import main
from reshard.contract import ExitCode
from reshard.errors import VerificationError
from reshard.execution.executor import Mover, Outcome
from reshard.execution.journal import from_json, to_json
from reshard.execution.verify import read_digests, total_digest
from reshard.folders import writing
from reshard.formats import FORMATS, read_checkpoint
from reshard.planning import plan as plan_module
from reshard.planning.plan import make_plan
from reshard.tensors.cast import find_unexplained
from reshard.tensors.layout import Index, TargetLayout
from reshard.tensors.shard_table import ShardTable
from reshard.topology import Topology
from tests.fuzz.guard import state_of
from tests.golden import without_checksums
from tests.golden.command import BF16, DEEPSPEED, HERE, PIPELINE, ZERO2, ZERO3
from tests.golden.files import MODEL, STEP, edit

FSDP = HERE / "dcp-2.13" / "fsdp2-flat" / STEP
CONVERSIONS = {
    "pipeline": (PIPELINE, "tp=1,pp=2,dp=3", ""),
    "zero2": (ZERO2, "dp=2,zero=2", ""),
    "zero3": (ZERO3, "dp=2,zero=3", ""),
    "bf16": (BF16, "dp=3,zero=1", ""),
    "dcp": (FSDP, "dp=3,zero=3", ""),
    "universal": (ZERO2, "zero=1", "universal"),
    "safetensors": (ZERO2, "zero=1", "safetensors"),
}


def run(source: Path, to: str, form: str, folder: Path, *more: str) -> ExitCode:
    """Run a conversion; a refused one leaves nothing behind, and no run changes its source."""
    before = state_of(source)
    words = ["run", str(source), str(folder / "out"), "--to", to, *(["--format", form] if form else [])]
    code = ExitCode(main([*words, "--quiet", *more]))
    assert state_of(source) == before
    assert code is ExitCode.OK or not list(folder.iterdir())
    return code


# Where the target's bytes go.


def with_layout(monkeypatch: pytest.MonkeyPatch, change: Callable[[TargetLayout], TargetLayout]) -> None:
    """A bug of a format's writer: the run gets another layout than the one that the files' own metadata describe."""
    monkeypatch.setattr(api, "make_plan", lambda index, layout, **options: make_plan(index, change(layout), **options))


def alike(layout: TargetLayout, index_tensors: tuple) -> Iterator[tuple[int, int]]:
    """Pairs of tensors of one state, shape and type."""
    tensors = layout.tensors or index_tensors
    seen: dict[tuple, int] = {}
    for at in np.unique(layout.shards.tensor).tolist():
        tensor = tensors[at]
        kind = (tensor.key.state, tensor.shape, tensor.dtype)
        if tensor.num_elements > 1 and kind in seen:
            yield seen[kind], at
        seen[kind] = at


def exchanged(column: np.ndarray, one: int, other: int) -> np.ndarray:
    return np.where(column == one, other, np.where(column == other, one, column))


def swap_tensors(layout: TargetLayout, tensors: tuple) -> TargetLayout:
    shards = layout.shards
    named = exchanged(shards.tensor, *next(alike(layout, tensors)))
    return dataclasses.replace(layout, shards=dataclasses.replace(shards, tensor=named))


def swap_places(layout: TargetLayout, tensors: tuple) -> TargetLayout:
    """Two rows of one size get each other's file and position."""
    shards = layout.shards
    one, other = next(
        (one, other)
        for pair in alike(layout, tensors)
        for one, other in itertools.product(*(np.flatnonzero(shards.tensor == at).tolist() for at in pair))
        if (shards.size[one] == shards.size[other]).all() and shards.chunk[one] == shards.chunk[other]
    )
    columns = {}
    for name in ("file", "byte_offset"):
        columns[name] = getattr(shards, name).copy()
        columns[name][[one, other]] = columns[name][[other, one]]
    return dataclasses.replace(layout, shards=dataclasses.replace(shards, **columns))


def swap_origins(layout: TargetLayout, tensors: tuple) -> TargetLayout:
    one, other = next(alike(layout, tensors))
    origins = list(layout.origins or range(len(tensors)))
    origins[one], origins[other] = origins[other], origins[one]
    return dataclasses.replace(layout, tensors=layout.tensors or tensors, origins=tuple(origins))


def rows_of(shards: ShardTable, kept: np.ndarray) -> ShardTable:
    return shards.take(np.flatnonzero(kept))


def forget_a_copy(layout: TargetLayout, _tensors: tuple) -> TargetLayout:
    """All rows of one copy of a tensor that is stored twice."""
    shards = layout.shards
    at = int(np.flatnonzero(shards.replica > 0)[0])
    kept = (shards.tensor != shards.tensor[at]) | (shards.replica != shards.replica[at])
    return dataclasses.replace(layout, shards=rows_of(shards, kept))


MUTANTS = {
    "two tensors": (swap_tensors, ExitCode.VERIFICATION_FAILED),
    "two places": (swap_places, ExitCode.VERIFICATION_FAILED),
    "two origins": (swap_origins, ExitCode.PLAN_INVALID),
}


@pytest.mark.parametrize("name", CONVERSIONS)
@pytest.mark.parametrize("mutant", MUTANTS)
def test_tensors_in_each_others_places_are_not_published(
    mutant: str, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, to, form = CONVERSIONS[name]
    change, expected = MUTANTS[mutant]
    tensors = read_checkpoint(source, None).tensors
    with_layout(monkeypatch, lambda layout: change(layout, tensors))
    assert run(source, to, form, tmp_path) is expected


@pytest.mark.parametrize("name", ["pipeline", "tied"])
def test_a_copy_that_the_layout_forgets_is_not_published(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    to = {"pipeline": "tp=2,pp=1,dp=1", "tied": "tp=1,pp=2,dp=1"}[name]
    with_layout(monkeypatch, lambda layout: forget_a_copy(layout, ()))
    assert run(PIPELINE, to, "", tmp_path) is ExitCode.PLAN_INVALID


def test_a_move_that_is_dropped_behind_the_check_is_not_published(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = api.plan_conversion

    def forgetful(*arguments, **options):
        plan = real(*arguments, **options)
        last = max(at for at, rows in enumerate(plan.target_rows) if len(rows))
        fewer = [rows[:-1] if at == last else rows for at, rows in enumerate(plan.target_rows)]
        return dataclasses.replace(plan, target_rows=tuple(fewer))

    monkeypatch.setattr(api, "plan_conversion", forgetful)
    assert run(ZERO2, "dp=2,zero=2", "", tmp_path) is ExitCode.VERIFICATION_FAILED


@pytest.mark.parametrize("name", CONVERSIONS)
def test_constant_bytes_that_a_file_lacks_are_not_published(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def drop(layout: TargetLayout) -> TargetLayout:
        first, *rest = layout.files
        return dataclasses.replace(layout, files=(dataclasses.replace(first, fixed=tuple(first.fixed)[1:]), *rest))

    source, to, form = CONVERSIONS[name]
    with_layout(monkeypatch, drop)
    assert run(source, to, form, tmp_path) is ExitCode.PLAN_INVALID


@pytest.mark.parametrize("name", CONVERSIONS)
def test_every_byte_of_a_target_is_of_a_tensor_or_constant_or_padding(name: str) -> None:
    source, to, form = CONVERSIONS[name]
    index = read_checkpoint(source, None)
    plan = api.plan_of(index, Topology.parse(to), target_format=form)
    assert plan.layout.zeros is not None
    for at, file in enumerate(plan.layout.files):
        seen = np.zeros(file.num_bytes, dtype=np.int64)
        for position, content in file.fixed:
            seen[position : position + len(content)] += 1
        for first, last, start, stop in zip(*(column.tolist() for column in plan.layout.zeros), strict=True):
            if first <= at < last:
                seen[start:stop] += 1
        table = plan.layout.shards.boxes()
        for number in np.flatnonzero(table.file == at).tolist():
            tensor = plan.target_tensors[int(table.tensor[number])]
            row = table.row(number, len(tensor.shape))
            positions, length = row.byte_ranges(row.box, tensor.item_bytes)
            for position in positions:
                seen[position : position + length] += 1
        assert (seen == 1).all(), file.path


def test_a_format_that_does_not_say_what_is_padding_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    real = writing.format_of

    class Silent:
        def layout(self, index, request):
            return dataclasses.replace(real(index.format).layout(index, request), zeros=None)

    monkeypatch.setattr(writing, "format_of", lambda _name: Silent())
    with pytest.raises(api.PlanError, match="which bytes of its files are padding"):
        api.plan_of(read_checkpoint(ZERO2, None), Topology.parse("dp=2,zero=2"))
    assert FORMATS


# What the source holds several times.


def of_state(index: Index, state: str, replica: int) -> Callable:
    return lambda row: index.tensors[row.tensor].key.state == state and row.replica == replica


@pytest.mark.parametrize("state", ["weight", "fp32", "exp_avg", "exp_avg_sq"])
@pytest.mark.parametrize("more", [(), ("--resume",), ("--worker", "0/1"), ("--threads", "1")])
def test_copies_that_differ_between_ranks_are_refused_with_tensor_and_files(
    state: str, more: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = without_checksums.copied(PIPELINE, tmp_path / "in")
    index = read_checkpoint(source, None)
    row = without_checksums.flip(index, of_state(index, state, 1))
    (tmp_path / "there").mkdir()
    words = ["run", str(source), str(tmp_path / "there" / "out"), "--to", "tp=1,pp=2,dp=3", "--quiet", *more]
    assert main(words) == ExitCode.SOURCE_INVALID
    told = capsys.readouterr().err
    first = next(line for line in told.splitlines() if str(index.tensors[row.tensor].key) in line)
    assert index.files[row.file].path in first
    assert not (tmp_path / "there" / "out").exists()


@pytest.mark.parametrize("state", ["weight", "fp32", "exp_avg"])
def test_the_first_copies_are_taken_where_differences_are_allowed(state: str, tmp_path: Path) -> None:
    source = without_checksums.copied(PIPELINE, tmp_path / "in")
    index = read_checkpoint(source, None)
    row = without_checksums.flip(index, of_state(index, state, 1))
    (tmp_path / "there").mkdir()
    assert run(source, "tp=1,pp=2,dp=3", "", tmp_path / "there", "--allow-differences") is ExitCode.OK
    there = json.loads((tmp_path / "there" / "out" / "COMMIT.json").read_text())["digests"]
    key = str(index.tensors[row.tensor].key)
    assert there[key] == read_digests(read_checkpoint(PIPELINE, None))[key]


def test_copies_with_the_same_stated_checksum_are_not_read() -> None:
    plan = api.plan_of(read_checkpoint(PIPELINE, None), Topology.parse("tp=1,pp=2,dp=3"))
    compared = {tensor.key.state for tensor, rows in zip(plan.index.tensors, plan.copy_rows, strict=True) if len(rows)}
    assert compared == {"fp32", "exp_avg", "exp_avg_sq"}
    stored = sum(file.num_bytes for file in plan.index.files)
    assert 0 < plan.bytes_to_compare < plan.bytes_to_read + plan.bytes_to_compare < stored


def test_a_source_with_one_copy_of_everything_is_read_once() -> None:
    plan = api.plan_of(read_checkpoint(ZERO2, None), Topology.parse("dp=2,zero=2"))
    assert plan.bytes_to_compare == 0


@pytest.mark.parametrize("flipped", [0, 2])
def test_buffers_that_each_rank_computes_for_itself_may_differ_and_are_verified(
    flipped: int, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    source = without_checksums.copied(ZERO3, tmp_path / "in")
    index = read_checkpoint(source, None)
    assert index.rank_local
    without_checksums.flip(
        index, lambda row: index.tensors[row.tensor].key in index.rank_local and row.replica == flipped
    )
    (tmp_path / "there").mkdir()
    assert run(source, "dp=2,zero=3", "", tmp_path / "there") is ExitCode.OK
    names = tmp_path / "names.yaml"
    names.write_text('{version: 1, rules: [{from: "{name:any}", to: "model.{name}"}]}')
    for words in ([source], [source, tmp_path / "there/out"], [source, "--names", names], [tmp_path / "there/out"]):
        capfd.readouterr()
        assert main(["verify", *map(str, words)]) == ExitCode.OK
        assert ("buffers differ between data-parallel ranks" in capfd.readouterr().err) is (words[0] == source)


# Weights and their masters.


HALF = {
    "bf16": BF16,
    "bf16-optimizer": DEEPSPEED / "bf16-optimizer-dp2" / STEP,
    "zero0-bf16": DEEPSPEED / "zero0-bf16-dp2" / STEP,
    "zero0-fused-bf16": DEEPSPEED / "zero0-fused-bf16-dp2" / STEP,
    "fp32": ZERO2,
}


@pytest.mark.parametrize("name", HALF)
@pytest.mark.parametrize("state", ["weight", "fp32"])
def test_a_weight_that_is_not_its_master_rounded_is_not_published(
    name: str, state: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = without_checksums.copied(HALF[name], tmp_path / "in")
    index = read_checkpoint(source, None)
    assert index.has_rounded_weights
    masters = {tensor.key.name for tensor in index.tensors if tensor.key.state == "fp32"}

    def wanted(row) -> bool:
        key = index.tensors[row.tensor].key
        return key.state == state and key.name in masters

    # Of a master a bit that rounding does not take away.
    row = without_checksums.flip(index, wanted, byte=2 if state == "fp32" else 0)
    (tmp_path / "there").mkdir()
    to = str(index.topology)
    assert run(source, to, "", tmp_path / "there") is ExitCode.VERIFICATION_FAILED
    assert f"weight/{index.tensors[row.tensor].key.name}: 1 of " in capsys.readouterr().err
    assert run(source, to, "", tmp_path / "there", "--allow-differences") is ExitCode.OK


def swap_weights(index: Index) -> Index:
    """A bug of the reader: it takes two weights of one shape for each other, and not their masters."""
    kinds = [(tensor.key.state, tensor.shape) for tensor in index.tensors]
    pairs = itertools.combinations([at for at, (state, _) in enumerate(kinds) if state == "weight"], 2)
    one, other = next(pair for pair in pairs if kinds[pair[0]] == kinds[pair[1]] and len(kinds[pair[0]][1]) == 2)
    shards = dataclasses.replace(index.shards, tensor=exchanged(index.shards.tensor, one, other))
    return dataclasses.replace(index, shards=shards)


def test_weights_that_the_reader_takes_for_each_other_are_not_published(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = api.read_checkpoint
    monkeypatch.setattr(
        api,
        "read_checkpoint",
        lambda path, commit, *_options: swap_weights(real(path, commit)) if path == PIPELINE else real(path, commit),
    )
    monkeypatch.setattr(api, "check_digests", lambda *_arguments, **_options: None)  # of the source's commit
    assert run(PIPELINE, "tp=1,pp=2,dp=3", "", tmp_path) is ExitCode.VERIFICATION_FAILED


def test_other_bits_of_nan_and_flushed_numbers_are_no_difference() -> None:
    masters = np.array([np.nan, np.nan, 1e-40, -1e-40, 1.0, 1.00390625, np.inf], dtype=np.float32).view(np.uint32)
    weights = np.array([0x7FC0, 0xFFFF, 0, 0x8000, 0x3F80, 0x3F80, 0x7F80], dtype=np.uint16)
    assert not find_unexplained(weights, masters, "bfloat16", "float32").any()
    wrong = np.array([0x7F80, 0, 0x3F80, 0x3F80, 0x3F81, 0x3F81, 0x7FC0], dtype=np.uint16)
    assert find_unexplained(wrong, masters, "bfloat16", "float32").all()


def test_weights_of_nan_with_other_bits_than_their_masters_are_published(tmp_path: Path) -> None:
    """Processors write different patterns for a NaN: digests differ, and the elements decide."""
    source = without_checksums.copied(BF16, tmp_path / "in")
    index = read_checkpoint(source, None)
    number = next(at for at, tensor in enumerate(index.tensors) if tensor.key.state == "fp32")
    name = index.tensors[number].key.name
    patterns = {"fp32": np.float32(np.nan).tobytes(), "weight": b"\xff\xff"}
    for row in map(index.shards.row, range(len(index.shards)), [2] * len(index.shards)):
        key = index.tensors[row.tensor].key
        if key.name == name and key.state in patterns and not any(row.box.offset):
            path = source / index.files[row.file].path
            content = bytearray(path.read_bytes())
            content[row.byte_offset : row.byte_offset + len(patterns[key.state])] = patterns[key.state]
            path.write_bytes(content)
    (tmp_path / "there").mkdir()
    assert run(source, "dp=3,zero=1", "", tmp_path / "there") is ExitCode.OK


@pytest.mark.parametrize("setting", ["quantize_training", "compression_training", "hybrid_engine"])
def test_weights_that_are_changed_behind_the_optimizers_back_are_not_compared(setting: str, tmp_path: Path) -> None:
    source = tmp_path / STEP
    shutil.copytree(BF16, source, ignore=shutil.ignore_patterns("COMMIT.json"))

    def change(value: dict) -> None:
        value["ds_config"] = {**value["ds_config"], setting: {"enabled": True}}

    assert read_checkpoint(source, None).has_rounded_weights
    edit(source, MODEL.format(0), change)
    assert not read_checkpoint(source, None).has_rounded_weights


def finish_as_resumed(source: Path, target: Path, is_older: Callable[[int], bool]) -> Outcome:
    """Finish a conversion of which an older version, whose records compare no weights, did some units."""
    plan = api.plan_of(read_checkpoint(source, None), Topology.parse("dp=3,zero=1"), num_threads=1)
    assert plan.roundings
    target.mkdir()
    with Mover(plan, target, sync=False) as mover:
        records = [from_json(to_json(record)) for record in mover.do(range(len(plan.units)))]
        assert any(record.rounded for record in records)
        for record in records:
            if is_older(record.unit):
                record.rounded.clear()
        return mover.finish(records)


OLDER = {
    "first": lambda unit: unit == 0,
    "all": lambda _unit: True,
    "all but the first": lambda unit: unit > 0,
}


@pytest.mark.parametrize("is_older", OLDER.values(), ids=OLDER)
def test_records_of_an_older_version_are_compared_by_reading(
    is_older: Callable[[int], bool], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plan_module, "SMALLEST_UNIT_BYTES", 128)
    assert finish_as_resumed(BF16, tmp_path / "out", is_older).digests
    source = without_checksums.copied(BF16, tmp_path / "in")
    index = read_checkpoint(source, None)
    masters = {tensor.key.name for tensor in index.tensors if tensor.key.state == "fp32"}
    keys = [tensor.key for tensor in index.tensors]
    without_checksums.flip(index, lambda row: keys[row.tensor].state == "weight" and keys[row.tensor].name in masters)
    with pytest.raises(VerificationError, match="weight/"):
        finish_as_resumed(source, tmp_path / "other", is_older)


def test_a_copy_of_a_tied_weight_under_its_second_name_must_be_equal(tmp_path: Path) -> None:
    source = without_checksums.copied(DEEPSPEED / "experts-dp4-ep2" / STEP, tmp_path / "in")
    index = read_checkpoint(source, None)
    without_checksums.flip(index, of_state(index, "weight", 1))
    (tmp_path / "there").mkdir()
    assert run(source, "dp=2,ep=2,zero=1", "", tmp_path / "there") is ExitCode.SOURCE_INVALID


def test_a_frozen_parameter_that_is_stated_twice_must_be_equal(tmp_path: Path) -> None:
    source = tmp_path / "in" / STEP
    shutil.copytree(ZERO2, source, ignore=shutil.ignore_patterns("COMMIT.json"))

    def state_again(value: dict, changed: int) -> None:
        name, tensor = next(iter(value["module"].items()))
        data = bytearray(tensor.storage.data)
        data[0] ^= changed
        storage = dataclasses.replace(tensor.storage, data=bytes(data))
        value["frozen_param_fragments"] = {name: dataclasses.replace(tensor, storage=storage)}

    for changed, expected in ((0, ExitCode.OK), (1, ExitCode.SOURCE_INVALID)):
        edit(source, MODEL.format(0), lambda value, changed=changed: state_again(value, changed))
        folder = tmp_path / str(changed)
        folder.mkdir()
        assert run(source, "dp=2,zero=2", "", folder) is expected


# The digest of a checkpoint.


def test_the_digest_of_a_checkpoint_says_whose_digest_is_whose() -> None:
    values = {"weight/a": "00000001", "weight/b": "00000002"}
    assert (
        total_digest(values)
        == f"{zlib.crc32(b'weight/a 00000001' + bytes([10]) + b'weight/b 00000002' + bytes([10])):08x}"
    )
    assert total_digest(dict(reversed(values.items()))) == total_digest(values)
    assert total_digest({"weight/a": "00000002", "weight/b": "00000001"}) != total_digest(values)
    assert total_digest({"weight/a": "00000001", "weight/c": "00000002"}) != total_digest(values)
    assert not total_digest({})


def test_two_tensors_of_one_shape_under_each_others_names_have_another_digest() -> None:
    index = read_checkpoint(PIPELINE, None)
    assert total_digest(read_digests(swap_weights(index))) != total_digest(read_digests(index))
