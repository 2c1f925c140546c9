"""What the operator remembers of nodes, and how it judges clocks that are not its own."""

from __future__ import annotations

from typing import Any

import pytest

from elastic_operator.api.serialization import format_time
from elastic_operator.cluster.availability import HOLD_SECONDS, LONGEST_SHIFT_SECONDS, SETTLE_SECONDS
from elastic_operator.cluster.caches import REMOVAL_SECONDS, NodeCache, RenewalCache
from elastic_operator.observed.observation import WITHDRAWAL_SECONDS
from reshard.contract import LeaseKey

NOW = 1_800_000_000.0


def node(name: str = "n1", gpus: int = 2) -> dict[str, Any]:
    return {
        "metadata": {"name": name},
        "status": {
            "conditions": [{"type": "Ready", "status": "True", "lastTransitionTime": format_time(NOW - 100)}],
            "allocatable": {"cpu": "4", "amd.com/gpu": str(gpus)},
            "capacity": {"amd.com/gpu": "2"},
        },
    }


def lease(renewed: float) -> dict[str, Any]:
    return {"metadata": {"name": "n1"}, "spec": {"renewTime": format_time(renewed), "leaseDurationSeconds": 4}}


@pytest.mark.parametrize("skew", [0.0, 300.0, -300.0])
def test_the_age_of_a_node_lease_does_not_depend_on_the_nodes_clock(skew: float) -> None:
    nodes = NodeCache()
    nodes.update(node(), NOW)
    for second in range(0, 20, 5):
        nodes.renew(lease(NOW + second - 0.5 * (second > 0) - skew), NOW + second)
    nodes.renew(lease(NOW + 14.5 - skew), NOW + 40)
    nodes.mark_polled(NOW + 40)
    assert nodes.views()["n1"].lease_age_seconds == pytest.approx(25, abs=1)


def test_time_in_which_nobody_looked_is_no_evidence_against_a_node() -> None:
    nodes = NodeCache()
    nodes.update(node(), NOW)
    nodes.renew(lease(NOW), NOW)
    nodes.mark_polled(NOW)
    nodes.update(node(gpus=1), NOW + 60)
    assert nodes.views()["n1"].lease_age_seconds == 0


def test_an_unchanged_node_is_no_news_and_fewer_devices_are() -> None:
    nodes = NodeCache()
    assert nodes.update(node(), NOW)
    assert not nodes.update(node(), NOW + 5)
    assert nodes.update(node(gpus=1), NOW + 9)
    assert nodes.views()["n1"].allocatable_since == NOW + 9


def test_views_follow_every_change_and_keep_what_offers_a_resource_apart() -> None:
    nodes = NodeCache()
    nodes.update(node("n1"), NOW)
    nodes.update(node("n2"), NOW)
    assert set(nodes.pool("amd.com/gpu")) == {"n1", "n2"}
    assert not nodes.pool("nvidia.com/gpu")
    assert nodes.views() is nodes.views(), "made once"
    nodes.remove("n1", NOW)
    assert set(nodes.views()) == set(nodes.pool("amd.com/gpu")) == {"n2"}
    nodes.renew({**lease(NOW - 7), "metadata": {"name": "n2"}}, NOW - 7)
    nodes.mark_polled(NOW)
    assert nodes.views()["n2"].lease_age_seconds == nodes.pool("amd.com/gpu")["n2"].lease_age_seconds == 7


def test_a_heartbeat_counts_from_when_it_was_seen_to_change() -> None:
    renewals = RenewalCache()
    assert renewals.first_seen("a", "1", NOW) == NOW
    assert renewals.first_seen("a", "1", NOW + 5) == NOW
    assert renewals.first_seen("a", "2", NOW + 6) == NOW + 6


def test_a_heartbeat_seen_in_the_future_counts_from_now_on() -> None:
    renewals = RenewalCache()
    renewals.first_seen("a", "1", NOW + 130)
    assert renewals.first_seen("a", "1", NOW) == NOW, "the operator's own clock was set back"
    assert renewals.first_seen("a", "1", NOW + 40) == NOW


