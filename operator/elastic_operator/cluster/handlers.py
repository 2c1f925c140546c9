"""kopf's part: watch the ElasticTrainingJobs, and pass on what they say. Handlers decide nothing and never wait.

No `kopf.index` (its start is quadratic), no timers and no daemons (they force finalizers), no `on.create` or
`on.update` (they write annotations). `on.event` leaves no trace on any object. The crowd, nodes and pods and what else
comes by the thousand, is followed by `mirror`: see docs/adr/0010.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import kopf
from lightkube.config.kubeconfig import KubeConfig
from lightkube.config.models import User
from lightkube.core.exceptions import ConfigError

from elastic_operator.cluster.store import ClusterStore
from elastic_operator.settings import Settings
from reshard.contract import GROUP, PLURAL, VERSION

SERVER_SECONDS = 120
"""How long one watch lasts. Then kopf opens another one: a connection that died unnoticed costs no more."""


def make_registry(settings: Settings, remembered: ClusterStore) -> kopf.OperatorRegistry:
    """All handlers, in a registry of their own."""
    registry = kopf.OperatorRegistry()

    @kopf.on.login(registry=registry)
    def login(**kwargs: Any) -> kopf.ConnectionInfo | None:
        if settings.kubeconfig is None:
            return kopf.login_with_service_account(**kwargs)
        return connection(settings.kubeconfig)

    @kopf.on.startup(registry=registry)
    def configure(settings: kopf.OperatorSettings, **_: Any) -> None:
        configure_kopf(settings)

    @kopf.on.event(GROUP, VERSION, PLURAL, registry=registry)
    async def training_job(*, event: Mapping[str, Any], namespace: str | None, name: str, **_: Any) -> None:
        if event["type"] == "DELETED":
            remembered.drop_record((namespace or "", name), event["object"]["metadata"]["uid"])
        else:
            remembered.put_record(event["object"], listed=event["type"] is None)

    return registry


def configure_kopf(settings: kopf.OperatorSettings) -> None:
    """Belts: watches end and start again, requests time out, nothing of ours is posted by kopf."""
    settings.watching.server_timeout = SERVER_SECONDS
    settings.watching.client_timeout = SERVER_SECONDS + 10
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
