"""Rules of the operator's package that no linter knows, and pages that must agree with the code."""

from __future__ import annotations

import ast
import functools
from pathlib import Path

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


@functools.cache
def nodes() -> tuple[tuple[Path, ast.AST], ...]:
    """All nodes of all modules, each with the module's path in the package."""
    return tuple(
        (path.relative_to(PACKAGE), node)
        for path in PACKAGE.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Import | ast.ImportFrom | ast.Attribute)
    )


def imported(node: ast.AST) -> set[str]:
    """Top names of the libraries that a node imports."""
    names = [item.name for item in node.names] if isinstance(node, ast.Import) else []
    return {name.split(".")[0] for name in (*names, getattr(node, "module", None) or "")}


def test_libraries_stay_at_their_edges() -> None:
    for library, allowed in EDGES.items():
        assert {path.parts[0] for path, node in nodes() if library in imported(node)} <= allowed, library


def test_only_settings_reads_the_environment() -> None:
    readers = {
        path.as_posix()
        for path, node in nodes()
        if isinstance(node, ast.Attribute) and node.attr in ("environ", "getenv")
    }
    assert readers == {"settings.py", "plugin/main.py"}


def test_settings_come_from_the_command_line_then_the_environment() -> None:
    found = read_settings(
        ["run", "--namespace", "team", "--image-seconds", "3"], {"HOME": "/home/me", "KUBECONFIG": "/k"}
    )
    assert (found.namespaces, found.limits.image_seconds, str(found.kubeconfig)) == (("team",), 3.0, "/k")
    assert read_settings(["run", "--namespace", "a", "--namespace=b,a"], {}).namespaces == ("a", "b")
    assert read_settings(["run"], {"KUBERNETES_SERVICE_HOST": "10.0.0.1"}).kubeconfig is None
