"""The pod of a reshard Job: its image, its user and its rights. Pure.

The files that it writes must belong to the user that trains, or the next attempt can neither read nor extend them. So
the operator's reshard image is used only if that user is known. The training pod declares it, or a process that starts
as root finds the owner of the commit and switches to that user (`reshard.owner`). If a pod must not run as root and
declares no user, only the training image itself runs as the same user.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from elastic_operator.api.spec import Spec

OWNER_COMMAND = ("python3", "-m", "reshard.owner")
_TMP = "etj-tmp"
_OF_POD = ("imagePullSecrets", "tolerations", "priorityClassName", "runtimeClassName")
_OF_CONTAINER = ("image", "imagePullPolicy", "env", "envFrom", "volumeMounts", "workingDir")
_IDENTITY = ("runAsUser", "runAsGroup", "runAsNonRoot", "seLinuxOptions")
_GROUPS = ("fsGroup", "fsGroupChangePolicy", "supplementalGroups", "supplementalGroupsPolicy", "seLinuxChangePolicy")
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


def reshard_template(spec: Spec, image: ReshardImage | None, source: str) -> dict[str, Any]:
    """Build the PodTemplateSpec of a reshard pod, without arguments, claim and labels.

    Args:
        spec: `spec.reshard.template`, if set, is used unchanged.
        image: the operator's image; None to use the training pod's image.
        source: the commit to convert; the pod runs as its owner if no user is declared.
    """
    if spec.reshard.template:
        return dict(spec.reshard.template)
    training = spec.template.get("spec") or {}
    user = _identity(training).get("runAsUser")
    if image is None or (user is None and _identity(training).get("runAsNonRoot")):
        return _from_training(training)
    return _from_image(training, spec.checkpoint.claim_name, image, source)


def _from_training(pod: Mapping[str, Any]) -> dict[str, Any]:
    """Copy image, volumes and environment of the training pod, without accelerators, placement and extra rights."""
    container = pod["containers"][0]
    own = {key: value for key, value in (container.get("securityContext") or {}).items() if key != "privileged"}
    main = {
        "name": "reshard",
        "resources": _without_devices(container),
        **{key: container[key] for key in _OF_CONTAINER if key in container},
        "securityContext": own | _build_security_context(() if _runs_as_non_root(pod) else _AS_ROOT),
    }
    kept = {key: pod[key] for key in ("volumes", *_OF_POD) if key in pod}
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
        "resources": _without_devices(container),
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


def _without_devices(container: Mapping[str, Any]) -> dict[str, Any]:
    return {
        part: {name: value for name, value in (quantities or {}).items() if "/" not in name}
        for part, quantities in (container.get("resources") or {}).items()
        if part in ("limits", "requests")
    }


def _is_claim(volume: Mapping[str, Any], claim: str) -> bool:
    return (volume.get("persistentVolumeClaim") or {}).get("claimName") == claim
