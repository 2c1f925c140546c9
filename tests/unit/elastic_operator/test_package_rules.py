"""Rules of the operator's package that no linter knows, and pages that must agree with the code."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from elastic_operator.api.conditions import Type
from elastic_operator.observed.signal_kinds import KINDS
from elastic_operator.observed.timeouts import Timeouts
from elastic_operator.settings import read_settings

ROOT = Path(__file__).parents[3]
PACKAGE = ROOT / "operator/elastic_operator"
EDGES = {
    "aiohttp": {"client", "webhook"},
    "kopf": {"cluster", "main.py"},
    "kubernetes": {"client", "plugin"},
    "urllib3": {"plugin"},
    "rich": {"plugin"},
    "prometheus_client": {"metrics"},
}
"""Which packages and top modules may import a library."""


@pytest.mark.parametrize(("library", "allowed"), EDGES.items())
def test_libraries_stay_at_their_edges(library: str, allowed: set[str]) -> None:
    users = {
        path.relative_to(PACKAGE).parts[0]
        for path in PACKAGE.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if (isinstance(node, ast.Import) and any(item.name.split(".")[0] == library for item in node.names))
        or (isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == library)
    }
    assert users <= allowed


def test_only_settings_reads_the_environment() -> None:
    readers = {
        path.relative_to(PACKAGE).as_posix()
        for path in PACKAGE.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Attribute) and node.attr in ("environ", "getenv")
    }
    assert readers == {"settings.py", "plugin/main.py"}


def test_no_module_is_longer_than_people_read() -> None:
    long = {path.name: n for path in PACKAGE.rglob("*.py") if (n := len(path.read_text().splitlines())) > 500}
    assert not long


def test_the_operations_page_names_every_signal_condition_and_option() -> None:
    text = (ROOT / "docs/operations.md").read_text()
    missing = [str(kind) for kind in KINDS if kind not in text]
    missing += [str(kind) for kind in Type if kind not in text]
    for name in Timeouts.__dataclass_fields__:
        row = f"| {name.replace('_', '-')} | {getattr(Timeouts(), name):g} |"
        missing += [] if row in text else [row]
    assert not missing


def test_the_failure_modes_page_names_tests_that_exist() -> None:
    tests = "".join(path.read_text() for path in (ROOT / "tests").rglob("test_*.py"))
    for name in re.findall(r"`([a-z_]{12,})(?:\.\.\.)?`", (ROOT / "docs/failure-modes.md").read_text()):
        assert name in tests, name


def test_settings_come_from_the_command_line_then_the_environment() -> None:
    found = read_settings(
        ["run", "--namespace", "team", "--image-seconds", "3"], {"HOME": "/home/me", "KUBECONFIG": "/k"}
    )
    assert (found.namespaces, found.limits.image_seconds, str(found.kubeconfig)) == (("team",), 3.0, "/k")
    assert read_settings(["run", "--namespace", "a", "--namespace=b,a"], {}).namespaces == ("a", "b")
    assert read_settings(["run"], {"KUBERNETES_SERVICE_HOST": "10.0.0.1"}).kubeconfig is None
