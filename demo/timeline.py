"""Watch a job and tell its story line by line, with seconds since the start."""

from __future__ import annotations

import dataclasses
import sys
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

from demo.picture import Mark, Span

POLL_SECONDS = 0.25


@dataclasses.dataclass(slots=True)
class Timeline:
    """Collects phases, marks and events of one job; prints each as it happens.

    Attributes:
        fetch: returns the job as the API server has it now, or an empty mapping while it is not there.
        fetch_events: returns (uid, reason, message) of the job's events, oldest first.
    """

    fetch: Callable[[], Mapping[str, Any]]
    fetch_events: Callable[[], list[tuple[str, str, str]]]
    alive: Callable[[], bool] = lambda: True
    started: float = dataclasses.field(default_factory=time.time)
    spans: list[Span] = dataclasses.field(default_factory=list)
    marks: list[Mark] = dataclasses.field(default_factory=list)
    topologies: dict[int, str] = dataclasses.field(default_factory=dict)
    job: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    _stop: threading.Event = dataclasses.field(default_factory=threading.Event)
    _thread: threading.Thread | None = None
    _seen_events: set[str] = dataclasses.field(default_factory=set)
    _printed_step: float = 0.0

    def now(self) -> float:
        """Seconds since the start."""
        return time.time() - self.started

    def restart_clock(self) -> None:
        """Count seconds from now."""
        self.started = time.time()

    def say(self, text: str) -> None:
        """Print one line with the time in front."""
        sys.stdout.write(f"[{self.now():6.1f}s] {text}\n")
        sys.stdout.flush()

    def mark(self, text: str) -> None:
        """Something was done to the cluster."""
        self.marks.append(Mark(time=self.now(), text=text))
        self.say(f">>>>> {text}")

    def start(self) -> None:
        """Begin to watch in the background."""
        self._thread = threading.Thread(target=self._watch, name="timeline", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Stop watching and close the last span."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join(timeout=10)

    @property
    def status(self) -> Mapping[str, Any]:
        """The job's status as last seen."""
        return self.job.get("status") or {}

    def _watch(self) -> None:
        while not self._stop.is_set():
            try:
                job = self.fetch()
                if job:
                    self.job = job
                    self._observe(job.get("status") or {})
                    self._tell_events()
            except Exception as error:  # the API server may be busy; the story goes on
                self.say(f"(cannot read the job: {type(error).__name__}: {error})")
                time.sleep(2)
            self._stop.wait(POLL_SECONDS)

    def _observe(self, status: Mapping[str, Any]) -> None:
        phase, attempt = str(status.get("phase") or "Pending"), int(status.get("attempt") or 0)
        topology = short_topology(status.get("topology") or {})
        if attempt and topology and phase in {"Starting", "Running"}:
            self.topologies[attempt] = topology
        now = self.now()
        last = self.spans[-1] if self.spans else None
        if last is not None and (last.phase, last.attempt) == (phase, attempt):
            self.spans[-1] = dataclasses.replace(last, end=now)
        else:
            if last is not None:
                self.spans[-1] = dataclasses.replace(last, end=now)
                took = f"   ({last.phase} took {now - last.start:.1f} s)"
            else:
                took = ""
            self.spans.append(Span(phase=phase, attempt=attempt, start=now, end=now))
            self.say(f"{phase:<11} attempt {attempt}  {topology}{took}")
        if phase == "Running" and now - self._printed_step > 10:
            self._printed_step = now
            self.say(f"{'':<11} {progress(status)}")

    def _tell_events(self) -> None:
        for uid, reason, message in self.fetch_events():
            if uid not in self._seen_events:
                self._seen_events.add(uid)
                self.say(f"  event {reason}: {message}")


def short_topology(topology: Mapping[str, Any]) -> str:
    """`tp=1,pp=3,dp=2` from the status' topology."""
    return ",".join(f"{degree}={topology[degree]}" for degree in ("tp", "pp", "dp") if degree in topology)


def progress(status: Mapping[str, Any]) -> str:
    """One phrase on how far training is."""
    progress_ = status.get("progress") or {}
    step = progress_.get("step")
    loss = progress_.get("loss")
    commit = (status.get("checkpoint") or {}).get("step")
    parts = [f"step {step}" if step is not None else "no step yet"]
    if loss is not None:
        parts.append(f"loss {loss}")
    if commit is not None:
        parts.append(f"last commit at step {commit}")
    return ", ".join(parts)
