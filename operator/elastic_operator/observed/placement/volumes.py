"""Claims of a job's pods as frozen views: which nodes reach their volumes, and whether pods can use them. Pure.

Sources: Kubernetes 1.36, pkg/scheduler/framework/plugins/volumebinding and volumerestrictions.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

from reshard.contract import sentence

MAX_TERMS = 64
"""Maximum number of node selector terms of one volume."""

MAX_REQUIREMENTS = 64
"""Maximum number of requirements of one term."""

_MAX_TEXT = 300
_BIND_COMPLETED = "pv.kubernetes.io/bind-completed"
"""Annotation by which the scheduler recognizes a bound claim; the phase follows a moment later."""
_NO_PROVISIONER = "kubernetes.io/no-provisioner"
_ON_A_NODE = ("hostPath", "local")
"""Types of volumes that are never attached to a node, so that no controller enforces ReadWriteOnce."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ClaimView:
    """A PersistentVolumeClaim that the training pods use, with what is known about its volume.

    Attributes:
        terms: node selector terms, one of which a node must match to reach the volume; None for every node.
        problem: why no pod with this claim can be placed, as a predicate of the claim; empty if pods can.
        is_attached_once: the volume may be attached to one node at a time.
        has_one_pod: one pod of the cluster may use the claim at a time.
    """

    name: str
    terms: tuple[Mapping[str, Any], ...] | None = None
    problem: str = ""
    is_attached_once: bool = False
    has_one_pod: bool = False


