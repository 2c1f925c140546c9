"""Times of units become one profile, from any number of workers and machines."""

import json
import math
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reshard.profile import wire
from reshard.profile.clock import UNTIMED, FileTime, Phase, PhaseClock, UnitTimes
from reshard.profile.collector import Collector, collected, collecting, current, timed
from reshard.profile.devices import find_devices, parse_file_systems
from reshard.profile.events import Decision, Device, FileNames, Step
from reshard.profile.records import MOST_FILES, MOST_SPANS, Span, make_profile, merge_spans

NAMES = FileNames(
    source=[(f"s{at}", Device("8:1", "ext4") if at < 12 else Device("0:9", "nfs4")) for at in range(14)],
    target=[("t0", Device("8:1", "ext4"))],
)

WRITTEN = FileTime(Phase.WRITE, 0, 0.5, 90)


def unit(worker: str, started: float, *, files: tuple[FileTime, ...] = (), **phases: float) -> UnitTimes:
    return UnitTimes(
        worker=worker,
        started=started,
        seconds=tuple(phases.get(phase.name.lower(), 0.0) for phase in Phase),
        num_bytes=tuple(100 if phase.name.lower() in phases else 0 for phase in Phase),
        files=files,
        cpu_seconds=0.25,
        flush_started=started + 1,
        flush_seconds=0.125,
    )


def test_the_phases_of_a_unit_fill_its_time(monkeypatch) -> None:
    now = iter([10.0, 11.0, 13.0, 13.5, 14.0, 20.0])
    monkeypatch.setattr("reshard.profile.clock.perf_counter", lambda: next(now))
    clock = PhaseClock("a")
    clock.begin()
    clock.lap(Phase.READ, 100, 3)
    clock.lap(Phase.READ, 50, 3)
    clock.lap(Phase.WRITE, 150, 0)
    times = clock.end()
    assert {phase.name: times.seconds[phase] for phase in Phase if times.seconds[phase]} == {
        "WAIT": 1.0, "READ": 2.5, "WRITE": 0.5, "OTHER": 6.0,
    }  # fmt: skip
    assert sum(times.seconds) == 10.0
    assert times.busy_seconds == 9.0
    assert set(times.files) == {FileTime(Phase.READ, 3, 2.5, 150), FileTime(Phase.WRITE, 0, 0.5, 150)}


def test_a_clock_begins_anew_for_each_unit() -> None:
    clock = PhaseClock()
    for _ in range(2):
        clock.begin()
        clock.lap(Phase.READ, 100, 1)
        assert clock.end().num_bytes[Phase.READ] == 100


def test_a_clock_knows_the_time_on_a_processor() -> None:
    began = time.thread_time()
    clock = PhaseClock()
    clock.begin()
    while time.thread_time() - began < 0.1:  # the kernel updates its counter at ticks
        pass
    assert 0 < clock.end().cpu_seconds < 60
    UNTIMED.lap(Phase.READ, 1, 1)
    assert not UNTIMED.end().num_bytes[Phase.READ]


def test_a_profile_adds_up_units() -> None:
    units = [
        unit("b:1", 101.0, read=1.0, write=0.5, files=(FileTime(Phase.READ, 13, 1.0, 100), WRITTEN)),
        unit("a:7", 100.5, read=2.0, files=(FileTime(Phase.READ, 1, 2.0, 100),)),
        unit("b:1", 102.5, wait=0.5, populate=1.0, files=(FileTime(Phase.POPULATE, 13, 1.0, 100),)),
    ]  # fmt: skip
    decisions = [Decision(101.5, 2, 1 << 20, 0.0, "the default of this machine")]
    profile = make_profile((100.0, 110.0), [Step("index", 100.0, 0.5)], units, decisions, NAMES)
    assert (profile.started, profile.seconds) == (100.0, 10.0)
    assert {total.name: (total.seconds, total.num_bytes) for total in profile.phases} == {
        "wait": (0.5, 100), "read": (3.0, 200), "populate": (1.0, 100), "write": (0.5, 100), "sync": (0.375, 0),
    }  # fmt: skip
    assert [(worker.name, worker.units, worker.cpu_seconds) for worker in profile.workers] == [
        ("a:7", 1, 0.25), ("b:1", 2, 0.5),
    ]  # fmt: skip
    assert [(total.name, total.seconds, total.num_bytes) for total in profile.devices] == [
        ("source 0:9 nfs4", 2.0, 200), ("source 8:1 ext4", 2.0, 100), ("target 8:1 ext4", 0.5, 90),
    ]  # fmt: skip
    assert [total.name for total in profile.files] == ["source s13", "source s1", "target t0"]
    assert profile.decisions[0].at == 1.5
    assert profile.steps == (Step("index", 0.0, 0.5),)
    assert profile.unnamed_seconds == 9.5
    assert json.loads(json.dumps(profile.to_dict()))["workers"][1]["seconds"]["populate"] == 1.0


