"""spec.managedBy: a job that another controller manages is left alone; the operator's own name changes nothing."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from elastic_operator.api.spec import SpecError, parse_spec
from elastic_operator.api.spec_model import OPERATOR_NAME
from elastic_operator.api.status import Status
from tests.unit.elastic_operator.crowd import SPEC, Crowd

KEY = ("ns", "new")


def passes(crowd: Crowd, spec: dict[str, Any]) -> float | None:
    """One pass over a new job with this spec."""
    crowd.reader.there[KEY] = crowd.tell_job(KEY, spec=spec, status=Status())
    return asyncio.run(crowd.controller.reconcile(KEY))


@pytest.mark.parametrize("is_asked", [False, True], ids=["from the store", "from the API server"])
@pytest.mark.parametrize(
    "broken", [{}, {"nodes": {"min": 2, "max": 1}}], ids=["valid", "a spec that is otherwise invalid"]
)
def test_a_job_of_another_controller_is_left_alone(is_asked: bool, broken: dict[str, Any]) -> None:
    crowd = Crowd(1, num_nodes=2)
    if is_asked:
        crowd.controller._store_until[KEY] = 0.0
    assert passes(crowd, {**SPEC, **broken, "managedBy": "kueue.x-k8s.io/multikueue"}) is not None
    assert (crowd.writer.written, crowd.writer.told, crowd.writer.done) == ([], [], [])


@pytest.mark.parametrize("own", [{}, {"managedBy": OPERATOR_NAME}])
def test_without_a_manager_and_with_its_own_name_the_operator_acts(own: dict[str, Any]) -> None:
    crowd = Crowd(1, num_nodes=2)
    crowd.controller._store_until[KEY] = 0.0
    invalid = {**SPEC, "nodes": {"min": 2, "max": 1}, **own}
    passes(crowd, invalid)
    ((_, status),) = crowd.writer.written
    assert status.reason == "InvalidSpec"


@pytest.mark.parametrize("name", ["multikueue", "", "Kueue.io/x", "kueue.x-k8s.io/", "a/" + 62 * "b", 7])
def test_a_manager_is_a_name_with_a_domain(name: Any) -> None:
    with pytest.raises(SpecError, match=r"spec\.managedBy"):
        parse_spec({**SPEC, "managedBy": name})
