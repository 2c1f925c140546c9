"""kopf's part: watch, and say which resource to look at. Handlers decide nothing and never wait.

No `kopf.index` (its start is quadratic), no timers and no daemons (they force finalizers), no `on.create` or
`on.update` (they write annotations). `on.event` leaves no trace on any object.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import kopf
from lightkube.config.kubeconfig import KubeConfig
from lightkube.config.models import User
from lightkube.core.exceptions import ConfigError

from elastic_operator.caches import Nodes
from elastic_operator.settings import Settings
from elastic_operator.worker import Workers
from reshard.contract import GROUP, PLURAL, VERSION, Label


def make_registry(settings: Settings, workers: Workers, nodes: Nodes) -> kopf.OperatorRegistry:
    """All handlers, in a registry of their own."""
    registry = kopf.OperatorRegistry()
    with_label = {str(Label.JOB): kopf.PRESENT}

    @kopf.on.login(registry=registry)
    def login(**kwargs: Any) -> kopf.ConnectionInfo | None:
        if settings.kubeconfig is None:
            return kopf.login_with_service_account(**kwargs)
        return connection(settings.kubeconfig)

    @kopf.on.startup(registry=registry)
    def configure(settings: kopf.OperatorSettings, **_: Any) -> None:
        configure_kopf(settings)

    @kopf.on.event(GROUP, VERSION, PLURAL, registry=registry)
    async def training_job(*, namespace: str | None, name: str, **_: Any) -> None:
        workers.wake((namespace or "", name))

    async def child(*, namespace: str | None, labels: Mapping[str, str], **_: Any) -> None:
        workers.wake((namespace or "", labels[Label.JOB]))

    kopf.on.event("", "v1", "pods", labels=with_label, registry=registry)(child)
    kopf.on.event("batch", "v1", "jobs", labels=with_label, registry=registry)(child)

    @kopf.on.event("coordination.k8s.io", "v1", "leases", labels=with_label, registry=registry)
    async def mailbox(*, event: Mapping[str, Any], namespace: str | None, body: Mapping[str, Any], **_: Any) -> None:
        key = (namespace or "", body["metadata"]["labels"][Label.JOB])
        if event.get("type") == "DELETED":
            workers.wake(key)
        else:
            workers.heartbeat(key, body)

    @kopf.on.event("", "v1", "nodes", registry=registry)
    async def node(*, event: Mapping[str, Any], name: str, body: Mapping[str, Any], **_: Any) -> None:
        if event.get("type") == "DELETED":
            nodes.remove(name)
        elif not nodes.update(body, time.time()):
            return
        workers.wake_node(name)
        workers.wake_all()

    return registry


def configure_kopf(settings: kopf.OperatorSettings) -> None:
    """Belts: watches end and start again, requests time out, nothing of ours is posted by kopf."""
    selectors = settings.watching.label_selectors
    for kind in (("v1", "pods"), ("batch/v1", "jobs"), ("coordination.k8s.io/v1", "leases")):
        selectors[kind] = str(Label.JOB)
    settings.watching.server_timeout = 300
    settings.watching.client_timeout = 310
    settings.watching.connect_timeout = 10
    settings.watching.reconnect_backoff = 1
    settings.networking.request_timeout = 30
    settings.posting.enabled = False
    settings.process.ultimate_exiting_timeout = 10
    settings.scanning.disabled = False


def connection(path: Path) -> kopf.ConnectionInfo:
    """Credentials of the current context of one kubeconfig file, whatever the environment says.

    Raises:
        ConfigError: the file has no current context.
    """
    config = KubeConfig.from_file(path).get()
    if config is None:
        raise ConfigError(f"{path} has no current context")
    cluster, user = config.cluster, config.user or User()

    def absolute(name: str | None) -> str | None:
        return None if name is None else str(config.abs_file(name))

    return kopf.ConnectionInfo(
        server=cluster.server,
        ca_path=absolute(cluster.certificate_auth),
        ca_data=cluster.certificate_auth_data,
        insecure=cluster.insecure,
        certificate_path=absolute(user.client_cert),
        certificate_data=user.client_cert_data,
        private_key_path=absolute(user.client_key),
        private_key_data=user.client_key_data,
        token=user.token,
        default_namespace=config.namespace,
    )