@pytest.mark.parametrize("step", [130.0, -130.0, 86_400.0, -86_400.0])
def test_a_nodes_clock_that_is_set_makes_its_lease_no_older(step: float) -> None:
    nodes = NodeCache()
    nodes.update(node(), NOW)
    for second in range(0, 60, 5):
        nodes.renew(lease(NOW + second - 1 + (step if second >= 30 else 0.0)), NOW + second)
        nodes.mark_polled(NOW + second)
        age = nodes.views()["n1"].lease_age_seconds
        assert age is not None
        assert age <= 5


def test_a_restarted_server_makes_no_age_of_the_time_in_which_it_was_away() -> None:
    nodes = NodeCache()
    silent = node()
    silent["status"]["conditions"][0]["status"] = "Unknown"
    silent["spec"] = {"unschedulable": True, "taints": [{"key": "sick", "effect": "NoSchedule"}]}
    nodes.update(silent, NOW)
    nodes.renew(lease(NOW), NOW)
    nodes.mark_polled(NOW)
    assert nodes.evidence_since(NOW + 10) == 0
    assert nodes.evidence_since(NOW + 300) == NOW + 300 + SETTLE_SECONDS, "not polled yet"
    nodes.mark_polled(NOW + 300)
    view = nodes.views()["n1"]
    end = NOW + 300 + SETTLE_SECONDS
    assert view.lease_age_seconds == 0
    assert (view.ready_since, view.allocatable_since, view.cordoned_since) == (end, end, end)
    assert [taint.since for taint in view.taints] == [end]
    for second in range(305, 400, 5):
        nodes.mark_polled(NOW + second)
    assert nodes.views()["n1"].lease_age_seconds == 395 - 360


def test_polls_that_fail_now_and_then_are_no_interruption() -> None:
    nodes = NodeCache()
    for second in (0, 5, 15, 20, 35):
        nodes.mark_polled(NOW + second)
    assert nodes.evidence_since(NOW + 40) == 0


def test_the_time_that_a_slow_list_takes_is_no_interruption() -> None:
    nodes = NodeCache()
    nodes.update(node(), NOW)
    nodes.renew(lease(NOW), NOW)
    for start in range(0, 3600, 45):
        nodes.mark_polled(NOW + start, ended=NOW + start + 40)
    assert nodes.evidence_since(NOW + 3600) == 0
    assert nodes.stale_nodes() == ["n1"], "a node that is silent is found"
    nodes.mark_polled(NOW + 3700, ended=NOW + 3740)
    assert nodes.evidence_since(NOW + 3740) == NOW + 3740 + SETTLE_SECONDS, "no list was under way for 60 s"


def test_interruptions_that_follow_one_another_put_ages_off_for_a_bounded_time() -> None:
    nodes = NodeCache()
    for second in range(0, int(LONGEST_SHIFT_SECONDS) - 20, 20):
        nodes.mark_polled(NOW + second)
        assert second == 0 or nodes.evidence_since(NOW + second) == NOW + second + SETTLE_SECONDS
    for second in range(int(LONGEST_SHIFT_SECONDS) - 20, 3600, 20):
        nodes.mark_polled(NOW + second)
    assert nodes.evidence_since(NOW + 3590) <= NOW + LONGEST_SHIFT_SECONDS + 20 + SETTLE_SECONDS
    nodes.mark_polled(NOW + 9000)
    assert nodes.evidence_since(NOW + 9000) == NOW + 9000 + SETTLE_SECONDS, "another outage puts them off again"


@pytest.mark.parametrize(("late", "floor"), [(5, 0.0), (20, NOW + 20 + SETTLE_SECONDS)])
def test_a_first_poll_that_comes_late_shows_that_the_server_was_away(late: float, floor: float) -> None:
    nodes = NodeCache()
    nodes.mark_started(NOW)
    nodes.mark_polled(NOW + late)
    assert nodes.evidence_since(NOW + late) == floor


@pytest.mark.parametrize(("failed_seconds_ago", "floor"), [(None, 0.0), (2, NOW - 2 + SETTLE_SECONDS)])
def test_a_new_leader_gives_time_to_reconnect_only_if_the_server_was_away(
    failed_seconds_ago: float | None, floor: float
) -> None:
    nodes = NodeCache()
    if failed_seconds_ago is not None:
        nodes.mark_failed(NOW - failed_seconds_ago)
    nodes.mark_polled(NOW)
    assert nodes.evidence_since(NOW + 5) == floor


