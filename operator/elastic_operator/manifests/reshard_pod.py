"""The pod of a reshard Job: whose image it runs, as which user, with which rights. Pure.

What it writes has to belong to the user that trains, or the next attempt can neither read nor extend it. So a reshard
image of the operator's is used where that user is known: declared in the training pod, or found at run time, by a
process that starts as root and at once becomes the owner of the commit (`reshard.owner`). A pod that must not run as
root and declares no number leaves one way to get the same user: the training image itself.
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
        pull_policy: Always, IfNotPresent or Never; empty for Kubernetes' own default.
    """

    name: str
    pull_policy: str = ""


def reshard_template(spec: Spec, image: ReshardImage | None, source: str) -> dict[str, Any]:
    """The PodTemplateSpec without what every reshard pod gets (arguments, claim, labels).

    Args:
        spec: `spec.reshard.template` wins and is left as it is.
        image: the operator's, None for the training pod's own.
        source: the commit to convert; its owner is whom the pod becomes where nobody says.
    """
    if spec.reshard.template:
        return dict(spec.reshard.template)
    training = spec.template.get("spec") or {}
    user = _identity(training).get("runAsUser")
    if image is None or (user is None and _identity(training).get("runAsNonRoot")):
        return _from_training(training)
    return _from_image(training, spec.checkpoint.claim_name, image, source)


def _from_training(pod: Mapping[str, Any]) -> dict[str, Any]:
    """Same image, volumes and environment; no accelerators, no placement, no more rights than files need."""
    container = pod["containers"][0]
    own = {key: value for key, value in (container.get("securityContext") or {}).items() if key != "privileged"}
    main = {
        "name": "reshard",
        "resources": _without_devices(container),
        **{key: container[key] for key in _OF_CONTAINER if key in container},
        "securityContext": own | _rights(() if _runs_as_non_root(pod) else _AS_ROOT),
    }
    kept = {key: pod[key] for key in ("volumes", *_OF_POD) if key in pod}
    security = {"securityContext": _with_seccomp(pod.get("securityContext") or {})}
    if own.get("seccompProfile"):
        main["securityContext"] = _with_seccomp(main["securityContext"])
    return {"spec": {**kept, **security, "containers": [main]}}


def _from_image(pod: Mapping[str, Any], claim: str, image: ReshardImage, source: str) -> dict[str, Any]:
    """The operator's image: of the training pod only the claim, the user and the groups."""
    container = pod["containers"][0]
    identity = _identity(pod)
    given = pod.get("securityContext") or {}
    claims = [item for item in pod.get("volumes") or () if _is(item, claim)]
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
    main["securityContext"] = {**_rights(added), "readOnlyRootFilesystem": True}
    groups = {key: given[key] for key in _GROUPS if key in given}
    return {
        "spec": {
            **{key: pod[key] for key in _OF_POD if key in pod},
            "securityContext": _with_seccomp({**groups, **identity}),
            "volumes": [*claims, {"name": _TMP, "emptyDir": {}}],
            "containers": [main],
        }
    }


def _identity(pod: Mapping[str, Any]) -> dict[str, Any]:
    """User and group of the first container: its own word counts before the pod's."""
    merged = {**(pod.get("securityContext") or {}), **(pod["containers"][0].get("securityContext") or {})}
    return {key: merged[key] for key in _IDENTITY if merged.get(key) is not None}


def _runs_as_non_root(pod: Mapping[str, Any]) -> bool:
    identity = _identity(pod)
    return bool(identity.get("runAsUser") or identity.get("runAsNonRoot"))


def _rights(added: tuple[str, ...]) -> dict[str, Any]:
    # Root writes into folders of others by a capability that `drop: [ALL]` takes away; the restricted standard allows
    # none of these, but no root either.
    capabilities = {"drop": ["ALL"], **({"add": list(added)} if added else {})}
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


def _is(volume: Mapping[str, Any], claim: str) -> bool:
    return (volume.get("persistentVolumeClaim") or {}).get("claimName") == claim
