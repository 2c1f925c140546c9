"""Pages that collect facts from elsewhere: compatibility, comparison and threat model."""

from __future__ import annotations

import re

import yaml

from release.pins import read_versions
from reshard.commits.commit import COMMIT_VERSION
from reshard.contract import MANIFEST_VERSIONS
from testbed import components, helm, kueue
from tests.engine import s3_server
from tests.pages import ROOT, rows, section
from tests.unit.project.test_docs_tables import known_tests

DOCS = ROOT / "docs"
COMPATIBILITY = (DOCS / "compatibility.md").read_text(encoding="utf-8")
COMPARISON = (DOCS / "comparison.md").read_text(encoding="utf-8")
NOT_PACKAGES = {
    "Kubernetes": components.KUBERNETES_VERSION,
    "Helm": helm.VERSION,
    "Kueue": kueue.VERSION,
    "Python": "3.11",
}


def locked() -> dict[str, str]:
    return read_versions(ROOT / "requirements.lock")


def test_the_versions_are_those_of_the_lock_and_of_the_test_bed() -> None:
    told = {name: version for name, version, _ in rows(section(COMPATIBILITY, "Run by `make test`"))}
    assert set(NOT_PACKAGES) < set(told)
    assert told == {name: NOT_PACKAGES.get(name) or locked()[name] for name in told}
    assert s3_server.VERSION in COMPATIBILITY


def test_every_framework_of_the_engine_tier_is_on_the_page() -> None:
    told = {name for name, *_ in rows(section(COMPATIBILITY, "Run by `make test`"))}
    assert {"torch", "deepspeed", "megatron-core", "transformers", "accelerate", "safetensors", "torchdata"} <= told


def test_the_demanded_versions_are_those_of_chart_and_package() -> None:
    told = {name: demanded for name, demanded, _ in rows(section(COMPATIBILITY, "Demanded, not tested"))}
    chart = yaml.safe_load((ROOT / "charts/elastic-training-operator/Chart.yaml").read_text(encoding="utf-8"))
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    assert chart["kubeVersion"] == f">={told['Kubernetes'].split()[0]}.0-0"
    assert f'requires-python = ">={told["Python"].split()[0]}"' in project


def test_the_versions_of_formats_are_those_of_the_programs() -> None:
    told = dict(rows(section(COMPATIBILITY, "Between the parts of this project")))
    assert told["`COMMIT.json`"].startswith(f"version {COMMIT_VERSION};")
    assert told["manifests of virtual commits"].startswith(f"versions {' and '.join(map(str, MANIFEST_VERSIONS))};")


def absent_numbers(figure: str, source: str) -> list[str]:
    """Return the numbers of a figure that the section which `source` links to does not have."""
    (page, anchor) = re.findall(r"\]\((\w+\.md)(?:#([\w-]+))?\)", source)[0]
    text = (DOCS / page).read_text(encoding="utf-8")
    if anchor:
        titles = re.findall(r"^##+ (.+)$", text, flags=re.MULTILINE)
        (title,) = [item for item in titles if item.lower().replace(" ", "-") == anchor]
        text = re.split(r"^##+ ", text.split(f" {title}\n", 1)[1], flags=re.MULTILINE)[0]
    numbers = re.findall(r"\d[\d.]*(?:e-\d+)?", figure)
    assert numbers, figure
    return [number for number in numbers if not re.search(rf"(?<![\d.]){re.escape(number)}(?![\d])", text)]


def test_every_figure_is_on_the_page_that_is_named() -> None:
    figures = rows(section(COMPARISON, "Our measured figures"))
    assert len(figures) > 5
    assert [(figure, absent) for _, figure, source in figures if (absent := absent_numbers(figure, source))] == []


def test_every_system_of_the_comparison_has_a_section_and_a_source() -> None:
    table = rows(section(COMPARISON, "In one table"))
    linked = [re.findall(r"\]\(#([\w-]+)\)", row[0]) for row in table[1:]]
    titles = re.findall(r"^## (.+)$", COMPARISON, flags=re.MULTILINE)
    for (anchor,) in linked:
        (title,) = [item for item in titles if item.lower().replace(" ", "-") == anchor]
        assert "](https://" in section(COMPARISON, title), title
    assert len(linked) == 9


def test_every_row_of_the_threat_model_names_tests_that_exist() -> None:
    text = (DOCS / "threat-model.md").read_text(encoding="utf-8")
    known = known_tests()
    named = re.findall(r"(\*\*)?`(test_\w+)`", text)
    assert len(named) > 20
    for bold, name in named:
        (place,) = known[name]
        assert bool(bold) == place.path.is_relative_to(ROOT / "tests/cluster"), f"{name}: bold means on a cluster"
    for title in ("A tenant", "The code in a training pod", "A checkpoint", "The operator's token", "Mistakes"):
        for row in rows(section(text, title)):
            assert re.search(r"`test_\w+`", row[-1]), row


def test_the_test_that_the_upgrade_page_names_exists() -> None:
    for name in re.findall(r"`(test_\w+)`", (DOCS / "upgrades.md").read_text(encoding="utf-8")):
        assert name in known_tests()
