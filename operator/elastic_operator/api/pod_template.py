"""The fields of a PodTemplateSpec that the schema and the rules of the resource look at.

The operator keeps the whole template, including the fields that these classes omit; see `schema_types.CheckedAs`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import AfterValidator, Field, Strict, WithJsonSchema

from elastic_operator.api.schema_types import INT32, INT64, OPEN, WHOLE, Flag, not_expected
from reshard.contract import GROUP

MAIN_CONTAINER = f"{GROUP}/container"
"""Annotation of each pod that the operator renders: name of the container that trains or converts."""


def _check_quantity(value: Any) -> Any:
    is_text = isinstance(value, str) and len(value) <= _QUANTITY_LENGTH
    if not is_text and (isinstance(value, bool) or not isinstance(value, int)):
        raise not_expected(f"a whole number, or a quantity of at most {_QUANTITY_LENGTH} characters")
    return value


_QUANTITY_LENGTH = 64

Quantity = Annotated[
    Any,
    AfterValidator(_check_quantity),
    WithJsonSchema({"x-kubernetes-int-or-string": True, "maxLength": _QUANTITY_LENGTH}),
]
Quantities = Annotated[Mapping[str, Quantity], Field(max_length=64)]
PolicyName = Annotated[str, Strict(), Field(max_length=64)]
Hostname = Annotated[str, Strict(), Field(max_length=253)]
ContainerName = Annotated[str, Strict(), Field(min_length=1, max_length=63)]
VolumeName = Annotated[str, Strict(), Field(min_length=1, max_length=63)]
LabelKey = Annotated[str, Strict(), Field(max_length=317)]
LabelValue = Annotated[str, Strict(), Field(max_length=253)]
AnnotationValue = Annotated[str, Strict(), Field(max_length=262_144)]
ImageName = Annotated[str, Strict(), Field(min_length=1, max_length=1024)]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Resources:
    """ResourceRequirements of a container."""

    limits: Quantities | None = None
    """Quantities, by resource."""
    requests: Quantities | None = None
    """Quantities, by resource."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class EnvironmentVariable:
    """EnvVar of a container."""

    name: Annotated[str, Strict(), Field(min_length=1, max_length=512)]
    """Name of the variable."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ContainerPort:
    """ContainerPort of a container."""

    container_port: Annotated[int, Strict(), Field(ge=1, le=65_535), WHOLE, INT32]
    """Port of the pod."""
    host_port: Annotated[int, Strict(), Field(ge=0, le=65_535), WHOLE, INT32] | None = None
    """Port of the node."""
    protocol: Annotated[str, Strict(), Field(max_length=8)] | None = None
    """TCP, UDP or SCTP. Default TCP."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class VolumeMount:
    """VolumeMount of a container."""

    name: VolumeName
    """Name of the volume."""
    mount_path: Annotated[str, Strict(), Field(min_length=1, max_length=4096)]
    """Where the container sees it."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ClaimSource:
    """PersistentVolumeClaimVolumeSource."""

    claim_name: Hostname
    """Name of the claim."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Volume:
    """Volume of a pod."""

    name: VolumeName
    """Name of the volume."""
    persistent_volume_claim: Annotated[ClaimSource, OPEN] | None = None
    """A claim."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Toleration:
    """Toleration of a taint."""

    key: LabelKey | None = None
    """Key of the taint; empty for all."""
    operator: PolicyName | None = None
    """Exists or Equal. Default Equal."""
    value: LabelValue | None = None
    """Value of the taint."""
    effect: PolicyName | None = None
    """Effect of the taint; empty for all."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class NodeRequirement:
    """NodeSelectorRequirement."""

    key: LabelKey
    """Label or field of the node."""
    operator: PolicyName
    """In, NotIn, Exists, DoesNotExist, Gt or Lt."""
    values: Annotated[tuple[LabelValue, ...], Field(max_length=4096)] | None = None
    """What the operator compares with."""


NodeRequirements = Annotated[tuple[Annotated[NodeRequirement, OPEN], ...], Field(max_length=256)]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class NodeSelectorTerm:
    """NodeSelectorTerm."""

    match_expressions: NodeRequirements | None = None
    """Requirements on labels."""
    match_fields: NodeRequirements | None = None
    """Requirements on fields."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RequiredNodeSelector:
    """NodeSelector of a required node affinity."""

    node_selector_terms: Annotated[tuple[Annotated[NodeSelectorTerm, OPEN], ...], Field(max_length=64)]
    """Alternatives."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class NodeAffinity:
    """NodeAffinity of a pod."""

    required_during_scheduling_ignored_during_execution: Annotated[RequiredNodeSelector, OPEN] | None = None
    """Nodes on which the pod may be."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class OtherPods:
    """PodAffinityTerm, or PodAntiAffinityTerm."""

    topology_key: LabelKey
    """Label of nodes; nodes with the same value are one place."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PodAffinity:
    """PodAffinity or PodAntiAffinity of a pod."""

    required_during_scheduling_ignored_during_execution: (
        Annotated[tuple[Annotated[OtherPods, OPEN], ...], Field(max_length=64)] | None
    ) = None
    """Rules about the places of other pods."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Affinity:
    """Affinity of a pod."""

    node_affinity: Annotated[NodeAffinity, OPEN] | None = None
    """Rules about nodes."""
    pod_affinity: Annotated[PodAffinity, OPEN] | None = None
    """Other pods that must be near."""
    pod_anti_affinity: Annotated[PodAffinity, OPEN] | None = None
    """Other pods that must not be near."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TopologySpread:
    """TopologySpreadConstraint of a pod."""

    topology_key: LabelKey
    """Label of nodes; its values are the domains."""
    max_skew: Annotated[int, Strict(), Field(ge=1, le=2_147_483_647), WHOLE, INT32]
    """By how many pods a domain may exceed another."""
    when_unsatisfiable: PolicyName
    """DoNotSchedule or ScheduleAnyway."""


