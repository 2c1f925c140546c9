"""Strangers to the formats: what they find, what they refuse, and what they say that they do not know."""

import io
import json
import pickle
import struct
import zipfile
from pathlib import Path

import numpy as np
import pytest

from reshard.contract import ReshardReport
from reshard.errors import VerificationError
from reshard.witness import comparison, deepspeed, optimizer_names, pickles, safetensors
from reshard.witness.comparison import Case, WitnessReport, compare, see_source
from reshard.witness.cover import find_byte_problems, find_cover_problems
from reshard.witness.matching import Wanted, match
from reshard.witness.names import NameMap
from reshard.witness.pickles import NotWitnessedError
from reshard.witness.samples import ElementReader, convert, draw
from reshard.witness.table import Key, Parts, Piece, Slots, Storage, Stream, Table, Tensor, row_major
from reshard.witness.tensor_parallel import Patterns, Shard

GOLDEN = Path(__file__).parents[3] / "golden"
ZERO2 = GOLDEN / "deepspeed-0.19.8" / "zero2-dp3" / "step-00000002"


def whole(shape: tuple[int, ...], holder: Storage) -> Tensor:
    """A tensor that one storage holds."""
    return Tensor(shape, "float32", [[Piece((0,) * len(shape), shape, holder, 0, row_major(shape), shape)]])


def storage(file: int = 0, first: int = 0, elements: int = 12) -> Storage:
    """Consecutive float32 elements of a file."""
    return Storage(file, lambda: (first, elements * 4), "float32")


def write_safetensors(path: Path, header: dict, payload: bytes) -> None:
    """A safetensors file as it is, right or wrong."""
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + payload)


class Evil:
    """Calls a function when it is unpickled."""

    def __reduce__(self):
        return (open, ("/tmp/never-made-by-the-witness", "w"))


def test_a_pickle_calls_nothing_and_imports_nothing():
    value = pickles.load(pickle.dumps({"evil": Evil(), "list": [1, (2.5, None)]}))
    assert isinstance(value["evil"], pickles.Inert)
    assert value["evil"].args == ("/tmp/never-made-by-the-witness", "w")
    assert value["list"] == [1, (2.5, None)]
    assert not Path("/tmp/never-made-by-the-witness").exists()


def test_equal_pickles_are_one_object_and_too_many_are_not_read(monkeypatch: pytest.MonkeyPatch):
    loader = pickles.Pickles()
    data = pickle.dumps(["x" * 1000])
    assert loader.load(data) is loader.load(data)
    monkeypatch.setattr(pickles, "_MOST_BYTES", 1500)
    with pytest.raises(NotWitnessedError, match="MiB of pickles"):
        loader.load(pickle.dumps(["y" * 1000]))


def test_partitions_and_slots_say_where_an_element_is():
    parts = Parts([storage(0, 100), storage(1, 200)])
    element = np.array([0, 5, 6, 11])
    files, positions = Stream(parts, 6).find(element)
    assert (files.tolist(), positions.tolist()) == ([0, 0, 1, 1], [100, 120, 200, 220])
    files, positions = Slots(parts, 2, 3, 5).find(np.array([0, 2, 3, 4]))
    assert (files.tolist(), positions.tolist()) == ([0, 0, 1, 1], [108, 116, 208, 212])


@pytest.mark.parametrize(
    ("pieces", "problem"),
    [
        ([((0, 0), (2, 3)), ((2, 0), (2, 3))], ""),
        ([((0, 0), (2, 3)), ((2, 0), (1, 3))], "hold 9 elements, expected 12"),
        ([((0, 0), (2, 3)), ((1, 0), (2, 3))], "overlap"),
        ([((0, 0), (2, 3)), ((3, 0), (2, 3))], "not inside"),
    ],
)
def test_a_cover_has_neither_hole_nor_overlap(pieces: list, problem: str):
    tensor = whole((4, 3), storage())
    tensor.copies = [[Piece(low, size, storage(), 0, (3, 1), (4, 3)) for low, size in pieces]]
    found = list(find_cover_problems(Key("weight", "w"), tensor))
    assert problem in "".join(found) and bool(found) == bool(problem)


