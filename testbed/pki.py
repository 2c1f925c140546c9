"""Keys, certificates and kubeconfigs of the cluster. Made anew at every `up`; they are good for 30 days."""

from __future__ import annotations

import base64
import datetime
import ipaddress
import json
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from testbed.paths import CONTROL_PLANE_ADDRESS, KUBERNETES_SERVICE_ADDRESS

_SERVER = f"https://{CONTROL_PLANE_ADDRESS}:443"
_VALID = datetime.timedelta(days=30)


class Authority:
    """The cluster's certificate authority; issues everything else into `folder`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = _name("etj-testbed-ca", "")
        self._certificate = (
            _builder(self._name, self._name, self._key.public_key())
            .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
            .sign(self._key, hashes.SHA256())
        )
        (folder / "ca.crt").write_bytes(_pem(self._certificate))
        account = rsa.generate_private_key(public_exponent=65537, key_size=2048)
        (folder / "sa.key").write_bytes(_private_pem(account))
        (folder / "sa.pub").write_bytes(
            account.public_key().public_bytes(
                serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
            )
        )

    def issue(self, file: str, *, common_name: str, organization: str = "", server: bool = False) -> tuple[Path, Path]:
        """Issue a certificate; returns its file and its key's."""
        key = ec.generate_private_key(ec.SECP256R1())
        usages = [ExtendedKeyUsageOID.CLIENT_AUTH] + ([ExtendedKeyUsageOID.SERVER_AUTH] if server else [])
        builder = _builder(_name(common_name, organization), self._name, key.public_key()).add_extension(
            x509.ExtendedKeyUsage(usages), critical=False
        )
        if server:
            builder = builder.add_extension(x509.SubjectAlternativeName(_server_names()), critical=False)
        certificate, key_file = self.folder / f"{file}.crt", self.folder / f"{file}.key"
        certificate.write_bytes(_pem(builder.sign(self._key, hashes.SHA256())))
        key_file.write_bytes(_private_pem(key))
        key_file.chmod(0o600)
        return certificate, key_file

    def kubeconfig(self, path: Path, *, common_name: str, organization: str = "", server: str = _SERVER) -> None:
        """Write a kubeconfig for a new client certificate; `server` is the API server's URL."""
        certificate, key = self.issue(
            f"client-{path.stem}-{path.parent.name}", common_name=common_name, organization=organization
        )
        document = {
            "apiVersion": "v1",
            "kind": "Config",
            "current-context": "testbed",
            "clusters": [
                {
                    "name": "testbed",
                    "cluster": {
                        "server": server,
                        "certificate-authority-data": _base64(self.folder / "ca.crt"),
                    },
                }
            ],
            "users": [
                {
                    "name": "testbed",
                    "user": {"client-certificate-data": _base64(certificate), "client-key-data": _base64(key)},
                }
            ],
            "contexts": [{"name": "testbed", "context": {"cluster": "testbed", "user": "testbed"}}],
        }
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(document, indent=1))
        path.chmod(0o600)


def _server_names() -> list[x509.GeneralName]:
    addresses = (CONTROL_PLANE_ADDRESS, KUBERNETES_SERVICE_ADDRESS, "127.0.0.1")
    names = (
        "localhost",
        "kubernetes",
        "kubernetes.default",
        "kubernetes.default.svc",
        "kubernetes.default.svc.cluster.local",
    )
    return [
        *(x509.IPAddress(ipaddress.ip_address(address)) for address in addresses),
        *(x509.DNSName(name) for name in names),
    ]


def _name(common_name: str, organization: str) -> x509.Name:
    parts = [x509.NameAttribute(NameOID.COMMON_NAME, common_name)]
    if organization:
        parts.append(x509.NameAttribute(NameOID.ORGANIZATION_NAME, organization))
    return x509.Name(parts)


def _builder(subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePublicKey) -> x509.CertificateBuilder:
    now = datetime.datetime.now(datetime.UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(minutes=5))
        .not_valid_after(now + _VALID)
    )


def _pem(certificate: x509.Certificate) -> bytes:
    return certificate.public_bytes(serialization.Encoding.PEM)


def _private_pem(key: ec.EllipticCurvePrivateKey | rsa.RSAPrivateKey) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.TraditionalOpenSSL, serialization.NoEncryption()
    )


def _base64(path: Path) -> str:
    return base64.b64encode(path.read_bytes()).decode()
