"""kopf's handlers: they watch ElasticTrainingJobs and pass every event to the store. They never decide or wait.

`kopf.index` is not used because its start takes quadratic time, timers and daemons because they add finalizers, and
`on.create` and `on.update` because they write annotations. `on.event` writes nothing. `informer` watches nodes, pods,
Jobs and Leases, of which there are thousands: see docs/adr/0010.
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
"""Duration of one watch. Then kopf opens the next one, so a dead connection lasts no longer than this."""


def make_registry(settings: Settings, store: ClusterStore) -> kopf.OperatorRegistry:
    """Register all handlers in a new registry."""
    registry = kopf.OperatorRegistry()

    @kopf.on.login(registry=registry)
    def login(**kwargs: Any) -> kopf.ConnectionInfo | None:
        if settings.kubeconfig is None:
            return kopf.login_with_service_account(**kwargs)
        return make_connection(settings.kubeconfig)

    @kopf.on.startup(registry=registry)
    def configure(settings: kopf.OperatorSettings, **_: Any) -> None:
        configure_kopf(settings)

    @kopf.on.event(GROUP, VERSION, PLURAL, registry=registry)
    async def training_job(*, event: Mapping[str, Any], namespace: str | None, name: str, **_: Any) -> None:
        if event["type"] == "DELETED":
            store.drop_record((namespace or "", name), event["object"]["metadata"]["uid"])
        else:
            store.put_record(event["object"], listed=event["type"] is None)

    return registry


def configure_kopf(settings: kopf.OperatorSettings) -> None:
    """Limit the duration of watches and requests, and keep kopf from posting events."""
    settings.watching.server_timeout = SERVER_SECONDS
    settings.watching.client_timeout = SERVER_SECONDS + 10
    settings.watching.connect_timeout = 10
    settings.watching.reconnect_backoff = 1
    settings.networking.request_timeout = 30
    settings.posting.enabled = False
    settings.process.ultimate_exiting_timeout = 10
    settings.scanning.disabled = False


def make_connection(path: Path) -> kopf.ConnectionInfo:
    """Read the credentials of the current context of one kubeconfig file; ignores the environment.

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
