"""`kubectl etj watch`: frames of a recorded job, the picture of nodes, pace, and a cluster that does not answer."""

from __future__ import annotations

import argparse
import copy
import dataclasses
import io
import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from elastic_operator.api.serialization import format_time
from elastic_operator.plugin.errors import Exit, NoSuchJobError, PluginError
from elastic_operator.plugin.live import Watcher, watch
from elastic_operator.plugin.options import make_parser
from elastic_operator.plugin.pages.job_report import make_report, read_status
from elastic_operator.plugin.pages.live.losses import MAX_LINE, Sample, read_recording, sparkline
from elastic_operator.plugin.pages.live.node_picture import NodeState, draw_gpus, find_node_states, summarize_rest
from elastic_operator.plugin.pages.live.pace import steps_per_second, track_recovery
from elastic_operator.plugin.pages.live.watch_page import Frame, format_line, render
from elastic_operator.plugin.pages.text import make_printable

RECORDED: dict[str, Any] = json.loads((Path(__file__).parent / "data/recorded_recovery.json").read_text())


def states(stage: str, *, may_read_nodes: bool = True, may_read_pods: bool = True) -> tuple[NodeState, ...]:
    entry = RECORDED[stage]
    return find_node_states(
        read_status(entry["job"]),
        "amd.com/gpu",
        entry["pods"],
        entry["nodes"] if may_read_nodes else None,
        entry["pods"] if may_read_pods else None,
        job=("demo", "gpt"),
    )


def frame(stage: str) -> Frame:
    entry = RECORDED[stage]
    status, now = read_status(entry["job"]), entry["time"]
    return Frame(
        job=make_report(entry["job"], now, entry["events"]),
        now=now,
        rate=steps_per_second(status),
        recovery=track_recovery(status, now),
        nodes=states(stage),
    )


def drawn(shown: Frame, width: int = 100, **options: Any) -> str:
    out = io.StringIO()
    Console(file=out, width=width, markup=False, highlight=False).print(render(shown, **options))
    return "\n".join(line.rstrip() for line in out.getvalue().splitlines())


@pytest.mark.parametrize("stage", RECORDED)
def test_every_stage_has_a_frame_that_fits(stage: str) -> None:
    text = drawn(frame(stage))
    assert "None" not in text
    assert text.startswith("demo/gpt")
    assert RECORDED[stage]["job"]["status"]["phase"] in text.splitlines()[0]
    assert max(map(len, text.splitlines())) <= 100
    assert "None" not in format_line(frame(stage))


def test_a_loss_shows_the_dead_node_and_a_timeline_that_fills_in() -> None:
    text = drawn(frame("resharding"))
    assert "gpu-3  \N{MULTIPLICATION SIGN}\N{MULTIPLICATION SIGN}    Lost   a1-1 Running" in text
    assert "gpu-1  \N{WHITE SQUARE}\N{WHITE SQUARE}    Ready" in text
    parts = [line.split()[:2] for line in text.splitlines() if line.endswith(("gone", "planned", "resharded"))]
    assert parts == [["stop", "0.0"], ["plan", "0.0"], ["reshard", "0.3"]]
    assert "no training for 1.5 s (the job has had no recovery yet that could be measured)" in text


def test_a_running_job_shows_its_pods_rate_and_the_way_to_a_step() -> None:
    text = drawn(dataclasses.replace(frame("drained"), target_step=1000))
    assert "gpu-1  \N{BLACK SQUARE}\N{BLACK SQUARE}    Ready  a4-0 Running" in text
    assert "110, 1.71 steps/s, seen 2s ago" in text
    assert "step 110 of 1000: about 8m40s left" in text
    suspended = dataclasses.replace(frame("suspended"), target_step=1000)
    assert "step 121 of 1000: time left unknown" in drawn(suspended)


def test_the_rate_is_unknown_before_the_second_step_and_after_an_external_start() -> None:
    assert steps_per_second(read_status(RECORDED["starting"]["job"])) is None
    status = read_status(RECORDED["drained"]["job"])
    assert status.current is not None
    external = dataclasses.replace(status.current, resume=dataclasses.replace(status.current.resume, external=True))
    assert steps_per_second(dataclasses.replace(status, current=external)) is None


