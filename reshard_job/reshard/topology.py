"""The topology of a training run: degrees of parallelism and how ranks map onto them.

The operator chooses a topology, the resharder converts between two, and the trainer runs one. Pure data, standard
library only.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from reshard.errors import TopologyError

DEGREES = ("tp", "pp", "dp", "ep", "cp")
"""Axis names in the order in which people write them."""

_KEYS = (*DEGREES, "zero")
MOST_RANKS = 1 << 20
"""Largest supported world size, because a plan takes time and memory for every rank."""

_MOST_DIGITS = 18
_SHORT = re.compile(r"^(tp|pp|dp|ep|cp|zero)\s*=\s*(-?\d+)$")


class Coordinate(NamedTuple):
    """Position of one rank on each axis."""

    pp: int
    dp: int
    tp: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Topology:
    """Degrees of parallelism of one launch.

    The world size is ``pp * dp * tp``. Expert (`ep`) and context (`cp`) parallelism subdivide `dp`, as in DeepSpeed,
    and add no ranks.

    Attributes:
        tp: tensor parallel degree.
        pp: pipeline stages.
        dp: data parallel replicas.
        ep: expert parallel degree; divides dp.
        cp: context (sequence) parallel degree; divides dp.
        zero: ZeRO stage 0..3: optimizer state (1), gradients too (2) and weights too (3) are partitioned over dp. FSDP2
            partitions what stage 3 does.

    >>> topology = Topology(tp=2, dp=3)
    >>> topology.world_size, topology.coordinate(5)
    (6, Coordinate(pp=0, dp=2, tp=1))
    """

    tp: int = 1
    pp: int = 1
    dp: int = 1
    ep: int = 1
    cp: int = 1
    zero: int = 1

    def __post_init__(self) -> None:
        problems = [
            f"{name}={getattr(self, name)!r}: expected an integer of at least 1"
            for name in DEGREES
            if not isinstance(getattr(self, name), int) or getattr(self, name) < 1
        ]
        if self.zero not in (0, 1, 2, 3):
            problems.append(f"zero={self.zero!r}: expected a ZeRO stage 0, 1, 2 or 3")
        if not problems and self.dp % (self.ep * self.cp):
            problems.append(f"dp={self.dp} is not divisible by ep*cp={self.ep}*{self.cp}")
        if not problems and self.world_size > MOST_RANKS:
            problems.append(f"pp*dp*tp={self.pp}*{self.dp}*{self.tp} are {self.world_size} ranks, at most {MOST_RANKS}")
        if problems:
            raise TopologyError("; ".join(problems))

    def refuse_partitioned_pipeline(self) -> None:
        """Refuse stages 2 and 3 with a pipeline, for formats of frameworks that refuse them; FSDP2 permits them.

        Raises:
            TopologyError: gradients or weights are partitioned, and pp is above 1.
        """
        if self.pp > 1 and self.zero > 1:
            raise TopologyError(
                f"zero={self.zero} with pp={self.pp}: DeepSpeed refuses ZeRO-2 and ZeRO-3 with a pipeline"
            )

    @property
    def world_size(self) -> int:
        """Return the number of ranks."""
        return self.pp * self.dp * self.tp

    @property
    def num_replicas(self) -> int:
        """Return the number of replicas that get different samples: `cp` ranks share a sample's sequence."""
        return self.dp // self.cp

    def replica(self, rank: int) -> int:
        """Return the number of the replica that `rank` belongs to, from 0; its ranks are consecutive in DeepSpeed.

        Source: deepspeed/runtime/sequence_parallel/parallel_state_sp.py (0.19.8).
        """
        return self.coordinate(rank).dp // self.cp

    def coordinate(self, rank: int) -> Coordinate:
        """Return the position of `rank` on each axis; the axes are ordered pipe, data, model (slowest to fastest).

        Source: deepspeed/runtime/pipe/topology.py, PipeModelDataParallelTopology (0.19.8).
        """
        if not 0 <= rank < self.world_size:
            raise TopologyError(f"rank {rank} is outside of {self} (world size {self.world_size})")
        return Coordinate(pp=rank // (self.dp * self.tp), dp=rank // self.tp % self.dp, tp=rank % self.tp)

    def rank(self, *, pp: int, dp: int, tp: int) -> int:
        """Return the rank at a coordinate; the inverse of `coordinate`."""
        return (pp * self.dp + dp) * self.tp + tp

    def to_dict(self) -> dict[str, int]:
        """Return the form that COMMIT.json, `ETJ_TOPOLOGY` and the resource's status hold."""
        return {key: getattr(self, key) for key in _KEYS}

    def to_json(self) -> str:
        """Encode `to_dict` as one line of JSON."""
        return json.dumps(self.to_dict(), separators=(",", ":"))

    @classmethod
    def from_dict(cls, value: Mapping[str, Any]) -> Topology:
        """Read the output of `to_dict`. Missing degrees are 1; unknown keys are refused.

        Raises:
            TopologyError: unknown key, wrong type or impossible combination.
        """
        unknown = sorted(set(value) - set(_KEYS))
        if unknown:
            raise TopologyError(f"unknown keys {unknown}: expected some of {list(_KEYS)}")
        return cls(**dict(value))

    @classmethod
    def from_json(cls, text: str) -> Topology:
        """Read the output of `to_json`.

        Raises:
            TopologyError: not a JSON object, or not a topology.
        """
        try:
            value = json.loads(text)
        except json.JSONDecodeError as error:
            raise TopologyError(f"not JSON: {text!r}") from error
        if not isinstance(value, dict):
            raise TopologyError(f"expected a JSON object, found {text!r}")
        return cls.from_dict(value)

    @classmethod
    def parse(cls, text: str) -> Topology:
        """Read the command-line form ``tp=2,pp=2,dp=3,zero=1``.

        Raises:
            TopologyError: unreadable or repeated degree, or impossible combination.

        >>> str(Topology.parse("tp=2, dp=3"))
        'tp=2,pp=1,dp=3,zero=1'
        """
        values: dict[str, int] = {}
        for item in filter(None, (item.strip() for item in text.split(","))):
            match = _SHORT.match(item)
            name, _, number = (word.strip() for word in item.partition("="))
            if number and name not in _KEYS:
                raise TopologyError(f"there is no degree {name!r} ({text!r}): expected some of {', '.join(_KEYS)}")
            place = "" if item == text else f" in {text!r}"
            if match is not None and len(match[2]) > _MOST_DIGITS:
                raise TopologyError(f"the degree of {item!r:.60}{place:.60} is too large")
            if match is None:
                raise TopologyError(f"cannot read {item!r}{place}: write for instance tp=2,pp=2,dp=3,zero=1")
            if match[1] in values:
                raise TopologyError(f"{match[1]} is given twice in {text!r}")
            values[match[1]] = int(match[2])
        if not values:
            raise TopologyError(f"{text!r} names no degree: write for instance tp=2,pp=2,dp=3,zero=1")
        return cls(**values)

    def __str__(self) -> str:
        extra = "".join(f",{name}={getattr(self, name)}" for name in ("ep", "cp") if getattr(self, name) > 1)
        return f"tp={self.tp},pp={self.pp},dp={self.dp}{extra},zero={self.zero}"
