"""Kubeconfigs, service accounts and credential plugins as kubectl understands them."""

from __future__ import annotations

import base64
import json
import ssl
from pathlib import Path
from typing import Any

import pytest
import yaml

from elastic_operator.client import credentials as module
from elastic_operator.client.credentials import (
    Authorization,
    Credentials,
    CredentialsError,
    read_kubeconfig,
    service_account,
)
from elastic_operator.cluster.handlers import make_connection

PEM = "-----BEGIN CERTIFICATE-----\nxyz\n-----END CERTIFICATE-----\n"


def encoded(text: str) -> str:
    return base64.b64encode(text.encode()).decode()


def write(path: Path, user: dict[str, Any], **cluster: Any) -> Path:
    document = {
        "clusters": [{"name": "c", "cluster": {"server": "https://api:6443/", **cluster}}],
        "users": [{"name": "u", "user": user}],
        "contexts": [{"name": "x", "context": {"cluster": "c", "user": "u", "namespace": "team"}}],
        "current-context": "x",
    }
    path.write_text(yaml.safe_dump(document))
    return path


def read(path: Path) -> Credentials:
    return read_kubeconfig([path], None, {"PATH": "/usr/bin:/bin"})


def test_a_kubeconfig_gives_address_certificates_and_namespace(tmp_path: Path) -> None:
    user = {"client-certificate": "me.crt", "client-key-data": encoded("key")}
    cluster = {
        "certificate-authority-data": encoded(PEM), "tls-server-name": "kubernetes", "proxy-url": "http://proxy:3128",
    }  # fmt: skip
    found = read(write(tmp_path / "config", user, **cluster))
    assert (found.server, found.namespace, found.context) == ("https://api:6443", "team", "x")
    assert (found.ca_data, found.tls_server_name, found.proxy_url) == (PEM, "kubernetes", "http://proxy:3128")
    with found.client_certificate() as (certificate, key):
        assert certificate == str(tmp_path / "me.crt")
        assert key is not None
        assert (Path(key).read_text(), Path(key).stat().st_mode & 0o777) == ("key", 0o600)
    assert not Path(key).exists(), "a private key stays on no disk"


def test_secrets_are_not_printed(tmp_path: Path) -> None:
    user = {"token": "secret-1", "password": "secret-2", "client-key-data": encoded("secret-3")}
    assert "secret" not in repr(read(write(tmp_path / "config", user)))


def test_kopf_gets_the_same_credentials(tmp_path: Path) -> None:
    connection = make_connection(
        read(write(tmp_path / "config", {"token": "t"}, **{"certificate-authority": "ca.crt"}))
    )
    assert (connection.server, connection.token, connection.ca_data) == ("https://api:6443", "t", None)
    assert str(connection.ca_path) == str(tmp_path / "ca.crt")
    data = make_connection(Credentials(server="https://api", ca_data=ssl_roots()))
    assert data.as_ssl_context().get_ca_certs()


def ssl_roots() -> str:
    """Any certificate in PEM."""
    context = ssl.create_default_context()
    return ssl.DER_cert_to_PEM_cert(context.get_ca_certs(binary_form=True)[0])


@pytest.mark.parametrize(
    ("user", "header"),
    [
        ({"token": "t"}, "Bearer t"),
        ({"username": "me", "password": "secret"}, f"Basic {encoded('me:secret')}"),
        ({"client-certificate": "me.crt"}, ""),
        ({"tokenFile": "token", "token": "other"}, "Bearer of-file"),
        (
            {"exec": {"apiVersion": "client.authentication.k8s.io/v1beta1", "command": "sh", "args": [
                "-c", 'echo "{\\"status\\": {\\"token\\": \\"$T\\"}}"'], "env": [{"name": "T", "value": "of-plugin"}]}},
            "Bearer of-plugin",
        ),
    ],
)  # fmt: skip
def test_users_identify_with_one_header(tmp_path: Path, user: dict[str, Any], header: str) -> None:
    (tmp_path / "token").write_text("of-file\n")
    found = Authorization(read(write(tmp_path / "config", user)))
    assert found.header() == header
    assert found.has_header == bool(header)


