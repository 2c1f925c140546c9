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
from typing import Any

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
        owner_uid: UID of the ElasticTrainingJob that the Lease must belong to; empty for any.

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
        owner_uid: str = "",
    ) -> None:
        self._path = f"/apis/coordination.k8s.io/v1/namespaces/{namespace}/leases/{name}"
        self._name = name
        self._holder = holder
        self._server = server
        self._account = account
        self._owner_uid = owner_uid
        self._uid = ""
        try:
            self._context = ssl.create_default_context(cafile=str(account / "ca.crt"))
        except OSError as error:
            raise ConfigurationError(
                f"{account / 'ca.crt'}: {error.strerror or error}: the attempt's ServiceAccount is not mounted; "
                "leave automountServiceAccountToken alone in the job's template"
            ) from error

    def exchange(self, annotations: Mapping[str, str]) -> Mapping[str, str]:
        """Renew the Lease and merge the annotations; see `Mailbox.exchange`."""
        if self._owner_uid and not self._uid:
            self._uid = self._own_uid()
        now = datetime.datetime.now(datetime.UTC).isoformat(timespec="microseconds").replace("+00:00", "Z")
        # A merge patch without a resource version: two writers of different annotations never conflict.
        metadata: dict[str, Any] = {"annotations": dict(annotations)}
        if self._uid:  # the API server refuses the patch of another Lease of the same name
            metadata["uid"] = self._uid
        patch = {"metadata": metadata, "spec": {"renewTime": now, "holderIdentity": self._holder}}
        found = self._answer("PATCH", json.dumps(patch)).get("annotations") or {}
        if not isinstance(found, dict):
            raise OSError(f"Lease {self._name}: its annotations are {found!r:.80}, expected an object")
        return found

    def _own_uid(self) -> str:
        """UID of the Lease. A deleted job that is created again has a Lease of the same name and another owner.

        Raises:
            FencedError: the Lease belongs to another job.
            OSError: it cannot be read.
        """
        metadata = self._answer("GET")
        owners = [owner.get("uid") for owner in metadata.get("ownerReferences") or ()]
        if self._owner_uid not in owners:
            raise FencedError(f"Lease {self._name}: expected owner {self._owner_uid}, found {owners}")
        return str(metadata["uid"])

    def _answer(self, method: str, body: str | None = None) -> dict[str, Any]:
        """Metadata of the Lease, as one request answers it."""
        try:
            status, reason, text = self._send(method, body)
            # The operator deletes Lease, Role and ServiceAccount of an attempt that it has given up. 409 and 422 are
            # about the UID: a Lease of this name exists, and it is another job's.
            if status in (401, 403, 404) or (self._uid and status in (409, 422)):
                raise FencedError(f"Lease {self._name}: {status} {reason}")
            if status != 200:
                raise OSError(f"Lease {self._name}: {status} {reason}")
            metadata: dict[str, Any] = json.loads(text)["metadata"]
            if not isinstance(metadata, dict):
                raise ValueError(f"metadata is {metadata!r:.80}")
        except (http.client.HTTPException, ValueError, KeyError, TypeError, AttributeError) as error:
            raise OSError(f"Lease: the API server's answer makes no sense: {type(error).__name__}: {error}") from error
        return metadata

    def _send(self, method: str, body: str | None) -> tuple[int, str, bytes]:
        connection = http.client.HTTPSConnection(*self._server, context=self._context, timeout=_TIMEOUT_SECONDS)
        try:
            headers = {
                "Content-Type": "application/merge-patch+json",
                # Read every time: the kubelet rotates it.
                "Authorization": f"Bearer {(self._account / 'token').read_text().strip()}",
            }
            connection.request(method, self._path, body, headers)
            answer = connection.getresponse()
            return answer.status, answer.reason, answer.read()
        finally:
            connection.close()
