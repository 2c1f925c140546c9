"""The pod of a reshard Job: its image, its user and its rights. Pure.

The files that it writes must belong to the user that trains, or the next attempt can neither read nor extend them. So
the operator's reshard image is used only if that user is known. The training pod declares it, or a process that starts
as root finds the owner of the commit and switches to that user (`reshard.owner`). If a pod must not run as root and
declares no user, only the training image itself runs as the same user.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from decimal import Decimal
from typing import Any

from elastic_operator.api.spec import Spec
from reshard.contract import GROUP

OWNER_COMMAND = ("python3", "-m", "reshard.owner")
_TMP = "etj-tmp"
_OF_POD = ("imagePullSecrets", "tolerations", "priorityClassName", "runtimeClassName")
_OF_CONTAINER = ("image", "imagePullPolicy", "env", "envFrom", "workingDir")
_IDENTITY = ("runAsUser", "runAsGroup", "runAsNonRoot", "seLinuxOptions")
_GROUPS = ("fsGroup", "fsGroupChangePolicy", "supplementalGroups", "supplementalGroupsPolicy", "seLinuxChangePolicy")
_QUANTITY = re.compile(r"([0-9]+(?:\.[0-9]+)?)([numkKMGTPE]?i?|[eE][+-]?[0-9]+)")
DEFAULT_RESOURCES: Mapping[str, Mapping[str, str]] = {
    "requests": {"cpu": "1", "memory": "512Mi"},
    "limits": {"cpu": "8", "memory": "1Gi"},
}
"""Resources of a conversion: it has buffers of 96 MiB and begins with at most 8 workers, whatever the checkpoint's
size. The limit of 8 CPUs slows nothing down; it is there for namespaces whose quota demands one.
"""
MAX_DOUBLINGS = 5
"""A conversion that runs out of memory again and again does not get more than 32 times its memory."""
_NOT_CARRIED = (
    GROUP,
    "batch.kubernetes.io",
    "container.apparmor.security.beta.kubernetes.io",
    "container.seccomp.security.alpha.kubernetes.io",
    "kai.scheduler",
    "kubectl.kubernetes.io",
    "kueue.x-k8s.io",
    "pod-group.scheduling.sigs.k8s.io",
    "run.ai",
    "scheduling.k8s.io",
    "scheduling.x-k8s.io",
    "volcano.sh",
    "yunikorn.apache.org",
)
"""Domains of labels and annotations of the training that a reshard pod does not get: they would put it into the gang or
the queue of the training, or they name the training container."""
_AS_ROOT = ("DAC_OVERRIDE", "FOWNER")
_BECOMES_OWNER = ("DAC_OVERRIDE", "SETGID", "SETUID")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ReshardImage:
    """The operator's image for reshard pods.

    Attributes:
        name: with its tag or digest; `reshard` and `python3` are on its PATH.
        pull_policy: Always, IfNotPresent or Never; empty for the default of Kubernetes.
    """

    name: str
    pull_policy: str = ""


def reshard_template(spec: Spec, image: ReshardImage | None, source: str, *, oom_kills: int = 0) -> dict[str, Any]:
    """Build the PodTemplateSpec of a reshard pod, without arguments, claim and the operator's labels.

    Args:
        spec: `spec.reshard.template`, if set, is used unchanged, with the labels and annotations of the training.
        image: the operator's image; None to use the training pod's image.
        source: the commit to convert; the pod runs as its owner if no user is declared.
        oom_kills: number of earlier tries that ran out of memory.
    """
    if spec.reshard.template:
        return {**spec.reshard.template, **_build_metadata(spec)}
    training = spec.template.get("spec") or {}
    user = _identity(training).get("runAsUser")
    if image is None or (user is None and _identity(training).get("runAsNonRoot")):
        template = _from_training(training)
    else:
        template = _from_image(training, spec.checkpoint.claim_name, image, source)
    template["spec"]["containers"][0]["resources"] = _build_resources(spec, oom_kills)
    return {**template, **_build_metadata(spec)}


def _build_metadata(spec: Spec) -> dict[str, Any]:
    """Return the metadata of the template: that of the training, by which admission and accounting know its pods.

    What `spec.reshard.template` says about a key wins.
    """
    training, own = (dict(item.get("metadata") or {}) for item in (spec.template, spec.reshard.template or {}))
    for part in ("labels", "annotations"):
        carried = {key: value for key, value in (training.get(part) or {}).items() if _is_carried(key)}
        if values := {**carried, **(own.get(part) or {})}:
            own[part] = values
    return {"metadata": own} if own else {}


def _is_carried(key: str) -> bool:
    domain = f".{key.rpartition('/')[0]}"
    return key not in ("controller-uid", "job-name") and not any(domain.endswith(f".{name}") for name in _NOT_CARRIED)


def _from_training(pod: Mapping[str, Any]) -> dict[str, Any]:
    """Copy image, volumes and environment of the training pod, without resources, placement and extra rights.

    Volumes of huge pages stay behind: the kubelet refuses to mount them for a pod that requests no huge pages.
    """
    container = pod["containers"][0]
    volumes = [item for item in pod.get("volumes") or () if not _is_huge_pages(item)]
    absent = {item.get("name") for item in pod.get("volumes") or ()} - {item.get("name") for item in volumes}
    mounts = [item for item in container.get("volumeMounts") or () if item.get("name") not in absent]
    own = {key: value for key, value in (container.get("securityContext") or {}).items() if key != "privileged"}
    main = {
        "name": "reshard",
        **{key: container[key] for key in _OF_CONTAINER if key in container},
        **({"volumeMounts": mounts} if mounts else {}),
        "securityContext": own | _build_security_context(() if _runs_as_non_root(pod) else _AS_ROOT),
    }
    kept = {**({"volumes": volumes} if volumes else {}), **{key: pod[key] for key in _OF_POD if key in pod}}
    security = {"securityContext": _with_seccomp(pod.get("securityContext") or {})}
    if own.get("seccompProfile"):
        main["securityContext"] = _with_seccomp(main["securityContext"])
    return {"spec": {**kept, **security, "containers": [main]}}


def _from_image(pod: Mapping[str, Any], claim: str, image: ReshardImage, source: str) -> dict[str, Any]:
    """Build a pod with the operator's image; take only claim, user and groups from the training pod."""
    container = pod["containers"][0]
    identity = _identity(pod)
    security = pod.get("securityContext") or {}
    claims = [item for item in pod.get("volumes") or () if _is_claim(item, claim)]
    names = {item["name"] for item in claims}
    mounts = [item for item in container.get("volumeMounts") or () if item.get("name") in names]
    main: dict[str, Any] = {
        "name": "reshard",
        "image": image.name,
        "volumeMounts": [*mounts, {"name": _TMP, "mountPath": "/tmp"}],
    }
    if image.pull_policy:
        main["imagePullPolicy"] = image.pull_policy
    added: tuple[str, ...] = ()
    if "runAsUser" not in identity:
        identity |= {"runAsUser": 0, "runAsNonRoot": False}
        main["command"] = [*OWNER_COMMAND, source, "reshard"]
        added = _BECOMES_OWNER
    elif identity["runAsUser"] == 0:
        added = _AS_ROOT
    else:
        identity["runAsNonRoot"] = True
    main["securityContext"] = {**_build_security_context(added), "readOnlyRootFilesystem": True}
    groups = {key: security[key] for key in _GROUPS if key in security}
    return {
        "spec": {
            **{key: pod[key] for key in _OF_POD if key in pod},
            "securityContext": _with_seccomp({**groups, **identity}),
            "volumes": [*claims, {"name": _TMP, "emptyDir": {}}],
            "containers": [main],
        }
    }


