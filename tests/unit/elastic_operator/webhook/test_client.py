"""What one request to a webhook comes to: statuses, redirects, hostile and absent receivers, certificates."""

from __future__ import annotations

import asyncio
import datetime
import email.utils
import ipaddress
import socket
import ssl
import time
from pathlib import Path

import pytest
from aiohttp import web
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from elastic_operator.webhook import client as module
from elastic_operator.webhook.client import MAX_RETRY_AFTER_SECONDS, Answer, WebhookClient, parse_retry_after
from tests.unit.elastic_operator.webhook.receiver import SECRET, Handler, Receiver, close, status


async def post(url: str) -> Answer:
    client = WebhookClient(url)
    try:
        return await client.post(b"{}", {"Content-Type": "application/json"})
    finally:
        await client.close()


def ask(*answers: Handler) -> tuple[Answer, Receiver]:
    receiver = Receiver(*answers)

    async def run() -> Answer:
        async with receiver.serving() as url:
            return await post(url)

    return asyncio.run(run()), receiver


@pytest.mark.parametrize(
    ("code", "is_success", "is_final"),
    [
        (200, True, True), (204, True, True), (400, False, True), (403, False, True), (404, False, True),
        (408, False, False), (410, False, True), (425, False, False), (429, False, False), (500, False, False),
        (502, False, False), (503, False, False),
    ],
)  # fmt: skip
def test_a_status_says_whether_another_try_helps(code: int, is_success: bool, is_final: bool) -> None:
    answer, receiver = ask(status(code))
    assert (answer.status, answer.is_success, answer.is_final) == (code, is_success, is_final)
    assert receiver.paths == [f"/services/{SECRET}"]


@pytest.mark.parametrize("code", [301, 302, 303, 307, 308])
def test_no_redirect_is_followed(code: int) -> None:
    answer, receiver = ask(status(code, Location="http://127.0.0.1:1/elsewhere"))
    assert (answer.status, answer.is_success, answer.is_final) == (code, False, True)
    assert receiver.num_requests == 1


def test_a_receiver_that_is_away_or_closes_the_connection_is_tried_again() -> None:
    with socket.create_server(("127.0.0.1", 0)) as unused:
        port = unused.getsockname()[1]
    away = asyncio.run(post(f"http://127.0.0.1:{port}/{SECRET}"))
    closed, _ = ask(close)
    for answer in (away, closed):
        assert (answer.status, answer.is_success, answer.is_final) == (None, False, False)
        assert answer.error and SECRET not in str(answer)


def test_a_slow_receiver_costs_no_more_than_the_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "REQUEST_SECONDS", 0.1)

    async def sleep(_: web.Request) -> web.Response:
        await asyncio.sleep(5)
        return web.Response()

    start = time.monotonic()
    answer, _ = ask(sleep)
    assert time.monotonic() - start < 3
    assert not answer.is_success and not answer.is_final and "Timeout" in answer.error


def test_an_answer_without_end_is_not_read_to_its_end() -> None:
    sent = 0

    async def flood(request: web.Request) -> web.StreamResponse:
        nonlocal sent
        response = web.StreamResponse()
        await response.prepare(request)
        while sent < 1 << 30:
            await response.write(b"x" * 65_536)
            sent += 65_536
        return response

    answer, _ = ask(flood)
    assert answer.is_success, "the status has said so"
    assert sent < 1 << 25


def test_an_answer_that_is_no_http_is_an_error() -> None:
    async def run() -> Answer:
        async def garble(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.readuntil(b"\r\n\r\n")
            writer.write(b"SSH-2.0-OpenSSH_9.2\r\n" * 3)
            await writer.drain()
            writer.close()

        server = await asyncio.start_server(garble, "127.0.0.1", 0)
        async with server:
            return await post(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/")

    answer = asyncio.run(run())
    assert answer.error and not answer.is_final


def self_signed(folder: Path) -> ssl.SSLContext:
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "127.0.0.1")])
    now = datetime.datetime.now(datetime.UTC)
    made = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(1)
        .not_valid_before(now - datetime.timedelta(hours=1))
        .not_valid_after(now + datetime.timedelta(hours=1))
        .add_extension(x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]), critical=False)
        .sign(key, hashes.SHA256())
    )
    plain = serialization.NoEncryption()
    (folder / "key.pem").write_bytes(
        key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, plain)
    )
    (folder / "cert.pem").write_bytes(made.public_bytes(serialization.Encoding.PEM))
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(folder / "cert.pem", folder / "key.pem")
    return context


def test_a_certificate_that_nobody_vouches_for_gets_nothing(tmp_path: Path) -> None:
    receiver = Receiver()

    async def run() -> Answer:
        async with receiver.serving(self_signed(tmp_path)) as url:
            return await post(url)

    answer = asyncio.run(run())
    assert (answer.error, answer.is_final) == ("ClientConnectorCertificateError", False)
    assert receiver.num_requests == 0


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        (None, None), ("", None), ("7", 7.0), (" 7 ", 7.0), ("0", 0.0), ("99999999", MAX_RETRY_AFTER_SECONDS),
        ("-1", None), ("1e9", None), ("nan", None), ("soon", None), ("9" * 100, None), ("٣", 3.0),
        ("Thu, 01 Jan 1970 00:00:00 GMT", 0.0), ("Thu, 01 Jan 9999 00:00:00 GMT", MAX_RETRY_AFTER_SECONDS),
        ("Thu, 99 Jan 1970 00:00:00 GMT", None),
    ],
)  # fmt: skip
def test_retry_after_is_read_with_bounds(text: str | None, seconds: float | None) -> None:
    assert parse_retry_after(text) == seconds


def test_retry_after_may_be_a_date() -> None:
    found = parse_retry_after(email.utils.formatdate(time.time() + 30, usegmt=True))
    assert found is not None and 28 < found <= 30