def list_claims(checkpoint_claim: str, template: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the names of the claims that training pods use, each once; ephemeral volumes have none beforehand."""
    volumes = (template.get("spec") or {}).get("volumes") or ()
    names = [(item.get("persistentVolumeClaim") or {}).get("claimName") for item in volumes]
    return tuple(dict.fromkeys([checkpoint_claim, *filter(None, names)]))


def read_claim(name: str, claim: Mapping[str, Any] | None) -> tuple[ClaimView | None, Literal["", "volume", "class"]]:
    """Return the view of a claim if it needs nothing else, or what has to be read: its volume or its class.

    Args:
        name: name of the claim.
        claim: the PersistentVolumeClaim; None if there is none.

    Raises:
        ValueError: a field has another type than the API has.
    """
    if claim is None:
        return ClaimView(name=name, problem="does not exist"), ""
    if claim["metadata"].get("deletionTimestamp"):
        return ClaimView(name=name, problem="is being deleted"), ""
    phase = _mapping(claim.get("status"), "status").get("phase")
    notes = _mapping(claim["metadata"].get("annotations"), "metadata.annotations")
    if phase == "Lost":
        return ClaimView(name=name, problem=f"has lost its volume {volume_name(claim)}".rstrip()), ""
    if volume_name(claim) and (phase == "Bound" or _BIND_COMPLETED in notes):
        return None, "volume"
    if class_name(claim) and not volume_name(claim):
        return None, "class"
    return unbound_claim(claim, {}), ""


def bound_claim(claim: Mapping[str, Any], volume: Mapping[str, Any] | None) -> ClaimView:
    """Return the view of a claim with a volume; without the volume the claim restricts no nodes.

    Raises:
        ValueError: a field has another type than the API has.
    """
    if volume is None:
        return _view(claim, attachable=False)
    spec = _mapping(volume.get("spec"), "spec")
    required = _mapping(spec.get("nodeAffinity"), "spec.nodeAffinity").get("required")
    terms = None
    if required is not None:
        path = "spec.nodeAffinity.required"
        terms = _read_terms(_mapping(required, path).get("nodeSelectorTerms"), f"{path}.nodeSelectorTerms")
    return _view(claim, terms=terms, attachable=not any(kind in spec for kind in _ON_A_NODE))


def unbound_claim(claim: Mapping[str, Any], storage_class: Mapping[str, Any] | None) -> ClaimView:
    """Return the view of a claim without a volume.

    A class with WaitForFirstConsumer makes the volume where the first pod is placed, within its `allowedTopologies`.
    Without the right to read the class, the claim restricts nothing.

    Args:
        claim: the PersistentVolumeClaim.
        storage_class: its StorageClass; empty if there is none, None if it is not known.

    Raises:
        ValueError: a field has another type than the API has.
    """
    if storage_class is None:
        return _view(claim)
    if volume_name(claim) or storage_class.get("volumeBindingMode") != "WaitForFirstConsumer":
        return _view(claim, problem="is not bound to a volume")
    topologies = _list(storage_class.get("allowedTopologies"), "allowedTopologies", MAX_TERMS)
    if not topologies or storage_class.get("provisioner") == _NO_PROVISIONER:
        return _view(claim)
    terms: list[dict[str, Any]] = []
    for index, item in enumerate(topologies):
        path = f"allowedTopologies[{index}].matchLabelExpressions"
        expressions = _list(
            _mapping(item, f"allowedTopologies[{index}]").get("matchLabelExpressions"), path, MAX_REQUIREMENTS
        )
        terms.append({"matchExpressions": [{"operator": "In", **_mapping(one, path)} for one in expressions]})
    return _view(claim, terms=_read_terms(terms, "allowedTopologies"))


def volume_name(claim: Mapping[str, Any]) -> str:
    """Return the name of the volume of a claim, empty for none.

    Raises:
        ValueError: it is no string.
    """
    return _text(_mapping(claim.get("spec"), "spec").get("volumeName") or "", "spec.volumeName")


def class_name(claim: Mapping[str, Any]) -> str:
    """Return the name of the StorageClass of a claim, empty for none.

    Raises:
        ValueError: it is no string.
    """
    return _text(_mapping(claim.get("spec"), "spec").get("storageClassName") or "", "spec.storageClassName")


def describe_reach(claims: Iterable[ClaimView]) -> str:
    """Return a clause that says from where the volumes of claims can be reached; empty if from everywhere."""
    places = [(item.name, _describe_terms(item.terms)) for item in claims if item.terms is not None]
    if not places:
        return ""
    (name, place), *others = places
    rest = "".join(f", of claim {other} from {where}" for other, where in others)
    return sentence(f"volume of claim {name} is only reachable from {place}{rest}", _MAX_TEXT)


def describe_problems(claims: Iterable[ClaimView], *, num_pods: int, share_nodes: bool) -> str:
    """Return what keeps pods with these claims from running, as clauses; empty if nothing does.

    Args:
        claims: claims of the pods.
        num_pods: number of pods that use them at the same time.
        share_nodes: True if these pods may be on one node.
    """
    clauses: list[str] = []
    for item in claims:
        if item.problem:
            clauses.append(f"claim {item.name} {item.problem}")
        elif item.has_one_pod and num_pods > 1:
            clauses.append(f"claim {item.name} is ReadWriteOncePod: only one of the {num_pods} pods can use it")
        elif item.is_attached_once and num_pods > 1 and not share_nodes:
            clauses.append(
                f"claim {item.name} is ReadWriteOnce: most drivers attach such a volume to one node only, and the "
                f"{num_pods} pods are on different nodes; use a ReadWriteMany claim"
            )
    return "; ".join(clauses)


def _view(
    claim: Mapping[str, Any],
    *,
    terms: tuple[Mapping[str, Any], ...] | None = None,
    problem: str = "",
    attachable: bool = True,
) -> ClaimView:
    modes = set(_list(_mapping(claim.get("spec"), "spec").get("accessModes"), "spec.accessModes", MAX_TERMS))
    volume_name(claim)
    return ClaimView(
        name=claim["metadata"]["name"],
        terms=terms,
        problem=problem,
        is_attached_once=attachable and modes == {"ReadWriteOnce"},
        has_one_pod=modes == {"ReadWriteOncePod"},
    )


def _describe_terms(terms: Iterable[Mapping[str, Any]]) -> str:
    return " or ".join(
        " and ".join(
            _describe_requirement(item) for key in ("matchExpressions", "matchFields") for item in term.get(key) or ()
        )
        for term in terms
    )


def _describe_requirement(item: Mapping[str, Any]) -> str:
    values = " or ".join(item.get("values") or ())
    operator = "" if item["operator"] == "In" else f" {item['operator']}"
    return f"{item['key']}{operator} {values}".rstrip()


def _read_terms(value: Any, path: str) -> tuple[Mapping[str, Any], ...]:
    """Return node selector terms that the evaluator of node affinity can read."""
    terms = _list(value, path, MAX_TERMS)
    for index, item in enumerate(terms):
        term = _mapping(item, f"{path}[{index}]")
        for key in ("matchExpressions", "matchFields"):
            where = f"{path}[{index}].{key}"
            for requirement in _list(term.get(key), where, MAX_REQUIREMENTS):
                fields = _mapping(requirement, where)
                _text(fields.get("key"), f"{where}.key")
                operator = _text(fields.get("operator"), f"{where}.operator")
                values = [_text(text, f"{where}.values") for text in _list(fields.get("values"), f"{where}.values")]
                if operator in ("Gt", "Lt") and not (values and values[0].isdigit()):
                    raise ValueError(f"{where}.values: expected a whole number, found {str(values)[:80]!r}")
    return tuple(terms)


def _mapping(value: Any, path: str) -> Mapping[str, Any]:
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise ValueError(f"{path}: expected an object, found {str(value)[:80]!r}")
    return value


def _list(value: Any, path: str, most: int = 4096) -> Sequence[Any]:
    if value is None:
        return []
    if not isinstance(value, list) or len(value) > most:
        raise ValueError(f"{path}: expected a list of at most {most}, found {str(value)[:80]!r}")
    return value


def _text(value: Any, path: str) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{path}: expected a string, found {str(value)[:80]!r}")
    return value
