"""Ratchets: rules about the checkout itself that are easy to break and expensive to notice."""

import ast
import subprocess
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
PACKAGES = [
    ROOT / "operator/elastic_operator",
    ROOT / "reshard_job/reshard",
    ROOT / "trainer/elastic_trainer",
]
MODULES = sorted(
    path
    for folder in [*PACKAGES, *(ROOT / name for name in ("testbed", "demo", "benchmarks", "simulation", "examples"))]
    for path in folder.rglob("*.py")
    if "output" not in path.parts
)
PRODUCT = [path for path in MODULES if any(path.is_relative_to(package) for package in PACKAGES)]
FOLDERS = sorted(
    {path.parent for folder in [*PACKAGES, ROOT / "simulation", ROOT / "tests/unit"] for path in folder.rglob("*.py")},
)


def tracked() -> list[str]:
    listing = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=False)
    if listing.returncode:
        pytest.skip("not a git checkout")
    return listing.stdout.splitlines()


def has_docstring(path: Path) -> bool:
    return path.exists() and bool(ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))))


def test_no_folder_shadows_the_standard_library_or_leaks_top_level_modules() -> None:
    assert [path for package in PACKAGES for path in package.parent.glob("*.py")] == []


def test_a_module_stays_below_500_lines() -> None:
    lengths = {path: len(path.read_text(encoding="utf-8").splitlines()) for path in MODULES}
    assert {path: length for path, length in lengths.items() if not length <= 500} == {}


def test_a_folder_holds_at_most_16_modules() -> None:
    counts = {folder: sum(path.name != "__init__.py" for path in folder.glob("*.py")) for folder in FOLDERS}
    assert {folder: count for folder, count in counts.items() if count > 16} == {}


def test_every_package_is_a_package_that_says_what_it_is_for() -> None:
    folders = {path.parent for path in PRODUCT}
    assert len(folders) > 50
    assert [folder for folder in folders if not has_docstring(folder / "__init__.py")] == []


def test_import_contracts_name_packages_and_cover_all_modules() -> None:
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    covered = {name for contract in contracts if contract.get("exhaustive") for name in contract["containers"]}
    assert covered == {"elastic_operator", "reshard"}
    named = [name for contract in contracts for name in contract.get("source_modules", ())]
    assert not [name for name in named if not any((p.parent / name.replace(".", "/")).is_dir() for p in PACKAGES)]


def test_every_module_of_the_product_says_what_it_is_for() -> None:
    assert len(PRODUCT) > 300
    assert [path for path in PRODUCT if not has_docstring(path)] == []


def test_the_checkout_holds_no_large_or_generated_files() -> None:
    names = tracked()
    assert not [name for name in names if name.endswith((".pyc", "_pb2.py", ".so", ".whl", ".tar"))]
    large = {
        name: size for name in names if (ROOT / name).exists() and (size := (ROOT / name).stat().st_size) > 600_000
    }
    assert not large


def test_the_readme_can_be_read_at_once_and_the_demos_picture_says_what_it_shows() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert len(readme.splitlines()) <= 120
    after_picture = readme.split("docs/recovery.png)")[1].split("\n\n")[1]
    assert "CPU" in after_picture
    assert "simulated GPUs" in after_picture
