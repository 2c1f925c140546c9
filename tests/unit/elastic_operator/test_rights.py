"""The chart grants the operator what the table of its rights lists, right for right, and hides nothing elsewhere."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests import operator_rights
from tests.operator_rights import CLUSTER, GANG, JOBS, LEADER, NODES, SERVED, Right, asked, rights

ROOT = Path(__file__).parents[3]
TEMPLATES = ROOT / "charts/elastic-training-operator/templates"
TABLES = {"job": JOBS, "gang": GANG, "cluster": CLUSTER, "served": SERVED, "nodeLease": NODES, "leader": LEADER}


def rules(name: str) -> list[dict[str, Any]]:
    """Return the rules that one helper of the chart makes."""
    text = (TEMPLATES / "_rules.tpl").read_text(encoding="utf-8")
    (body,) = re.findall(r'{{- define "etj\.' + name + r'Rules" -}}(.*?){{- end -}}', text, re.DOTALL)
    found: list[dict[str, Any]] = yaml.safe_load(re.sub(r"{{.*?}}", "NAME", body))
    return found


def granted(name: str) -> list[Right]:
    return [
        Right(group, resource, verb)
        for rule in rules(name)
        for group in rule["apiGroups"]
        for resource in rule["resources"]
        for verb in rule["verbs"]
    ]


@pytest.mark.parametrize("name", TABLES)
def test_the_chart_grants_what_the_table_lists_and_nothing_else(name: str) -> None:
    assert set(granted(name)) == rights(TABLES[name])


@pytest.mark.parametrize("name", TABLES)
def test_no_right_is_granted_twice_so_that_each_can_be_missed(name: str) -> None:
    found = granted(name)
    assert len(found) == len(set(found))
    assert not any("*" in part for right in found for part in right)


def test_only_the_leaders_lease_is_named_and_only_its_creation_is_not() -> None:
    named = [rule.get("resourceNames") for rule in rules("leader")]
    assert [rule["verbs"] for rule in rules("leader")] == [["create"], ["get", "update", "delete"]]
    assert named == [None, ["NAME"]]


def test_all_rules_of_the_operator_stand_in_one_file() -> None:
    text = (TEMPLATES / "rbac.yaml").read_text(encoding="utf-8")
    assert "verbs:" not in text
    assert set(re.findall(r'include "etj\.(\w+)Rules"', text)) == set(TABLES)
    elsewhere = [path.name for path in TEMPLATES.iterdir() if "verbs:" in path.read_text(encoding="utf-8")]
    assert sorted(elsewhere) == ["_rules.tpl", "user-roles.yaml"]


def test_the_operator_never_reads_secrets_runs_commands_or_escalates() -> None:
    everything = rights(*TABLES.values())
    assert not {right.resource for right in everything} & {
        "secrets", "configmaps", "pods/exec", "pods/attach", "pods/log", "pods/portforward", "nodes/proxy",
        "serviceaccounts/token", "clusterroles", "clusterrolebindings",
    }  # fmt: skip
    of_volumes = {"persistentvolumes", "persistentvolumeclaims", "storageclasses"}
    assert {right.verb for right in everything if right.resource.partition("/")[0] in of_volumes} == {"get"}
    assert not {right.verb for right in everything} & {"bind", "escalate", "impersonate", "deletecollection", "*"}
    assert ("", "pods", "create") not in everything


def test_security_md_explains_every_right() -> None:
    page = (ROOT / "SECURITY.md").read_text(encoding="utf-8")
    section = page.split("## What the operator may do")[1].split("\n## ")[0]
    told = set()
    for row in re.findall(r"^\| `([^`]+)` \| `([^`]*)` \| ([^|]+) \|", section, re.MULTILINE):
        scope, resource, verbs = row
        group, _, name = resource.rpartition(" ")
        told |= {(scope, Right(group, name, verb.strip())) for verb in verbs.split(",")}
    listed = {(scope, right) for scope, table in TABLES.items() for right in rights(table)}
    assert told == listed


def test_what_is_not_asked_for_itself_is_a_small_part() -> None:
    assert rights(*TABLES.values()) - asked(*TABLES.values()) <= {
        Right(operator_rights.GROUP, "elastictrainingjobs/finalizers", "update"),
        Right(operator_rights.COORDINATION, "leases", "delete"),
    }