def test_a_new_lease_of_an_old_name_is_dated_anew() -> None:
    def lease(uid: str) -> dict[str, Any]:
        annotations = {LeaseKey.STEP: "1", LeaseKey.PHASE: "Training"}
        meta = {"name": "gpt-a1", "namespace": "ns", "uid": uid, "annotations": annotations}
        return {"metadata": meta, "spec": {"renewTime": format_time(NOW)}}

    renewals = RenewalCache()
    renewals.date_lease(lease("old"), NOW - 5000)
    view = renewals.date_lease(lease("new"), NOW)
    assert (view.renewed_at, view.step_seen_at) == (NOW, NOW)
    assert renewals.date_lease(lease("new"), NOW + 5).renewed_at == NOW


def test_a_clock_that_is_corrected_a_little_is_no_interruption_and_a_step_is() -> None:
    nodes = NodeCache()
    for second in (0, 5, 4, 9):
        nodes.mark_polled(NOW + second)
    assert nodes.evidence_since(NOW + 10) == 0
    nodes.mark_polled(NOW - 130)
    assert nodes.evidence_since(NOW - 125) == NOW - 130 + SETTLE_SECONDS


def test_a_cordon_counts_from_when_it_was_seen_and_anew_after_it_was_undone() -> None:
    nodes = NodeCache()
    for second, cordoned in ((0, False), (10, True), (12, True), (14, False), (20, True)):
        nodes.update(node() | {"spec": {"unschedulable": cordoned}}, NOW + second)
        if second == 12:
            assert nodes.views()["n1"].cordoned_since == NOW + 10
    assert nodes.views()["n1"].cordoned_since == NOW + 20


def test_a_taint_counts_from_when_it_was_seen_whatever_other_taints_come() -> None:
    nodes = NodeCache()
    first, second = ({"key": key, "effect": "NoSchedule"} for key in ("sick", "sicker"))
    nodes.update(node() | {"spec": {"taints": [first]}}, NOW)
    nodes.update(node() | {"spec": {"taints": [second, first]}}, NOW + 5)
    assert {taint.key: taint.since for taint in nodes.views()["n1"].taints} == {"sick": NOW, "sicker": NOW + 5}


def test_what_was_withdrawn_is_counted_for_an_hour_by_what_it_was() -> None:
    nodes = NodeCache()
    taint = {"key": "sick", "effect": "NoSchedule"}
    pressure = {"key": "node.kubernetes.io/memory-pressure", "effect": "NoSchedule"}
    for second in range(0, 80, 20):
        nodes.update(node() | {"spec": {"unschedulable": True, "taints": [pressure]}}, NOW + second)
        nodes.update(node() | {"spec": {"taints": [taint]}}, NOW + second + 10)
    view = nodes.views()["n1"]
    assert [view.count_withdrawals(name, NOW + 80) for name in ("cordon", "taint sick:NoSchedule")] == [4, 3]
    assert max(at for _, at in view.withdrawals) == NOW + 70
    assert view.count_withdrawals("cordon", NOW + 55 + WITHDRAWAL_SECONDS) == 1
    assert not nodes.update(node() | {"spec": {"taints": [taint]}}, NOW + 9000), "time alone is no change"
    for second in range(100, 2000, 20):
        nodes.update(node() | {"spec": {"unschedulable": second % 40 == 0}}, NOW + second)
    assert len(nodes.views()["n1"].withdrawals) <= 16


def test_only_the_silence_of_most_nodes_is_widespread() -> None:
    nodes = NodeCache()
    for number in range(5):
        nodes.update(node(f"n{number}"), NOW)
    for number in range(2):
        nodes.update(silenced(f"n{number}"), NOW)
    assert not nodes.has_widespread_failure()
    nodes.update(silenced("n2"), NOW)
    assert nodes.has_widespread_failure()


def kubelet_lease(name: str, renewed: float) -> dict[str, Any]:
    spec = {"renewTime": format_time(renewed), "leaseDurationSeconds": 40}
    return {"metadata": {"name": name}, "spec": spec}


def poll(nodes: NodeCache, seconds: range, renewing: tuple[str, ...]) -> None:
    """Poll every 5 s; each kubelet renews its Lease at every second poll."""
    for second in seconds:
        for number, name in enumerate(renewing):
            if second // 5 % 2 == number % 2:
                nodes.renew(kubelet_lease(name, NOW + second), NOW + second)
        nodes.mark_polled(NOW + second)


