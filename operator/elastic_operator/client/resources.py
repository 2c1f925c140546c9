"""The Kubernetes kinds that the operator reads and writes. Objects are plain dictionaries, so no field is lost."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any
from urllib.parse import quote

from elastic_operator.manifests.gang import API_VERSIONS
from reshard.contract import GROUP, KIND, PLURAL, VERSION


@dataclasses.dataclass(frozen=True, slots=True)
class ResourceKind:
    """A kind of object, and where the API server has it.

    Attributes:
        group: API group; empty for the core group.
        version: version of the API group.
        kind: name of the kind, for instance `Pod`.
        plural: name of the collection, for instance `pods`.
    """

    group: str
    version: str
    kind: str
    plural: str

    def path(self, namespace: str = "", name: str = "", subresource: str = "") -> str:
        """Return the path of a collection, an object or a subresource, without the leading slash.

        Args:
            namespace: empty for all namespaces, and for kinds that have none.
            name: empty for the collection.
            subresource: for instance `status`.
        """
        parts = ["apis", self.group, self.version] if self.group else ["api", self.version]
        parts += ["namespaces", namespace] if namespace else []
        parts += [part for part in (self.plural, name, subresource) if part]
        return "/".join(quote(part, safe="") for part in parts)


TRAINING_JOB = ResourceKind(GROUP, VERSION, KIND, PLURAL)
JOB = ResourceKind("batch", "v1", "Job", "jobs")
POD = ResourceKind("", "v1", "Pod", "pods")
SERVICE = ResourceKind("", "v1", "Service", "services")
ACCOUNT = ResourceKind("", "v1", "ServiceAccount", "serviceaccounts")
EVENT = ResourceKind("", "v1", "Event", "events")
REVISION = ResourceKind("apps", "v1", "ControllerRevision", "controllerrevisions")
LEASE = ResourceKind("coordination.k8s.io", "v1", "Lease", "leases")
ROLE = ResourceKind("rbac.authorization.k8s.io", "v1", "Role", "roles")
ROLE_BINDING = ResourceKind("rbac.authorization.k8s.io", "v1", "RoleBinding", "rolebindings")
NODE = ResourceKind("", "v1", "Node", "nodes")
CLAIM = ResourceKind("", "v1", "PersistentVolumeClaim", "persistentvolumeclaims")
VOLUME = ResourceKind("", "v1", "PersistentVolume", "persistentvolumes")
STORAGE_CLASS = ResourceKind("storage.k8s.io", "v1", "StorageClass", "storageclasses")
DISRUPTION_BUDGET = ResourceKind("policy", "v1", "PodDisruptionBudget", "poddisruptionbudgets")
PRIORITY_CLASS = ResourceKind("scheduling.k8s.io", "v1", "PriorityClass", "priorityclasses")
WORKLOAD = ResourceKind("kueue.x-k8s.io", "v1beta2", "Workload", "workloads")
FLAVOR = ResourceKind("kueue.x-k8s.io", "v1beta2", "ResourceFlavor", "resourceflavors")
QUEUE_PRIORITY = ResourceKind("kueue.x-k8s.io", "v1beta2", "WorkloadPriorityClass", "workloadpriorityclasses")
POD_GROUPS = tuple(
    ResourceKind(group, version, "PodGroup", "podgroups")
    for group, version in (text.split("/") for text in API_VERSIONS.values())
)
"""Three kinds of one name, in different groups."""
SELF_REVIEW = ResourceKind("authentication.k8s.io", "v1", "SelfSubjectReview", "selfsubjectreviews")


def make_selectors(labels: str, fields: str) -> dict[str, str]:
    """Return the query parameters of a label selector and a field selector; empty ones are left out."""
    return {key: text for key, text in (("labelSelector", labels), ("fieldSelector", fields)) if text}


LIVE = "status.phase!=Succeeded,status.phase!=Failed"
"""Field selector of pods that occupy the resources they request."""

CHUNK = 500
"""Maximum number of objects in one answer to a list."""

MERGE_PATCH = "application/merge-patch+json"
YAML = "application/yaml"

_CREATED = (
    REVISION, JOB, LEASE, DISRUPTION_BUDGET, ROLE, ROLE_BINDING, SERVICE, ACCOUNT, WORKLOAD, *POD_GROUPS,
)  # fmt: skip
_BY_KIND = {(kind.group, kind.kind): kind for kind in _CREATED}


def kind_of(manifest: Mapping[str, Any]) -> ResourceKind:
    """Return the kind of an object that the operator creates; names of kinds alone collide."""
    group, _, _ = str(manifest["apiVersion"]).rpartition("/")
    return _BY_KIND[group, manifest["kind"]]
