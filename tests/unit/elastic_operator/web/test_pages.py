"""The pages tell what a snapshot holds, stay small, and are what they say whatever a tenant wrote."""

from __future__ import annotations

import base64
import dataclasses
import hashlib
import re
from typing import Any

import pytest

from elastic_operator.api.spec import Spec
from elastic_operator.web.pages.document import MAX_CELL, POLICY, View, read_view
from elastic_operator.web.pages.fleet_page import MAX_ROWS, write_fleet
from elastic_operator.web.pages.inventory import Inventory, NodeUse, survey
from elastic_operator.web.pages.job_page import write_job
from elastic_operator.web.pages.node_table import MAX_PODS
from elastic_operator.web.pages.snapshot import Snapshot
from tests.unit.elastic_operator.plugin.test_report import Reader
from tests.unit.elastic_operator.web.fleet_data import (
    GPT,
    GPU,
    HOSTILE,
    RECORDED,
    gpu_node,
    jobs_of,
    large_fleet,
    pods_of,
    quiet_fleet,
    record_of,
    small_fleet,
)

RESNET = ("vision", "resnet")
STILL = View(is_refreshing=False)


class Page(Reader):
    """A page of the site, parsed."""

    VOID = (*Reader.VOID, "link")

    def __init__(self, page: bytes | None) -> None:
        assert page is not None
        super().__init__(page.decode("ascii"))

    @property
    def links(self) -> list[str]:
        return [value for name, value in self.attributes if name == "href" and not value.startswith("data:")]


def fleet_page(snapshot: Snapshot, view: View = STILL) -> Page:
    return Page(write_fleet(survey(snapshot), view, "1.0"))


def job_page(snapshot: Snapshot, key: tuple[str, str] = GPT, view: View = STILL) -> Page:
    return Page(write_job(survey(snapshot), key, view, "1.0"))


def use_of(fleet: Inventory, name: str) -> NodeUse:
    (found,) = [use for use in fleet.nodes if use.name == name]
    return found


def test_each_accelerator_counts_once() -> None:
    fleet = survey(small_fleet())
    for use in fleet.nodes:
        assert use.jobs + use.others + use.out + use.free == use.total
    assert {name: fleet.count(name) for name in ("total", "jobs", "others", "out", "free")} == {
        "total": 36, "jobs": 6, "others": 3, "out": 20, "free": 7
    }  # fmt: skip
    states = {use.name: use.state for use in fleet.nodes if use.state != "Ready"}
    assert states == {"gpu-3": "Not ready", "gpu-9": "Cordoned", "gpu-10": "Unhealthy"}
    assert (use_of(fleet, "gpu-8").others, use_of(fleet, "gpu-8").out) == (3, 2), "two devices are broken"
    assert "the kubelet does not report" in use_of(fleet, "gpu-3").reason


def test_a_node_whose_kubelet_is_silent_is_not_ready_before_kubernetes_says_so() -> None:
    nodes = {"a": gpu_node("a", lease_age_seconds=21.0), "b": gpu_node("b", lease_age_seconds=19.0)}
    fleet = survey(Snapshot(time=1.0, records={}, nodes=nodes))
    assert {use.name: use.state for use in fleet.nodes} == {"a": "Silent", "b": "Ready"}
    assert [use.name for use in fleet.nodes] == ["a", "b"]


def test_what_other_namespaces_use_is_not_made_up() -> None:
    hidden = dataclasses.replace(small_fleet(), used=None)
    assert use_of(survey(hidden), "gpu-8").others == 0
    assert "free or used by others" in fleet_page(hidden).text
    assert "free or used by others" not in fleet_page(small_fleet()).text


def test_only_pods_of_the_jobs_own_jobs_count() -> None:
    snapshot = small_fleet()
    forged = dataclasses.replace(snapshot, jobs={**snapshot.jobs, RESNET: ()})
    assert use_of(survey(snapshot), "gpu-5").jobs == 2
    assert use_of(survey(forged), "gpu-5").pods == ()


def test_a_node_with_several_kinds_has_a_row_for_each_that_jobs_name() -> None:
    both = gpu_node("both", capacity={GPU: 8, "nvidia.com/gpu": 4, "rdma/hca": 8})
    other = gpu_node("other", capacity={"nvidia.com/gpu": 4, "rdma/hca": 8})
    nodes = {"both": both, "other": other, "cpu": gpu_node("cpu", capacity={})}
    fleet = survey(Snapshot(time=1.0, records={GPT: record_of("running")}, nodes=nodes))
    assert [(use.name, use.resource) for use in fleet.nodes] == [("both", GPU), ("other", "nvidia.com/gpu")]