def four_nodes() -> NodeCache:
    nodes = NodeCache()
    for name in ("n1", "n2", "n3", "cpu"):
        nodes.update(node(name), NOW - 100)
    poll(nodes, range(-100, 0, 5), ("n1", "n2", "n3", "cpu"))
    return nodes


def test_a_silence_of_most_nodes_is_widespread_before_the_first_of_them_counts_as_stale() -> None:
    nodes = four_nodes()
    assert not nodes.has_widespread_failure()
    for second in range(0, 25, 5):
        poll(nodes, range(second, second + 1), ())
        assert nodes.has_widespread_failure() or not nodes.stale_nodes()
    assert nodes.has_widespread_failure()


@pytest.mark.parametrize(("age", "is_widespread"), [(1.5, False), (2.5, True)])
def test_short_leases_may_be_a_moment_late(age: float, is_widespread: bool) -> None:
    nodes = NodeCache()
    for name in ("n1", "n2", "n3"):
        nodes.update(node(name), NOW)
        nodes.renew({**lease(NOW - age), "metadata": {"name": name}}, NOW - age)
    nodes.mark_polled(NOW)
    assert nodes.has_widespread_failure() == is_widespread
    nodes.mark_polled(NOW + 1)
    for name in ("n1", "n2", "n3"):
        nodes.renew({**lease(NOW + 5), "metadata": {"name": name}}, NOW + 5)
    nodes.mark_polled(NOW + 5)
    assert nodes.evidence_since(NOW + 5) == 0, "nothing was stale"


def test_one_node_of_four_that_is_silent_is_no_widespread_failure() -> None:
    nodes = four_nodes()
    poll(nodes, range(0, 100, 5), ("n1", "n2", "cpu"))
    assert nodes.stale_nodes() == ["n3"]
    assert not nodes.has_widespread_failure()


def test_ages_count_anew_after_a_widespread_silence_and_time_to_reconnect() -> None:
    nodes = four_nodes()
    poll(nodes, range(0, 300, 5), ())
    poll(nodes, range(300, 320, 5), ("n1", "n2", "cpu"))
    assert not nodes.has_widespread_failure()
    end = nodes.evidence_since(NOW + 320)
    assert NOW + 300 + SETTLE_SECONDS <= end <= NOW + 310 + SETTLE_SECONDS
    assert nodes.views()["n3"].lease_age_seconds == 0
    poll(nodes, range(320, 400, 5), ("n1", "n2", "cpu"))
    assert nodes.stale_nodes() == ["n3"], "a node that stays silent is found"


@pytest.mark.parametrize(
    ("renewing", "seconds", "is_over"),
    [
        pytest.param(("cpu",), HOLD_SECONDS - 30, False, id="for-a-while"),
        pytest.param(("cpu",), HOLD_SECONDS + 30, True, id="others-could-go-on-where-nodes-report"),
        pytest.param((), HOLD_SECONDS + 30, False, id="nobody-reports-so-there-is-nowhere-to-go"),
    ],
)
def test_a_widespread_silence_is_held_against_nobody_for_a_while(
    renewing: tuple[str, ...], seconds: float, is_over: bool
) -> None:
    nodes = four_nodes()
    poll(nodes, range(0, int(seconds), 5), renewing)
    assert nodes.has_widespread_failure()
    assert nodes.is_hold_over(NOW + seconds) == is_over


@pytest.mark.parametrize(("removed", "is_widespread"), [(("n1",), False), (("n1", "n2", "n3"), True)])
def test_the_removal_of_most_node_objects_is_widespread_for_a_while(
    removed: tuple[str, ...], is_widespread: bool
) -> None:
    nodes = four_nodes()
    for name in removed:
        nodes.remove(name, NOW)
    assert nodes.has_widespread_failure() == is_widespread
    assert dict(nodes.removed) == dict.fromkeys(removed, NOW)
    poll(nodes, range(0, int(REMOVAL_SECONDS) + 10, 5), ("n1", "n2", "n3", "cpu"))
    assert not nodes.has_widespread_failure()
    assert not nodes.removed


