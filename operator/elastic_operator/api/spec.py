"""The reader of the spec of an `ElasticTrainingJob`: it validates the mapping and returns frozen data.

The rest of the operator works on `Spec` and never on the resource's dict. The API server already refuses most mistakes,
because its schema comes from the same models. This reader repeats the checks, because a resource may be older than the
schema.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import ValidationError

from elastic_operator.api.claim_path import StartOptions
from elastic_operator.api.failure_policy import ClassBudget, FailureClass, PodFailurePolicy
from elastic_operator.api.schema_types import without_nulls
from elastic_operator.api.serialization import adapter_of
from elastic_operator.api.spec_model import (
    DCP,
    Accelerator,
    Activations,
    Batch,
    CheckpointSpec,
    Gang,
    Model,
    Nodes,
    Parallelism,
    Performance,
    RecoverySpec,
    ReshardSpec,
    RestartBudget,
    Spec,
    Strategy,
    TopologyChoice,
)
from elastic_operator.api.spec_rules import find_conflicts
from elastic_operator.api.validation import Problem, find_problems, shorten

__all__ = [
    "Accelerator", "Activations", "Batch", "CheckpointSpec", "ClassBudget", "FailureClass", "Gang", "Model", "Nodes",
    "NotPermittedError", "Parallelism", "Performance", "PodFailurePolicy", "RecoverySpec", "ReshardSpec",
    "RestartBudget", "Spec", "SpecError", "StartOptions", "Strategy", "TopologyChoice", "parse_spec",
]  # fmt: skip

_TEMPLATES = frozenset({"template"})


class SpecError(Exception):
    """The spec cannot be used.

    Attributes:
        problems: one sentence per problem; each begins with the path of its field.
    """

    reason = "InvalidSpec"
    """Reason of the SpecValid condition that reports the problems."""

    def __init__(self, problems: Sequence[str]) -> None:
        super().__init__("; ".join(problems))
        self.problems = tuple(problems)


class NotPermittedError(SpecError):
    """The spec is valid, but asks for something that the operator must not do; see `forbidden_accounts`."""

    reason = "NotPermitted"


def parse_spec(value: Mapping[str, Any]) -> Spec:
    """Read and check the `spec` of a resource.

    Raises:
        SpecError: with all problems; each begins with the path of its field.
    """
    written = without_nulls(value, opaque=_TEMPLATES)
    try:
        spec = adapter_of(Spec).validate_python(_derive(written))
    except ValidationError as error:
        problems = (item for item in find_problems(adapter_of(Spec), error) if not _is_derived(item, written))
        raise SpecError([_sentence(problem) for problem in problems]) from None
    if conflicts := find_conflicts(spec):
        raise SpecError(conflicts)
    return spec


def _derive(spec: Mapping[str, Any]) -> Mapping[str, Any]:
    """Fill in the fields that take the value of another field where the resource leaves them out."""
    derived = dict(spec)
    if isinstance(model := spec.get("model"), Mapping) and "attentionHeads" in model:
        derived["model"] = {"keyValueHeads": model["attentionHeads"], **model}
    if isinstance(parallelism := spec.get("parallelism", {}), Mapping):
        derived["parallelism"] = _derive_stages(parallelism, spec.get("checkpoint"))
    return derived


def _derive_stages(parallelism: Mapping[str, Any], checkpoint: Any) -> Mapping[str, Any]:
    """Fill in the ZeRO stages that the resource leaves out: FSDP2 partitions what ZeRO-3 does."""
    is_dcp = isinstance(checkpoint, Mapping) and checkpoint.get("format") == DCP
    stage = parallelism.get("zeroStage", 3 if is_dcp else 1)
    derived = {**parallelism, "zeroStage": stage}
    if isinstance(topologies := parallelism.get("topologies"), list):
        inherited = [{"zeroStage": stage, **item} if isinstance(item, Mapping) else item for item in topologies]
        derived["topologies"] = inherited
    return derived


def _is_derived(problem: Problem, written: Any) -> bool:
    """Return whether a problem is that of another field, which the resource leaves to be derived from."""
    *parents, name = problem.location
    if name not in ("keyValueHeads", "zeroStage"):
        return False
    for item in parents:
        written = written[item]
    return name not in written


def _sentence(problem: Problem) -> str:
    path = problem.path("spec")
    if not problem.expected:
        return f"{path} is missing"
    if path == "spec.template.spec.containers" and problem.value == []:
        return f"{path} is empty: the first container trains, so there must be one"
    if problem.value == "":
        return f"{path} is empty: expected {problem.expected}"
    return f"{path} is {shorten(problem.value)}: expected {problem.expected}"


def spec_hash(spec: Spec) -> str:
    """Return a hash of those parts of the spec that an attempt is made from."""
    parts: dict[str, Any] = {
        name: _plain(getattr(spec, name)) for name in ("accelerator", "parallelism", "batch", "model", "template")
    }
    if spec.gang is not None:
        parts["gang"] = spec.gang
    if spec.checkpoint.start_from:
        # Without startFrom the hash must equal that of older operators, which did not know the field: otherwise an
        # upgrade would restart every running job.
        parts["start_from"] = spec.checkpoint.start_from
        parts |= {f"start_{name}": path for name, path in _plain(spec.checkpoint.start_options).items() if path}
    return hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode()).hexdigest()[:12]


def reshard_hash(spec: Spec) -> str:
    """Return a hash of the parts of the spec that only a reshard Job is made from."""
    parts = _plain(spec.reshard)
    if spec.checkpoint.allowed_globals:  # else the hash equals that of older operators, which did not know the field
        parts["allowed_globals"] = spec.checkpoint.allowed_globals
    return hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode()).hexdigest()[:12]


def _plain(value: Any) -> Any:
    return dataclasses.asdict(value) if dataclasses.is_dataclass(value) and not isinstance(value, type) else value
