"""Termination messages of reshard pods, as the operator reads them."""

import pytest

from elastic_operator.observed.observation import PodView
from elastic_operator.observed.reshard_pods import report_of
from reshard.contract import ExitCode, ReshardReport


def pod(name: str, message: str, created_at: float = 1.0) -> PodView:
    return PodView(
        name=name,
        uid=name,
        attempt=2,
        role="reshard",
        phase="Succeeded",
        created_at=created_at,
        termination_message=message,
    )


def report(*, ok: bool = True, num_bytes: int = 0, message: str = "") -> str:
    code = ExitCode.OK if ok else ExitCode.STORAGE_FULL
    return ReshardReport(
        ok=ok, exit_code=code, message=message, source="/a1", target="/a2", bytes_written=num_bytes
    ).to_json()


@pytest.mark.parametrize(
    ("pods", "expected"),
    [
        ([], None),
        ([pod("a", "")], None),
        ([pod("a", "no json")], None),
        ([pod("a", report(message="only"))], "only"),
        ([pod("helped", report(message="helped")), pod("did", report(num_bytes=9, message="completed"))], "completed"),
        ([pod("lost", report(ok=False, message="lost"), 5.0), pod("did", report(num_bytes=9, message="did"))], "did"),
        ([pod("old", report(ok=False, message="old"), 1.0), pod("new", report(ok=False, message="new"), 2.0)], "new"),
    ],
)
def test_the_pod_that_completed_a_conversion_knows_the_whole(pods: list[PodView], expected: str | None) -> None:
    found = report_of(pods)
    assert (found.message if found else None) == expected
