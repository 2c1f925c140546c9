"""The attempt's Lease as mailbox: one PATCH renews it, writes progress and returns the operator's requests.

The module uses the standard library only, so that a training image needs no Kubernetes client. It authenticates with
the pod's ServiceAccount, which has access to this one Lease only.
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
    """Exchanges annotations through one `coordination.k8s.io/v1` Lease.

    Args:
        namespace: namespace of the Lease.
        name: name of the Lease.
        holder: identity written into spec.holderIdentity.
        server: host and port of the API server, from the pod's environment.
        account: folder with `token` and `ca.crt`.
        owner_uid: UID of the ElasticTrainingJob that must own the Lease; empty for any.

    Raises:
        ConfigurationError: no ServiceAccount is mounted in the pod.
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
                "remove automountServiceAccountToken from the job's template"
            ) from error

    def exchange(self, annotations: Mapping[str, str]) -> Mapping[str, str]:
        """Renew the Lease and merge the annotations; see `Mailbox.exchange`."""
        if self._owner_uid and not self._uid:
            self._uid = str(self._own_metadata()["uid"])
        now = datetime.datetime.now(datetime.UTC).isoformat(timespec="microseconds").replace("+00:00", "Z")
        # The merge patch has no resourceVersion, so two writers of different annotations never conflict.
        metadata: dict[str, Any] = {"annotations": dict(annotations)}
        if self._uid:  # with a UID the API server rejects the patch if the Lease was replaced by another one
            metadata["uid"] = self._uid
        patch = {"metadata": metadata, "spec": {"renewTime": now, "holderIdentity": self._holder}}
        return self._annotations(self._answer("PATCH", json.dumps(patch)))

    def read(self) -> Mapping[str, str]:
        """Read the annotations without renewing the Lease; see `Mailbox.read`."""
        return self._annotations(self._own_metadata())

    def _annotations(self, metadata: Mapping[str, Any]) -> Mapping[str, str]:
        answer = metadata.get("annotations") or {}
        if not isinstance(answer, dict):
            raise OSError(f"Lease {self._name}: expected an object as annotations, found {answer!r:.80}")
        return answer

    def _own_metadata(self) -> dict[str, Any]:
        """Read the metadata of the Lease, and check its owner.

        If a job was deleted and created again, a Lease of the same name with another owner may exist.

        Raises:
            FencedError: the Lease belongs to another job.
            OSError: the Lease cannot be read.
        """
        metadata = self._answer("GET")
        owners = [owner.get("uid") for owner in metadata.get("ownerReferences") or ()]
        if self._owner_uid and self._owner_uid not in owners:
            raise FencedError(f"Lease {self._name}: expected owner {self._owner_uid}, found {owners}")
        return metadata

    def _answer(self, method: str, body: str | None = None) -> dict[str, Any]:
        """Send one request, and return the metadata of the Lease in the answer.

        Raises:
            FencedError: the API server refuses access to the Lease, or the Lease was replaced by another one.
            OSError: the request failed for another reason.
        """
        try:
            status, reason, text = self._send(method, body)
            # The operator deletes Lease, Role and ServiceAccount of an attempt that it has replaced. 409 and 422 mean
            # that the UID differs: a Lease of this name exists, but it belongs to another job.
            if status in (401, 403, 404) or (self._uid and status in (409, 422)):
                raise FencedError(f"Lease {self._name}: {status} {reason}")
            if status != 200:
                raise OSError(f"Lease {self._name}: {status} {reason}")
            metadata: dict[str, Any] = json.loads(text)["metadata"]
            if not isinstance(metadata, dict):
                raise ValueError(f"metadata is {metadata!r:.80}")
        except (http.client.HTTPException, ValueError, KeyError, TypeError, AttributeError) as error:
            raise OSError(f"Lease: the API server's answer is invalid: {type(error).__name__}: {error}") from error
        return metadata

    def _send(self, method: str, body: str | None) -> tuple[int, str, bytes]:
        connection = http.client.HTTPSConnection(*self._server, context=self._context, timeout=_TIMEOUT_SECONDS)
        try:
            headers = {
                "Content-Type": "application/merge-patch+json",
                # The token is read for every request, because the kubelet rotates it.
                "Authorization": f"Bearer {(self._account / 'token').read_text().strip()}",
            }
            connection.request(method, self._path, body, headers)
            answer = connection.getresponse()
            return answer.status, answer.reason, answer.read()
        finally:
            connection.close()
