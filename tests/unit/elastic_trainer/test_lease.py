"""The Lease mailbox against a small HTTPS server, and the heartbeat's behaviour when the API server misbehaves.

What a real API server does with the PATCH is tested in the cluster tier.
"""

import datetime
import http.server
import ipaddress
import json
import ssl
import threading
import time

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from elastic_trainer import heartbeat
from elastic_trainer.errors import ConfigurationError, FencedError
from elastic_trainer.heartbeat import Heartbeat
from elastic_trainer.lease import LeaseMailbox
from reshard.contract import LeaseKey


class Api(http.server.BaseHTTPRequestHandler):
    """One Lease under a merge patch."""

    def do_GET(self):
        state = self.server.state
        self.send_response(state["status"])
        self.end_headers()
        metadata = {"uid": state["uid"], "ownerReferences": [{"uid": state["owner"]}]}
        self.wfile.write(json.dumps({"metadata": {**metadata, "annotations": state["annotations"]}}).encode())

    def do_PATCH(self):
        state = self.server.state
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        state["seen"].append((self.path, dict(self.headers), body))
        state["annotations"] |= body["metadata"]["annotations"]
        answer = state["answer"]
        if answer is None:
            answer = json.dumps({"metadata": {"annotations": state["annotations"]}}).encode()
        self.send_response(state["status"])
        self.end_headers()
        self.wfile.write(answer)

    def log_message(self, *_arguments):
        pass


