"""Requests to the API server with the official client: plain objects in and out, one error type for each failure.

Only the generic methods of `kubernetes.aio` are used. The generated methods and models would make the start half a
second slower, and would decode all objects into models that nobody needs (docs/adr/0003).
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
from collections.abc import AsyncIterator, Mapping
from http import HTTPStatus
from typing import Any

import aiohttp
from kubernetes.aio.client.api_client import ApiClient
from kubernetes.aio.client.configuration import Configuration
from kubernetes.aio.client.rest import RESTResponse

from elastic_operator.client.api_errors import RequestError, make_error
from elastic_operator.client.credentials import Authorization, Credentials, CredentialsError
from elastic_operator.client.resources import CHUNK, MERGE_PATCH, YAML, ResourceKind, make_selectors

CONNECT_SECONDS = 10.0
READ_SECONDS = 10.0

MAX_CONNECTIONS = 100

_BEARER = "BearerToken"
"""Name that the client gives to the `Authorization` header."""

_JSON = "application/json"
_USER_AGENT = "elastic-training-operator"

_KEEPALIVE = [
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 10),
    (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 5),
    (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 2),
    (socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 20_000),
]
"""Keepalive options: a server without power sends nothing, and the kernel closes the connection after 20 s."""

Object = dict[str, Any]


class KubernetesClient:
    """A client of one API server. It has to be created in the event loop that uses it, and to be closed there.

    Every method raises `ApiError` if the API server rejects the request, and `RequestError` if it cannot be reached.

    Args:
        credentials: address and credentials. The environment's proxies are not used.
        max_connections: maximum number of open connections; 0 for no limit.
        read_seconds: maximum time without a byte of an answer, where a request sets no other.
    """

    def __init__(
        self,
        credentials: Credentials,
        *,
        max_connections: int = MAX_CONNECTIONS,
        read_seconds: float = READ_SECONDS,
    ) -> None:
        self._read_seconds = read_seconds
        self._authorization = Authorization(credentials)
        self._authorizing = asyncio.Lock()
        configuration = Configuration(
            host=credentials.server,
            ssl_ca_cert=credentials.ca_file or None,
            ca_cert_data=credentials.ca_data or None,
            verify_ssl=not credentials.is_insecure,
            tls_server_name=credentials.tls_server_name or None,
            proxy=credentials.proxy_url or None,
            # The client calls the hook for a header only if it knows the header.
            api_key={_BEARER: ""} if self._authorization.has_header else None,
        )
        configuration.refresh_api_key_hook = self._authorize
        with credentials.client_certificate() as (configuration.cert_file, configuration.key_file):
            self._client = ApiClient(configuration)
        self._client.user_agent = _USER_AGENT
        # Inside one network, compressing costs the API server more than sending.
        self._client.set_default_header("Accept-Encoding", "identity")
        self._connector = aiohttp.TCPConnector(
            limit=max_connections, ssl=self._client.rest_client.ssl_context, socket_factory=_make_socket
        )
        configuration.client_session_kwargs = {
            "connector": self._connector,
            "trust_env": False,
            "cookie_jar": aiohttp.DummyCookieJar(),
        }

    async def close(self) -> None:
        """Close all connections."""
        await self._client.close()
        await self._connector.close()

    async def get(self, kind: ResourceKind, name: str, *, namespace: str = "") -> Object:
        """Read one object."""
        return await self._request("GET", kind.path(namespace, name))

    async def list_objects(
        self, kind: ResourceKind, *, namespace: str = "", labels: str = "", fields: str = ""
    ) -> AsyncIterator[Object]:
        """Yield the objects of a collection; they are read in chunks, because raw objects need much memory."""
        async for items, _ in self.pages(kind.path(namespace), make_selectors(labels, fields)):
            for item in items:
                yield item

    async def pages(
        self, path: str, params: Mapping[str, str], *, read_seconds: float | None = None
    ) -> AsyncIterator[tuple[list[Object], str]]:
        """Yield the objects of a collection in chunks, each with the version of the collection.

        Args:
            path: path of the collection.
            params: query parameters of the request: the selectors.
            read_seconds: maximum time without a byte of the answer; None for that of the client.
        """
        params = {**params, "limit": str(CHUNK)}
        while True:
            page = await self._request("GET", path, params, read_seconds=read_seconds)
            meta = page["metadata"]
            yield page.get("items") or [], meta.get("resourceVersion") or ""
            if not meta.get("continue"):
                return
            params["continue"] = meta["continue"]

    async def create(
        self, kind: ResourceKind, body: Mapping[str, Any], *, is_compact: bool = False, **params: str
    ) -> Object:
        """Create an object; return it as it is stored.

        Args:
            kind: kind of the object.
            body: manifest with name and namespace.
            is_compact: send no space outside of strings; the official client can do so only in a text that is not JSON.
            params: query parameters, for instance `fieldManager`.
        """
        path = kind.path(_namespace(body))
        if is_compact:
            return await self._request("POST", path, params, json.dumps(body, separators=(",", ":")), content_type=YAML)
        return await self._request("POST", path, params, body)

    async def replace(
        self, kind: ResourceKind, body: Mapping[str, Any], *, subresource: str = "", **params: str
    ) -> Object:
        """Replace an object, or its subresource; return it as it is stored.

        The request is rejected if the object has another version than `body`.
        """
        path = kind.path(_namespace(body), body["metadata"]["name"], subresource)
        return await self._request("PUT", path, params, {"apiVersion": _api_version(kind), "kind": kind.kind, **body})

    async def patch(
        self,
        kind: ResourceKind,
        name: str,
        changes: Mapping[str, Any],
        *,
        namespace: str = "",
        subresource: str = "",
        **params: str,
    ) -> Object:
        """Merge changes into an object, or its subresource; return it as it is stored."""
        path = kind.path(namespace, name, subresource)
        return await self._request("PATCH", path, params, changes, content_type=MERGE_PATCH)

    async def delete(self, kind: ResourceKind, name: str, *, namespace: str = "", **options: Any) -> None:
        """Delete an object.

        Args:
            kind: kind of the object.
            name: name of the object.
            namespace: its namespace.
            options: fields of the `DeleteOptions`, for instance `preconditions`.
        """
        body = {"apiVersion": "v1", "kind": "DeleteOptions", **options}
        await self._request("DELETE", kind.path(namespace, name), body=body)

    @contextlib.asynccontextmanager
    async def stream(
        self, path: str, params: Mapping[str, str], *, read_seconds: float
    ) -> AsyncIterator[AsyncIterator[bytes]]:
        """Open an answer that does not end, and yield its bytes as they arrive.

        Args:
            path: path of the collection.
            params: query parameters.
            read_seconds: maximum time without a byte.
        """
        answer = await self._send("GET", path, params, read_seconds=read_seconds)
        try:
            if answer.status != HTTPStatus.OK:
                raise make_error(answer.status, path, await answer.read())
            yield answer.response.content.iter_any()
        except (aiohttp.ClientError, TimeoutError) as error:
            raise _request_error(error) from error
        finally:
            answer.response.close()

    async def _request(
        self,
        method: str,
        path: str,
        params: Mapping[str, str] | None = None,
        body: Mapping[str, Any] | str | None = None,
        *,
        content_type: str = _JSON,
        read_seconds: float | None = None,
    ) -> Object:
        seconds = self._read_seconds if read_seconds is None else read_seconds
        answer = await self._send(method, path, params, body, content_type=content_type, read_seconds=seconds)
        try:
            content = await answer.read()
        except (aiohttp.ClientError, TimeoutError) as error:
            raise _request_error(error) from error
        if not HTTPStatus.OK <= answer.status < HTTPStatus.MULTIPLE_CHOICES:
            raise make_error(answer.status, path, content)
        try:
            found: Object = json.loads(content)
        except ValueError as error:
            raise RequestError(f"{path}: expected JSON, found {content[:80]!r}") from error
        return found

    async def _send(
        self,
        method: str,
        path: str,
        params: Mapping[str, str] | None = None,
        body: Mapping[str, Any] | str | None = None,
        *,
        content_type: str = _JSON,
        read_seconds: float,
    ) -> RESTResponse:
        """Send a request; send it again with new credentials if the first ones have expired."""
        timeout = aiohttp.ClientTimeout(
            total=None, connect=CONNECT_SECONDS, sock_connect=CONNECT_SECONDS, sock_read=read_seconds
        )
        is_first = True
        while True:
            try:
                _, url, headers, data, _ = await self._client.param_serialize(
                    method,
                    f"/{path}",
                    query_params=params,
                    header_params={"Accept": _JSON, "Content-Type": content_type},
                    body=body,
                    auth_settings=[_BEARER],
                )
                answer = await self._client.call_api(method, url, headers, data, _request_timeout=timeout)
            except (aiohttp.ClientError, TimeoutError, CredentialsError) as error:
                raise _request_error(error) from error
            is_rejected = answer.status == HTTPStatus.UNAUTHORIZED
            if not (is_first and is_rejected and self._authorization.expire(headers.get("authorization", ""))):
                return answer
            is_first = False
            answer.response.release()

    async def _authorize(self, configuration: Configuration) -> None:
        """Set the `Authorization` header of a request; the client calls this before each one."""
        async with self._authorizing:
            if self._authorization.is_slow:
                configuration.api_key[_BEARER] = await asyncio.to_thread(self._authorization.header)
            else:
                configuration.api_key[_BEARER] = self._authorization.header()


def _make_socket(address: tuple[Any, ...]) -> socket.socket:
    family, kind, protocol, *_ = address
    made = socket.socket(family, kind, protocol)
    for option in _KEEPALIVE:
        made.setsockopt(*option)
    return made


def _namespace(body: Mapping[str, Any]) -> str:
    return (body.get("metadata") or {}).get("namespace") or ""


def _api_version(kind: ResourceKind) -> str:
    return f"{kind.group}/{kind.version}" if kind.group else kind.version


def _request_error(error: Exception) -> RequestError:
    return RequestError(str(error) or type(error).__name__)
