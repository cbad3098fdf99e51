"""Certificates are renewed and keys withdrawn while everything runs."""

import base64
import socket
import ssl
import threading
from datetime import UTC, datetime, timedelta

import httpx
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import serialization
from starlette.testclient import TestClient
from typer.testing import CliRunner

from hfedatm.base.errors import UserError
from hfedatm.base.trust import revocation
from hfedatm.base.trust.enrolment import read_certificate
from hfedatm.cli.main import typer_app
from hfedatm.deploy import certificates, compose, flower, node_keys, renewal
from hfedatm.deploy.gateway import build
from hfedatm.deploy.live_tls import LiveCertificate
from hfedatm.deploy.registration import Registration

NAME = "station-1-client-2"


@pytest.fixture
def secrets(tmp_path):
    compose.write_secrets(tmp_path / "secrets", compose.Deployment(2, 2))
    return tmp_path / "secrets"


def serial(file):
    return x509.load_pem_x509_certificate(file.read_bytes()).serial_number


class Server:
    """A TLS server that shows the certificate in a folder of secrets."""

    def __init__(self, folder):
        self.context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self.context.load_cert_chain(folder / "link.pem", folder / "link.key")
        self.live = LiveCertificate(self.context, folder / "link.pem", folder / "link.key")

    def shown_to(self, ca):
        """Return the serial number that a client sees that trusts ``ca``."""
        near, far = socket.socketpair()

        def serve():
            try:
                self.context.wrap_socket(far, server_side=True).close()
            except OSError:
                far.close()

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            client = ssl.create_default_context(cafile=str(ca))
            with client.wrap_socket(near, server_hostname="localhost") as connection:
                der = connection.getpeercert(binary_form=True)
                return x509.load_der_x509_certificate(der).serial_number
        finally:
            near.close()
            thread.join()


# --- renewal


def test_only_what_ends_soon_is_renewed(secrets, monkeypatch):
    monkeypatch.setattr(certificates, "LIFETIME", timedelta(days=10))
    node = secrets / "station-1" / "node.pem"
    certificates.issue_node_certificate(secrets, node.parent, "station-1", "server", 0)
    monkeypatch.undo()
    assert list(renewal.renew(secrets, timedelta(days=60))) == [node]
    assert list(renewal.renew(secrets, timedelta(days=60))) == []
    found = read_certificate(node.read_bytes(), (secrets / "ca.pem").read_bytes())
    assert (found.name, found.above, found.place) == ("station-1", "server", 0)


def test_an_ended_certificate_is_renewed_with_its_key_and_names(secrets, monkeypatch):
    monkeypatch.setattr(certificates, "LIFETIME", timedelta(seconds=-1))
    folder = secrets / "station-1"
    hosts = certificates.hosts_of(folder / "link.pem")
    certificates.make_link_certificate(secrets, folder, hosts)
    certificates.issue_node_certificate(secrets, folder, "station-1", "server", 0)
    key = (folder / "node").read_bytes()
    monkeypatch.undo()
    assert set(renewal.renew(secrets, timedelta(0))) == {folder / "link.pem", folder / "node.pem"}
    assert (folder / "node").read_bytes() == key
    assert certificates.hosts_of(folder / "link.pem") == hosts
    assert read_certificate((folder / "node.pem").read_bytes(), (folder / "ca.pem").read_bytes())


def test_old_and_new_authority_trust_both_generations(secrets, tmp_path):
    """Machines get their renewed files one after the other, so every mixture must work."""
    old = tmp_path / "old.pem"
    old.write_bytes((secrets / "ca.pem").read_bytes())
    server = Server(secrets / "server")
    before = serial(secrets / "server" / "link.pem")
    changed = list(renewal.renew(secrets, timedelta(days=10_000)))
    assert secrets / "ca.pem" in changed and secrets / NAME / "ca.pem" in changed
    assert (secrets / "ca.pem").read_bytes() != old.read_bytes()
    ends = x509.load_pem_x509_certificate((secrets / "ca.pem").read_bytes()).not_valid_after_utc
    assert ends - datetime.now(UTC) > timedelta(days=3000)
    for ca in (old, secrets / "ca.pem"):
        assert server.shown_to(ca) == before
    assert server.live.look()
    for ca in (old, secrets / "ca.pem"):
        assert server.shown_to(ca) == serial(secrets / "server" / "link.pem") != before
        read_certificate((secrets / NAME / "node.pem").read_bytes(), ca.read_bytes())


def test_a_running_server_takes_only_a_pair_that_fits(secrets, tmp_path, caplog):
    folder = secrets / "server"
    server = Server(folder)
    before = serial(folder / "link.pem")
    assert not server.live.look()
    key = (folder / "link.key").read_bytes()
    certificates.make_link_certificate(secrets, folder, ["localhost"])
    new_key = (folder / "link.key").read_bytes()
    (folder / "link.key").write_bytes(key)  # the certificate is here, its key is on its way
    assert not server.live.look() and "cannot be used yet" in caplog.text
    assert server.shown_to(secrets / "ca.pem") == before
    (folder / "link.key").write_bytes(new_key)
    assert server.live.look()
    assert server.shown_to(secrets / "ca.pem") == serial(folder / "link.pem") != before


