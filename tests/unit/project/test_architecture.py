"""docs/architecture.md names files, functions, packages and layers that exist, and leaves out no package or layer."""

from __future__ import annotations

import ast
import functools
import itertools
import re
import subprocess
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.pages import ROOT, rows, section

PAGE = ROOT / "docs/architecture.md"
TEXT = PAGE.read_text(encoding="utf-8")
PRODUCTS = ("operator/elastic_operator", "reshard_job/reshard", "trainer/elastic_trainer")
WALKS = ("A node is lost", "A byte moves")
WHERE = "Where is ...?"
_FILE = re.compile(r"\[([^\]]+)\]\(([^)#]+\.py)\)")
_FUNCTION = re.compile(r"\[`([\w.]+)`\]\(([^)#]+\.py)\)")


class Place(NamedTuple):
    """A cell with a file, and the functions in the cell after it."""

    label: str
    path: Path
    symbols: tuple[str, ...]


def places(text: str) -> Iterator[Place]:
    """Every file of a table with the functions beside it."""
    for row in rows(text):
        for cell, after in itertools.pairwise(row):
            if match := _FILE.fullmatch(cell):
                path = (PAGE.parent / match[2]).resolve()
                # What follows a colon is a remark, which may have code in it.
                yield Place(match[1], path, tuple(re.findall(r"`([\w.]+)`", after.split(":")[0])))


@functools.cache
def symbols(path: Path) -> frozenset[str]:
    """Names that a module defines, those of a class's members with the class before them."""
    return frozenset(_names(ast.parse(path.read_text(encoding="utf-8")).body))


def _names(body: list[ast.stmt]) -> Iterator[str]:
    for node in body:
        match node:
            case ast.ClassDef():
                yield node.name
                yield from (f"{node.name}.{name}" for name in _names(node.body))
            case ast.FunctionDef() | ast.AsyncFunctionDef():
                yield node.name
            case ast.Assign(targets=targets):
                yield from (target.id for target in targets if isinstance(target, ast.Name))
            case ast.AnnAssign(target=ast.Name(id=name)):
                yield name


def problems(place: Place) -> list[str]:
    """List the problems of a place: no such file, another file than the label says, no function, or one not there."""
    if not place.path.is_file():
        return [f"{place.label}: there is no {place.path}"]
    wrong = [] if str(place.path).endswith(f"/{place.label}") else [f"{place.label} is a link to {place.path}"]
    if not place.symbols:
        wrong.append(f"{place.label}: no function is named")
    return wrong + [f"{place.label} has no {name}" for name in place.symbols if name not in symbols(place.path)]


@pytest.mark.parametrize("title", [*WALKS, WHERE])
def test_every_file_and_function_of_a_section_exists(title: str) -> None:
    assert [problem for place in places(section(TEXT, title)) for problem in problems(place)] == []


def test_every_function_that_is_a_link_is_in_the_file_that_it_leads_to() -> None:
    found = _FUNCTION.findall(TEXT)
    assert len(found) >= 5
    assert [name for name, link in found if name not in symbols((PAGE.parent / link).resolve())] == []


@pytest.mark.parametrize("title", WALKS)
def test_a_walk_has_at_most_a_dozen_modules_and_links_to_each(title: str) -> None:
    steps = rows(section(TEXT, title))
    assert 8 <= len(steps) <= 12
    assert len({place.path for place in places(section(TEXT, title))}) == len(steps)


def test_enough_questions_are_answered_each_once() -> None:
    answers = rows(section(TEXT, WHERE))
    questions = [row[0] for row in answers if row[0] != "and"]
    assert len(questions) >= 25
    assert len(set(questions)) == len(questions)
    assert len(list(places(section(TEXT, WHERE)))) == len(answers)


def test_what_is_not_there_is_found() -> None:
    def of(file: str, function: str) -> list[str]:
        (place,) = places(f"| question | file | function |\n|---|---|---|\n| x | {file} | {function}: a `remark` |\n")
        return problems(place)

    controller = "[elastic_operator/controller.py](../operator/elastic_operator/controller.py)"
    assert of(controller, "`JobController.wake`, `STORE_PASSES_SECONDS`, `Pass.before`") == []
    assert of(controller, "`JobController.sleep`") == ["elastic_operator/controller.py has no JobController.sleep"]
    assert of(controller, "none") == ["elastic_operator/controller.py: no function is named"]
    assert of("[a/b.py](../a/b.py)", "`c`") == [f"a/b.py: there is no {ROOT / 'a/b.py'}"]
    assert "is a link to" in of("[main.py](../operator/elastic_operator/controller.py)", "`Pass`")[0]


def tree() -> list[tuple[Path, list[str]]]:
    """Folders at the margin of the tree, each with the names below it."""
    found: list[tuple[Path, list[str]]] = []
    for line in TEXT.split("<!-- tree:begin -->")[1].split("<!-- tree:end -->")[0].splitlines():
        names = [word for word in line.split("   ")[0].split() if re.fullmatch(r"[\w./]+(\.py|/)", word)]
        if line.startswith("  "):
            found[-1][1].extend(names)
        elif names:
            found.append((ROOT / names[0], []))
    return found


def test_the_tree_names_only_what_is_there() -> None:
    assert [folder for folder, _ in tree() if not folder.is_dir()] == []
    assert [folder / name for folder, names in tree() for name in names if not (folder / name).exists()] == []


@pytest.mark.parametrize("product", PRODUCTS)
def test_the_tree_names_every_package(product: str) -> None:
    packages = {f"{path.parent.relative_to(ROOT / product)}/" for path in (ROOT / product).rglob("*/__init__.py")}
    assert packages - set(dict(tree())[ROOT / product]) == set()


def test_the_tree_names_every_folder_of_the_checkout() -> None:
    listing = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=False)
    if listing.returncode:
        pytest.skip("not a git checkout")
    folders = {name.split("/")[0] for name in listing.stdout.splitlines() if "/" in name and not name.startswith(".")}
    assert folders <= {folder.relative_to(ROOT).parts[0] for folder, _ in tree()}


def test_the_layers_are_those_of_the_contracts() -> None:
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["importlinter"][
        "contracts"
    ]
    layers = {
        contract["containers"][0]: [set(layer.split(" | ")) for layer in contract["layers"]]
        for contract in contracts
        if contract["type"] == "layers"
    }
    told = {
        product.strip("`"): [set(re.findall(r"`(\w+)`", layer)) for layer in text.split(">")]
        for product, text in rows(section(TEXT, "Import rules"))
    }
    assert told == layers