def recovering(now: float, **fields: Any) -> Any:
    """A status with three measured recoveries, and a fourth that began ten seconds ago."""
    resource = copy.deepcopy(RECORDED["drained"]["job"])
    resource["status"]["recoveries"].append(
        {"cause": "NodeNotReady", "fromAttempt": 4, "signalTime": format_time(now - 10), **fields}
    )
    return read_status(resource)


def test_the_end_of_a_recovery_is_expected_from_those_before() -> None:
    now = RECORDED["drained"]["time"]
    planned = {"detectTime": format_time(now - 8), "planTime": format_time(now - 8), "toAttempt": 5}
    found = track_recovery(recovering(now, **planned), now)
    assert found is not None
    # One loss was measured: stop 0.0, launch 0.0, schedule 2.1, load 25.2; the current part has lasted 8 s.
    assert [(item.name, item.state) for item in found.parts] == [
        ("detect", "Done"), ("plan", "Done"), ("stop", "Current"), ("launch", "Ahead"), ("schedule", "Ahead"),
        ("load", "Ahead"),
    ]  # fmt: skip
    assert found.left_seconds == pytest.approx(27.3, abs=0.1)
    assert found.seconds == pytest.approx(10, abs=0.1)
    assert "as measured in 1 loss of this job" in found.basis


def test_nothing_is_expected_before_a_plan_and_of_a_pause() -> None:
    now = RECORDED["drained"]["time"]
    found = track_recovery(recovering(now, detectTime=format_time(now - 8)), now)
    assert found is not None
    assert (found.left_seconds, found.basis) == (None, "no attempt is planned yet")
    assert track_recovery(read_status(RECORDED["suspended"]["job"]), now) is None
    assert track_recovery(read_status(RECORDED["drained"]["job"]), now) is None


def test_without_the_right_to_list_nodes_the_pods_tell_where_the_job_runs() -> None:
    assert [(item.name, item.state, item.job) for item in states("drained", may_read_nodes=False)] == [
        ("gpu-1", "Unseen", 2), ("gpu-2", "Unseen", 2), ("gpu-3", "Unseen", 2)
    ]  # fmt: skip
    lost = states("resharding", may_read_nodes=False)
    assert [(item.name, item.state) for item in lost] == [("gpu-3", "Lost")]


def test_what_nobody_may_know_is_not_drawn_as_free() -> None:
    by_name = {item.name: item for item in states("resharding", may_read_pods=False)}
    assert draw_gpus(by_name["gpu-1"]) == "??"
    assert summarize_rest([by_name["gpu-1"]]).endswith("how many are free is not known")


@pytest.mark.parametrize(
    ("node", "picture"),
    [
        (NodeState(name="n", state="Ready", total=8, job=4, others=2, broken=1), "####oo.x"),
        (NodeState(name="n", state="Lost", total=4, job=4), "xxxx"),
        (NodeState(name="n", state="Ready", total=32, job=30, broken=2), "30 job 2 broken"),
        (NodeState(name="n", state="Lost"), "-"),
    ],
)
def test_one_symbol_stands_for_one_accelerator(node: NodeState, picture: str) -> None:
    assert draw_gpus(node, is_ascii=True) == picture


def test_many_nodes_are_counted_and_the_lost_one_is_among_those_listed() -> None:
    nodes = (
        NodeState(name="z", state="Lost", total=8, broken=8),
        *(NodeState(name=f"n{i}", state="Ready", total=8, job=8) for i in range(40)),
    )
    text = drawn(dataclasses.replace(frame("drained"), nodes=nodes), max_nodes=4)
    assert "z     \N{MULTIPLICATION SIGN}" in text
    assert "37 other nodes: 296 accelerators, 296 used by this job, 0 free" in text


