"""The chart agrees with the rest of the project, as far as that can be seen without helm."""

from __future__ import annotations

import dataclasses
import json
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from elastic_operator.observed.timeouts import Timeouts
from elastic_operator.settings import read_settings

ROOT = Path(__file__).parents[3]
CHART = ROOT / "charts/elastic-training-operator"
VALUES: dict[str, Any] = yaml.safe_load((CHART / "values.yaml").read_text())
SCHEMA: dict[str, Any] = json.loads((CHART / "values.schema.json").read_text())
FREE = ("resources.requests", "resources.limits", "metrics.dashboards.labels")
"""Values whose keys the schema does not list, because users choose them."""


def paths(values: dict[str, Any], prefix: str = "") -> Iterator[str]:
    for key, value in values.items():
        path = f"{prefix}{key}"
        yield path
        if isinstance(value, dict) and path not in FREE:
            yield from paths(value, f"{path}.")


def schema_paths(schema: dict[str, Any], prefix: str = "") -> Iterator[str]:
    for key, value in schema.get("properties", {}).items():
        yield f"{prefix}{key}"
        yield from schema_paths(value, f"{prefix}{key}.")


def camel(name: str) -> str:
    head, *tail = name.split("_")
    return head + "".join(word.capitalize() for word in tail)


def test_the_chart_installs_the_same_bytes_as_the_plain_file() -> None:
    copied = (CHART / "files/elastictrainingjobs.yaml").read_bytes()
    assert copied == (ROOT / "crds/elastictrainingjobs.yaml").read_bytes(), "run `make generate`"


def test_the_version_is_the_projects() -> None:
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    assert (chart["appVersion"], chart["version"]) == (version, version)


@pytest.mark.parametrize("path", sorted(CHART.glob("values*.yaml")), ids=lambda path: path.name)
def test_values_obey_the_schema(path: Path) -> None:
    jsonschema.validate(yaml.safe_load(path.read_text()), SCHEMA)


def test_the_schema_lists_exactly_the_values_and_refuses_all_others() -> None:
    # `global` is Helm's own; `claims` has no default.
    assert set(schema_paths(SCHEMA)) - {"global", "resources.claims"} == set(paths(VALUES))
    stack = [SCHEMA]
    while stack:
        node = stack.pop()
        assert "properties" not in node or node["additionalProperties"] is False
        stack += node.get("properties", {}).values()


def test_every_value_has_a_comment() -> None:
    lines = (CHART / "values.yaml").read_text().splitlines()
    keys = [number for number, line in enumerate(lines) if re.match(r" *[A-Za-z]+:", line)]
    # A group of values is explained by its members.
    bare = [
        lines[number]
        for number in keys
        if not lines[number - 1].lstrip().startswith("#") and not re.fullmatch(r" *[a-zA-Z]+:", lines[number])
    ]
    assert bare == ["  requests: {cpu: 100m, memory: 128Mi}", "  limits: {memory: 512Mi}"]
    assert len(keys) > 60


def test_settings_are_the_operators_options_with_their_defaults() -> None:
    numbers = {
        camel(field.name): value
        for field in dataclasses.fields(Timeouts)
        if not isinstance(value := getattr(Timeouts(), field.name), str)
    }
    assert {key: value for key, value in VALUES["settings"].items() if not isinstance(value, list)} == numbers
    lists = [key for key, value in VALUES["settings"].items() if isinstance(value, list)]
    options = [f"--{re.sub('([A-Z])', lambda found: f'-{found[0].lower()}', key)}=a=True" for key in lists]
    assert len(lists) == 2
    read_settings(["run", *options], {})