def test_renewal_needs_the_authority(secrets):
    (secrets / "ca.key").unlink()
    with pytest.raises(UserError, match="authority's key is not here"):
        list(renewal.renew(secrets, timedelta(0)))


# --- revocation and replacement


def header(secrets, name):
    key = read_certificate(
        (secrets / name / "node.pem").read_bytes(), (secrets / "ca.pem").read_bytes()
    ).key
    pem = key.public_bytes(
        serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
    )
    return {"flwr-public-key": base64.b64encode(pem).decode()}


def test_the_gateway_refuses_a_revoked_key_from_the_next_request_on(secrets):
    """The upstream does not exist: 502 means that the request was passed on."""
    gateway = build("http://127.0.0.1:9", secrets=secrets / "station-1")
    old = header(secrets, NAME)
    with TestClient(gateway) as node:
        ask = "/v1/fleet/pull-messages"
        assert node.post(ask, headers=old).status_code == 502
        node_keys.revoke(secrets, NAME)
        answer = node.post(ask, headers=old)
        assert (answer.status_code, answer.text) == (401, "this node's key is revoked")
        other = header(secrets, "station-1-client-1")
        assert node.post(ask, headers=other).status_code == 502
        for odd in ({}, {"flwr-public-key": "###"}, {"flwr-public-key": "a2V5"}):
            assert node.post(ask, headers=odd).status_code == 502
        node_keys.replace(secrets, "station-1-client-1")
        assert node.post(ask, headers=other).status_code == 401
        new = header(secrets, "station-1-client-1")
        assert node.post(ask, headers=new).status_code == 502


def test_the_gateway_says_its_version(secrets, monkeypatch):
    async def healthy(*_, **__):
        return httpx.Response(200, content=b"ok")

    monkeypatch.setattr(httpx.AsyncClient, "request", healthy)
    with TestClient(build("http://127.0.0.1:9")) as node:
        assert node.get("/health").headers["hfedatm-version"].startswith("0.")


def test_a_replaced_node_keeps_its_place_and_its_old_key_is_worth_nothing(secrets):
    old = (secrets / NAME / "node.pem").read_bytes()
    fingerprint, link = node_keys.replace(secrets, NAME)
    new = (secrets / NAME / "node.pem").read_bytes()
    ca = (secrets / "ca.pem").read_bytes()
    before, after = read_certificate(old, ca), read_certificate(new, ca)
    assert (after.name, after.above, after.place) == (before.name, before.above, before.place)
    assert link == "station-1"
    assert revocation.fingerprint(before.key) == fingerprint != revocation.fingerprint(after.key)
    for machine in ("server", "station-1", NAME):
        assert revocation.revoked(secrets / machine) == {fingerprint: NAME}
    known = secrets / "station-1" / "nodes" / f"{NAME}.pub"
    assert known.read_bytes() == (secrets / NAME / "node.pub").read_bytes()
    assert not node_keys.is_revoked(secrets, NAME)


def test_scaffold_does_not_let_a_revoked_node_in_again(secrets):
    node_keys.revoke(secrets, NAME)
    compose.write_secrets(secrets, compose.Deployment(2, 2))
    known = {key.stem for key in (secrets / "station-1" / "nodes").glob("*.pub")}
    assert known == {"station-1-client-1"}


def test_the_commands(secrets, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run = CliRunner().invoke
    assert "nothing ends within 60 days" in run(typer_app, ["renew"]).output
    everything = run(typer_app, ["renew", "--days", "9999"]).output
    assert f"renewed {secrets / 'server' / 'link.pem'}" in everything
    assert "bring their folders to the machines" in everything
    said = run(typer_app, ["revoke", NAME]).output
    assert f"revoked {NAME}; the gateway of station-1 refuses its key" in said
    said = run(typer_app, ["replace", NAME]).output
    assert f"{NAME} has a new key" in said and "bring" in said
    wrong = run(typer_app, ["revoke", "station-9"]).exception
    assert isinstance(wrong, UserError) and "known nodes: station-1, station-1-client-1" in str(
        wrong
    )
    monkeypatch.chdir("/")
    wrong = run(typer_app, ["revoke", NAME]).exception
    assert isinstance(wrong, UserError) and "--secrets" in str(wrong)


def test_a_key_is_withdrawn_under_the_number_that_the_link_gave_it(secrets, tmp_path, monkeypatch):
    asked = []

    def flwr(arguments, home):
        asked.append(arguments)
        if "register" in arguments and len(asked) > 1:
            raise flower.FlowerError("this key is already in use")
        return {"node-id": "42"}

    monkeypatch.setattr(flower, "_flwr", flwr)
    link = Registration("station-1", tmp_path)
    public = secrets / NAME / "node.pub"
    link.register(public)
    link.register(public)  # a restarted link registers its keys again; the number stays known
    key = revocation.fingerprint_of(public)
    assert Registration("station-1", tmp_path).numbers() == {key: 42}
    assert link.withdraw(key) and not link.withdraw(key)
    assert asked[-1] == ["supernode", "unregister", "42", "station-1"]
    assert Registration("server", tmp_path).numbers() == {}
