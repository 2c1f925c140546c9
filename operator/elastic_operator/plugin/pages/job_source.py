"""One job as the pages need it, from a resource that was read or from what the operator holds. Pure."""

from __future__ import annotations

import dataclasses

from elastic_operator.api.spec import Spec
from elastic_operator.api.status import Status


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class JobSource:
    """One job.

    Attributes:
        created_at: creation of the resource in seconds since the epoch.
        version: resourceVersion of the resource.
        managed_by: another controller that manages the job; empty for this operator.
        is_seen: the operator has written a status.
        spec: None if it is invalid.
        problem: what is wrong with the spec; empty if it is valid.
    """

    name: str
    namespace: str
    status: Status
    spec: Spec | None = None
    problem: str = ""
    generation: int = 0
    created_at: float | None = None
    version: str = ""
    managed_by: str = ""
    is_seen: bool = True
