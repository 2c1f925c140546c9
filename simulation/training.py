"""The progress of one attempt that trains: steps, commits and pauses for saves as functions of the time. Pure."""

from __future__ import annotations

import dataclasses
import math


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """What an attempt has done at some moment.

    Attributes:
        steps: finished optimizer steps, counted from the beginning of the job.
        committed: steps in the newest commit that is complete; None if the attempt has made none.
        saving_seconds: time that complete saves have taken.
        step_time: when the last step finished, None if there is none.
    """

    steps: int
    committed: int | None
    saving_seconds: float
    step_time: float | None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Training:
    """An attempt from its first step on. It saves at the first step after each interval; a save stops the steps.

    Attributes:
        begin: when the first step begins.
        first: steps done before, in the commit from which the attempt has resumed.
        step_seconds: time of one step.
        interval_seconds: time between two commits.
        save_seconds: time of a save.
    """

    begin: float
    first: int
    step_seconds: float
    interval_seconds: float
    save_seconds: float

    @property
    def steps_per_save(self) -> int:
        """Number of steps between two saves."""
        return max(1, math.ceil(self.interval_seconds / self.step_seconds))

    def progress(self, now: float) -> Progress:
        """Return what is done at `now`."""
        train = self.steps_per_save * self.step_seconds
        cycles, rest = divmod(max(0.0, now - self.begin), train + self.save_seconds)
        saves = int(cycles)
        # A tiny tolerance: at the moment at which a step ends, it is done.
        done = min(self.steps_per_save, int(rest / self.step_seconds + 1e-9))
        steps = saves * self.steps_per_save + done
        last = self.begin + saves * (train + self.save_seconds)
        return Progress(
            steps=self.first + steps,
            committed=self.first + saves * self.steps_per_save if saves else None,
            saving_seconds=saves * self.save_seconds,
            step_time=None if not steps else (last + done * self.step_seconds if done else last - self.save_seconds),
        )

    def drain(self, now: float) -> tuple[float, Progress]:
        """Return when an attempt that is asked at `now` to commit and exit has done so, and what it has done then."""
        train = self.steps_per_save * self.step_seconds
        cycles, rest = divmod(max(0.0, now - self.begin), train + self.save_seconds)
        start = self.begin + cycles * (train + self.save_seconds)
        steps = min(self.steps_per_save, math.ceil(rest / self.step_seconds - 1e-9))
        before = self.first + int(cycles) * self.steps_per_save
        if not steps and cycles:  # between a save and the next step: everything is committed
            done = self.progress(now)
            return now, dataclasses.replace(done, committed=before)
        steps = max(1, steps)
        end = start + steps * self.step_seconds + self.save_seconds
        saving = (int(cycles) + 1) * self.save_seconds
        total = before + steps
        return end, Progress(steps=total, committed=total, saving_seconds=saving, step_time=end - self.save_seconds)
