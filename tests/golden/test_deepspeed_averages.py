"""Partial parameters: copies that tensor-parallel ranks have trained by themselves become their mean."""

import dataclasses
import itertools
import shutil
import zlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from reshard.api import Conversion, RunOptions, convert, plan_conversion
from reshard.commits.staging import Sharing
from reshard.contract import ExitCode
from reshard.errors import CorruptSourceError, UnsupportedError, VerificationError
from reshard.execution import averages
from reshard.execution.executor import Mover
from reshard.execution.journal import from_json, to_json
from reshard.execution.unit_records import UnitRecord
from reshard.execution.verify import read_digests
from reshard.formats import read_checkpoint
from reshard.formats.pt.reader import read
from reshard.planning import plan as plan_module
from reshard.tensors.cast import UNSIGNED, cast
from reshard.tensors.layout import Index, TensorKey
from reshard.topology import Topology
from tests.golden import without_checksums
from tests.golden.command import Answer
from tests.golden.files import LAYER, MODEL, OPTIMIZER, PATTERNS, assemble, edit, golden
from tests.golden.partial import NORMS, STATES, declare, diverge, flip, partial, zero0
from tests.golden.test_source_checksums import write_marker


def copies(index: Index) -> dict[str, dict[int, np.ndarray]]:
    """All copies of the norms' tensors, by `state/name` and copy, as float32."""
    contents = [np.fromfile(index.root / file.path, dtype=np.uint8) for file in index.files]
    found: dict[str, dict[int, np.ndarray]] = {}
    for number, rows in enumerate(index.shards.by_tensor(len(index.tensors))):
        tensor = index.tensors[number]
        if not tensor.key.name.endswith("norm"):
            continue
        for row in index.shards.iterate_boxes(rows, 1):
            values = contents[row.file][row.byte_offset : row.byte_offset + 4 * row.box.size[0]].view(np.float32)
            whole = found.setdefault(str(tensor.key), {}).setdefault(row.replica, np.zeros(tensor.shape, np.float32))
            whole[row.box.offset[0] : row.box.end[0]] = values
    return found


def means(folder: Path) -> dict[str, np.ndarray]:
    """What the target must hold of the norms: sum in the order of the ranks, then division, in float32."""
    found = copies(read_checkpoint(folder, None))
    return {key: (own[0] + own[1]) / np.float32(2) for key, own in found.items()}


def run(source: Path, target: Path, to: str = "tp=1", **options: object) -> str:
    conversion = Conversion(source=source, target=target, topology=Topology.parse(to), **options)
    return convert(conversion, RunOptions(reread=True)).message


def assert_means(target: Path, expected: dict[str, np.ndarray]) -> None:
    held = copies(read_checkpoint(target, None))
    assert held.keys() == expected.keys()
    for key, by_copy in held.items():
        for copy in by_copy.values():
            assert np.array_equal(copy.view(np.uint32), expected[key].view(np.uint32)), key