def test_the_fleet_tells_of_every_job_and_node() -> None:
    page = fleet_page(small_fleet())
    for text in (
        "1 Failed, 1 Resharding, 1 Running, 1 Waiting", "6 Ready, 2 lost or sick, 1 cordoned",
        "6 used by jobs, 3 used by others, 7 free, 20 out of use", "tp=1,pp=2,dp=2,zero=1",
        "NodeNotReady, lost gpu-3: no training for 1.5 s so far", "ManualDrain: training again after 35.2 s",
        "uncorrectable ECC errors", "demo/gpt attempt 2, reshard pod: Running",
        "vision/resnet attempt 4, pod 0, 2 GPUs: Running", "38.2%",
    ):  # fmt: skip
        assert text in page.text
    order = [page.text.index(f"{name}{phase}") for name, phase in (
        ("nlp/moe", "Failed"), ("nlp/llama", "Waiting"), ("demo/gpt", "Resharding"), ("vision/resnet", "Running")
    )]  # fmt: skip
    assert order == sorted(order), "what deserves a look comes first"
    assert "jobs/demo/gpt?refresh=off" in page.links


@pytest.mark.parametrize("stage", RECORDED)
def test_the_page_of_a_job_tells_its_story(stage: str) -> None:
    pods = pods_of(stage)
    snapshot = Snapshot(
        time=RECORDED[stage]["time"], records={GPT: record_of(stage)}, nodes={}, pods={GPT: pods},
        jobs={GPT: jobs_of(pods, "gpt")},
    )  # fmt: skip
    page = job_page(snapshot)
    status = RECORDED[stage]["job"]["status"]
    assert f"demo/gpt: {status['phase']}" in page.text
    assert page.text.count("Timeline of") == len(status.get("recoveries", []))
    for title in ("Nodes", "Recoveries", "Goodput", "Decisions", "The last decision: "):
        assert title in page.text
    assert "None" not in page.text.replace("None.", "").replace("None has made a step yet.", "")


def test_the_page_of_a_job_shows_its_nodes_and_its_newest_recovery_first() -> None:
    page = job_page(quiet_fleet())
    assert "3 nodes with pods of this job" in page.text
    assert "demo/gpt attempt 4, pod 2, 2 GPUs: Running" in page.text
    assert page.text.index("3. ManualDrain") < page.text.index("2. CapacityReturned") < page.text.index("1. Node")
    assert page.links[-1] == "../../?refresh=off"


def test_a_job_that_cannot_be_read_or_is_not_there_is_told() -> None:
    unreadable = dataclasses.replace(small_fleet(), records={GPT: None})
    assert "could not be read" in job_page(unreadable).text
    assert "Unreadable" in fleet_page(unreadable).text
    assert write_job(survey(unreadable), ("demo", "none"), STILL, "1.0") is None


def test_an_empty_cluster_and_interrupted_watches_are_told() -> None:
    page = fleet_page(Snapshot(time=1.0, records={}, nodes={}, is_live=False))
    assert "There is no ElasticTrainingJob" in page.text
    assert "No node offers GPUs" in page.text
    assert "the watches of the api server are interrupted" in page.text.lower()


def hostile() -> Snapshot:
    """A tenant who wrote hostile text wherever the status and the nodes may hold any, and far too much of it."""
    recorded = RECORDED["drained"]["job"]["status"]
    recoveries = [
        {**item, "message": HOSTILE, "lost": [HOSTILE, "x"], "cause": HOSTILE, "from": HOSTILE, "to": HOSTILE}
        for item in recorded["recoveries"]
    ]
    record = record_of("drained", message=HOSTILE, reason=HOSTILE, recoveries=recoveries, plan={
        "reason": HOSTILE, "rejected": [{"topology": HOSTILE, "reason": HOSTILE}] * 50,
    })  # fmt: skip
    # As if the strict reader had let it pass: the page must not rely on that.
    status = dataclasses.replace(
        record.status,
        message=HOSTILE,
        reason=HOSTILE,
        topology_text=HOSTILE,
        recoveries=tuple(
            dataclasses.replace(item, message=HOSTILE, cause=HOSTILE, lost=(HOSTILE,), to=HOSTILE)
            for item in record.status.recoveries
        ),
    )
    (pod, *_) = [item for item in pods_of("drained") if not item.terminal]
    pods = tuple(dataclasses.replace(pod, name=f"p{number}", phase=HOSTILE) for number in range(50))
    return Snapshot(
        time=RECORDED["drained"]["time"],
        records={GPT: dataclasses.replace(record, status=status)},
        nodes={str(pod.node): gpu_node(str(pod.node), unhealthy=(HOSTILE,))},
        pods={GPT: pods},
        jobs={GPT: jobs_of(pods, "gpt")},
    )


def test_hostile_text_stays_text_and_is_cut() -> None:
    for page in (fleet_page(hostile()), job_page(hostile())):
        assert set(page.tags) & {"script", "img", "iframe", "form", "object", "base"} == set()
        assert [name for name, _ in page.attributes if name.startswith("on") or name == "style"] == []
        assert "</td></style></title><script>" in page.text, "it is shown, as text"
        assert page.tags.count("style") == 1
        assert "\x1b" not in page.text
        assert "\u202e" not in page.text
    assert "A" * (MAX_CELL + 1) not in fleet_page(hostile()).text
    assert f"and {50 - MAX_PODS} more pods" in fleet_page(hostile()).text


