"""Finds cluster, user and namespace from the same files, variables and flags as kubectl."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from elastic_operator.client.credentials import Credentials, CredentialsError, read_kubeconfig, service_account
from elastic_operator.plugin.errors import Exit, PluginError


def load_config(kubeconfig: str | None, context: str | None, environment: Mapping[str, str]) -> Credentials:
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
            return service_account(environment)
        if not existing_paths:
            raise PluginError(
                Exit.UNREACHABLE,
                f"no kubeconfig: looked for {', '.join(map(str, paths))}; name one with --kubeconfig or $KUBECONFIG",
            )
        return read_kubeconfig(existing_paths, context, environment)
    except CredentialsError as error:
        shown_paths = ", ".join(map(str, existing_paths or paths))
        raise PluginError(Exit.UNREACHABLE, f"kubeconfig {shown_paths} cannot be used: {error}") from error


def _paths(kubeconfig: str | None, environment: Mapping[str, str]) -> list[Path]:
    if kubeconfig:
        return [Path(kubeconfig).expanduser()]
    listed = [Path(item).expanduser() for item in environment.get("KUBECONFIG", "").split(":") if item]
    return listed or [Path(environment.get("HOME") or "~").expanduser() / ".kube" / "config"]
