"""A plan without families of boxes, to compare with: every row is one box."""

import dataclasses

from reshard.planning.plan import Plan, make_plan


def in_boxes(plan: Plan) -> Plan:
    """The same plan, a row for each box of a family."""
    return make_plan(
        dataclasses.replace(plan.index, shards=plan.index.shards.boxes()),
        dataclasses.replace(plan.layout, shards=plan.layout.shards.boxes()),
        memory_bytes=plan.memory_bytes,
        num_threads=plan.num_threads,
    )
