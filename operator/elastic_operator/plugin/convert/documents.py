"""Reads YAML files strictly and within bounds: plain data, no duplicate keys, limited size and depth."""

from __future__ import annotations

import re
from collections.abc import Hashable
from typing import Any

import yaml

from elastic_operator.plugin.convert.section import ConvertError

MAX_BYTES = 1 << 20
"""Largest size of a file."""

_MAX_NODES = 50_000
_MAX_DEPTH = 64
_MERGE = "tag:yaml.org,2002:merge"


class _Loader(yaml.SafeLoader):
    """Reads JSON's types alone, as the API server does: times stay text, and keys are unique."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        self.flatten_mapping(node)
        keys = [self.construct_object(key, deep=True) for key, _ in node.value]
        for key in keys:
            if not isinstance(key, str):
                raise ConvertError(f"line {node.start_mark.line + 1}: the key {key!r} is no text: put it in quotes")
            # A merged mapping (`<<`) comes first, and the keys after it win, as the YAML page says.
        return super().construct_mapping(node, deep=deep)

    def flatten_mapping(self, node: yaml.MappingNode) -> None:
        """Put the keys of merged mappings (`<<`) before those of the node; those of a repeated one count again."""
        merged = [value for key, value in node.value if key.tag == _MERGE]
        sources = [
            item for value in merged for item in (value.value if isinstance(value, yaml.SequenceNode) else [value])
        ]
        for item in {id(item): item for item in sources}.values():
            if isinstance(item, yaml.MappingNode):
                self.flatten_mapping(item)
        if sum(len(item.value) for item in sources) > _MAX_NODES:
            raise ConvertError(f"line {node.start_mark.line + 1}: merges (<<) more than {_MAX_NODES} values")
        super().flatten_mapping(node)


_INT, _FLOAT = "tag:yaml.org,2002:int", "tag:yaml.org,2002:float"
_Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if tag not in ("tag:yaml.org,2002:timestamp", _INT, _FLOAT)]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
# PyYAML's own patterns take 1:30 for a number to the base of 60, and do not know 0o17.
_Loader.add_implicit_resolver(
    _INT, re.compile(r"[-+]?(0b[01_]+|0o?[0-7_]+|0|[1-9][0-9_]*|0x[0-9a-fA-F_]+)$"), list("-+0123456789")
)
_Loader.add_implicit_resolver(
    _FLOAT,
    re.compile(r"([-+]?([0-9][0-9_]*\.[0-9_]*|\.[0-9][0-9_]*)([eE][-+][0-9]+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN))$"),
    list("-+0123456789."),
)


def read_documents(text: str, name: str) -> list[dict[str, Any]]:
    """Return the objects in a YAML file, those of a List one by one.

    Args:
        text: content of the file.
        name: of the file, for errors.

    Raises:
        ConvertError: the file is no YAML, too large or too deep, or holds something else than Kubernetes objects.
    """
    if len(text.encode("utf-8", "replace")) > MAX_BYTES:
        raise ConvertError(f"{name}: is larger than {MAX_BYTES} bytes: expected the YAML of one workload")
    try:
        _refuse_duplicate_keys(text)
        found = [_copy(item, [_MAX_NODES], _MAX_DEPTH) for item in yaml.load_all(text, Loader=_Loader)]
    except ConvertError as error:
        raise ConvertError(f"{name}: {error}") from None
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        reason = "it is nested too deep" if isinstance(error, RecursionError) else " ".join(str(error).split())
        raise ConvertError(f"{name}: cannot be read as YAML: {reason}") from None
    objects: list[dict[str, Any]] = []
    for item in found:
        if item is None:
            continue
        if not isinstance(item, dict):
            raise ConvertError(f"{name}: holds a {type(item).__name__}: expected Kubernetes objects")
        objects += _items(item, name) if item.get("kind") == "List" else [item]
    return objects


def _items(value: dict[str, Any], name: str) -> list[dict[str, Any]]:
    items = value.get("items")
    if not isinstance(items, list) or not all(isinstance(item, dict) for item in items):
        raise ConvertError(f"{name}: the items of a List are no list of objects")
    return items


def _refuse_duplicate_keys(text: str) -> None:
    for document in yaml.compose_all(text, Loader=_Loader):
        todo = [document]
        seen: set[int] = set()
        while todo:
            node = todo.pop()
            if id(node) in seen:
                continue
            seen.add(id(node))
            if isinstance(node, yaml.MappingNode):
                names = [key.value for key, _ in node.value if isinstance(key, yaml.ScalarNode)]
                if len(names) != len(set(names)):
                    repeated = next(key for key in names if names.count(key) > 1)
                    raise ConvertError(f"line {node.start_mark.line + 1}: the key {repeated} is there twice")
                todo += [value for _, value in node.value]
            elif isinstance(node, yaml.SequenceNode):
                todo += node.value


def _copy(value: Any, left: list[int], depth: int) -> Any:
    """Copy plain data; aliases count as often as they are used, so that a small file cannot become large."""
    left[0] -= 1
    if left[0] < 0 or depth < 0:
        raise ConvertError(f"has more than {_MAX_NODES} values, or more than {_MAX_DEPTH} levels")
    if isinstance(value, dict):
        return {key: _copy(item, left, depth - 1) for key, item in value.items()}
    if isinstance(value, list):
        return [_copy(item, left, depth - 1) for item in value]
    if value is None or isinstance(value, str | bool | int | float):
        return value
    raise ConvertError(f"holds a {type(value).__name__}: expected text, numbers, lists and mappings")
