"""Writes docs/crd-reference.md from the schema: `python crds/reference.py`; a test keeps the two in step."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

HERE = Path(__file__).parent
CRD = HERE / "elastictrainingjobs.yaml"
PAGE = HERE.parent / "docs" / "crd-reference.md"

_HEAD = """\
# ElasticTrainingJob reference

Generated from `crds/elastictrainingjobs.yaml` by `python crds/reference.py`; edit the schema, not this page.
`kubectl explain etj.spec` shows the same text on a cluster.

API version `{group}/{version}`, kind `{kind}`, short name `{short}`, category `{category}`.
`kubectl scale etj NAME --replicas=N` sets `{scale}`.
"""


def render(crd: dict[str, Any]) -> str:
    """Return the page as Markdown."""
    spec = crd["spec"]
    version = spec["versions"][0]
    schema = version["schema"]["openAPIV3Schema"]
    lines = [
        _HEAD.format(
            group=spec["group"],
            version=version["name"],
            kind=spec["names"]["kind"],
            short=spec["names"]["shortNames"][0],
            category=spec["names"]["categories"][0],
            scale=version["subresources"]["scale"]["specReplicasPath"].lstrip("."),
        )
    ]
    for name in ("spec", "status"):
        lines += [f"## {name}", "", schema["properties"][name]["description"], ""]
        lines += ["| field | type | default | description |", "|---|---|---|---|"]
        lines += _rows(schema["properties"][name], name)
        lines.append("")
    lines += ["## Rules", "", "The API server refuses a resource that breaks one of these, with this message:", ""]
    lines += [f"- {message}." for message in _messages(schema)]
    return "\n".join(lines) + "\n"


def _rows(schema: dict[str, Any], path: str) -> Iterator[str]:
    required = schema.get("required", ())
    for name, field in schema.get("properties", {}).items():
        here = f"{path}.{name}"
        default = "required" if name in required else _default(field)
        yield f"| `{here}` | {_type(field)} | {default} | {field.get('description', '')} |"
        yield from _rows(field, here)
        if field.get("type") == "array":
            yield from _rows(field["items"], f"{here}[]")


def _type(field: dict[str, Any]) -> str:
    kind = str(field["type"])
    if "enum" in field:
        return " \\| ".join(field["enum"])
    if kind == "array":
        return f"list of {_type(field['items'])}"
    least, most = field.get("minimum"), field.get("maximum")
    if least is None and most is None:
        return kind
    return f"{kind}, {_number(least)} to {_number(most)}"


def _number(value: float | None) -> str:
    return "any" if value is None else f"{value:.15g}"


def _default(field: dict[str, Any]) -> str:
    # The default of a section only says that its fields get theirs.
    if "default" not in field or field["type"] == "object":
        return ""
    value = field["default"]
    return f"`{str(value).lower() if isinstance(value, bool) else value!r}`".replace("'", "")


def _messages(schema: dict[str, Any]) -> Iterator[str]:
    yield from (rule["message"] for rule in schema.get("x-kubernetes-validations", ()))
    for field in schema.get("properties", {}).values():
        yield from _messages(field)
    if "items" in schema:
        yield from _messages(schema["items"])


if __name__ == "__main__":
    PAGE.write_text(render(yaml.safe_load(CRD.read_text(encoding="utf-8"))), encoding="utf-8")
