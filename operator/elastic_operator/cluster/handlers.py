"""kopf's handlers: they watch ElasticTrainingJobs and pass every event to the store. They never decide or wait.

`kopf.index` is not used because its start takes quadratic time, timers and daemons because they add finalizers, and
`on.create` and `on.update` because they write annotations. `on.event` writes nothing. `informer` watches nodes, pods,
Jobs and Leases, of which there are thousands: see docs/adr/0010.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import kopf

from elastic_operator.client.credentials import Credentials, read_kubeconfig
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
        return make_connection(read_kubeconfig([settings.kubeconfig], None, settings.environment))

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


def make_connection(credentials: Credentials) -> kopf.ConnectionInfo:
    """Convert the credentials of a kubeconfig; ignores the environment, and credential plugins."""
    return kopf.ConnectionInfo(
        server=credentials.server,
        ca_path=None if credentials.ca_data else credentials.ca_file or None,
        ca_data=credentials.ca_data or None,
        insecure=credentials.is_insecure,
        certificate_path=None if credentials.certificate_data else credentials.certificate_file or None,
        certificate_data=credentials.certificate_data or None,
        private_key_path=None if credentials.key_data else credentials.key_file or None,
        private_key_data=credentials.key_data or None,
        proxy_url=credentials.proxy_url or None,
        token=credentials.token or None,
        default_namespace=credentials.namespace,
    )
