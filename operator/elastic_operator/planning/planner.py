"""Choose the topology for the available capacity. Pure: the same inputs give the same plan.

Every shape that the spec allows on the usable nodes is either a candidate or rejected with a reason. The candidates are
ordered by these criteria; the first difference decides:

1. strategy Fixed or Ranked: position in `spec.parallelism.topologies`;
2. `spec.nodes.preferred` nodes before any other number;
3. without `spec.accelerator.performance`: more accelerators first (estimates for unknown hardware do not justify
   idle nodes), then the order of `perNode`;
4. estimated time of a step. Estimates within TIE_FRACTION of the best are a tie. Ties are resolved by: the tp and pp of
   the current topology first (the weights need no resharding), then fewer pipeline stages, less tensor, context and
   expert parallelism, earlier in `perNode`, fewer nodes.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterator

from elastic_operator.api.spec import Parallelism, Performance, Spec, Strategy
from elastic_operator.observed.capacity import Capacity, NodeCapacity
from elastic_operator.planning import cost, memory
from elastic_operator.planning.constraints import accumulation_steps, refusals
from elastic_operator.planning.shape import Shape
from reshard.topology import Topology

TIE_FRACTION = 0.02
"""Relative difference below which estimates do not tell which candidate is faster."""

MAX_SHAPES = 20_000
"""Maximum number of shapes in a search, so that no spec occupies the operator for more than about a second. Ordinary
specs have a few hundred shapes. For each combination of degrees the largest numbers of accelerators come first."""

MAX_REJECTED = 256


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A shape that can run.

    Attributes:
        accumulation_steps: micro-batches per replica and step.
        cost: parts of the estimated time of a step.
        seconds: estimated time of a step; None without `spec.model` or `spec.accelerator.performance`.
        memory: of the rank that needs most; None without `spec.model`.
    """

    shape: Shape
    topology: Topology
    accumulation_steps: int
    cost: cost.Cost
    seconds: float | None
    memory: memory.Memory | None

    @property
    def num_nodes(self) -> int:
        """Number of pods, one per node."""
        return self.shape.num_nodes

    @property
    def per_node(self) -> int:
        """Number of accelerators of each pod."""
        return self.shape.per_node

    def __str__(self) -> str:
        seconds = "" if self.seconds is None else f", estimated {self.seconds:.3g} s per step"
        return (
            f"{self.topology} on {self.num_nodes} nodes * {self.per_node} accelerators, "
            f"{self.accumulation_steps} micro-batches{seconds}"
        )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Rejection:
    """A shape, or a group of shapes, that cannot run, and one sentence for each reason."""

    subject: str
    reasons: tuple[str, ...]

    @property
    def reason(self) -> str:
        """All reasons in one line."""
        return "; ".join(self.reasons)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PlanResult:
    """Result of the planner.

    Attributes:
        best: what to run; None if nothing can.
        capacity: the capacity that was planned for.
        candidates: every shape that can run, best first.
        rejected: shapes that cannot run on the largest permitted number of nodes.
        reason: one sentence for people.
    """

    best: Candidate | None
    capacity: Capacity
    candidates: tuple[Candidate, ...]
    rejected: tuple[Rejection, ...]
    reason: str


def plan(spec: Spec, capacity: Capacity, current: Topology | None = None) -> PlanResult:
    """Choose what to run on `capacity`. `current` is what ran last; it only resolves ties."""
    shapes = tuple(itertools.islice(_shapes(spec, capacity), MAX_SHAPES))
    candidates = _rank(spec, [evaluate(spec, shape) for shape in shapes if not refusals(spec, shape)], current)
    rejected = tuple(itertools.islice(_rejections(spec, capacity), MAX_REJECTED))
    if len(shapes) == MAX_SHAPES:
        rejected = (_reject_rest(), *rejected)
    best = candidates[0] if candidates else None
    return PlanResult(
        best=best,
        capacity=capacity,
        candidates=candidates,
        rejected=rejected,
        reason=_summarize(capacity, candidates, rejected),
    )


def best(spec: Spec, capacity: Capacity, current: Topology | None = None) -> Candidate | None:
    """Return `plan(spec, capacity, current).best`, cached by the spec and the numbers of usable nodes.

    Every pass over a running job calls this to see whether a better topology fits.
    """
    counts = tuple(min(spec.nodes.max, capacity.num_usable(per_node)) for per_node in spec.accelerator.per_node)
    key = (*_planned_parts(spec), counts, current)
    if key not in _CACHE:
        _CACHE[key] = plan(spec, capacity, current).best
        if len(_CACHE) > _MAX_CACHED:
            del _CACHE[next(iter(_CACHE))]
    return _CACHE[key]