def test_units_of_others_may_lie_before_the_run() -> None:
    profile = make_profile((100.0, 110.0), [Step("index", 100.0, 0.5)], [unit("a", 90.0, read=1.0)], [], NAMES)
    assert (profile.started, profile.seconds, profile.steps[0].started) == (90.0, 20.0, 10.0)


def test_only_the_slowest_files_are_listed() -> None:
    files = tuple(FileTime(Phase.READ, at, float(at), 1) for at in range(14))
    profile = make_profile((0.0, 1.0), [], [unit("a", 0.0, read=1.0, files=files)], [], NAMES)
    assert [total.name for total in profile.files] == [f"source s{13 - at}" for at in range(MOST_FILES)]


def test_a_file_that_nobody_knows_is_named_by_its_number() -> None:
    files = (FileTime(Phase.READ, 99, 1.0, 1),)
    profile = make_profile((0.0, 1.0), [], [unit("a", 0.0, read=1.0, files=files)], [], NAMES)
    assert profile.files[0].name == "source file 99"


def test_a_profile_of_nothing() -> None:
    assert make_profile((5.0, 6.0), [], [], [], FileNames((), ())).to_dict()["phases"] == []


@given(st.lists(st.tuples(st.floats(0, 5), st.floats(0, 5)), max_size=1000))
def test_spans_are_few_and_keep_the_time(parts) -> None:
    spans, at = [], 0.0
    for wait, read in parts:
        seconds = [0.0] * len(Phase)
        seconds[Phase.WAIT], seconds[Phase.READ] = wait, read
        spans.append(Span(at, tuple(seconds)))
        at += wait + read
    merged = merge_spans(spans)
    assert len(merged) <= MOST_SPANS
    assert math.isclose(sum(sum(span.seconds) for span in merged), at, abs_tol=1e-6)
    assert [span.started for span in merged] == sorted(span.started for span in merged)


def test_times_survive_the_journal() -> None:
    times = unit("host:12", 1.5, read=0.25, files=(FileTime(Phase.READ, 1, 0.25, 7),))
    assert wire.decode(json.loads(json.dumps(wire.encode(times)))) == times


GOOD = wire.encode(unit("host:12", 1.5, read=0.25, files=(FileTime(Phase.READ, 1, 0.25, 7),)))


@pytest.mark.parametrize(
    "change",
    [
        {"seconds": [1.0]},
        {"seconds": ["1"] * len(Phase)},
        {"seconds": [math.inf] * len(Phase)},
        {"seconds": [-1.0] * len(Phase)},
        {"bytes": [1.5] * len(Phase)},
        {"bytes": None},
        {"files": [[99, 0, 0.0, 0]]},
        {"files": [[1, -1, 0.0, 0]]},
        {"files": [[1]]},
        {"cpu_seconds": True},
    ],
)
def test_times_that_make_no_sense_are_left_out(change) -> None:
    assert wire.decode(GOOD) is not None
    assert wire.decode({**GOOD, **change}) is None


@pytest.mark.parametrize("value", [None, 3, "times", [], {}, {"worker": "a"}])
def test_what_are_no_times_is_none(value) -> None:
    assert wire.decode(value) is None


def test_functions_are_steps_also_if_they_fail() -> None:
    @timed("step")
    def fail() -> None:
        raise ValueError

    @collected
    def run() -> Collector:
        with pytest.raises(ValueError):
            fail()
        return current()

    assert [step.name for step in run().profile().steps] == ["step"]
    with pytest.raises(ValueError):
        fail()  # without a collector
    assert not current().profile().steps


def test_a_run_uses_the_collector_of_its_caller() -> None:
    with collecting() as outer, collecting() as inner:
        assert inner is outer is current()
        outer.add_step("index", 1.0, 0.0125)
        outer.add_step("index", 1.0, 0.0125)
        outer.set_units([unit("a", 1.0, read=0.5)], NAMES)
    assert outer.milliseconds() == {"index": 25, "units.read": 500, "units.sync": 125}


def test_devices() -> None:
    mounts = "25 1 254:0 / / rw - ext4 /dev/vda rw\n31 25 0:27 / /dev/shm rw,nosuid shared:3 - tmpfs tmpfs rw\nbroken\n"
    assert parse_file_systems(mounts) == {"254:0": "ext4", "0:27": "tmpfs"}
    store = Device("s3://bucket", "object store")
    assert find_devices("s3://bucket/run/step", ["a", "b"]) == [("a", store), ("b", store)]


def test_the_device_of_a_folder_is_that_of_its_files(tmp_path) -> None:
    (tmp_path / "inner").mkdir()
    number = tmp_path.stat().st_dev
    found = find_devices(tmp_path, ["a.pt", "inner/b.pt", "absent/c.pt"])
    assert [path for path, _ in found] == ["a.pt", "inner/b.pt", "absent/c.pt"]
    assert found[0][1] == found[1][1] == Device(f"{number >> 8 & 0xFFF}:{number & 0xFF}", found[0][1].kind)
    assert found[2][1] == Device("?", "")
