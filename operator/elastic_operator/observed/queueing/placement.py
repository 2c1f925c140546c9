"""What an admission demands of pods: the labels and tolerations of the assigned flavors, and what checks add."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

MAX_ENTRIES = 64
"""Maximum number of labels, annotations or tolerations of one flavor or check; Kueue permits 8."""

_MAX_TEXT = 1024


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """Additions to the template of the training pods."""

    node_labels: Mapping[str, str] = dataclasses.field(default_factory=dict)
    tolerations: tuple[Mapping[str, Any], ...] = ()
    labels: Mapping[str, str] = dataclasses.field(default_factory=dict)
    annotations: Mapping[str, str] = dataclasses.field(default_factory=dict)

    def __add__(self, other: Placement) -> Placement:
        """Return both demands together; for a key in both, `other` counts."""
        return Placement(
            node_labels={**self.node_labels, **other.node_labels},
            tolerations=(*self.tolerations, *(item for item in other.tolerations if item not in self.tolerations)),
            labels={**self.labels, **other.labels},
            annotations={**self.annotations, **other.annotations},
        )


ANYWHERE = Placement()


def add_placement(template: Mapping[str, Any], placement: Placement) -> Mapping[str, Any]:
    """Return a pod template with the demands of an admission."""
    if placement == ANYWHERE:
        return template
    pod, meta = dict(template.get("spec") or {}), dict(template.get("metadata") or {})
    if placement.node_labels:
        pod["nodeSelector"] = {**(pod.get("nodeSelector") or {}), **placement.node_labels}
    if placement.tolerations:
        own = list(pod.get("tolerations") or ())
        pod["tolerations"] = [*own, *(dict(item) for item in placement.tolerations if item not in own)]
    for part, added in (("labels", placement.labels), ("annotations", placement.annotations)):
        if added:
            meta[part] = {**(meta.get(part) or {}), **added}
    return {**template, "spec": pod, **({"metadata": meta} if meta else {})}


def read_flavor(flavor: Mapping[str, Any]) -> Placement:
    """Read what a ResourceFlavor demands of pods.

    Raises:
        ValueError: a field has another type than Kueue's API has; the message has its path.
    """
    spec = read_mapping(flavor.get("spec") or {}, "spec")
    return Placement(
        node_labels=read_texts(spec.get("nodeLabels"), "spec.nodeLabels"),
        tolerations=read_tolerations(spec.get("tolerations"), "spec.tolerations"),
    )


def read_update(update: Mapping[str, Any], path: str) -> Placement:
    """Read what an admission check changes in the pods of a pod set.

    Raises:
        ValueError: a field has another type than Kueue's API has.
    """
    return Placement(
        node_labels=read_texts(update.get("nodeSelector"), f"{path}.nodeSelector"),
        tolerations=read_tolerations(update.get("tolerations"), f"{path}.tolerations"),
        labels=read_texts(update.get("labels"), f"{path}.labels"),
        annotations=read_texts(update.get("annotations"), f"{path}.annotations"),
    )


def read_mapping(value: Any, path: str) -> Mapping[str, Any]:
    """Return a JSON object.

    Raises:
        ValueError: it is something else.
    """
    if not isinstance(value, Mapping):
        raise ValueError(f"{path}: expected an object, found {str(value)[:80]!r}")
    return value


def read_texts(value: Any, path: str) -> dict[str, str]:
    """Return an object of strings; empty if it is absent.

    Raises:
        ValueError: it is something else, or too large.
    """
    pairs = read_mapping(value if value is not None else {}, path)
    if len(pairs) > MAX_ENTRIES or not all(
        isinstance(text, str) and len(text) <= _MAX_TEXT for pair in pairs.items() for text in pair
    ):
        raise ValueError(f"{path}: expected at most {MAX_ENTRIES} short strings, found {str(value)[:80]!r}")
    return dict(pairs)


def read_tolerations(value: Any, path: str) -> tuple[Mapping[str, Any], ...]:
    """Return a list of tolerations; empty if it is absent.

    Raises:
        ValueError: it is something else, or too long.
    """
    items = value if value is not None else []
    if not isinstance(items, list) or len(items) > MAX_ENTRIES:
        raise ValueError(f"{path}: expected a list of at most {MAX_ENTRIES}, found {str(value)[:80]!r}")
    return tuple(dict(read_mapping(item, f"{path}[{index}]")) for index, item in enumerate(items))
