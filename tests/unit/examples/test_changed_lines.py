"""The elastic script of each pair in examples/ differs from the plain one by at most five lines outside of imports."""

import ast
import difflib
import io
import tokenize
from pathlib import Path

import pytest

from tests.pages import ROOT

MOST = 5
PAIRS = {path.parent.name: (path.with_name("plain.py"), path) for path in sorted(ROOT.glob("examples/*/elastic.py"))}


def counted_lines(path: Path) -> list[str]:
    """Lines of a script without imports, comments, blank lines and docstrings."""
    source = path.read_text(encoding="utf-8")
    left_out: set[int] = set()
    for node in ast.walk(ast.parse(source)):
        is_text = (
            isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
        )
        if isinstance(node, ast.Import | ast.ImportFrom) or is_text:
            left_out.update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    lines = source.splitlines()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            number, column = token.start
            lines[number - 1] = lines[number - 1][:column].rstrip()
    return [line for number, line in enumerate(lines, 1) if number not in left_out and line.strip()]


def changed_lines(plain: list[str], elastic: list[str]) -> int:
    """Sum over all places: the larger number of deleted and inserted lines."""
    matcher = difflib.SequenceMatcher(None, plain, elastic, autojunk=False)
    return sum(
        max(old_end - old, new_end - new)
        for kind, old, old_end, new, new_end in matcher.get_opcodes()
        if kind != "equal"
    )


def test_the_pairs_are_there() -> None:
    assert {"deepspeed_loop", "fsdp2"} <= set(PAIRS)


@pytest.mark.parametrize("name", PAIRS)
def test_at_most_five_lines_change(name: str) -> None:
    plain, elastic = (counted_lines(path) for path in PAIRS[name])
    assert 1 <= changed_lines(plain, elastic) <= MOST


@pytest.mark.parametrize("name", PAIRS)
def test_a_plain_script_knows_nothing_of_this_project(name: str) -> None:
    tree = ast.parse(PAIRS[name][0].read_text(encoding="utf-8"))
    modules = {node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    modules |= {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    assert {module.split(".")[0] for module in modules}.isdisjoint({"elastic_trainer", "reshard"})


def test_lines_are_counted() -> None:
    assert changed_lines(["a", "b", "c"], ["a", "c"]) == 1
    assert changed_lines(["a", "b", "c"], ["a", "x", "y", "c"]) == 2
    assert changed_lines(["a"], ["a"]) == 0