Volumes = Annotated[tuple[Annotated[Volume, OPEN], ...], Field(max_length=256)]
VolumeMounts = Annotated[tuple[Annotated[VolumeMount, OPEN], ...], Field(max_length=256)]
Ports = Annotated[tuple[Annotated[ContainerPort, OPEN], ...], Field(max_length=256)]
Tolerations = Annotated[tuple[Annotated[Toleration, OPEN], ...], Field(max_length=256)]
NodeSelector = Annotated[Mapping[str, LabelValue], Field(max_length=256)]
TopologySpreads = Annotated[tuple[Annotated[TopologySpread, OPEN], ...], Field(max_length=64)]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ReshardContainer:
    """A container of a reshard pod."""

    name: ContainerName
    """Name of the container."""
    image: ImageName
    """Image of the container."""
    resources: Annotated[Resources, OPEN] | None = None
    """ResourceRequirements."""
    volume_mounts: VolumeMounts | None = None
    """Where it sees the volumes of the pod."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TrainingContainer:
    """A container of a training pod."""

    name: ContainerName
    """Name of the container."""
    image: ImageName
    """Image of the container."""
    env: Annotated[tuple[Annotated[EnvironmentVariable, OPEN], ...], Field(max_length=1024)] | None = None
    """Environment; what the operator sets cannot be set here."""
    resources: Annotated[Resources, OPEN] | None = None
    """ResourceRequirements."""
    ports: Ports | None = None
    """Ports on which it listens."""
    volume_mounts: VolumeMounts | None = None
    """Where it sees the volumes of the pod."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class InitContainer:
    """An init container of a training pod."""

    resources: Annotated[Resources, OPEN] | None = None
    """ResourceRequirements."""
    restart_policy: PolicyName | None = None
    """Always for a container that runs beside the others."""
    ports: Ports | None = None
    """Ports on which it listens."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ReshardPodSpec:
    """PodSpec of `spec.reshard.template`."""

    restart_policy: PolicyName | None = None
    """Never or absent."""
    volumes: Volumes | None = None
    """Volumes of the pod."""
    node_selector: NodeSelector | None = None
    """Labels of the nodes on which the pod may be."""
    affinity: Annotated[Affinity, OPEN] | None = None
    """Rules about the nodes and the other pods there."""
    tolerations: Tolerations | None = None
    """Taints of nodes that do not keep the pod away."""
    containers: Annotated[tuple[Annotated[ReshardContainer, OPEN], ...], Field(min_length=1, max_length=32)]
    """The first container converts."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TrainingPodSpec:
    """PodSpec of `spec.template`."""

    restart_policy: PolicyName | None = None
    """Never or absent."""
    active_deadline_seconds: Annotated[int, Strict(), Field(ge=0, le=2_147_483_647), WHOLE, INT64] | None = None
    """Must be absent."""
    host_network: Flag | None = None
    """Use the node's network; needs dnsPolicy ClusterFirstWithHostNet. Default false."""
    dns_policy: PolicyName | None = None
    """DNS policy of the pod."""
    node_name: Hostname | None = None
    """Must be absent."""
    hostname: Hostname | None = None
    """Must be absent."""
    subdomain: Hostname | None = None
    """Must be absent."""
    volumes: Volumes | None = None
    """Volumes of the pod."""
    node_selector: NodeSelector | None = None
    """Labels of the nodes on which the pod may be."""
    affinity: Annotated[Affinity, OPEN] | None = None
    """Rules about the nodes and the other pods there."""
    tolerations: Tolerations | None = None
    """Taints of nodes that do not keep the pod away."""
    topology_spread_constraints: TopologySpreads | None = None
    """Rules about the numbers of pods in several places."""
    containers: Annotated[tuple[Annotated[TrainingContainer, OPEN], ...], Field(min_length=1, max_length=32)]
    """The first container trains. The others run beside it."""
    init_containers: Annotated[tuple[Annotated[InitContainer, OPEN], ...], Field(max_length=32)] | None = None
    """Containers that end before the training starts."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PodMetadata:
    """ObjectMeta of a pod template."""

    labels: Annotated[Mapping[str, LabelValue], Field(max_length=256)] | None = None
    """Labels of the pods."""
    annotations: Annotated[Mapping[str, AnnotationValue], Field(max_length=256)] | None = None
    """Annotations of the pods."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ReshardPodTemplate:
    """PodTemplateSpec of the reshard pods."""

    metadata: Annotated[PodMetadata, OPEN] | None = None
    """Labels and annotations, in addition to those of spec.template; the same key here wins."""
    spec: Annotated[ReshardPodSpec, OPEN]
    """PodSpec."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TrainingPodTemplate:
    """PodTemplateSpec of the training pods."""

    metadata: Annotated[PodMetadata, OPEN] | None = None
    """Labels and annotations. Reshard pods get them too, except those for gangs and queues."""
    spec: Annotated[TrainingPodSpec, OPEN]
    """PodSpec."""
