"""Format a plan as text for people."""

from __future__ import annotations

from elastic_operator.api.schema_types import GIB
from elastic_operator.planning.planner import Candidate, PlanResult

_HEADER = ("", "topology", "nodes", "GPUs", "micro-batches", "estimate", "bubble", "memory")


def explain(result: PlanResult, *, max_candidates: int = 20, max_rejected: int = 20) -> str:
    """Format the candidates as a table, best first, then the rejected shapes with their reasons."""
    lines = [result.reason]
    if result.candidates:
        rows: list[tuple[str, ...]] = [_HEADER]
        rows += [_row(result, item) for item in result.candidates[:max_candidates]]
        widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
        lines += [
            "",
            *("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows),
        ]
        lines += _count_rest(len(result.candidates) - max_candidates, "can run too")
        if result.candidates[0].seconds is None:
            lines += [
                "",
                "Estimates compare shapes with as many GPUs; for seconds, spec.model and accelerator.performance.",
            ]
    if result.rejected:
        lines += ["", "Cannot run:"]
        lines += [f"  {item.subject}: {item.reason}" for item in result.rejected[:max_rejected]]
        lines += _count_rest(len(result.rejected) - max_rejected, "cannot run either")
    return "\n".join(lines)


def _row(result: PlanResult, item: Candidate) -> tuple[str, ...]:
    total = item.cost.total
    return (
        "*" if item is result.best else "",
        str(item.topology),
        f"{item.num_nodes} * {item.per_node}",
        str(item.shape.world_size),
        str(item.accumulation_steps),
        _relative(result, item) if item.seconds is None else f"{item.seconds:.3g} s",
        f"{item.cost.bubble / total:.0%}",
        "unknown" if item.memory is None else f"{item.memory.total_bytes / GIB:.3g} GiB",
    )


def _relative(result: PlanResult, item: Candidate) -> str:
    # Without facts about the hardware, shapes of different sizes are not compared by their estimates.
    world_size = item.shape.world_size
    fastest = min(other.cost.total for other in result.candidates if other.shape.world_size == world_size)
    return f"{item.cost.total / fastest:.2f} x"


def _count_rest(count: int, what: str) -> list[str]:
    return [f"  ... {count} more {what}"] if count > 0 else []
