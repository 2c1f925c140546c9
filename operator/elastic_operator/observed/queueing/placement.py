"""What an admission demands of pods: the labels and tolerations of the assigned flavors, and what checks add."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

MAX_DOMAINS = 4096
"""Maximum number of domains of a topology to which one job is assigned."""

MAX_TERMS = 64
"""Maximum number of terms of a node selector; more domains of several levels are described by each level alone."""

MAX_ENTRIES = 64
"""Maximum number of labels, annotations or tolerations of one flavor or check; Kueue permits 8."""

_MAX_TEXT = 1024


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """Additions to the template of the training pods.

    Attributes:
        levels: node labels of the levels of a topology, the widest first; empty without one.
        domains: values of these labels where pods may be.
    """

    node_labels: Mapping[str, str] = dataclasses.field(default_factory=dict)
    tolerations: tuple[Mapping[str, Any], ...] = ()
    labels: Mapping[str, str] = dataclasses.field(default_factory=dict)
    annotations: Mapping[str, str] = dataclasses.field(default_factory=dict)
    levels: tuple[str, ...] = ()
    domains: tuple[tuple[str, ...], ...] = ()

    def __add__(self, other: Placement) -> Placement:
        """Return both demands together; for a key in both, `other` counts."""
        return Placement(
            node_labels={**self.node_labels, **other.node_labels},
            tolerations=(*self.tolerations, *(item for item in other.tolerations if item not in self.tolerations)),
            labels={**self.labels, **other.labels},
            annotations={**self.annotations, **other.annotations},
            levels=other.levels or self.levels,
            domains=other.domains or self.domains,
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
    if placement.domains:
        pod["affinity"] = _within_domains(pod.get("affinity") or {}, placement)
    for part, added in (("labels", placement.labels), ("annotations", placement.annotations)):
        if added:
            meta[part] = {**(meta.get(part) or {}), **added}
    return {**template, "spec": pod, **({"metadata": meta} if meta else {})}


def _within_domains(affinity: Mapping[str, Any], placement: Placement) -> dict[str, Any]:
    """Return an affinity that also requires a node of one of the domains; terms of a selector are alternatives."""
    if len(placement.levels) == 1 or len(placement.domains) > MAX_TERMS:
        values = [sorted({domain[i] for domain in placement.domains}) for i in range(len(placement.levels))]
        choices = [_requirements(placement.levels, values)]
    else:
        choices = [_requirements(placement.levels, [[value] for value in domain]) for domain in placement.domains]
    required = "requiredDuringSchedulingIgnoredDuringExecution"
    of_nodes = affinity.get("nodeAffinity") or {}
    terms = (of_nodes.get(required) or {}).get("nodeSelectorTerms") or [{}]
    combined = [
        {**term, "matchExpressions": [*(term.get("matchExpressions") or ()), *choice]}
        for term in terms
        for choice in choices
    ]
    return {**affinity, "nodeAffinity": {**of_nodes, required: {"nodeSelectorTerms": combined}}}


def _requirements(levels: Sequence[str], values: Sequence[Sequence[str]]) -> list[dict[str, Any]]:
    pairs = zip(levels, values, strict=True)
    return [{"key": key, "operator": "In", "values": list(allowed)} for key, allowed in pairs]


def read_topology(assignment: Any, path: str) -> Placement:
    """Read the domains of a topology to which a pod set is assigned; nothing if there are none.

    Raises:
        ValueError: the assignment has another form than Kueue's API has, or too many domains.
    """
    if assignment is None:
        return ANYWHERE
    levels = read_mapping(assignment, path).get("levels")
    slices = assignment.get("slices")
    if not isinstance(levels, list) or not levels or not isinstance(slices, list):
        raise ValueError(f"{path}: expected levels and slices, found {str(assignment)[:80]!r}")
    domains: list[tuple[str, ...]] = []
    for index, item in enumerate(slices):
        where = f"{path}.slices[{index}]"
        count = read_mapping(item, where).get("domainCount")
        if not isinstance(count, int) or not 0 < count <= MAX_DOMAINS - len(domains):
            raise ValueError(f"{where}.domainCount: expected at most {MAX_DOMAINS} in all, found {str(count)[:80]!r}")
        per_level = [
            _read_values(value, count, f"{where}.valuesPerLevel") for value in item.get("valuesPerLevel") or ()
        ]
        if len(per_level) != len(levels):
            raise ValueError(f"{where}.valuesPerLevel: expected {len(levels)}, found {len(per_level)}")
        domains += zip(*per_level, strict=True)
    return Placement(levels=tuple(map(str, levels)), domains=tuple(domains))


def _read_values(value: Any, count: int, path: str) -> list[str]:
    """Return the value of a level in each domain; common parts of the values are stored once."""
    universal = read_mapping(value, path).get("universal")
    if universal is not None:
        return [str(universal)] * count
    individual = read_mapping(value.get("individual"), path)
    roots = individual.get("roots")
    if not isinstance(roots, list) or len(roots) != count:
        raise ValueError(f"{path}: expected {count} roots, found {str(roots)[:80]!r}")
    return [f"{individual.get('prefix') or ''}{root}{individual.get('suffix') or ''}" for root in roots]


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
