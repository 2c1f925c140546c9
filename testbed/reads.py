"""Reads of the API server without a process of kubectl, for what is asked again and again by whoever waits."""

from __future__ import annotations

import functools
import http.client
import urllib.parse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from reshard.contract import GROUP, VERSION
from testbed.dns import Api

_NAMESPACED = {
    "etj": f"apis/{GROUP}/{VERSION}/elastictrainingjobs",
    "event": "api/v1/events",
    "job": "apis/batch/v1/jobs",
    "lease": "apis/coordination.k8s.io/v1/leases",
    "pod": "api/v1/pods",
}


def read(kubeconfig: Path, arguments: Sequence[str]) -> dict[str, Any] | None:
    """Do `kubectl get ARGUMENTS`; None where only kubectl can, or can say what is wrong.

    Args:
        kubeconfig: file with the credentials; only those of the test bed are read here.
        arguments: kind, perhaps a name, `-n NAMESPACE`, `-l SELECTOR`.

    Returns:
        The object, or a list; empty for an object that does not exist.
    """
    path, is_list = _make_path(arguments)
    if not path:
        return None
    try:
        value = _api(kubeconfig, kubeconfig.stat().st_mtime_ns).get(path)
    except (OSError, ValueError, LookupError, TypeError, http.client.HTTPException):
        return None
    return value if value is not None or is_list else {}


@functools.lru_cache(maxsize=8)
def _api(kubeconfig: Path, mtime_ns: int) -> Api:
    return Api(kubeconfig)


def _make_path(arguments: Sequence[str]) -> tuple[str, bool]:
    """Return the path to ask for, empty if there is no rule for the arguments, and whether it is that of a list."""
    words, options, rest = [], dict[str, str](), iter(arguments)
    for word in rest:
        if word in ("-n", "-l"):
            options[word] = next(rest, "")
        else:
            words.append(word)
    if not 1 <= len(words) <= 2 or any(word.startswith("-") for word in words):
        return "", False
    kind, name = words[0].removesuffix("s"), "".join(f"/{word}" for word in words[1:])
    query = f"?labelSelector={urllib.parse.quote(options['-l'])}" if "-l" in options else ""
    if kind == "node":
        return f"/api/v1/nodes{name}{query}", not name
    if kind not in _NAMESPACED or not options.get("-n"):
        return "", False
    prefix, _, plural = _NAMESPACED[kind].rpartition("/")
    return f"/{prefix}/namespaces/{options['-n']}/{plural}{name}{query}", not name