def node_counts(spec: Spec) -> tuple[int, ...]:
    """Return the numbers of nodes on which something can run, smallest first, if there were nodes enough; cached.

    If nothing can run at all, the range that the spec permits.
    """
    key = _planned_parts(spec)
    if key not in _COUNTS:
        per_node = max(spec.accelerator.per_node)
        nodes = tuple(NodeCapacity(name=str(i), free=per_node) for i in range(spec.nodes.max))
        candidates = plan(spec, Capacity(nodes=nodes)).candidates
        found = sorted({item.num_nodes for item in candidates}) or sorted({spec.nodes.min, spec.nodes.max})
        _COUNTS[key] = tuple(found)
        if len(_COUNTS) > _MAX_CACHED:
            del _COUNTS[next(iter(_COUNTS))]
    return _COUNTS[key]


def _planned_parts(spec: Spec) -> tuple[object, ...]:
    """Return the parts of a spec that determine its plans."""
    return (spec.nodes, spec.accelerator, spec.batch, spec.parallelism, spec.model, spec.checkpoint.format)


_COUNTS: dict[object, tuple[int, ...]] = {}

_CACHE: dict[object, Candidate | None] = {}
"""Results of `best`, oldest first, by all inputs that matter; of a capacity these are the numbers of usable nodes."""

_MAX_CACHED = 4096


def evaluate(spec: Spec, shape: Shape) -> Candidate:
    """Estimate the cost and the memory of a shape that can run.

    Raises:
        TopologyError: the shape is impossible.
    """
    num_micro = accumulation_steps(spec.batch, shape)
    performance = spec.accelerator.performance
    step_cost = cost.estimate(spec.model, performance or Performance(), spec.batch, shape, num_micro)
    return Candidate(
        shape=shape,
        topology=shape.topology,
        accumulation_steps=num_micro,
        cost=step_cost,
        seconds=None if spec.model is None or performance is None else step_cost.total,
        memory=None if spec.model is None else memory.estimate(spec.model, shape, spec.batch.micro_samples, num_micro),
    )


def shape_of(topology: Topology, *, num_nodes: int, per_node: int) -> Shape:
    """Build the shape of a running attempt."""
    return Shape(
        num_nodes=num_nodes,
        per_node=per_node,
        **{axis: getattr(topology, axis) for axis in ("tp", "pp", "dp", "ep", "cp", "zero")},
    )


def permitted_counts(spec: Spec, capacity: Capacity, per_node: int) -> tuple[int, ...]:
    """Return the numbers of nodes that the spec permits and the capacity has, largest first."""
    most = min(spec.nodes.max, capacity.num_usable(per_node))
    return tuple(n for n in range(most, spec.nodes.min - 1, -1) if spec.nodes.permits(n))


def _shapes(spec: Spec, capacity: Capacity) -> Iterator[Shape]:
    """Generate every shape worth checking; dp runs through the divisors of the batch, of which there are few."""
    passes = spec.batch.global_samples // spec.batch.micro_samples
    for per_node in spec.accelerator.per_node:
        counts = frozenset(permitted_counts(spec, capacity, per_node))
        if not counts:
            continue
        replicas = _divisors(passes, at_most=max(counts) * per_node)
        for degrees, data in _degrees(spec.parallelism):
            for num_replicas in replicas:
                shape = dataclasses.replace(degrees, per_node=per_node, dp=num_replicas * degrees.cp)
                num_nodes, rest = divmod(shape.tp * shape.pp * shape.dp, per_node)
                if not rest and num_nodes in counts and data in (None, shape.dp):
                    yield dataclasses.replace(shape, num_nodes=num_nodes)