@pytest.fixture
def account(tmp_path):
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "api")])
    now = datetime.datetime.now(datetime.UTC)
    certificate = (
        x509.CertificateBuilder(name, name, key.public_key(), 1, now, now + datetime.timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    (tmp_path / "ca.crt").write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
    (tmp_path / "key.pem").write_bytes(
        key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    )
    (tmp_path / "token").write_text("first-token\n")
    return tmp_path


@pytest.fixture
def server(account):
    server = http.server.HTTPServer(("127.0.0.1", 0), Api)
    server.state = {"seen": [], "annotations": {}, "status": 200, "answer": None, "uid": "lease-1", "owner": "job-1"}
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(account / "ca.crt", account / "key.pem")
    server.socket = context.wrap_socket(server.socket, server_side=True)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture
def lease(server, account):
    return LeaseMailbox(
        namespace="team", name="gpt-a3", holder="pod-0", server=("127.0.0.1", server.server_port), account=account
    )


def test_one_patch_renews_writes_and_brings_back_requests(server, lease):
    server.state["annotations"] = {LeaseKey.REQUEST: "drain"}
    found = lease.exchange({LeaseKey.STEP: "12"})
    assert found == {LeaseKey.REQUEST: "drain", LeaseKey.STEP: "12"}
    path, headers, body = server.state["seen"][0]
    assert path == "/apis/coordination.k8s.io/v1/namespaces/team/leases/gpt-a3"
    assert headers["Authorization"] == "Bearer first-token"
    assert headers["Content-Type"] == "application/merge-patch+json"
    assert body["spec"]["holderIdentity"] == "pod-0"
    assert datetime.datetime.fromisoformat(body["spec"]["renewTime"]).tzinfo is not None


def test_reading_renews_nothing_and_tells_whether_the_attempt_is_over(server, account):
    address = ("127.0.0.1", server.server_port)
    lease = LeaseMailbox(
        namespace="team", name="gpt-a3", holder="pod-1", server=address, account=account, owner_uid="job-1"
    )
    server.state["annotations"] = {LeaseKey.REQUEST: "stop"}
    assert lease.read() == {LeaseKey.REQUEST: "stop"}
    assert server.state["seen"] == []
    server.state["owner"] = "job-2"
    with pytest.raises(FencedError):
        lease.read()
    server.state |= {"owner": "job-1", "status": 404}
    with pytest.raises(FencedError):
        lease.read()
    server.state["status"] = 500
    with pytest.raises(OSError, match="500"):
        lease.read()


def test_a_rotated_token_is_used_at_once(server, lease, account):
    lease.exchange({})
    (account / "token").write_text("second-token")
    lease.exchange({})
    assert [headers["Authorization"] for _, headers, _ in server.state["seen"]] == [
        "Bearer first-token",
        "Bearer second-token",
    ]


@pytest.mark.parametrize("status", [401, 403, 404])
def test_a_lease_that_is_gone_or_forbidden_means_fenced(server, lease, status):
    server.state["status"] = status
    with pytest.raises(FencedError, match=f"gpt-a3: {status}"):
        lease.exchange({})


def test_the_lease_of_another_job_of_the_same_name_is_never_written(server, account):
    place = {"namespace": "team", "name": "gpt-a1", "holder": "pod-0", "server": ("127.0.0.1", server.server_port)}
    own = LeaseMailbox(**place, account=account, owner_uid="job-1")
    own.exchange({LeaseKey.STEP: "1"})
    assert server.state["seen"][0][2]["metadata"]["uid"] == "lease-1"
    for status in (409, 422):  # a patch with another UID: "uid: field is immutable"
        server.state["status"] = status
        with pytest.raises(FencedError, match=f"gpt-a1: {status}"):
            own.exchange({LeaseKey.STEP: "2"})
    server.state |= {"status": 200, "seen": []}
    with pytest.raises(FencedError, match="expected owner job-0"):
        LeaseMailbox(**place, account=account, owner_uid="job-0").exchange({LeaseKey.STEP: "3"})
    assert server.state["seen"] == []


@pytest.mark.parametrize(("status", "answer"), [(500, b""), (429, b"{}"), (200, b"<html>"), (200, b"[]"), (200, b"{}")])
def test_anything_else_is_a_passing_trouble(server, lease, status, answer):
    server.state |= {"status": status, "answer": answer}
    with pytest.raises(OSError, match="Lease"):
        lease.exchange({})


def test_a_server_that_is_not_there_is_a_passing_trouble(account):
    nobody = LeaseMailbox(namespace="n", name="l", holder="h", server=("127.0.0.1", 1), account=account)
    with pytest.raises(OSError, match="refused"):
        nobody.exchange({})


def test_a_pod_without_a_service_account_is_told_so(tmp_path):
    with pytest.raises(ConfigurationError, match="automountServiceAccountToken"):
        LeaseMailbox(namespace="n", name="l", holder="h", server=("127.0.0.1", 1), account=tmp_path)


class Script:
    """A mailbox that raises the given errors, then works."""

    def __init__(self, *errors):
        self.errors = list(errors)
        self.written = {}

    def exchange(self, annotations):
        if self.errors:
            raise self.errors.pop(0)
        self.written |= annotations
        return self.written


def until(condition):
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_the_heartbeat_survives_an_absent_api_server():
    box = Script(OSError("refused"), OSError("timed out"))
    beat = Heartbeat(box, every_seconds=0.01, on_fenced=pytest.fail)
    beat.update({LeaseKey.STEP: "1"})
    beat.start()
    until(lambda: box.written)
    beat.stop()
    assert box.written == {LeaseKey.STEP: "1"}


def test_the_last_words_are_written_even_if_the_first_try_fails(monkeypatch):
    monkeypatch.setattr(heartbeat, "LAST_BEAT_PAUSE_SECONDS", 0.01)
    box = Script()
    beat = Heartbeat(box, every_seconds=60, on_fenced=pytest.fail)
    beat.start()
    beat.flush()
    box.errors = [OSError("refused"), OSError("refused")]
    beat.update({LeaseKey.PHASE: "Complete"})
    beat.stop()
    assert box.written[LeaseKey.PHASE] == "Complete"


def test_a_request_is_echoed():
    box = Script()
    box.written[LeaseKey.REQUEST] = "drain"
    beat = Heartbeat(box, every_seconds=60, on_fenced=pytest.fail)
    beat.start()
    until(lambda: box.written.get(LeaseKey.REQUEST_SEEN) == "drain")
    assert beat.request == "drain"
    beat.stop()


@pytest.mark.parametrize(("grace_seconds", "fenced"), [(0.0, True), (3600.0, False)])
def test_a_refused_lease_ends_training_only_after_its_grace(monkeypatch, grace_seconds, fenced):
    monkeypatch.setattr(heartbeat, "FENCED_AFTER_SECONDS", grace_seconds)
    monkeypatch.setattr(heartbeat, "LAST_BEAT_PAUSE_SECONDS", 0.0)
    reasons = []
    box = Script(*[FencedError("Lease gpt-a3: 404 Not Found")] * 5)
    beat = Heartbeat(box, every_seconds=0.01, on_fenced=reasons.append)
    beat.start()
    until(lambda: not box.errors or reasons)
    beat.stop()
    assert reasons == (["Lease gpt-a3: 404 Not Found"] if fenced else [])