@pytest.mark.parametrize(
    ("user", "message"),
    [
        ({"auth-provider": {"name": "oidc"}}, "auth-provider is not supported"),
        ({"exec": {"apiVersion": "client.authentication.k8s.io/v9", "command": "x"}}, r"found client.authent.*v9"),
        ({"token": 5}, "token: expected a string, found 5"),
        ({"exec": {"apiVersion": "client.authentication.k8s.io/v1"}}, "no entry 'command'"),
        ("me", "expected|object|mapping|indices"),
        ({"client-key-data": "A"}, "client-key-data: expected PEM data in base64"),
    ],
)
def test_what_cannot_be_used_is_named(tmp_path: Path, user: Any, message: str) -> None:
    with pytest.raises(CredentialsError, match=message):
        read(write(tmp_path / "config", user))


@pytest.mark.parametrize(
    ("command", "message"),
    [
        (["absent-program"], "credential plugin absent-program: No such file"),
        (["sh", "-c", "echo no ticket >&2; exit 3"], "credential plugin sh returned 3: no ticket"),
        (["echo", "{}"], "expected an ExecCredential with a token"),
        (["echo", "hello"], "expected an ExecCredential with a token"),
    ],
)
def test_a_credential_plugin_that_fails_is_named(tmp_path: Path, command: list[str], message: str) -> None:
    section = {"apiVersion": "client.authentication.k8s.io/v1", "command": command[0], "args": command[1:]}
    user = Authorization(read(write(tmp_path / "config", {"exec": section})))
    with pytest.raises(CredentialsError, match=message):
        user.header()


def test_a_credential_plugin_runs_once_until_its_token_is_rejected(tmp_path: Path) -> None:
    count = tmp_path / "count"
    script = f"echo x >> {count}; " + 'echo "{\\"status\\": {\\"token\\": \\"$(wc -l < ' + str(count) + ')\\"}}"'
    section = {"apiVersion": "client.authentication.k8s.io/v1", "command": "sh", "args": ["-c", script]}
    user = Authorization(read(write(tmp_path / "config", {"exec": section})))
    assert user.is_slow
    assert [user.header(), user.header()] == ["Bearer 1", "Bearer 1"]
    assert not user.is_slow
    assert user.expire("Bearer 1")
    assert user.header() == "Bearer 2"
    assert user.expire("Bearer 1"), "another request has led to a new one meanwhile"
    assert user.header() == "Bearer 2"


def test_the_token_of_a_pod_is_read_again_from_its_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "namespace").write_text("home\n")
    (tmp_path / "token").write_text("first")
    environment = {"KUBERNETES_SERVICE_HOST": "fd00::1", "KUBERNETES_SERVICE_PORT": "443"}
    found = service_account(environment, tmp_path)
    assert (found.server, found.namespace, found.ca_file) == (
        "https://[fd00::1]:443", "home", str(tmp_path / "ca.crt")
    )  # fmt: skip
    user = Authorization(found)
    assert user.header() == "Bearer first"
    (tmp_path / "token").write_text("second")
    assert user.header() == "Bearer first"
    monkeypatch.setattr(module, "TOKEN_FILE_SECONDS", -1.0)
    assert user.header() == "Bearer second"
    (tmp_path / "token").unlink()
    assert user.header() == "Bearer second", "it may still be valid"
    assert user.expire("Bearer second")
    with pytest.raises(CredentialsError, match=r"token file .*token: No such file"):
        user.header()


def test_a_pod_needs_no_folder_to_write_to(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module.tempfile, "TemporaryDirectory", None)
    with Credentials(server="https://api", token_file="token").client_certificate() as files:
        assert files == (None, None)


def test_a_process_outside_of_a_pod_has_no_service_account(tmp_path: Path) -> None:
    with pytest.raises(CredentialsError, match="expected a pod with a ServiceAccount"):
        service_account({}, tmp_path)


def test_a_plugin_is_told_which_version_is_expected(tmp_path: Path) -> None:
    section = {"apiVersion": "client.authentication.k8s.io/v1", "command": "x"}
    plugin = read(write(tmp_path / "config", {"exec": section})).plugin
    assert plugin is not None
    assert json.loads(plugin.environment["KUBERNETES_EXEC_INFO"])["apiVersion"] == section["apiVersion"]