def _degrees(parallelism: Parallelism) -> Iterator[tuple[Shape, int | None]]:
    """Generate the degrees that the spec allows, as shapes with open nodes and dp, and dp if the spec fixes it."""
    if parallelism.strategy is Strategy.AUTO:
        for pp, tp, cp, ep in itertools.product(
            parallelism.pipeline, parallelism.tensor, parallelism.context, parallelism.expert
        ):
            yield _open_shape(tp=tp, pp=pp, ep=ep, cp=cp, zero=parallelism.zero_stage), None
        return
    for rank, choice in enumerate(parallelism.topologies):
        yield (
            _open_shape(
                tp=choice.tensor,
                pp=choice.pipeline,
                ep=choice.expert,
                cp=choice.context,
                zero=choice.zero_stage,
                rank=rank,
            ),
            choice.data,
        )


def _open_shape(**degrees: int) -> Shape:
    return Shape(num_nodes=1, per_node=1, dp=1, **degrees)


def _rejections(spec: Spec, capacity: Capacity) -> Iterator[Rejection]:
    """Generate the reasons why the listed degrees do not run on the largest permitted numbers of nodes."""
    for per_node in spec.accelerator.per_node:
        counts = permitted_counts(spec, capacity, per_node)
        if not counts:
            yield Rejection(
                subject=f"{per_node} accelerators per node", reasons=(_explain_no_count(spec, capacity, per_node),)
            )
            continue
        world_size = counts[0] * per_node
        for degrees, data in _degrees(spec.parallelism):
            fixed = degrees.tp * degrees.pp
            shape = dataclasses.replace(
                degrees, num_nodes=counts[0], per_node=per_node, dp=data or max(1, world_size // fixed)
            )
            if reasons := refusals(spec, shape):
                where = f" on {counts[0]} nodes * {per_node} accelerators"
                yield Rejection(subject=str(shape) + where, reasons=reasons)


def _explain_no_count(spec: Spec, capacity: Capacity, per_node: int) -> str:
    usable = capacity.num_usable(per_node)
    permitted = f"from {spec.nodes.min} to {spec.nodes.max}"
    if spec.nodes.allowed is not None:
        permitted += f", of {list(spec.nodes.allowed)}"
    return f"{usable} nodes can give {per_node} accelerators each ({capacity}), and the spec permits {permitted}"


def _reject_rest() -> Rejection:
    reason = f"only the first {MAX_SHAPES} were evaluated: list fewer degrees of parallelism"
    return Rejection(subject="shapes beyond the limit", reasons=(reason,))


def _rank(spec: Spec, candidates: list[Candidate], current: Topology | None) -> tuple[Candidate, ...]:
    if not candidates:
        return ()
    preference = {count: i for i, count in enumerate(spec.accelerator.per_node)}

    def preference_key(item: Candidate) -> tuple[int, ...]:
        preferred = int(item.num_nodes != spec.nodes.preferred)
        if spec.accelerator.performance is not None:
            return (item.shape.rank, preferred)
        return (item.shape.rank, preferred, -item.shape.world_size, preference[item.per_node])

    def tie_key(item: Candidate) -> tuple[object, ...]:
        shape = item.shape
        is_resharded = current is not None and (shape.tp, shape.pp) != (current.tp, current.pp)
        degrees = (shape.pp, shape.tp, shape.cp, shape.ep)
        return (is_resharded, *degrees, preference[item.per_node], item.num_nodes)

    ordered = sorted(candidates, key=lambda item: (*preference_key(item), item.cost.total, *tie_key(item)))
    first = ordered[0]
    tie_limit = first.cost.total * (1 + TIE_FRACTION)
    tied = [item for item in ordered if preference_key(item) == preference_key(first) and item.cost.total <= tie_limit]
    return (*sorted(tied, key=tie_key), *(item for item in ordered if item not in tied))


def _summarize(capacity: Capacity, candidates: tuple[Candidate, ...], rejected: tuple[Rejection, ...]) -> str:
    if not candidates:
        reasons = "; ".join(f"{item.subject}: {item.reason}" for item in rejected[:3])
        rest = f"; and {len(rejected) - 3} more" if len(rejected) > 3 else ""
        supply = capacity.describe_supply()
        return f"Nothing can run on {capacity}{f' ({supply})' if supply else ''}: {reasons}{rest}."
    others = len(candidates) - 1
    return f"{candidates[0]}: best of {others + 1} that can run on {capacity}."


def _divisors(number: int, *, at_most: int) -> tuple[int, ...]:
    """Return the divisors up to `at_most`, largest first."""
    small = [i for i in range(1, min(math.isqrt(number), at_most) + 1) if number % i == 0]
    return tuple(sorted({*small, *(number // i for i in small if number // i <= at_most)}, reverse=True))
