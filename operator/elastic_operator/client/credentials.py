"""Address and credentials of an API server: kubeconfigs, service accounts, credential plugins.

`kubernetes.config` is not used. It logs the failure of a credential plugin and goes on without credentials, it does not
renew a token that was rejected, and it leaves private keys in temporary files (docs/adr/0003).
"""

from __future__ import annotations

import base64
import contextlib
import dataclasses
import json
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

SERVICE_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
"""Folder with the credentials of a pod's ServiceAccount."""

TOKEN_FILE_SECONDS = 60.0
"""Time after which a token file is read again: the kubelet replaces the file before its token expires."""

_FILES = {
    "clusters": ("cluster", ("certificate-authority",)),
    "users": ("user", ("client-certificate", "client-key", "tokenFile")),
    "contexts": ("context", ()),
}
_EXEC_GROUP = "client.authentication.k8s.io"
_EXEC_VERSIONS = [f"{_EXEC_GROUP}/{version}" for version in ("v1", "v1beta1", "v1alpha1")]

Document = Mapping[str, Any]


class CredentialsError(Exception):
    """A kubeconfig or a credential plugin cannot be used."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class CredentialPlugin:
    """A program that prints a token, as kubeconfigs name it under `exec`."""

    command: tuple[str, ...]
    environment: Mapping[str, str] = dataclasses.field(repr=False)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Credentials:
    """Address of an API server, and what to identify with. Empty fields are not used; data is PEM."""

    server: str
    context: str = "default"
    namespace: str = "default"
    ca_file: str = ""
    ca_data: str = ""
    is_insecure: bool = False
    tls_server_name: str = ""
    proxy_url: str = ""
    certificate_file: str = ""
    certificate_data: str = ""
    key_file: str = ""
    key_data: str = dataclasses.field(default="", repr=False)
    token: str = dataclasses.field(default="", repr=False)
    token_file: str = ""
    username: str = ""
    password: str = dataclasses.field(default="", repr=False)
    plugin: CredentialPlugin | None = None

    @contextlib.contextmanager
    def client_certificate(self) -> Iterator[tuple[str | None, str | None]]:
        """Yield the files of the client certificate and its key; files that were written for this are removed."""
        if not self.certificate_data and not self.key_data:
            yield self.certificate_file or None, self.key_file or None  # a pod may have no folder to write to
            return
        with tempfile.TemporaryDirectory() as folder:
            yield (
                _as_file(self.certificate_file, self.certificate_data, Path(folder, "tls.crt")),
                _as_file(self.key_file, self.key_data, Path(folder, "tls.key")),
            )


def service_account(environment: Mapping[str, str], folder: Path = SERVICE_ACCOUNT) -> Credentials:
    """Return the credentials of the pod that this process runs in.

    Raises:
        CredentialsError: this process does not run in a pod with a ServiceAccount.
    """
    try:
        host, port = environment["KUBERNETES_SERVICE_HOST"], environment["KUBERNETES_SERVICE_PORT"]
        namespace = (folder / "namespace").read_text(encoding="utf-8").strip()
    except (KeyError, OSError) as error:
        raise CredentialsError(f"expected a pod with a ServiceAccount, found no {error}") from error
    return Credentials(
        server=f"https://[{host}]:{port}" if ":" in host else f"https://{host}:{port}",
        namespace=namespace,
        ca_file=str(folder / "ca.crt"),
        token_file=str(folder / "token"),
    )


def read_kubeconfig(paths: Sequence[Path], context: str | None, environment: Mapping[str, str]) -> Credentials:
    """Read the credentials of a context from one or several kubeconfigs.

    Args:
        paths: files; of entries with the same name the first one is used.
        context: name of the context; None for the current one.
        environment: environment variables that a credential plugin gets.

    Raises:
        CredentialsError: a file or the context cannot be used.
    """
    try:
        document = merge_documents([_read_document(path) for path in paths])
        return _select(document, context, environment)
    except KeyError as error:
        raise CredentialsError(f"no entry {error}") from error
    except (AttributeError, OSError, TypeError, ValueError, yaml.YAMLError) as error:
        raise CredentialsError(" ".join(str(error).split())) from error


def _select(document: Document, context: str | None, environment: Mapping[str, str]) -> Credentials:
    name = context or document["current-context"]
    if not name:
        raise CredentialsError("no current context is set")
    contexts, clusters, users = (
        {item["name"]: item[_FILES[kind][0]] for item in document[kind]} for kind in ("contexts", "clusters", "users")
    )
    if name not in contexts:
        raise CredentialsError(f"Context '{name}' not found")
    place = contexts[name]
    cluster, user = clusters[place["cluster"]], users[place["user"]] if place.get("user") else {}
    if user.get("auth-provider"):
        raise CredentialsError("auth-provider is not supported: use a credential plugin (exec)")
    return Credentials(
        server=_text(cluster, "server").rstrip("/") or "http://localhost:8080",
        context=name,
        namespace=_text(place, "namespace") or "default",
        ca_file=_text(cluster, "certificate-authority"),
        ca_data=_data(cluster, "certificate-authority-data"),
        is_insecure=bool(cluster.get("insecure-skip-tls-verify")),
        tls_server_name=_text(cluster, "tls-server-name"),
        proxy_url=_text(cluster, "proxy-url"),
        certificate_file=_text(user, "client-certificate"),
        certificate_data=_data(user, "client-certificate-data"),
        key_file=_text(user, "client-key"),
        key_data=_data(user, "client-key-data"),
        token=_text(user, "token"),
        token_file=_text(user, "tokenFile"),
        username=_text(user, "username"),
        password=_text(user, "password"),
        plugin=_plugin(user["exec"], environment) if user.get("exec") else None,
    )


def merge_documents(documents: Sequence[Document]) -> dict[str, Any]:
    """Merge several kubeconfigs as kubectl does: of entries with the same name the first one is used."""
    merged: dict[str, Any] = {}
    for kind in _FILES:
        named: dict[str, Any] = {}
        for document in documents:
            for item in document.get(kind) or ():
                named.setdefault(item["name"], item)
        merged[kind] = list(named.values())
    current = next((document["current-context"] for document in documents if document.get("current-context")), None)
    return {**merged, "current-context": current}


class Authorization:
    """The `Authorization` header of one user. Token files are read again, and plugins run again, when needed."""

    def __init__(self, credentials: Credentials) -> None:
        self._credentials = credentials
        self._header = ""
        self._read_time = 0.0

    @property
    def has_header(self) -> bool:
        """True if the user identifies with this header, and not with a client certificate only."""
        user = self._credentials
        return bool(user.token_file or user.token or user.plugin or (user.username and user.password))

    @property
    def is_slow(self) -> bool:
        """True if `header` will run a credential plugin."""
        user = self._credentials
        return bool(user.plugin) and not (self._header or user.token or user.token_file)

    def header(self) -> str:
        """Return the value of the header; empty for users without token and password.

        Raises:
            CredentialsError: the token cannot be read.
        """
        user = self._credentials
        is_outdated = bool(user.token_file) and time.monotonic() - self._read_time > TOKEN_FILE_SECONDS
        if not self._header:
            self._header, self._read_time = _read_authorization(user), time.monotonic()
        elif is_outdated:
            # If the file cannot be read now, the API server decides whether the known token is still valid.
            with contextlib.suppress(CredentialsError):
                self._header, self._read_time = _read_authorization(user), time.monotonic()
        return self._header

    def expire(self, rejected: str) -> bool:
        """Drop a header that the API server rejected; return False if the next one will be the same.

        Args:
            rejected: the header of the rejected request. Another request may have led to a new one meanwhile.
        """
        user = self._credentials
        if not user.token_file and (user.token or not user.plugin):
            return False
        if self._header == rejected:
            self._header = ""
        return True


def _read_authorization(user: Credentials) -> str:
    if user.token_file:
        try:
            return f"Bearer {Path(user.token_file).read_text(encoding='utf-8').strip()}"
        except OSError as error:
            raise CredentialsError(f"token file {user.token_file}: {error.strerror or error}") from error
    if user.token:
        return f"Bearer {user.token}"
    if user.plugin is not None:
        return f"Bearer {_run_plugin(user.plugin)}"
    if user.username and user.password:
        return "Basic " + base64.b64encode(f"{user.username}:{user.password}".encode()).decode()
    return ""


def _run_plugin(plugin: CredentialPlugin) -> str:
    """Run a credential plugin and return the token that it prints."""
    name = plugin.command[0]
    try:
        done = subprocess.run(plugin.command, env=plugin.environment, capture_output=True, check=False)
    except OSError as error:
        raise CredentialsError(f"credential plugin {name}: {error.strerror or error}") from error
    if done.returncode != 0:
        text = done.stderr.decode(errors="replace").strip()
        raise CredentialsError(f"credential plugin {name} returned {done.returncode}: {text}")
    try:
        return str(json.loads(done.stdout)["status"]["token"])
    except (ValueError, KeyError, TypeError) as error:
        raise CredentialsError(f"credential plugin {name}: expected an ExecCredential with a token") from error


def _plugin(section: Document, environment: Mapping[str, str]) -> CredentialPlugin:
    version = _text(section, "apiVersion")
    if version not in _EXEC_VERSIONS:
        raise CredentialsError(f"exec: expected apiVersion {', '.join(_EXEC_VERSIONS)}, found {version or 'none'}")
    info = {"apiVersion": version, "kind": "ExecCredential", "spec": {"interactive": False}}
    variables = {_text(item, "name"): _text(item, "value") for item in section.get("env") or ()}
    return CredentialPlugin(
        command=(str(section["command"]), *map(str, section.get("args") or ())),
        environment={**environment, **variables, "KUBERNETES_EXEC_INFO": json.dumps(info)},
    )


def _read_document(path: Path) -> dict[str, Any]:
    """Read one kubeconfig, and make the paths in it absolute."""
    document = yaml.safe_load(path.read_text(encoding="utf-8")) or {}
    if not isinstance(document, dict):
        raise ValueError(f"{path} holds a {type(document).__name__}, expected a mapping")
    for kind, (inner, names) in _FILES.items():
        for item in document.get(kind) or ():
            body = item.get(inner) or {}
            body |= {name: str(path.parent.absolute() / body[name]) for name in names if body.get(name)}
            item[inner] = body
    return document


def _text(section: Document, key: str) -> str:
    value = section.get(key)
    if value is not None and not isinstance(value, str):
        raise CredentialsError(f"{key}: expected a string, found {value!r}")
    return value or ""


def _data(section: Document, key: str) -> str:
    """Decode a field that holds a PEM file in base64."""
    try:
        return base64.b64decode(_text(section, key)).decode("ascii")
    except ValueError as error:
        raise CredentialsError(f"{key}: expected PEM data in base64") from error


def _as_file(name: str, data: str, target: Path) -> str | None:
    if data:
        target.touch(mode=0o600)
        target.write_text(data, encoding="ascii")
        return str(target)
    return name or None