def test_a_cover_of_many_boxes_is_summed():
    boxes = [Piece((at, 0), (1, 3), storage(elements=90), at * 3, (3, 1), (30, 3)) for at in range(30)]
    tensor = Tensor((30, 3), "float32", [boxes])
    assert not list(find_cover_problems(Key("weight", "w"), tensor))
    tensor.copies = [[*boxes[1:], boxes[1]]]
    assert any("overlap" in problem for problem in find_cover_problems(Key("weight", "w"), tensor))


def test_every_byte_of_a_file_belongs_to_something(tmp_path: Path):
    header = {"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}
    write_safetensors(tmp_path / "model.safetensors", header, bytes(8))
    table = safetensors.read(tmp_path, is_target=True)
    assert not list(find_byte_problems(table, {"model.safetensors": None}))
    assert "no file that a reader" in next(find_byte_problems(table, {"model.safetensors": None, "more.bin": None}))
    assert "CRC-32 00000001 was written" in next(find_byte_problems(table, {"model.safetensors": 1}))

    write_safetensors(tmp_path / "model.safetensors", header, bytes(8) + b"\0\1")
    table = safetensors.read(tmp_path, is_target=True)
    assert "belong to no tensor and are not zero" in next(find_byte_problems(table, {"model.safetensors": None}))


def test_two_tensors_do_not_share_an_element(tmp_path: Path):
    (tmp_path / "file").write_bytes(bytes(48))
    table = Table(tmp_path, files=["file"])
    table.storages.append(storage())
    table.tensors[Key("weight", "a")] = whole((12,), table.storages[0])
    table.tensors[Key("weight", "b")] = whole((3, 2), table.storages[0])
    assert any("two tensors" in problem for problem in find_byte_problems(table, {"file": None}))


def test_a_tensor_beyond_the_end_of_a_file_is_refused_when_it_is_read(tmp_path: Path):
    (tmp_path / "file").write_bytes(bytes(40))
    table = Table(tmp_path, files=["file"])
    with pytest.raises(VerificationError, match="shorter"):
        ElementReader(table).read(np.array([0]), np.array([38]), 4)


def test_parameters_of_zero0_get_names_where_one_order_fits():
    shapes = {"a": (2, 2), "b": (3,), "c": (2, 2), "frozen": (9,)}
    assert optimizer_names.assign_names([[(2, 2), (2, 2)], [(3,)]], shapes) == [["a", "c"], ["b"]]
    with pytest.raises(NotWitnessedError, match="several orders fit"):
        optimizer_names.assign_names([[(2, 2)], [(2, 2)], [(3,)]], shapes)


def test_shards_are_joined_as_their_patterns_say():
    info = {
        "tp_replicated_parameter_patterns": ["norm"],
        "parameter_to_average_patterns": ["mean"],
        "parameter_with_row_parallelism_patterns": ["down"],
        "parameter_with_2_sub_params_cat_dim_0": ["up"],
        "parameter_with_sub_params": [{"patterns": ["qkv"], "shape": ((4, 2, 2), -1), "partition_dim": 0}],
    }
    patterns = Patterns(info)
    shards = [Shard((4, 3), storage(rank), 0, (3, 1), "float32") for rank in range(2)]

    def row_of(name: str) -> list[list[int]]:
        """File of each element of the joined tensor, which tells the rank that holds it."""
        tensor = patterns.join(name, shards)
        files, _ = tensor.find(0, np.arange(tensor.num_elements))
        return files.reshape(tensor.shape).tolist()

    assert [row[0] for row in row_of("other")] == [0, 0, 0, 0, 1, 1, 1, 1]
    assert row_of("down")[0] == [0, 0, 0, 1, 1, 1]
    assert [row[0] for row in row_of("up")] == [0, 0, 1, 1, 0, 0, 1, 1]
    assert [row[0] for row in row_of("qkv")] == [0, 0, 1, 1, 0, 1, 0, 1]
    assert len(patterns.join("norm", shards).copies) == 2
    assert patterns.join("mean", shards).num_averaged == len(shards)
    assert [patterns.kind_of(name) for name in ("norm", "down", "x")] == ["not at all", "along dim 1", "along dim 0"]
    with pytest.raises(NotWitnessedError, match="does not say how"):
        Patterns(None).join("x", shards)


@pytest.mark.parametrize("pattern", ["(a+)+$", "(?=a)a", "(a|b)*c", r"^\d+\.(up|down)$"])
def test_patterns_match_alike_in_both_engines(pattern: str):
    patterns = Patterns({"tp_replicated_parameter_patterns": [pattern]}) if "?" not in pattern else Patterns({})
    names = ["a" * 40 + "b", "aaa", "1.up", "abc", "12.down.more"]
    import re

    for name in names[1:] if "+)+" in pattern else names:
        expected = re.match(pattern, name) is not None
        assert "?" in pattern or patterns.is_replicated(name) == expected, name
    if "+)+" in pattern:
        assert not patterns.is_replicated(names[0])  # in Python's engine this takes longer than the universe is old


def test_the_mean_of_copies_is_summed_in_the_order_of_the_ranks():
    values = [np.array([1e8, 1.0], "<f4"), np.array([1.0, 2.0], "<f4"), np.array([-1e8, 3.0], "<f4")]
    copies = [value.view(np.uint8).reshape(-1, 4) for value in values]
    mean = comparison._mean(copies, "float32").view("<f4")[:, 0]
    total = (values[0] + values[1]) + values[2]
    assert mean.tolist() == (total / np.float32(3)).tolist()


def test_elements_are_rounded_to_nearest_even():
    values = np.array([1.0, 1.00390625, 1.01171875, np.inf, 65520.0], "<f4").view(np.uint8).reshape(-1, 4)
    assert convert(values, "float32", "bfloat16").view("<u2")[:4, 0].tolist() == [0x3F80, 0x3F80, 0x3F82, 0x7F80]
    assert np.isinf(convert(values, "float32", "float16").view("<f2")[4, 0])


def test_a_small_tensor_is_compared_whole_and_a_large_one_at_its_corners():
    assert draw(50, 8, np.array([0, 49])).tolist() == list(range(50))
    drawn = draw(1 << 20, 8, np.array([0, (1 << 20) - 1]))
    assert {0, (1 << 20) - 1} <= set(drawn.tolist()) and len(drawn) <= 8 * 16


def test_a_name_map_says_which_elements_a_part_has(tmp_path: Path):
    path = tmp_path / "map.yaml"
    path.write_text(
        "version: 1\nconstants: {head: 2, heads: 2 * head // 2}\nrules:\n"
        '  - {from: "{layer}.qkv", to: ["l.{layer+1}.q", "l.{layer+1}.k"], sizes: [head, 1], groups: heads}\n'
        '  - {from: "e.{expert}", to: experts, over: {expert: 2}, stack: true}\n'
        '  - {from: ["a", "b"], to: ab, dim: 1}\n'
        "drop: [gone]\ntied: {second: ab}\n"
    )
    source = {Key("fp32", name): whole((6, 2), storage()) for name in ("3.qkv", "e.0", "e.1", "a", "b", "gone")}
    origins, aliases = NameMap(path).apply(source, {})
    assert {str(key): origin.shape for key, origin in origins.items()} == {
        "fp32/l.4.q": (4, 2),
        "fp32/l.4.k": (2, 2),
        "fp32/experts": (2, 6, 2),
        "fp32/ab": (6, 4),
    }
    assert aliases == {"second": "ab"}
    part = next(origins[Key("fp32", "l.4.k")].split(np.arange(4)))
    assert part.element.tolist() == [4, 5, 10, 11]
    parts = list(origins[Key("fp32", "ab")].split(np.arange(4)))
    assert [(part.which.tolist(), part.element.tolist()) for part in parts] == [([0, 1], [0, 1]), ([2, 3], [0, 1])]


def case_of(target: Path, **changes: object) -> Case:
    """A conversion of the golden checkpoint into itself."""
    fields = {"source": ZERO2, "source_format": "deepspeed", "target": target, "target_format": "deepspeed"}
    return Case(**{**fields, **changes})


def compare_with_source(target: Path, **changes: object) -> WitnessReport:
    """Compare a target with the golden checkpoint."""
    return compare(see_source(case_of(target, **changes)), {path.name: None for path in target.iterdir()})


def test_a_checkpoint_is_the_same_as_itself():
    found = compare_with_source(ZERO2)
    assert (found.tensors, dict(found.not_witnessed)) == (29, {})
    assert compare_with_source(ZERO2, states=("weight", "fp32", "exp_avg", "exp_avg_sq")).tensors == 29


def test_what_no_stranger_knows_is_said_and_counted():
    found = compare_with_source(ZERO2, source_format="virtual")
    assert (found.tensors, dict(found.not_witnessed)) == (0, {"no stranger knows the format virtual": 1})


def test_another_value_is_refused_with_its_tensor_and_its_place(tmp_path: Path):
    for path in ZERO2.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    table = deepspeed.read(ZERO2)
    tensor = table.tensors[Key("exp_avg", "down.weight")]
    files, positions = tensor.find(0, np.array([4]))
    name = table.files[int(files[0])]
    content = bytearray((tmp_path / name).read_bytes())
    content[int(positions[0])] ^= 1
    (tmp_path / name).write_bytes(content)
    with pytest.raises(VerificationError) as error:
        compare_with_source(tmp_path)
    assert error.value.problems[0].startswith(f"exp_avg/down.weight: element [1, 1] of copy 0 ({name}, byte")
    assert "bug of reshard, or the source changed" in error.value.hint


def test_a_zip_with_bytes_between_entries_is_not_accounted_for(tmp_path: Path):
    for path in ZERO2.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    name = "mp_rank_00_model_states.pt"
    buffer = io.BytesIO()
    with zipfile.ZipFile(ZERO2 / name) as old, zipfile.ZipFile(buffer, "w") as new:
        for at, entry in enumerate(old.infolist()):
            if at == 3:
                new.fp.write(b"stowaway")
                new.start_dir = new.fp.tell()
            new.writestr(entry.filename, old.read(entry))
    (tmp_path / name).write_bytes(buffer.getvalue())
    with pytest.raises(VerificationError) as error:
        compare_with_source(tmp_path)
    assert any("belong to no tensor and are not zero" in problem for problem in error.value.problems)


def test_the_report_says_how_much_was_witnessed():
    report = ReshardReport(ok=True, exit_code=0, message="", witness={"tensors": 3, "samples": 9, "not_witnessed": 1})
    assert ReshardReport.from_json(report.to_json()) == report
    older = json.loads(report.to_json())
    del older["witness"]
    assert ReshardReport.from_json(json.dumps(older)).witness == {}
    for wrong in ([1], {"tensors": -1}, {"tensors": "3"}, {str(at): at for at in range(99)}):
        with pytest.raises(ValueError, match="witness"):
            ReshardReport.from_json(json.dumps({**older, "witness": wrong}))


def test_a_declared_average_is_compared_with_the_mean_of_the_copies(tmp_path: Path):
    for rank in range(2):
        (tmp_path / f"rank{rank}").write_bytes(np.array([1.0, 4.0 + rank], "<f4").tobytes())
    source, target = Table(tmp_path, files=["rank0", "rank1"]), Table(tmp_path, files=["mean"])
    key = Key("fp32", "bias")
    copies = [whole((2,), storage(rank, elements=2)).copies[0] for rank in range(2)]
    source.tensors[key] = Tensor((2,), "float32", copies, num_averaged=2)
    target.tensors[key] = whole((2,), storage(elements=2))
    wanted = Wanted(names=NameMap(None), weight_dtype=None, only_weights=False, prefers_masters=False)
    for value, expected in ((4.5, 0), (4.0, 1)):
        (tmp_path / "mean").write_bytes(np.array([1.0, value], "<f4").tobytes())
        found = match(source.tensors, source, target, wanted)
        problems = list(comparison._Comparison(case_of(ZERO2), source, target).find_problems(found))
        assert len(problems) == expected
