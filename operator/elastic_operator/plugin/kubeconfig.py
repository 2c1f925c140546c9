"""Which cluster, user and namespace: the files, variables and flags that kubectl goes by.

lightkube reads one file; kubectl merges all that $KUBECONFIG names, and so does this.
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


def load(kubeconfig: str | None, context: str | None, environment: Mapping[str, str]) -> SingleConfig:
    """The cluster to talk to.

    Args:
        kubeconfig: `--kubeconfig`.
        context: `--context`.
        environment: KUBECONFIG, HOME, and what a pod has.

    Raises:
        PluginError: there is none, or it cannot be read.
    """
    paths = _paths(kubeconfig, environment)
    found = [path for path in paths if path.is_file()]
    try:
        if not found and kubeconfig is None and "KUBERNETES_SERVICE_HOST" in environment:
            return _complete(KubeConfig.from_service_account().get(context))
        if not found:
            raise PluginError(
                Exit.UNREACHABLE,
                f"no kubeconfig: looked for {', '.join(map(str, paths))}; name one with --kubeconfig or $KUBECONFIG",
            )
        return _complete(KubeConfig.from_dict(merge([_read(path) for path in found])).get(context))
    except (ConfigError, KeyError, TypeError, ValueError, OSError, yaml.YAMLError) as error:
        where = ", ".join(map(str, found or paths))
        reason = " ".join(str(error).split()) if not isinstance(error, KeyError) else f"no entry {error}"
        raise PluginError(Exit.UNREACHABLE, f"kubeconfig {where} cannot be used: {reason}") from error


def merge(documents: list[Mapping[str, Any]]) -> dict[str, Any]:
    """One kubeconfig from several: the first that has a name decides what it means, as for kubectl."""
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
    """One file, with the paths in it made absolute."""
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
        # The answer of a credential plugin has the same fields in both versions; lightkube knows the older name.
        info = {"apiVersion": _EXEC_V1, "kind": "ExecCredential", "spec": {"interactive": False}}
        user.exec.apiVersion = _EXEC_KNOWN
        user.exec.env = [*(user.exec.env or []), NameValue(name="KUBERNETES_EXEC_INFO", value=json.dumps(info))]
    return config._replace(user=user)