def test_names_that_kubernetes_would_not_accept_leave_neither_text_nor_link() -> None:
    key = ('"><script>', 'a/../b?c#d"')
    job = dataclasses.replace(record_of("running").job, namespace=key[0], name=key[1])
    record = dataclasses.replace(record_of("running"), job=job)
    page = fleet_page(Snapshot(time=1.0, records={key: record}, nodes={}))
    assert "script" not in page.tags
    assert "jobs/%22%3E%3Cscript%3E/a%2F..%2Fb%3Fc%23d%22?refresh=off" in page.links


@pytest.mark.parametrize(("num_jobs", "num_nodes"), [(1000, 5000), (101, 100)])
def test_a_large_fleet_has_small_pages(num_jobs: int, num_nodes: int) -> None:
    fleet = survey(large_fleet(num_jobs, num_nodes))
    first = write_fleet(fleet, View(), "1.0")
    assert len(first) < 250_000
    page = Page(first)
    assert page.tags.count("tr") == 2 + 2 * MAX_ROWS
    assert f"Jobs 1 to {MAX_ROWS} of {num_jobs}" in page.text
    assert "?page=2" in page.links
    last = Page(write_fleet(fleet, View(page=999_999, nodes=999_999), "1.0"))
    pages = -(-num_jobs // MAX_ROWS)
    assert f"of {num_jobs}; those" in last.text
    assert f"Page {pages} of {pages}" in last.text
    assert "Next jobs" not in last.text


def test_a_job_with_many_nodes_has_a_small_page() -> None:
    snapshot = large_fleet(1, 0)
    (pod,) = snapshot.pods["team", "job-0000"]
    pods = tuple(dataclasses.replace(pod, name=f"p{number}", node=f"n{number}") for number in range(2000))
    nodes = {f"n{number}": gpu_node(f"n{number}") for number in range(2000)}
    page = job_page(dataclasses.replace(snapshot, nodes=nodes, pods={("team", "job-0000"): pods}), ("team", "job-0000"))
    assert f"2000 nodes with pods of this job, of which {MAX_ROWS} are shown" in page.text
    assert len(page.text) < 60_000


@pytest.mark.parametrize(
    ("query", "view"),
    [
        ("", View()),
        ("page=3&nodes=2&refresh=off", View(page=3, nodes=2, is_refreshing=False)),
        ("page=-1&nodes=x&refresh=on", View()),
        ("page=0&page=7&other=1", View()),
        ("page=9999999999999999999999&nodes=\u0663", View()),
        ("page=99999999", View(page=1_000_000)),
        ("&".join(["page=2"] * 100), View()),
        ("%zz&=&;", View()),
    ],
)
def test_whatever_a_query_says_there_is_a_view(query: str, view: View) -> None:
    assert read_view(query) == view
    assert read_view(view.link().removeprefix("?").replace("&amp;", "&")) == view


def test_pages_refresh_unless_the_reader_stops_that() -> None:
    running, stopped = (
        write_fleet(survey(small_fleet()), View(page=2), "1"),
        write_fleet(survey(small_fleet()), STILL, "1"),
    )
    assert b'http-equiv="refresh" content="15"' in running
    assert "?page=2&refresh=off" in Page(running).links
    assert b"http-equiv" not in stopped
    assert Page(stopped).links[1] == "?"


def test_pages_can_be_used_by_keyboard_and_by_screen_readers() -> None:
    for page in (fleet_page(small_fleet()), job_page(small_fleet())):
        assert page.links[0] == "#main"
        assert ("id", "main") in page.attributes
        assert page.tags.count("h1") == page.tags.count("main") == 1
        assert page.tags.count("table") == page.tags.count("caption") == page.tags.count("thead")
        assert page.tags.count("th") == len([item for item in page.attributes if item[0] == "scope"])
        assert ("lang", "en") in page.attributes


def test_the_policy_permits_the_one_style_and_nothing_else() -> None:
    page = write_fleet(survey(small_fleet()), View(), "1.0").decode()
    (style,) = re.findall(r"<style>(.*?)</style>", page, re.DOTALL)
    digest = base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()
    policy: dict[str, Any] = dict(item.split(" ", 1) for item in POLICY.split("; "))
    assert policy == {
        "default-src": "'none'", "style-src": f"'sha256-{digest}'", "img-src": "data:", "base-uri": "'none'",
        "form-action": "'none'", "frame-ancestors": "'none'",
    }  # fmt: skip


def test_nothing_of_a_pod_template_is_shown() -> None:
    record = record_of("drained")
    assert isinstance(record.spec, Spec)
    template = {"spec": {"containers": [{"name": "t", "env": [{"name": "TOKEN", "value": "sesame"}]}]}}
    changed = dataclasses.replace(record, spec=dataclasses.replace(record.spec, template=template))
    snapshot = Snapshot(time=RECORDED["drained"]["time"], records={GPT: changed}, nodes={})
    for page in (fleet_page(snapshot), job_page(snapshot)):
        assert "sesame" not in page.text
        assert "TOKEN" not in page.text