class FakeCluster:
    """Answers from a recorded stage, or refuses."""

    def __init__(self, stage: str, *, refused: tuple[str, ...] = ()) -> None:
        self.entry, self.refused = copy.deepcopy(RECORDED[stage]), refused
        self.lease_: dict[str, Any] | None = None
        self.leases: list[str] = []

    def answer(self, what: str, value: Any) -> Any:
        if what in self.refused:
            code = Exit.UNREACHABLE if what == "job" else Exit.REFUSED
            raise PluginError(code, f"cluster https://x cannot be reached ({what})")
        return value

    def job(self, _: str) -> Any:
        if self.refused == ("deleted",):
            raise NoSuchJobError("no ElasticTrainingJob gpt in namespace demo")
        return self.answer("job", self.entry["job"])

    def events(self, _: str) -> Any:
        return self.answer("events", self.entry["events"])

    def pods(self, _: str) -> Any:
        return self.answer("pods", self.entry["pods"])

    def lease(self, name: str) -> Any:
        self.leases.append(name)
        return self.answer("lease", self.lease_)

    def nodes(self) -> Any:
        return self.answer("nodes", self.entry["nodes"])

    def live_pods(self) -> Any:
        return self.answer("live_pods", self.entry["pods"])


@pytest.mark.parametrize("text", ["[bold red]x[/] :warning: " * 3, "n" * 5000, "\x1b[2J\u202e|"])
def test_no_text_of_the_cluster_is_markup_or_breaks_the_frame(text: str) -> None:
    shown = frame("resharding")
    job = dataclasses.replace(
        shown.job,
        topology=text,
        message=text,
        events=tuple(dataclasses.replace(item, reason=text, message=text) for item in shown.job.events),
        now=dataclasses.replace(shown.job.now, doing=text, waits_for=text, advice=text),
    )
    nodes = tuple(dataclasses.replace(item, name=text, pods=(text,)) for item in shown.nodes)
    out = io.StringIO()
    hostile = make_printable(dataclasses.replace(shown, job=job, nodes=nodes, notes=(text,)))
    Console(file=out, width=100).print(render(hostile))  # a console that reads markup in plain strings
    lines = out.getvalue().splitlines()
    assert max(map(len, lines)) <= 100
    assert make_printable(text)[:20] in out.getvalue()
    assert "\x1b" not in out.getvalue()


def lease(owner: str, **annotations: str) -> dict[str, Any]:
    meta = {
        "name": "gpt-a4",
        "ownerReferences": [{"kind": "ElasticTrainingJob", "uid": owner, "controller": True}],
        "annotations": {f"elastictraining.dev/{key.replace('_', '-')}": value for key, value in annotations.items()},
    }
    return {"metadata": meta, "spec": {}}


def test_steps_and_losses_come_from_the_lease_if_they_are_newer() -> None:
    cluster, now = FakeCluster("drained"), [RECORDED["drained"]["time"]]
    uid = cluster.entry["job"]["metadata"]["uid"]
    watcher = Watcher(cluster=cluster, name="gpt", clock=lambda: now[0])  # type: ignore[arg-type]
    for step, loss in (("112", "2.4"), ("113", "NaN")):
        cluster.lease_ = lease(uid, step=step, samples="2260", loss=loss, phase="Saving", save="step 112 in 3 s")
        now[0] += 1
        seen = watcher.look()
    assert (seen.job.step, seen.job.samples, seen.job.loss, seen.job.step_time) == (113, 2260, None, now[0])
    assert [(item.step, item.loss) for item in seen.samples] == [(112, 2.4), (113, None)]
    assert "Saving; last save: step 112 in 3 s" in drawn(seen)
    assert set(cluster.leases) == {"gpt-a4"}


@pytest.mark.parametrize(
    "found",
    [
        lease("somebody", step="999"),
        lease(RECORDED["drained"]["job"]["metadata"]["uid"], step="1e9"),
        lease(RECORDED["drained"]["job"]["metadata"]["uid"], step="3", phase="\x1b[2J"),
        {"metadata": {"name": "gpt-a4"}},
    ],
)
def test_a_lease_of_somebody_else_or_with_nonsense_changes_nothing(found: dict[str, Any]) -> None:
    cluster = FakeCluster("drained")
    cluster.lease_ = found
    seen = Watcher(cluster=cluster, name="gpt").look()  # type: ignore[arg-type]
    assert (seen.job.step, seen.trainer) == (110, "")


