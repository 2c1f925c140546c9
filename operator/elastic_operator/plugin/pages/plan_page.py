"""`kubectl etj plan` as text. Pure."""

from __future__ import annotations

from collections.abc import Iterator

from elastic_operator.api.spec_model import LOAD
from elastic_operator.plugin.pages.forecast import Forecast, ReshardForecast
from elastic_operator.plugin.pages.status_page import PARTS
from elastic_operator.plugin.pages.text import format_fields, format_seconds, format_size, format_table, pluralize

MAX_SHOWN = 8
"""Maximum number of alternatives and of refused topologies that are printed; `-o json` prints all."""


def format_plan(plan: Forecast) -> str:
    """Format a forecast: the outcome, its consequences, the alternatives, and the topologies that cannot run."""
    sections = [_headline(plan), "", format_fields(_facts(plan))]
    if plan.alternatives:
        rows = [
            (
                item.topology,
                f"{item.nodes} * {item.gpus_per_node}",
                str(item.accumulation_steps),
                "" if item.step_seconds is None else f"{item.step_seconds:.3g} s",
            )
            for item in plan.alternatives[:MAX_SHOWN]
        ]
        head = "Could run too:" if plan.outcome == "Unaffected" else "Could run too, but comes after it:"
        sections += ["", head, _indented(format_table(("TOPOLOGY", "NODES * GPUS", "MICRO-BATCHES", "STEP"), rows))]
        sections += _more(len(plan.alternatives))
    if plan.refused:
        sections += ["", "Cannot run:"]
        sections += [f"  {item.subject}: {item.reason}" for item in plan.refused[:MAX_SHOWN]]
        sections += _more(len(plan.refused))
    return "\n".join(sections)


def _headline(plan: Forecast) -> str:
    job, now, then = plan.name, _shape(plan.from_, plan.from_nodes), _shape(plan.to, plan.to_nodes)
    match plan.outcome:
        case "Finished":
            return f"{job} has ended ({plan.reason}): nothing would be started."
        case "Unaffected":
            return f"{job} would go on undisturbed as {now}."
        case "Grows":
            return f"{job} would go on as {now}, and then grow to {then}."
        case "Restarts":
            return f"{job} would restart in the same topology, {then}."
        case "Reshards":
            return f"{job} would go on as {then} instead of {now}."
        case "Starts":
            return f"{job} would start as {then}."
        case _:
            return f"{job} would wait: no topology fits."


def _facts(plan: Forecast) -> Iterator[tuple[str, str]]:
    yield "Why", plan.reason if plan.outcome != "Finished" else ""
    yield "Hit", f"the running attempt loses {', '.join(plan.hit)}" if plan.hit else ""
    yield "Then free", plan.free if plan.outcome != "Finished" else ""
    if plan.use_nodes:
        yield "Nodes", f"{plan.to_nodes} of {', '.join(plan.use_nodes)} (the scheduler chooses)"
    if plan.to and plan.outcome != "Unaffected":
        yield "Resume", _resume(plan)
    if plan.reshard is not None:
        yield "Reshard", _reshard(plan.reshard)
    if plan.estimate is not None:
        yield "Duration", _duration(plan)
    for note in plan.notes:
        yield "Note", note


def _shape(topology: str, nodes: int) -> str:
    return f"{topology} on {pluralize(nodes, 'node')}" if topology else "nothing (no attempt runs)"


def _resume(plan: Forecast) -> str:
    if plan.resume_step is None and plan.reshard is not None and plan.reshard.source:
        return f"from {plan.reshard.source}: the reshard Job finds its step"
    if plan.resume_step is None:
        return "from nothing: there is no commit"
    if plan.outcome == "Grows":
        return "from a commit that is made for it: no step is lost"
    lost = (
        f"as of now {pluralize(plan.lost_steps, 'step')} would be done again" if plan.lost_steps else "no step is lost"
    )
    return f"from the commit of step {plan.resume_step}; {lost}"


def _reshard(reshard: ReshardForecast) -> str:
    if reshard.mode == "None":
        return "none: the checkpoint is used as it is" if reshard.source else "none"
    if reshard.mode == LOAD:
        return f"none: the training loads another topology by itself: {reshard.reason}"
    known = f" (last time: {reshard.last_mode})" if reshard.last_mode and reshard.mode == "Auto" else ""
    num_bytes = "of unknown size" if reshard.num_bytes is None else f"{format_size(reshard.num_bytes)} to read"
    if reshard.num_bytes is not None and reshard.last_mode != "virtual":
        num_bytes += " and about as much to write"
    return f"mode {reshard.mode}{known}, {num_bytes}: {reshard.reason}"


def _duration(plan: Forecast) -> str:
    estimate = plan.estimate
    if estimate is None:
        return ""
    if estimate.total_seconds is None:
        return f"unknown: {estimate.basis}"
    order = [name for name in PARTS if estimate.parts_seconds.get(name)]
    parts = ", ".join(f"{name} {estimate.parts_seconds[name]:.1f}" for name in order)
    return f"about {format_seconds(estimate.total_seconds)} until the first step ({parts}): {estimate.basis}"


def _indented(text: str) -> str:
    return "\n".join(f"  {line}" for line in text.splitlines())


def _more(total: int) -> list[str]:
    return [f"  ... and {total - MAX_SHOWN} more (-o json has all)"] if total > MAX_SHOWN else []
