"""What the API server objects to in the pods of a spec, asked before anything is stopped or planned for them.

The schema of the resource leaves pod templates open, as every version of Kubernetes has other fields. So the Jobs that
a spec leads to are created in a dry run, once for each edit, with strict validation: a name that the server does not
know is refused there, where at the launch it would be dropped without a word.
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
"""No attempt has this number, so the names are free."""

SPEC_AT_FAULT = (400, 422)
"""Cannot be decoded, invalid. Others speak of rights, quotas and namespaces, and may be over at the launch."""

_NO_TRIAL = re.compile(r"admission webhook .* does not support dry run")
"""Also a 400 (apiserver, NewDryRunUnsupportedErr): a webhook with side effects says nothing about the pods."""

_PREAMBLE = re.compile(r"^.* cannot be handled as a Job: (strict decoding error: )?|^Job\.batch \S+ is invalid: ")


def needed(job: JobRef, spec: Spec, status: Status) -> bool:
    """Nobody has asked yet: the spec is new or edited, or was objected to, in more than numbers of nodes and times."""
    known = find(status.conditions, Type.SPEC_VALID)
    if known is not None and known.status == "True" and known.observed_generation == job.generation:
        return False
    planned = status.current.spec_hash if status.current is not None else ""
    return planned != spec_hash(spec) or spec.reshard.template is not None


def dry_run_jobs(job: JobRef, spec: Spec) -> Iterator[tuple[str, dict[str, Any]]]:
    """Each template's path in the spec, and a Job made from it."""
    uri = "/trial"
    current = Current(
        topology=Topology().to_dict(),
        num_nodes=1,
        gpus_per_node=spec.accelerator.per_node[0],
        resume=Resume(uri=uri, source=uri),
    )
    yield "spec.template", training_job(job, spec, _ATTEMPT, current, heartbeat_seconds=1)
    if spec.reshard.template is not None:
        yield "spec.reshard.template", reshard_job(job, spec, _ATTEMPT, current)


def at_fault(code: int | None, message: str) -> bool:
    """An answer with this code and message speaks of the pods themselves."""
    return code in SPEC_AT_FAULT and not _NO_TRIAL.match(message)


def sentences(path: str, message: str, causes: Iterable[tuple[str, str]] = ()) -> list[str]:
    """What the server says of the Job, as said of the template at `path`.

    Args:
        causes: fields and what is wrong with them, where the server names them.
    """
    texts = [f"{field}: {said}" for field, said in causes if field] or [_PREAMBLE.sub("", message)]
    return [f"{path}: the API server refuses pods like this: {_moved(text, path)}" for text in texts]


def _moved(text: str, path: str) -> str:
    """A Job has its template where the resource has that of the training."""
    return text.replace("spec.template.", f"{path}.") if path != "spec.template" else text
