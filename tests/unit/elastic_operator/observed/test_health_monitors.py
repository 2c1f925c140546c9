"""What health monitors say about nodes: which rules there can be, what they match, and what the operator does then."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from elastic_operator import settings
from elastic_operator.cluster.caches import NodeCache
from elastic_operator.observed import signals
from elastic_operator.observed.health_monitors import RuleError, Rules, find_health_problems, parse_rules
from elastic_operator.observed.observation import NodeView
from elastic_operator.observed.signal_kinds import KINDS, Kind, Weight

NOW = 1_800_000_000.0
GPU = "amd.com/gpu"


def node(conditions: dict[str, str] | None = None, labels: dict[str, str] | None = None) -> dict[str, Any]:
    statuses = {"Ready": "True", "MemoryPressure": "False", **(conditions or {})}
    return {
        "metadata": {"name": "n1", "labels": {"kubernetes.io/hostname": "n1", **(labels or {})}},
        "status": {
            "conditions": [{"type": name, "status": value} for name, value in statuses.items()],
            "allocatable": {GPU: "2"},
            "capacity": {GPU: "2"},
        },
    }


@pytest.mark.parametrize(
    ("conditions", "labels", "found", "said"),
    [
        pytest.param([], [], node({"GpuMemWatch": "True"}), (), id="nobody-listens"),
        pytest.param(["GpuMemWatch"], [], node(), (), id="condition-is-not-there"),
        pytest.param(["GpuMemWatch"], [], node({"GpuMemWatch": "False"}), (), id="condition-says-healthy"),
        pytest.param(
            ["GpuMemWatch"], [], node({"GpuMemWatch": "True"}), ("condition GpuMemWatch is True",), id="condition"
        ),
        pytest.param(
            ["AMDGPU*"], [], node({"AMDGPUXgmi": "True"}), ("condition AMDGPUXgmi is True",), id="wildcard-of-a-vendor"
        ),
        pytest.param(
            ["GpuHealthy=False"], [], node({"GpuHealthy": "False"}), ("condition GpuHealthy is False",), id="positive"
        ),
        pytest.param(
            [],
            ["metricsexporter.amd.com.gpu.*.state=unhealthy"],
            node(labels={"metricsexporter.amd.com.gpu.3.state": "unhealthy"}),
            ("label metricsexporter.amd.com.gpu.3.state is unhealthy",),
            id="label-with-an-index",
        ),
        pytest.param(
            [],
            ["dgxc.nvidia.com/nvsentinel-state=quarantined"],
            node(labels={"dgxc.nvidia.com/nvsentinel-state": "remediation-succeeded"}),
            (),
            id="label-with-another-value",
        ),
        pytest.param(
            ["A*"],
            ["b=c"],
            node({"A": "True"}, {"b": "c"}),
            ("condition A is True", "label b is c"),
            id="both-are-named",
        ),
    ],
)
def test_what_is_said_against_a_node(
    conditions: list[str], labels: list[str], found: dict[str, Any], said: tuple[str, ...]
) -> None:
    assert find_health_problems(found, parse_rules(conditions, labels)) == said


def test_the_monitors_words_are_repeated_but_not_at_length() -> None:
    found = node({"GpuMemWatch": "True"})
    found["status"]["conditions"][-1]["message"] = "[DCGM_FR_FAULTY_MEMORY]\n  GPU 0 " + "x" * 1000
    (said,) = find_health_problems(found, parse_rules(["GpuMemWatch"], []))
    assert said.startswith("condition GpuMemWatch is True ([DCGM_FR_FAULTY_MEMORY] GPU 0 xxx")
    assert len(said) < 300


@pytest.mark.parametrize(
    ("conditions", "labels", "message"),
    [
        (["GpuMemWatch=true"], [], "expected TYPE or TYPE=STATUS with STATUS True, False or Unknown"),
        (["=True"], [], "expected TYPE or TYPE=STATUS"),
        (["*"], [], "matches Ready=True, so the operator would drain every healthy node"),
        (["Rea*=True"], [], "matches Ready=True"),
        ([], ["nvidia.com/gpu.present"], "expected KEY=VALUE"),
        ([], ["=x"], "expected KEY=VALUE"),
        ([], ["*=true"], "matches every label"),
    ],
)
def test_a_rule_that_cannot_be_meant_is_refused(conditions: list[str], labels: list[str], message: str) -> None:
    with pytest.raises(RuleError, match=message.replace("*", r"\*")):
        parse_rules(conditions, labels)


def test_the_command_line_takes_lists_and_refuses_nonsense(capsys: pytest.CaptureFixture[str]) -> None:
    options = ("--unhealthy-node-conditions=AMDGPU*,GpuMemWatch", "--unhealthy-node-labels=a=b,c=d")
    read = settings.read_settings(["run", *options, "--unhealthy-node-labels=e=f"], {})
    assert read.unhealthy_nodes == parse_rules(["AMDGPU*", "GpuMemWatch"], ["a=b", "c=d", "e=f"])
    assert settings.read_settings(["run"], {}).unhealthy_nodes == Rules()
    with pytest.raises(SystemExit) as stopped:
        settings.read_settings(["run", "--unhealthy-node-labels=oops"], {})
    assert stopped.value.code == 2
    assert "expected KEY=VALUE" in capsys.readouterr().err


def test_a_change_of_health_wakes_the_jobs_and_a_heartbeat_does_not() -> None:
    nodes = NodeCache(parse_rules(["GpuMemWatch"], []))
    assert nodes.update(node(), NOW)
    heartbeat = node()
    heartbeat["status"]["conditions"][0]["lastHeartbeatTime"] = "2027-01-15T07:00:00Z"
    assert not nodes.update(heartbeat, NOW + 10)
    assert nodes.update(node({"GpuMemWatch": "True"}), NOW + 20)
    assert nodes.views()["n1"].unhealthy


def test_a_node_called_unhealthy_is_drained_first() -> None:
    view = NodeView(name="n1", unhealthy=("condition GpuMemWatch is True",), unschedulable=True)
    (found,) = signals.detect_planned_signals(view, {}, NOW)
    assert found.kind == Kind.NODE_UNHEALTHY
    assert KINDS[found.kind].weight is Weight.PLANNED
    assert found.message == "node n1 is unhealthy: condition GpuMemWatch is True"


CHART = Path(__file__).parents[4] / "charts/elastic-training-operator"


@pytest.mark.parametrize(
    ("vendor", "conditions", "labels", "left"),
    [
        ("amd", {"AMDGPUXgmi": "True"}, {}, True),
        ("amd", {"AMDGPUProblem": "True"}, {}, True),
        ("amd", {"AMDGPUHwsHang": "False"}, {}, False),
        # One sick GPU: the device plugin takes it out of the node's allocatable, and the node stays in use.
        ("amd", {}, {"metricsexporter.amd.com.gpu.0.state": "unhealthy"}, False),
        ("nvidia", {"GpuMemWatch": "True"}, {}, True),
        ("nvidia", {"SysLogsGPUFallenOff": "True"}, {}, True),
        ("nvidia", {"NVSwitchNonFatalError": "True"}, {}, False),
        ("nvidia", {"DCGMError": "True"}, {}, False),
        ("nvidia", {}, {"dgxc.nvidia.com/nvsentinel-state": "draining"}, True),
        ("nvidia", {}, {"dgxc.nvidia.com/nvsentinel-state": "remediation-succeeded"}, False),
        ("nvidia", {}, {"nvidia.com/gpu.present": "true"}, False),
    ],
)
def test_the_vendors_values_leave_nodes_with_broken_hardware_and_no_others(
    vendor: str, conditions: dict[str, str], labels: dict[str, str], left: bool
) -> None:
    values = yaml.safe_load((CHART / f"values-{vendor}.yaml").read_text(encoding="utf-8"))["settings"]
    rules = parse_rules(values["unhealthyNodeConditions"], values["unhealthyNodeLabels"])
    assert bool(find_health_problems(node(conditions, labels), rules)) is left