def test_a_lease_that_may_not_be_read_is_asked_for_once() -> None:
    cluster = FakeCluster("drained", refused=("lease",))
    watcher = Watcher(cluster=cluster, name="gpt")  # type: ignore[arg-type]
    for _ in range(3):
        seen = watcher.look()
    assert len(cluster.leases) == 1
    assert [note.split(":")[0] for note in seen.notes] == ["steps are those of the status"]


def test_a_watch_goes_on_while_the_cluster_does_not_answer() -> None:
    cluster, now = FakeCluster("drained"), [RECORDED["drained"]["time"]]
    watcher = Watcher(cluster=cluster, name="gpt", clock=lambda: now[0])  # type: ignore[arg-type]
    assert watcher.look().notes == ()
    cluster.refused, now[0] = ("job",), now[0] + 30
    seen = watcher.look()
    assert seen.job.phase == "Running"
    assert seen.notes == ("what you see is 30s old: cluster https://x cannot be reached (job)",)
    assert "note: what you see is 30s old" in drawn(seen)
    cluster.refused = ()
    assert watcher.look().notes == ()


def test_what_was_read_before_stays_while_it_cannot_be_read_again() -> None:
    cluster, now = FakeCluster("drained"), [RECORDED["drained"]["time"]]
    watcher = Watcher(cluster=cluster, name="gpt", clock=lambda: now[0])  # type: ignore[arg-type]
    first = watcher.look()
    cluster.refused, now[0] = ("events", "pods", "nodes", "live_pods", "lease"), now[0] + 11
    seen = watcher.look()
    assert (seen.nodes, seen.job.events) == (first.nodes, first.job.events)
    assert [note.split(" ")[0] for note in seen.notes] == ["events", "pods", "nodes", "live", "steps"]
    cluster.refused, now[0] = (), now[0] + 11
    assert watcher.look().notes == ()


def test_a_job_of_the_same_name_begins_anew() -> None:
    cluster = FakeCluster("drained")
    watcher = Watcher(cluster=cluster, name="gpt")  # type: ignore[arg-type]
    watcher.look()
    cluster.entry = copy.deepcopy(RECORDED["running"])
    cluster.entry["job"]["metadata"]["uid"] = "another"
    assert [item.attempt for item in watcher.look().samples] == [1]


def test_a_watch_begins_with_the_losses_that_the_status_keeps() -> None:
    cluster = FakeCluster("drained")
    cluster.entry = copy.deepcopy(cluster.entry)
    points = [{"attempt": 1, "step": step, "samples": 20 * step, "loss": 5.0 - step} for step in (1, 2, 3)]
    cluster.entry["job"]["status"]["losses"] = points
    seen = Watcher(cluster=cluster, name="gpt").look()  # type: ignore[arg-type]
    assert [(item.attempt, item.step) for item in seen.samples] == [(1, 1), (1, 2), (1, 3), (4, 110)]


def test_a_watch_begins_with_an_answer_and_ends_with_the_deletion() -> None:
    watcher = Watcher(cluster=FakeCluster("drained", refused=("job",)), name="gpt")  # type: ignore[arg-type]
    with pytest.raises(PluginError, match="cannot be reached"):
        watcher.look()
    watcher.cluster = FakeCluster("drained")  # type: ignore[assignment]
    watcher.look()
    watcher.cluster = FakeCluster("drained", refused=("deleted",))  # type: ignore[assignment]
    with pytest.raises(NoSuchJobError):
        watcher.look()


def test_what_may_not_be_read_is_noted_and_the_rest_is_shown() -> None:
    cluster = FakeCluster("drained", refused=("events", "nodes", "live_pods"))
    seen = Watcher(cluster=cluster, name="gpt", clock=lambda: 100.0).look()  # type: ignore[arg-type]
    assert [note.split(":")[0] for note in seen.notes] == ["without events", "without nodes", "without live pods"]
    assert [item.job for item in seen.nodes] == [2, 2, 2]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Ending:
    """A cluster whose job is Running at the first look and Complete at the second."""

    fake: FakeCluster
    looks: list[str] = dataclasses.field(default_factory=list)
    patience_seconds: float | None = None

    def job(self, name: str) -> Any:
        self.looks.append(name)
        found = copy.deepcopy(self.fake.job(name))
        if len(self.looks) > 1:
            found["status"] |= {"phase": "Complete", "message": "the training is over"}
            found["status"]["progress"] |= {"step": 111, "loss": 2.4, "samples": 2220}
        return found

    def __getattr__(self, name: str) -> Any:
        return getattr(self.fake, name)


