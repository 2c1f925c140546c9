"""`reshard run --profile`: what a run measures, what it decides from it, and that the result never depends on it."""

import json
import math
import threading
import time
from pathlib import Path

import pytest

from reshard.api import Conversion, Hooks, RunOptions, convert
from reshard.cli.main import main
from reshard.commits.staging import Sharing
from reshard.contract import ExitCode, ReshardReport
from reshard.execution import executor
from reshard.execution.journal import Journal
from reshard.planning import plan as plan_module
from reshard.profile.clock import Phase
from reshard.profile.collector import collecting
from reshard.topology import Topology
from tests.golden.command import BF16, PIPELINE, ZERO2, ZERO3, Answer
from tests.golden.test_reshard_processes import children, run, same_files
from tests.randomness import some

STEPS = ["index", "plan", "check source", "make files", "move", "prove", "read back", "witness", "sync", "publish"]

SWING = """
import itertools
from reshard.profile import steering
executor.SPARE_BYTES = executor.FEWEST_UNITS = 0
plan.SMALLEST_UNIT_BYTES = 64
steering.WINDOW_SECONDS, steering.WINDOW_UNITS = 0.0, 1
numbers = itertools.cycle((2, 4, 1, 3))
def swing(state, window, limits):
    active = min(next(numbers), limits.most)
    tile_bytes = max(64, min(4096, state.tile_bytes // 3))
    return steering.State(active=active, tile_bytes=tile_bytes), f"{active} now"
steering.decide = swing
"""
"""A decision after each unit: other numbers of processes, and ever smaller tiles."""


@pytest.mark.parametrize(
    ("options", "source", "to"),
    some(
        (
            (options, source, to)
            for options in ((), ("--resume",))
            for source, to in ((ZERO2, "dp=2,zero=2"), (ZERO3, "dp=2,zero=3"), (PIPELINE, "tp=2,dp=2"), (BF16, "dp=3"))
        ),
        every=3,
    ),
)
def test_decisions_never_change_the_result(options: tuple[str, ...], source: Path, to: str, tmp_path: Path) -> None:
    assert main(["run", str(source), str(tmp_path / "plain"), "--to", to, "--quiet"]) == ExitCode.OK
    target = tmp_path / "swung"
    words = ("run", source, target, "--to", to, "--quiet", "--json", "--profile", *options)
    value = json.loads(run(*words, prelude=SWING))
    assert not children(tmp_path)
    assert same_files(target, tmp_path / "plain")
    digests = [json.loads((path / "COMMIT.json").read_text())["digests"] for path in (target, tmp_path / "plain")]
    assert digests[0] == digests[1]
    decisions = value["profile"]["decisions"]
    expected = [min(number, 2 * decisions[0]["workers"]) for number in (2, 4)]
    assert [decision["workers"] for decision in decisions[1:3]] == expected
    assert len(decisions) > 2
    tiles = [decision["tile_bytes"] for decision in decisions]
    assert tiles == sorted(tiles, reverse=True)
    assert tiles[-1] < 4096


def test_threads_follow_decisions_too(tmp_path: Path, monkeypatch) -> None:
    active = iter([3, 1, 4, 2] * 100)
    monkeypatch.setattr(plan_module, "SMALLEST_UNIT_BYTES", 256)
    monkeypatch.setattr(executor, "SPARE_BYTES", 0)
    monkeypatch.setattr(executor, "FEWEST_UNITS", 0)
    monkeypatch.setattr("reshard.profile.steering.WINDOW_SECONDS", 0.0)
    monkeypatch.setattr("reshard.profile.steering.WINDOW_UNITS", 1)
    monkeypatch.setattr(
        "reshard.profile.steering._workers", lambda state, _, limits: (min(next(active), limits.most), frozenset(), "")
    )
    assert main(["run", str(PIPELINE), str(tmp_path / "threads"), "--to", "tp=1", "--quiet"]) == ExitCode.OK
    monkeypatch.undo()
    assert main(["run", str(PIPELINE), str(tmp_path / "plain"), "--to", "tp=1", "--quiet"]) == ExitCode.OK
    assert same_files(tmp_path / "threads", tmp_path / "plain")


def test_the_profile_of_a_run(tmp_path: Path, say: Answer) -> None:
    picture = tmp_path / "profile.svg"
    value = say.json("run", ZERO2, tmp_path / "out", "--to", "dp=2", "--profile", "--profile-svg", picture)
    profile = value["profile"]
    names = [step["name"] for step in profile["steps"]]
    assert sorted(names) == sorted(STEPS)
    assert names[:5] == STEPS[:5]
    assert sum(total["num_bytes"] for total in profile["devices"] if total["name"].startswith("target")) > 0
    read = sum(total["num_bytes"] for total in profile["phases"] if total["name"] in {"read", "populate"})
    assert 0 < read <= value["bytes_read"]
    assert 0 < profile["seconds"] < 600
    for worker in profile["workers"]:
        ends = [span[0] + sum(span[1:]) for span in worker["spans"]]
        assert max(ends) <= profile["seconds"] + 0.05
        assert all(len(span) == 1 + len(Phase) for span in worker["spans"])
    assert {total["name"].split()[0] for total in profile["files"]} == {"source", "target"}
    assert picture.read_text().startswith("<svg")
    assert set(value["milliseconds"]) <= {*STEPS, *(f"units.{phase.name.lower()}" for phase in Phase), "units.sync"}


