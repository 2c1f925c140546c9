"""What a run notes on its way, besides the times of units. Small, because every run imports it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class Step(NamedTuple):
    """A step of the run: name, start in seconds since 1970, and duration."""

    name: str
    started: float
    seconds: float


class Decision(NamedTuple):
    """How many workers are active from now on, and why.

    Attributes:
        at: seconds since 1970.
        workers: number of active processes or threads.
        tile_bytes: largest tile of each.
        rate: source bytes per second before the decision; 0 before anything was measured.
        reason: sentence for the user.
    """

    at: float
    workers: int
    tile_bytes: int
    rate: float
    reason: str


class Device(NamedTuple):
    """A device that files lie on: `254:0` and `ext4`, or `s3://bucket` and `object store`."""

    name: str
    kind: str


class FileNames(NamedTuple):
    """Path and device of each file of the source and of the target, by number."""

    source: Sequence[tuple[str, Device]]
    target: Sequence[tuple[str, Device]]