def options_of(arguments: list[str]) -> argparse.Namespace:
    """Return the options as the program sees them without a terminal."""
    options = make_parser().parse_args(arguments)
    options.has_screen = options.is_coloured = False
    return options


def test_a_watch_ends_with_the_job_and_records_what_it_saw(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "gpt.jsonl"
    options = options_of(["watch", "gpt", "--interval", "0.2", "--record", str(path)])
    watch(Ending(fake=FakeCluster("drained")), options)  # type: ignore[arg-type]
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[2] for line in lines] == ["Running", "Complete"]
    samples, bad = read_recording(path.read_text().splitlines())
    assert (samples, bad) == (
        (Sample(attempt=4, step=110, samples=2200, loss=2.4198), Sample(attempt=4, step=111, samples=2220, loss=2.4)),
        0,
    )


def test_a_job_that_is_over_has_no_rate() -> None:
    status = read_status(RECORDED["drained"]["job"])
    assert steps_per_second(status) is not None
    assert steps_per_second(dataclasses.replace(status, phase="Complete")) is None


def test_the_lines_of_json_are_a_recording_too(capsys: pytest.CaptureFixture[str]) -> None:
    options = options_of(["watch", "gpt", "--interval", "0.2", "-o", "json"])
    watch(Ending(fake=FakeCluster("drained")), options)  # type: ignore[arg-type]
    lines = capsys.readouterr().out.splitlines()
    assert [json.loads(line)["phase"] for line in lines] == ["Running", "Complete"]
    assert [item.step for item in read_recording(lines)[0]] == [110, 111]


def test_a_recording_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    options = options_of(["watch", "gpt", "--record", str(tmp_path / "absent" / "x")])
    with pytest.raises(PluginError, match=r"cannot write .*: No such file"):
        watch(Ending(fake=FakeCluster("drained")), options)  # type: ignore[arg-type]


def test_an_error_of_the_output_is_not_one_of_the_recording(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def end(*_: Any, **__: Any) -> None:
        raise BrokenPipeError

    monkeypatch.setattr("elastic_operator.plugin.live.write_text", end)
    options = options_of(["watch", "gpt", "--record", str(tmp_path / "x")])
    with pytest.raises(BrokenPipeError):
        watch(Ending(fake=FakeCluster("drained")), options)  # type: ignore[arg-type]


def test_a_recording_that_can_be_opened_and_not_written_is_named() -> None:
    options = options_of(["watch", "gpt", "--record", "/dev/full"])
    with pytest.raises(PluginError, match="cannot write /dev/full: No space left"):
        watch(Ending(fake=FakeCluster("drained")), options)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "line",
    ["{", "[]", '"x"', '{"attempt": 1}', '{"attempt": true, "step": 1, "samples": 1}', '{"attempt": -1, "step": 1}',
     '{"attempt": 1, "step": 1.5, "samples": 2}', '{"attempt": 1, "step": 1, "samples": 99999999999999999999}',
     "[" * 100_000, " " + "x" * MAX_LINE],
)  # fmt: skip
def test_a_line_of_a_recording_that_makes_no_sense_is_counted(line: str) -> None:
    assert read_recording([line, ""]) == ((), 1)


@pytest.mark.parametrize("loss", ["NaN", "Infinity", "1e400", '"2"', "null", "true"])
def test_a_loss_that_is_no_number_leaves_a_gap(loss: str) -> None:
    line = f'{{"attempt": 1, "step": 2, "samples": 3, "loss": {loss}}}'
    assert read_recording([line]) == ((Sample(attempt=1, step=2, samples=3),), 0)


def test_a_sparkline_has_the_heights_of_its_values() -> None:
    assert sparkline([3.0, 2.0, 1.0]) == "\N{FULL BLOCK}\N{LOWER FIVE EIGHTHS BLOCK}\N{LOWER ONE EIGHTH BLOCK}"
    assert sparkline([1.0]) == ""
    assert sparkline([2.0, 2.0]) == "\N{LOWER ONE EIGHTH BLOCK}" * 2