def test_the_text_of_a_profile(tmp_path: Path, say: Answer) -> None:
    text = say("run", ZERO2, tmp_path / "out", "--to", "dp=2", "--profile")
    assert "where the time went" in text
    assert "workers" not in say("run", ZERO2, tmp_path / "other", "--to", "dp=2")


def test_a_picture_does_not_end_up_in_a_checkpoint(tmp_path: Path, say: Answer) -> None:
    words = ("run", ZERO2, tmp_path / "out", "--to", "dp=2", "--profile-svg")
    text = say(*words, tmp_path / "out/profile.svg", code=ExitCode.USAGE)
    assert "--profile-svg" in text and "lies inside of a checkpoint" in text
    assert "no such folder" in say(*words, tmp_path / "absent/profile.svg", code=ExitCode.TARGET_FAILED)
    assert not (tmp_path / "out").exists()


def test_a_result_that_is_there_has_a_short_profile(tmp_path: Path, say: Answer) -> None:
    words = ("run", ZERO2, tmp_path / "out", "--to", "dp=2", "--profile")
    say(*words)
    profile = say.json(*words)["profile"]
    assert [step["name"] for step in profile["steps"]] == ["index", "plan"]
    assert not profile["workers"]


def test_the_report_tells_the_times_and_fits_a_termination_message(tmp_path: Path, say: Answer) -> None:
    report = tmp_path / "report.json"
    say("run", ZERO2, tmp_path / "out", "--to", "dp=2", "--report", report)
    text = report.read_text(encoding="utf-8")
    assert len(text) <= 4096
    assert ReshardReport.from_json(text).milliseconds["move"] >= 0


def test_several_units_are_flushed_at_a_time(tmp_path: Path, monkeypatch) -> None:
    lock, inside, most = threading.Lock(), 0, 0

    def slow(descriptor: int) -> None:
        nonlocal inside, most
        with lock:
            inside += 1
            most = max(most, inside)
        time.sleep(0.05)
        with lock:
            inside -= 1

    monkeypatch.setattr(plan_module, "SMALLEST_UNIT_BYTES", 256)
    monkeypatch.setattr("os.fdatasync", slow)
    convert(conversion(tmp_path / "out"), RunOptions(sharing=Sharing.RESUMABLE, num_threads=1))
    assert 1 < most <= executor.FLUSHERS


def conversion(target: Path) -> Conversion:
    return Conversion(source=ZERO2, target=target, topology=Topology(dp=2, zero=2))


def test_the_worker_that_completes_a_result_has_the_times_of_all(tmp_path: Path, monkeypatch) -> None:
    """The first worker is stopped after some units, as if its pod had died; the second one finds their times."""
    monkeypatch.setattr(plan_module, "SMALLEST_UNIT_BYTES", 256)
    monkeypatch.setattr("reshard.execution.journal._PATIENCE_SECONDS", 0.0)
    record, done = Journal.record, []

    def stop(journal: Journal, unit_record: executor.UnitRecord) -> None:
        if len(done) > 2:
            raise RuntimeError("killed")
        done.append(unit_record.unit)
        record(journal, unit_record)

    options = RunOptions(sharing=Sharing.TOGETHER, worker=(0, 2), num_threads=1)
    with monkeypatch.context() as patch:
        patch.setattr(Journal, "record", stop)
        patch.setattr(executor, "name_process", lambda: "pod-0:7")
        with pytest.raises(RuntimeError):
            convert(conversion(tmp_path / "out"), options)
    monkeypatch.setattr(executor, "name_process", lambda: "pod-1:9")
    with collecting() as collector:
        convert(conversion(tmp_path / "out"), RunOptions(sharing=Sharing.TOGETHER, worker=(1, 2), num_threads=1))
    workers = collector.profile().workers
    assert [worker.name.partition(",")[0] for worker in workers] == ["pod-0:7", "pod-1:9"]
    assert workers[0].units >= 3
    assert workers[1].spans[0].started > workers[0].spans[0].started


def test_a_resumed_run_tells_its_own_times(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(plan_module, "SMALLEST_UNIT_BYTES", 256)

    def stop(num_bytes: int) -> None:
        raise KeyboardInterrupt

    options = RunOptions(sharing=Sharing.RESUMABLE, num_threads=1)
    with pytest.raises(KeyboardInterrupt):
        convert(conversion(tmp_path / "out"), options, hooks=Hooks(on_progress=stop))
    with collecting() as collector:
        convert(conversion(tmp_path / "out"), options)
    profile = collector.profile()
    assert profile.seconds < 60
    assert math.isclose(profile.started, profile.started + profile.steps[0].started, abs_tol=0.5)
