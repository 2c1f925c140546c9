"""Finds cluster, user and namespace from the same files, variables and flags as kubectl.

lightkube reads only one file; kubectl and this module merge all files that $KUBECONFIG lists.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml
from lightkube.config.kubeconfig import KubeConfig, SingleConfig
from lightkube.config.models import NameValue, User
from lightkube.core.exceptions import ConfigError

from elastic_operator.plugin.errors import Exit, PluginError

_FILES = {
    "clusters": ("cluster", ("certificate-authority",)),
    "users": ("user", ("client-certificate", "client-key", "tokenFile")),
    "contexts": ("context", ()),
}
_EXEC_V1 = "client.authentication.k8s.io/v1"
_EXEC_KNOWN = "client.authentication.k8s.io/v1beta1"


def load_config(kubeconfig: str | None, context: str | None, environment: Mapping[str, str]) -> SingleConfig:
    """Load the configuration of the cluster to connect to.

    Args:
        kubeconfig: `--kubeconfig`.
        context: `--context`.
        environment: environment variables: KUBECONFIG, HOME, and those that Kubernetes sets in a pod.

    Raises:
        PluginError: there is no kubeconfig, or it cannot be read.
    """
    paths = _paths(kubeconfig, environment)
    existing_paths = [path for path in paths if path.is_file()]
    try:
        if not existing_paths and kubeconfig is None and "KUBERNETES_SERVICE_HOST" in environment:
            return _complete(KubeConfig.from_service_account().get(context))
        if not existing_paths:
            raise PluginError(
                Exit.UNREACHABLE,
                f"no kubeconfig: looked for {', '.join(map(str, paths))}; name one with --kubeconfig or $KUBECONFIG",
            )
        return _complete(KubeConfig.from_dict(merge_documents([_read(path) for path in existing_paths])).get(context))
    except (ConfigError, KeyError, TypeError, ValueError, OSError, yaml.YAMLError) as error:
        shown_paths = ", ".join(map(str, existing_paths or paths))
        reason = " ".join(str(error).split()) if not isinstance(error, KeyError) else f"no entry {error}"
        raise PluginError(Exit.UNREACHABLE, f"kubeconfig {shown_paths} cannot be used: {reason}") from error


def merge_documents(documents: list[Mapping[str, Any]]) -> dict[str, Any]:
    """Merge several kubeconfigs as kubectl does: of entries with the same name the first one is used."""
    merged: dict[str, Any] = {}
    for kind in _FILES:
        named: dict[str, Any] = {}
        for document in documents:
            for item in document.get(kind) or ():
                named.setdefault(item["name"], item)
        merged[kind] = list(named.values())
    current = next((document["current-context"] for document in documents if document.get("current-context")), None)
    return {**merged, "current-context": current}


def _paths(kubeconfig: str | None, environment: Mapping[str, str]) -> list[Path]:
    if kubeconfig:
        return [Path(kubeconfig).expanduser()]
    listed = [Path(item).expanduser() for item in environment.get("KUBECONFIG", "").split(":") if item]
    return listed or [Path(environment.get("HOME") or "~").expanduser() / ".kube" / "config"]


def _read(path: Path) -> dict[str, Any]:
    """Read one kubeconfig, and make the paths in it absolute."""
    document = yaml.safe_load(path.read_text(encoding="utf-8")) or {}
    if not isinstance(document, dict):
        raise ValueError(f"{path} holds a {type(document).__name__}, expected a mapping")
    for kind, (inner, names) in _FILES.items():
        for item in document.get(kind) or ():
            body = item.get(inner) or {}
            body |= {name: str(path.parent.absolute() / body[name]) for name in names if body.get(name)}
            item[inner] = body
    return document


def _complete(config: SingleConfig | None) -> SingleConfig:
    if config is None:
        raise ConfigError("it has no current context; choose one with --context")
    user = config.user or User()
    if user.exec is not None and user.exec.apiVersion == _EXEC_V1:
        # Both versions of the ExecCredential API have the same fields, but lightkube accepts only v1beta1.
        info = {"apiVersion": _EXEC_V1, "kind": "ExecCredential", "spec": {"interactive": False}}
        user.exec.apiVersion = _EXEC_KNOWN
        user.exec.env = [*(user.exec.env or []), NameValue(name="KUBERNETES_EXEC_INFO", value=json.dumps(info))]
    return config._replace(user=user)
