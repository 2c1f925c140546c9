"""`kubectl etj watch`: reads a job again and again, and shows what has changed until the job ends.

It goes on while the cluster does not answer, because that is when people have it open.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from elastic_operator.api.serialization import format_time, to_wire
from elastic_operator.manifests.attempt import attempt_name
from elastic_operator.plugin.cluster import Cluster
from elastic_operator.plugin.errors import Exit, NoSuchJobError, PluginError
from elastic_operator.plugin.output import write_json_line, write_text
from elastic_operator.plugin.pages.job_report import is_about, make_report, read_spec, read_status
from elastic_operator.plugin.pages.live.heartbeat import as_sample, describe, read_heartbeat, refresh
from elastic_operator.plugin.pages.live.losses import Sample, samples_of
from elastic_operator.plugin.pages.live.node_picture import find_node_states
from elastic_operator.plugin.pages.live.pace import steps_per_second, track_recovery
from elastic_operator.plugin.pages.live.watch_page import Frame, format_line, render
from elastic_operator.plugin.pages.text import format_age, format_clock, make_printable
from elastic_operator.plugin.terminal import open_screen

Json = dict[str, Any]

_DETAILS_SECONDS = 10.0
"""Events and pods of the job are read again after this time and at each change, nodes and all pods after this time."""

_PATIENCE_SECONDS = 5.0
"""Longest wait for one answer, so that the view never looks alive while it hangs."""

_KEPT_SAMPLES = 1000


@dataclasses.dataclass(slots=True)
class Watcher:
    """Reads a job and what belongs to it, and keeps the last answers.

    Attributes:
        with_nodes: read all nodes and pods of the cluster, too; else nodes are those of the job's pods.
        clock: returns the seconds since the epoch.
    """

    cluster: Cluster
    name: str
    target_step: int | None = None
    with_nodes: bool = True
    clock: Callable[[], float] = time.time
    resource: Json = dataclasses.field(default_factory=dict)
    details: dict[str, list[Json]] = dataclasses.field(default_factory=dict)
    notes: dict[str, str] = dataclasses.field(default_factory=dict)
    lease: Json | None = None
    lease_time: float = 0.0
    seen_step: tuple[int, float | None] = (0, None)
    samples: list[Sample] = dataclasses.field(default_factory=list)
    job_time: float = 0.0
    details_time: float = 0.0
    nodes_time: float = 0.0

    def look(self) -> Frame:
        """Read the job, and return a frame.

        Raises:
            PluginError: the job could not be read the first time, or it has been deleted.
        """
        before, uid = _version(self.resource), _uid(self.resource)
        try:
            self.resource, self.job_time = self.cluster.job(self.name), self.clock()
            self.notes.pop("job", None)
        except NoSuchJobError:
            raise
        except PluginError as error:
            if not self.resource:
                raise
            age = format_age(self.clock() - self.job_time)
            self.notes["job"] = f"what you see is {age} old: {error}"
        if _uid(self.resource) != uid:
            self.details, self.seen_step, self.nodes_time = {}, (0, None), 0.0
            self.samples = list(samples_of(read_status(self.resource)))
        is_changed = _version(self.resource) != before
        if "job" not in self.notes and (is_changed or self.clock() - self.details_time >= _DETAILS_SECONDS):
            self._read_details()
        if "job" not in self.notes:
            self._read_lease()
        frame = self._frame()
        self._keep_sample(frame)
        return dataclasses.replace(frame, samples=tuple(self.samples))

    def _read_lease(self) -> None:
        status = read_status(self.resource)
        self.lease = None
        if not status.launched or status.terminal or self.clock() < self.lease_time:
            return
        try:
            self.lease = self.cluster.lease(attempt_name(self.name, status.attempt))
            self.notes.pop("lease", None)
        except PluginError as error:
            # A right that is missing is not asked for every two seconds.
            self.lease_time = self.clock() + _DETAILS_SECONDS
            self.notes["lease"] = f"steps are those of the status: {error}"

    def _read_details(self) -> None:
        self.details_time = self.clock()
        readers: Mapping[str, Callable[[], list[Json]]] = {
            "events": lambda: self.cluster.events(self.name),
            "pods": lambda: self.cluster.pods(self.name),
        }
        if self.with_nodes and self.details_time - self.nodes_time >= _DETAILS_SECONDS:
            self.nodes_time = self.details_time
            readers = {**readers, "nodes": self.cluster.nodes, "live pods": self.cluster.live_pods}
        for what, read in readers.items():
            try:
                self.details[what] = read()
                self.notes.pop(what, None)
            except PluginError as error:
                age = f"{what} as they were before {format_clock(self.details_time)}"
                self.notes[what] = f"{age if what in self.details else f'without {what}'}: {error}"

    def _keep_sample(self, frame: Frame) -> None:
        sample = as_sample(frame.job)
        if sample is not None and (not self.samples or self.samples[-1] != sample):
            self.samples = [*self.samples[1 - _KEPT_SAMPLES :], sample]

    def _frame(self) -> Frame:
        status, now = read_status(self.resource), self.clock()
        events = [item for item in self.details.get("events") or () if is_about(item, self.resource)]
        spec, _ = read_spec(self.resource)
        pods, nodes = self.details.get("pods"), self.details.get("nodes")
        meta = self.resource["metadata"]
        beat = read_heartbeat(self.lease, meta.get("uid", ""))
        if beat is not None and beat.step is not None and beat.step != self.seen_step[0]:
            self.seen_step = beat.step, now if self.seen_step[0] else None
        states = find_node_states(
            status,
            spec.accelerator.resource if spec else "",
            pods or (),
            nodes,
            self.details.get("live pods"),
            job=(meta["namespace"], meta["name"]),
        )
        return Frame(
            job=refresh(make_report(self.resource, now, events), beat, self.seen_step[1]),
            now=now,
            trainer=describe(beat),
            rate=steps_per_second(status),
            recovery=track_recovery(status, now),
            nodes=states,
            target_step=self.target_step,
            notes=tuple(self.notes.values()),
        )


def watch(cluster: Cluster, options: argparse.Namespace) -> None:
    """Show a job until it is Complete or Failed, or until Ctrl-C.

    Raises:
        PluginError: the job cannot be read at the start, has been deleted, or `--record` cannot be written.
    """
    patient = dataclasses.replace(cluster, patience_seconds=_PATIENCE_SECONDS)
    watcher = Watcher(cluster=patient, name=options.name, target_step=options.target_step, with_nodes=options.nodes > 0)
    with _recording(options.record) as append, _display(options) as show:
        recorded: Sample | None = None
        while True:
            frame = watcher.look()
            show(frame)
            if append is not None and watcher.samples and watcher.samples[-1] != recorded:
                recorded = watcher.samples[-1]
                append(json.dumps({**to_wire(recorded), "time": _time_of(frame)}) + "\n")
            if frame.job.phase in ("Complete", "Failed") and "job" not in watcher.notes:
                return
            time.sleep(options.interval)


@contextlib.contextmanager
def _display(options: argparse.Namespace) -> Iterator[Callable[[Frame], None]]:
    """Return how frames are shown: as JSON, on a screen, or a line for each change."""
    is_ascii = not _can_draw(sys.stdout.encoding)
    if options.output != "text":
        yield _only_changes(lambda frame: write_json_line(_to_json(frame)), key=_written_state)
    elif options.has_screen and not options.plain:
        with open_screen(is_coloured=options.is_coloured) as screen:
            yield lambda frame: screen.show(
                render(make_printable(frame), max_nodes=options.nodes, max_events=options.events, is_ascii=is_ascii)
            )
    else:
        yield _only_changes(lambda frame: write_text(format_line(make_printable(frame)), flush=True), key=_shown_state)


def _only_changes(show: Callable[[Frame], None], key: Callable[[Frame], Any]) -> Callable[[Frame], None]:
    shown: list[Any] = []

    def show_change(frame: Frame) -> None:
        if shown != [key(frame)]:
            shown[:] = [key(frame)]
            show(frame)

    return show_change


def _shown_state(frame: Frame) -> Sequence[Any]:
    job = frame.job
    return (job.phase, job.attempt, job.topology, job.step, job.message, bool(frame.notes))


def _written_state(frame: Frame) -> Sequence[Any]:
    job = frame.job
    return (*_shown_state(frame), job.commit, job.recoveries, job.events)


def _to_json(frame: Frame) -> Json:
    value = to_wire(frame.job) | {"time": _time_of(frame)}
    if frame.recovery is not None:
        value["recovery"] = to_wire(frame.recovery)
    if frame.rate is not None:
        value["stepsPerSecond"] = round(frame.rate, 6)
    return value


def _time_of(frame: Frame) -> str:
    return format_time(frame.now)


@contextlib.contextmanager
def _recording(path: Path | None) -> Iterator[Callable[[str], None] | None]:
    """Return what appends a line to the recording; None without one."""
    if path is None:
        yield None
        return
    with _writing(path):
        record = path.open("a", encoding="utf-8")

    def append(line: str) -> None:
        with _writing(path):
            record.write(line)
            record.flush()

    try:
        yield append
    finally:
        with contextlib.suppress(OSError):  # each line was flushed, or its error was told
            record.close()


@contextlib.contextmanager
def _writing(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise PluginError(Exit.REFUSED, f"cannot write {path}: {error.strerror}") from error


def _can_draw(encoding: str | None) -> bool:
    try:
        "\N{BLACK SQUARE}\N{MULTIPLICATION SIGN}".encode(encoding or "utf-8")
    except (UnicodeEncodeError, LookupError):
        return False
    return True


def _uid(resource: Json) -> str:
    return str((resource.get("metadata") or {}).get("uid") or "")


def _version(resource: Json) -> str:
    return str((resource.get("metadata") or {}).get("resourceVersion") or resource.get("status") or "")
