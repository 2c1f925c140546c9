"""Names that say nothing without their neighbours, and that the house has given up, do not come back."""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[3]
PACKAGES = [ROOT / "operator/elastic_operator", ROOT / "reshard_job/reshard", ROOT / "trainer/elastic_trainer"]
MODULES = sorted(path for package in PACKAGES for path in package.rglob("*.py"))

GIVEN_UP_MODULES = frozenset(
    [
        "absorbing",
        "accepted",
        "agree",
        "asked",
        "batching",
        "crew",
        "enacting",
        "endings",
        "families",
        "fixed",
        "fleet",
        "foresight",
        "held",
        "inquiries",
        "ledger",
        "mirror",
        "picture",
        "presenting",
        "promises",
        "remembered",
        "rounded",
        "seal",
        "streams",
        "trial",
        "trouble",
        "twins",
        "usable",
        "working",
    ]
)
GIVEN_UP = frozenset(
    [
        "Fleet",
        "Held",
        "Inquiries",
        "Mirror",
        "Others",
        "Promises",
        "Remembered",
        "absorb",
        "despite",
        "enact",
        "going_on",
        "heeded",
        "is_quiet",
        "only_counts",
        "only_tells",
        "outlived",
        "present",
        "revive",
        "sealed",
        "share_out",
        "take_up",
    ]
)
"""The left column of the house's table of names, as far as it names classes and functions."""


def defined(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield node.name


def test_no_module_class_or_function_has_a_name_that_was_given_up() -> None:
    assert [path for path in MODULES if path.stem in GIVEN_UP_MODULES] == []
    assert [(path, names) for path in MODULES if (names := GIVEN_UP & set(defined(path)))] == []


def test_a_common_word_names_at_most_one_class_or_function() -> None:
    at_top = Counter(
        node.name
        for path in MODULES
        for node in ast.parse(path.read_text(encoding="utf-8")).body
        if isinstance(node, ast.ClassDef | ast.FunctionDef)
    )
    assert [name for name in ("Source", "Extra", "Target", "compare") if at_top[name] > 1] == []