def _identity(pod: Mapping[str, Any]) -> dict[str, Any]:
    """Return user and group of the first container; its own settings override those of the pod."""
    merged = {**(pod.get("securityContext") or {}), **(pod["containers"][0].get("securityContext") or {})}
    return {key: merged[key] for key in _IDENTITY if merged.get(key) is not None}


def _runs_as_non_root(pod: Mapping[str, Any]) -> bool:
    identity = _identity(pod)
    return bool(identity.get("runAsUser") or identity.get("runAsNonRoot"))


def _build_security_context(capabilities_to_add: tuple[str, ...]) -> dict[str, Any]:
    # Root needs these capabilities to write into folders of other users, and `drop: [ALL]` removes them. The restricted
    # pod security standard forbids them, but it forbids root too.
    capabilities = {"drop": ["ALL"], **({"add": list(capabilities_to_add)} if capabilities_to_add else {})}
    return {"allowPrivilegeEscalation": False, "capabilities": capabilities}


def _with_seccomp(security: Mapping[str, Any]) -> dict[str, Any]:
    profile = security.get("seccompProfile") or {}
    if profile.get("type", "Unconfined") == "Unconfined":
        profile = {"type": "RuntimeDefault"}
    return {**security, "seccompProfile": profile}


def _build_resources(spec: Spec, oom_kills: int) -> dict[str, dict[str, Any]]:
    """Return the resources of the container, with the memory doubled `oom_kills` times."""
    chosen, factor = spec.reshard.resources, 2 ** min(oom_kills, MAX_DOUBLINGS)
    given = {"requests": chosen.requests, "limits": chosen.limits} if chosen is not None else DEFAULT_RESOURCES
    return {
        part: {
            name: multiply_quantity(value, factor) if name == "memory" else value for name, value in quantities.items()
        }
        for part, quantities in given.items()
        if quantities
    }


def multiply_quantity(quantity: Any, factor: int) -> Any:
    """Multiply a Kubernetes quantity by a whole number; return it as it is if it has another form.

    >>> multiply_quantity("1.5Gi", 2)
    '3Gi'
    """
    match = _QUANTITY.fullmatch(str(quantity))
    if match is None or factor == 1:
        return quantity
    number = Decimal(match[1]) * factor
    whole = number == number.to_integral_value()
    return f"{int(number) if whole else number}{match[2]}"


def _is_claim(volume: Mapping[str, Any], claim: str) -> bool:
    return (volume.get("persistentVolumeClaim") or {}).get("claimName") == claim


def _is_huge_pages(volume: Mapping[str, Any]) -> bool:
    return str((volume.get("emptyDir") or {}).get("medium") or "").startswith("HugePages")
