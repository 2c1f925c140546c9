"""The plugin's client of the API server. Every failure becomes a PluginError with one line that says what to do.

It uses the official client without asyncio: `kubernetes.aio` takes half as long again to import.
"""

from __future__ import annotations

import codecs
import contextlib
import dataclasses
import difflib
import io
import json
from collections.abc import Iterator, Mapping
from http import HTTPStatus
from typing import Any

from kubernetes.client.api_client import ApiClient
from kubernetes.client.configuration import Configuration
from kubernetes.client.exceptions import ApiException
from kubernetes.client.rest import RESTResponse
from urllib3.exceptions import HTTPError

from elastic_operator.client.api_errors import AnswerError, ApiError, make_error
from elastic_operator.client.credentials import Authorization, Credentials, CredentialsError
from elastic_operator.client.resources import (
    CHUNK,
    EVENT,
    LEASE,
    LIVE,
    MERGE_PATCH,
    NODE,
    POD,
    TRAINING_JOB,
    ResourceKind,
)
from elastic_operator.plugin.errors import Exit, NoSuchJobError, PluginError
from reshard.contract import GROUP, PLURAL, Label

Json = dict[str, Any]

_CONNECT_SECONDS = 10.0
_READ_SECONDS = 30.0
_MANAGER = "kubectl-etj"
_BEARER = "BearerToken"
"""Name that the client gives to the `Authorization` header."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """A client of one cluster with a default namespace.

    Attributes:
        patience_seconds: longest wait for a connection and for an answer; None for the defaults.
    """

    client: ApiClient
    credentials: Credentials
    authorization: Authorization
    namespace: str
    patience_seconds: float | None = None

    def job(self, name: str) -> Json:
        """Read the resource of a job.

        Raises:
            NoSuchJobError: it does not exist; the message lists similar names.
            PluginError: it cannot be read.
        """
        with self._plugin_errors(f"read job {name}"):
            try:
                return self._request("GET", TRAINING_JOB.path(self.namespace, name))
            except ApiError as error:
                if error.code != HTTPStatus.NOT_FOUND or not _names_an_object(error):
                    raise
        raise NoSuchJobError(self._no_such_job(name))

    def jobs(self, *, everywhere: bool = False) -> list[Json]:
        """List the jobs of the namespace, or of all namespaces."""
        with self._plugin_errors("list jobs"):
            return self._list(TRAINING_JOB, "" if everywhere else self.namespace)

    def events(self, name: str) -> list[Json]:
        """List the Events about one job."""
        fields = f"involvedObject.kind=ElasticTrainingJob,involvedObject.name={name}"
        with self._plugin_errors("list events"):
            return self._list(EVENT, self.namespace, fieldSelector=fields)

    def pods(self, name: str) -> list[Json]:
        """List the pods of one job."""
        with self._plugin_errors("list pods"):
            return self._list(POD, self.namespace, labelSelector=f"{Label.JOB}={name}")

    def lease(self, name: str) -> Json | None:
        """Read a Lease of the namespace; return None if it does not exist."""
        with self._plugin_errors(f"read lease {name}"):
            try:
                return self._request("GET", LEASE.path(self.namespace, name))
            except ApiError as error:
                if error.code != HTTPStatus.NOT_FOUND:
                    raise
        return None

    def nodes(self) -> list[Json]:
        """List all nodes of the cluster."""
        with self._plugin_errors("list nodes of the whole cluster"):
            return self._list(NODE)

    def live_pods(self) -> list[Json]:
        """List the pods of all namespaces that occupy the resources they request."""
        with self._plugin_errors("list pods of all namespaces"):
            return self._list(POD, fieldSelector=LIVE)

    def patch(self, name: str, body: Mapping[str, Any]) -> Json:
        """Merge `body` into the resource of a job; return the result."""
        path = TRAINING_JOB.path(self.namespace, name)
        with self._plugin_errors(f"change job {name}"):
            return self._request("PATCH", path, {"fieldManager": _MANAGER}, dict(body))

    def logs(
        self, pod: str, container: str, *, follow: bool, tail_lines: int | None, timestamps: bool
    ) -> Iterator[str]:
        """Yield the lines of one container's log.

        Args:
            pod: name of the pod.
            container: name of the container.
            follow: go on with lines that are written later.
            tail_lines: number of lines before that; None for all.
            timestamps: begin each line with its time.
        """
        params = {"container": container, "follow": str(follow).lower(), "timestamps": str(timestamps).lower()}
        if tail_lines is not None:
            params["tailLines"] = str(tail_lines)
        path = POD.path(self.namespace, pod, "log")
        with self._plugin_errors(f"read logs of pod {pod}"):
            answer = self._send("GET", path, params, read_seconds=None if follow else _READ_SECONDS)
            yield from split_lines(answer.response.stream(decode_content=True))

    def _list(self, kind: ResourceKind, namespace: str = "", **selectors: str) -> list[Json]:
        items: list[Json] = []
        params = {**selectors, "limit": str(CHUNK)}
        while True:
            page = self._request("GET", kind.path(namespace), params)
            items += page.get("items") or []
            if not page["metadata"].get("continue"):
                return items
            params["continue"] = page["metadata"]["continue"]

    def _request(
        self, method: str, path: str, params: Mapping[str, str] | None = None, body: Json | None = None
    ) -> Json:
        found: Json = json.loads(self._send(method, path, params, body).read())
        return found

    def _send(
        self,
        method: str,
        path: str,
        params: Mapping[str, str] | None = None,
        body: Json | None = None,
        *,
        read_seconds: float | None = _READ_SECONDS,
    ) -> RESTResponse:
        """Send a request; send it again with new credentials if the first ones have expired."""
        is_first = True
        while True:
            _, url, headers, data, _ = self.client.param_serialize(
                method,
                f"/{path}",
                query_params=params,
                header_params={"Accept": "application/json", "Content-Type": MERGE_PATCH},
                body=body,
                auth_settings=[_BEARER],
            )
            timeouts = (self.patience_seconds or _CONNECT_SECONDS, self.patience_seconds or read_seconds)
            answer = self.client.call_api(method, url, headers, data, _request_timeout=timeouts)
            if answer.status == HTTPStatus.OK:
                return answer
            content = answer.read()
            is_rejected = answer.status == HTTPStatus.UNAUTHORIZED
            if not (is_first and is_rejected and self.authorization.expire(headers.get("authorization", ""))):
                raise make_error(answer.status, path, content)
            is_first = False

    def _no_such_job(self, name: str) -> str:
        jobs = self.jobs()
        text = f"no ElasticTrainingJob {name} in namespace {self.namespace}"
        elsewhere: list[str] = []
        with contextlib.suppress(PluginError):
            elsewhere = [item["metadata"]["namespace"] for item in self.jobs(everywhere=True) if _name(item) == name]
        if elsewhere:
            return f"{text}; there is one in {', '.join(sorted(elsewhere))}: use -n"
        names = sorted(_name(item) for item in jobs)
        near = difflib.get_close_matches(name, names, n=3, cutoff=0.5)
        if near:
            return f"{text}; did you mean {' or '.join(near)}?"
        if not names:
            return f"{text}, nor any other; `kubectl etj list -A` shows all namespaces"
        return f"{text}; there are {', '.join(names[:5])}{' and others' if len(names) > 5 else ''}"

    @contextlib.contextmanager
    def _plugin_errors(self, what: str) -> Iterator[None]:
        """Convert every failure of a request to a PluginError that names the action `what`."""
        server, context = self.credentials.server, self.credentials.context
        try:
            yield
        except ApiError as error:
            raise _refusal(error, what, context) from error
        except AnswerError as error:
            if error.code == HTTPStatus.NOT_FOUND and f"/{GROUP}/" in error.path:
                raise _not_installed() from error
            raise PluginError(Exit.REFUSED, f"cannot {what}: {server} answers {error.code}") from error
        except (HTTPError, ApiException) as error:
            reason = " ".join(str(error).split()) or type(error).__name__
            text = f"cluster {server} (context {context}) cannot be reached: {reason}"
            raise PluginError(Exit.UNREACHABLE, text) from error
        except json.JSONDecodeError as error:
            raise PluginError(Exit.REFUSED, f"cannot {what}: {server} does not answer with JSON") from error
        except (CredentialsError, OSError) as error:
            raise _unusable(self.credentials, error) from error


@contextlib.contextmanager
def connect(credentials: Credentials, namespace: str | None) -> Iterator[Cluster]:
    """Open a client of a cluster, and close it at the end; sends no request.

    Args:
        credentials: address and credentials of the cluster.
        namespace: `--namespace`; None for that of the context.

    Raises:
        PluginError: the credentials cannot be used.
    """
    authorization = Authorization(credentials)
    with credentials.client_certificate() as (certificate, key):
        try:
            client = ApiClient(_configure(credentials, authorization, certificate, key))
        except (OSError, ValueError) as error:
            raise _unusable(credentials, error) from error
        with client:
            yield Cluster(
                client=client,
                credentials=credentials,
                authorization=authorization,
                namespace=namespace or credentials.namespace,
            )


def _configure(
    credentials: Credentials, authorization: Authorization, certificate: str | None, key: str | None
) -> Configuration:
    configuration = Configuration(
        host=credentials.server,
        ssl_ca_cert=credentials.ca_file or None,
        ca_cert_data=credentials.ca_data or None,
        verify_ssl=not credentials.is_insecure,
        cert_file=certificate,
        key_file=key,
        api_key={_BEARER: ""} if authorization.has_header else None,
        retries=False,
    )
    configuration.tls_server_name = credentials.tls_server_name or None
    if credentials.proxy_url:
        configuration.proxy = credentials.proxy_url

    def authorize(configuration: Configuration) -> None:
        configuration.api_key[_BEARER] = authorization.header()

    configuration.refresh_api_key_hook = authorize
    return configuration


def split_lines(chunks: Iterator[bytes]) -> Iterator[str]:
    """Yield the lines of a text that arrives in chunks; a last line without line break is a line.

    A carriage return ends a line too: with it, progress bars overwrite their line.
    """
    decode = io.IncrementalNewlineDecoder(codecs.getincrementaldecoder("utf-8")("replace"), translate=True).decode
    rest = ""
    for chunk in chunks:
        *lines, rest = (rest + decode(chunk)).split("\n")
        yield from lines
    if rest := rest + decode(b"", final=True):
        yield rest


def _name(item: Json) -> str:
    return str(item["metadata"]["name"])


def _names_an_object(error: ApiError) -> bool:
    # Without the CRD the path itself is unknown, and the answer names no object.
    return bool(error.details.get("name"))


def _not_installed() -> PluginError:
    text = f"the cluster does not know {PLURAL}.{GROUP}: install the CRD (crds/elastictrainingjobs.yaml, or the chart)"
    return PluginError(Exit.NOT_INSTALLED, text)


def _unusable(credentials: Credentials, error: Exception) -> PluginError:
    text = f"credentials of context {credentials.context} cannot be used: {error}"
    return PluginError(Exit.UNREACHABLE, text)


def _refusal(error: ApiError, what: str, context: str) -> PluginError:
    message = " ".join(error.message.split())
    if error.code == HTTPStatus.NOT_FOUND and f"/{GROUP}/" in error.path and not _names_an_object(error):
        return _not_installed()
    if error.code == HTTPStatus.FORBIDDEN:
        return PluginError(Exit.REFUSED, f"you may not {what}: {message}")
    if error.code == HTTPStatus.UNAUTHORIZED:
        text = f"the cluster does not accept the credentials of context {context}: {message}"
        return PluginError(Exit.UNREACHABLE, text)
    return PluginError(Exit.REFUSED, f"cannot {what}: {message}")