def test_a_shortage_is_dated_from_when_it_began_and_anew_when_it_returns() -> None:
    nodes, key = NodeCache(), ("ns", "gpt")
    assert nodes.date_shortages(key, ["n1"], NOW) == {"n1": NOW}
    assert nodes.date_shortages(key, ["n1", "n2"], NOW + 5) == {"n1": NOW, "n2": NOW + 5}
    assert nodes.date_shortages(("ns", "other"), ["n1"], NOW + 6) == {"n1": NOW + 6}
    assert nodes.date_shortages(key, ["n2"], NOW + 7) == {"n2": NOW + 5}
    assert nodes.date_shortages(key, ["n1"], NOW + 9) == {"n1": NOW + 9}
    assert nodes.date_shortages(key, ["n1"], NOW - 99) == {"n1": NOW - 99}, "the own clock was set back"


def test_a_node_that_is_created_again_is_no_removed_one() -> None:
    nodes = four_nodes()
    nodes.remove("n1", NOW)
    nodes.update(node("n1"), NOW + 5)
    assert not nodes.removed


def silenced(name: str) -> dict[str, Any]:
    item = node(name)
    item["status"]["conditions"][0]["status"] = "Unknown"
    return item


def pod(**status: Any) -> dict[str, Any]:
    return {
        "metadata": {"name": "gpt-a1-0", "namespace": "ns", "uid": "u", "creationTimestamp": format_time(NOW - 900)},
        "spec": {"containers": [{"name": "train"}]},
        "status": status,
    }


def failing(reason: str) -> dict[str, Any]:
    return pod(phase="Pending", containerStatuses=[{"name": "train", "state": {"waiting": {"reason": reason}}}])


def test_the_grace_of_an_image_begins_at_its_first_failure_and_not_with_the_pod() -> None:
    renewals = RenewalCache()
    assert renewals.date_pod(failing("ContainerCreating"), NOW).cannot_start_since is None
    assert renewals.date_pod(failing("ErrImagePull"), NOW + 500).cannot_start_since == NOW + 500
    assert renewals.date_pod(failing("ImagePullBackOff"), NOW + 520).cannot_start_since == NOW + 500


def test_a_container_that_recovered_and_waits_again_has_its_whole_grace_again() -> None:
    renewals, runs = RenewalCache(), {"name": "train", "state": {"running": {}}}
    assert renewals.date_pod(failing("ErrImagePull"), NOW).cannot_start_since == NOW
    assert renewals.date_pod(pod(phase="Running", containerStatuses=[runs]), NOW + 10).cannot_start_since is None
    assert renewals.date_pod(failing("CrashLoopBackOff"), NOW + 36000).cannot_start_since == NOW + 36000


def test_a_deleted_pod_is_overdue_by_the_operators_clock() -> None:
    deleted = pod(phase="Running")
    deleted["metadata"] |= {"deletionTimestamp": format_time(NOW - 7200), "deletionGracePeriodSeconds": 30}
    renewals = RenewalCache()
    assert renewals.date_pod(deleted, NOW).deleted_at == NOW + 30
    assert renewals.date_pod(deleted, NOW + 10).deleted_at == NOW + 30
    renewals.forget("ns", "gpt-a1-0")
    assert renewals.date_pod(deleted, NOW + 50).deleted_at == NOW + 80


def test_a_failure_counts_from_when_it_was_seen_whatever_time_the_node_writes() -> None:
    ended = {"exitCode": 1, "finishedAt": format_time(NOW - 130)}
    failed = pod(phase="Failed", containerStatuses=[{"name": "train", "state": {"terminated": ended}}])
    renewals = RenewalCache()
    assert renewals.date_pod(pod(phase="Running"), NOW).failed_at is None
    assert renewals.date_pod(failed, NOW + 1).failed_at == NOW + 1
    assert renewals.date_pod(failed, NOW + 9).failed_at == NOW + 1
    renewals.forget("ns", "gpt-a1-0")
    assert renewals.date_pod(failed, NOW + 20).failed_at == NOW + 20


def test_a_hang_counts_from_when_the_step_was_seen_whatever_time_the_trainer_writes() -> None:
    renewals = RenewalCache()

    def beat(step: str, second: float) -> float | None:
        notes = {LeaseKey.STEP: step, LeaseKey.STEP_TIME: format_time(NOW - 7200)}
        item = {"metadata": {"name": "gpt-a1", "namespace": "ns", "annotations": notes}, "spec": {}}
        return renewals.date_lease(item, NOW + second).step_seen_at

    assert beat("1", 0) == NOW
    assert beat("1", 60) == NOW
    assert beat("2", 70) == NOW + 70