@pytest.fixture(scope="module")
def differing(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return partial(tmp_path_factory.mktemp("partial") / "source")


@pytest.fixture(scope="module")
def equal(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return partial(tmp_path_factory.mktemp("partial") / "source", differs=False)


@pytest.mark.parametrize("to", ["tp=1", "tp=2,pp=1,dp=2", "tp=1,pp=2,dp=2", "tp=2,pp=2,dp=3", "tp=2,pp=2,zero=0"])
def test_copies_that_differ_become_their_mean_in_every_copy(differing, tmp_path, to):
    message = run(differing, tmp_path / "out", to)
    expected = means(differing)
    if "zero=0" in to:  # in fp32, the weights are the master weights
        expected = {key: value for key, value in expected.items() if not key.startswith("fp32/")}
    assert_means(tmp_path / "out", expected)
    means_of = f"; {len(expected)} tensors are means of copies that differ between tensor-parallel ranks by up to 0.00"
    assert means_of in message
    assert message.endswith(", ...)")


@pytest.mark.parametrize("form", ["universal", "dcp", "safetensors"])
def test_every_format_gets_the_mean(differing, tmp_path, form):
    run(differing, tmp_path / "out", target_format=form)
    side = read_digests(read_checkpoint(tmp_path / "out", None))
    whole = read_digests(read_checkpoint(differing, None))
    assert all(value == whole[key] for key, value in side.items())
    assert sum(key.endswith("norm") for key in side) == (5 if form == "safetensors" else 15)


def test_the_target_declares_what_the_source_declares(differing, tmp_path):
    run(differing, tmp_path / "out", "tp=2,pp=1")
    info = read(tmp_path / "out" / MODEL.format(1)).value["universal_checkpoint_info"]
    assert list(info["parameter_to_average_patterns"]) == [NORMS]
    again = run(tmp_path / "out", tmp_path / "again")
    assert "mean" not in again
    assert read_digests(read_checkpoint(tmp_path / "again", None)) == read_digests(read_checkpoint(differing, None))


def test_equal_copies_are_a_copy(equal, tmp_path):
    message = run(equal, tmp_path / "out")
    assert "mean" not in message
    assert read_digests(read_checkpoint(tmp_path / "out", None)) == read_digests(
        read_checkpoint(golden("pipeline-tp2-pp2"), None)
    )


def test_at_tp1_the_declaration_is_carried(tmp_path):
    source = Path(shutil.copytree(golden("pipeline-dp2"), tmp_path / "source"))
    declare(source)
    before = read_digests(read_checkpoint(source, None))
    plan = plan_conversion(Conversion(source=source, target=tmp_path / "out", topology=Topology.parse("tp=2,pp=2")))
    assert not plan.averages
    assert not plan.notes
    run(source, tmp_path / "out", "tp=2,pp=2")
    info = read(tmp_path / "out" / MODEL.format(3)).value["universal_checkpoint_info"]
    assert list(info["parameter_to_average_patterns"]) == [NORMS]
    assert read_digests(read_checkpoint(tmp_path / "out", None)) == before


def test_differences_that_nothing_declares_are_refused(tmp_path):
    source = Path(shutil.copytree(golden("pipeline-tp2-pp2"), tmp_path / "source"))
    diverge(source)
    with pytest.raises(CorruptSourceError, match="copies of one tensor differ"):
        run(source, tmp_path / "out")
    with pytest.raises(CorruptSourceError, match="copies of one tensor differ"):
        read_digests(read_checkpoint(source, None))


def test_copies_that_are_also_declared_equal_must_be(tmp_path):
    """DeepSpeed looks at tp_replicated_parameter_patterns first, and asserts that the copies are equal."""
    source = partial(tmp_path / "source")
    for mp in range(4):
        edit(source, MODEL.format(mp), lambda value: value["universal_checkpoint_info"].update(
            tp_replicated_parameter_patterns=[NORMS]))  # fmt: skip
    with pytest.raises(CorruptSourceError, match="copies of one tensor differ"):
        run(source, tmp_path / "out")


def test_a_resumed_run_agrees_about_the_mean(differing, tmp_path, monkeypatch):
    monkeypatch.setattr(plan_module, "SMALLEST_UNIT_BYTES", 512)
    conversion = Conversion(source=differing, target=tmp_path / "out", topology=Topology.parse("tp=1"))
    done = Mover.do

    def fail(self: Mover, units: Iterator[int], *more: Any) -> list[UnitRecord]:
        done(self, itertools.islice(units, len(self.plan.units) // 2), *more)
        raise OSError("the power went out")

    monkeypatch.setattr(Mover, "do", fail)
    with pytest.raises(OSError, match="power"):
        convert(conversion, RunOptions(sharing=Sharing.RESUMABLE))
    monkeypatch.setattr(Mover, "do", done)
    report = convert(conversion, RunOptions(sharing=Sharing.RESUMABLE))
    assert "20 tensors are means of copies" in report.message
    assert "had been done before and are kept" in report.message
    assert_means(tmp_path / "out", means(differing))


def test_workers_that_share_a_run_agree_about_the_mean(differing, tmp_path, monkeypatch):
    monkeypatch.setattr(plan_module, "SMALLEST_UNIT_BYTES", 512)
    conversion = Conversion(source=differing, target=tmp_path / "out", topology=Topology.parse("tp=1"))

    def work(number: int) -> str:
        return convert(conversion, RunOptions(sharing=Sharing.TOGETHER, worker=(number, 2))).message

    with ThreadPoolExecutor(2) as pool:
        messages = list(pool.map(work, range(2)))
    assert sum("20 tensors are means of copies" in message for message in messages) >= 1
    assert_means(tmp_path / "out", means(differing))


def test_tiles_of_any_size_have_the_same_mean(differing, tmp_path, monkeypatch):
    monkeypatch.setattr(averages, "BUFFERS", 1 << 15)  # tiles of one element
    monkeypatch.setattr(averages, "_TILE_BYTES", 8)
    run(differing, tmp_path / "out", "tp=2,pp=1")
    assert_means(tmp_path / "out", means(differing))


def test_a_record_keeps_the_largest_difference():
    record = UnitRecord(unit=3)
    record.averaged.update({4: 0.1, 5: float("inf"), 6: 0.0})
    assert from_json(to_json(record)).averaged == {4: 0.1, 5: float("inf"), 6: 0.0}
    for wrong in ('"nan"', '"-0x1p0"', "3", '"x"'):
        with pytest.raises(ValueError, match=r"difference|hexadecimal|could not"):
            from_json(to_json(record).replace('"inf"', wrong))


def test_damage_in_one_copy_is_found(tmp_path):
    source = partial(tmp_path / "source")
    index = read_checkpoint(source, None)
    at = next(number for number, tensor in enumerate(index.tensors) if str(tensor.key) == "exp_avg/2.ffn_norm")
    (row,) = [row for row in index.shards.by_tensor(len(index.tensors))[at] if index.shards.replica[row] == 1]
    path = index.files[index.shards.file[row]].path
    flip(source, path, int(index.shards.byte_offset[row]) + 2)
    with pytest.raises(CorruptSourceError, match=r"CRC|checksum"):
        run(source, tmp_path / "out")


def change_a_weight(source: Path) -> None:
    def change(value: dict) -> None:
        values = np.frombuffer(value["ffn_norm"].storage.data, np.float32).copy()
        values[3] += 1
        value["ffn_norm"].storage.data = values.tobytes()

    edit(source, LAYER.format(2, 1), change)


def test_a_rank_whose_weights_are_not_its_masters_is_refused(tmp_path):
    source = partial(tmp_path / "source")
    change_a_weight(source)
    with pytest.raises(VerificationError, match="not their master weights") as caught:
        run(source, tmp_path / "out")
    (problem,) = caught.value.problems
    assert problem == (
        f"weight/2.ffn_norm: {LAYER.format(2, 1)}, of tensor-parallel rank 1: not fp32/2.ffn_norm of that rank, rounded"
        " to float32"
    )
    expected = {key: value for key, value in means(source).items() if key != "weight/2.ffn_norm"}
    run(source, tmp_path / "out", allow_differences=True)
    held = {key: own[0] for key, own in copies(read_checkpoint(tmp_path / "out", None)).items()}
    assert all(np.array_equal(held[key], value) for key, value in expected.items())
    assert np.array_equal(held["weight/2.ffn_norm"], held["fp32/2.ffn_norm"])


def test_a_tied_parameter_is_averaged_over_ranks_and_compared_between_stages(tmp_path):
    source = partial(tmp_path / "source")
    for mp in range(4):  # as if every rank had trained an embedding of its own, of the size of its shard
        edit(source, MODEL.format(mp), lambda value: value["universal_checkpoint_info"].update(
            vocabulary_parameter_patterns=[], parameter_to_average_patterns=[NORMS, "tied_modules"]))  # fmt: skip
    key = TensorKey("exp_avg", "tied_modules.embed.weight")
    index = read_checkpoint(source, None)
    assert index.averaged[key] == 2
    number = index.number_of(key)
    run(source, tmp_path / "out")
    held = assemble(read_checkpoint(tmp_path / "out", None))[str(key)].view(np.float32)
    every = {
        int(index.shards.replica[row]): np.fromfile(
            source / index.files[index.shards.file[row]].path, np.float32, 64, offset=int(index.shards.byte_offset[row])
        )
        for row in index.shards.by_tensor(len(index.tensors))[number]
    }
    assert sorted(every) == [0, 1, 2, 3]
    assert np.array_equal(every[1], every[3])
    assert not np.array_equal(every[0], every[1])
    assert np.array_equal(held.reshape(-1), (every[0] + every[1]) / np.float32(2))

    def change(value: dict) -> None:
        tensor = value["optimizer_state_dict"]["base_optimizer_state"]["state"][0]["exp_avg"]
        values = np.frombuffer(tensor.storage.data, np.float32).copy()
        values[5] += 1
        tensor.storage.data = values.tobytes()

    committed = Path(shutil.copytree(source, tmp_path / "committed"))
    write_marker(committed)
    for folder in (source, committed):
        edit(folder, OPTIMIZER.format(3), change)
    with pytest.raises(CorruptSourceError, match="not what was committed") as caught:
        run(committed, tmp_path / "refused")
    (problem,) = caught.value.problems
    assert problem.startswith(OPTIMIZER.format(3))
    with pytest.raises(CorruptSourceError, match="copies of one tensor differ") as caught:
        run(source, tmp_path / "refused")
    (problem,) = caught.value.problems
    assert OPTIMIZER.format(1) in problem
    assert OPTIMIZER.format(3) in problem
    with pytest.raises(CorruptSourceError, match="copies of one tensor differ"):
        read_digests(read_checkpoint(source, None))
    assert "means" in run(source, tmp_path / "out-of-the-first", allow_differences=True)


def bits_of(folder: Path) -> dict[str, list[np.ndarray]]:
    """Every tensor of a checkpoint of ZeRO-0, from each of its ranks' files."""
    index = read_checkpoint(folder, None)
    found: dict[str, list[np.ndarray]] = {}
    for number, rows in enumerate(index.shards.by_tensor(len(index.tensors))):
        tensor = index.tensors[number]
        kind = UNSIGNED[tensor.item_bytes]
        for row in index.shards.iterate_boxes(rows, len(tensor.shape)):
            path = index.root / index.files[row.file].path
            values = np.fromfile(path, kind, tensor.num_elements, offset=row.byte_offset)
            found.setdefault(str(tensor.key), []).append(values)
    return found


@pytest.mark.parametrize("name", ["zero0-dp2", "zero0-bf16-dp2"])
@pytest.mark.parametrize("to", ["tp=1,zero=0", "tp=1,dp=3,zero=2", "tp=2,dp=2,zero=1"])
def test_weights_are_the_masters_mean_rounded_or_their_own(tmp_path, name, to):
    source = zero0(tmp_path / "source", name)
    run(source, tmp_path / "out", to)
    before, held = bits_of(source), read_digests(read_checkpoint(tmp_path / "out", None))
    means_of = {}
    for key, ranks in before.items():
        if ranks[0].dtype == np.uint32 and not key.endswith("scale"):
            one, other = (bits.view(np.float32) for bits in ranks)
            means_of[key] = ((one + other) / np.float32(2)).view(np.uint32)
    for key in [key for key in before if key.startswith("weight/") and key not in means_of and "scale" not in key]:
        means_of[key] = cast(means_of[key.replace("weight/", "fp32/")], "float32", "bfloat16")
    assert len(means_of) == 7 * (4 if "bf16" in name else 3)
    for key, mean in means_of.items():
        assert held[key] == f"{zlib.crc32(mean.tobytes()):08x}", key


def test_weights_whose_masters_cannot_be_read_are_not_averaged(tmp_path):
    """The optimizer has a state that is neither per weight nor per group: only weights are read."""
    for name in ("zero0-dp2", "zero0-bf16-dp2"):
        source = zero0(tmp_path / name, name)

        def change(value: dict) -> None:
            optimizer = value["optimizer"]
            state = optimizer.get("optimizer_state_dict", optimizer)["state"]
            state[0]["exp_avg"] = dataclasses.replace(state[1]["exp_avg"])

        for rank in range(2):
            edit(source, MODEL.format(rank), change)
        weights = {"states": ("weight",), "target_format": "safetensors"}
        with pytest.raises(UnsupportedError):
            run(source, tmp_path / "refused")
        if "bf16" in name:
            with pytest.raises(UnsupportedError, match="master weights that are averaged are left out"):
                run(source, tmp_path / "refused", "tp=1", **weights)
        else:
            assert "7 tensors are means" in run(source, tmp_path / "out", "tp=1", **weights)


def test_sources_without_checksums_are_compared_by_reading(equal, differing, tmp_path):
    for name, source in (("equal", equal), ("differing", differing)):
        bare = without_checksums.copied(source, tmp_path / name)
        message = run(bare, tmp_path / f"{name}-out")
        assert ("mean" in message) is (source is differing)
        assert read_digests(read_checkpoint(tmp_path / f"{name}-out", None)) == read_digests(
            read_checkpoint(source, None)
        )


def test_a_pattern_file_can_declare_them(tmp_path):
    source = Path(shutil.copytree(golden("pipeline-tp2-pp2"), tmp_path / "source"))
    diverge(source)
    for mp in range(4):
        edit(source, MODEL.format(mp), lambda value: value.pop("universal_checkpoint_info"))
    patterns = tmp_path / "patterns.yaml"
    patterns.write_text(PATTERNS.replace("'.*norm', kind: replicate", "'.*norm', kind: average"))
    message = run(source, tmp_path / "out", patterns=patterns)
    assert "20 tensors are means" in message
    assert_means(tmp_path / "out", means(partial(tmp_path / "declared")))


def test_virtual_mode_is_refused_where_means_may_be_needed(differing, tmp_path, capsys):
    answer = Answer(capsys)
    words = ("run", differing, tmp_path / "out", "--to", "tp=1")
    refused = answer.json(*words, "--mode", "virtual", code=ExitCode.UNSUPPORTED)
    assert "the mean of copies that may differ stands nowhere" in refused["message"]
    loader = "elastic_trainer,ranks-per-node=1,node-memory=1GiB"
    report = answer.json(*words, "--mode", "auto", "--loader", loader)
    assert report["mode"] == "materialize"
    assert "mean of copies" in report["mode_reason"]


def test_plan_verify_and_explain_tell_it(differing, equal, tmp_path, capsys):
    answer = Answer(capsys)
    plan = answer.json("plan", differing, "--to", "tp=1")
    (note,) = [note for note in plan["notes"] if note.startswith("averaged over the 2 tensor-parallel ranks")]
    assert "; those of weight/1.attention_norm, " in note
    assert plan["bytes_to_compare"] > 0
    (note,) = [note for note in answer.json("plan", equal, "--to", "tp=1")["notes"] if note.startswith("averaged")]
    assert "; those of" not in note
    run(differing, tmp_path / "out")
    one, other = (answer.json("verify", folder) for folder in (differing, tmp_path / "out"))
    assert one["digest"] == other["digest"]
    assert len(one["averaged"]) == 20
    assert all(0 < size < 0.01 for size in one["averaged"].values())
    assert other["averaged"] == {}
    both = answer.json("verify", differing, tmp_path / "out")
    assert both["different"] == []
    assert both["averaged"] == one["averaged"]
    answer("verify", differing)
    explained = answer.json("explain", differing, "fp32/1.ffn_norm", "--to", "tp=1")
    assert [place["used"] for place in explained["tensors"][0]["boxes"]] == [True, True]
    assert explained["tensors"][0]["averaged"] == 2
    text = answer("explain", differing, "fp32/1.ffn_norm")
    assert "; where copies differ, the mean of those of 2 tensor-parallel ranks" in text
    assert answer.json("explain", differing, "fp32/1.qkv")["tensors"][0]["averaged"] == 0


def test_weights_alone_need_the_masters_that_they_are_averaged_of(differing, equal, tmp_path):
    with pytest.raises(UnsupportedError, match="master weights that are averaged are left out") as caught:
        run(differing, tmp_path / "out", target_format="safetensors", states=("weight",))
    assert "--states weight,fp32" in caught.value.hint
    run(equal, tmp_path / "out", target_format="safetensors", states=("weight",))


def test_a_name_map_keeps_the_mean(differing, tmp_path):
    names = tmp_path / "names.yaml"
    leaves = ("attention_norm", "ffn_norm", "qkv", "out", "gate_up", "down", "norm")
    rules = [f"  - {{from: '{{layer}}.{leaf}', to: 'model.{{layer}}.{leaf}'}}" for leaf in leaves]
    rules.append("  - {from: tied_modules.embed.weight, to: model.tied_modules.embed.weight}")
    names.write_text("\n".join(["version: 1", "rules:", *rules]))
    run(differing, tmp_path / "out", target_format="safetensors", names=names)
    held = read_digests(read_checkpoint(tmp_path / "out", None))
    whole = read_digests(read_checkpoint(differing, None))
    assert {key.replace("model.", ""): value for key, value in held.items()}.items() <= whole.items()
    assert "weight/model.1.ffn_norm" in held


def test_parts_of_means_are_means(differing, tmp_path):
    """Two norms put together, in all their states; and not one of them with a tensor that is no mean."""
    leaves = ("qkv", "out", "gate_up", "down", "norm")
    rules = [f"  - {{from: '{{layer}}.{leaf}', to: 'model.{{layer}}.{leaf}'}}" for leaf in leaves]
    rules.append("  - {from: tied_modules.embed.weight, to: model.embed.weight}")
    joined = "  - {from: ['{layer}.attention_norm', '{layer}.ffn_norm'], to: 'model.{layer}.norms', dim: 0}"
    names = tmp_path / "names.yaml"
    names.write_text("\n".join(["version: 1", "rules:", *rules, joined]))
    run(differing, tmp_path / "out", target_format="dcp", names=names)
    held, expected = read_digests(read_checkpoint(tmp_path / "out", None)), means(differing)
    for state in ("weight", *STATES[1:]):
        both = [expected[f"{state}/1.{leaf}"] for leaf in ("attention_norm", "ffn_norm")]
        assert held[f"{state}/model.1.norms"] == f"{zlib.crc32(np.concatenate(both).tobytes()):08x}", state
    source = Path(shutil.copytree(golden("pipeline-tp2-pp2"), tmp_path / "source"))
    declare(source)
    for mp in range(4):
        edit(source, MODEL.format(mp), lambda value: value["universal_checkpoint_info"].update(
            tp_replicated_parameter_patterns=[".*attention_norm"]))  # fmt: skip
    with pytest.raises(UnsupportedError, match="does not fit") as caught:
        run(source, tmp_path / "refused", target_format="dcp", names=names)
    assert any("only the second is a mean of copies" in problem for problem in caught.value.problems)


def test_a_result_of_a_restored_source_is_recognised(differing, tmp_path):
    """The ranges that are read again are those that were read: of all copies, whether compared or averaged."""
    for name, original in (("averaged", differing), ("compared", golden("pipeline-tp2-pp2"))):
        source, target = tmp_path / name, tmp_path / f"{name}-out"
        shutil.copytree(original, source)
        run(source, target)
        shutil.rmtree(source)
        shutil.copytree(original, source)
        assert run(source, target) == "already converted and committed"
