"""The Kubernetes kinds that the operator reads and writes. Objects are plain dictionaries, so no field is lost."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lightkube.generic_resource import create_global_resource, create_namespaced_resource
from lightkube.operators import not_in

from reshard.contract import GROUP, KIND, PLURAL, VERSION

TRAINING_JOB = create_namespaced_resource(GROUP, VERSION, KIND, PLURAL)
JOB = create_namespaced_resource("batch", "v1", "Job", "jobs")
POD = create_namespaced_resource("", "v1", "Pod", "pods")
SERVICE = create_namespaced_resource("", "v1", "Service", "services")
ACCOUNT = create_namespaced_resource("", "v1", "ServiceAccount", "serviceaccounts")
EVENT = create_namespaced_resource("", "v1", "Event", "events")
REVISION = create_namespaced_resource("apps", "v1", "ControllerRevision", "controllerrevisions")
LEASE = create_namespaced_resource("coordination.k8s.io", "v1", "Lease", "leases")
ROLE = create_namespaced_resource("rbac.authorization.k8s.io", "v1", "Role", "roles")
ROLE_BINDING = create_namespaced_resource("rbac.authorization.k8s.io", "v1", "RoleBinding", "rolebindings")
NODE = create_global_resource("", "v1", "Node", "nodes")
SELF_REVIEW = create_global_resource("authentication.k8s.io", "v1", "SelfSubjectReview", "selfsubjectreviews")

LIVE: dict[str, Any] = {"status.phase": not_in(["Succeeded", "Failed"])}
"""Field selector of pods that occupy the resources they request."""


def make(kind: Any, body: Mapping[str, Any]) -> Any:
    """Wrap a manifest in the type that lightkube's client sends."""
    return kind(dict(body))


BY_KIND: dict[str, Any] = {
    "ControllerRevision": REVISION,
    "Job": JOB,
    "Lease": LEASE,
    "Role": ROLE,
    "RoleBinding": ROLE_BINDING,
    "Service": SERVICE,
    "ServiceAccount": ACCOUNT,
}
