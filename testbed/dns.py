"""Cluster DNS: answers from the API server's Services and EndpointSlices at the moment of the question.

Only what pods of a test bed need: A records of Services and of named pods behind headless Services
(`<hostname>.<service>.<namespace>.svc.cluster.local`, Kubernetes DNS specification 1.1.0, section 2.4), no cache, so
that a pod is found as soon as its EndpointSlice names it. Everything else does not exist.
"""

from __future__ import annotations

import base64
import http.client
import json
import socket
import ssl
import struct
import sys
import tempfile
import threading
from pathlib import Path
from typing import Any

_DOMAIN = "svc.cluster.local"
_TTL_SECONDS = 1
_TYPE_A, _TYPE_AAAA = 1, 28
_NO_ERROR, _SERVER_FAILURE, _NAME_ERROR = 0, 2, 3


class Api:
    """Reads from the API server with the kubeconfig's client certificate."""

    def __init__(self, kubeconfig: Path) -> None:
        document = json.loads(kubeconfig.read_text())
        cluster, user = document["clusters"][0]["cluster"], document["users"][0]["user"]
        self._address = cluster["server"].removeprefix("https://").rsplit(":", 1)
        self._context = ssl.create_default_context(
            cadata=base64.b64decode(cluster["certificate-authority-data"]).decode()
        )
        with tempfile.NamedTemporaryFile() as pem:
            pem.write(base64.b64decode(user["client-certificate-data"]))
            pem.write(base64.b64decode(user["client-key-data"]))
            pem.flush()
            self._context.load_cert_chain(pem.name)

    def get(self, path: str) -> dict[str, Any] | None:
        """One object or list; None where there is none."""
        connection = http.client.HTTPSConnection(
            self._address[0], int(self._address[1]), context=self._context, timeout=2
        )
        try:
            connection.request("GET", path)
            answer = connection.getresponse()
            body = answer.read()
        finally:
            connection.close()
        if answer.status == http.HTTPStatus.NOT_FOUND:
            return None
        if answer.status != http.HTTPStatus.OK:
            raise OSError(f"{path}: {answer.status}")
        value: dict[str, Any] = json.loads(body)
        return value


def addresses(api: Api, name: str) -> list[str] | None:
    """IPv4 addresses of a name; None where it does not exist."""
    if not name.endswith("." + _DOMAIN):
        return None
    labels = name.removesuffix("." + _DOMAIN).split(".")
    if len(labels) not in (2, 3):
        return None
    hostname = labels[0] if len(labels) == 3 else None
    service, namespace = labels[-2:]
    found = api.get(f"/api/v1/namespaces/{namespace}/services/{service}")
    if found is None:
        return None
    if found["spec"].get("clusterIP") not in (None, "None"):
        return [found["spec"]["clusterIP"]] if hostname is None else None
    slices = api.get(
        f"/apis/discovery.k8s.io/v1/namespaces/{namespace}/endpointslices?labelSelector=kubernetes.io/service-name%3D{service}"
    )
    return (
        sorted(
            address
            for part in (slices or {}).get("items", [])
            for endpoint in part.get("endpoints") or []
            if endpoint.get("conditions", {}).get("ready") is not False and hostname in (None, endpoint.get("hostname"))
            for address in endpoint["addresses"]
        )
        or None
    )


def question(packet: bytes) -> tuple[str, int, int]:
    """Name, type and end offset of the first question (RFC 1035, section 4.1.2)."""
    labels, position = [], 12
    while length := packet[position]:
        labels.append(packet[position + 1 : position + 1 + length].decode("ascii"))
        position += 1 + length
    kind = struct.unpack_from(">H", packet, position + 1)[0]
    return ".".join(labels).lower(), kind, position + 5


def reply(packet: bytes, end: int, code: int, found: list[str]) -> bytes:
    """An answer to `packet` with A records (RFC 1035, section 4.1)."""
    identifier, flags = struct.unpack_from(">HH", packet)
    header = struct.pack(">HHHHHH", identifier, 0x8400 | flags & 0x0100 | 0x0080 | code, 1, len(found), 0, 0)
    records = b"".join(
        struct.pack(">HHHIH", 0xC00C, _TYPE_A, 1, _TTL_SECONDS, 4) + socket.inet_aton(address) for address in found
    )
    return header + packet[12:end] + records


def answer(api: Api, packet: bytes) -> bytes:
    """Answer one query; never raises for what the API server does."""
    name, kind, end = question(packet)
    try:
        found = addresses(api, name)
    except (OSError, ValueError, KeyError) as error:
        sys.stderr.write(f"dns: {name}: {type(error).__name__}: {error}\n")
        return reply(packet, end, _SERVER_FAILURE, [])
    if found is None:
        return reply(packet, end, _NAME_ERROR, [])
    return reply(packet, end, _NO_ERROR, found if kind == _TYPE_A else [])


def main() -> None:
    """Serve until killed: `python -m testbed.dns KUBECONFIG ADDRESS`."""
    api = Api(Path(sys.argv[1]))
    server = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    server.bind((sys.argv[2], 53))

    def serve(packet: bytes, client: tuple[str, int]) -> None:
        try:
            server.sendto(answer(api, packet), client)
        except (IndexError, struct.error, UnicodeDecodeError) as error:
            sys.stderr.write(f"dns: unreadable query: {error}\n")

    while True:
        packet, client = server.recvfrom(4096)
        threading.Thread(target=serve, args=(packet, client), daemon=True).start()


if __name__ == "__main__":
    main()
