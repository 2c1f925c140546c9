"""Dry runs of the pods of a spec, before any pod is stopped or planned for them.

The CRD schema leaves pod templates open, because each version of Kubernetes has other fields. So the operator creates
the Jobs of a spec in a dry run, once for each edit, with strict validation. The API server then rejects an unknown
field, which it would drop silently at the launch.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import Any

from elastic_operator.api.conditions import Type, find
from elastic_operator.api.spec import Spec, spec_hash
from elastic_operator.api.status import Current, Resume, Status
from elastic_operator.manifests.attempt import JobRef, reshard_job, training_job
from reshard.topology import Topology

_ATTEMPT = 0
"""No attempt has this number, so no object has these names."""

SPEC_AT_FAULT = (400, 422)
"""HTTP codes for a Job that cannot be decoded or is invalid. Other codes concern rights, quotas and namespaces, which
may change before the launch."""

_RESOURCES = "spec.reshard.resources"

_DRY_RUN_UNSUPPORTED = re.compile(r"admission webhook .* does not support dry run")
"""Also a 400 (apiserver, NewDryRunUnsupportedErr): a webhook with side effects does not check the pods."""

_PREAMBLE = re.compile(r"^.* cannot be handled as a Job: (strict decoding error: )?|^Job\.batch \S+ is invalid: ")


def is_dry_run_needed(job: JobRef, spec: Spec, status: Status) -> bool:
    """Return whether the pods of this spec have not been checked yet.

    They have not if the spec is new, was rejected, or was edited in more than numbers of nodes and times.
    """
    condition = find(status.conditions, Type.SPEC_VALID)
    if condition is not None and condition.status == "True" and condition.observed_generation == job.generation:
        return False
    planned_hash = status.current.spec_hash if status.current is not None else ""
    has_own_pods = spec.reshard.template is not None or spec.reshard.resources is not None
    return planned_hash != spec_hash(spec) or has_own_pods


def build_dry_run_jobs(job: JobRef, spec: Spec) -> Iterator[tuple[str, dict[str, Any]]]:
    """Generate each template's path in the spec, and a Job made from it."""
    uri = "/dry-run"
    current = Current(
        topology=Topology(),
        num_nodes=1,
        gpus_per_node=spec.accelerator.per_node[0],
        resume=Resume(uri=uri, source=uri),
    )
    yield "spec.template", training_job(job, spec, _ATTEMPT, current, heartbeat_seconds=1)
    if spec.reshard.template is not None:
        yield "spec.reshard.template", reshard_job(job, spec, _ATTEMPT, current)
    elif spec.reshard.resources is not None:
        yield _RESOURCES, reshard_job(job, spec, _ATTEMPT, current)


def is_spec_at_fault(code: int | None, message: str) -> bool:
    """Return whether an answer with this code and message concerns the pods themselves."""
    return code in SPEC_AT_FAULT and not _DRY_RUN_UNSUPPORTED.match(message)


def describe_refusal(path: str, message: str, causes: Iterable[tuple[str, str]] = ()) -> list[str]:
    """Convert the API server's answer about a Job into sentences about the template at `path`.

    Args:
        path: path of the template in the spec.
        message: message of the answer.
        causes: fields and problems, if the server names them.
    """
    texts = [f"{field}: {problem}" for field, problem in causes if field] or [_PREAMBLE.sub("", message)]
    return [f"{path}: the API server refuses pods like this: {_rename_path(text, path)}" for text in texts]


def _rename_path(text: str, path: str) -> str:
    """Replace the path of the template, or of the resources, in a Job by its path in the spec."""
    if path == _RESOURCES:
        return text.replace("spec.template.spec.containers[0].resources", path)
    return text.replace("spec.template.", f"{path}.") if path != "spec.template" else text
