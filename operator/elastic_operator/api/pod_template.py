"""The fields of a PodTemplateSpec that the schema and the rules of the resource look at.

The operator keeps the whole template, including the fields that these classes omit; see `schema_types.CheckedAs`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import AfterValidator, Field, Strict, WithJsonSchema

from elastic_operator.api.schema_types import INT64, OPEN, WHOLE, Flag, not_expected


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
class ReshardContainer:
    """A container of a reshard pod."""

    name: ContainerName
    """Name of the container."""
    image: ImageName
    """Image of the container."""
    resources: Annotated[Resources, OPEN] | None = None
    """ResourceRequirements."""


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


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class InitContainer:
    """An init container of a training pod."""

    resources: Annotated[Resources, OPEN] | None = None
    """ResourceRequirements."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ReshardPodSpec:
    """PodSpec of `spec.reshard.template`."""

    restart_policy: PolicyName | None = None
    """Never or absent."""
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
    containers: Annotated[tuple[Annotated[TrainingContainer, OPEN], ...], Field(min_length=1, max_length=32)]
    """The first container trains. The others run beside it."""
    init_containers: Annotated[tuple[Annotated[InitContainer, OPEN], ...], Field(max_length=32)] | None = None
    """Containers that end before the training starts."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ReshardPodTemplate:
    """PodTemplateSpec of the reshard pods."""

    spec: Annotated[ReshardPodSpec, OPEN]
    """PodSpec."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TrainingPodTemplate:
    """PodTemplateSpec of the training pods."""

    spec: Annotated[TrainingPodSpec, OPEN]
    """PodSpec."""
