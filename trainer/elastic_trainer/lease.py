"""The attempt's Lease as mailbox: one PATCH renews it, writes progress and brings back the operator's requests.

Standard library only: a training pod needs no Kubernetes client. Uses the pod's ServiceAccount, which may touch this
one Lease and nothing else.
"""

from __future__ import annotations

import datetime
import http.client
import json
import ssl
from collections.abc import Mapping
from pathlib import Path

from elastic_trainer.errors import ConfigurationError, FencedError

_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
_TIMEOUT_SECONDS = 5


class LeaseMailbox:
    """Annotations of `coordination.k8s.io/v1` Lease `namespace/name`.

    Args:
        namespace: of the Lease.
        name: of the Lease.
        holder: identity written into spec.holderIdentity.
        server: host and port of the API server, as Kubernetes tells every pod.
        account: folder with `token` and `ca.crt`.

    Raises:
        ConfigurationError: the pod has no ServiceAccount mounted.
    """

    def __init__(
        self,
        *,
        namespace: str,
        name: str,
        holder: str,
        server: tuple[str, int],
        account: Path = _ACCOUNT,
    ) -> None:
        self._path = f"/apis/coordination.k8s.io/v1/namespaces/{namespace}/leases/{name}"
        self._holder = holder
        self._server = server
        self._account = account
        try:
            self._context = ssl.create_default_context(cafile=str(account / "ca.crt"))
        except OSError as error:
            raise ConfigurationError(
                f"{account / 'ca.crt'}: {error.strerror or error}: the attempt's ServiceAccount is not mounted; "
                "leave automountServiceAccountToken alone in the job's template"
            ) from error

    def exchange(self, annotations: Mapping[str, str]) -> Mapping[str, str]:
        """Renew the Lease and merge the annotations; see `Mailbox.exchange`."""
        now = datetime.datetime.now(datetime.UTC).isoformat(timespec="microseconds").replace("+00:00", "Z")
        # A merge patch without a resource version: two writers of different annotations never conflict.
        patch = {
            "metadata": {"annotations": dict(annotations)},
            "spec": {"renewTime": now, "holderIdentity": self._holder},
        }
        try:
            status, reason, body = self._patch(json.dumps(patch))
            # The operator deletes Lease, Role and ServiceAccount of an attempt that it has given up.
            if status in (401, 403, 404):
                raise FencedError(f"Lease {self._path.rsplit('/', 1)[1]}: {status} {reason}")
            if status != 200:
                raise OSError(f"Lease {self._path.rsplit('/', 1)[1]}: {status} {reason}")
            found: Mapping[str, str] = json.loads(body)["metadata"].get("annotations") or {}
        except (http.client.HTTPException, ValueError, KeyError, TypeError) as error:
            raise OSError(f"Lease: the API server's answer makes no sense: {type(error).__name__}: {error}") from error
        return found

    def _patch(self, body: str) -> tuple[int, str, bytes]:
        connection = http.client.HTTPSConnection(*self._server, context=self._context, timeout=_TIMEOUT_SECONDS)
        try:
            headers = {
                "Content-Type": "application/merge-patch+json",
                # Read every time: the kubelet rotates it.
                "Authorization": f"Bearer {(self._account / 'token').read_text().strip()}",
            }
            connection.request("PATCH", self._path, body, headers)
            answer = connection.getresponse()
            return answer.status, answer.reason, answer.read()
        finally:
            connection.close()
